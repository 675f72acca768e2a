"""Frontiers up to a factor, against exact ones."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.sharding.bounds import Solved, hull_of
from pipeplan.sharding.tracking import track
from pipeplan.time_limit import Limit, TimeUpError
from references import cost_graphs as graphs


@settings(max_examples=10)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([graphs.chain, graphs.residual]),
    st.integers(2, 7),
    st.sampled_from([1e-6, 0.05, 0.5]),
)
def test_no_strategy_beats_the_hull_by_more_than_its_factor(seed: int, kind: object, num: int, within: float) -> None:
    rng = np.random.default_rng(seed)
    pairs = graphs.chain(num) if kind is graphs.chain else graphs.residual(num)
    graph = graphs.graph_of(rng, rng.integers(1, 6, num).tolist(), pairs, variants=2, high=1000)
    exact, hull = track(graph), track(graph, within=within)
    assert hull.time_ns[-1] == exact.time_ns[-1]
    assert hull.memory_bytes[0] == exact.memory_bytes[0]
    for memory, time in zip(exact.memory_bytes, exact.time_ns, strict=True):
        beaten = np.maximum(hull.memory_bytes / max(memory, 1), hull.time_ns / max(time, 1))
        assert beaten.min() <= hull.factor * (1 + 1e-9)
    for index in range(len(hull.memory_bytes)):
        strategy = hull.strategy(index)
        assert graphs.cost_of(graph, strategy) == (hull.memory_bytes[index], hull.time_ns[index])


def test_a_line_of_strategies_is_found_as_fine_as_asked_for() -> None:
    """On the curve memory * time = 10^12 the factor asked for is reached, with about one weighting per 2 %."""
    curve = [(memory, 10**12 // memory) for memory in range(10**5, 10**7, 1000)]
    asked = 0

    def solve(weights: tuple[float, float]) -> Solved:
        nonlocal asked
        asked += 1
        best = min(curve, key=lambda point: weights[0] * point[0] + weights[1] * point[1])
        return Solved(*best, weights)

    gaps = hull_of(solve, (solve((1.0, 1e-12)), solve((1e-12, 1.0))), 0.01, 400)
    found = [*(gap.left for gap in gaps), gaps[-1].right]
    factor = max(gap.factor for gap in gaps)
    assert factor <= 1.01
    assert asked < 300
    for memory, time in curve:
        assert min(max(each.memory_bytes / memory, each.time_ns / time) for each in found) <= factor


def test_where_time_is_up_the_factor_is_what_is_proved_by_then() -> None:
    """Of one chain, wherever: first that of the hull's ends, then less and less, and each of them holds."""
    rng = np.random.default_rng(5)
    graph = graphs.graph_of(rng, [3, 4, 3, 4], graphs.chain(4), variants=2, high=1000)
    exact, questions = track(graph), Questions()
    with Limit(math.inf, clock=questions).enforced():
        track(graph, within=1e-9, as_far=True)
    factors = []
    asked = int(questions.asked)
    for seconds in [*range(1, asked // 10, asked // 400), *range(asked // 12, asked, asked // 6), 2 * asked]:
        with contextlib.suppress(TimeUpError), Limit(seconds, clock=Questions()).enforced():
            early = track(graph, within=1e-9, as_far=True)
            factors.append(early.factor)
            for memory, time in zip(exact.memory_bytes, exact.time_ns, strict=True):
                beaten = np.maximum(early.memory_bytes / max(memory, 1), early.time_ns / max(time, 1))
                assert beaten.min() <= early.factor * (1 + 1e-9)
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 2, "the ends alone"
    assert factors[-1] < 1.000001
    assert len(set(factors)) > 3


@settings(max_examples=3)
@given(st.integers(0, 2**32 - 1), st.sampled_from([graphs.chain, graphs.residual]), st.integers(3, 6))
def test_a_frontier_that_ends_early_has_what_is_there_and_says_how_near_it_is(
    seed: int, kind: object, num: int
) -> None:
    """Wherever time is up: before its ends there is none; from then on strategies, and a factor that holds."""
    rng = np.random.default_rng(seed)
    pairs = graphs.chain(num) if kind is graphs.chain else graphs.residual(num)
    graph = graphs.graph_of(rng, rng.integers(2, 6, num).tolist(), pairs, variants=2, high=1000)
    exact, questions = track(graph), Questions()
    with Limit(math.inf, clock=questions).enforced():
        whole = track(graph, within=1e-9, as_far=True)
    assert whole.exact or whole.factor <= 1 + 1e-9
    asked, factors = int(questions.asked), list[float]()
    for seconds in sorted({*range(1, asked, max(1, asked // 9)), asked - 1}):
        limit = Limit(seconds, clock=Questions())
        try:
            with limit.enforced():
                early = track(graph, within=1e-9, as_far=True)
        except TimeUpError:
            assert not factors, "there was something before"
            continue
        factors.append(early.factor)
        assert set(zip(early.memory_bytes[[0, -1]], early.time_ns[[0, -1]], strict=True)) == set(
            zip(exact.memory_bytes[[0, -1]], exact.time_ns[[0, -1]], strict=True)
        )
        for memory, time in zip(exact.memory_bytes, exact.time_ns, strict=True):
            beaten = np.maximum(early.memory_bytes / max(memory, 1), early.time_ns / max(time, 1))
            assert beaten.min() <= early.factor * (1 + 1e-9)
        for index in range(len(early.memory_bytes)):
            cost = graphs.cost_of(graph, early.strategy(index))
            assert cost == (early.memory_bytes[index], early.time_ns[index])
    assert factors[0] > 1 or len(exact.memory_bytes) == 1
    with pytest.raises(TimeUpError), Limit(asked // 2, clock=Questions()).enforced():
        track(graph, within=1e-9)


class Questions:
    """A clock that each question moves by a second."""

    def __init__(self) -> None:
        self.asked = 0.0

    def __call__(self) -> float:
        self.asked += 1.0
        return self.asked
