"""A graph reduced to one expression, and expressions computed as frontiers.

A graph reduced to one expression: exactly where that can be, else with operators held to a choice (Algorithm 2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeplan.sharding.bounds import Bounds, inside
from pipeplan.sharding.elimination import Expression, Reduced, contract, in_order
from pipeplan.sharding.graph import CostGraph, Strategy
from pipeplan.sharding.table import FloatArray, IntArray, PointLimit, Table, gather, product, select
from pipeplan.time_limit import checkpoint

__all__ = ["ReducedPart", "Reducing", "Strategies", "Tables", "Whole", "evaluate", "points_taken"]


Tables = dict[int, Table]
"""What has been computed, by an expression's key."""


def evaluate(
    root: Expression, tables: Tables, bounds: Bounds | None = None, *, most_sums: float = math.inf
) -> int | None:
    """Computes the table of an expression; every distinct part is computed once and stays in ``tables``.

    With ``bounds`` points that no frontier of the whole has use for are dropped. Tells how many pairs of points were
    offered to products; None if they would have been more than ``most_sums``.
    """
    num_sums = 0
    for part in in_order(root):
        checkpoint()
        if part.key not in tables:
            sources = [tables[source.key] for source in part.sources]
            num_sums += _sums(part, sources)
            if num_sums > most_sums:
                return None
            made = _computed(part, sources, bounds.limit(part.key) if bounds else None)
            tables[part.key] = select(made, bounds.useful(part.key, made)) if bounds else made
    return num_sums


def _sums(part: Expression, sources: Sequence[Table]) -> int:
    """How many pairs of points a part offers."""
    if part.operation == "contract":
        return int((sources[0].counts @ sources[1].counts).sum())
    return int((sources[0].counts * sources[1].counts).sum()) if part.operation == "product" else 0


def _computed(part: Expression, sources: Sequence[Table], limit: PointLimit | None) -> Table:
    if part.given is not None:
        return part.given
    if part.cells is not None:
        return gather(sources[0], part.cells)
    left, right = sources
    return contract(left, right, limit) if part.operation == "contract" else product(left, right, limit)


def points_taken(root: Expression, tables: Tables) -> dict[Expression, IntArray]:
    """The point of every given table that is in each point of the whole, [P]."""
    taken: dict[Expression, IntArray] = {}
    stack = [(root, np.arange(tables[root.key].num_points))]
    while stack:
        part, points = stack.pop()
        if part.given is not None:
            taken[part] = points
        stack.extend((source, tables[part.key].picks[s, points]) for s, source in enumerate(part.sources))
    return taken


_MERGED = 4096
"""Branch elimination makes at most so many configurations; a node that would make more is settled by heuristics."""


@dataclass(frozen=True, slots=True)
class ReducedPart:
    """A graph that eliminations reduce to one cell: all of the given one, or with some operators held to a choice.

    ``places`` says which of an operator's configurations are left, by their places in the given graph.
    """

    graph: CostGraph
    places: Mapping[str, IntArray]

    @classmethod
    def of(cls, graph: CostGraph) -> ReducedPart:
        """All of a graph."""
        return cls(graph, {node.name: np.arange(len(node.configurations)) for node in graph.nodes})

    def fewer(self, kept: Mapping[str, IntArray]) -> ReducedPart:
        """With these configurations of what is left."""
        places = {name: old[kept[name]] for name, old in self.places.items()}
        return ReducedPart(self.graph.restricted(kept), places)

    def held(self, name: str, choice: int) -> ReducedPart:
        """With one configuration of an operator, all others as they are."""
        everything = {each: np.arange(len(left)) for each, left in self.places.items()}
        return self.fewer({**everything, name: np.array([choice])})

    def same(self, other: ReducedPart) -> bool:
        """Whether both leave the same configurations."""
        return all(np.array_equal(left, other.places[name]) for name, left in self.places.items())


@dataclass(frozen=True, slots=True)
class Strategies:
    """P strategies, by ascending memory, told without the tables that they were found in; all arrays are [P]."""

    memory_bytes: IntArray
    time_ns: IntArray
    configurations: Mapping[str, IntArray]
    node_variants: Mapping[str, IntArray]
    edge_variants: tuple[IntArray, ...]

    def strategy(self, point: int) -> Strategy:
        """One of them."""
        return Strategy(
            memory_bytes=int(self.memory_bytes[point]),
            time_ns=int(self.time_ns[point]),
            configurations={name: int(chosen[point]) for name, chosen in self.configurations.items()},
            node_variants={name: int(chosen[point]) for name, chosen in self.node_variants.items()},
            edge_variants=tuple(int(chosen[point]) for chosen in self.edge_variants),
        )


