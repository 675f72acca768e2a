"""Blocks of one operator, as the executor runs them: sums are made before they end, and all they need they keep.

A linear layer by itself, and the operators of models that have a block for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pipeplan.frontier.configurations import operations as ops
from pipeplan.frontier.configurations.operation import Axis, InnerExchange, Numbers, Operation
from pipeplan.model import Block

__all__ = ["single_operator"]


@dataclass(frozen=True)
class _Alone(Operation):
    """An operator that keeps a copy of its own of whatever its backward needs, each where it lies."""

    keeps: ClassVar[tuple[bool, ...]] = (False,)
    keeps_output = False

    def inside_bytes(self, numbers: Numbers) -> int:
        return self.share(numbers).saved_bytes


@dataclass(frozen=True)
class _Layer(_Alone, ops.Product):
    """A matrix product that shares of the rows sum; ``bent``: with a function of each number, whose output is kept."""

    bent: bool = False

    kind = "layer"
    combined = frozenset({"rows"})

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        return (InnerExchange("rows", "all_reduce", self._output_bytes(numbers), 1, 0),)

    def inside_bytes(self, numbers: Numbers) -> int:
        return super().inside_bytes(numbers) + (self._output_bytes(numbers) if self.bent else 0)

    def _output_bytes(self, numbers: Numbers) -> int:
        return self.width * numbers["samples"] * numbers["places"] * numbers["columns"]


@dataclass(frozen=True)
class _Norm(_Alone, ops.Norm):
    """A norm."""


@dataclass(frozen=True)
class _Attention(_Alone, ops.Attention):
    """The middle of attention."""


@dataclass(frozen=True)
class _Activation(_Alone, ops.Activation):
    """A function of each number."""


def single_operator(
    block: Block, samples: int, width: int, taken: Sequence[int], *, learns: bool = True
) -> Operation | None:
    """The operator that a block is, by its kind and the names of its dimensions; None if it is not known to be one.

    Args:
        block: of a profile.
        samples: of a micro-batch.
        width: bytes per number.
        taken: bytes per sample of each input.
        learns: whether something before it needs a gradient.
    """
    make = _KINDS.get((block.operator, tuple(sorted(block.dimensions))))
    batch = Axis("samples", samples, called="samples")
    return make(block.dimensions, batch, width, sum(taken), learns) if make is not None else None


def _linear(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Operation | None:
    """With a function of each number behind it; more places than one are for the block to know."""
    if taken > sizes["inputs"] * width:
        return None
    return _Layer(_product_axes(sizes, batch, 1), width, learns=learns, bent=True)


def _product(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Operation:
    return _Layer(_product_axes(sizes, batch, sizes["sequence"]), width, learns=learns)


def _product_axes(sizes: Numbers, batch: Axis, places: int) -> tuple[Axis, ...]:
    rows, columns = Axis("rows", sizes["inputs"], called="inputs"), Axis("columns", sizes["outputs"], called="outputs")
    return batch, Axis("places", places, called="sequence"), rows, columns


def _attention(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Operation:
    size = sizes["hidden"] // sizes["heads"]
    axes = _image(sizes, batch, Axis("features", sizes["heads"], size, "heads"))
    return _Attention(axes, width, learns=learns, head_size=size)


def _of_numbers(operation: type[Operation]) -> Callable[[Numbers, Axis, int, int, bool], Operation]:
    """An operator that knows of features alone."""

    def made(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Operation:
        return operation(_image(sizes, batch, Axis("features", sizes["hidden"], called="hidden")), width, learns=learns)

    return made


def _loss(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Operation:
    words = Axis("features", sizes["vocabulary"], called="vocabulary")
    return ops.Loss(_image(sizes, batch, words), width, learns=learns)


def _image(sizes: Numbers, batch: Axis, features: Axis) -> tuple[Axis, ...]:
    return batch, Axis("places", sizes["sequence"], called="sequence"), features


_KINDS: dict[tuple[str, tuple[str, ...]], Callable[[Numbers, Axis, int, int, bool], Operation | None]] = {
    ("linear", ("inputs", "outputs")): _linear,
    ("product", ("inputs", "outputs", "sequence")): _product,
    ("norm", ("hidden", "sequence")): _of_numbers(_Norm),
    ("attention-core", ("heads", "hidden", "sequence")): _attention,
    ("activation", ("hidden", "sequence")): _of_numbers(_Activation),
    ("add", ("hidden", "sequence")): _of_numbers(ops.Add),
    ("loss", ("sequence", "vocabulary")): _loss,
}
