"""What a captured forward is made of: its operators, and what in them depends on samples, format and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = [
    "DEVICE",
    "DTYPE",
    "LEAST",
    "WIDER",
    "CapturedGraph",
    "Marker",
    "OpNode",
    "SampleCount",
    "name_of_target",
]


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


@dataclass(eq=False, slots=True)
class OpNode:
    """One call, or something that is given: ``kind`` is call, parameter, buffer, constant or input.

    ``name`` is the parameter's or buffer's in the module, or the input's. ``arguments`` have operations, literals and
    the markers above. ``shape`` is that of the output with 2 samples, ``per_sample`` how often the samples are in
    its first dimension, 0 if they are not; ``misplaced`` if they are in others only. ``turns`` are the modules that
    run it, from the outside in, each with its path and a name that tells apart the times it is called.
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

    @property
    def path(self) -> str:
        """Of the innermost module that runs it."""
        return self.turns[-1][0] if self.turns else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output; empty if it is not one tensor."""
        return tuple(self.value.shape) if isinstance(self.value, Tensor) else ()

    @property
    def sources(self) -> list[OpNode]:
        """The operations whose results it takes, in order, each once."""
        found: list[OpNode] = []
        _visit((self.arguments, self.keywords), found.append)
        return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """The operations of a module in the order they ran, and the one whose result it returns.

    ``tensors`` has parameters, buffers and constants by name.
    """

    operations: tuple[OpNode, ...]
    output: OpNode
    tensors: Mapping[str, Tensor]


def name_of_target(target: Any) -> str:
    """``linear`` of ``aten.linear.default``."""
    return str(getattr(target, "__name__", target)).split(".")[0]


def _visit(value: Any, see: Callable[[OpNode], None]) -> None:
    if isinstance(value, OpNode):
        see(value)
    elif isinstance(value, tuple | list):
        for each in value:
            _visit(each, see)
    elif isinstance(value, dict):
        for each in value.values():
            _visit(each, see)
