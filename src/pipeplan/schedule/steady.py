"""The steady state: repetends searched, taken from good schedules, and unrolled into schedules."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from pipeplan.schedule.cpsat.repetend import Pattern, least_period, shortest_way_through
from pipeplan.schedule.state import SearchState
from pipeplan.workload.bounds import period_bound
from pipeplan.workload.elements import Repetend
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.rate import begins_of
from pipeplan.workload.steady_state.repetend import extend, find_repetend
from pipeplan.workload.task_graph import Orders, earliest_starts, task_graph

__all__ = [
    "MOST_ADOPTED",
    "adopt_repetitions",
    "compose",
    "microbatch_by_microbatch",
    "middle_repetition",
    "pattern_of",
    "repeated_tasks",
    "search_repetend",
    "search_unrolled",
]


def compose(problem: OneMicrobatch, pattern: Pattern) -> list[list[int]]:
    """Each device's, and each link's, order when the pattern runs from the first to the last micro-batch.

    Warmup and cooldown are what the pattern leaves of itself (Tessel's block sets of IV-C); timed by
    :func:`~pipeplan.workload.task_graph.earliest_starts` they close up. Every device holds at most what it holds in
    the steady state, since the operations that are missing at the ends only free memory later than they take it.
    """
    count, unroll = problem.num_microbatches, pattern.unroll
    timed = [
        (row[m % unroll] + m // unroll * pattern.repetend_ns, operation * count + m, operation)
        for operation, row in enumerate(pattern.starts)
        for m in range(count)
    ]
    orders: list[list[int]] = [[] for _ in problem.on_device]
    for _, task, operation in sorted(timed):
        for device in problem.devices[operation]:
            orders[device].append(task)
    return orders


def middle_repetition(problem: OneMicrobatch, pattern: Pattern) -> list[int]:
    """Tasks of one whole repetition from the middle of the composed schedule; empty if it has none.

    It is one unroll of every operation, cut at the moment at which the repetition spans fewest micro-batches.
    """
    count, unroll, period = problem.num_microbatches, pattern.unroll, pattern.repetend_ns
    best: list[int] = []
    best_span = count + 1
    for cut in sorted({start % period for row in pattern.starts for start in row}):
        behind = [[(start - cut) // period * unroll - u for u, start in enumerate(row)] for row in pattern.starts]
        least, most = min(map(min, behind)), max(map(max, behind))
        first, last = -(-most // unroll), (count - 1 + least) // unroll
        if first <= last and most - least + 1 < best_span:
            best_span = most - least + 1
            repetition = (first + last) // 2 * unroll
            best = [x * count + repetition - late for x, row in enumerate(behind) for late in row]
    return best


def repeated_tasks(problem: OneMicrobatch, orders: Orders, repetend: Repetend) -> frozenset[int]:
    """The tasks of one repetition of a schedule's repetend."""
    count = problem.num_microbatches
    begins = begins_of(problem.workload, orders, repetend.first, repetend.unroll)
    return frozenset(x * count + begin + u for x, begin in enumerate(begins) for u in range(repetend.unroll))


def pattern_of(problem: OneMicrobatch, orders: Orders, repetend: Repetend) -> Pattern | None:
    """The steady state of a schedule's repetend, in the times it settles to; None if it does not settle soon."""
    unroll, period = repetend.unroll, repetend.repetend_ns
    larger, longer = extend(problem.workload, orders, repetend, problem.num_microbatches + _SETTLING * unroll)
    starts = earliest_starts(task_graph(larger), longer)
    rows: list[list[int]] = []
    for x, begin in enumerate(begins_of(problem.workload, orders, repetend.first, unroll)):
        row = [0] * unroll
        for u in range(unroll):
            m = begin + (_SETTLING - 1) * unroll + u
            task = x * larger.num_microbatches + m
            if starts[task + unroll] - starts[task] != period:
                return None
            row[m % unroll] = starts[task] - m // unroll * period
        rows.append(row)
    first = min(map(min, rows))
    return Pattern(unroll, period, tuple(tuple(start - first for start in row) for row in rows))


_SETTLING = 8
"""Repetitions after which times are taken to have settled."""


def microbatch_by_microbatch(problem: OneMicrobatch, in_flight: int = 1) -> list[list[int]]:
    """Groups of ``in_flight`` micro-batches, one group after another: with 1, the least memory there is."""
    count = problem.num_microbatches
    orders: list[list[int]] = [[] for _ in problem.on_device]
    for begin in range(0, count, in_flight):
        for operation in problem.order:
            for m in range(begin, min(begin + in_flight, count)):
                for device in problem.devices[operation]:
                    orders[device].append(operation * count + m)
    return orders


def search_repetend(state: SearchState, unroll: int | None) -> None:
    """The best pattern of this unroll, or of unroll 1 if it is open, replayed as it is and with its shortest way."""
    share = state.budget.seconds / (_REPETEND_SHARE if unroll is None else 3)
    least = least_period(
        state.problem,
        state.budget,
        share,
        unroll=unroll or 1,
        on_pattern=lambda pattern: _offer_pattern(state, pattern),
    )
    state.repetend_seconds = state.budget.elapsed
    state.period_proved = max(period_bound(state.problem), Fraction(least.bound_ns, unroll or 1))
    if least.pattern is not None:
        _take_pattern(state, least.pattern, share)


def _take_pattern(state: SearchState, pattern: Pattern, share: float) -> None:
    """Replay a pattern better than what is known, as it is and with its shortest way through."""
    _offer_pattern(state, pattern)
    state.pattern, _ = shortest_way_through(
        state.problem, pattern, state.budget, share / 4 if state.finished else share
    )
    _offer_pattern(state, state.pattern)


def adopt_repetitions(state: SearchState) -> None:
    """Where a good schedule has a repetition of its own that is quicker than the pattern's, that is the pattern."""
    for candidate in state.others:
        if candidate.frozen or state.problem.num_microbatches < 2 or state.budget.expired:
            continue
        repetend = find_repetend(state.graph, candidate.orders, candidate.starts, MOST_ADOPTED)
        if repetend is None:
            continue
        state.offer(replace(candidate, frozen=repeated_tasks(state.problem, candidate.orders, repetend)))
        pattern = pattern_of(state.problem, candidate.orders, repetend)
        if pattern is not None and (state.pattern is None or pattern.period < state.pattern.period):
            state.pattern, state.period_proved = pattern, period_bound(state.problem)
            state.repetend_seconds = state.budget.elapsed


def search_unrolled(state: SearchState) -> None:
    """Several micro-batches per repetend, where one rounds the period up: only for less than what is known."""
    problem, budget = state.problem, state.budget
    bound = period_bound(problem)
    limit = budget.used + budget.seconds / _REPETEND_SHARE
    for unroll in range(2, _MOST_UNROLL + 1):
        reached = state.pattern.period if state.pattern is not None else None
        share = (limit - budget.used) / (_MOST_UNROLL + 1 - unroll)
        if reached == bound or unroll > problem.num_microbatches // 2 or share <= 0 or budget.expired:
            return
        least = least_period(problem, budget, share, unroll=unroll, below=reached)
        found = least.pattern
        if found is not None and (reached is None or found.period < reached):
            state.period_proved = max(bound, Fraction(least.bound_ns, unroll))
            state.repetend_seconds = budget.elapsed
            _take_pattern(state, found, share)


_REPETEND_SHARE = 8
"""The part of the time limit for the repetends of unroll 1, and again for all larger ones: one so many-th."""


_MOST_UNROLL = 4
"""Larger unrolls are not searched ..."""


MOST_ADOPTED = 8
"""... but taken from schedules that have them."""


def _offer_pattern(state: SearchState, pattern: Pattern) -> None:
    middle = middle_repetition(state.problem, pattern)
    state.offer(state.candidate(compose(state.problem, pattern), "repetend", frozenset(middle)))
