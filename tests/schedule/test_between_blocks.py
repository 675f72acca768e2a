"""Repetends between the actions of all devices: their least times are those of all orders, and they are valid."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from random import Random

import pytest

from builders.shapes import unit_problem
from builders.small_plans import small_problem
from pipeplan.schedule.between_blocks import Outwards, RepetendBetweenBlocks, TightRepetends, tries
from pipeplan.schedule.cpsat.repetend import solve_pattern
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.pattern import Pattern, compose, has_room
from pipeplan.schedule.state import SearchState, fitting
from pipeplan.schedule.steps import FirstSchedule
from pipeplan.search_constants import BETWEEN_STEPS
from pipeplan.workload.bounds import period_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.shared_time import WithoutSharedTime
from pipeplan.workload.task_graph import task_graph
from references.least_period import least_period_by_enumeration
from support.marks import one_in

ALL = 10**9


def outwards(problem: OneMicrobatch, most_steps: int = BETWEEN_STEPS) -> Outwards:
    """Of what is left without the time of what all devices run together."""
    left = WithoutSharedTime.of(problem)
    assert left is not None
    found = Outwards.of(left.problem, most_steps)
    assert found is not None
    return found


def least(places: Outwards, unroll: int, most: int = ALL) -> Pattern | None:
    """The first for which there is one; None where that is not known after so many placed actions of some time."""
    length = math.ceil(period_bound(places.problem) * unroll / places.unit)
    while True:
        search = TightRepetends(places, length, unroll)
        if (found := search.find(most)) is not None or not search.exhausted:
            return found
        length += 1


def require_valid(problem: OneMicrobatch, pattern: Pattern) -> None:
    """Its orders fit, block nothing, and start no action later than it says."""
    assert has_room(problem, pattern)
    graph = task_graph(problem.workload)
    timed = fitting(graph, compose(problem, pattern)[: problem.num_devices])
    assert timed is not None
    count = problem.num_microbatches
    for x, row in enumerate(pattern.starts):
        for m in range(count):
            assert timed[1][x * count + m] <= row[m % pattern.unroll] + m // pattern.unroll * pattern.repetend_ns


@pytest.mark.parametrize("kind", ["m", "k"])
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 100), marks=pytest.mark.slow)])
def test_the_least_is_that_of_all_orders(kind: str, seeds: range) -> None:
    looked = 0
    for seed in seeds:
        places = outwards(small_problem(kind, Random(f"{kind} {seed}")))
        if places.unit == 1 and places.problem.num_operations <= 6:
            looked += 1
            found = least(places, 1)
            assert found is not None
            assert found.repetend_ns == least_period_by_enumeration(places.problem)
            require_valid(places.problem, found)
    assert looked >= len(seeds) / 3


@pytest.mark.parametrize("kind", ["m", "mllm", "nn", "k"])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.slow)])
def test_a_solver_finds_none_that_is_shorter(kind: str, seeds: range) -> None:
    shorter = 0
    for seed in seeds:
        places = outwards(small_problem(kind, Random(f"{kind} {seed}")))
        for unroll in (1, 2):
            if (found := least(places, unroll, 20_000)) is None:
                continue
            require_valid(places.problem, found)
            below = found.repetend_ns - places.unit
            if below >= period_bound(places.problem) * unroll:
                budget = Budget(5, deterministic=True)
                feasible, other, _ = solve_pattern(places.problem, below, budget, 5, unroll=unroll)
                assert other is None or not has_room(places.problem, other), "orders at one moment are open to it"
                shorter += feasible is False
    assert shorter or kind == "k" or len(seeds) < 10, "of K the bound is reached"


def test_many_short_tries_say_what_one_says() -> None:
    """Later tries begin otherwise, and know what led to nothing before."""
    places = outwards(unit_problem("nn", 4, 12, 2))
    for unroll in (1, 2):
        once = least(places, unroll)
        assert once is not None
        for length in (once.repetend_ns - 1, once.repetend_ns):
            search, random = TightRepetends(places, length, unroll), Random(length)
            found = None
            while found is None and not search.exhausted:
                found = search.find(200, random)
            assert (found is not None) == (length == once.repetend_ns)
            if found is not None:
                require_valid(places.problem, found)


@pytest.mark.parametrize("name", ["mllm", "k"])
def test_times_that_are_rounded_up_stay_valid(name: str) -> None:
    problem = small_problem(name, Random(f"{name} rounded"))
    places = outwards(problem, 2)
    assert places.unit > 1
    found = least(places, 1)
    assert found is not None
    require_valid(places.problem, found)


@one_in(2, "name", ["m", "mllm", "nn", "k"])
def test_tries_are_of_ever_shorter_periods(name: str) -> None:
    places = outwards(unit_problem(name, 4, 12, 3))
    best: Fraction | None = None
    looked = 0
    for _, pattern in islice(tries(places, Random(0)), 400):
        if pattern is not None:
            assert best is None or pattern.period <= best
            best = pattern.period
            require_valid(places.problem, pattern)
            looked += 1
            if looked == 3:
                break
    assert best is not None
    assert best >= period_bound(places.problem)


def test_branches_that_are_alike_run_alike() -> None:
    """K has two; other shapes have one, and ends that are alike on devices of their own."""
    places = outwards(unit_problem("k", 8, 24, 3))
    found = least(places, 2)
    assert found is not None
    require_valid(places.problem, found)
    twins = {place.operation: place.twin for place in places.places if place.twin is not None}
    assert len(twins) == 8
    assert all(found.starts[x] == found.starts[y] for x, y in twins.items())
    assert not any(
        place.twin for name in ("m", "mllm", "nn") for place in outwards(unit_problem(name, 8, 24, 3)).places
    )


def test_branches_that_differ_anywhere_have_no_twins() -> None:
    problem = unit_problem("k", 8, 24, 3)
    (last, *_), operations = problem.on_device[7], list(problem.workload.operations)
    operations[last] = replace(operations[last], duration_ns=2)
    other = replace(problem, workload=replace(problem.workload, operations=tuple(operations)))
    assert not any(place.twin for place in outwards(other).places)


@pytest.mark.parametrize(
    ("name", "devices", "count", "room", "tries", "shortest"),
    [
        ("mllm", 8, 24, 6, 10, 275),
        pytest.param("k", 16, 32, 6, 10, 295, marks=pytest.mark.slow),
    ],
)
def test_the_step_finds_what_one_microbatch_has_no_room_for(
    name: str, devices: int, count: int, room: int, tries: int, shortest: int
) -> None:
    """With room for half of the span: the search without it had 281 and 316."""
    problem = unit_problem(name, devices, count, room)
    state = SearchState.of(problem, Budget(4, deterministic=True), None)
    FirstSchedule().run(state)
    step = RepetendBetweenBlocks(share=1.0, fruitless=tries)
    assert step.applies(state)
    step.run(state)
    assert state.best is not None
    assert state.best.iteration <= shortest
    assert state.steady is not None


@pytest.mark.parametrize("problem", [unit_problem("v", 4, 8, 2), unit_problem("mllm", 4, 8)])
def test_it_is_for_blocks_on_all_devices_and_limits(problem: OneMicrobatch) -> None:
    state = SearchState.of(problem, Budget(1, deterministic=True), None)
    FirstSchedule().run(state)
    assert not RepetendBetweenBlocks().applies(state)
