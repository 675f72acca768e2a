"""What waits for what in a workload, pair by pair, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from pipeplan.time_limit import checked
from pipeplan.workload.columns import IntArray, sharing, spread
from pipeplan.workload.samples import Slots
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class TaskPairs:
    """[pair] what waits for what: a task of ``targets`` until ``lags`` ns after the end of that of ``sources``.

    In the order of the workload's edges, and after them of what returns.
    """

    sources: IntArray
    targets: IntArray
    lags: IntArray

    @classmethod
    def of(cls, workload: Workload, offsets: Sequence[int]) -> TaskPairs:
        """Join the actions of a workload, of which operation o has those from ``offsets[o]`` on."""
        parts = _PairsSoFar(workload, offsets)
        for alike, edges in groupby(workload.edges, parts.alike):
            if alike is None:
                for source, target, lag in checked(edges, 16):
                    parts.add_sharing(source, target, lag)
            else:
                parts.add_alike([*edges])
        for source, target, lag, later in checked(workload.returns, 16):
            parts.add_returns(source, target, lag, later)
        return cls(*map(_joined, parts.columns))


_AT_ONCE = 2**18
"""Pairs that are made between two looks at the time."""


def _joined(parts: Sequence[IntArray]) -> IntArray:
    """One after another, a moment's work at a time."""
    found = np.empty(sum(map(len, parts)), np.result_type(np.int64, *{part.dtype for part in parts}))
    begin = 0
    for part in checked(parts, 1):
        found[begin : begin + len(part)] = part
        begin += len(part)
    return found


@dataclass(slots=True)
class _PairsSoFar:
    """Pairs as they come: sources, targets and lags."""

    workload: Workload
    offsets: Sequence[int]
    columns: tuple[list[IntArray], list[IntArray], list[IntArray]] = field(default_factory=lambda: ([], [], []))
    _kinds: dict[Slots, int] = field(default_factory=dict)
    _kind_of: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._kind_of = [self._kinds.setdefault(slots, len(self._kinds)) for slots in self.workload.slots]

    def alike(self, edge: tuple[int, int, int]) -> int | None:
        """The kind of slots of both ends, each of whose actions waits for the one of its own number; None: others."""
        source, target, _ = edge
        own = self._kind_of[target]
        return own if own == self._kind_of[source] and (source, target) not in self.workload.needs else None

    def add_alike(self, edges: Sequence[tuple[int, int, int]]) -> None:
        """Edges whose ends are all of one kind, so many at once as are joined within a moment."""
        slots = self.workload.slots[edges[0][0]]
        at_once = max(1, _AT_ONCE // max(1, len(slots)))
        for begin in checked(range(0, len(edges), at_once), 1):
            self._add_alike(edges[begin : begin + at_once], slots)

    def _add_alike(self, edges: Sequence[tuple[int, int, int]], slots: Slots) -> None:
        first = np.array([(self.offsets[source], self.offsets[target], lag) for source, target, lag in edges])
        numbers = np.arange(len(slots))
        lags = np.repeat(first[:, 2:], len(slots), axis=1)
        if slots.num_parted:
            of_parts = [self.workload.part_lags.get((source, target), lag) for source, target, lag in edges]
            lags[:, : 2 * slots.num_parted] = np.array(of_parts)[:, None]
        self._add((first[:, :1] + numbers).ravel(), (first[:, 1:2] + numbers).ravel(), lags.ravel())

    def add_sharing(self, source: int, target: int, lag: int) -> None:
        """An edge whose ends have other slots, or are counted."""
        own, others = self.workload.slots[target], self.workload.slots[source]
        needs = self.workload.needs.get((source, target))
        first, after = sharing(own, others) if needs is None else (np.zeros(len(needs), np.int64), np.array(needs))
        targets, sources = spread(first, after)
        lags = np.full(len(targets), lag)
        if parted := 2 * min(own.num_parted, others.num_parted):
            lags[sources < parted] = self.workload.part_lags.get((source, target), lag)
        self._add(sources + self.offsets[source], targets + self.offsets[target], lags)

    def add_returns(self, source: int, target: int, lag: int, later: int) -> None:
        """What an action waits for of an earlier micro-batch, of the same size."""
        numbers = np.arange(max(0, len(self.workload.slots[target]) - later))
        sources, targets = numbers + self.offsets[source], numbers + later + self.offsets[target]
        self._add(sources, targets, np.full(len(numbers), lag))

    def _add(self, *columns: IntArray) -> None:
        for known, more in zip(self.columns, columns, strict=True):
            known.append(more)
