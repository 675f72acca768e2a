"""Blocks as single operators: with their profile's costs, or, where the executor runs one operator, as it runs it.

What is split inside of a block is summed before it ends, and a block keeps all it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pipeplan.costs.blocks import block_costs
from pipeplan.costs.devices import DevicePreset
from pipeplan.costs.operators import Operator
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow
from pipeplan.sharding import operator_kinds as ops
from pipeplan.sharding.layouts import ANY, Tensor
from pipeplan.sharding.operators import Axis, InnerExchange, Map, Numbers, Splittable, Times

_SCALED = (
    "forward_ns",
    "backward_ns",
    "input_grad_ns",
    "weight_grad_ns",
    "activation_bytes",
    "weight_grad_bytes",
    "workspace_bytes",
)


@dataclass(frozen=True)
class WholeBlock(Splittable):
    """A block by its rows: samples can be split, and what its rows for several shards split.

    Collectives among the shards are in the rows' times, and inputs and output are whole on each of them.
    """

    block: Block = field(kw_only=True, hash=False)
    sample_bytes: int = field(kw_only=True)

    kind = "block"
    inputs = (("samples", None, None),)
    output: ClassVar[Map] = ("samples", None, None)
    weighted = frozenset({"shards"})
    combined = frozenset({"shards"})
    keeps = (False,)  # its rows count them

    def allows(self, extents: Mapping[str, int]) -> bool:
        return extents["shards"] in _shard_counts(self.block)

    def share(self, numbers: Numbers) -> Operator:
        return Operator()

    def times(self, numbers: Numbers, device: DevicePreset) -> Times:
        row = self._row(numbers)
        if row.input_grad_ns is None or row.weight_grad_ns is None:
            return Times(row.forward_ns, row.backward_ns or 0, 0)
        return Times(row.forward_ns, row.input_grad_ns, row.weight_grad_ns)

    def inside_bytes(self, numbers: Numbers) -> int:
        return self._row(numbers).activation_bytes

    def workspace_bytes(self, numbers: Numbers) -> int:
        return self._row(numbers).workspace_bytes

    def deferred_bytes(self, numbers: Numbers) -> int | None:
        row = self._row(numbers)
        return None if row.input_grad_ns is None or row.weight_grad_ns is None else row.weight_grad_bytes

    def tensor(self) -> Tensor:
        samples = self.axis("samples").size
        return Tensor((samples, ANY, ANY), samples * self.sample_bytes)

    def _row(self, numbers: Numbers) -> CostRow:
        return row_for(self.block, numbers["samples"], self.axis("shards").size // numbers["shards"])


@dataclass(frozen=True)
class WordTable(WholeBlock):
    """An embedding: as any block, and by its width, for which its times are taken to grow in proportion."""

    output = ("samples", None, "hidden")
    weighted = frozenset({"shards", "hidden"})

    def times(self, numbers: Numbers, device: DevicePreset) -> Times:
        part = numbers["hidden"] / self.axis("hidden").size
        return Times(*(part * each for each in super().times(numbers, device)))

    def inside_bytes(self, numbers: Numbers) -> int:
        return super().inside_bytes(numbers) * numbers["hidden"] // self.axis("hidden").size

    def deferred_bytes(self, numbers: Numbers) -> int | None:
        whole = super().deferred_bytes(numbers)
        return None if whole is None else whole * numbers["hidden"] // self.axis("hidden").size

    def tensor(self) -> Tensor:
        samples, hidden = (self.axis(name).size for name in ("samples", "hidden"))
        return Tensor((samples, ANY, hidden), samples * self.sample_bytes)


def shards_axis(block: Block) -> Axis:
    """The axis along which a block's rows for several shards split it."""
    return Axis("shards", math.lcm(*_shard_counts(block)), called="shards")


