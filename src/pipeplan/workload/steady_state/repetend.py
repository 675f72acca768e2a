"""The repetend of a schedule: found, and repeated for more micro-batches (Tessel III-C).

With ``first[source] >= first[target]`` for every dependency, nothing in a copy waits for a later copy, so prefix,
any number of copies and suffix can be strung together without deadlock. A copy gives back what it takes, so
memory stays as it was.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice, takewhile
from operator import eq

from pipeplan.errors import UsageError
from pipeplan.search_constants import (
    AS_LONG_AS_ANY,
    LASTING_PART,
    MAX_REPLAYED,
    MOST_SWEPT,
    REPETEND_SAMPLES,
    SWEPT_UNROLL,
)
from pipeplan.time_limit import checked
from pipeplan.workload.bounds import work_bound
from pipeplan.workload.elements import MAX_COUNT, Repetend
from pipeplan.workload.steady_state.rate import (
    CutOrders,
    Entry,
    link_begins,
    require_cut,
    require_equal_sizes,
    steady_state,
)
from pipeplan.workload.task_graph import Orders, TaskGraph
from pipeplan.workload.workload import Workload


def find_repetend(
    graph: TaskGraph,
    orders: Orders,
    starts: Sequence[int],
    max_unroll: int | None = None,
    max_tasks: int = MAX_REPLAYED,
    *,
    repeated: bool = False,
) -> Repetend | None:
    """The repetend of a schedule, or None if it has none with an unroll of at most half its micro-batches.

    A moment cuts every device's and link's order in two, and no dependency points back over the cut. It begins a
    repetend if on all of them the next actions contain every operation ``unroll`` times. Least time per micro-batch
    wins, then least unroll, then least span, then the earliest cut in the middle half of the run.

    Unrolls up to 8 are looked for at every moment; larger ones where one of 16 moments spread over the run
    shows them, which finds any that lasts a sixteenth of the run. Of very many actions only what does last as long is
    looked for. Times are replayed for up to ``max_tasks`` actions.

    With ``repeated`` it is what the orders themselves repeat, of all that they run twice or more in a row one that goes
    on for about as long as any: a quicker part that is there once is another schedule than theirs.
    """
    require_equal_sizes(graph.workload)
    search = _RepetendFinder.of(graph, orders, starts)
    if search is None:
        return None
    limit = graph.workload.num_microbatches // 2
    limit = min(limit, max_unroll or limit)
    bound = work_bound(graph.workload)
    best, best_time = None, 0
    step = graph.workload.step_microbatches  # a repetend of a decoding loop is a step of all requests
    unrolls = search.unrolls(limit) if step == 1 else list(range(step, limit + 1, step))[:1]
    least = search.longest_reach(unrolls) * AS_LONG_AS_ANY if repeated else 0.0
    for unroll in unrolls:
        for cut in checked(search.cuts(unroll), 1):
            if repeated and search.reach(cut) < max(2 * unroll, least):
                continue
            cycle, time = search.steady_state(cut, max_tasks)
            if cycle == 1 and (best is None or cut.rank(time) < best.rank(best_time)):
                best, best_time = cut, time
            elif cycle > 1 and unroll * cycle <= limit and unroll * cycle not in unrolls and step == 1:
                insort(unrolls, unroll * cycle)  # distances alternate: periodic over that many copies
        if best is not None and best_time == bound * best.unroll:
            break  # nothing beats the work bound
    if best is None:
        return None
    ids = [operation.id for operation in graph.workload.operations]
    first = dict(zip(ids, best.first, strict=False))  # what follows the operations is given by the links' orders
    return Repetend(unroll=best.unroll, repetend_ns=best_time, first=first)


def repeating_part(
    graph: TaskGraph, orders: Orders, starts: Sequence[int], max_unroll: int, max_tasks: int
) -> tuple[dict[str, int], int] | None:
    """``first`` and ``unroll`` of the repetend, or, where times settle later than in ``max_tasks`` actions, of a cut.

    That is the one nearest to the middle with the least unroll, whose copies follow each other, too, however fast.
    """
    found = find_repetend(graph, orders, starts, max_unroll, max_tasks)
    if found is not None:
        return found.first, found.unroll
    search = _RepetendFinder.of(graph, orders, starts)
    if search is None:
        return None
    ids = [operation.id for operation in graph.workload.operations]
    for unroll in search.unrolls(min(max_unroll, graph.workload.num_microbatches // 2)):
        cuts = [cut for cut in search.cuts(unroll) if not cut.off_middle]
        if cuts:
            return dict(zip(ids, min(cuts, key=lambda cut: cut.place).first, strict=False)), unroll
    return None


def repeating_phases(
    graph: TaskGraph, orders: Orders, starts: Sequence[int], phases: Sequence[int], max_unroll: int
) -> tuple[list[int], int] | None:
    """Where schedules repeat whose phases run one after another, as all forwards and then all backwards do.

    ``phases`` [operation]. What is before the part that repeats of each [operation], and the least unroll of them all;
    that of a phase is in its middle, if there is one. None if phases do not follow each other on every device, or one
    has no such part.
    """
    found = [_RepetendFinder.of_phase(graph, orders, starts, phases, number) for number in range(max(phases) + 1)]
    searches = [search for search in found if search is not None]
    if len(searches) < len(found):
        return None
    for unroll in range(1, min(max_unroll, graph.workload.num_microbatches // 2) + 1):
        cuts = [[*search.cuts(unroll)] for search in searches]
        if all(cuts):
            first = [min(own, key=lambda cut: (cut.off_middle, cut.place)).first for own in cuts]
            return [first[phase][item] for item, phase in enumerate(phases)], unroll
    return None


@dataclass(frozen=True, slots=True)
class _Line:
    """The order of one device or link, prepared for looking up windows.

    ``entries`` and ``times`` [position]. ``balance`` [position] is equal at two positions exactly if between them
    every operation occurs equally often: it numbers the vectors of counts relative to the first operation's.
    """

    entries: list[Entry]
    times: list[int]
    balance: list[int]
    items: tuple[int, ...]

    @property
    def num_operations(self) -> int:
        """Operations (or hops) that occur in it."""
        return len(self.items)

    @classmethod
    def of(cls, entries: list[Entry], times: list[int]) -> _Line | None:
        """None if an operation does not run its micro-batches in turn: then first and unroll say nothing."""
        items = tuple(sorted({operation for operation, _ in entries}))
        place = {operation: index for index, operation in enumerate(items)}
        done = [0] * len(place)
        numbers: dict[tuple[int, ...], int] = {}
        balance = [numbers.setdefault(tuple(done), 0)]
        for operation, m in entries:
            index = place[operation]
            if m != done[index]:
                return None
            done[index] += 1
            relative = tuple(count - done[0] for count in done)
            balance.append(numbers.setdefault(relative, len(numbers)))
        return cls(entries, times, balance, items)

    def window(self, position: int, unroll: int) -> list[Entry]:
        """The next actions, ``unroll`` for each operation."""
        return self.entries[position : position + unroll * self.num_operations]

    def is_balanced(self, position: int, unroll: int) -> bool:
        """Whether the window at a position holds every operation ``unroll`` times."""
        end = position + unroll * self.num_operations
        return end < len(self.balance) and self.balance[position] == self.balance[end]

    def repeats(self, position: int, unroll: int) -> int:
        """For how many micro-batches of each operation the order goes on as in the window of this unroll."""
        width = unroll * self.num_operations
        if width == 0:
            return MAX_COUNT
        operations = [operation for operation, _ in islice(self.entries, position, None)]
        same = map(eq, operations, islice(operations, width, None))
        return unroll + sum(1 for _ in takewhile(bool, same)) // self.num_operations

    def balanced(self, unroll: int) -> list[bool]:
        """The same for all positions."""
        found = list(map(eq, self.balance, islice(self.balance, unroll * self.num_operations, None)))
        return found + [False] * (len(self.balance) - len(found))


@dataclass(frozen=True, slots=True)
class _RepetendStart:
    """A moment at which a repetend begins: ``positions`` [line] in the orders, ``first`` [item]."""

    unroll: int
    moment: int
    positions: tuple[int, ...]
    first: tuple[int, ...]
    off_middle: bool

    @property
    def place(self) -> tuple[int, bool, int]:
        """Key among cuts with equal time and unroll, the smallest wins: span, then where in the run it is."""
        return (max(self.first) - min(self.first) + self.unroll, self.off_middle, self.moment)

    def rank(self, time: int) -> tuple[Fraction, int, tuple[int, bool, int]]:
        """Key among all cuts, the smallest wins; ``time`` is that of the repetend, in ns."""
        return (Fraction(time, self.unroll), self.unroll, self.place)


@dataclass(frozen=True, slots=True)
class _RepetendFinder:
    """A schedule in which repetends are looked for; ``steps`` are its distinct moments with the lines that go on then.

    ``lines`` are those of devices and links, of all that run the same only one; ``home`` [item] is one that has it.
    """

    workload: Workload
    lines: list[_Line]
    home: list[int]
    steps: list[tuple[int, list[int]]]
    makespan: int
    steady: dict[object, tuple[int, int]]

    @classmethod
    def of(cls, graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> _RepetendFinder | None:
        """None if some operation does not run its micro-batches in turn."""
        n = graph.workload.num_microbatches
        lines: list[_Line] = []
        line_of: dict[tuple[int, ...], int] = {}
        for order in checked(map(tuple, orders), 1):
            if line_of.setdefault(order, len(lines)) < len(lines):
                continue
            line = _Line.of([divmod(task, n) for task in order], [starts[task] for task in order])
            if line is None:
                return None
            lines.append(line)
        steps: dict[int, list[int]] = {}
        for number, line in enumerate(lines):
            for time in line.times:
                steps.setdefault(time, []).append(number)
        home = [line_of[tuple(orders[resources[0]])] for resources in graph.workload.resources]
        return cls(graph.workload, lines, home, sorted(steps.items()), graph.makespan(starts), {})

    @classmethod
    def of_phase(
        cls, graph: TaskGraph, orders: Orders, starts: Sequence[int], phases: Sequence[int], phase: int
    ) -> _RepetendFinder | None:
        """A finder for the operations of one phase, from its beginning; None if others run meanwhile on a device."""
        workload = graph.workload
        own = [*phases, *(phases[transfer.source] for transfer in workload.transfers)]
        parts = []
        for order in orders:
            numbers = [own[graph.operation_of[task]] for task in order]
            if numbers != sorted(numbers):
                return None
            parts.append([task for task, number in zip(order, numbers, strict=True) if number == phase])
        begun = min(starts[part[0]] for part in parts if part)
        ends = max(starts[part[-1]] + graph.durations[part[-1]] for part in parts if part)
        search = cls.of(graph, parts, [start - begun for start in starts])
        return None if search is None else replace(search, makespan=ends - begun)

    def unrolls(self, limit: int) -> list[int]:
        """Unrolls worth a sweep, ascending."""
        long = sum(len(line.entries) for line in self.lines) > MOST_SWEPT
        shown = set[int]() if long else set(range(1, min(limit, SWEPT_UNROLL) + 1))
        least = max(1, self.workload.num_microbatches // REPETEND_SAMPLES) if long else 0
        stride = max(1, len(self.steps) // REPETEND_SAMPLES)
        positions = [0] * len(self.lines)
        for index, (_, going_on) in checked(enumerate(self.steps), 256):
            if index % stride == 0:
                shown.update(self._unrolls_at(positions, limit, least))
            for number in going_on:
                positions[number] += 1
        return sorted(shown)

    def _unrolls_at(self, positions: Sequence[int], limit: int, least: int) -> Iterator[int]:
        """Unrolls of repetends that begin at a cut, without those that only repeat a smaller one.

        With ``least`` they are there twice, and go on for so many micro-batches. One that goes on for a quarter of the
        run is the steady state: larger ones add nothing.
        """
        smaller: list[tuple[int, int]] = []
        for unroll in checked(range(1, limit + 1), 16):
            if any(unroll % small == 0 and unroll <= reach for small, reach in smaller):
                continue
            if all(line.is_balanced(at, unroll) for line, at in zip(self.lines, positions, strict=True)):
                reach = min(line.repeats(at, unroll) for line, at in zip(self.lines, positions, strict=True))
                smaller.append((unroll, reach))
                if not least or reach >= max(2 * unroll, least):
                    yield unroll
                if reach >= max(2 * unroll, self.workload.num_microbatches // LASTING_PART):
                    return

    def cuts(self, unroll: int) -> Iterator[_RepetendStart]:
        """Moments at which a repetend begins, the best of each run of consecutive ones.

        Between moments a device moves on by at most one action. If its windows are balanced at both, the second
        is the first without its first action and with that action's next repetition: both continue to the same
        endless order, so all moments of a run have the same time.
        """
        balanced = [line.balanced(unroll) for line in checked(self.lines, 64)]
        if not all(map(any, balanced)):
            return
        positions, first = [0] * len(self.lines), [0] * len(self.home)
        missing = sum(not flags[0] for flags in balanced)
        best: _RepetendStart | None = None
        until = -1
        in_middle = False
        for moment, going_on in checked(self.steps, 256):
            if missing == 0:
                if best is None or in_middle != self._in_middle(moment):
                    in_middle = self._in_middle(moment)
                    until = first[0] + unroll  # cuts after one repetition are like those before
                if first[0] <= until:
                    cut = _RepetendStart(unroll, moment, tuple(positions), tuple(first), not in_middle)
                    best = cut if best is None or cut.place < best.place else best
            elif best is not None:
                yield best
                best = None
            for number in going_on:
                at = positions[number]
                item = self.lines[number].entries[at][0]
                first[item] += self.home[item] == number
                missing += balanced[number][at] - balanced[number][at + 1]
                positions[number] = at + 1
        if best is not None:
            yield best

    def reach(self, cut: _RepetendStart) -> int:
        """For how many micro-batches all lines go on as in its windows."""
        return min(line.repeats(at, cut.unroll) for line, at in zip(self.lines, cut.positions, strict=True))

    def longest_reach(self, unrolls: Sequence[int]) -> int:
        """That of the cut that goes on for longest, of those that are there twice; 0 where none is."""
        reached = ((unroll, self.reach(cut)) for unroll in unrolls for cut in checked(self.cuts(unroll), 1))
        return max((reach for unroll, reach in reached if reach >= 2 * unroll), default=0)

    def _in_middle(self, moment: int) -> bool:
        return self.makespan <= 4 * moment <= 3 * self.makespan

    def steady_state(self, cut: _RepetendStart, max_tasks: int) -> tuple[int, int]:
        """(cycle, time in ns) of the repetend, once for cuts that continue to the same endless order.

        Cycle 0 says that the replay does not become periodic.
        """
        first, positions = list(cut.first), list(cut.positions)
        num_operations = len(self.workload.operations)
        for link, line in enumerate(self.lines):  # the place where all who read the repetend cut it
            if not line.items or line.items[0] < num_operations:
                continue
            passed = {item: first[item] for item in line.items}
            for item, begin in (link_begins(self.workload, line.entries, first, cut.unroll, passed) or passed).items():
                positions[link] += begin - passed[item]
                first[item] = begin
        windows = [line.window(at, cut.unroll) for line, at in zip(self.lines, positions, strict=True)]
        key = tuple(_endless(window, cut.unroll) for window in windows)
        if key not in self.steady:
            found = steady_state(self.workload, windows, first, cut.unroll, max_tasks)
            self.steady[key] = found or (0, 0)
        return self.steady[key]


def _endless(window: Sequence[Entry], unroll: int) -> tuple[Entry, ...]:
    """The endless order a window continues to, read from micro-batch 0 of its first operation."""
    if not window:
        return ()
    anchor = min(operation for operation, _ in window)
    at = next(index for index, (operation, m) in enumerate(window) if operation == anchor and m % unroll == 0)
    base = window[at][1]
    return tuple(
        (operation, m - base + (unroll if index < at else 0))
        for index, (operation, m) in (*islice(enumerate(window), at, None), *islice(enumerate(window), at))
    )


def extend(
    workload: Workload,
    orders: Orders,
    repetend: Repetend | None,
    num_microbatches: int,
    again: str = "pipeplan search PROFILE",
) -> tuple[Workload, list[list[int]]]:
    """The same schedule for more micro-batches, by repeating the repetend (Tessel III-C).

    Returns the larger workload and, per device and link, its order as task numbers of the larger workload's graph.
    ``again`` is the command that searches a plan like this one, for errors.

    Raises:
        UsageError: no repetend, fewer micro-batches than there are, or a number the unroll does not reach.
        InvalidPlanError: the orders do not contain the repetend as stated.
    """
    before = workload.num_microbatches
    if num_microbatches == before:
        return workload, [list(order) for order in orders]
    if repetend is None:
        raise UsageError(
            f"the plan has no repetend, so it holds for its {before} micro-batches only; search one for "
            f"{num_microbatches}: {again} --microbatches {num_microbatches}"
        )
    require_cut(workload, repetend.first)
    copies = num_copies(before, repetend.unroll, num_microbatches, again)
    cut = CutOrders.of(workload, orders, repetend.first, repetend.unroll)
    return workload.with_microbatches(num_microbatches), cut.orders(copies)


def num_copies(before: int, unroll: int, wanted: int, again: str) -> int:
    """How many copies more give the wanted number of micro-batches.

    Raises:
        UsageError: it is fewer than there are, or copies do not come out at it.
    """
    if wanted < before:
        raise UsageError(
            f"the plan has {before} micro-batches and can be replayed with more, not with {wanted}; "
            f"search one for fewer: {again} --microbatches {wanted}"
        )
    copies, rest = divmod(wanted - before, unroll)
    if rest:
        raise UsageError(
            f"the plan's {before} micro-batches grow by {unroll} at a time (its repetend's unroll), so {wanted} "
            f"cannot be reached; the nearest are --microbatches {wanted - rest} and {wanted - rest + unroll}"
        )
    return copies
