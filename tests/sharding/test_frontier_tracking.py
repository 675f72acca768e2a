"""Frontier tracking against full enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeplan.sharding.graph import CostEdge, CostGraph, CostNode, undominated
from pipeplan.sharding.table import table
from pipeplan.sharding.tracking import Tracked, track
from references import cost_graphs as graphs
from support.marks import some_of


def points(tracked: Tracked) -> list[tuple[int, int]]:
    return list(zip(tracked.memory_bytes.tolist(), tracked.time_ns.tolist(), strict=True))


def strategies_cost_what_they_say(graph: CostGraph, tracked: Tracked) -> None:
    for index, point in enumerate(points(tracked)):
        strategy = tracked.strategy(index)
        assert (strategy.memory_bytes, strategy.time_ns) == point
        assert graphs.cost_of(graph, strategy) == point


def drawn(seed: int, kind: str, num: int, variants: int, high: int, forbidden: float) -> CostGraph:
    rng = np.random.default_rng(seed)
    pairs = {
        "chain": lambda: graphs.chain(num),
        "residual": lambda: graphs.residual(num),
        "branching": lambda: graphs.branching(rng, num),
        "hub": lambda: graphs.hub(num),
    }[kind]()
    sizes = rng.integers(1, 4, num).tolist()
    return graphs.graph_of(rng, sizes, pairs, variants=variants, high=high, forbidden=forbidden)


@settings(max_examples=some_of(100))
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["chain", "residual", "branching", "hub"]),
    st.integers(2, 5),
    st.integers(1, 2),
    st.sampled_from([4, 30, 1 << 36]),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
    st.booleans(),
)
@example(1103, "chain", 3, 2, 4, 0.0, True, True)  # two tables with equal costs, but not of the same variants
def test_the_frontier_is_that_of_full_enumeration(
    seed: int, kind: str, num: int, variants: int, high: int, forbidden: float, linear: bool, pruned: bool
) -> None:
    graph = drawn(seed, kind, num, variants, high, forbidden)
    tracked = track(graph, linear=linear, pruned=pruned)
    assert tracked.exact
    assert points(tracked) == graphs.enumerate_frontier(graph)
    strategies_cost_what_they_say(graph, tracked)


@settings(max_examples=some_of(20))
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["chain", "residual", "branching", "hub"]),
    st.integers(2, 5),
    st.integers(2, 3),
    st.integers(1, 2),
    st.sampled_from([4, 30, 1 << 36]),
    st.sampled_from([0.0, 1e-15]),
)
def test_what_operators_share_is_there_once_where_they_split_it_alike(
    seed: int, kind: str, num: int, users: int, ties: int, high: int, within: float
) -> None:
    """Copy by copy: up to three operators that share something, and some that share two things."""
    graph = drawn(seed, kind, num, 1 + (high == 4), high, 0.1 * (high > 4))
    rng = np.random.default_rng(seed)
    for _ in range(ties):
        graph = graphs.tied(rng, graph, users, int(rng.integers(1, 4)), high)
    tracked = track(graph, within=within)
    assert tracked.exact
    assert points(tracked) == graphs.enumerate_frontier(graph)
    strategies_cost_what_they_say(graph, tracked)
    fewer = track(graph.restricted(undominated(graph)))
    assert points(fewer) == points(tracked)


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_of_four_or_more_in_two_ways_one_way_is_counted_once(seed: int) -> None:
    """Then costs are no less than those by copies, and the result does not call itself exact."""
    rng = np.random.default_rng(seed)
    graph = graphs.tied(rng, graphs.graph_of(rng, [3] * 4, graphs.chain(4)), 4, 2, 20)
    (tie,) = graph.ties
    tracked = track(graph)
    assert tracked.exact == tie.sure
    exact = graphs.enumerate_frontier(graph)
    for index, (memory, time) in enumerate(points(tracked)):
        assert any(m <= memory and t <= time for m, t in exact)
        chosen = tracked.strategy(index).configurations
        alone = [tie.spared([chosen[user.operator] for user in tie.users])]
        assert alone[0][0] <= graphs.copies(tie, chosen)[0]
        assert alone[0][1] + alone[0][2] <= graphs.copies(tie, chosen)[1]


@settings(max_examples=12)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["chain", "residual", "branching", "hub"]),
    st.integers(2, 5),
    st.sampled_from([4, 30, 1 << 36]),
)
def test_gap_by_gap_is_exact_too(seed: int, kind: str, num: int, high: int) -> None:
    graph = drawn(seed, kind, num, 2, high, 0.1)
    tracked = track(graph, within=1e-15)
    assert tracked.exact
    assert points(tracked) == graphs.enumerate_frontier(graph)
    strategies_cost_what_they_say(graph, tracked)


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.integers(5, 6))
def test_heuristic_eliminations_give_strategies_that_are_there_and_say_so(seed: int, num: int) -> None:
    rng = np.random.default_rng(seed)
    graph = graphs.graph_of(rng, [3 + num % 2] * num, graphs.complete(num), high=1000)
    tracked = track(graph, merged=1)
    assert tracked.eliminations["heuristic"]
    assert not tracked.exact
    strategies_cost_what_they_say(graph, tracked)
    exact = track(graph, merged=4**num)
    assert exact.exact
    assert exact.eliminations["branch"]
    for memory, time in points(tracked):
        assert any(m <= memory and t <= time for m, t in points(exact))


@pytest.mark.parametrize("linear", [True, False])
def test_identical_layers_are_computed_once(linear: bool) -> None:
    layers = 20
    one = graphs.graph_of(np.random.default_rng(5), [3] * 3, graphs.residual(3))
    costs = [one.nodes[index % 2].costs for index in range(2 * layers + 1)]
    nodes = tuple(CostNode(f"n{index}", ("0", "1", "2"), table) for index, table in enumerate(costs))
    edges = tuple(
        replace(edge, source=f"n{a + 2 * layer}", target=f"n{b + 2 * layer}")
        for layer in range(layers)
        for edge, (a, b) in zip(one.edges, graphs.residual(3), strict=True)
    )
    graph = CostGraph(nodes, edges)
    tracked = track(graph, linear=linear)
    assert tracked.exact
    strategies_cost_what_they_say(graph, tracked)
    assert tracked.eliminations["node"] >= layers
    assert tracked.num_computed < 4 * layers


def test_configurations_that_do_not_fit_together_are_refused() -> None:
    free = [[0, 0], [0, 0]]
    nodes = tuple(CostNode(name, ("whole", "split"), table([8, 4], [10, 12])) for name in "abc")
    first, second = np.array([[True, False], [False, False]]), np.array([[False, False], [True, False]])
    edges = (CostEdge("a", "b", table(free, free, first)), CostEdge("b", "c", table(free, free, second)))
    for within in (0.0, 0.01):
        with pytest.raises(ValueError, match="no strategy"):
            track(CostGraph(nodes, edges), within=within)
