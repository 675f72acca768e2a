"""The least time of a decoding loop's repetend, by trying all starts; written for small cases, to be obviously right.

A repetend is one step of every group. In it every group's actions run in a row, each when what it needs is there, and
the first of the next step waits for the last one's token. Chunks of prompts run at any moment: nothing comes back to
them, so that each may take what was made some repetends before. Nothing is assumed about the order of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from pipeplan.workload.workload import Workload


def least_repetend(workload: Workload, groups: int) -> int:
    """Least time from one repetend to the next of a chain of stages, in ns."""
    return next(time for time in count(1) if _is_possible(workload, groups, time))


def _is_possible(workload: Workload, groups: int, time: int) -> bool:
    chain = [each for each in workload.operations if each.kind == "F"]
    chunks = [each for each in workload.operations if each.kind != "F"] * groups
    durations = [each.duration_ns for each in chain]
    lags = [each.lag_ns for each in workload.dependencies if each.source_kind == "F"]  # the last one goes back
    rest = [sum(durations[number:]) + sum(lags[number:]) for number in range(len(durations))]
    busy: list[set[int]] = [set() for _ in workload.devices]

    def run(devices: tuple[int, ...], start: int, duration: int, then: Callable[[], bool]) -> bool:
        """Whether an action can run then, and what is left beside it."""
        moments = {moment % time for moment in range(start, start + duration)}
        if len(moments) < duration or any(busy[each] & moments for each in devices):
            return False
        for each in devices:
            busy[each] |= moments
        found = then()
        for each in devices:
            busy[each] -= moments
        return found

    def place(group: int, number: int, ready: int, begun: int) -> bool:
        """Whether this action of a group, which can start from ``ready`` on, and all after it have a place.

        Groups are numbered by when they begin, as they are alike.
        """
        if number == len(chain):
            if group + 1 == groups:
                return beside(0)
            return any(place(group + 1, 0, at, at) for at in range(begun, time))
        devices, duration = workload.stages[chain[number].stage].devices, durations[number]
        starts = range(ready, begun + time - rest[number] + 1) if number else (ready,)
        return any(
            run(devices, at, duration, lambda at=at: place(group, number + 1, at + duration + lags[number], begun))
            for at in starts
        )

    def beside(number: int) -> bool:
        """Whether this chunk and all after it have a place."""
        if number == len(chunks):
            return True
        devices, duration = workload.stages[chunks[number].stage].devices, chunks[number].duration_ns
        return any(run(devices, at, duration, lambda: beside(number + 1)) for at in range(time))

    return rest[0] <= time and place(0, 0, 0, 0)
