"""Frontiers up to a factor, against exact ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.sharding.bounds import Solved, hull_of
from pipeplan.sharding.tracking import track
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
