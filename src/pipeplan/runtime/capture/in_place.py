"""Operators that change tensors in place, as operators that make new ones.

A block may not change what another made, nor a tensor that starts its graph. So what is changed gets a successor,
which whoever comes later takes instead; a tensor that is changed through a view of it is put together again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from pipeplan.errors import UsageError
from pipeplan.runtime.capture.operations import OpNode, name_of_target

__all__ = ["Append", "Changes", "is_in_place"]

_aten = torch.ops.aten


class Append(Protocol):
    """Appends a call whose result is like another operation's."""

    def __call__(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], like: OpNode) -> OpNode:
        """Returns the new operation."""


_OTHERS: dict[Any, Callable[..., Any]] = {
    _aten.fill_.Scalar: _aten.full_like.default,
    _aten.fill_.Tensor: _aten.fill.Tensor,
    _aten.zero_.default: _aten.zeros_like.default,
}
_SCATTERS = {"select": _aten.select_scatter.default, "slice": _aten.slice_scatter.default}
_SAME = {"alias", "contiguous", "to"}
"""Views that may be all of what they are made from."""


def is_in_place(target: Any) -> bool:
    """Whether an operator writes to one of its arguments."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


class Changes:
    """Which tensor stands for which by now.

    Args:
        where: the model, for errors.
        append: adds an operation to those that the module runs.
    """

    def __init__(self, where: str, append: Append) -> None:
        self.where, self.append = where, append
        self._newer: dict[OpNode, OpNode] = {}
        self._base: dict[OpNode, OpNode] = {}
        self._stale: set[OpNode] = set()

    def newest(self, op: OpNode) -> OpNode:
        """What the tensor is by now.

        Raises:
            UsageError: a view of a tensor that was changed otherwise.
        """
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
        if source is not None and (aliases or (name_of_target(op.target) == "getitem" and source in self._base)):
            self._base[op] = source

    def change(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], like: OpNode) -> OpNode:
        """Append what an operator in place computes, and let it stand for what it changes.

        Raises:
            UsageError: it changes what the module holds or was given, or through a view that cannot be put back.
        """
        changed: OpNode = arguments[0]
        if name_of_target(target) == "copy_":
            made = self._copied(arguments[1], changed, like)
        else:
            functional = _OTHERS.get(target) or self._functional(target)
            if functional is None:
                raise self._refused(like)
            if functional is _aten.zeros_like.default:
                arguments, keywords = arguments[:1], {}
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
        """Let ``made`` stand for ``changed``, and for its part of every tensor that this is a view of."""
        old, chain = changed, {changed}
        while old in self._base:
            base, scatter = self._base[old], _SCATTERS.get(name_of_target(old.target))
            if scatter is None and name_of_target(old.target) not in _SAME:
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
