"""A round in the middle of a timed schedule from which it only repeats: the loop of a plan.

Starts obey a recurrence in (max, +): what is after a moment depends on what is before it only by a *state*, the ends
of what the devices and links ran last and of the actions that later ones wait for. Where the state at the end of a
round is that at its beginning, ``round_ns`` later and with later micro-batches, running the same round again leads to
the same state another ``round_ns`` later. So any number of copies can be put in, and all that comes after them is later
by their time, and is otherwise what it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from pipeplan.errors import InvalidPlanError
from pipeplan.time_limit import checked
from pipeplan.workload.engine import with_links
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class LoopCut:
    """A round of a timed schedule that runs ``copies`` times and is there once.

    It is what starts in ``round_ns`` from ``begin_ns`` on: ``counts`` [item] actions of each, after ``begins`` [item]
    others; ``microbatches`` of the workload's own size end in it.
    """

    microbatches: int
    begin_ns: int
    round_ns: int
    begins: tuple[int, ...]
    counts: tuple[int, ...]
    copies: int = 1

    @property
    def skipped(self) -> int:
        """Micro-batches that run and are not there."""
        return (self.copies - 1) * self.microbatches

    @property
    def skipped_ns(self) -> int:
        """By how much later than it is there everything after the round is."""
        return (self.copies - 1) * self.round_ns


@dataclass(frozen=True, slots=True)
class LoopedOrders:
    """Orders and starts of ``graph``, in which a loop, if there is one, runs its round more than once."""

    graph: TaskGraph
    orders: list[list[int]]
    starts: list[int]
    loop: LoopCut | None

    @property
    def skipped_ns(self) -> int:
        """By how much longer than there all takes."""
        return 0 if self.loop is None else self.loop.skipped_ns


def counts_of(workload: Workload, microbatches: int) -> tuple[int, ...] | None:
    """[item] the actions, or messages, of a round of that many micro-batches.

    None where those are no whole number, where actions are counted, and where memory is kept from one device's action
    to another's: how that overlaps is not said by where a round begins.
    """
    samples = microbatches * workload.microbatch_size
    if workload.needs or workload.networks or any(stage.kept.total for stage in workload.stages):
        return None
    found = []
    for slots in workload.slots:
        count, rest = divmod(samples, slots.stride)
        if rest or (slots.run < slots.every and count % slots.every):
            return None
        found.append(count if slots.run == slots.every else count // slots.every * slots.run)
    return tuple(found)


def find_loop(
    graph: TaskGraph, orders: Orders, starts: Sequence[int], microbatches: int, likely: Iterable[int] = ()
) -> tuple[LoopCut, int] | None:
    """The first round of that many micro-batches that can be repeated as it is, and how often it is there in a row.

    None if there is none. It begins with an action of the first operation: if none is found, ``likely`` ones are tried,
    too. ``orders`` [device, link] and ``starts`` [task] as in
    :func:`~pipeplan.workload.task_graph.earliest_starts`.
    """
    counts = counts_of(graph.workload, microbatches)
    if counts is None:
        return None
    search = _LoopFinder.of(graph, orders, starts, counts)
    if search is None:
        return None
    low, high = 2 * graph.workload.slots[0].num_parted, len(search.starts[0]) - counts[0]
    number = next(filter(search.repeats, checked(chain(_places(low, high), likely), 16)), None)
    if number is None:
        return None
    cut = search.cut(search.first(low, number), microbatches)
    copies = 1
    while search.begins(cut.begin_ns + copies * cut.round_ns, cut.round_ns) is not None:
        copies += 1
    return cut, copies


_FEW = 256


def _places(low: int, high: int) -> Iterator[int]:
    """Numbers of actions with which a round may begin: all of few, of many ever more apart from the end on.

    Once times repeat they do until cooldown begins, so that what repeats for long is met.
    """
    if high - low <= _FEW:
        yield from range(low, high)
        return
    yield from range(high - 1, high - _FEW, -1)
    back = _FEW
    while high - back > low:
        yield high - back
        back += back // 4


@dataclass(frozen=True, slots=True)
class _LoopFinder:
    """A timed schedule: ``starts`` [item][action]; ``begun`` and ``ends`` [device, link] of its actions in order."""

    workload: Workload
    counts: Sequence[int]
    starts: list[Sequence[int]]
    begun: list[list[int]]
    ends: list[list[int]]

    @classmethod
    def of(cls, graph: TaskGraph, orders: Orders, starts: Sequence[int], counts: Sequence[int]) -> _LoopFinder | None:
        """None where an operation does not run its micro-batches in turn."""
        by_item = [starts[begin:end] for begin, end in pairwise(graph.offsets)]
        if any(after < before for row in by_item for before, after in pairwise(row)):
            return None
        begun = [[starts[task] for task in order] for order in orders]
        ends = [[starts[task] + graph.durations[task] for task in order] for order in orders]
        return cls(graph.workload, counts, by_item, begun, ends)

    def repeats(self, number: int) -> bool:
        """Whether a round that begins with an action of the first operation can be repeated."""
        row = self.starts[0]
        return self.begins(row[number], row[number + self.counts[0]] - row[number]) is not None

    def first(self, low: int, number: int) -> int:
        """The first of the actions up to a number from which on all rounds can be repeated."""
        while low < number:
            middle = (low + number) // 2
            low, number = (low, middle) if self.repeats(middle) else (middle + 1, number)
        return number

    def cut(self, number: int, microbatches: int) -> LoopCut:
        """The round that begins with an action of the first operation, and can be repeated."""
        begin = self.starts[0][number]
        period = self.starts[0][number + self.counts[0]] - begin
        begins = self.begins(begin, period)
        assert begins is not None
        return LoopCut(microbatches, begin, period, begins, tuple(self.counts))

    def begins(self, begin: int, period: int) -> tuple[int, ...] | None:
        """[item] how many actions are before the round that begins then; None if the state does not repeat there."""
        for begun, ends in zip(self.begun, self.ends, strict=True):
            before, after = bisect_left(begun, begin), bisect_left(begun, begin + period)
            if before == after:
                if begun:
                    return None
                continue
            free = ends[before - 1] if before else 0
            # what is first in the round may start later than its device is free, for a reason that repeats, too
            if ends[after - 1] - free != period and not (free < begun[before] >= ends[after - 1] - period):
                return None
        begins = [bisect_left(row, begin) for row in self.starts]
        for row, first, count, slots in zip(self.starts, begins, self.counts, self.workload.slots, strict=True):
            if bisect_left(row, begin + period) - first != count or first < 2 * slots.num_parted:
                return None
        for source, target, _ in self.workload.edges:
            earliest = self.workload.inputs_of(source, target, begins[target]).start
            row, count = self.starts[source], self.counts[source]
            if earliest < begins[source] and earliest < 2 * self.workload.slots[source].num_parted:
                return None
            if any(row[number + count] - row[number] != period for number in range(earliest, begins[source])):
                return None
        return tuple(begins)


def longer(
    graph: TaskGraph, orders: Orders, begins: Sequence[int], microbatches: int, copies: int
) -> tuple[TaskGraph, list[list[int]]]:
    """The graph and the orders with a round run that many times more: that with ``begins`` [item] actions before it.

    Raises:
        InvalidPlanError: the orders do not have such a round.
    """
    workload = graph.workload
    counts = counts_of(workload, microbatches)
    if counts is None:
        raise InvalidPlanError(f"{microbatches} micro-batches are no round of this workload that can be repeated")
    larger = task_graph(workload.with_microbatches(workload.num_microbatches + copies * microbatches))
    found = []
    for order in orders:
        named = [(graph.operation_of[task], task) for task in order]
        entries = [(item, task - graph.offsets[item]) for item, task in named]
        here = {item for item, _ in entries}
        begin, length = sum(begins[item] for item in here), sum(counts[item] for item in here)
        prefix, round_, suffix = entries[:begin], entries[begin : begin + length], entries[begin + length :]
        if any(number >= begins[item] for item, number in prefix) or any(
            not 0 <= number - begins[item] < counts[item] for item, number in round_
        ):
            raise InvalidPlanError("a device or link runs something of the round before or after it")
        times = [(prefix, 0), *((round_, copy) for copy in range(copies + 1)), (suffix, copies)]
        found.append(
            [larger.offsets[item] + number + copy * counts[item] for part, copy in times for item, number in part]
        )
    return larger, found


def _shorter(graph: TaskGraph, orders: Orders, cut: LoopCut, copies: int) -> tuple[TaskGraph, list[list[int]]]:
    """The graph and the orders without some copies of a round, which stand after it."""
    smaller = task_graph(graph.workload.with_microbatches(graph.workload.num_microbatches - copies * cut.microbatches))
    found: list[list[int]] = []
    for order in orders:
        tasks = []
        for task in order:
            item = graph.operation_of[task]
            number, after = task - graph.offsets[item], cut.begins[item] + cut.counts[item]
            if number >= after + copies * cut.counts[item]:
                tasks.append(smaller.offsets[item] + number - copies * cut.counts[item])
            elif number < after:
                tasks.append(smaller.offsets[item] + number)
        found.append(tasks)
    return smaller, found


MAX_WRITTEN = 200_000
"""Actions and messages after which a schedule that has not come to repeat itself is given up."""


def looped(
    graph: TaskGraph,
    orders: Orders,
    begins: Sequence[int],
    microbatches: int,
    num_microbatches: int,
    max_written: int = MAX_WRITTEN,
) -> LoopedOrders | None:
    """The schedule for more micro-batches, by repeating a round: with a loop as soon as times repeat, too.

    ``orders`` [device, link] have a round of ``microbatches`` with ``begins`` [item] actions before it; without
    those of the links, and their messages in ``begins``, links carry first come, first served. None if rounds do not
    come out at ``num_microbatches``, or times do not repeat within ``max_written`` actions and messages.

    Raises:
        InvalidPlanError: the orders do not have such a round.
    """
    wanted, rest = divmod(num_microbatches - graph.workload.num_microbatches, microbatches)
    counts = counts_of(graph.workload, microbatches)
    if rest or wanted < 0 or counts is None:
        return None
    copies = 0
    while True:
        larger, extended = longer(graph, orders, begins, microbatches, copies)
        extended = with_links(larger, extended)
        starts = earliest_starts(larger, extended)
        likely = range(begins[0], begins[0] + copies * counts[0], counts[0])
        found = None if copies == wanted else find_loop(larger, extended, starts, microbatches, likely)
        if found is not None:
            cut, there = found
            larger, extended = _shorter(larger, extended, cut, there - 1)
            starts = earliest_starts(larger, extended)
            return LoopedOrders(larger, extended, starts, replace(cut, copies=there + wanted - copies))
        if copies == wanted:
            return LoopedOrders(larger, extended, starts, None)
        copies = min(wanted, 2 * copies + 1)
        if graph.num_tasks + copies * sum(counts) > max_written:
            return None
