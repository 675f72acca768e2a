"""One efficiency per family of operators, fitted to measured blocks: what turns a preset's times into a machine's own.

A block's kernels take what the preset says, divided by the efficiency of their family. What was measured is told no
better than four numbers can: a block that was measured itself is best taken from its profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeplan.costs.devices import CORE, PHASES, Kernel, Phase, Work
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, Profile

Family = Literal["products", "attention", "element-wise", "rows of tables"]
FAMILIES: tuple[Family, ...] = ("products", "attention", "element-wise", "rows of tables")
"""Matrix products; fused attention; what is element-wise or reduces, such as norms; embeddings and other gathers."""

Likeness = tuple[str, tuple[tuple[str, int], ...], tuple[int, int, int]]
"""Operator, dimensions and parameters: equal for blocks that cost the same."""

KernelTime = Callable[[Kernel], float]
"""Ns of a kernel, as the preset has it."""

_SWEEPS = 500
_LEAST, _MOST = 0.01, 100.0
"""Between these efficiencies are looked for."""


def family_of(kernel: Kernel) -> Family:
    """A kernel's family."""
    if kernel.form.startswith("attention"):
        return "attention"
    if kernel.matrix:
        return "products"
    return "rows of tables" if kernel.form == "rows" else "element-wise"


def likeness(block: Block) -> Likeness:
    """What a block has in common with those that cost the same."""
    counted = block.parameters + block.frozen_parameters > 0
    parameters = block.parameters, block.frozen_parameters, 0 if counted else block.parameter_bytes
    return block.operator, tuple(sorted(block.dimensions.items())), parameters


@dataclass(frozen=True, slots=True)
class KnownRow:
    """A measured row of a block, and the work that took its times."""

    block: Block
    row: CostRow
    work: Work

    @property
    def timed(self) -> Iterable[tuple[Phase, int]]:
        """The phases that took time, and how long."""
        found = ((phase, getattr(self.row, phase) or 0) for phase in PHASES)
        return [(phase, ns) for phase, ns in found if ns and self.work[phase]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What turns work into times.

    ``efficiencies`` are of the families that were measured, others have 1. ``before`` and ``after`` are the mean
    absolute errors of F, I and W of all measured rows, with the preset's times and with these.
    """

    kernel_ns: KernelTime
    efficiencies: Mapping[Family, float]
    before: float
    after: float
    rows: int

    def time_ns(self, kernels: Iterable[Kernel]) -> float:
        """The time of kernels that run one after another."""
        times = _by_family(kernels, self.kernel_ns)
        return sum(ns / self.efficiencies.get(family, 1.0) for family, ns in times.items())

    def row(self, row: CostRow, work: Work) -> CostRow:
        """An estimated row with the times that the measurement makes likely."""
        times: dict[str, int] = {phase: round(self.time_ns(work[phase])) for phase in PHASES}
        if CORE in work:
            times[CORE] = round(self.time_ns(work[CORE]))
        return row.model_copy(update={**times, "backward_ns": times["input_grad_ns"] + times["weight_grad_ns"]})

    @property
    def notes(self) -> str:
        """What was fitted, on what, and the error before and after."""
        found = ", ".join(f"{family} {value:.3g}" for family, value in self.efficiencies.items())
        lacking = [each for each in FAMILIES if each not in self.efficiencies]
        left = f" (none of {' and '.join(lacking)} was measured)" if lacking else ""
        return (
            f"One efficiency per family of operators, of the preset's rates: {found}{left}, fitted on F, I and W of "
            f"{self.rows} measured rows, whose error is {self.after:.1%} in the mean, and was {self.before:.1%}."
        )


def calibrate(known: Sequence[KnownRow], kernel_ns: KernelTime) -> Calibration:
    """Fit an efficiency to each family of measured rows, by squares of relative errors.

    Raises:
        UsageError: nothing takes time.
    """
    rows = [
        {family: time / ns for family, time in _by_family(each.work[phase], kernel_ns).items()}
        for each in known
        for phase, ns in each.timed
    ]
    if not rows:
        raise UsageError("the calibration has no times to fit to; measure at least one block of the model")
    families = [family for family in FAMILIES if any(row.get(family) for row in rows)]
    slower = dict.fromkeys(families, 1.0)
    for _ in range(_SWEEPS):  # one unknown after the other, each within bounds: converges, since the problem is convex
        for family in families:
            own = [row.get(family, 0.0) for row in rows]
            rest = [
                1 - sum(slower[other] * row.get(other, 0.0) for other in families if other != family) for row in rows
            ]
            best = sum(a * b for a, b in zip(own, rest, strict=True)) / sum(value * value for value in own)
            slower[family] = min(1 / _LEAST, max(1 / _MOST, best))
    usual = _error(rows, dict.fromkeys(families, 1.0))
    efficiencies = {family: 1 / value for family, value in slower.items()}
    return Calibration(kernel_ns, efficiencies, usual, _error(rows, slower), len(known))


def _error(rows: Sequence[Mapping[Family, float]], slower: Mapping[Family, float]) -> float:
    """Mean of how far off these are, of parts of measured times."""
    return sum(abs(sum(slower[family] * part for family, part in row.items()) - 1) for row in rows) / len(rows)


def _by_family(kernels: Iterable[Kernel], kernel_ns: KernelTime) -> dict[Family, float]:
    found: dict[Family, float] = {}
    for kernel in kernels:
        family = family_of(kernel)
        found[family] = found.get(family, 0.0) + kernel_ns(kernel)
    return found


def measured_rows(profile: Profile) -> list[tuple[Block, CostRow]]:
    """A row for each likeness and micro-batch size of unsplit blocks that keep their activations."""
    found: dict[tuple[Likeness, int], tuple[Block, CostRow]] = {}
    for block in profile.blocks:
        for row in block.rows():
            if row.shards == 1 and not row.recompute and row.configuration is None:
                found.setdefault((likeness(block), row.microbatch_size), (block, row))
    return list(found.values())
