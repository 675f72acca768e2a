"""Insertion: complete, within memory, and as good as what is known of it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from builders.problems import problems
from builders.shapes import zero_bubble
from pipeplan.schedule.insertion import insert_microbatches
from pipeplan.schedule.problem import Problem
from pipeplan.simulate.memory import overflow
from pipeplan.simulate.timing import earliest_starts, task_graph


def makespan(problem: Problem) -> int:
    graph = task_graph(problem.workload)
    orders = insert_microbatches(problem)
    assert orders is not None
    assert overflow(graph, orders) is None
    return max(map(sum, zip(earliest_starts(graph, orders), graph.durations, strict=True)))


@pytest.mark.parametrize(("memory", "known"), [(0.75, 13_340), (0.5, 17_300)])
def test_a_chain_with_little_memory(memory: float, known: int) -> None:
    """8 devices, 32 micro-batches, F = I = W = 100, communication 10."""
    assert makespan(zero_bubble("v", 8, 32, memory)) <= known


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(problems(num_microbatches=5))
def test_complete_and_within_memory(problem: Problem) -> None:
    orders = insert_microbatches(problem)
    if orders is None:  # branches that fit only one after the other, in another order than the operations'
        return
    graph = task_graph(problem.workload)
    assert overflow(graph, orders) is None
    earliest_starts(graph, orders)
    for order, operations in zip(orders, problem.on_device, strict=True):
        assert sorted(order) == [x * 5 + m for x in operations for m in range(5)]
