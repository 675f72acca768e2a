"""Searches order last weight gradients and sums of gradients so that these hide behind other work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from builders.problems import with_tails
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.cpsat.windows import reschedule
from pipeplan.schedule.list_scheduling import PolicySearch
from pipeplan.schedule.search import first_look, search_schedule
from pipeplan.schedule.state import SearchState
from pipeplan.schedule.steps import LastWeightGradients
from pipeplan.workload.elements import Bucket
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


def interleaved(rows: list[list[int]]) -> Iterator[list[int]]:
    """All ways to go through several rows at once."""
    if not any(rows):
        yield []
    for number, row in enumerate(rows):
        if row:
            left = [*rows[:number], row[1:], *rows[number + 1 :]]
            yield from ([row[0], *rest] for rest in interleaved(left))


@SETTINGS
@given(st.booleans(), st.booleans(), st.sampled_from([0.0, 0.5]), st.integers(1, 40), st.integers(1, 40))
def test_a_stage_alone_takes_as_long_in_any_order(
    split: bool, buckets: bool, contention: float, sync: int, ahead: int
) -> None:
    workload = chain_workload(1, 3, split=(10, 7) if split else None)
    halves = (Bucket(blocks=1, bytes=0, sync_ns=sync, ahead_ns=ahead), Bucket(blocks=0, bytes=0, sync_ns=9))
    stage = replace(workload.stages[0], sync_ns=sync + 9, step_ns=3, buckets=halves if buckets else ())
    devices = tuple(replace(each, contention=contention) for each in workload.devices)
    workload = replace(workload, stages=(stage,), devices=devices)
    graph, state = task_graph(workload), SearchState.of(OneMicrobatch.of(workload), Budget(5, deterministic=True), None)
    orders = interleaved([[3 * kind + m for kind in range(len(workload.operations))] for m in range(3)])
    assert len({graph.iteration(earliest_starts(graph, [order])) for order in orders}) == 1
    assert state.in_any_order


def test_orders_of_a_stage_alone_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were for as long as there was time, since contention is in no bound."""
    monkeypatch.setattr(PolicySearch, "propose", lambda own: pytest.fail("a policy is tried"))
    workload = chain_workload(1, 8)
    devices = tuple(replace(each, contention=0.5) for each in workload.devices)
    stages = (replace(workload.stages[0], sync_ns=15, buckets=(Bucket(blocks=1, bytes=0, sync_ns=15, ahead_ns=20),)),)
    alone = replace(workload, stages=stages, devices=devices)
    found = search_schedule(alone, Budget(5, deterministic=True))
    assert found.bound_ns < found.iteration_ns
    both = replace(shared(1, (10, 2), (20, 20), count=2), devices=devices)
    assert not SearchState.of(OneMicrobatch.of(both), Budget(5, deterministic=True), None).in_any_order


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
