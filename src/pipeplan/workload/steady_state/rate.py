"""Where the orders of a schedule contain a repetend, and how fast it goes when it is repeated without end.

A repetend (Tessel III-C) is said by ``first`` and ``unroll``: on each device the *copy* is a contiguous run in
which every operation of the device occurs ``unroll`` times, on micro-batches ``first[operation]`` and on. What
runs before it is the prefix, what runs after it the suffix.

The orders of links are cut likewise, where a message's ``first`` is not stated: it lies between those of the
operations at its ends, and of the places where a link's order can be cut it is the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from operator import eq, sub

import numpy as np

from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.search_constants import MAX_REPLAYED
from pipeplan.time_limit import checked
from pipeplan.workload.columns import IntArray, Lines
from pipeplan.workload.task_graph import Orders
from pipeplan.workload.workload import Workload

Entry = tuple[int, int]
"""An action or message as (item, micro-batch), where all micro-batches have one size."""


@dataclass(frozen=True)
class CutOrders:
    """Orders cut at a repetend: ``begins`` [item] its first micro-batch in the copy.

    ``ranges`` [device, link] are the positions of the copy in its order; empty for a device without actions. ``items``
    and ``microbatches`` are those of ``lines``.
    """

    workload: Workload
    unroll: int
    begins: list[int]
    lines: Lines
    items: IntArray
    microbatches: IntArray
    ranges: list[range]

    @classmethod
    def of(cls, workload: Workload, orders: Orders, first: Mapping[str, int], unroll: int) -> CutOrders:
        """Cut orders where ``first`` and ``unroll`` say.

        Raises:
            InvalidPlanError: they do not contain such a copy.
        """
        begins = _begins(workload, orders, first, unroll)
        lines = Lines.of(orders)
        items, microbatches = np.divmod(lines.tasks, workload.num_microbatches)
        cut = cls(workload, unroll, begins, lines, items, microbatches, [])
        cut.ranges.extend(cut._ranges())
        cut._require_copies()
        return cut

    def _ranges(self) -> Iterator[range]:
        """[device, link] where the copy is. Raises InvalidPlanError where an order is too short."""
        for resource, count in enumerate(self.lines.counts.tolist()):
            here = self.workload.on_resource[resource] if count else ()
            begin = sum(self.begins[item] for item in here)
            end = begin + self.unroll * len(here)
            if end > count:
                raise InvalidPlanError(
                    f"{self._where(resource)} runs {count} actions, too few for the repetend, whose {self.unroll} of "
                    f"each operation would be actions {begin} to {end - 1}"
                )
            yield range(begin, end)

    def _require_copies(self) -> None:
        """Require that the copies hold what they must.

        Raises:
            InvalidPlanError: the orders are not made like that; the text names the first action out of place.
        """
        bounds = np.array([(own.start, own.stop) for own in self.ranges])[self.lines.numbers]
        place = np.arange(len(self.items)) - np.repeat(self.lines.begins[:-1], self.lines.counts)
        part = (place >= bounds[:, 0]).astype(int) + (place >= bounds[:, 1])
        later = self.microbatches - np.array(self.begins)[self.items]
        wrong = np.flatnonzero(part != (later >= 0).astype(int) + (later >= self.unroll))
        if len(wrong):
            item, m = int(self.items[wrong[0]]), int(self.microbatches[wrong[0]])
            raise InvalidPlanError(
                f"{self._where(int(self.lines.numbers[wrong[0]]))} runs {self.workload.label(item, m)} "
                f"{('before', 'inside', 'after')[part[wrong[0]]]} the repetend, which has its micro-batches "
                f"{self.begins[item]} to {self.begins[item] + self.unroll - 1}"
            )

    def _where(self, resource: int) -> str:
        return f"device {resource}" if resource < len(self.workload.devices) else "a link"

    @cached_property
    def copies(self) -> list[list[Entry]]:
        """[device, link] the copy."""
        return [self._entries(resource, own.start, own.stop) for resource, own in enumerate(self.ranges)]

    def _entries(self, resource: int, begin: int, end: int) -> list[Entry]:
        at = int(self.lines.begins[resource])
        cut = slice(at + begin, at + end)
        return list(zip(self.items[cut].tolist(), self.microbatches[cut].tolist(), strict=True))

    @property
    def tasks(self) -> frozenset[int]:
        """The tasks of the copy."""
        return tasks_of_copy(self.begins, self.unroll, self.workload.num_microbatches)

    @property
    def rate(self) -> Fraction | None:
        """Time from one repetition to the next on average: see :func:`repetend_rate`."""
        steady = steady_state(self.workload, self.copies, self.begins, self.unroll)
        return None if steady is None else Fraction(steady[1], steady[0] * self.unroll)

    def orders(self, copies: int) -> list[list[int]]:
        """[device, link] the order with this many copies more, in tasks of a workload with as many micro-batches."""
        count = self.workload.num_microbatches + copies * self.unroll
        tasks = self.items * count + self.microbatches
        times, found = np.arange(copies + 1)[:, None] * self.unroll, []
        for (begin, end), own in zip(pairwise(self.lines.begins.tolist()), self.ranges, strict=True):
            before, copy, after = np.split(tasks[begin:end], [own.start, own.stop])
            repeated = (copy + times).ravel()
            found.append([*before.tolist(), *repeated.tolist(), *(after + copies * self.unroll).tolist()])
        return found


def _begins(workload: Workload, orders: Orders, first: Mapping[str, int], unroll: int) -> list[int]:
    """[item] its first micro-batch in the copy: stated for operations, found in the links' orders for transfers.

    Raises:
        InvalidPlanError: a link's order cannot be cut.
    """
    begins = [first[operation.id] for operation in workload.operations] + [0] * len(workload.transfers)
    for link, order in zip(workload.links, orders[len(workload.devices) :], strict=True):
        items, numbers = np.divmod(np.array(order, np.int64), workload.num_microbatches)
        entries = list(zip(items.tolist(), numbers.tolist(), strict=True))
        found = link_begins(workload, entries, begins, unroll, dict.fromkeys(sorted({x for x, _ in entries}), 0))
        if found is None:
            raise InvalidPlanError(
                f"the link from device {link[0]} to {link[1]} carries its messages in an order that has no part for "
                "the repetend"
            )
        for item, begin in found.items():
            begins[item] = begin
    return begins


def link_begins(
    workload: Workload, entries: Sequence[Entry], begins: Sequence[int], unroll: int, passed: Mapping[int, int]
) -> dict[int, int] | None:
    """{transfer: its first micro-batch in the copy} for the last place where a link's order can be cut; None if none.

    No message of a copy waits for a later copy, and none is waited for by an earlier one: ``begins`` [operation]
    bound a transfer's by its source's and its target's. ``passed`` {transfer: micro-batches} are those before the first
    place to be considered.
    """
    ends = {item: workload.transfers[item - len(workload.operations)] for item in passed}
    counts, last = dict(passed), {item: count - 1 for item, count in passed.items()}
    found: dict[int, int] | None = None
    least = sum(begins[each.target] for each in ends.values())
    most = sum(begins[each.source] for each in ends.values())
    for at in range(sum(passed.values()), most + 1):
        if (
            at >= least
            and all(begins[ends[x].target] <= counts[x] <= begins[ends[x].source] for x in counts)
            and all(last[x] == counts[x] - 1 for x in counts)
            and sorted(entries[at : at + unroll * len(counts)])
            == [(x, counts[x] + u) for x in counts for u in range(unroll)]
        ):
            found = dict(counts)
        if at < len(entries):
            item, m = entries[at]
            counts[item], last[item] = counts[item] + 1, max(last[item], m)
    return found


def tasks_of_copy(begins: Sequence[int], unroll: int, num_microbatches: int) -> frozenset[int]:
    """The tasks of a copy in a workload of ``num_microbatches``; ``begins`` [item] are the first ones of the copy."""
    return frozenset(x * num_microbatches + m for x, begin in enumerate(begins) for m in range(begin, begin + unroll))


def require_cut(workload: Workload, first: Mapping[str, int]) -> None:
    """Require equal micro-batch sizes, and that no action of a copy waits for a later copy.

    Raises:
        UsageError: stages have micro-batches of unequal sizes.
        InvalidPlanError: ``first`` makes a copy wait for a later one.
    """
    require_equal_sizes(workload)
    for dependency in workload.dependencies:
        source, target, later = dependency.source, dependency.target, dependency.later
        if first[source] + later < first[target]:
            behind = f", {later} micro-batches before it" if later else ""
            raise InvalidPlanError(
                f"repetend.first has {target} from micro-batch {first[target]} and {source}, which it waits for"
                f"{behind}, from {first[source]}: a copy would wait for a later one"
            )


def require_equal_sizes(workload: Workload) -> None:
    """Require that all micro-batches are alike on all stages; raises UsageError."""
    for index, stage in enumerate(workload.stages):
        if stage.microbatch_size != workload.microbatch_size:
            raise UsageError(
                f"a repetend needs one micro-batch size for all stages; stages[{index}] has "
                f"{stage.microbatch_size}, the plan {workload.microbatch_size}"
            )
    if not workload.is_uniform:
        raise UsageError("a repetend needs one route, no micro-batch in parts and no dependency with counts of its own")


def steady_bubble_rate(workload: Workload, period: Fraction) -> float:
    """Idle share of the devices when a micro-batch ends every ``period`` ns (Tessel Fig. 11, 12, Table II)."""
    work = workload.of_all(workload.work[: len(workload.devices)])
    return float(1 - work / (workload.num_devices * period))


def repetend_rate(workload: Workload, orders: Orders, first: Mapping[str, int], unroll: int) -> Fraction | None:
    """Time from one repetition to the next on average, in ns per micro-batch, when copies run without end.

    This is by how much a micro-batch more lengthens the makespan. None where a replay of :data:`MAX_REPLAYED` actions
    does not become periodic.

    Raises:
        InvalidPlanError: the orders do not contain such a copy.
    """
    require_cut(workload, first)
    return CutOrders.of(workload, orders, first, unroll).rate


def steady_state(
    workload: Workload,
    runs: Sequence[Sequence[Entry]],
    first: Sequence[int],
    unroll: int,
    max_tasks: int = MAX_REPLAYED,
) -> tuple[int, int] | None:
    """(cycle, time): every ``cycle`` copies shift by ``time`` ns when copies run without end.

    Starts obey a recurrence in (max, +), where a copy depends on the ``reach`` copies before it. When over a cycle
    and that many copies every task has moved on by its own constant shift, and none waits for one that shifts by
    more, what decides each start shifts with it, so it stays so for ever, and the largest shift is that of the
    makespan. ``runs`` [device, link] is one copy, ``first`` [item].

    None if that does not come about within ``max_tasks`` actions. Where these, :data:`MAX_REPLAYED` or more, are fewer
    than what a copy depends on, copies that can follow each other at the pace of the busiest device do so on average,
    as it cannot go faster.
    """
    copy = _CopyGraph.of(workload, runs, first, unroll)
    if copy is None:
        return None
    starts: list[list[int]] = []
    num_copies = 2 * copy.reach + 12
    while num_copies * copy.num_tasks <= max_tasks:
        copy.run(starts, num_copies)
        for cycle in checked(range(1, (num_copies - copy.reach) // 2 + 1), 4):
            shift = copy.steady_shift(starts, cycle)
            if shift is not None:
                return cycle, max(shift)
        num_copies *= 2
    if starts or max_tasks < MAX_REPLAYED:
        return None
    busiest = max(sum(workload.durations[item] for item, _ in run) for run in runs)
    return (1, busiest) if copy.keeps_pace(busiest, max_tasks) else None


@dataclass(frozen=True, slots=True)
class _CopyGraph:
    """One copy as tasks, and what each waits for: (copies back, task, time from its start), in a runnable order."""

    order: list[int]
    waits: list[list[tuple[int, int, int]]]
    reach: int

    @property
    def num_tasks(self) -> int:
        return len(self.order)

    @classmethod
    def of(
        cls, workload: Workload, runs: Sequence[Sequence[Entry]], first: Sequence[int], unroll: int
    ) -> _CopyGraph | None:
        """None if the actions of one copy wait for each other."""
        durations = workload.durations
        waits: list[list[tuple[int, int, int]]] = [[] for _ in range(len(durations) * unroll)]
        for source, target, lag in workload.edges:
            for u in range(unroll):
                ahead, back = divmod(first[target] + u - first[source], unroll)
                waits[target * unroll + u].append((-ahead, source * unroll + back, durations[source] + lag))
        for source, target, lag, later in workload.returns:
            for u in range(unroll):
                ahead, back = divmod(first[target] + u - later - first[source], unroll)
                waits[target * unroll + u].append((-ahead, source * unroll + back, durations[source] + lag))
        for run in dict.fromkeys(map(tuple, runs)):  # devices of one stage run the same
            tasks = [item * unroll + m - first[item] for item, m in run]
            for before, after in zip(tasks, tasks[1:], strict=False):
                waits[after].append((0, before, durations[before // unroll]))
            if tasks:
                waits[tasks[0]].append((1, tasks[-1], durations[tasks[-1] // unroll]))
        order = _topological(waits)
        reach = max((back for wait in waits for back, _, _ in wait), default=0)
        return None if order is None else cls(order, waits, max(1, reach))

    def run(self, starts: list[list[int]], num_copies: int) -> None:
        """Continue ``starts`` [copy][task] in ns to ``num_copies`` copies, each task as soon as it can."""
        for k in checked(range(len(starts), num_copies), 4):
            now = [0] * self.num_tasks
            for task in self.order:
                begin = 0
                for back, other, delay in self.waits[task]:
                    if back == 0:
                        ready = now[other] + delay
                    elif back <= k:
                        ready = starts[k - back][other] + delay
                    else:
                        continue
                    if ready > begin:
                        begin = ready
                now[task] = begin
            starts.append(now)

    def keeps_pace(self, time: int, max_steps: int) -> bool:
        """Whether copies can begin every ``time`` ns, as starts in one copy show that all that it waits for allows.

        They are put off until nothing moves any more, which never comes where a circle of waits takes longer. False
        also where it has not come after so many actions have been looked at.
        """
        starts = [0] * self.num_tasks
        for _ in checked(range(max_steps // max(1, self.num_tasks)), 4):
            moved = False
            for task in self.order:
                begin = starts[task]
                for back, other, delay in self.waits[task]:
                    ready = starts[other] + delay - back * time
                    if ready > begin:
                        begin, moved = ready, True
                starts[task] = begin
            if not moved:
                return True
        return False

    def steady_shift(self, starts: Sequence[Sequence[int]], cycle: int) -> list[int] | None:
        """Shift of each task over ``cycle`` copies if it will stay as it is, in ns; else None."""
        shift = [after - before for before, after in zip(starts[-1 - cycle], starts[-1], strict=True)]
        if any(shift[other] > shift[task] for task in self.order for _, other, _ in self.waits[task]):
            return None  # before copies are compared: times that drift apart by little are alike for very many
        for k in range(len(starts) - self.reach - cycle, len(starts) - 1):
            moved = map(sub, starts[k], starts[k - cycle])
            if not all(map(eq, moved, shift)):
                return None
        return shift


def _topological(waits: Sequence[Sequence[tuple[int, int, int]]]) -> list[int] | None:
    """Tasks of one copy so that none comes before one of the same copy it waits for; None if there is a cycle."""
    waiting = [sum(back == 0 for back, _, _ in wait) for wait in waits]
    followers: list[list[int]] = [[] for _ in waits]
    for task, wait in enumerate(waits):
        for back, other, _ in wait:
            if back == 0:
                followers[other].append(task)
    order = [task for task, count in enumerate(waiting) if count == 0]
    for task in order:
        for other in followers[task]:
            waiting[other] -= 1
            if waiting[other] == 0:
                order.append(other)
    return order if len(order) == len(waits) else None
