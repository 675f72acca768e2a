"""From a pattern to a schedule for N micro-batches: the pattern replayed, and simple schedules that always work."""

from __future__ import annotations

from pipeplan.model.elements import Repetend
from pipeplan.schedule.problem import Problem
from pipeplan.schedule.repetend import Pattern
from pipeplan.simulate.copies import begins_of
from pipeplan.simulate.repetend import extend
from pipeplan.simulate.timing import Orders, earliest_starts, task_graph

__all__ = ["compose", "microbatch_by_microbatch", "middle_repetition", "pattern_of", "repeated_tasks"]


def compose(problem: Problem, pattern: Pattern) -> list[list[int]]:
    """Each device's, and each link's, order when the pattern runs from the first to the last micro-batch.

    Warmup and cooldown are what the pattern leaves of itself (Tessel's block sets of IV-C); timed by
    :func:`~pipeplan.simulate.timing.earliest_starts` they close up. Every device holds at most what it holds in
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


def middle_repetition(problem: Problem, pattern: Pattern) -> list[int]:
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


def repeated_tasks(problem: Problem, orders: Orders, repetend: Repetend) -> frozenset[int]:
    """The tasks of one repetition of a schedule's repetend."""
    count = problem.num_microbatches
    begins = begins_of(problem.workload, orders, repetend.first, repetend.unroll)
    return frozenset(x * count + begin + u for x, begin in enumerate(begins) for u in range(repetend.unroll))


def pattern_of(problem: Problem, orders: Orders, repetend: Repetend) -> Pattern | None:
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


def microbatch_by_microbatch(problem: Problem, in_flight: int = 1) -> list[list[int]]:
    """Groups of ``in_flight`` micro-batches, one group after another: with 1, the least memory there is."""
    count = problem.num_microbatches
    orders: list[list[int]] = [[] for _ in problem.on_device]
    for begin in range(0, count, in_flight):
        for operation in problem.order:
            for m in range(begin, min(begin + in_flight, count)):
                for device in problem.devices[operation]:
                    orders[device].append(operation * count + m)
    return orders
