"""Where one device's share of a module divides the sequence: hooks on the module, and operators that a capture sees.

Transformers' models know nothing of sequence parallelism (Korthikanti et al. 2022, section 4.2.2). But it only concerns
what is between modules: a layer is given a slice of the sequence, a module that begins with split products gets all of
it, and what split products made is summed for each device's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.runtime.parallel.sharding import Shards

Change = Callable[[Tensor], Tensor]

_library = torch.library.Library("pipeplan", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types here


def _define(operator: str, length: Callable[[int, int], int]) -> None:
    """An operator that makes a tensor of another length of no numbers: it is only ever captured."""

    def made(tensor: Tensor, count: int) -> Tensor:
        return tensor.new_empty((tensor.shape[0], length(tensor.shape[1], count), *tensor.shape[2:]))

    _library.define(f"{operator}(Tensor places, int count) -> Tensor")  # type: ignore[no-untyped-call]  # the same
    _library.impl(operator, made, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # the same


_define("join_places", lambda length, count: length * count)
_define("scatter_places", lambda length, count: length // count)


def joined_alone(part: Tensor, count: int) -> Tensor:
    """What the operator ``join_places`` computes on one of ``count`` devices alone."""
    return Shards(count).joined(part)


def scattered_alone(part: Tensor, count: int) -> Tensor:
    """What the operator ``scatter_places`` computes on one of ``count`` devices alone."""
    return Shards(count).scattered(part)


@dataclass(frozen=True, slots=True)
class Exchanges:
    """How ``count`` slices of the sequence are made: by those that ``enter`` a layer, ``join`` and ``scatter`` them."""

    enter: Change
    join: Change
    scatter: Change
    count: int

    @classmethod
    def traced(cls, count: int) -> Exchanges:
        """Operators for a capture; a table's sums over the devices are scattered when they enter the first layer."""

        def join(part: Tensor) -> Tensor:
            made: Tensor = torch.ops.pipeplan.join_places(part, count)
            return made

        def scatter(part: Tensor) -> Tensor:
            made: Tensor = torch.ops.pipeplan.scatter_places(part, count)
            return made

        return cls(scatter, join, scatter, count)


@dataclass(frozen=True, slots=True)
class DividedPlaces:
    """The modules of a share between which the sequence is divided, by path.

    Elements of ``layers`` are given slices; ``joins`` take all of the sequence, of which the others give slices, and
    what ``scatters`` make are parts of a sum; what ``last`` gives is joined, too. What attention takes of another
    sequence, which is as long, is joined with its own.
    """

    layers: tuple[str, ...]
    joins: tuple[str, ...]
    scatters: tuple[str, ...]
    last: str = ""

    def hook(self, module: nn.Module, sequence: int, exchanges: Exchanges) -> None:
        """Let the module exchange slices of a ``sequence`` so, from now on."""

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = _first(args, kwargs)
            return _with_first(args, kwargs, exchanges.enter(given)) if given.shape[1] == sequence else None

        def join(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            places = sequence // exchanges.count
            memory = {_MEMORY: kwargs[_MEMORY]} if kwargs.get(_MEMORY) is not None else {}
            more = {key: _by_samples(exchanges.join, each, places) for key, each in memory.items()}
            return _with_first(args, kwargs | more, _by_samples(exchanges.join, _first(args, kwargs), places))

        def scatter(_: nn.Module, __: Any, made: Tensor) -> Tensor:
            return _by_samples(exchanges.scatter, made, sequence)

        _hook_before(module, self.layers, enter)
        _hook_before(module, self.joins, join)
        for path in self.scatters:
            module.get_submodule(path).register_forward_hook(scatter)
        if self.last:
            module.get_submodule(self.last).register_forward_hook(lambda _, __, made: exchanges.join(made))


def _by_samples(change: Change, given: Tensor, places: int) -> Tensor:
    """Change a tensor [samples, places, numbers], or one [samples x places, numbers], which OPT's layers make of it."""
    if given.dim() > 2:
        return change(given)
    return change(given.reshape(-1, places, given.shape[-1])).flatten(0, 1)


def _hook_before(module: nn.Module, paths: Iterable[str], hook: Callable[..., Any]) -> None:
    for path in paths:
        module.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)


_MEMORY = "key_value_states"
"""What an attention of a decoder attends to, where it is another sequence: slices of that, as of its own."""


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((tensor, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": tensor})
