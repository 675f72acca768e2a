"""Insertion: micro-batch after micro-batch, each action into the first gap of its devices that is long enough.

What is placed stays; a new micro-batch takes gaps between older ones, in the order of its dependencies, and no action
before the same one of the micro-batch before. Where a device would then hold more than it has, what the new one takes
there waits for the next moment at which something is given back. Unlike rules in time it looks ahead: stages on
several devices find the moments at which all of them are free.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from pipeplan.schedule.problem import Problem

__all__ = ["insert_microbatches"]

_Placed = tuple[int, int, int]  # start, end, operation


def insert_microbatches(problem: Problem) -> list[list[int]] | None:
    """Each device's order; None where a micro-batch finds no place within memory after many tries."""
    rows: list[list[_Placed]] = [[] for _ in problem.on_device]
    before = [0] * problem.num_operations  # ends of the micro-batch before
    for _ in range(problem.num_microbatches):
        placed = _place(problem, rows, before)
        if placed is None:
            return None
        before = [end for _, end, _ in placed]
        for x, entry in enumerate(placed):
            for device in problem.devices[x]:
                insort(rows[device], entry)
    return [_numbered(problem, row) for row in rows]


def _numbered(problem: Problem, row: list[_Placed]) -> list[int]:
    """A device's order as task numbers: each operation runs its micro-batches in order."""
    following = [0] * problem.num_operations
    order = []
    for _, _, x in row:
        order.append(x * problem.num_microbatches + following[x])
        following[x] += 1
    return order


def _place(problem: Problem, rows: list[list[_Placed]], before: list[int]) -> list[_Placed] | None:
    """Where one more micro-batch goes: first without a look at memory, then later and later where that is short."""
    earliest = list(before)
    for _ in range(_TRIES):
        placed: list[_Placed] = []
        for x, duration in enumerate(problem.durations):
            ready = max((placed[source][1] + lag for source, lag in problem.incoming[x]), default=0)
            start = _gap([rows[device] for device in problem.devices[x]], max(ready, earliest[x]), duration)
            placed.append((start, start + duration, x))
        late = _too_early(problem, rows, placed)
        if late is None:
            return placed
        earliest[late[0]] = late[1]
    return None


_TRIES = 1000
"""A micro-batch is moved so often at most; it fits behind all others at the latest."""


def _gap(rows: list[list[_Placed]], start: int, duration: int) -> int:
    """The first moment from ``start`` on at which all rows are free for ``duration``."""
    moved = True
    while moved:
        moved = False
        for row in rows:
            index = bisect_left(row, (start, -1, -1))
            if index and row[index - 1][1] > start:
                start, moved = row[index - 1][1], True
            while index < len(row) and row[index][0] < start + duration:
                start, moved = max(start, row[index][1]), True
                index += 1
    return start


def _too_early(problem: Problem, rows: list[list[_Placed]], placed: list[_Placed]) -> tuple[int, int] | None:
    """An operation that takes what a device does not have then, and when something is given back; None if all fits."""
    for device, capacity in enumerate(problem.capacity):
        if capacity is None:
            continue
        own = [placed[x] for x in problem.on_device[device]]
        merged = sorted([*rows[device], *own])
        held = 0
        for start, _, x in merged:
            held += problem.acquire[x]
            if held + problem.workspace[x] > capacity:
                taker = max((entry for entry in own if entry[0] <= start and problem.acquire[entry[2]]), default=None)
                if taker is None:
                    taker = max(entry for entry in own if entry[0] <= start)
                return taker[2], _next_release(problem, merged, taker)
            held -= problem.release[x]
    return None


def _next_release(problem: Problem, merged: list[_Placed], taker: _Placed) -> int:
    """When the device next gives something back that is not the taker's own micro-batch's, or simply a moment later."""
    for start, end, x in merged:
        if start > taker[0] and problem.release[x] > 0:
            return end
    return max(end for _, end, _ in merged) + 1
