"""The graph level of Collage (section 2.4.3 of the thesis): which operators to hand to a library of whole graphs.

Costs of groups add up at the operator level, while what such a library makes of several groups at once is only known
when it has run. So there is a bit for each operator that no such library has yet, which says whether to give it to one,
and an evolutionary search over these bits, whose fitness is the measured time of the whole model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pipeplan.errors import ExecutionError, InfeasibleError
from pipeplan.kernels.covers import KernelMatch
from pipeplan.kernels.operators import OperatorDag

Genes = tuple[bool, ...]

POPULATION, KEPT, SATURATED = 12, 4, 5
"""Covers of a generation, of which so many live on; it ends after so many generations without a better one."""

_TRIES = 20


@dataclass(frozen=True, slots=True)
class Generation:
    """The best and the mean time of what has run in a generation, and how many covers were measured until its end."""

    best_ns: int
    mean_ns: int
    measured: int


@dataclass(slots=True)
class Evolved:
    """The best genes that were measured and their time, beside that of the first; and why others did not run."""

    genes: Genes
    ns: int
    first_ns: int
    curve: list[Generation] = field(default_factory=list)
    failures: dict[Genes, str] = field(default_factory=dict)
    interrupted: bool = False


@dataclass(slots=True)
class Evolution:
    """An evolutionary search over genes.

    ``measure`` gives the ns of a whole model, or raises ExecutionError or InfeasibleError where it cannot run. The same
    ``seed`` draws the same numbers. Genes are measured once. It ends when ``over``, after ``generations``, or when
    nothing better was found for :data:`SATURATED` of them; an interruption ends it with what is known.
    """

    measure: Callable[[Genes], int]
    seed: int = 0
    generations: int = 30
    over: Callable[[], bool] = lambda: False
    tell: Callable[[Generation], None] = lambda generation: None
    _known: dict[Genes, int | None] = field(default_factory=dict)

    def run(self, first: Sequence[Genes]) -> Evolved:
        """From ``first`` on, of which the first is the operator level's cover: nothing worse is the answer.

        Raises:
            ExecutionError: that one cannot run.
        """
        draw = random.Random(self.seed)
        own = self._known[first[0]] = self.measure(first[0])
        found = Evolved(first[0], own, own)
        population = [*dict.fromkeys(first)]
        population += [self._mutated(first[0], draw) for _ in range(POPULATION - len(population))]
        last = 0
        try:
            for number in range(self.generations):
                ranked = self._ranked(population, found)
                if ranked and ranked[0][0] < found.ns:
                    found.ns, found.genes, last = *ranked[0], number
                times = [ns for ns, _ in ranked] or [found.ns]
                found.curve.append(Generation(found.ns, sum(times) // len(times), len(self._known)))
                self.tell(found.curve[-1])
                if self.over() or number - last >= SATURATED or not found.genes:
                    break
                population = self._next(ranked, found.genes, draw)
        except KeyboardInterrupt:
            found.interrupted = True
            found.genes, found.ns = min(
                ((genes, ns) for genes, ns in self._known.items() if ns is not None), key=lambda each: each[1]
            )
        return found

    def _ranked(self, population: Iterable[Genes], found: Evolved) -> list[tuple[int, Genes]]:
        """Those that run, the quickest first."""
        ranked = []
        for genes in dict.fromkeys(population):
            if genes not in self._known:
                if self.over():
                    continue
                try:
                    self._known[genes] = self.measure(genes)
                except (ExecutionError, InfeasibleError) as error:
                    self._known[genes] = None
                    found.failures[genes] = str(error)
            ns = self._known[genes]
            if ns is not None:
                ranked.append((ns, genes))
        return sorted(ranked)

    def _next(self, ranked: Sequence[tuple[int, Genes]], best: Genes, draw: random.Random) -> list[Genes]:
        """The best live on; others are children of two of them, mutated."""
        parents = [genes for _, genes in ranked[:KEPT]] or [best]
        children = [self._child(parents, draw) for _ in range(POPULATION - len(parents))]
        return [best, *parents, *children]

    def _child(self, parents: Sequence[Genes], draw: random.Random) -> Genes:
        """One that was not measured yet, as far as a few tries find one."""
        for _ in range(_TRIES):
            child = self._mutated(_crossed(draw.choice(parents), draw.choice(parents), draw), draw)
            if child not in self._known:
                break
        return child

    @staticmethod
    def _mutated(genes: Genes, draw: random.Random) -> Genes:
        """About one bit turned over, and a run of neighbours now and then, as libraries gain from several at once."""
        if not genes:
            return genes
        found = [not bit if draw.random() < 1 / len(genes) else bit for bit in genes]
        if draw.random() < 0.3:
            begin, bit = draw.randrange(len(genes)), draw.random() < 0.5
            end = begin + draw.randint(1, max(1, len(genes) // 3))
            found[begin:end] = [bit] * len(found[begin:end])
        return tuple(found)


def _crossed(one: Genes, other: Genes, draw: random.Random) -> Genes:
    """Two-point crossover."""
    begin, end = sorted(draw.randint(0, len(one)) for _ in range(2))
    return (*one[:begin], *other[begin:end], *one[end:])


def open_operators(graph: OperatorDag, cover: Sequence[KernelMatch], library: str) -> tuple[str, ...]:
    """Operators that the library does not have yet, in the order of the graph: there is a bit for each."""
    own = {id_ for match in cover if match.backend == library for id_ in match.blocks}
    return tuple(id_ for id_ in graph.order if id_ not in own)


def given_to_library(
    graph: OperatorDag, cover: Sequence[KernelMatch], library: str, given: Iterable[str], alone: Callable[[str], str]
) -> tuple[tuple[tuple[str, ...], str], ...]:
    """(blocks, backend) of the cover with some operators ``given`` to a library as well, in an order that can run.

    What the library has is cut into groups that are as large as can be and give one result, or are the whole model. A
    group of the cover that loses an operator falls apart: the rest is run by the backend that runs each ``alone``.
    """
    wanted = {id_ for match in cover if match.backend == library for id_ in match.blocks}.union(given)
    found: list[tuple[tuple[str, ...], str]] = [(group, library) for group in _groups(graph, wanted)]
    for match in cover:
        rest = [id_ for id_ in match.blocks if id_ not in wanted]
        if len(rest) == len(match.blocks):
            found.append((match.blocks, match.backend))
        else:
            found += [((id_,), alone(id_)) for id_ in rest]
    return tuple(sorted(found, key=lambda each: max(map(graph.place.__getitem__, each[0]))))


def _groups(graph: OperatorDag, wanted: set[str]) -> list[tuple[str, ...]]:
    """Disjoint groups of all that is wanted: from the last operator back, each grows while it is one kernel."""
    if wanted == set(graph.order):
        return [graph.order]
    left, found = set(wanted), []
    for root in reversed(graph.order):
        if root not in left:
            continue
        group, waiting = {root}, [root]
        while waiting:
            for source in graph[waiting.pop()].inputs:
                if source in left and source not in group and graph.is_one_kernel({*group, source}):
                    group.add(source)
                    waiting.append(source)
        left -= group
        found.append(graph.ordered(group))
    return found
