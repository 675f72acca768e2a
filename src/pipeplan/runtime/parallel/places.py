"""Where one device's share of a module exchanges tensors with the others: hooks, and operators that a capture sees.

Transformers' models know nothing of sequence parallelism (Korthikanti et al. 2022, section 4.2.2). But it only concerns
what is between modules: a layer is given a slice of the sequence, a module that begins with split products gets all of
it, and what split products made is summed for each device's slice.

The operators are captured with the rest of a share, in which :func:`exchange_of` puts what the device's place among the
others then does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.runtime.parallel.context import CONTEXT
from pipeplan.runtime.parallel.context_attention import causal_attention
from pipeplan.runtime.parallel.experts import routed, under_load
from pipeplan.runtime.parallel.grouped_rows import gated
from pipeplan.runtime.parallel.sharding import WHOLE, Shards
from pipeplan.runtime.parallel.split_layers import cross_entropy
from pipeplan.workload.mesh import EXPERT_PARTS, EXPERTS

Change = Callable[[Tensor], Tensor]

_library = torch.library.Library("pipeplan", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types here


def _longer(places: Tensor, count: int) -> Tensor:
    return places.new_empty((places.shape[0], places.shape[1] * count, *places.shape[2:]))


def _shorter(places: Tensor, count: int) -> Tensor:
    return places.new_empty((places.shape[0], places.shape[1] // count, *places.shape[2:]))


def _alike(tensor: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(tensor)


def _of_targets(logits: Tensor, targets: Tensor, words: int, count: int) -> Tensor:
    return logits.new_empty(targets.shape)


def _enter(shards: Shards, whole: Tensor, count: int) -> Tensor:
    """This device's slice, which does not keep the rest of the whole; that gets no gradient from it."""
    begin, end = shards.range(whole.shape[1])
    return whole.narrow(1, begin, end - begin).clone()


def _elsewhere(shards: Shards, indices: Tensor, words: int) -> Tensor:
    begin, end = shards.range(words)
    return (indices < begin) | (indices >= end)


def _own_words(shards: Shards, indices: Tensor, words: int, count: int) -> Tensor:
    """Rows of this device's part of a table, any for words of others."""
    begin, _ = shards.range(words)
    return (indices - begin).masked_fill(_elsewhere(shards, indices, words), 0)


def _sum_words(shards: Shards, found: Tensor, indices: Tensor, words: int, count: int) -> Tensor:
    """Of what was looked up on all devices, each from the one that has the word."""
    return shards.summed(found.masked_fill(_elsewhere(shards, indices, words).unsqueeze(-1), 0.0))


def _sum_own_words(shards: Shards, found: Tensor, indices: Tensor, words: int, count: int) -> Tensor:
    """The same at this device's places, and 0 at the others': no layer takes those."""
    masked, length = found.masked_fill(_elsewhere(shards, indices, words).unsqueeze(-1), 0.0), found.shape[1]
    begin, end = shards.range(length)
    return nn.functional.pad(shards.scattered(masked), (0, 0, begin, length - end))


def _even_gradient(shards: Shards, whole: Tensor, count: int) -> Tensor:
    """The same: of its gradient, of which each device finds a part, each gets an equal one."""
    return shards.evened(whole)


