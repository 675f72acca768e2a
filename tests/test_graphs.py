"""Orders and circles of small graphs, and what is no graph at all."""

from __future__ import annotations

import pytest

from pipeplan.graphs import CycleError, short_cycle, topological_order


def test_an_order_follows_the_edges_and_otherwise_what_is_given() -> None:
    assert topological_order("dcba", [("a", "d"), ("b", "c")]) == ("b", "c", "a", "d")
    assert topological_order("dcba", [("a", "d"), ("b", "c")], key=str) == ("a", "b", "c", "d")


def test_a_circle_is_named() -> None:
    with pytest.raises(CycleError, match="a -> b -> a"):
        topological_order("abc", [("a", "b"), ("b", "a"), ("b", "c")])


def test_edges_join_nodes() -> None:
    with pytest.raises(ValueError, match=r"not a node: x, y$"):
        topological_order("abc", [("a", "x"), ("y", "b")])


def test_the_shortest_cycle_is_found_behind_what_leads_to_it_and_beside_longer_ones() -> None:
    following = {0: [1], 1: [2], 2: [3], 3: [1, 4], 4: [5], 5: [4, 6], 6: []}
    assert short_cycle(following) == [4, 5]
    assert short_cycle({**following, 5: [6]}) == [1, 2, 3]
    assert short_cycle({0: [1], 1: []}) == []


def test_of_many_long_cycles_not_all_are_compared() -> None:
    """An error that a search throws away took 1.4 s to name one."""
    looked_up = 0

    class Counting(dict[int, list[int]]):
        def __getitem__(self, node: int) -> list[int]:
            nonlocal looked_up
            looked_up += 1
            return super().__getitem__(node)

    size = 5_000
    cycle = short_cycle(Counting({node: [(node + 1) % size] for node in range(size)}))
    assert len(cycle) == size
    assert looked_up < 30 * size
