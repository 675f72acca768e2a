"""The least period against exhaustive enumeration of index assignments, Tessel's own search space (IV-B)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from strategies import problems

from pipeplan.costs import build_workload
from pipeplan.model import Block, CostRow, Edge, PlacedStage, Placement, Profile, Source
from pipeplan.schedule.problem import Problem
from pipeplan.schedule.repetend import least_period
from pipeplan.schedule.solver import Budget


def least_period_by_enumeration(problem: Problem) -> int:
    """Least integer T over all indices k and all orders of a repetend on every device; no solver involved.

    With k and the orders given, starts exist for T if and only if the difference constraints have no positive
    cycle; every device has a window of its own, as Tessel's compact repetends do.
    """
    assignments: dict[int, list[tuple[int, ...]]] = {}
    for period in itertools.count(max(*problem.work, *problem.durations)):
        reach = _reach(problem, period)
        if reach not in assignments:
            assignments[reach] = list(_index_assignments(problem, reach))
        for indices in assignments[reach]:
            if any(_has_starts(problem, period, indices, orders) for orders in _orders(problem, indices)):
                return period
    raise AssertionError


def _reach(problem: Problem, period: int) -> int:
    longest = [0] * problem.num_operations
    for source, target, lag in sorted(problem.edges):
        step = 1 + math.ceil((problem.durations[source] + lag) / period)
        longest[target] = max(longest[target], longest[source] + step)
    return max(longest) + 1


def _index_assignments(problem: Problem, most: int) -> Iterator[tuple[int, ...]]:
    """All k with k_j >= k_i along dependencies (Property 4.2), the least of them 0."""
    sources = [[s for s, t, _ in problem.edges if t == target] for target in range(problem.num_operations)]

    def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == problem.num_operations:
            if min(chosen) == 0:
                yield chosen
            return
        least = max((chosen[source] for source in sources[len(chosen)]), default=0)
        for index in range(least, most + 1):
            yield from extend((*chosen, index))

    return extend(())


def _orders(problem: Problem, indices: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All orders within a repetend, one per device, that stay within memory."""
    per_device = [
        [order for order in itertools.permutations(operations) if _fits(problem, device, order, indices)]
        for device, operations in enumerate(problem.on_device)
    ]
    return itertools.product(*per_device)


def _fits(problem: Problem, device: int, order: tuple[int, ...], indices: tuple[int, ...]) -> bool:
    """Count what is held, repetition by repetition, once all micro-batches of the past have begun."""
    capacity = problem.capacity[device]
    if capacity is None:
        return True
    held = sum(-indices[x] * (problem.acquire[x] - problem.release[x]) for x in order)
    for x in order:
        held += problem.acquire[x]
        if held + problem.workspace[x] > capacity:
            return False
        held -= problem.release[x]
    return True


def _has_starts(problem: Problem, period: int, indices: tuple[int, ...], orders: tuple[tuple[int, ...], ...]) -> bool:
    arcs = [
        (source, target, problem.durations[source] + lag - period * (indices[target] - indices[source]))
        for source, target, lag in problem.edges
    ]
    for order in orders:
        arcs += [(before, after, problem.durations[before]) for before, after in itertools.pairwise(order)]
        if order:
            arcs.append((order[-1], order[0], problem.durations[order[-1]] - period))
    longest = [0] * problem.num_operations
    for _ in range(problem.num_operations + 1):
        changed = False
        for source, target, weight in arcs:
            if longest[source] + weight > longest[target]:
                longest[target] = longest[source] + weight
                changed = True
        if not changed:
            return True
    return False


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problems())
def test_least_period_is_that_of_the_enumeration(problem: Problem) -> None:
    found = least_period(problem, Budget(60), 60)
    assert found.pattern is not None
    assert found.proved
    assert found.pattern.repetend_ns == least_period_by_enumeration(problem)


@pytest.mark.parametrize(("memory", "period"), [(1, 8), (2, 4), (3, 4)])
def test_the_enumeration_itself_on_a_known_case(memory: int, period: int) -> None:
    """Two stages, forward 1 and backward 3, one activation each: one micro-batch in flight takes 8, two take 4."""
    row = CostRow(microbatch_size=1, forward_ns=1, backward_ns=3, activation_bytes=1)
    profile = Profile(
        name="v",
        source=Source(method="literature"),
        blocks=tuple(Block(id=f"b{index}", operator="x", costs=(row,)) for index in range(2)),
        edges=(Edge(source="b0", target="b1"),),
    )
    placement = Placement(
        strategy="v",
        num_devices=2,
        stages=tuple(PlacedStage(blocks=(f"b{index}",), devices=(index,)) for index in range(2)),
    )
    workload = build_workload(profile, placement, num_microbatches=4, microbatch_size=1, memory_bytes=[memory] * 2)
    assert least_period_by_enumeration(Problem.of(workload)) == period
