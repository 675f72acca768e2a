"""The dynamic programme that PipeDream's and Piper's planners share: the least slowest stage over chains of cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.partition.published.costs import FOREVER, Integers, Mask, Option, Question

__all__ = ["PublishedPlan", "PublishedStage", "least_bottleneck"]


@dataclass(frozen=True, slots=True)
class PublishedStage:
    """Blocks in topological order, and how they run."""

    blocks: tuple[str, ...]
    option: Option


@dataclass(frozen=True, slots=True)
class PublishedPlan:
    """Stages one after another, and what the planner minimises, in ns for the mini-batch.

    For PipeDream and Piper that is the slowest stage, for DAPPLE the latency of the pipeline.
    """

    stages: tuple[PublishedStage, ...]
    value_ns: int

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""
        return sum(stage.option.replicas for stage in self.stages)


def least_bottleneck(question: Question, cuts: Mask) -> PublishedPlan | None:
    """The partition along a chain of ``cuts`` whose slowest stage is least slow; None if none fits.

    ``cuts`` [cut, block] are sets of blocks that may lie before a border between stages, by size, the empty set first
    and all blocks last. The programme goes over (stages after the cut, the cut, devices left), because the memory of
    a stage depends on how many come after it; without a memory limit one table does for any number of them.
    """
    return _unlimited(question, cuts) if question.memory_bytes is None else _layered(question, cuts)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of one cut: all next cuts with all options, flat."""

    targets: Integers
    options: Integers
    times: Integers
    most_later: Integers


def _rows(question: Question, cuts: Mask, source: int) -> _Rows:
    later = np.flatnonzero((cuts | ~cuts[source]).all(axis=1))
    later = later[later > source]
    priced = question.price(cuts[later] & ~cuts[source])
    width = len(question.options)
    return _Rows(
        np.repeat(later, width),
        np.tile(np.arange(width), len(later)),
        priced.times.ravel(),
        priced.most_later.ravel(),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """[cut, devices] the least slowest stage of what is after a cut, and how it starts: next cut and option."""

    values: Integers
    nexts: Integers
    options: Integers

    @classmethod
    def empty(cls, cuts: int, devices: int) -> _Table:
        """Nothing after the last cut; all else is impossible."""
        shape = (cuts, devices + 1)
        table = cls(np.full(shape, FOREVER), np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64))
        table.values[-1] = 0
        return table

    def fill(self, question: Question, source: int, rows: _Rows, after: _Table) -> None:
        """The best stage from ``source`` on, before what ``after`` says of the rest."""
        left = np.arange(self.values.shape[1])[None, :] - question.replicas[rows.options][:, None]
        rest = np.where(left >= 0, after.values[rows.targets[:, None], np.maximum(left, 0)], FOREVER)
        values = np.maximum(rows.times[:, None], rest)
        best = values.argmin(axis=0)
        self.values[source] = values[best, np.arange(values.shape[1])]
        self.nexts[source], self.options[source] = rows.targets[best], rows.options[best]


def _unlimited(question: Question, cuts: Mask) -> PublishedPlan | None:
    table = _Table.empty(len(cuts), question.num_devices)
    for source in range(len(cuts) - 2, -1, -1):
        table.fill(question, source, _rows(question, cuts, source), table)
    return _traced(question, cuts, [table] * (len(question.names) + 1))


def _layered(question: Question, cuts: Mask) -> PublishedPlan | None:
    """One table per number of stages after the cut; stages that do not fit with so many after them are left out."""
    rows = [_rows(question, cuts, source) for source in range(len(cuts) - 1)]
    tables = [_Table.empty(len(cuts), question.num_devices)]
    most = min(question.num_devices, len(question.names))
    for later in range(most):
        table = _Table.empty(len(cuts), question.num_devices)
        table.values[-1] = FOREVER  # exactly so many stages
        for source, each in enumerate(rows):
            fits = each.most_later >= later
            kept = _Rows(each.targets[fits], each.options[fits], each.times[fits], each.most_later[fits])
            if fits.any():
                table.fill(question, source, kept, tables[-1])
        tables.append(table)
    best = min(range(1, most + 1), key=lambda count: int(tables[count].values[0, -1]))
    return _traced(question, cuts, tables[: best + 1][::-1])


def _traced(question: Question, cuts: Mask, tables: Sequence[_Table]) -> PublishedPlan | None:
    """The stages on the way from the first cut, ``tables`` in the order of stages."""
    value = int(tables[0].values[0, -1])
    if value >= FOREVER:
        return None
    stages, cut, devices = [], 0, question.num_devices
    for table in tables:
        if cut == len(cuts) - 1:
            break
        following, chosen = int(table.nexts[cut, devices]), question.options[int(table.options[cut, devices])]
        blocks = np.flatnonzero(cuts[following] & ~cuts[cut])
        stages.append(PublishedStage(tuple(question.names[block] for block in blocks), chosen))
        cut, devices = following, devices - chosen.replicas
    return PublishedPlan(tuple(stages), value)
