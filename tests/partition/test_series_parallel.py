"""Series-parallel decomposition against orders computed in full, on random compositions and random graphs."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.errors import UsageError
from pipeplan.partition.series_parallel import Part, decompose, in_line
from support.marks import some_of

Order = set[tuple[str, str]]


def order_of(part: Part) -> Order:
    """Every ordered pair of a tree."""
    inside = set().union(*(order_of(each) for each in part.parts)) if part.parts else set()
    if part.kind == "series":
        for one, other in combinations(part.parts, 2):
            inside |= {(first, second) for first in one.blocks for second in other.blocks}
    return inside


def closure(names: list[str], edges: Order) -> Order:
    """Every ordered pair of a graph, by Warshall's algorithm."""
    pairs = set(edges)
    for middle in names:
        into = [source for source, target in pairs if target == middle]
        out = [target for source, target in pairs if source == middle]
        pairs |= {(source, target) for source in into for target in out}
    return pairs


def path(part: Part, weights: dict[str, int]) -> int:
    if part.kind == "block":
        return weights[part.names[0]]
    return (sum if part.kind == "series" else max)(path(each, weights) for each in part.parts)


def assert_well_formed(part: Part) -> None:
    for each in part.parts:
        assert each.kind != part.kind
        assert_well_formed(each)
    assert (part.kind == "block") == (not part.parts) == bool(part.names)
    assert len(part.parts) != 1


@st.composite
def compositions(draw: st.DrawFn, most: int = 12) -> tuple[list[str], Order]:
    """The order of random parts joined in series and in parallel."""
    count = draw(st.integers(1, most))
    pieces: list[tuple[list[str], Order]] = [([f"b{index}"], set()) for index in range(count)]
    while len(pieces) > 1:
        at = draw(st.integers(0, len(pieces) - 2))
        (first, one), (second, other) = pieces[at : at + 2]
        joined = one | other
        if draw(st.booleans()):
            joined |= {(source, target) for source in first for target in second}
        pieces[at : at + 2] = [(first + second, joined)]
    return pieces[0]


@st.composite
def graphs(draw: st.DrawFn, most: int = 10) -> tuple[list[str], Order]:
    names = [f"b{index}" for index in range(draw(st.integers(1, most)))]
    pairs = list(combinations(names, 2))
    return names, set(draw(st.lists(st.sampled_from(pairs), unique=True))) if pairs else set()


@settings(max_examples=some_of(200))
@given(compositions(), st.randoms(use_true_random=False))
def test_a_composition_is_found_again_whatever_edges_say_it(
    composition: tuple[list[str], Order], rng: random.Random
) -> None:
    """Any edges with the same order will do: those that follow from others may be there or not."""
    names, order = composition
    needed = {
        (source, target)
        for source, target in order
        if not any((source, middle) in order and (middle, target) in order for middle in names)
    }
    edges = needed | {pair for pair in order if rng.random() < 0.3}
    shuffled = rng.sample(names, len(names))
    found = decompose(shuffled, edges)
    assert order_of(found.tree) == order
    assert found.added_orders == 0
    assert found.critical_path_after == found.critical_path_before
    assert sorted(found.tree.blocks) == sorted(names)
    assert_well_formed(found.tree)


@settings(max_examples=some_of(200))
@given(graphs(), st.randoms(use_true_random=False))
def test_any_graph_becomes_series_parallel_and_the_cost_is_said(
    graph: tuple[list[str], Order], rng: random.Random
) -> None:
    names, edges = graph
    weights = {name: rng.randrange(5) for name in names}
    found = decompose(names, edges, weights)
    order, had = order_of(found.tree), closure(names, edges)
    assert had <= order
    assert len(order) - len(had) == found.added_orders
    assert path(found.tree, weights) == found.critical_path_after >= found.critical_path_before
    assert all((second, first) not in order for first, second in order)
    forbidden = any(  # an N in the order: what a series-parallel one cannot have
        {(a, c), (b, c), (b, d)} <= had and not {(a, b), (b, a), (c, d), (d, c), (a, d), (d, a)} & had
        for a in names
        for b in names
        for c in names
        for d in names
    )
    assert (found.added_orders > 0) == forbidden
    position = {block: at for at, block in enumerate(found.tree.blocks)}
    assert all(position[source] < position[target] for source, target in edges)
    assert_well_formed(found.tree)


def test_the_smallest_graph_that_is_not_series_parallel_gets_one_order() -> None:
    found = decompose(["a", "b", "c", "d"], [("a", "c"), ("b", "c"), ("b", "d")], {"a": 5, "b": 1, "c": 1, "d": 5})
    assert found.added_orders == 1
    # b before a: 1 + 5 + 1; the other cuts leave d after a: 5 + 5
    assert (found.critical_path_before, found.critical_path_after) == (6, 7)


def test_a_cross_edge_between_two_chains_costs_only_where_it_crosses() -> None:
    """Chains join before cuts are looked at: one order between parts, 5 x 5 pairs of blocks."""
    names = [f"{branch}{index}" for branch in "ab" for index in range(10)]
    edges = [(f"{branch}{index}", f"{branch}{index + 1}") for branch in "ab" for index in range(9)]
    found = decompose(names, [*edges, ("a4", "b5")])
    assert found.added_orders == 25
    assert found.critical_path_after == found.critical_path_before == 10


def test_deep_nests_and_long_chains_of_ten_thousand_blocks() -> None:
    names = [f"b{index}" for index in range(10_000)]
    chain = decompose(names, list(zip(names, names[1:], strict=False)))
    assert [part.names[0] for part in chain.tree.parts] == names
    # b0 -> (b1 beside (b2 -> (b3 beside ...)))
    nest = [(names[at], later) for at in range(0, 9_998, 2) for later in names[at + 1 : at + 3]]
    found = decompose(names, nest)
    assert found.added_orders == 0
    assert sum(1 for part in found.tree.post_order() if part.kind == "parallel") >= 4_999


def test_what_cannot_be_decomposed_says_why() -> None:
    with pytest.raises(UsageError, match=r"cycle.*a -> b"):
        decompose(["a", "b"], [("a", "b"), ("b", "a")])
    with pytest.raises(UsageError, match="'z'"):
        decompose(["a"], [("a", "z")])
    with pytest.raises(UsageError, match="at least one block"):
        decompose([], [])


def test_a_line_is_a_decomposition() -> None:
    assert in_line("abc").blocks == ("a", "b", "c")
    assert in_line("a").kind == "block"
