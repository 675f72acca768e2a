"""Lower bounds on the period and on the iteration that no schedule can beat, each with a short proof.

Of the iteration there are two: the *weak* bound is by only work and dependencies, for every workload; the *strong* one
also knows memory and the order of micro-batches, for workloads in which all are alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter

from pipeplan.graphs import longest_paths
from pipeplan.search_constants import UNROLLED_TASKS
from pipeplan.time_limit import checked
from pipeplan.workload.exchanges import exchange_work
from pipeplan.workload.kinds import GRADIENT_ROLES
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.shared_time import WithoutSharedTime
from pipeplan.workload.task_graph import NEVER
from pipeplan.workload.workload import Hold, Workload


def work_bound(workload: Workload) -> int:
    """Least period in ns by work only: that of the busiest device or link per micro-batch (Tessel's GetLowerBound)."""
    return max(workload.work)


def weak_iteration_bound(workload: Workload) -> int:
    """Least iteration in ns of any order: a micro-batch's longest path, and per device or link head + work + tail.

    A device begins no earlier than the first of its operations can be reached, works all its micro-batches, and
    after its last action at least the shortest way out of its operations remains. A link does the same with messages.
    Tails count what follows the last action (:attr:`~pipeplan.workload.workload.Workload.least_after`). And each
    network has its sums of gradients, none of which is ready before all of a stage's work is done (:func:`_network`).
    """
    heads, tails = workload.heads, workload.tails
    best = max(map(sum, zip(heads, workload.least_durations, tails, strict=True)))
    for here in filter(None, workload.on_resource):
        work = sum(map(workload.work_of, here))
        best = max(best, min(heads[item] for item in here) + work + min(tails[item] for item in here))
    if workload.returns:
        best = max(best, _rounds(workload))
    if workload.exchanges:
        best = max(best, _exchanges(workload))
    return max(best, _network(workload)) if workload.has_tail else best


def ways_round(workload: Workload) -> list[tuple[int, int, int, int]]:
    """(first operation, last operation, ns, micro-batches later) of each way that ends with a return to its beginning.

    From the start of the first to its next start, which what returns lets it have: the longest path to the last, its
    duration, and the lag of the way back.
    """
    found = []
    for source, target, lag, later in workload.returns:
        paths = longest_paths(
            workload.items_in_order,
            ((x, y, workload.durations[x] + between) for x, y, between in workload.edges),
            {item: 0 if item == target else -NEVER for item in range(len(workload.durations))},
        )
        if paths[source] >= 0:
            found.append((target, source, paths[source] + workload.durations[source] + lag, later))
    return found


def _rounds(workload: Workload) -> int:
    """Least iteration in ns by what returns: the last micro-batch comes after as many ways round as bring its turn."""
    best, heads, tails = 0, workload.heads, workload.tails
    for first, _, time, later in ways_round(workload):
        rounds = (workload.num_microbatches - 1) // later
        best = max(best, heads[first] + rounds * time + workload.durations[first] + tails[first])
    return best


def _exchanges(workload: Workload) -> int:
    """Least iteration in ns by what actions exchange: a network has all of it to do, and then its device steps.

    Whatever runs when, a stage is gathered once for as many actions as it says, and reduced once for as many.
    """
    least = [0] * len(workload.devices)
    for number, stage in enumerate(workload.stages):
        time = exchange_work(workload, number) if stage.block_groups else 0
        for device in stage.devices:
            least[device] += time
    return max((time + step for time, step in zip(least, workload.steps_ns, strict=True) if time), default=0)


def _network(workload: Workload) -> int:
    """Lower bound on the iteration in ns from the work of each device's network and the steps that follow it.

    A stage's last gradient comes after all of its own work, which runs on each of its devices one action at a time and
    begins no earlier than the first of it can be reached; and after a whole micro-batch's way to it. Sums are so ready
    no earlier than the latest of their stages, and on a network run one after another: in the order in which they
    become ready is the soonest that all of them can end (as for any one machine with release times). Then the device
    takes its steps, and after these its network the gathers. In buckets or not, whatever is less.
    """
    heads, durations = workload.heads, workload.least_durations
    work, last = [0] * len(workload.stages), [0] * len(workload.stages)
    first = [NEVER] * len(workload.stages)
    for item, operation in enumerate(workload.operations):
        stage = operation.stage
        first[stage] = min(first[stage], heads[item])
        work[stage] += workload.work_of(item)
        if operation.role in GRADIENT_ROLES:
            last[stage] = max(last[stage], heads[item] + durations[item])
    ready = [max(last[stage], first[stage] + work[stage]) if work[stage] else 0 for stage in range(len(work))]
    gathers = [0] * len(workload.devices)
    for each in workload.gathers:
        for device in each.devices:
            gathers[device] += each.duration_ns
    return min(
        max(map(sum, zip(_last_sums(way, ready), workload.steps_ns, gathers, strict=True)))
        for way in workload.ways_to_sum
    )


def _last_sums(workload: Workload, ready: Sequence[int]) -> list[int]:
    """[device] ns at which the last of its sums ends, where stages are ``ready`` and no sum waits for other devices."""
    ends = [0] * len(workload.devices)
    released = ((each.ready(ready), each) for each in workload.gradient_sums)
    for time, each in sorted(released, key=itemgetter(0)):
        for device in each.devices:
            ends[device] = max(ends[device], time) + each.duration_ns
    return ends


def period_bound(problem: OneMicrobatch) -> Fraction:
    """Least period in ns per micro-batch, for any unroll: work, what returns, and Little's law under the memory cap.

    Bytes in flight are rate times size times lifetime, so a device that holds ``size`` bytes for at least
    ``lifetime`` per micro-batch cannot go faster than sum(size * lifetime) / capacity. And what memory lets follow
    only ``distance`` micro-batches later takes the way from one to the other in that time, as does what returns to the
    first operation of a later micro-batch, in a decoding loop. All but the last hold beside the time of operations on
    all devices, too, in which nothing else runs (:mod:`pipeplan.workload.shared_time`).
    """
    left = WithoutSharedTime.of(problem)
    return max(_period_bound(problem), Fraction(0) if left is None else left.each_ns + _period_bound(left.problem))


def _period_bound(problem: OneMicrobatch) -> Fraction:
    best = Fraction(work_bound(problem.workload))
    for device, capacity in enumerate(problem.capacity):
        if not capacity:
            continue
        holds = problem.holds_on(device)
        area = sum(hold.size * problem.path(hold.source, hold.target) for hold in holds)
        area += sum(problem.workspace[x] * problem.durations[x] for x in problem.on_device[device])
        best = max(best, Fraction(area, capacity))
    for recurrence in memory_recurrences(problem):
        time = problem.path(recurrence.target, recurrence.source)
        if time > 0 and recurrence.distance > 0:
            best = max(best, Fraction(time, recurrence.distance))
    return max(best, *(Fraction(time, later) for *_, time, later in ways_round(problem.workload)), Fraction(0))


def strong_iteration_bound(problem: OneMicrobatch) -> int:
    """Least iteration in ns for the workload's number of micro-batches.

    The greatest of: the weak bound; per device the time until its first release can begin, plus all work that does not
    fit into memory before it, plus the tail; per device its work and the time it is idle at both ends, shared stages
    considered, and what follows the last action of all; Little's law over the whole run; and all actions with what
    memory says about their order. And all of these of what is left without the time of operations on all devices.
    """
    left = WithoutSharedTime.of(problem)
    return max(_iteration_bound(problem), 0 if left is None else left.all_ns + _iteration_bound(left.problem))


def _iteration_bound(problem: OneMicrobatch) -> int:
    best, after = weak_iteration_bound(problem.workload), problem.workload.least_after_all
    for device, operations in checked(enumerate(problem.on_device), 1):
        if operations:
            work = problem.num_microbatches * problem.work[device]
            until_release = _until_release(problem, device, work)
            best = max(best, until_release, work + _idle_ends(problem, device) + after, _area(problem, device))
    return max(best, _unrolled(problem))


def _idle_ends(problem: OneMicrobatch, device: int) -> int:
    """Time in ns that a device is certainly idle before its first and after its last operation of some kind.

    Take an operation x of the device, and let ``later`` be what follows x there, ``other`` the rest. While micro-batch
    0 is on its way to x, nothing of ``later`` can run; and nothing of ``other`` can run beside an operation y of that
    way with which all of it shares a device (as stages on all devices do). So during every such y elsewhere the
    device is idle; with no ``other``, during latencies, too. The same backwards from the last micro-batch's end. None
    of that is so where an action may begin before what it needs has ended.
    """
    if problem.workload.has_parts:
        return 0
    here = problem.on_device[device]
    heads = {x: _idle_on_way(problem, device, x, [y for y in here if problem.path(x, y) < 0]) for x in here}
    tails = {x: _idle_on_way(problem, device, x, [y for y in here if problem.path(y, x) < 0], back=True) for x in here}
    return max(heads[x] + tails[y] for x in here for y in here if problem.path(x, y) >= 0)


def _idle_on_way(problem: OneMicrobatch, device: int, end: int, other: list[int], *, back: bool = False) -> int:
    """The most time on a path to ``end`` during which the device can run nothing, where ``other`` is what it could.

    ``back``: on a path from the micro-batch's end.
    """
    groups = {problem.devices[y] for y in other}
    if (device,) in groups:  # which nothing that runs elsewhere shares a device with
        return 0
    others = [frozenset(group) for group in groups]

    def idle(y: int) -> int:
        if device in problem.devices[y]:
            return 0
        return problem.durations[y] if all(not group.isdisjoint(problem.devices[y]) for group in others) else 0

    before, order = (problem.outgoing, problem.order[::-1]) if back else (problem.incoming, problem.order)
    most: dict[int, int] = {}
    for y in order[: order.index(end) + 1]:
        most[y] = max((most[source] + idle(source) + (0 if other else lag) for source, lag in before[y]), default=0)
    return most[end]


def _until_release(problem: OneMicrobatch, device: int, work: int) -> int:
    """First release's earliest start, plus the work that cannot come before it, plus the tail; 0 if no bound.

    Before the first operation with a net release, only takers run, as many as memory holds: the most work among
    them is a bounded knapsack, here by its linear relaxation.
    """
    capacity = problem.capacity[device]
    if capacity is None or problem.apart_on(device):  # others' actions may free memory before its own do
        return 0
    operations = problem.on_device[device]
    net = {x: problem.acquire[x] - problem.release[x] for x in operations}
    releasing = [x for x in operations if net[x] < 0]
    if not releasing:
        return 0
    first = min(problem.workload.heads[x] for x in releasing)
    tail = min(problem.workload.tails[x] for x in operations)
    before = _most_work(problem, [x for x in operations if net[x] >= 0], net, capacity)
    return first + max(0, work - min(before, first)) + tail if before < first else 0


def _most_work(problem: OneMicrobatch, takers: list[int], net: dict[int, int], capacity: int) -> int:
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


def _area(problem: OneMicrobatch, device: int) -> int:
    """Little's law for the whole run: all that is held, times how long at least, has to fit under the capacity."""
    capacity = problem.capacity[device]
    if not capacity:
        return 0
    holds = problem.holds_on(device)
    area = sum(hold.size * problem.path(hold.source, hold.target) for hold in holds)
    if not area:
        return 0
    head = min(problem.workload.heads[hold.source] for hold in holds)
    tail = min(problem.workload.tails[hold.target] for hold in holds)
    return head + -(-problem.num_microbatches * area // capacity) + tail


def _unrolled(problem: OneMicrobatch) -> int:
    """The bound of all micro-batches' actions: longest paths through what must follow what, and each device's work.

    What must follow what: dependencies, the order of micro-batches, and what memory says about order
    (:func:`memory_recurrences`). Each device then has a one-machine problem with heads and
    tails, whose preemptive optimum is Jackson's rule: of what is there, run what has the longest tail.
    """
    count = problem.num_microbatches
    if problem.num_operations * count > UNROLLED_TASKS:
        return 0
    recurrences = memory_recurrences(problem)
    heads = _longest(problem, problem.incoming, [(r.target, r.source, r.distance) for r in recurrences])
    tails = _longest(problem, problem.outgoing, [(r.source, r.target, r.distance) for r in recurrences], backward=True)
    return max(_one_machine(problem, device, heads, tails) for device in range(len(problem.on_device)))


def _longest(
    problem: OneMicrobatch,
    before: Sequence[Sequence[tuple[int, int]]],
    recurrences: Sequence[tuple[int, int, int]],
    *,
    backward: bool = False,
) -> list[list[int]]:
    """[operation][micro-batch] longest path in ns up to it; from the iteration's end if ``backward``."""
    count, durations = problem.num_microbatches, problem.durations
    outside = [0] * len(durations)
    if backward:
        outside[: len(problem.workload.operations)] = problem.workload.least_after
    far: list[list[tuple[int, int]]] = [[] for _ in durations]
    for target, source, distance in recurrences:
        if distance >= 1:  # others are of one micro-batch, and weaker than its dependencies
            far[target].append((source, distance))
    longest = [[0] * count for _ in durations]
    order = problem.order[::-1] if backward else problem.order
    for m in checked(range(count), 4):
        for x in order:
            best = max(outside[x], longest[x][m - 1] + durations[x] if m else 0)
            for source, lag in before[x]:
                best = max(best, longest[source][m] + durations[source] + lag)
            for source, distance in far[x]:
                if m >= distance:
                    best = max(best, longest[source][m - distance] + durations[source])
            longest[x][m] = best
    return [row[::-1] for row in longest] if backward else longest


def _one_machine(problem: OneMicrobatch, device: int, heads: list[list[int]], tails: list[list[int]]) -> int:
    """The least makespan if only this device were exclusive and could interrupt its work (Jackson; Carlier 1982)."""
    jobs = sorted(
        (heads[x][m], tails[x][m], problem.durations[x])
        for x in problem.on_device[device]
        for m in range(problem.num_microbatches)
    )
    ready: list[list[int]] = []  # [-tail, work left]
    now = best = 0
    for index, (head, tail, work) in checked(enumerate(jobs)):
        now = max(now, head)
        heapq.heappush(ready, [-tail, work])
        until = jobs[index + 1][0] if index + 1 < len(jobs) else None
        while ready and (until is None or now < until):
            step = ready[0][1] if until is None else min(ready[0][1], until - now)
            now += step
            ready[0][1] -= step
            if ready[0][1] == 0:
                best = max(best, now - heapq.heappop(ready)[0])
    return best


@dataclass(frozen=True, slots=True)
class Recurrence:
    """(target, m) starts after (source, m - distance) has ended, for every m >= distance."""

    source: int
    target: int
    distance: int


def memory_recurrences(problem: OneMicrobatch) -> list[Recurrence]:
    """What memory says about order: an operation of micro-batch m waits for another one of micro-batch m - distance.

    When (x, m) starts on a device, everything that x depends on has begun for micro-batches 0..m, since operations
    run micro-batches in order. What these hold and what has been given back must fit. Let ``e_z`` be how many
    instances of z have ended by then. It is at most m where z follows x, at most m + 1 elsewhere (among the instances
    that count), and at most ``e_y`` where z follows y. So for each z on the device there is a least ``e_z``, and it
    grows with m one by one: ``e_z >= m + 1 - distance``. Then (z, m - distance) ends before (x, m) starts.

    For a chain whose forward holds one unit until its backward and K units of memory this says: forward m comes after
    backward m - K.

    Of each pair it is the one that implies the others.
    """
    found: dict[tuple[int, int], int] = {}
    for device, capacity in enumerate(problem.capacity):
        if capacity is None:
            continue
        holds = problem.holds_on(device)
        for target in checked(problem.on_device[device], 4):
            begun = [hold for hold in holds if problem.path(hold.source, target) >= 0]
            room = capacity - problem.workspace[target]
            if not any(hold.source == target for hold in begun) and problem.workspace[target] == 0:
                continue
            for source in dict.fromkeys(hold.target for hold in begun):
                distance = _distance(problem, begun, target, source, room)
                if distance is not None:
                    pair = source, target
                    found[pair] = min(found.get(pair, distance), distance)
    return [Recurrence(source, target, distance) for (source, target), distance in sorted(found.items())]


def _distance(problem: OneMicrobatch, begun: list[Hold], target: int, source: int, room: int) -> int | None:
    """The largest d with which ``e_source = m + 1 - d`` still fits; None if no value of ``e_source`` is too small.

    Held then: ``sum(size * (m + 1 - e))``, where ``m + 1 - e`` is at least 1 for what follows the target, at least d
    for what follows the source, else 0. Only d >= 1 makes sense where the source follows the target.
    """
    least = [1 if problem.path(target, hold.target) >= 0 else 0 for hold in begun]
    after = [problem.path(source, hold.target) >= 0 for hold in begun]
    fixed = sum(hold.size * few for hold, few, late in zip(begun, least, after, strict=True) if not late)
    growing = [(hold.size, few) for hold, few, late in zip(begun, least, after, strict=True) if late]
    per_one = sum(size for size, _ in growing)
    if per_one == 0:
        return None
    distance = (room - fixed) // per_one
    return max(distance, max(few for _, few in growing))
