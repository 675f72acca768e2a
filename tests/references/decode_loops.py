"""The least time of a decoding loop's repetend, by trying all starts; written for small cases, to be obviously right.

A repetend is one step of every group. In it every group's actions run in a row, each when what it needs is there, and
the first of the next step waits for the last one's token. Nothing is assumed about the order of groups.
"""

from __future__ import annotations

from itertools import count

from pipeplan.workload.workload import Workload


def least_repetend(workload: Workload, groups: int) -> int:
    """Least time from one repetend to the next of a chain of stages, in ns."""
    return next(time for time in count(1) if _is_possible(workload, groups, time))


def _is_possible(workload: Workload, groups: int, time: int) -> bool:
    durations = [each.duration_ns for each in workload.operations]
    devices = [workload.stages[each.stage].devices for each in workload.operations]
    lags = [each.lag_ns for each in workload.dependencies]
    back = lags.pop()
    busy: list[set[int]] = [set() for _ in workload.devices]

    lags_after = [*lags, back]
    rest = [sum(durations[number:]) + sum(lags_after[number:]) for number in range(len(durations))]

    def place(group: int, number: int, ready: int, begun: int) -> bool:
        """Whether this action of a group, which can start from ``ready`` on, and all after it have a place.

        Groups are numbered by when they begin, as they are alike.
        """
        if number == len(durations):
            return group + 1 == groups or any(place(group + 1, 0, at, at) for at in range(begun, time))
        for start in range(ready, begun + time - rest[number] + 1) if number else (ready,):
            moments = {moment % time for moment in range(start, start + durations[number])}
            if len(moments) < durations[number] or any(busy[each] & moments for each in devices[number]):
                continue
            for each in devices[number]:
                busy[each] |= moments
            found = place(group, number + 1, start + durations[number] + lags_after[number], begun)
            for each in devices[number]:
                busy[each] -= moments
            if found:
                return True
        return False

    return rest[0] <= time and place(0, 0, 0, 0)
