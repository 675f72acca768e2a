"""The least time of a decoding loop's repetend, by trying all starts; written for small cases, to be obviously right.

Under memory it is that of all orders: a device runs its actions one after another, each as soon as it can.

A repetend is one step of every group. In it every group's actions run in a row, each when what it needs is there, and
the first of the next step waits for the last one's token. Chunks of prompts run at any moment: nothing comes back to
them, so that each may take what was made some repetends before. Nothing is assumed about the order of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise, permutations, product

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


Action = tuple[int, int]
"""An operation and a micro-batch."""

_LATE = 12
"""Steps by which a loop has settled."""


def least_repetend_in_memory(workload: Workload, groups: int) -> int | None:
    """Least time from one repetend to the next of a chain of stages, each on a device; None where no order fits.

    What an operation acquires is held until the next one of the chain has ended. Steps of a device are ordered in any
    way that repeats, in which an operation may be a step ahead of or behind others.
    """
    here = [
        [x for x, each in enumerate(workload.operations) if workload.stages[each.stage].devices == (device,)]
        for device in range(len(workload.devices))
    ]
    best: int | None = None
    for copies in product(*(list(_copies(own, groups)) for own in here)):
        few, many = (_starts(workload, copies, groups, steps) for steps in (workload.num_microbatches // groups, _LATE))
        if few is None or many is None or not _fits(workload, few):
            continue
        last = groups * (_LATE - 1)
        times = {many[x, last + g] - many[x, last - groups + g] for x in range(len(here)) for g in range(groups)}
        best = min(filter(None, (best, max(times))))
    return best


def _copies(operations: Sequence[int], groups: int) -> Iterator[tuple[Action, ...]]:
    """Every order of a device's actions in one repetend: which of which step of each group."""
    actions = [(x, group) for x in operations for group in range(groups)]
    for first, *rest in permutations(actions) if actions else ():
        for ahead in product((-1, 0, 1), repeat=len(rest)):
            yield (first, *((x, group + groups * steps) for (x, group), steps in zip(rest, ahead, strict=True)))
    if not actions:
        yield ()


def _starts(
    workload: Workload, copies: Sequence[Sequence[Action]], groups: int, steps: int
) -> Mapping[Action, int] | None:
    """When each action starts if it does as soon as it can; None where devices wait for each other."""
    last = groups * steps
    orders = [
        [(x, m + k * groups) for k in range(-steps - 2, 2 * steps) for x, m in copy if 0 <= m + k * groups < last]
        for copy in copies
    ]
    if any(a[0] == b[0] and a[1] > b[1] for order in orders for a, b in _pairs(order)):
        return None
    durations, lags = ([each.duration_ns for each in workload.operations], [0] * len(workload.operations))
    for each in workload.dependencies:
        lags[int(each.source[:-1])] = each.lag_ns  # from each to the next, from the last to the first
    starts: dict[Action, int] = {}
    free, places = [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while places[device] < len(order):
                x, m = order[places[device]]
                before = (x - 1, m) if x else (len(durations) - 1, m - groups)
                if before[1] >= 0 and before not in starts:
                    break
                ready = starts[before] + durations[before[0]] + lags[before[0]] if before[1] >= 0 else 0
                starts[x, m] = max(free[device], ready)
                free[device], places[device], moved = starts[x, m] + durations[x], places[device] + 1, True
    return starts if len(starts) == last * len(durations) else None


def _pairs(order: Sequence[Action]) -> Iterator[tuple[Action, Action]]:
    """Neighbours among the actions of one operation."""
    for x in {each for each, _ in order}:
        yield from pairwise([each for each in order if each[0] == x])


def _fits(workload: Workload, starts: Mapping[Action, int]) -> bool:
    """Whether every device has room at the start of each of its actions."""
    operations = workload.operations
    devices = [workload.stages[each.stage].devices[0] for each in operations]
    for (x, _), now in starts.items():
        room = workload.devices[devices[x]].memory_bytes
        held = sum(
            operations[y].acquire_bytes
            for (y, m), begin in starts.items()
            if devices[y] == devices[x]
            and begin <= now
            and (y + 1, m) in starts
            and starts[y + 1, m] + operations[y + 1].duration_ns > now
        )
        if room is not None and held > room:
            return False
    return True
