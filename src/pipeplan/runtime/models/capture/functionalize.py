"""A captured forward's operators, with in-place changes of tensors replaced.

A block may not change what another made, nor a tensor that starts its graph. So what is changed gets a successor,
which whoever comes later takes instead; a tensor that is changed through a view of it is put together again.
torch's ``run_decompositions({})`` does so, too, but takes as long as the export, and forgets where gradients are off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from pipeplan.errors import UsageError

_aten = torch.ops.aten


Append = Callable[[Any, tuple[Any, ...], dict[str, Any], "OpNode"], "OpNode"]
"""Appends a call of a target with arguments and keywords, whose result is like another operation's; returns it."""

_OTHERS: dict[Any, Callable[..., Any]] = {
    _aten.fill_.Scalar: _aten.full_like.default,
    _aten.fill_.Tensor: _aten.fill.Tensor,
    _aten.zero_.default: _aten.zeros_like.default,
    _aten.bernoulli_.float: _aten.bernoulli.p,
    _aten.normal_.default: _aten.normal_functional.default,
}
_SCATTERS = {"select": _aten.select_scatter.default, "slice": _aten.slice_scatter.default}
_SAME = {"alias", "contiguous", "to"}
"""Views that may be all of what they are made from."""


def is_in_place(target: Any) -> bool:
    """Whether an operator writes to one of its arguments."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


class Changes:
    """Which tensor currently replaces which; ``append`` adds an operation to those that the module runs."""

    def __init__(self, where: str, append: Append) -> None:
        self.where, self.append = where, append
        self._newer: dict[OpNode, OpNode] = {}
        self._base: dict[OpNode, OpNode] = {}
        self._stale: set[OpNode] = set()

    def newest(self, op: OpNode) -> OpNode:
        """What the tensor is by now. Raises UsageError for a view of a tensor that was changed otherwise."""
        if op in self._stale:
            raise self._refused(op)
        while op in self._newer:
            op = self._newer[op]
        return op

    def note_view(self, op: OpNode) -> None:
        """Remember what a new operation is a view of, if it is."""
        schema = getattr(op.target, "_schema", None)
        aliases = schema is not None and any(argument.alias_info is not None for argument in schema.arguments)
        source = op.sources[0] if op.sources else None
        if source is not None and (aliases or (op.operator == "getitem" and source in self._base)):
            self._base[op] = source

    def change(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], like: OpNode) -> OpNode:
        """Append what an in-place operator computes, and let the result replace what it changes. Raises UsageError."""
        changed: OpNode = arguments[0]
        if name_of_target(target) == "copy_":
            made = self._copied(arguments[1], changed, like)
        else:
            functional = _OTHERS.get(target) or self._functional(target)
            if functional is None:
                raise self._refused(like)
            if functional is _aten.zeros_like.default:
                arguments, keywords = arguments[:1], {}
            elif functional is _aten.bernoulli.p and len(arguments) == 1:
                arguments = (*arguments, 0.5)  # the operator in place has it by default
            made = self.append(functional, arguments, keywords, like)
        self._replace(changed, made)
        return made

    def _copied(self, source: OpNode, changed: OpNode, like: OpNode) -> OpNode:
        expanded = self.append(_aten.expand_as.default, (source, changed), {}, like)
        return self.append(_aten.type_as.default, (expanded, changed), {}, like)

    @staticmethod
    def _functional(target: Any) -> Callable[..., Any] | None:
        """The operator of the same name and overload without the underscore at its end."""
        name = name_of_target(target)
        packet = getattr(_aten, name.removesuffix("_"), None) if name.endswith("_") else None
        found: Callable[..., Any] | None = getattr(packet, target._overloadname, None)
        return found

    def _replace(self, changed: OpNode, made: OpNode) -> None:
        """Let ``made`` replace ``changed``, and its part of every tensor that this is a view of."""
        old, chain = changed, {changed}
        while old in self._base:
            base, scatter = self._base[old], _SCATTERS.get(old.operator)
            if scatter is None and old.operator not in _SAME:
                raise self._refused(old)
            self._newer[old] = made
            if scatter is not None:
                made = self.append(scatter, (base, made, *old.arguments[1:]), old.keywords, base)
            old = base
            chain.add(old)
        if old.kind != "call":
            raise self._refused(old)
        self._newer[old] = made
        self._stale |= self._views_of(old) - chain

    def _views_of(self, op: OpNode) -> set[OpNode]:
        found = {op}
        for view, base in self._base.items():  # in the order they were made
            if base in found:
                found.add(view)
        return found

    def _refused(self, op: OpNode) -> UsageError:
        what = f"{op.kind} {op.name!r}" if op.kind != "call" else f"a result of {op.target} in module {op.path!r}"
        return UsageError(
            f"{self.where} cannot be captured: it changes {what} in place, or a tensor that shares its memory; "
            "let the forward make a new tensor instead"
        )


@dataclass(frozen=True, slots=True)
class SampleCount:
    """Stands in arguments for ``factor`` times the number of samples."""

    factor: int


@dataclass(frozen=True, slots=True)
class Marker:
    """Stands in arguments for something that is known when a block runs."""

    name: str


DTYPE, WIDER, DEVICE, LEAST = Marker("dtype"), Marker("wider"), Marker("device"), Marker("least")
"""Stand in arguments for the format that the model runs in, this or float32 if that is wider, its device, and the
least number of its format."""

TRAINING = Marker("training")
"""Stands in arguments for whether the block is in training mode."""


@dataclass(frozen=True, slots=True)
class InTraining:
    """Stands in arguments for a ``rate`` in training mode, and for 0 otherwise."""

    rate: float


@dataclass(eq=False, slots=True, repr=False)
class OpNode:
    """One call, or something that is given: ``kind`` is call, parameter, buffer, constant or input.

    ``name`` is the parameter's or buffer's in the module, or the input's. ``arguments`` have operations, literals and
    the markers above. ``shape`` is that of the output with 2 samples, ``per_sample`` how often the samples are in
    its first dimension, 0 if they are not; ``misplaced`` if they are in others only. ``turns`` are the modules that
    run it, from the outside in, each with its path and a name for each time it is called.
    """

    kind: str
    name: str
    target: Any = None
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    turns: tuple[tuple[str, str], ...] = ()
    value: Any = None
    per_sample: int = 0
    misplaced: bool = False
    needs_grad: bool = False
    sources: list[OpNode] = field(init=False)
    """The operations whose results it takes, in order, each once; arguments may change only in what else they have."""

    def __post_init__(self) -> None:
        leaves = leaves_of((self.arguments, self.keywords))
        self.sources = list(dict.fromkeys(each for each in leaves if isinstance(each, OpNode)))

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name or self.operator}>"  # its sources have sources, many of them the same

    @property
    def operator(self) -> str:
        """``linear`` of ``aten.linear.default``."""
        return name_of_target(self.target)

    @property
    def path(self) -> str:
        """The path of the innermost module that runs it."""
        return self.turns[-1][0] if self.turns else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output; empty if it is not one tensor."""
        return tuple(self.value.shape) if isinstance(self.value, Tensor) else ()


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A module's operations in the order they ran, the one that it returns, and its ``tensors`` by name.

    ``num_dropouts`` counts calls of functions that only drop in training mode, made with training mode off.
    """

    operations: tuple[OpNode, ...]
    output: OpNode
    tensors: Mapping[str, Tensor]
    num_dropouts: int = 0


@lru_cache(maxsize=4096)
def name_of_target(target: Any) -> str:
    """``linear`` of ``aten.linear.default``."""
    return str(getattr(target, "__name__", target)).split(".")[0]


def leaves_of(value: Any) -> list[Any]:
    """What nested tuples, lists and dicts of arguments have."""
    found: list[Any] = []
    map_aggregate(value, found.append)
    return found
