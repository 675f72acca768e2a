"""Costs of one block: between the sizes that were measured, and fitted to what was measured.

Fitting a device's rates to measured blocks, so that what was not measured can be told from what was.

First three rates that all blocks share: time per FLOP of matrix products, per byte moved by other kernels, and per
kernel, none negative, by least squares of relative errors. Then how far each block is from them, as a factor: of the
very block where it was measured, else of its kind of operator, else 1.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeplan.costs.operators import Kernel
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, Profile

__all__ = [
    "PHASES",
    "Calibration",
    "DeviceRates",
    "KnownRow",
    "Likeness",
    "Phase",
    "Work",
    "block_costs",
    "calibrate",
    "fit_rates",
    "likeness",
    "measured_rows",
]


def block_costs(
    block: Block, microbatch_size: int, shards: int = 1, *, recompute: bool = False, input_bytes: int = 0
) -> CostRow:
    """The block's row for a micro-batch size, interpolated linearly between its neighbours where it has none.

    With ``recompute`` the block's own rows for it are used; without such rows they follow from the others:
    F keeps only the inputs (``input_bytes`` for this micro-batch), B and I run the forward again first and need
    what it holds as workspace.

    Raises:
        UsageError: no rows for this shard count, or the size is outside the rows' range.
    """
    rows = sorted(
        (row for row in block.costs if row.shards == shards and row.recompute == recompute and not row.configuration),
        key=lambda row: row.microbatch_size,
    )
    if not rows and recompute:
        return _recomputed(block_costs(block, microbatch_size, shards), input_bytes)
    if not rows:
        known = sorted({row.shards for row in block.costs})
        raise UsageError(f"block {block.id!r} has no costs for {shards} shards, only for {known}; profile it with them")
    below = [row for row in rows if row.microbatch_size <= microbatch_size]
    above = [row for row in rows if row.microbatch_size >= microbatch_size]
    if not below or not above:
        sizes = [row.microbatch_size for row in rows]
        raise UsageError(
            f"block {block.id!r} has costs for micro-batch sizes {sizes}, not for {microbatch_size}; choose "
            f"--microbatch-size from {sizes[0]} to {sizes[-1]}, or profile it with --microbatch {microbatch_size}"
        )
    return _between(below[-1], above[0], microbatch_size)


_TIMES = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns")
_SIZES = ("activation_bytes", "weight_grad_bytes", "workspace_bytes")


def _between(low: CostRow, high: CostRow, microbatch_size: int) -> CostRow:
    if low.microbatch_size == high.microbatch_size:
        return low
    offset, width = microbatch_size - low.microbatch_size, high.microbatch_size - low.microbatch_size
    values: dict[str, object] = {
        "microbatch_size": microbatch_size,
        "shards": low.shards,
        "recompute": low.recompute,
    }
    for field in (*_TIMES, *_SIZES):
        before, after = getattr(low, field), getattr(high, field)
        if before is not None and after is not None:
            values[field] = before + round((after - before) * offset / width)
    return CostRow.model_validate(values)


def _recomputed(row: CostRow, input_bytes: int) -> CostRow:
    again = {
        field: getattr(row, field) + row.forward_ns
        for field in ("backward_ns", "input_grad_ns")
        if getattr(row, field) is not None
    }
    return row.model_copy(
        update={
            **again,
            "recompute": True,
            "activation_bytes": min(input_bytes, row.activation_bytes),
            "workspace_bytes": row.workspace_bytes + row.activation_bytes,
        }
    )


Phase = Literal["forward_ns", "input_grad_ns", "weight_grad_ns"]
PHASES: tuple[Phase, ...] = ("forward_ns", "input_grad_ns", "weight_grad_ns")

Work = Mapping[Phase, Sequence[Kernel]]
"""The kernels of F, I and W of a block for one micro-batch."""

Likeness = tuple[str, tuple[tuple[str, int], ...], int]
"""Operator, dimensions and parameter bytes: equal for blocks that cost the same."""

_SWEEPS = 500


def likeness(block: Block) -> Likeness:
    """What a block has in common with those that cost the same."""
    return block.operator, tuple(sorted(block.dimensions.items())), block.parameter_bytes


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """ns per FLOP of matrix kernels, per byte that others move, and per kernel."""

    flop_ns: float
    byte_ns: float
    kernel_ns: float

    def time_ns(self, kernels: Iterable[Kernel]) -> float:
        """Of kernels one after another."""
        flops, moved, count = _features(kernels)
        return flops * self.flop_ns + moved * self.byte_ns + count * self.kernel_ns


def _features(kernels: Iterable[Kernel]) -> tuple[int, int, int]:
    flops = moved = count = 0
    for kernel in kernels:
        count += 1
        flops += kernel.flops if kernel.matrix else 0
        moved += 0 if kernel.matrix else kernel.moved_bytes
    return flops, moved, count


def fit_rates(samples: Sequence[tuple[Sequence[Kernel], int]]) -> DeviceRates:
    """The rates nearest to measured times in ns, by squares of relative errors; none is negative.

    Raises:
        UsageError: no sample takes time.
    """
    rows = [tuple(each / ns for each in _features(kernels)) for kernels, ns in samples if ns > 0 and kernels]
    if not rows:
        raise UsageError("the calibration has no times to fit to; measure at least one block of the model")
    scale = [max(max(column), 1e-30) for column in zip(*rows, strict=True)]
    scaled = [[value / unit for value, unit in zip(row, scale, strict=True)] for row in rows]
    found = [0.0, 0.0, 0.0]
    for _ in range(_SWEEPS):  # one unknown after the other, none below 0: converges, since the problem is convex
        for index in range(3):
            rest = [1 - sum(x * row[j] for j, x in enumerate(found) if j != index) for row in scaled]
            own = [row[index] for row in scaled]
            square = sum(value * value for value in own)
            found[index] = max(0.0, sum(a * b for a, b in zip(own, rest, strict=True)) / square) if square else 0.0
    return DeviceRates(*(value / unit for value, unit in zip(found, scale, strict=True)))


@dataclass(frozen=True, slots=True)
class KnownRow:
    """A measured row of a block, and the work that is behind it."""

    block: Block
    row: CostRow
    work: Work


@dataclass(frozen=True, slots=True)
class Calibration:
    """What turns work into times.

    ``blocks`` [likeness, phase] and ``operators`` [operator, phase] are factors on the rates' times, the former by
    micro-batch size; ``together`` [operator] is B over I and W. ``error`` is the median of how far the rates alone are
    from the measured times.
    """

    rates: DeviceRates
    blocks: Mapping[tuple[Likeness, Phase], Mapping[int, float]]
    operators: Mapping[tuple[str, Phase], float]
    together: Mapping[str, float]
    error: float

    def row(self, block: Block, row: CostRow, work: Work) -> CostRow:
        """An estimated row with the times that the measurement makes likely."""
        times: dict[str, int] = {
            phase: round(self.time_ns(block, phase, row.microbatch_size, work[phase])) for phase in PHASES
        }
        backward = (times["input_grad_ns"] + times["weight_grad_ns"]) * self.together.get(block.operator, 1.0)
        return row.model_copy(update={**times, "backward_ns": round(backward)})

    def time_ns(self, block: Block, phase: Phase, size: int, kernels: Sequence[Kernel]) -> float:
        """Time of one phase; the factor is that of the nearest measured size."""
        usual = self.operators.get((block.operator, phase), 1.0)
        by_size = self.blocks.get((likeness(block), phase), {})
        nearest = min(by_size, key=lambda known: abs(math.log(known / size)), default=0)
        return self.rates.time_ns(kernels) * by_size.get(nearest, usual)


def calibrate(known: Sequence[KnownRow]) -> Calibration:
    """Fit rates and factors to measured rows.

    Raises:
        UsageError: nothing is known.
    """
    samples = [
        (each, phase, ns) for each in known for phase in PHASES if (ns := getattr(each.row, phase)) and each.work[phase]
    ]
    rates = fit_rates([(each.work[phase], ns) for each, phase, ns in samples])
    blocks: dict[tuple[Likeness, Phase], dict[int, float]] = defaultdict(dict)
    operators: dict[tuple[str, Phase], list[float]] = defaultdict(list)
    for each, phase, ns in samples:
        factor = ns / max(rates.time_ns(each.work[phase]), 1e-9)
        blocks[likeness(each.block), phase][each.row.microbatch_size] = factor
        operators[each.block.operator, phase].append(factor)
    together: dict[str, list[float]] = defaultdict(list)
    for each in known:
        apart = (each.row.input_grad_ns or 0) + (each.row.weight_grad_ns or 0)
        if each.row.backward_ns and apart:
            together[each.block.operator].append(each.row.backward_ns / apart)
    return Calibration(
        rates,
        blocks,
        {key: statistics.geometric_mean(values) for key, values in operators.items()},
        {key: statistics.geometric_mean(values) for key, values in together.items()},
        statistics.median(abs(1 / factor - 1) for values in operators.values() for factor in values),
    )


def measured_rows(profile: Profile) -> list[tuple[Block, CostRow]]:
    """A row for each likeness and micro-batch size of unsplit blocks that keep their activations."""
    found: dict[tuple[Likeness, int], tuple[Block, CostRow]] = {}
    for block in profile.blocks:
        for row in block.costs:
            if row.shards == 1 and not row.recompute and row.configuration is None:
                found.setdefault((likeness(block), row.microbatch_size), (block, row))
    return list(found.values())
