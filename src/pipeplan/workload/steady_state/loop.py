"""A round in the middle of a timed schedule from which it only repeats: the loop of a plan.

Starts obey a recurrence in (max, +): what is after a moment depends on what is before it only by a *state*, the ends
of what the devices and links ran last and of the actions that later ones wait for. Where the state at the end of a
round is that at its beginning, ``round_ns`` later and with later micro-batches, running the same round again leads to
the same state another ``round_ns`` later. So any number of copies can be put in, and all that comes after them is later
by their time, and is otherwise what it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from pipeplan.errors import InvalidPlanError
from pipeplan.search_constants import FEW_ROUNDS, MAX_WRITTEN, ROUNDS_APART
from pipeplan.time_limit import checked
from pipeplan.workload.engine import with_links
from pipeplan.workload.exchanges import Snapshot, exchanges_come_out, snapshots
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class LoopCut:
    """A round of a timed schedule that runs ``copies`` times and is there once; or several, each of other items.

    A round is what starts in its time from its begin on, ``moments`` [round] in ns: ``counts`` [item] actions of each
    of its items, ``rounds`` [item] being an item's, after ``begins`` [item] others. They are of ``microbatches`` of the
    workload's own size.
    """

    microbatches: int
    moments: tuple[tuple[int, int], ...]
    begins: tuple[int, ...]
    counts: tuple[int, ...]
    rounds: tuple[int, ...]
    copies: int = 1

    @property
    def skipped(self) -> int:
        """Micro-batches that run and are not there."""
        return (self.copies - 1) * self.microbatches

    @property
    def round_ns(self) -> int:
        """Ns of one copy of all rounds."""
        return sum(time for _, time in self.moments)

    @property
    def skipped_ns(self) -> int:
        """By how much later than it is there everything after the last round is."""
        return (self.copies - 1) * self.round_ns

    def without(self, removed: int, copies: int) -> LoopCut:
        """The same loop with some copies of every round removed, so that it runs ``copies`` times."""
        gone = [removed * sum(time for _, time in self.moments[:number]) for number in range(len(self.moments))]
        moments = tuple((begin - by, time) for (begin, time), by in zip(self.moments, gone, strict=True))
        return replace(self, moments=moments, copies=copies)

    def skipped_of(self, item: int) -> int:
        """Actions of an operation, or messages, that run and are not there."""
        return (self.copies - 1) * self.counts[item]

    def is_after(self, item: int, number: int) -> bool:
        """Whether an action, or a message, is after its round."""
        return number >= self.begins[item] + self.counts[item]

    def later_ns(self, item: int, number: int) -> int:
        """By how much later than it is there an action runs; in its round, the first copy of it."""
        over = self.rounds[item] + self.is_after(item, number)
        return (self.copies - 1) * sum(time for _, time in self.moments[:over])


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

    None where those are no whole number, where exchanges do not come out, where actions are counted, where they wait
    for what earlier micro-batches return, and where memory is kept from one device's action to another's: how that
    overlaps is not said by where a round begins.
    """
    samples = microbatches * workload.microbatch_size
    if any(each.later or each.needs is not None for each in workload.dependencies):
        return None
    if workload.networks or any(stage.kept.total for stage in workload.stages):
        return None
    found = []
    for slots in workload.slots:
        count, rest = divmod(samples, slots.stride)
        if rest or (slots.run < slots.every and count % slots.every):
            return None
        found.append(count if slots.run == slots.every else count // slots.every * slots.run)
    return None if workload.exchanges and not exchanges_come_out(workload, found) else tuple(found)


def find_loop(
    graph: TaskGraph,
    orders: Orders,
    starts: Sequence[int],
    microbatches: int,
    likely: Sequence[Iterable[int]] = ((),),
    rounds: Sequence[int] | None = None,
) -> tuple[LoopCut, int] | None:
    """The first round of that many micro-batches that can be repeated as it is, and how often it is there in a row.

    Where there are several, ``rounds`` [item] says the one of each, and it is the least often that one is there. None
    if one is not there. A round begins with an action of its first operation: if none is found, ``likely`` [round] ones
    are tried, too. ``orders`` [device, link] and ``starts`` [task] as in
    :func:`~pipeplan.workload.task_graph.earliest_starts`.
    """
    counts = counts_of(graph.workload, microbatches)
    if counts is None:
        return None
    one_of = tuple(rounds or [0] * len(counts))
    moments: list[tuple[int, int]] = []
    begins, there = [0] * len(counts), []
    for number, tried in enumerate(likely):
        search = _LoopFinder.of(graph, orders, starts, counts, one_of, number)
        found = None if search is None else search.found(tried)
        if search is None or found is None:
            return None
        moment, copies = found
        moments.append(moment)
        there.append(copies)
        for item, begin in (search.begins(*moment) or {}).items():
            begins[item] = begin
    return LoopCut(microbatches, tuple(moments), tuple(begins), counts, one_of), min(there)


def _places(low: int, high: int) -> Iterator[int]:
    """Numbers of actions with which a round may begin: all of few, of many ever more apart from the end on.

    Once times repeat they do until cooldown begins, so that what repeats for long is met.
    """
    if high - low <= FEW_ROUNDS:
        yield from range(low, high)
        return
    yield from range(high - 1, high - FEW_ROUNDS, -1)
    back = FEW_ROUNDS
    while high - back > low:
        yield high - back
        back += back // ROUNDS_APART


@dataclass(frozen=True, slots=True)
class _LoopFinder:
    """A timed schedule: ``starts`` [item][action]; ``begun`` and ``ends`` [device, link] of its actions in order.

    The round that is looked for is that of a ``number`` in ``rounds`` [item].
    """

    workload: Workload
    counts: Sequence[int]
    starts: list[Sequence[int]]
    begun: list[list[int]]
    ends: list[list[int]]
    rounds: Sequence[int]
    number: int
    networks: Sequence[tuple[list[int], list[Snapshot]]] = ()

    @classmethod
    def of(
        cls,
        graph: TaskGraph,
        orders: Orders,
        starts: Sequence[int],
        counts: Sequence[int],
        rounds: Sequence[int],
        number: int,
    ) -> _LoopFinder | None:
        """None where an operation does not run its micro-batches in turn."""
        by_item = [starts[begin:end] for begin, end in pairwise(graph.offsets)]
        if any(after < before for row in by_item for before, after in pairwise(row)):
            return None
        begun = [[starts[task] for task in order] for order in orders]
        ends = [[starts[task] + graph.durations[task] for task in order] for order in orders]
        networks = snapshots(graph, starts) if graph.workload.exchanges else ()
        return cls(graph.workload, counts, by_item, begun, ends, rounds, number, networks)

    @property
    def leading(self) -> int:
        """The operation with whose action the round begins."""
        return self.rounds.index(self.number)

    def found(self, likely: Iterable[int]) -> tuple[tuple[int, int], int] | None:
        """When the first round begins that can be repeated, its time in ns, and how often it is there in a row."""
        item = self.leading
        low, high = 2 * self.workload.slots[item].num_parted, len(self.starts[item]) - self.counts[item]
        number = next(filter(self.repeats, checked(chain(_places(low, high), likely), 16)), None)
        if number is None:
            return None
        begin, time = self.moment(self.first(low, number))
        copies = 1
        while self.begins(begin + copies * time, time) is not None:
            copies += 1
        return (begin, time), copies

    def moment(self, number: int) -> tuple[int, int]:
        """When a round begins with an action of the first operation, and its time, in ns."""
        row = self.starts[self.leading]
        return row[number], row[number + self.counts[self.leading]] - row[number]

    def repeats(self, number: int) -> bool:
        """Whether a round that begins with an action of the first operation can be repeated."""
        return self.begins(*self.moment(number)) is not None

    def first(self, low: int, number: int) -> int:
        """The first of the actions up to a number from which on all rounds can be repeated."""
        while low < number:
            middle = (low + number) // 2
            low, number = (low, middle) if self.repeats(middle) else (middle + 1, number)
        return number

    def begins(self, begin: int, period: int) -> dict[int, int] | None:
        """{item: how many of its actions are before the round that begins then}; None if the state does not repeat."""
        num_devices = len(self.workload.devices)
        for line, (begun, ends) in enumerate(zip(self.begun, self.ends, strict=True)):
            before, after = bisect_left(begun, begin), bisect_left(begun, begin + period)
            if before == after:
                if begun and (line < num_devices or 0 < before < len(begun)):
                    return None
                continue
            free = ends[before - 1] if before else 0
            # what is first in the round may start later than its device is free, for a reason that repeats, too
            if ends[after - 1] - free != period and not (free < begun[before] >= ends[after - 1] - period):
                return None
        for begun, states in self.networks:
            before, after = bisect_left(begun, begin) - 1, bisect_left(begun, begin + period) - 1
            if before < 0 or states[before].since(begin) != states[after].since(begin + period):
                return None
        begins = {}
        for item, row in enumerate(self.starts):
            first, after = bisect_left(row, begin), bisect_left(row, begin + period)
            other = self.rounds[item] - self.number
            count, least = self.counts[item], 2 * self.workload.slots[item].num_parted
            if other:
                if after != (len(row) if other < 0 else 0) or first != after:
                    return None  # not all of an earlier round before this one, or something of a later one
                continue
            if after - first != count or first < least:
                return None
            if item in self.workload.paced and (not first or row[after - 1] - row[first - 1] != period):
                return None
            begins[item] = first
        for source, target, _ in self.workload.edges:
            if source not in begins or target not in begins:
                continue  # by the order of their devices
            earliest = self.workload.inputs_of(source, target, begins[target]).start
            row, count = self.starts[source], self.counts[source]
            if earliest < begins[source] and earliest < 2 * self.workload.slots[source].num_parted:
                return None
            if any(row[number + count] - row[number] != period for number in range(earliest, begins[source])):
                return None
        return None if self._comes_later(begins, begin) else begins

    def _comes_later(self, begins: Mapping[int, int], begin: int) -> bool:
        """Whether an action before a round takes something inside that is made, and stands in programs, only in it."""
        if not self.workload.has_parts:
            return False
        made_ns = self.workload.made_ns
        for source, target, lag in self.workload.edges:
            if lag >= 0 or not begins.get(target):
                continue
            inputs = self.workload.inputs_of(source, target, begins[target] - 1)
            if inputs and self.starts[source][inputs[-1]] + made_ns.get((source, target), 0) >= begin:
                return True
        return False


def longer(
    graph: TaskGraph,
    orders: Orders,
    begins: Sequence[int],
    microbatches: int,
    copies: int,
    rounds: Sequence[int] | None = None,
) -> tuple[TaskGraph, list[list[int]]]:
    """The graph and the orders with a round run that many times more: that with ``begins`` [item] actions before it.

    So often runs each of several ``rounds`` [item].

    Raises:
        InvalidPlanError: the orders do not have such a round.
    """
    workload = graph.workload
    counts = counts_of(workload, microbatches)
    if counts is None:
        raise InvalidPlanError(f"{microbatches} micro-batches are not a round of this workload that can be repeated")
    larger = task_graph(workload.with_microbatches(workload.num_microbatches + copies * microbatches))
    own = rounds or [0] * len(counts)
    num_rounds = 1 + max(own)
    found = []
    for order in orders:
        entries = [(item, task - graph.offsets[item]) for task in order for item in (graph.operation_of[task],)]
        times = [(entries, 0)]  # parts, and how many copies later they are; the last is to be cut
        for number in range(num_rounds):
            rest, _ = times.pop()
            here = {item for item, _ in entries if own[item] == number}
            states = [_state(begins[item], counts[item], its) if item in here else None for item, its in rest]
            begin, length = next((i for i, s in enumerate(states) if s == 1), 0), sum(counts[item] for item in here)
            before, round_, after = states[:begin], states[begin : begin + length], states[begin + length :]
            if {*before} - {0, None} or {*round_} - {1} or {*after} - {2, None}:
                raise InvalidPlanError("a device or link runs something of the round before or after it")
            times += [(rest[:begin], 0), *((rest[begin : begin + length], copy) for copy in range(copies + 1))]
            times.append((rest[begin + length :], 0))
        found.append(
            [
                larger.offsets[item] + its + (copy or copies * (its >= begins[item] + counts[item])) * counts[item]
                for part, copy in times
                for item, its in part
            ]
        )
    return larger, found


def _state(begin: int, count: int, number: int) -> int:
    """0 before a round with ``count`` of an operation's actions, 1 in it, 2 after it."""
    return (number >= begin) + (number >= begin + count)


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


def shortened(graph: TaskGraph, orders: Orders, starts: Sequence[int], most_microbatches: int) -> LoopedOrders | None:
    """The schedule with a round that repeats there once, and a loop; None where none does twice in a row.

    Of rounds of at most so many micro-batches the first that leaves least to be written.
    """
    best: tuple[int, LoopCut, int] | None = None
    for microbatches in range(1, most_microbatches + 1):
        found = find_loop(graph, orders, starts, microbatches)
        if found is None or found[1] < 2:
            continue
        cut, there = found
        gone = (there - 1) * microbatches
        if best is None or gone > best[0]:
            best = gone, cut, there
    if best is None:
        return None
    _, cut, there = best
    smaller, left = _shorter(graph, orders, cut, there - 1)
    return LoopedOrders(smaller, left, earliest_starts(smaller, left), cut.without(there - 1, there))


def looped(
    graph: TaskGraph,
    orders: Orders,
    begins: Sequence[int],
    microbatches: int,
    num_microbatches: int,
    max_written: int = MAX_WRITTEN,
    rounds: Sequence[int] | None = None,
) -> LoopedOrders | None:
    """The schedule for more micro-batches, by repeating a round: with a loop as soon as times repeat, too.

    ``orders`` [device, link] have a round of ``microbatches`` with ``begins`` [item] actions before it; without
    those of the links, and their messages in ``begins``, links carry first come, first served. None if rounds do not
    come out at ``num_microbatches``, or times do not repeat within ``max_written`` actions and messages. Of several
    ``rounds`` [operation] a message is in that of its source.

    Raises:
        InvalidPlanError: the orders do not have such a round.
    """
    wanted, rest = divmod(num_microbatches - graph.workload.num_microbatches, microbatches)
    counts = counts_of(graph.workload, microbatches)
    if rest or wanted < 0 or counts is None or (rounds is not None and any(rounds) and graph.workload.exchanges):
        return None
    copies = 0
    own = [0] * len(graph.workload.operations) if rounds is None else [*rounds[: len(graph.workload.operations)]]
    own += [own[transfer.source] for transfer in graph.workload.transfers]
    leading = [own.index(number) for number in range(max(own) + 1)]
    while True:
        larger, extended = longer(graph, orders, begins, microbatches, copies, own)
        extended = with_links(larger, extended)
        starts = earliest_starts(larger, extended)
        likely = [range(begins[item], begins[item] + copies * counts[item], counts[item]) for item in leading]
        found = None if copies == wanted else find_loop(larger, extended, starts, microbatches, likely, own)
        if found is not None:
            cut, there = found
            larger, extended = _shorter(larger, extended, cut, there - 1)
            starts = earliest_starts(larger, extended)
            return LoopedOrders(larger, extended, starts, cut.without(there - 1, wanted - copies + there))
        if copies == wanted:
            return LoopedOrders(larger, extended, starts, None)
        copies = min(wanted, 2 * copies + 1)
        if graph.num_tasks + copies * sum(counts) > max_written:
            return None
