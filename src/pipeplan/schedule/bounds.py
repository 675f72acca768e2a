"""What no schedule can beat: lower bounds on the period and on the makespan, each a short proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from pipeplan.schedule.problem import Hold, Problem

__all__ = ["makespan_bound", "period_bound", "work_bound"]


def work_bound(problem: Problem) -> int:
    """Least period in ns by work alone: the busiest device's work per micro-batch (Tessel's GetLowerBound)."""
    return max(problem.work)


def period_bound(problem: Problem) -> Fraction:
    """Least period in ns per micro-batch, for any unroll: work, and Little's law under the memory cap.

    Bytes in flight are rate times size times lifetime, so a device that holds ``size`` bytes for at least
    ``lifetime`` per micro-batch cannot go faster than sum(size * lifetime) / capacity. A single hold comes in
    whole pieces: at most floor(capacity / size) of them fit at once.
    """
    best = Fraction(work_bound(problem))
    for device, capacity in enumerate(problem.capacity):
        if not capacity:
            continue
        holds = _holds_on(problem, device)
        area = sum(hold.size * problem.path(hold.source, hold.target) for hold in holds)
        area += sum(problem.workspace[x] * problem.durations[x] for x in problem.on_device[device])
        best = max(best, Fraction(area, capacity))
        for hold in holds:
            pieces = _pieces(problem, hold, capacity)
            best = max(best, Fraction(problem.path(hold.source, hold.target), pieces))
    return best


def makespan_bound(problem: Problem) -> int:
    """Least makespan in ns for the workload's number of micro-batches.

    The greatest of: a micro-batch's critical path; per device head + work + tail; per device the time until its
    first release can begin, plus all work that does not fit into memory before it, plus the tail; per device its work
    and the time it is idle at both ends, shared stages considered; and the period bound of memory over all
    micro-batches but those that fit at once.
    """
    count = problem.num_microbatches
    best = max(map(sum, zip(problem.heads, problem.durations, problem.tails, strict=True)))
    for device, operations in enumerate(problem.on_device):
        if not operations:
            continue
        head = min(problem.heads[x] for x in operations)
        tail = min(problem.tails[x] for x in operations)
        work = count * problem.work[device]
        best = max(best, head + work + tail, _until_release(problem, device, work, tail))
        best = max(best, work + _idle_ends(problem, device))
        best = max(best, _in_flight(problem, device))
    return best


def _idle_ends(problem: Problem, device: int) -> int:
    """Time in ns that a device is certainly idle before its first and after its last operation of some kind.

    Take an operation x of the device, and let ``later`` be what follows x there, ``other`` the rest. While micro-batch
    0 is on its way to x, nothing of ``later`` can run; and nothing of ``other`` can run beside an operation y of that
    way with which all of it shares a device (as stages on all devices do). So during every such y elsewhere the
    device is idle; with no ``other``, during latencies, too. The same backwards from the last micro-batch's end.
    """
    here = problem.on_device[device]
    heads = {
        x: _idle_on_way(problem, device, x, problem.incoming, [y for y in here if problem.path(x, y) < 0]) for x in here
    }
    tails = {
        x: _idle_on_way(problem, device, x, problem.outgoing, [y for y in here if problem.path(y, x) < 0]) for x in here
    }
    return max(heads[x] + tails[y] for x in here for y in here if problem.path(x, y) >= 0)


def _idle_on_way(
    problem: Problem, device: int, end: int, before: Sequence[Sequence[tuple[int, int]]], other: list[int]
) -> int:
    """The most time on a path to ``end`` during which the device can run nothing, where ``other`` is what it could."""
    groups = [set(problem.devices[y]) for y in other]

    def idle(y: int) -> int:
        if device in problem.devices[y]:
            return 0
        return problem.durations[y] if all(group & set(problem.devices[y]) for group in groups) else 0

    most: dict[int, int] = {}
    waiting = [end]
    while waiting:  # depth first, an operation after all that come before it
        y = waiting[-1]
        missing = [source for source, _ in before[y] if source not in most]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        most[y] = max((most[source] + idle(source) + (0 if other else lag) for source, lag in before[y]), default=0)
    return most[end]


def _until_release(problem: Problem, device: int, work: int, tail: int) -> int:
    """First release's earliest start, plus the work that cannot come before it, plus the tail; 0 if no bound.

    Before the first operation with a net release, only takers run, as many as memory holds: the most work among
    them is a bounded knapsack, here by its linear relaxation.
    """
    capacity = problem.capacity[device]
    if capacity is None:
        return 0
    operations = problem.on_device[device]
    net = {x: problem.acquire[x] - problem.release[x] for x in operations}
    releasing = [x for x in operations if net[x] < 0]
    if not releasing:
        return 0
    first = min(problem.heads[x] for x in releasing)
    before = _most_work(problem, [x for x in operations if net[x] >= 0], net, capacity)
    return first + max(0, work - min(before, first)) + tail if before < first else 0


def _most_work(problem: Problem, takers: list[int], net: dict[int, int], capacity: int) -> int:
    """Most work of operations that only take memory, within ``capacity``, each at most once per micro-batch."""
    count = problem.num_microbatches
    total = 0
    left = Fraction(capacity)
    single = len({net[x] for x in takers if net[x]}) <= 1 and sum(1 for x in takers if net[x]) == 1
    for x in sorted(takers, key=lambda x: -Fraction(problem.durations[x], net[x]) if net[x] else Fraction(-(10**30))):
        times = Fraction(count) if not net[x] else min(Fraction(count), left / net[x])
        if single:  # one kind of taker: whole pieces
            times = Fraction(math.floor(times))
        total += math.floor(times * problem.durations[x])
        left -= times * net[x]
    return total


def _in_flight(problem: Problem, device: int) -> int:
    """A hold of which ``pieces`` fit: its n-th start comes a lifetime after its (n - pieces)-th."""
    capacity = problem.capacity[device]
    if not capacity:
        return 0
    best = 0
    for hold in _holds_on(problem, device):
        rounds = -(-problem.num_microbatches // _pieces(problem, hold, capacity))
        best = max(
            best,
            problem.heads[hold.source] + rounds * problem.path(hold.source, hold.target) + problem.tails[hold.target],
        )
    return best


def _holds_on(problem: Problem, device: int) -> list[Hold]:
    return [hold for hold in problem.holds if device in problem.devices[hold.source]]


def _pieces(problem: Problem, hold: Hold, capacity: int) -> int:
    """How many of a hold a device has at once: seen when the last of them starts, beside its workspace."""
    room = capacity - problem.workspace[hold.source]
    return max(1, room // hold.size)
