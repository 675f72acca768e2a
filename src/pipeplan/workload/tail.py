"""The tail of an iteration: gradients summed beside compute, then the optimizer's steps, then parameters gathered.

One definition for every figure. The sum of a stage's gradients is ready when the last action that adds to them has
ended on all of its devices; it occupies the networks of all of them together, beside whatever they compute. Where
stages have the same blocks (routes) there is one sum for all, and so for what is tied. On a network sums run one after
another: as they become ready, ties by their number, unless the workload says another order. Where a stage has buckets
there is a sum for each, ready while the stage's last action still runs: as soon as that has the gradients of the
bucket's blocks, as PyTorch's DistributedDataParallel has it (Li et al., VLDB 2020, section 3.2.3). When a device has
ended all its actions and all its sums it takes the steps of its stages; a stage's parameters are gathered when all of
its devices have stepped, on their networks, in the same manner. The iteration ends with the last device.

Where actions exchange what replicas divide (:mod:`pipeplan.workload.exchanges`), sums follow these on the same network.

A device whose network sums while it still has actions computes less meanwhile, by its ``contention``: it has that part
of the time to make up for behind its last action, before its steps. What other devices wait for is not later. The same
goes for gradients that actions reduce once an iteration; other exchanges of actions are in what these take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, permutations

from pipeplan.workload.elements import ONCE, Loop
from pipeplan.workload.exchanges import Networks, networks_at
from pipeplan.workload.kinds import GRADIENT_ROLES, REDUCE_GRAD
from pipeplan.workload.network_jobs import NetworkJob
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class ExchangeEnds:
    """What actions exchange on networks: until when [device], in ns; none where nothing is exchanged.

    ``sums`` are (start, end, devices) of what is reduced once an iteration.
    """

    until_ns: tuple[int, ...] = ()
    sums: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


NOTHING = ExchangeEnds()


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows the last actions.

    ``sums`` [sum] are (start, end) in ns of :attr:`~pipeplan.workload.workload.Workload.gradient_sums`. ``acted_ns``,
    ``summed_ns``, ``stepped_ns`` and ``ended_ns`` [device] say when it has ended its actions; its sums, too; its steps,
    too; and everything.
    """

    sums: tuple[tuple[int, int], ...]
    acted_ns: tuple[int, ...]
    summed_ns: tuple[int, ...]
    stepped_ns: tuple[int, ...]
    ended_ns: tuple[int, ...]

    @property
    def iteration_ns(self) -> int:
        """When the last device has ended everything."""
        return max(self.ended_ns)

    def figures(self) -> dict[str, int]:
        """What of each is exposed, in ns, in the order in which they come."""
        return {
            "exposed_reduction_ns": self.exposed_reduction_ns,
            "exposed_step_ns": self.exposed_step_ns,
            "exposed_gather_ns": self.exposed_gather_ns,
        }

    @property
    def exposed_reduction_ns(self) -> int:
        """By how much later the last device has ended its sums than its actions."""
        return max(self.summed_ns) - max(self.acted_ns)

    @property
    def exposed_step_ns(self) -> int:
        """By how much later the last device has ended its steps than its sums."""
        return max(self.stepped_ns) - max(self.summed_ns)

    @property
    def exposed_gather_ns(self) -> int:
        """By how much later the last device has its parameters than it has stepped."""
        return max(self.ended_ns) - max(self.stepped_ns)


def tail_of(
    workload: Workload, ends_ns: Sequence[int], order: Collection[int] = (), exchanged: ExchangeEnds = NOTHING
) -> Tail:
    """What follows where the last action of each operation ends at ``ends_ns`` [operation].

    Sums run in an ``order``, by default the workload's, after what actions have ``exchanged``.
    """
    return _tail(workload, *_actions_of(workload, ends_ns), order, exchanged)


