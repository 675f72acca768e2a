"""From a pattern to a schedule for N micro-batches: the pattern replayed, and simple schedules that always work."""

from __future__ import annotations

from pipeplan.schedule.problem import Problem
from pipeplan.schedule.repetend import Pattern

__all__ = ["compose", "microbatch_by_microbatch", "middle_repetition"]


def compose(problem: Problem, pattern: Pattern) -> list[list[int]]:
    """Each device's order when the pattern runs from the first to the last micro-batch.

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
    orders: list[list[int]] = [[] for _ in range(problem.num_devices)]
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


def microbatch_by_microbatch(problem: Problem, in_flight: int = 1) -> list[list[int]]:
    """Groups of ``in_flight`` micro-batches, one group after another: with 1, the least memory there is."""
    count = problem.num_microbatches
    orders: list[list[int]] = [[] for _ in range(problem.num_devices)]
    for begin in range(0, count, in_flight):
        for operation, devices in enumerate(problem.devices):
            for m in range(begin, min(begin + in_flight, count)):
                for device in devices:
                    orders[device].append(operation * count + m)
    return orders
