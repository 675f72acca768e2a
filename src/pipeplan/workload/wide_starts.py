"""Earliest starts where many tasks can start at once, as in runs of hundreds of devices: all those that can, together.

The tasks that wait for nothing come first, then all that wait only for these, and so on: a level each. What one level
does is done to columns, which takes a time that hardly grows with the tasks in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.time_limit import checked, checkpoint
from pipeplan.workload.columns import EXACT, IntArray
from pipeplan.workload.pairs import TaskPairs

LEAST_TASKS = 2**14
"""Shorter runs are over soon, task by task."""

LEAST_AT_ONCE = 24
"""Tasks of a level, on average, from which a level takes less than its tasks one by one."""

_BEFORE_JUDGING = 2**16
"""Tasks that may be missing: pipelines begin with few at once."""


def may_be_wide(num_tasks: int, num_lines: int) -> bool:
    """Whether there are enough tasks and devices for :func:`wide_starts`."""
    return num_tasks >= LEAST_TASKS and num_lines >= LEAST_AT_ONCE


def wide_starts(times: IntArray, pairs: TaskPairs, orders: Sequence[Sequence[int]]) -> list[int] | None:
    """[task] the earliest starts of :func:`~pipeplan.workload.task_graph.earliest_starts`.

    Of tasks that take ``times`` [task] in ns, wait for each other as ``pairs`` say, and run in ``orders`` on devices
    and links. None where they are not worked out here: where few tasks can start at once, where numbers are too large
    for columns, and where something waits in a circle.
    """
    count = len(times)
    longest = int(times.max()) + int(np.abs(pairs.lags).max(initial=0))
    if object in (times.dtype, pairs.lags.dtype) or longest * count >= EXACT:
        return None
    arrivals = _Waiting.of(pairs.sources, pairs.targets, pairs.lags, count)
    turns = _Waiting.of(*_in_turn(orders), None, count)
    return _by_levels(times, (arrivals, turns))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What waits for each task: ``targets[begins[task] : begins[task + 1]]``, until ``lags`` ns after its end."""

    begins: IntArray
    targets: IntArray
    lags: IntArray | None

    @classmethod
    def of(cls, sources: IntArray, targets: IntArray, lags: IntArray | None, count: int) -> _Waiting:
        """Of pairs in any order. Raises TimeUpError."""
        checkpoint()
        order = np.argsort(sources, kind="stable")
        checkpoint()
        begins = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.bincount(sources, minlength=count))))
        checkpoint()
        return cls(begins, targets[order], None if lags is None else lags[order])

    def reached(self, tasks: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        """What waits for any of these tasks, and until when, in ns."""
        begins = self.begins[tasks]
        counts = self.begins[tasks + 1] - begins
        before = np.cumsum(counts)
        places = np.repeat(begins - before + counts, counts) + np.arange(before[-1])
        until = np.repeat(ends, counts)
        return self.targets[places], until if self.lags is None else until + self.lags[places]


def _in_turn(orders: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Pairs of tasks one right after the other on a device or link."""
    lines = [np.asarray(order, np.int64) for order in checked(orders, 16)]
    checkpoint()
    return np.concatenate([line[:-1] for line in lines]), np.concatenate([line[1:] for line in lines])


def _by_levels(times: IntArray, waiting_for: Sequence[_Waiting]) -> list[int] | None:
    """Level by level; None where there are too many, or tasks are left."""
    count = len(times)
    starts = np.zeros(count, np.int64)
    waiting = sum((np.bincount(each.targets, minlength=count) for each in waiting_for), np.zeros(count, np.int64))
    place = np.zeros(count, np.int64)
    level, levels, done = np.flatnonzero(waiting == 0), 0, 0
    while len(level):
        if not levels % 256:
            checkpoint()
        levels, done = levels + 1, done + len(level)
        if levels * LEAST_AT_ONCE > done + _BEFORE_JUDGING:
            return None
        ends, freed = starts[level] + times[level], list[IntArray]()
        for each in waiting_for:
            targets, until = each.reached(level, ends)
            np.maximum.at(starts, targets, until)
            np.subtract.at(waiting, targets, 1)
            freed.append(targets)
        targets = np.concatenate(freed)
        ready = targets[waiting[targets] == 0]
        numbers = np.arange(len(ready))
        place[ready] = numbers  # of equal ones the last stays
        level = ready[place[ready] == numbers]
    return list(starts.tolist()) if done == count else None
