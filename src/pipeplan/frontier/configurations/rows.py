"""A block as one operator, with the costs that its profile has for it.

These are the configurations that the executor runs: what is split inside of a block is summed before it ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pipeplan.costs.blocks import block_costs
from pipeplan.costs.operators import Operator
from pipeplan.costs.presets import DevicePreset
from pipeplan.errors import UsageError
from pipeplan.frontier.configurations.layouts import ANY, Tensor
from pipeplan.frontier.configurations.operation import Axis, Map, Numbers, Operation, Times
from pipeplan.model import Block, CostRow

__all__ = ["WholeBlock", "WordTable", "row_for", "shards_axis"]

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
class WholeBlock(Operation):
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
    """The block's costs for so many samples; outside of its rows' sizes, the nearest row in proportion."""
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
