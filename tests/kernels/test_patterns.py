"""Patterns and rules find the groups that trying all sets of operators finds."""

from __future__ import annotations

import random

import pytest

from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.kernels.patterns import is_op, wildcard
from pipeplan.kernels.rules import PatternRule, check_path, generate
from references.kernel_covers import Fuses, every_group, every_pattern_group, random_graph


def residual() -> OperatorDag:
    """A convolution, its shortcut, and what follows: conv -> norm -> add (of the first) -> relu -> pool."""
    return OperatorDag(
        [
            GraphOperator("stem", "conv2d", (), {"layout": "NCHW", "kernel": 7}),
            GraphOperator("conv", "conv2d", ("stem",), {"layout": "NCHW", "kernel": 3}),
            GraphOperator("norm", "norm", ("conv",)),
            GraphOperator("add", "add", ("norm", "stem")),
            GraphOperator("relu", "relu", ("add",)),
            GraphOperator("pool", "pool", ("relu",)),
        ]
    )


def test_a_pattern_is_a_line() -> None:
    conv = is_op("conv2d")(wildcard(), wildcard()).has_attr({"layout": "NCHW"})
    assert list(conv.matches(residual())) == [("stem",), ("conv",)]
    assert list(is_op("norm")(conv).matches(residual())) == [("conv", "norm")]
    chain = is_op("relu")(is_op("add")(is_op("norm")(conv), wildcard()))
    assert list(chain.matches(residual())) == [("conv", "norm", "add", "relu")]


@pytest.mark.parametrize(
    ("attributes", "found"),
    [
        ({"layout": "NHWC"}, []),
        ({"kernel": 3}, [("conv",)]),
        ({"kernel": lambda size: size > 3}, [("stem",)]),
        ({"no such": 1}, []),
    ],
)
def test_attributes(attributes: dict[str, object], found: list[tuple[str, ...]]) -> None:
    assert list(is_op("conv2d").has_attr(attributes).matches(residual())) == found


def test_alternatives_and_several_kinds() -> None:
    assert list(is_op().has_attr({"kernel": 3}).matches(residual())) == [("conv",)]
    one, two = is_op("relu", "pool")(wildcard()), is_op("relu")(wildcard()) | is_op("pool")(wildcard())
    assert list(one.matches(residual())) == list(two.matches(residual())) == [("relu",), ("pool",)]
    deep = is_op("add")(is_op("norm") | is_op("conv2d"), wildcard())
    assert list(deep.matches(residual())) == [("norm", "add")]


def test_a_result_that_others_take_is_not_hidden_in_a_kernel() -> None:
    assert list(is_op("conv2d")(is_op("conv2d")()).matches(residual())) == []  # the stem's goes to the sum, too


def test_arguments_have_their_order() -> None:
    assert list(is_op("add")(wildcard(), is_op("norm")).matches(residual())) == []
    assert list(is_op("add")(wildcard()).matches(residual())) == []  # it takes two


def test_random_graphs_have_the_matches_of_all_pairs() -> None:
    pattern = is_op("relu")(is_op("conv", "add"))
    for seed in range(40):
        graph = random_graph(random.Random(seed), 9)

        def fits(group: tuple[str, ...], graph: OperatorDag = graph) -> bool:
            first, last = (graph[id_] for id_ in group)
            return last.kind == "relu" and first.kind != "relu" and last.inputs == (first.id,)

        assert set(pattern.matches(graph)) == every_pattern_group(graph, 2, fits)


class ConvThenElementWise(PatternRule):
    """The rule of the thesis's Listing 1: convolutions of one layout, and what is element-wise after them."""

    def op_rule(self, op: GraphOperator) -> bool:
        return op.kind != "conv2d" or op.attributes["layout"] == "NCHW"

    def fusion_rule(self, graph: OperatorDag, kind: str, source: str, sink: str) -> bool:
        return kind == "conv2d" and check_path(graph, source, sink, lambda op: op.kind in ("norm", "add", "relu"))


def test_the_listing_of_the_thesis() -> None:
    found = list(generate(residual(), ConvThenElementWise()))
    assert [group for group in found if group[0] == "conv"] == [
        ("conv",),
        ("conv", "norm"),
        ("conv", "norm", "add"),
        ("conv", "norm", "add", "relu"),
    ]
    assert [group for group in found if group[0] == "stem"] == [("stem",)]  # a convolution is on the way to the sum
    assert [group for group in found if len(group) > 1 and group[0] not in ("conv", "stem")] == []


@pytest.mark.parametrize("seed", range(30))
def test_the_generator_finds_what_trying_all_sets_finds(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(2, 9))
    for rule in (PatternRule(), Fuses("", 4), Fuses("add", 9)):
        found = list(generate(graph, rule))
        assert len(set(found)) == len(found)
        assert set(found) == every_group(graph, rule)
        assert all(graph.is_one_kernel(group) for group in found)


def test_groups_that_are_alike() -> None:
    graph = OperatorDag(
        [GraphOperator("a", "conv"), *(GraphOperator(x, "conv", (y,)) for x, y in ("ba", "cb", "dc", "ec"))]
    )
    assert graph.likeness(("b", "c")) == graph.likeness(("c", "d")) == graph.likeness(("c", "e"))
    assert graph.likeness(("a", "b")) != graph.likeness(("b", "c"))  # the first takes nothing
    assert graph.likeness(("d", "e")) != graph.likeness(("c", "d"))


def test_graphs_that_are_none() -> None:
    with pytest.raises(ValueError, match="same id"):
        OperatorDag([GraphOperator("a", "x"), GraphOperator("a", "x")])
    with pytest.raises(ValueError, match="cycle"):
        OperatorDag([GraphOperator("a", "x", ("b",)), GraphOperator("b", "x", ("a",))])