def row_for(block: Block, samples: int, shards: int = 1) -> CostRow:
    """The block's costs for ``samples``; outside of its rows' sizes, the nearest row in proportion."""
    sizes = sorted(row.microbatch_size for row in block.costs if row.shards == shards and _plain(row))
    if not sizes:
        raise UsageError(
            f"block {block.id!r} has no costs for {shards} shards without recomputation; profile it with them"
        )
    nearest = min(max(samples, sizes[0]), sizes[-1])
    row = block_costs(block, nearest, shards)
    if nearest == samples:
        return row
    changed = {name: round(value * samples / nearest) for name in _SCALED if (value := getattr(row, name)) is not None}
    return row.model_copy(update={**changed, "microbatch_size": samples})


def _plain(row: CostRow) -> bool:
    return not row.recompute and not row.configuration


def _shard_counts(block: Block) -> set[int]:
    return {row.shards for row in block.costs if _plain(row)}


@dataclass(frozen=True)
class _Alone(Splittable):
    """An operator that keeps a copy of its own of whatever its backward needs, each where it lies."""

    keeps: ClassVar[tuple[bool, ...]] = (False,)
    keeps_output = False

    def inside_bytes(self, numbers: Numbers) -> int:
        return self.share(numbers).saved_bytes


@dataclass(frozen=True)
class _ExecutedLayer(_Alone, ops.Product):
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
class _ExecutedNorm(_Alone, ops.Norm):
    """A norm."""


@dataclass(frozen=True)
class _ExecutedAttention(_Alone, ops.Attention):
    """The middle of attention."""


@dataclass(frozen=True)
class _ExecutedActivation(_Alone, ops.Activation):
    """A function of each number."""


def single_operator(
    block: Block, samples: int, width: int, taken: Sequence[int], *, learns: bool = True
) -> Splittable | None:
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


def _linear(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable | None:
    """With a function of each number after it; more places than one are for the block to know."""
    if taken > sizes["inputs"] * width:
        return None
    return _ExecutedLayer(_product_axes(sizes, batch, 1), width, learns=learns, bent=True)


def _product(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
    return _ExecutedLayer(_product_axes(sizes, batch, sizes["sequence"]), width, learns=learns)


def _product_axes(sizes: Numbers, batch: Axis, places: int) -> tuple[Axis, ...]:
    rows, columns = Axis("rows", sizes["inputs"], called="inputs"), Axis("columns", sizes["outputs"], called="outputs")
    return batch, Axis("places", places, called="sequence"), rows, columns


def _attention(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
    size = sizes["hidden"] // sizes["heads"]
    axes = _image(sizes, batch, Axis("features", sizes["heads"], size, "heads"))
    return _ExecutedAttention(axes, width, learns=learns, head_size=size)


def _of_numbers(operation: type[Splittable]) -> Callable[[Numbers, Axis, int, int, bool], Splittable]:
    """An operator that knows of features alone."""

    def made(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
        return operation(_image(sizes, batch, Axis("features", sizes["hidden"], called="hidden")), width, learns=learns)

    return made


def _loss(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
    words = Axis("features", sizes["vocabulary"], called="vocabulary")
    return ops.Loss(_image(sizes, batch, words), width, learns=learns)


def _image(sizes: Numbers, batch: Axis, features: Axis) -> tuple[Axis, ...]:
    return batch, Axis("places", sizes["sequence"], called="sequence"), features


_KINDS: dict[tuple[str, tuple[str, ...]], Callable[[Numbers, Axis, int, int, bool], Splittable | None]] = {
    ("linear", ("inputs", "outputs")): _linear,
    ("product", ("inputs", "outputs", "sequence")): _product,
    ("norm", ("hidden", "sequence")): _of_numbers(_ExecutedNorm),
    ("attention-core", ("heads", "hidden", "sequence")): _attention,
    ("activation", ("hidden", "sequence")): _of_numbers(_ExecutedActivation),
    ("add", ("hidden", "sequence")): _of_numbers(ops.Add),
    ("loss", ("sequence", "vocabulary")): _loss,
}
