"""FlexPipe, Fig. 11: schedules made by rules beside those of the repetend search, on 4 devices; the search has both."""

from __future__ import annotations

import itertools

import pytest

from builders.shapes import shape_workload
from pipeplan.examples import ShapeCosts
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.rules.sweep import built_in_rules, sweep
from pipeplan.schedule.search import search_schedule
from pipeplan.workload.memory import fits
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from support.marks import slow_but

MS = 1_000_000


def workload_of(name: str, count: int, *, split: bool) -> Workload:
    """Forward 1, backward 3 in two parts, shared blocks 1 and 1; room for 8 micro-batches and their W."""
    costs = ShapeCosts(MS, None, 2 * MS, MS, activation_bytes=10, weight_grad_bytes=10)
    return shape_workload(name, 4, count, costs=costs, split=split, memory=80)


@slow_but(
    "name, split",
    list(itertools.product(["mllm", "m", "nn"], [False, True])),
    lambda case: case in [("mllm", False), ("m", True), ("nn", False)],
    ("mllm", True).__eq__,
)
def test_the_automatic_search_returns_the_better_one(name: str, split: bool) -> None:
    workload = workload_of(name, 6, split=split)
    rules = sweep(workload)
    repetend = search_schedule(workload, Budget(1, deterministic=True), scheduler="repetend")
    found = search_schedule(workload, Budget(2, deterministic=True))
    assert found.makespan_ns <= min(rules[0].iteration_ns, repetend.makespan_ns)
    assert found.bound_ns <= rules[0].iteration_ns


@pytest.mark.parametrize("name", ["mllm", "nn"])
def test_separation_lessens_bubbles_of_the_best_rules(name: str) -> None:
    """Of the same rules, with backward in two parts; every schedule fits and is as long as it is said to be."""
    workload = workload_of(name, 8, split=True)
    rules = built_in_rules(workload)
    with_it, without = (sweep(workload, [each for each in rules if each.separate == which]) for which in (True, False))
    assert with_it[0].iteration_ns < without[0].iteration_ns
    assert [swept.iteration_ns for swept in with_it] == sorted(swept.iteration_ns for swept in with_it)
    graph = task_graph(workload)
    for swept in (*with_it, *without):
        assert fits(graph, swept.orders)
        assert swept.starts == earliest_starts(graph, swept.orders)
