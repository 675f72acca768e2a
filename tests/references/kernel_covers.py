"""Covers and groups by trying all, and random models to try them on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

from pipeplan.kernels.covers import KernelMatch
from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.kernels.rules import PatternRule, generate

BACKENDS = ("eager", "fuses", "library")


def random_graph(rng: random.Random, size: int, near: int = 4) -> OperatorDag:
    """Operators that take results of one or two of those shortly before them."""
    operators = []
    for number in range(size):
        before = list(range(max(0, number - near), number))
        taken = rng.sample(before, min(len(before), rng.choice((1, 1, 1, 2))))
        kind = rng.choice(("conv", "add", "relu"))
        operators.append(GraphOperator(f"op{number}", kind, tuple(f"op{each}" for each in sorted(taken))))
    return OperatorDag(operators)


class Fuses(PatternRule):
    """Up to some operators, none of which is of a kind that is left out."""

    def __init__(self, leaves_out: str, most: int) -> None:
        self.leaves_out, self.most = leaves_out, most

    def op_rule(self, op: GraphOperator) -> bool:
        return op.kind != self.leaves_out

    def fusion_rule(self, graph: OperatorDag, kind: str, source: str, sink: str) -> bool:
        return len(graph.between(source, sink)) <= self.most


def random_matches(rng: random.Random, graph: OperatorDag, most: int = 5) -> list[KernelMatch]:
    """Every operator alone by the first backend, some by others, and the groups that these fuse, with random times."""
    found = [KernelMatch((id_,), "eager", rng.randint(50, 150)) for id_ in graph.order]
    for backend, rule in (("fuses", Fuses("", most)), ("library", Fuses("add", most))):
        found += [
            KernelMatch(group, backend, round(sum(rng.randint(40, 150) for _ in group) * 0.9))
            for group in generate(graph, rule)
            if len(group) > 1 or rng.random() < 0.7
        ]
    return found


def random_case(seed: int, size: int, near: int = 4) -> tuple[OperatorDag, list[KernelMatch], int]:
    """A model, what backends run of it, and what a change takes."""
    rng = random.Random(seed)
    graph = random_graph(rng, size, near)
    return graph, random_matches(rng, graph), rng.choice((0, 10, 40))


def every_cover(graph: OperatorDag, matches: Sequence[KernelMatch]) -> Iterator[list[KernelMatch]]:
    """All sets of disjoint matches with every operator."""

    def rest(open_: frozenset[str]) -> Iterator[list[KernelMatch]]:
        if not open_:
            yield []
            return
        first = min(open_)
        for match in matches:
            if first in match.blocks and open_.issuperset(match.blocks):
                for more in rest(open_ - set(match.blocks)):
                    yield [match, *more]

    yield from rest(frozenset(graph.order))


def cost_of(graph: OperatorDag, cover: Sequence[KernelMatch], change_ns: int) -> int:
    """Times, and a change for each (result, other backend that takes it)."""
    backend = {id_: match.backend for match in cover for id_ in match.blocks}
    changes = {(source, backend[op.id]) for op in graph for source in op.inputs if backend[source] != backend[op.id]}
    return sum(match.ns for match in cover) + change_ns * len(changes)


def paths_to_the_end(graph: OperatorDag, id_: str) -> Iterator[tuple[str, ...]]:
    """All paths from an operator to one whose result nobody takes."""
    if not graph.users[id_]:
        yield (id_,)
    for user in graph.users[id_]:
        for path in paths_to_the_end(graph, user):
            yield (id_, *path)


def every_group(graph: OperatorDag, rule: PatternRule) -> set[tuple[str, ...]]:
    """What the generator is to find, from all sets of operators: grown step by step while the rule holds.

    A set is of a seed and one of its post-dominators if all its operators lie on paths from one to the other, and all
    such are in it; it is allowed if its operators are, and the rule holds to it and to all shorter ones of its seed.
    """
    found = set()
    for seed in graph.order:
        sinks = set(graph.order)
        for path in paths_to_the_end(graph, seed):
            sinks &= set(path)
        for sink in sinks:
            if all(_allowed(graph, rule, seed, each) for each in sinks if _leads(graph, each, sink)):
                found.add(graph.ordered(_on_paths(graph, seed, sink)))
    return found


def _allowed(graph: OperatorDag, rule: PatternRule, seed: str, sink: str) -> bool:
    group = _on_paths(graph, seed, sink)
    runs = all(rule.op_rule(graph[id_]) for id_ in group)
    return runs and (seed == sink or rule.fusion_rule(graph, rule.type_of(graph[seed]), seed, sink))


def _leads(graph: OperatorDag, one: str, other: str) -> bool:
    return one == other or any(_leads(graph, user, other) for user in graph.users[one])


def _on_paths(graph: OperatorDag, seed: str, sink: str) -> set[str]:
    return {id_ for id_ in graph.order if _leads(graph, seed, id_) and _leads(graph, id_, sink)}


def every_pattern_group(graph: OperatorDag, size: int, fits: object) -> set[tuple[str, ...]]:
    """All sets of some operators for which a function holds and which are one kernel."""
    assert callable(fits)
    return {
        graph.ordered(group)
        for group in combinations(graph.order, size)
        if fits(graph.ordered(group)) and graph.is_one_kernel(group)
    }