def _tail(
    workload: Workload, acted: Sequence[int], ready: Sequence[int], order: Collection[int], exchanged: ExchangeEnds
) -> Tail:
    """The same where devices have ended their actions, and sums are ready, at these ns."""
    if not workload.has_tail:
        return Tail((), *[tuple(acted)] * 4)
    free = [*exchanged.until_ns] or [0] * len(acted)
    times = _one_after_another(workload.gradient_sums, ready, free, order or workload.sum_order)
    slowed = _slowed(workload, acted, times, exchanged)
    summed = [max(end + late, over) for end, late, over in zip(acted, slowed, free, strict=True)]
    summed = [summed[leader] for leader in workload.tail_leaders]
    stepped = [time + step for time, step in zip(summed, workload.steps_ns, strict=True)]
    gathers = workload.gathers
    _one_after_another(gathers, [max(stepped[device] for device in each.devices) for each in gathers], free)
    ended = [max(stepped[leader], free[leader]) for leader in workload.tail_leaders]
    return Tail(tuple(times), tuple(acted), tuple(summed), tuple(stepped), tuple(ended))


def tail_at(workload: Workload, starts_ns: Mapping[str, Sequence[int]], loop: Loop | None) -> Tail:
    """What follows where the actions of each operation, by its id, begin at these ns, as a plan says them."""
    later = 0 if loop is None else loop.skipped_ns
    ends = [max(starts_ns[each.id]) + each.duration_ns + later for each in workload.operations]
    return tail_of(
        workload, ends, exchanged=_exchanged_at(workload, starts_ns, loop) if workload.exchanges else NOTHING
    )


