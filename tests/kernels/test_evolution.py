"""The graph level: never worse than what it begins with, the same for a seed, the best of all where there are few."""

from __future__ import annotations

import itertools
import random

import pytest

from pipeplan.errors import ExecutionError
from pipeplan.kernels.covers import KernelMatch
from pipeplan.kernels.evolution import Evolution, Generation, Genes, given_to_library, open_operators
from pipeplan.kernels.operators import GraphOperator, OperatorDag


def chain(count: int) -> OperatorDag:
    return OperatorDag(GraphOperator(f"b{n}", "op", (f"b{n - 1}",) if n else ()) for n in range(count))


def fitness(draw: random.Random, count: int) -> dict[Genes, int]:
    """A library takes more for each operator alone, and less for neighbours at once."""
    alone = [draw.randint(-20, 40) for _ in range(count)]
    both = [draw.randint(-40, 5) for _ in range(count - 1)]
    return {
        genes: 1000
        + sum(itertools.compress(alone, genes))
        + sum(gain for gain, pair in zip(both, itertools.pairwise(genes), strict=True) if all(pair))
        for genes in itertools.product((False, True), repeat=count)
    }


@pytest.mark.parametrize("seed", range(10))
def test_it_ends_near_the_best_of_few_and_never_worse_than_it_began(seed: int) -> None:
    times = fitness(random.Random(seed), 6)
    none = (False,) * 6
    told: list[Generation] = []
    found = Evolution(times.__getitem__, seed, tell=told.append).run([none, (True,) * 6])
    again = Evolution(times.__getitem__, seed).run([none, (True,) * 6])
    assert (found.genes, found.ns, found.curve) == (again.genes, again.ns, again.curve)
    assert found.ns == times[found.genes] <= found.first_ns == times[none]
    assert found.ns <= 1.005 * min(times.values())
    best = [each.best_ns for each in told]
    assert best == sorted(best, reverse=True)
    assert told == found.curve


def test_of_few_it_is_mostly_the_best() -> None:
    found = 0
    for seed in range(20):
        times = fitness(random.Random(100 + seed), 7)
        best = Evolution(times.__getitem__, seed).run([(False,) * 7, (True,) * 7]).ns
        found += best == min(times.values())
    assert found >= 16


def test_what_cannot_run_is_passed_over_and_an_interruption_ends_it() -> None:
    calls = 0

    def measure(genes: Genes) -> int:
        nonlocal calls
        calls += 1
        if genes[0]:
            raise ExecutionError("cannot compile this")
        if calls > 20:
            raise KeyboardInterrupt
        return 100 - sum(genes)

    found = Evolution(measure, seed=1).run([(False,) * 8])
    assert found.interrupted
    assert not found.genes[0]
    assert found.ns == 100 - sum(found.genes) < 100
    assert set(found.failures.values()) == {"cannot compile this"}
    with pytest.raises(ExecutionError):
        Evolution(measure).run([(True,) * 8])


def test_time_ends_it_between_covers() -> None:
    measured: list[Genes] = []

    def measure(genes: Genes) -> int:
        measured.append(genes)
        return 7

    found = Evolution(measure, over=lambda: len(measured) >= 3).run([(False,) * 5])
    assert len(measured) == 3
    assert found.ns == 7


def test_operators_are_given_in_groups_that_can_run() -> None:
    graph = chain(6)
    cover = [
        KernelMatch(("b0",), "eager", 1),
        KernelMatch(("b1", "b2"), "fast", 1),
        KernelMatch(("b3",), "whole", 1),
        KernelMatch(("b4",), "eager", 1),
        KernelMatch(("b5",), "eager", 1),
    ]
    bits = open_operators(graph, cover, "whole")
    assert bits == ("b0", "b1", "b2", "b4", "b5")
    found = given_to_library(graph, cover, "whole", ["b2", "b4"], lambda id_: "alone")
    assert found == (
        (("b0",), "eager"),
        (("b1",), "alone"),
        (("b2", "b3", "b4"), "whole"),
        (("b5",), "eager"),
    )
    assert given_to_library(graph, cover, "whole", bits, str) == ((graph.order, "whole"),)


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_graphs_never_wait_in_a_circle(seed: int) -> None:
    draw = random.Random(seed)
    graph = OperatorDag(
        GraphOperator(f"b{n}", "op", tuple(f"b{m}" for m in range(n) if draw.random() < 0.35)) for n in range(9)
    )
    cover = [KernelMatch((id_,), "eager", 1) for id_ in graph.order]
    given = [id_ for id_ in graph.order if draw.random() < 0.6]
    groups = given_to_library(graph, cover, "whole", given, lambda id_: "eager")
    assert sorted(id_ for blocks, _ in groups for id_ in blocks) == sorted(graph.order)
    done: set[str] = set()
    for blocks, _ in groups:
        for id_ in blocks:
            assert done.issuperset(set(graph[id_].inputs) - set(blocks))
        done.update(blocks)
