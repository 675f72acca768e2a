"""Patterns: steady states as start times, unrolled into schedules and read from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from pipeplan.search_constants import SETTLING_ROUNDS
from pipeplan.time_limit import checked
from pipeplan.units import rounded_up
from pipeplan.workload.elements import Repetend
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.rate import CutOrders, Entry, tasks_of_copy
from pipeplan.workload.steady_state.repetend import extend
from pipeplan.workload.task_graph import Orders, earliest_starts, task_graph


@dataclass(frozen=True, slots=True)
class Pattern:
    """A steady state: instance (i, u) of repetition n starts at ``starts[i][u] + n * repetend_ns``.

    It runs micro-batch ``unroll * n + u``. Starts in ns, from 0; each operation runs its micro-batches in order.
    ``begins`` [operation] is its first micro-batch in one repetition where every device begins that at a moment of its
    own, as Tessel's compact repetends do (Fig. 6 (b)); none where all begin it at one moment.
    """

    unroll: int
    repetend_ns: int
    starts: tuple[tuple[int, ...], ...]
    begins: tuple[int, ...] = ()

    @property
    def period(self) -> Fraction:
        """ns per micro-batch."""
        return Fraction(self.repetend_ns, self.unroll)

    @property
    def span(self) -> int:
        """How many micro-batches a repetend reaches over (Tessel's N_R), cut at the moment where it is least."""
        return min(max(begins) - min(begins) + self.unroll for begins in self.cuts())

    def cuts(self) -> Iterator[list[int]]:
        """[operation] its first micro-batch in one repetition, for every moment that such a cut can begin at."""
        if self.begins:
            yield list(self.begins)
            return
        instances = [[m for m, _ in self._from(0, operation)] for operation in range(len(self.starts))]
        found = [min(own) for own in instances]
        places = [(i, u) for i, row in enumerate(self.starts) for u in range(len(row))]

        def moment(place: tuple[int, int]) -> int:
            return self.starts[place[0]][place[1]] % self.repetend_ns

        for _, here in itertools.groupby(sorted(places, key=moment), moment):
            yield [*found]
            for i, u in here:
                instances[i][u] += self.unroll  # later moments come after this instance, and before its next
                found[i] = min(instances[i])

    def copy(self, operations: Iterable[int], durations: Sequence[int]) -> list[Entry]:
        """What runs in ``repetend_ns`` from time 0 on, in order, of operations of which no two run together.

        Of those that start at one moment what takes no time goes first, of older micro-batches before others.
        """
        entries = [(start, durations[x] > 0, m, x) for x in operations for m, start in self._from(0, x)]
        return [(x, m) for _, _, m, x in sorted(entries)]

    def _from(self, moment: int, operation: int) -> Iterator[tuple[int, int]]:
        """(micro-batch, ns after the moment) of the instances that start in ``repetend_ns`` from a moment on."""
        for u, start in enumerate(self.starts[operation]):
            ahead, time = divmod(start - moment, self.repetend_ns)
            yield u - ahead * self.unroll, time

    def held_apart(self, problem: OneMicrobatch, device: int, x: int) -> int:
        """Bytes that a device holds for actions of others, as operation ``x`` starts there; of a pattern of unroll 1.

        Of what is given on there is one for every repetition between its start and the end of the last that takes it.
        """
        ((now,), period, held) = (self.starts[x], self.repetend_ns, 0)
        for hold in problem.apart_on(device):
            ends = (self.starts[target][0] + problem.durations[target] for target in hold.targets)
            held += hold.size * ((now - self.starts[hold.source][0]) // period - min((now - e) // period for e in ends))
        return held

    def latency(self, problem: OneMicrobatch) -> int:
        """Time from a micro-batch's first start to its last end, the longest over the unrolled ones, in ns."""
        return max(
            max(row[u] + duration for row, duration in zip(self.starts, problem.durations, strict=True))
            - min(row[u] for row in self.starts)
            for u in range(self.unroll)
        )


def has_room(problem: OneMicrobatch, pattern: Pattern) -> bool:
    """Whether what a pattern holds at the start of every operation fits: the memory of :mod:`.cpsat.repetend`.

    What is held until actions of others have ended is known for patterns of unroll 1.
    """
    return all(
        device_has_room(
            problem,
            device,
            pattern.starts,
            pattern.repetend_ns,
            partial(pattern.held_apart, problem, device) if problem.apart_on(device) else None,
        )
        for device in range(len(problem.capacity))
    )


def device_has_room(
    problem: OneMicrobatch,
    device: int,
    starts: Sequence[Sequence[int]],
    repetend: int,
    beside: Callable[[int], int] | None = None,
) -> bool:
    """The same of one device. Starts [operation][micro-batch] and the repetend in any unit; of ``beside`` the bytes.

    Those of an operation's start that are held for actions of others. What starts at one moment is in the order of
    :meth:`Pattern.copy`.
    """
    capacity = problem.capacity[device]
    if capacity is None:
        return True
    there, net = [], {}
    for x in problem.on_device[device]:
        net[x] = problem.acquire[x] - problem.release[x]
        for u, start in enumerate(starts[x]):
            ahead, moment = divmod(start, repetend)
            there.append((moment, problem.durations[x] > 0, u - ahead * len(starts[x]), ahead, x))
    held = -sum(net[x] * ahead for *_, ahead, x in there)
    for *_, x in sorted(there):
        apart = 0 if beside is None else beside(x)
        if held + apart + problem.acquire[x] + problem.workspace[x] > capacity:
            return False
        held += net[x]
    return True


def compose(problem: OneMicrobatch, pattern: Pattern) -> list[list[int]]:
    """Each device's, and each link's, order when the pattern runs from the first to the last micro-batch.

    Warmup and cooldown are what the pattern leaves of itself (Tessel's block sets of IV-C); timed by
    :func:`~pipeplan.workload.task_graph.earliest_starts` they close up. Every device holds at most what it holds in
    the steady state, since the operations that are missing at the ends only free memory later than they take it.
    """
    return [
        _composed(pattern.copy(operations, problem.durations), pattern.unroll, problem.num_microbatches)
        for operations in problem.on_device
    ]


def _composed(copy: Sequence[Entry], unroll: int, count: int) -> list[int]:
    """Copies one after another, of those micro-batches that there are: where messages take long, that is from far on.

    What runs first has by then run all of its micro-batches, so that hardly any copy is whole.
    """
    runs = [(k, place, x, m + k * unroll) for place, (x, m) in enumerate(copy) for k in _times(m, unroll, count)]
    return [x * count + m for _, _, x, m in sorted(runs)]


def _times(m: int, unroll: int, count: int) -> range:
    """The copies in which the micro-batch that is ``m`` in the first one is there."""
    return range(max(0, -(m // unroll)), -(-(count - m) // unroll))


def middle_repetition(problem: OneMicrobatch, pattern: Pattern) -> frozenset[int]:
    """Tasks of one whole repetition from the middle of the composed schedule; empty if it has none.

    It is one unroll of every operation, cut at the moment at which the repetition spans fewest micro-batches.
    """
    count, unroll = problem.num_microbatches, pattern.unroll
    best: frozenset[int] = frozenset()
    best_span = count + 1
    for begins in pattern.cuts():
        first, last = -(min(begins) // unroll), (count - max(begins)) // unroll - 1
        span = max(begins) - min(begins) + unroll
        if first <= last and span < best_span:
            best_span, shift = span, (first + last) // 2 * unroll
            best = tasks_of_copy([begin + shift for begin in begins], unroll, count)
    return best


def whole_repetitions(problem: OneMicrobatch, pattern: Pattern) -> frozenset[int]:
    """Tasks of every whole repetition of the composed schedule, of a pattern that says where one begins."""
    count, unroll = problem.num_microbatches, pattern.unroll
    copies = range(-(min(pattern.begins) // unroll), (count - max(pattern.begins)) // unroll)
    return frozenset().union(
        *(tasks_of_copy([begin + copy * unroll for begin in pattern.begins], unroll, count) for copy in copies)
    )


def pattern_of(problem: OneMicrobatch, orders: Orders, repetend: Repetend) -> Pattern | None:
    """The steady state of a schedule's repetend, in the times it settles to; None if it does not settle soon."""
    unroll, period = repetend.unroll, repetend.repetend_ns
    larger, longer = extend(problem.workload, orders, repetend, problem.num_microbatches + SETTLING_ROUNDS * unroll)
    starts = earliest_starts(task_graph(larger), longer)
    rows: list[list[int]] = []
    for x, begin in enumerate(CutOrders.of(problem.workload, orders, repetend.first, unroll).begins):
        row = [0] * unroll
        for u in range(unroll):
            m = begin + (SETTLING_ROUNDS - 1) * unroll + u
            task = x * larger.num_microbatches + m
            if starts[task + unroll] - starts[task] != period:
                return None
            row[m % unroll] = starts[task] - m // unroll * period
        rows.append(row)
    first = min(map(min, rows))
    return Pattern(unroll, period, tuple(tuple(start - first for start in row) for row in rows))


def microbatch_by_microbatch(problem: OneMicrobatch) -> list[list[int]]:
    """One micro-batch after another: the least memory there is."""
    count = problem.num_microbatches
    orders: list[list[int]] = [[] for _ in problem.on_device]
    for m in checked(range(count), 8):
        for operation in problem.order:
            for device in problem.devices[operation]:
                orders[device].append(operation * count + m)
    return orders


def memory_in_turn(problem: OneMicrobatch) -> int:
    """Bytes of the device that needs most if micro-batches run one at a time, rounded up as in messages."""
    peaks = peak_memory(task_graph(problem.workload), microbatch_by_microbatch(problem))
    return rounded_up(max(memory.peak_bytes for memory in peaks))


def one_after_another(problem: OneMicrobatch, unroll: int) -> Pattern | None:
    """The pattern that runs one operation at a time and one micro-batch at a time; None if it does not fit."""
    place = {i: number for number, i in enumerate(problem.order)}
    for device, capacity in enumerate(problem.capacity):
        held = 0
        for i in problem.on_device[device]:
            apart = (hold for hold in problem.apart_on(device) if place[hold.source] <= place[i])
            beside = sum(hold.size for hold in apart if any(place[target] >= place[i] for target in hold.targets))
            held += problem.acquire[i]
            if capacity is not None and held + beside + problem.workspace[i] > capacity:
                return None
            held -= problem.release[i]
    longest_lag = [0] * problem.num_operations
    for source, _, lag, *_ in (*problem.edges, *problem.returns):
        longest_lag[source] = max(longest_lag[source], lag)
    steps = [problem.durations[i] + longest_lag[i] for i in problem.order]
    begins = dict(zip(problem.order, itertools.accumulate(steps, initial=0), strict=False))
    time = sequential_time(problem)
    starts = [tuple(begins[i] + u * time for u in range(unroll)) for i in range(problem.num_operations)]
    return Pattern(unroll, unroll * time, tuple(starts))


def sequential_time(problem: OneMicrobatch) -> int:
    """A repetend time that works if any does: one operation at a time, and one micro-batch after another (ns)."""
    return sum(problem.durations) + sum(max(0, lag) for _, _, lag, *_ in (*problem.edges, *problem.returns))
