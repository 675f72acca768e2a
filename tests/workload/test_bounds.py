"""Lower bounds: the design's figures, and never above the best of all schedules of tiny problems."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings

from builders.problems import problems
from builders.shapes import unit_problem, zero_bubble
from pipeplan.schedule.cpsat.repetend import least_period
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import search_schedule
from pipeplan.workload.bounds import period_bound, strong_iteration_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from references.best_makespan import best_makespan
from support.marks import one_in, some_of


@pytest.mark.parametrize(
    ("num_devices", "num_microbatches", "chain", "plain"),
    [(4, 12, 3960, 3930), (8, 32, 10_440, 10_370), (16, 64, 21_000, 20_850)],
)
def test_a_chain_with_little_memory(num_devices: int, num_microbatches: int, chain: int, plain: int) -> None:
    assert strong_iteration_bound(zero_bubble("v", num_devices, num_microbatches, 1)) == chain
    assert strong_iteration_bound(zero_bubble("v", num_devices, num_microbatches, 2)) == plain


@pytest.mark.parametrize(
    ("num_devices", "num_microbatches", "bound"), [(4, 12, 3840), (8, 32, 10_160), (16, 64, 20_400)]
)
def test_two_chunks_with_little_memory(num_devices: int, num_microbatches: int, bound: int) -> None:
    assert strong_iteration_bound(zero_bubble("zbv", num_devices, num_microbatches, 1)) == bound


def test_littles_law() -> None:
    """V on 4 devices, forward 1, backward 3, room for 3 micro-batches: 16/3 per micro-batch at the best."""
    problem = unit_problem("v", 4, 9, memory=3)
    assert period_bound(problem) * 3 == 16
    for unroll, repetend in ((1, 8), (2, 12), (3, 16)):
        found = least_period(problem, Budget(60, deterministic=True), 60, unroll=unroll)
        assert found.proved
        assert found.pattern is not None
        assert found.pattern.repetend_ns == repetend


@pytest.mark.parametrize("name", ["m", "mllm", "nn", "k"])
@one_in(2, "num_devices", [4, 8])
def test_stages_on_all_devices(name: str, num_devices: int) -> None:
    """While the first micro-batch goes down the chain nothing shared can run: the bound is what search reaches."""
    problem = unit_problem(name, num_devices, 16)
    found = search_schedule(problem.workload, Budget(30, deterministic=True))
    assert strong_iteration_bound(problem) == found.bound_ns == found.makespan_ns
    assert found.bound_ns > 16 * max(problem.work)


@pytest.mark.parametrize(("memory", "bound"), [(0.5, 14_720), (0.75, 10_740)])
def test_littles_law_over_the_whole_run(memory: float, bound: int) -> None:
    """8 devices, 32 micro-batches; at half memory far above the work of 10,370."""
    assert strong_iteration_bound(zero_bubble("v", 8, 32, memory)) >= bound


@settings(max_examples=some_of(50), suppress_health_check=list(HealthCheck))
@given(problems(max_stages=2, num_microbatches=2))
def test_bounds_and_search_against_every_schedule(problem: OneMicrobatch) -> None:
    best = best_makespan(problem)
    found = search_schedule(problem.workload, Budget(10, deterministic=True))
    assert strong_iteration_bound(problem) <= best
    assert found.bound_ns <= best
    assert found.makespan_ns == best


@settings(max_examples=some_of(30), suppress_health_check=list(HealthCheck))
@given(problems(max_stages=4, num_microbatches=2))
def test_paths_are_those_followed_from_each_operation(problem: OneMicrobatch) -> None:
    """The longest of all, one after another; what is held while what runs goes by them."""
    following: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for source, target, lag in problem.edges:
        following[source].append((target, lag))
    longest: dict[tuple[int, int], int] = {}
    for source in range(problem.num_operations):
        open_ = [(source, problem.durations[source])]
        while open_:
            at, end = open_.pop()
            longest[source, at] = max(longest.get((source, at), -1), end)
            open_ += [(target, end + lag + problem.durations[target]) for target, lag in following[at]]
    for source, target in product(range(problem.num_operations), repeat=2):
        assert problem.path(source, target) == longest.get((source, target), -1)
