"""Searches order last weight gradients and sums of gradients so that these hide behind other work."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from builders.problems import with_tails
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.cpsat.windows import reschedule
from pipeplan.schedule.search import first_look, search_schedule
from pipeplan.schedule.state import SearchState
from pipeplan.schedule.steps import LastWeightGradients
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.tails import best_iteration, iteration_by_hand

SETTINGS = settings(max_examples=10, suppress_health_check=list(HealthCheck))


@SETTINGS
@given(with_tails())
def test_the_search_finds_the_best_of_all_orders(problem: OneMicrobatch) -> None:
    workload = problem.workload
    best, fixed = best_iteration(problem), first_look(workload)
    found = search_schedule(workload, Budget(5, deterministic=True))
    assert found.bound_ns <= best == found.iteration_ns
    assert fixed is None or found.iteration_ns <= fixed.iteration_ns
    ends = dict(zip([each.id for each in workload.operations], found.graph.last_ends(found.starts), strict=True))
    assert found.iteration_ns == iteration_by_hand(workload, ends, any_order=True)


def shared(num_devices: int, weights: tuple[int, ...], syncs: tuple[int, ...], count: int = 1) -> Workload:
    """A chain whose stages stand on the devices in turn; weight gradients and sums of the stages take so long."""
    devices = [(stage % num_devices,) for stage in range(len(weights))]
    workload = chain_workload(num_devices, count, devices=devices, split=(10, 10))
    stages = tuple(replace(each, sync_ns=ns) for each, ns in zip(workload.stages, syncs, strict=True))
    operations = tuple(
        replace(each, duration_ns=weights[each.stage]) if each.kind == "W" else each for each in workload.operations
    )
    return replace(workload, stages=stages, operations=operations)


def ordered(graph: TaskGraph, texts: list[list[str]]) -> list[list[int]]:
    numbers = {graph.label(task): task for task in range(graph.num_tasks)}
    return [[numbers[text] for text in order] for order in texts]


def test_all_actions_and_sums_are_ordered_as_one() -> None:
    """Both sums take 20: behind the short weight gradient (2) one begins 8 sooner than behind the long one (10)."""
    workload = shared(1, (10, 2), (20, 20))
    graph, problem = task_graph(workload), OneMicrobatch.of(workload)
    orders = ordered(graph, [["0F0", "1F0", "1I0", "0I0", "0W0", "1W0"]])
    starts = earliest_starts(graph, orders)
    begun = starts[orders[0][4]]
    assert graph.iteration(starts) == begun + 10 + 20 + 20
    found = reschedule(problem, graph, orders, starts, Budget(10, deterministic=True), 10.0)
    assert found.orders is not None
    best = graph.iteration(earliest_starts(graph, found.orders))
    assert found.exhausted
    assert best == found.bound_ns < begun + 2 + 20 + 20, "1W0 hides behind 0I0, too"


@pytest.mark.parametrize("num_devices", [1, 2])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_last_weight_gradients_as_by_brute_force(num_devices: int, data: st.DataObject) -> None:
    """All orders of the stages' weight gradients at the end of each device, against the step that searches them."""
    ns = st.integers(1, 12)
    weights, syncs = (tuple(data.draw(ns) for _ in range(4 - (num_devices == 1))) for _ in range(2))
    workload = shared(num_devices, weights, syncs, count=2)
    state = SearchState.of(OneMicrobatch.of(workload), Budget(60, deterministic=True), None)
    graph = state.graph
    chains = [[s for s in range(len(weights)) if s % num_devices == device] for device in range(num_devices)]
    front = [
        [f"{s}F{m}" for s in own for m in range(2)] + [f"{s}I{m}" for s in reversed(own) for m in range(2)]
        for own in chains
    ]
    tried = []
    for chosen in product(*(permutations(own) for own in chains)):
        ends = [[f"{s}W{m}" for s in own for m in range(2)] for own in chosen]
        orders = ordered(graph, [one + two for one, two in zip(front, ends, strict=True)])
        candidate = state.candidate(orders, "given")
        assert candidate is not None
        tried.append(candidate)
    state.offer(tried[0])
    LastWeightGradients().run(state)
    assert state.best is not None
    assert state.best.iteration == min(each.iteration for each in tried)
