"""Configurations that another one replaces everywhere: the frontier does not miss them."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.sharding.graph import CostEdge, CostGraph, CostNode, undominated
from pipeplan.sharding.table import table
from pipeplan.sharding.tracking import track
from support.marks import some_of


def graph_of(seed: int, num_nodes: int) -> CostGraph:
    """Any graph; costs are so small that many configurations are alike or worse, and some pairs are forbidden."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 6, num_nodes)
    nodes = [
        CostNode(f"n{i}", tuple(map(str, range(k))), table(random.integers(0, 4, k), random.integers(0, 4, k)))
        for i, k in enumerate(sizes)
    ]
    edges = []
    for i in range(num_nodes):
        for j in range(i + 1, num_nodes):
            if Random(seed + 31 * i + j).random() < 0.6:
                shape = sizes[i], sizes[j]
                allowed = random.random(shape) < 0.9
                allowed[0, 0] = True
                costs = table(random.integers(0, 2, shape), random.integers(0, 3, shape), allowed)
                edges.append(CostEdge(f"n{i}", f"n{j}", costs))
    return CostGraph(tuple(nodes), tuple(edges))


@settings(max_examples=some_of(60))
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_the_frontier_is_the_same(seed: int, num_nodes: int) -> None:
    graph = graph_of(seed, num_nodes)
    kept = undominated(graph)
    try:
        whole = track(graph)
    except ValueError:  # what is allowed does not go together
        return
    fewer = track(graph.restricted(kept))
    assert whole.memory_bytes.tolist() == fewer.memory_bytes.tolist()
    assert whole.time_ns.tolist() == fewer.time_ns.tolist()


def test_what_is_worse_goes_and_of_equal_ones_the_first_stays() -> None:
    nodes = (
        CostNode("a", tuple("wxyz"), table([2, 2, 3, 1], [2, 2, 3, 9])),
        CostNode("b", tuple("uv"), table([1, 1], [1, 1])),
    )
    free = CostGraph(nodes, (CostEdge("a", "b", table(np.zeros((4, 2)), np.zeros((4, 2)))),))
    assert {name: places.tolist() for name, places in undominated(free).items()} == {"a": [0, 3], "b": [0]}
    assert undominated(free, {"a": np.array([5, 1, 1, 1])})["a"].tolist() == [1, 3]


def test_with_several_points_in_a_cell_all_stay() -> None:
    several = table([[[1, 2]], [[3, 4]]], [[[2, 1]], [[4, 3]]], copies=2)
    nodes = (CostNode("a", ("x", "y"), table([1, 2], [1, 2])), CostNode("b", ("z",), table([1], [1])))
    assert undominated(CostGraph(nodes, (CostEdge("a", "b", several),)))["a"].tolist() == [0, 1]