@dataclass(frozen=True, slots=True)
class Whole:
    """A part as one expression of one cell, with those of its operators and tensors in it, and eliminations by kind."""

    part: ReducedPart
    expression: Expression
    rows: Mapping[str, Expression]
    edges: tuple[Expression, ...]
    done: Counter[str]

    @property
    def num_tables(self) -> int:
        """How many tables of the expression differ."""
        return len({part.key for part in in_order(self.expression)})

    def strategies(self, taken: Mapping[Expression, IntArray], tables: Mapping[int, Table]) -> Strategies:
        """Those that take these points, [P], of the given tables, which ``tables`` has by key."""
        every = [(tables[each.key], taken[each]) for each in (*self.rows.values(), *self.edges)]
        rows = {name: (tables[row.key], taken[row]) for name, row in self.rows.items()}
        return Strategies(
            memory_bytes=np.sum([table.memory_bytes[points] for table, points in every], axis=0),
            time_ns=np.sum([table.time_ns[points] for table, points in every], axis=0),
            configurations={
                name: self.part.places[name][np.searchsorted(row.starts, points, side="right") - 1]
                for name, (row, points) in rows.items()
            },
            node_variants={name: row.picks[0, points] for name, (row, points) in rows.items()},
            edge_variants=tuple(table.picks[0, points] for table, points in every[len(rows) :]),
        )


@dataclass(frozen=True, slots=True)
class Reducing:
    """How graphs are reduced: to a ``linear`` part, then along it, or (FT-Elimination) to two nodes.

    Branch elimination makes at most ``merged`` configurations; what would need more is settled heuristically.
    """

    linear: bool = True
    merged: int = _MERGED

    def parts(self, graph: CostGraph) -> tuple[list[ReducedPart], int]:
        """The graph, or one part for each of the heuristics; and how many operators they hold to a choice.

        One chooses for least memory, one for least time, one for least of both, all along.
        """
        whole = ReducedPart.of(graph)
        found: list[ReducedPart] = []
        held = 0
        for weights in ((1.0, 0.0), (0.0, 1.0), None):
            part, settled = whole, 0
            while (chosen := self._choice(part, weights)) is not None:
                part, settled = part.held(*chosen), settled + 1
            if not settled:
                return [whole], 0
            held = max(held, settled)
            if not any(part.same(other) for other in found):
                found.append(part)
        return found, held

    def _choice(self, part: ReducedPart, weights: tuple[float, float] | None) -> tuple[str, int] | None:
        """The operator with most neighbours that cannot be eliminated exactly, and its configuration."""
        reduced, _, _ = Reduced.of(part.graph)
        if self._reduce(reduced):
            return None
        left = [node for node in reduced.nodes.keys() - set(self._kept(reduced)) if node not in reduced.joint]
        node = max(left or set(reduced.nodes) - reduced.joint, key=lambda each: (len(reduced.neighbours(each)), -each))
        return part.graph.order()[node], _promising(reduced, node, weights)

    def whole(self, part: ReducedPart) -> Whole:
        """A part that needs no heuristics, as one expression."""
        reduced, rows, edges = Reduced.of(part.graph)
        done = self._reduce(reduced)
        assert done
        return Whole(part, _along(reduced, sorted(reduced.nodes)), rows, tuple(edges), reduced.done)

    def _reduce(self, reduced: Reduced) -> bool:
        """Algorithm 2 without heuristics; whether what is left is linear."""
        kept = self._kept(reduced)
        while len(kept) < len(reduced.nodes) and reduced.eliminate(kept, merged=self.merged, in_order=not self.linear):
            checkpoint()
            kept = self._kept(reduced)
        return len(kept) == len(reduced.nodes)

    def _kept(self, reduced: Reduced) -> Collection[int]:
        """What no step may eliminate: the linear part, or the two ends."""
        return reduced.linear() if self.linear else {min(reduced.nodes), max(reduced.nodes)}


def _along(reduced: Reduced, chain: list[int]) -> Expression:
    """Linear dynamic programming (Algorithm 3) over nodes of which each has an edge to the next at most."""
    writer = reduced.writer
    frontier = reduced.nodes[chain[0]]
    for before, node in pairwise(chain):
        joined = (before, node) in reduced.edges
        reached = writer.contract(frontier, reduced.between(before, node)) if joined else writer.union(frontier)
        frontier = writer.product(reached, reduced.nodes[node])
    return writer.union(frontier)


def _promising(reduced: Reduced, node: int, weights: tuple[float, float] | None) -> int:
    """The best configuration by these weights, or by both costs over their least.

    Each is judged by its own costs and, for every neighbour, the best that its edge offers.
    """
    if weights is not None:
        return int(np.argmin(_judged(reduced, node, weights)))
    memory, time = (_judged(reduced, node, each) for each in ((1.0, 0.0), (0.0, 1.0)))
    return int(np.argmin(memory / max(memory.min(), 1) + time / max(time.min(), 1)))


def _judged(reduced: Reduced, node: int, weights: tuple[float, float]) -> FloatArray:
    values: dict[int, FloatArray] = {}
    row = reduced.nodes[node]
    costs: FloatArray = inside(row, weights, values)[row.key][0].copy()
    for other in reduced.neighbours(node):
        edge = reduced.between(node, other)
        costs += inside(edge, weights, values)[edge.key].min(axis=1)
    return costs
