"""Patterns and copies against the functions that were there before; removed with the next commit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from builders.problems import problems
from pipeplan.schedule.cpsat.repetend import least_period
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.pattern import Pattern, compose, middle_repetition, one_after_another
from pipeplan.workload.bounds import strong_makespan_bound, weak_makespan_bound, work_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.rate import begins_of, split_order, tasks_of_copy
from pipeplan.workload.steady_state.repetend import extend, find_repetend
from pipeplan.workload.task_graph import earliest_starts, task_graph


def old_compose(problem: OneMicrobatch, pattern: Pattern) -> list[list[int]]:
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


def old_middle(problem: OneMicrobatch, pattern: Pattern) -> list[int]:
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


def old_span(pattern: Pattern) -> int:
    def at(cut: int) -> int:
        indices = [
            u - (s - cut) // pattern.repetend_ns * pattern.unroll for row in pattern.starts for u, s in enumerate(row)
        ]
        return max(indices) - min(indices) + 1

    return min(at(cut) for cut in {start % pattern.repetend_ns for row in pattern.starts for start in row})


def old_heads_and_tails(problem: OneMicrobatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    place = {x: index for index, x in enumerate(problem.order)}
    edges = sorted(problem.edges, key=lambda edge: place[edge[0]])
    heads, tails = [0] * problem.num_operations, [0] * problem.num_operations
    for source, target, lag in edges:
        heads[target] = max(heads[target], heads[source] + problem.durations[source] + lag)
    for source, target, lag in reversed(edges):
        tails[source] = max(tails[source], lag + problem.durations[target] + tails[target])
    return tuple(heads), tuple(tails)


@settings(max_examples=150, deadline=None)
@given(problems(num_microbatches=9), st.integers(1, 3))
def test_as_before(problem: OneMicrobatch, unroll: int) -> None:
    assert (problem.heads, problem.tails) == old_heads_and_tails(problem)
    assert weak_makespan_bound(problem.workload) <= strong_makespan_bound(problem)
    assert work_bound(problem.workload) == max(problem.work)
    budget = Budget(2, deterministic=True)
    patterns = [least_period(problem, budget, 1, unroll=unroll).pattern, one_after_another(problem, unroll)]
    graph, count = task_graph(problem.workload), problem.num_microbatches
    for pattern in filter(None, patterns):
        orders = compose(problem, pattern)
        assert orders == old_compose(problem, pattern)
        middle = old_middle(problem, pattern)
        assert middle_repetition(problem, pattern) == frozenset(middle)
        assert pattern.span == old_span(pattern)
        repetend = find_repetend(graph, orders, earliest_starts(graph, orders))
        if repetend is None:
            continue
        begins, u = begins_of(problem.workload, orders, repetend.first, repetend.unroll), repetend.unroll
        assert tasks_of_copy(begins, u, count) == {x * count + b + k for x, b in enumerate(begins) for k in range(u)}
        larger, longer = extend(problem.workload, orders, repetend, count + 3 * u)
        for resource, order in enumerate(orders):
            prefix, copy, suffix = split_order(problem.workload, resource, order, begins, u)
            n = larger.num_microbatches
            old = [item * n + m for item, m in prefix]
            for k in range(4):
                old += [item * n + m + k * u for item, m in copy]
            assert longer[resource] == old + [item * n + m + 3 * u for item, m in suffix]
