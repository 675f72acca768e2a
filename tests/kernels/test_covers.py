"""Algorithm 1 and the exact cover against all covers of small models."""

from __future__ import annotations

import pytest

from pipeplan.errors import InfeasibleError
from pipeplan.kernels.covers import KernelCover, KernelMatch, algorithm_1
from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.schedule.cpsat.cover import exact_cover
from pipeplan.schedule.cpsat.solver import Budget
from references.kernel_covers import cost_of, every_cover, random_case


def budget() -> Budget:
    return Budget(20.0, deterministic=True)


@pytest.mark.parametrize("seed", range(40))
def test_algorithm_1_without_a_limit_of_states_finds_the_cheapest(seed: int) -> None:
    graph, matches, change = random_case(seed, 3 + seed % 6)
    best = min(cost_of(graph, cover, change) for cover in every_cover(graph, matches))
    found = algorithm_1(graph, matches, change, None)
    assert found.total_ns == best == cost_of(graph, found.matches, change)
    assert found.proved
    few = algorithm_1(graph, matches, change, 2)
    assert few.total_ns == cost_of(graph, few.matches, change) >= best
    assert few.total_ns == best or not few.proved


@pytest.mark.parametrize("seed", range(3))
def test_models_of_a_thousand_operators_are_proved_at_once(seed: int) -> None:
    """Few results wait at once, however long a model is, so that no states are left out."""
    graph, matches, change = random_case(seed, 1000)
    found = algorithm_1(graph, matches, change)
    assert found.proved
    assert found.total_ns == cost_of(graph, found.matches, change)
    assert found.total_ns <= algorithm_1(graph, matches, change, 3).total_ns


def branches(count: int, length: int) -> tuple[OperatorDag, list[KernelMatch]]:
    """Branches side by side, whose operators the model's own order mixes, and two backends of all."""
    ids = [[f"{step}.{branch}" for branch in range(count)] for step in range(length)]
    mixed = [
        GraphOperator(id_, "x", ("stem" if not step else ids[step - 1][branch],))
        for step, row in enumerate(ids)
        for branch, id_ in enumerate(row)
    ]
    graph = OperatorDag([GraphOperator("stem", "x"), *mixed, GraphOperator("end", "x", tuple(ids[-1]))])
    matches = [
        KernelMatch((op.id,), name, 10 + (number * step) % 7)
        for number, op in enumerate(graph)
        for step, name in ((3, "one"), (5, "other"))
    ]
    return graph, matches


def test_branches_are_covered_one_after_the_other() -> None:
    """In the model's own order all of them would wait at once, taken by any backends."""
    graph, matches = branches(4, 4)
    found = algorithm_1(graph, matches, 2)
    exact, bound = exact_cover(graph, matches, 2, budget(), found)
    assert found.proved
    assert found.total_ns == exact.total_ns == bound
    assert algorithm_1(*branches(12, 6), 2).proved


@pytest.mark.parametrize("seed", range(12))
def test_the_exact_cover_is_the_cheapest_of_all(seed: int) -> None:
    graph, matches, change = random_case(seed, 3 + seed % 6)
    best = min(cost_of(graph, cover, change) for cover in every_cover(graph, matches))
    found, bound = exact_cover(graph, matches, change, budget(), algorithm_1(graph, matches, change, 1))
    assert found.proved
    assert (found.total_ns, bound) == (best, best)
    assert found.total_ns == cost_of(graph, found.matches, change)


def test_changes_are_weighed_against_faster_kernels() -> None:
    chain = OperatorDag([GraphOperator("a", "x"), GraphOperator("b", "x", ("a",)), GraphOperator("c", "x", ("b",))])
    slow = [KernelMatch((id_,), "slow", 10) for id_ in "abc"]
    fast = KernelMatch(("b",), "fast", 5)
    for change, expected in ((0, 25), (2, 29), (3, 30)):
        for found in (
            algorithm_1(chain, [*slow, fast], change),
            exact_cover(chain, [*slow, fast], change, budget())[0],
        ):
            assert found.total_ns == expected
            assert found.num_changes == (2 if change < 3 else 0)


def test_what_no_backend_runs_is_named() -> None:
    chain = OperatorDag([GraphOperator("a", "x"), GraphOperator("b", "x", ("a",))])
    with pytest.raises(InfeasibleError, match=r"no backend runs 'b' \(1 such"):
        algorithm_1(chain, [KernelMatch(("a",), "some", 1)])
    with pytest.raises(InfeasibleError):
        exact_cover(chain, [KernelMatch(("a",), "some", 1)], 0, budget())
    with pytest.raises(ValueError, match="no cover"):
        KernelCover.of(chain, [KernelMatch(("a",), "some", 1)], 0)


def test_a_cover_runs_in_an_order() -> None:
    graph = OperatorDag([GraphOperator("a", "x"), GraphOperator("b", "x", ("a",)), GraphOperator("c", "x", ("a", "b"))])
    cover = KernelCover.of(graph, [KernelMatch(("a", "b"), "one", 1), KernelMatch(("c",), "two", 1)], 1)
    assert [match.blocks for match in cover.as_runs(graph)] == [("a", "b"), ("c",)]
    assert (cover.num_changes, cover.total_ns) == (2, 4)  # of both results that the last takes