def _of_values(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return value.new_empty((*query.shape[:-1], value.shape[-1]))


def _in_context(
    shards: Shards, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, place: int, count: int
) -> Tensor:
    context = shards.along.get(CONTEXT, Shards(count, place))
    return causal_attention(query, key, value, context, scale=scale, window=window if window > 0 else None)


def _word_losses(shards: Shards, logits: Tensor, targets: Tensor, words: int, count: int) -> Tensor:
    return cross_entropy(logits, targets, words, shards)


def _routed(shards: Shards, words: Tensor, chosen: Tensor, shares: Tensor, *how: Any) -> Tensor:
    """What the experts of all devices that share them make of this one's words."""
    gate_up, down, activation, num_experts, before, _ = how
    devices, parts = (shards.along.get(name, WHOLE) for name in (EXPERTS, EXPERT_PARTS))
    experts = gated(gate_up, down, activation)
    return routed(words, chosen, shares, num_experts, devices, experts, parts=parts, before=bool(before))


_OPERATORS: dict[str, tuple[str, Callable[..., Tensor], Callable[..., Tensor]]] = {
    "join_places": ("Tensor places, int count", _longer, lambda shards, part, count: shards.joined(part)),
    "scatter_places": ("Tensor places, int count", _shorter, lambda shards, part, count: shards.scattered(part)),
    "enter_places": ("Tensor whole, int count", _shorter, _enter),
    "share_whole": ("Tensor whole, int count", _alike, lambda shards, whole, count: shards.shared(whole)),
    "sum_parts": ("Tensor part, int count", _alike, lambda shards, part, count: shards.summed(part)),
    "even_gradient": ("Tensor whole, int count", _alike, _even_gradient),
    "own_words": ("Tensor indices, int words, int count", _alike, _own_words),
    "sum_words": ("Tensor found, Tensor indices, int words, int count", _alike, _sum_words),
    "sum_own_words": ("Tensor found, Tensor indices, int words, int count", _alike, _sum_own_words),
    "routed_experts": (
        "Tensor words, Tensor chosen, Tensor shares, Tensor gate_up, Tensor down, str activation, int experts, "
        "int before, int count",
        _alike,
        _routed,
    ),
    "under_load": (
        "Tensor chosen, float load, int count",
        lambda chosen, load, count: under_load(chosen, load),
        lambda shards, chosen, load, count: under_load(chosen, load),
    ),
    "context_attention": (
        "Tensor query, Tensor key, Tensor value, float scale, int window, int place, int count",
        _of_values,
        _in_context,
    ),
    "word_losses": ("Tensor logits, Tensor targets, int words, int count", _of_targets, _word_losses),
}
"""What each takes, ending with the number of devices; a tensor like its result, of no numbers, for it is only ever
captured; and what a device does in its place."""

for _name, (_taken, _like, _) in _OPERATORS.items():
    _library.define(f"{_name}({_taken}) -> Tensor")  # type: ignore[no-untyped-call]  # the same
    _library.impl(_name, _like, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # the same


def exchange_of(operator: str) -> Callable[..., Tensor] | None:
    """What stands in a block for one of the operators: takes a device's Shards, None if alone, then its arguments."""
    if operator not in _OPERATORS:
        return None
    _, _, change = _OPERATORS[operator]

    def exchange(shards: Shards | None, *arguments: Any) -> Tensor:
        return change(Shards(arguments[-1]) if shards is None else shards, *arguments)

    exchange.__name__ = operator
    return exchange


def traced(operator: str, *further: Any) -> Change:
    """An operator by its name, with what it takes beside a tensor, for a module that is going to be captured."""
    call = getattr(torch.ops.pipeplan, operator)

    def change(tensor: Tensor) -> Tensor:
        made: Tensor = call(tensor, *further)
        return made

    return change


def _same(tensor: Tensor) -> Tensor:
    return tensor


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
        scatter = traced("scatter_places", count)
        return cls(scatter, traced("join_places", count), scatter, count)

    @classmethod
    def running(cls, count: int, divides: bool) -> Exchanges:
        """Operators for a capture that is going to run, in which a table's words are whole on every device.

        Without slices, where it does not divide the sequence: what enters is shared, and what leaves is summed.
        """
        if divides:
            enter, join, scatter = (traced(f"{each}_places", count) for each in ("enter", "join", "scatter"))
            return cls(enter, join, scatter, count)
        return cls(_same, traced("share_whole", count), traced("sum_parts", count), 1)


@dataclass(frozen=True, slots=True)
class DividedPlaces:
    """The modules of a share between which the sequence is divided, by path.

    Elements of ``layers`` are given slices; ``joins`` take all of the sequence, of which the others give slices, and
    what ``scatters`` make are parts of a sum; what ``last`` gives is joined, too. What attention takes of another
    sequence is joined with its own.
    """

    layers: tuple[str, ...]
    joins: tuple[str, ...]
    scatters: tuple[str, ...]
    last: str = ""

    def hook(self, module: nn.Module, tokens: Mapping[str, int], exchanges: Exchanges) -> None:
        """Let the module exchange slices of sequences so, from now on, that are as long as ``tokens`` say."""

        def enter(length: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = _first(args, kwargs)
            return _with_first(args, kwargs, exchanges.enter(given)) if given.shape[1] == length else None

        def join(length: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            places = length // exchanges.count
            memory = {_MEMORY: kwargs[_MEMORY]} if kwargs.get(_MEMORY) is not None else {}
            more = {key: by_samples(exchanges.join, each, places) for key, each in memory.items()}
            return _with_first(args, kwargs | more, by_samples(exchanges.join, _first(args, kwargs), places))

        def scatter(length: int, _: nn.Module, __: Any, made: Any) -> Any:
            if isinstance(made, tuple):  # with the scores of a router
                return by_samples(exchanges.scatter, made[0], length), *made[1:]
            return by_samples(exchanges.scatter, made, length)

        at = cache(partial)  # one object for all layers, which are alike with the same hooks
        for paths, hook in ((self.layers, enter), (self.joins, join)):
            for path in paths:
                before = at(hook, positions_at(path, tokens))
                module.get_submodule(path).register_forward_pre_hook(before, with_kwargs=True)
        for path in self.scatters:
            module.get_submodule(path).register_forward_hook(at(scatter, positions_at(path, tokens)))
        if self.last:
            module.get_submodule(self.last).register_forward_hook(lambda _, __, made: exchanges.join(made))


def by_samples(change: Change, given: Tensor, places: int) -> Tensor:
    """Change a tensor [samples, places, numbers], or one [samples x places, numbers], which OPT's layers make of it."""
    if given.dim() > 2:
        return change(given)
    return change(given.reshape(-1, places, given.shape[-1])).flatten(0, 1)


def positions_at(name: str, tokens: Mapping[str, int]) -> int:
    """Positions per sample where a module or parameter is used: those of the longest beginning of its name.

    In such a beginning ``*`` stands for one part of a name.
    """
    fitting = (key for key in tokens if re.match(re.escape(key).replace(r"\*", r"[^.]+"), name))
    return tokens[max(fitting, key=len)]


_MEMORY = "key_value_states"
"""What an attention of a decoder attends to, where it is another sequence: slices of that, as of its own."""


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((tensor, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": tensor})