def _exchanged_at(workload: Workload, starts_ns: Mapping[str, Sequence[int]], loop: Loop | None) -> ExchangeEnds:
    """What actions exchange, which a plan does not say."""
    skipped = 0 if loop is None else loop.skipped
    written = workload.with_microbatches(workload.num_microbatches - skipped)
    numbers = _Numbers.of(written)
    starts = [start for each in written.operations for start in starts_ns[each.id]]
    return exchanged_by(written, networks_at(numbers, starts), 0 if loop is None else loop.skipped_ns)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The actions of a workload as numbered tasks: no more than exchanges need of a graph of tasks."""

    workload: Workload
    offsets: list[int]
    operation_of: list[int]

    @classmethod
    def of(cls, workload: Workload) -> _Numbers:
        counts = [len(slots) for slots in workload.slots[: len(workload.operations)]]
        operation_of = [item for item, count in enumerate(counts) for _ in range(count)]
        return cls(workload, [0, *accumulate(counts)], operation_of)


def exchanged_by(workload: Workload, networks: Networks, later_ns: int = 0) -> ExchangeEnds:
    """What networks have exchanged for actions; a loop makes the last of it ``later_ns`` later."""
    until, sums, stages = [0] * len(workload.devices), list[tuple[int, int, tuple[int, ...]]](), workload.stages
    for devices, network in networks:
        for device in devices:
            until[device] = network.free + later_ns
        for kind, stage, _, start, end, _, _ in network.runs:
            if kind == REDUCE_GRAD and stages[stage].reduce_every == ONCE:
                sums.append((start + later_ns, end + later_ns, devices))
    return ExchangeEnds(tuple(until), tuple(sums))


def _slowed(
    workload: Workload, acted: Sequence[int], times: Sequence[tuple[int, int]], exchanged: ExchangeEnds
) -> list[int]:
    """[device] ns by which it has ended its actions later, as its network summed gradients beside them."""
    found = [0] * len(acted)
    if not any(device.contention for device in workload.devices):
        return found
    jobs = zip(workload.gradient_sums, times, strict=True)
    for start, end, devices in [*exchanged.sums, *((*time, job.devices) for job, time in jobs)]:
        for device in devices:
            found[device] += max(0, min(end, acted[device]) - start)
    return [round(device.contention * beside) for device, beside in zip(workload.devices, found, strict=True)]


def _actions_of(workload: Workload, ends_ns: Sequence[int]) -> tuple[list[int], list[int]]:
    """[device] when it has ended its actions, and [sum] when it is ready."""
    acted, gradients = [0] * len(workload.devices), [0] * len(workload.stages)
    for operation, end in zip(workload.operations, ends_ns, strict=True):
        for device in workload.stages[operation.stage].devices:
            acted[device] = max(acted[device], end)
        if operation.role in GRADIENT_ROLES:
            gradients[operation.stage] = max(gradients[operation.stage], end)
    return acted, [each.ready(gradients) for each in workload.gradient_sums]


def _one_after_another(
    jobs: Sequence[NetworkJob], ready: Sequence[int], free: list[int], order: Collection[int] = ()
) -> list[tuple[int, int]]:
    """[job] its (start, end) when each begins, in this order or as they become ready, once its networks are free.

    ``free`` [device] ns at which its network is, and then will be.
    """
    times = [(0, 0)] * len(jobs)
    for number in order or sorted(range(len(jobs)), key=lambda each: (ready[each], each)):
        job = jobs[number]
        start = max([ready[number], *(free[device] for device in job.devices)])
        times[number] = start, start + job.duration_ns
        for device in job.devices:
            free[device] = start + job.duration_ns
    return times


def best_tail(workload: Workload, ends_ns: Sequence[int], exchanged: ExchangeEnds = NOTHING) -> tuple[Workload, Tail]:
    """The workload summing in buckets or not, in an order, whatever ends sooner of what is found; and its tail."""
    found = []
    for way in workload.ways_to_sum:
        order = best_order(way, ends_ns, exchanged)
        found.append((way, order, tail_of(way, ends_ns, order, exchanged)))
    way, order, tail = min(found, key=lambda each: (each[2].iteration_ns, sum(each[2].ended_ns)))
    return (way if way.sum_order == order else replace(way, sum_order=order)), tail


def best_order(workload: Workload, ends_ns: Sequence[int], exchanged: ExchangeEnds = NOTHING) -> tuple[int, ...]:
    """An order of sums by which the iteration ends sooner than as they become ready; none where none is found.

    On one network alone readiness is best, so that an order matters only where sums have several devices. Of up to
    :data:`MOST_PERMUTED` sums every order is tried; of more moves of one sum to the front of others, while one helps.
    """
    sums = workload.gradient_sums
    acted, ready = _actions_of(workload, ends_ns)

    def iteration(order: Collection[int] = ()) -> int:
        return _tail(workload, acted, ready, order, exchanged).iteration_ns

    best = iteration() if len(sums) > 1 else 0
    if best <= _least_iteration(workload, ends_ns, exchanged):
        return ()
    if len(sums) <= MOST_PERMUTED:
        tried = ((iteration(order), order) for order in permutations(range(len(sums))))
        found, order = min(tried)
        return order if found < best else ()
    order, chosen = tuple(sorted(range(len(sums)), key=lambda each: (ready[each], each))), tuple[int, ...]()
    left = MOST_TRIED
    while left:
        moved = islice(_moved(order), left)
        better = next((each for each in moved if iteration(each) < best), None)
        left = 0 if better is None else left - 1
        if better is not None:
            best, order, chosen = iteration(better), better, better
    return chosen


MOST_PERMUTED, MOST_TRIED = 5, 100
"""Up to how many sums all orders are tried; beyond that, how many moves, and how many improving ones."""


def _moved(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The orders in which one sum comes sooner: the latest sums first, since they come after everything else."""
    for place in range(len(order) - 1, 0, -1):
        for to in range(place):
            yield (*order[:to], order[place], *order[to:place], *order[place + 1 :])


def _least_iteration(workload: Workload, ends_ns: Sequence[int], exchanged: ExchangeEnds) -> int:
    """Ns that no order of sums is below: each network alone with its sums as they become ready, steps and gathers."""
    free, ready = _actions_of(workload, ends_ns)
    network = [*exchanged.until_ns] or [0] * len(free)
    for number in sorted(range(len(ready)), key=ready.__getitem__):
        job = workload.gradient_sums[number]
        for device in job.devices:
            network[device] = max(network[device], ready[number]) + job.duration_ns
    gathers = [0] * len(free)
    for job in workload.gathers:
        for device in job.devices:
            gathers[device] += job.duration_ns
    ends = zip(map(max, zip(free, network, strict=True)), workload.steps_ns, gathers, strict=True)
    return max(map(sum, ends))
