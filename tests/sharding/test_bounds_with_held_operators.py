"""Bounds over what heuristics held, against full enumeration."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_profile
from pipeplan import frontier
from pipeplan.planning import sharding_frontier
from pipeplan.sharding import held_bounds
from pipeplan.sharding.elimination import Reduced, Reducing
from pipeplan.sharding.graph import CostGraph
from pipeplan.sharding.held_bounds import factor_of_all, least_of_all
from pipeplan.sharding.table import Weights
from pipeplan.sharding.tracking import Tracked, track
from pipeplan.time_limit import Limit, TimeUpError
from references import cost_graphs as graphs
from support.marks import some_of

pytestmark = pytest.mark.counted


def entangled(seed: int, num: int, high: int, forbidden: float) -> CostGraph:
    """Every operator beside every other, so that nothing is taken apart exactly."""
    rng = np.random.default_rng(seed)
    return graphs.graph_of(rng, [2 + seed % 2] * num, graphs.complete(num), high=high, forbidden=forbidden)


def needed(tracked: Tracked, exact: list[tuple[int, int]]) -> float:
    """The factor up to which what was found is as good as every strategy."""
    found = list(zip(tracked.memory_bytes.tolist(), tracked.time_ns.tolist(), strict=True))
    ratios = [min(max(m / max(memory, 1), t / max(time, 1)) for m, t in found) for memory, time in exact]
    return max(1.0, *ratios)


costs = st.sampled_from([30, 1000, 1 << 36])


@settings(max_examples=some_of(40))
@given(st.integers(0, 2**32 - 1), st.integers(4, 5), costs, st.sampled_from([0.0, 0.1]))
def test_no_strategy_is_below_the_bound(seed: int, num: int, high: int, forbidden: float) -> None:
    graph = entangled(seed, num, high, forbidden)
    left, exact = Reducing(True, 1).left(graph), graphs.enumerate_frontier(graph)
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.3, 1.0), (1.0, 0.01)):
        least = min(weights[0] * memory + weights[1] * time for memory, time in exact)
        assert least_of_all(left, weights) <= least * (1 + 1e-12)


@settings(max_examples=some_of(30))
@given(st.integers(0, 2**32 - 1), st.integers(4, 5), costs, st.sampled_from([0.0, 0.1]))
def test_the_factor_of_all_holds_for_every_strategy(seed: int, num: int, high: int, forbidden: float) -> None:
    graph = entangled(seed, num, high, forbidden)
    try:
        tracked = track(graph, merged=1)
    except ValueError:  # what the heuristics left does not fit together
        return
    assert tracked.eliminations["heuristic"]
    assert needed(tracked, graphs.enumerate_frontier(graph)) <= tracked.factor_of_all


def test_it_says_something() -> None:
    """Of complete graphs of four operators with random costs: at most a quarter more than what is needed."""
    for seed in range(9):
        graph = graphs.graph_of(np.random.default_rng(seed), [4] * 4, graphs.complete(4))
        tracked = track(graph, merged=1)
        assert tracked.factor_of_all <= 5 / 4 * needed(tracked, graphs.enumerate_frontier(graph))


@pytest.mark.parametrize(
    ("of_all", "factor", "said"),
    [(1.25, 1.25, "within 25.00% of every strategy in memory and time"), (math.inf, None, "not at all")],
)
def test_the_command_says_how_far_it_may_be_off(
    monkeypatch: pytest.MonkeyPatch, of_all: float, factor: float | None, said: str
) -> None:
    def held(*args: Any, **kwargs: Any) -> Tracked:
        tracked = track(*args, **kwargs)
        return replace(tracked, exact=False, eliminations=Counter(heuristic=3), factor=1.01, factor_of_all=of_all)

    monkeypatch.setattr(sharding_frontier, "track", held)
    found = frontier(chain_profile(2, placed=False), devices=[1], mini_batch=1, device="v100-16gb")
    (note,) = (each for each in found.notes if "heuristic" in each)
    assert f"3 operators were settled by heuristic elimination: proved to be {said}, and within 1.00% of those" in note
    assert found.figures()["factor"] == factor
    assert not found.figures()["exact"]


def test_where_nothing_is_held_it_is_the_factor() -> None:
    graph = graphs.graph_of(np.random.default_rng(2), [3] * 6, graphs.residual(6), high=1000)
    for within in (0.0, 0.05):
        tracked = track(graph, within=within)
        assert tracked.factor_of_all == tracked.factor <= 1 + within


@pytest.mark.parametrize("kind", [graphs.chain, graphs.residual])
def test_of_what_can_be_taken_apart_the_bound_is_the_optimum(kind: object) -> None:
    graph = graphs.graph_of(np.random.default_rng(4), [4] * 6, kind(6), high=1000)
    exact = graphs.enumerate_frontier(graph)
    least = min(memory + time for memory, time in exact)
    assert least_of_all(Reducing().left(graph), (1.0, 1.0)) == pytest.approx(least)


def test_when_time_is_up_what_is_proved_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = entangled(3, 5, 1000, 0.0)
    left, tracked = Reducing(True, 1).left(graph), track(graph, merged=1)
    points = tracked.memory_bytes, tracked.time_ns
    weighings = iter(())

    def least(left: Reduced, weights: Weights) -> float:
        if next(weighings, None) is None:
            raise TimeUpError(Limit(1))
        return least_of_all(left, weights)

    monkeypatch.setattr(held_bounds, "least_of_all", least)
    factors = []
    for num in (0, 2, 99):
        weighings = iter(range(num))
        factors.append(factor_of_all(left, *points, 1.0))
    assert factors[0] == math.inf > factors[1] >= factors[2] == tracked.factor_of_all
