"""Eliminations: a graph reduced to one expression, exactly where that can be (TensorOpt section 3.2, Algorithm 2).

Costs do not care which way a tensor runs, so neighbours are counted without direction: whatever has at most two of
them is eliminated exactly, which takes apart every series-parallel graph, and a decoder whose layers all read one
encoder. Only what remains is merged with a neighbour, configuration by configuration, or settled by a heuristic.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from pipeplan.search_constants import MERGED
from pipeplan.sharding.bounds import inside
from pipeplan.sharding.graph import CostGraph, Expression, Strategy, Writer, in_order
from pipeplan.sharding.table import (
    FloatArray,
    IntArray,
    Table,
)
from pipeplan.time_limit import checkpoint


@dataclass(slots=True)
class Reduced:
    """What is left of a graph: a row of frontiers per node, a matrix per pair of neighbours.

    Nodes are numbers in topological order; an edge's table has its earlier node's configurations in its rows. ``done``
    counts the eliminations of each kind; ``joint`` are nodes that stand for several.
    """

    nodes: dict[int, Expression]
    edges: dict[tuple[int, int], Expression]
    writer: Writer
    done: Counter[str] = field(default_factory=Counter)
    joint: set[int] = field(default_factory=set)
    ends: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The neighbours of every node, so that no step goes through all edges."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Combinations to go through where a node is eliminated, as far as they are known and nothing near has changed."""

    @classmethod
    def of(cls, graph: CostGraph) -> tuple[Reduced, dict[str, Expression], list[Expression]]:
        """The whole graph, and the tables of its nodes and of its edges by which a strategy is read off."""
        writer = Writer()
        number = {name: index for index, name in enumerate(graph.order())}
        rows = {node.name: writer.given(node.costs) for node in graph.nodes}
        reduced = cls({number[name]: rows[name] for name in number}, {}, writer)
        leaves = [writer.given(edge.costs) for edge in graph.edges]
        for edge, leaf in zip(graph.edges, leaves, strict=True):
            reduced._add_edge(number[edge.source], number[edge.target], leaf)
        return reduced, rows, leaves

    def neighbours(self, node: int) -> list[int]:
        """The other ends of a node's edges, ascending."""
        return sorted(self.ends[node])

    def between(self, first: int, second: int) -> Expression:
        """The edge of two neighbours with ``first`` in the rows."""
        edge = self.edges[min(first, second), max(first, second)]
        return edge if first < second else self.writer.turned(edge)

    def linear(self) -> list[int]:
        """The nodes marked: the first, and from the last marked on each one that is its only later neighbour."""
        marked = [min(self.nodes)]
        while len(later := [other for other in self.neighbours(marked[-1]) if other > marked[-1]]) == 1:
            marked += later
        return marked

    def eliminate(self, kept: Collection[int], *, merged: int, in_order: bool) -> bool:
        """One exact step on a node not in ``kept``: the cheapest, or the first ``in_order``; False if there is none."""
        step = min(self._steps(kept), key=lambda step: step[1:] if in_order else step, default=None)
        if step is not None:
            self._remove(step[1])
            return True
        return self._merge(kept, merged)

    def _steps(self, kept: Collection[int]) -> Iterator[tuple[int, int]]:
        """(combinations to go through, node) of every node that can be eliminated exactly."""
        sizes = self.sizes
        for node in self.nodes.keys() - set(kept):
            if node not in sizes:
                others, columns = self.ends[node], self.nodes[node].columns
                exact = len(others) <= 2 or columns == 1
                sizes[node] = columns * math.prod([self.nodes[end].columns for end in others]) if exact else 0
            if sizes[node]:
                yield sizes[node], node

    def _remove(self, node: int) -> None:
        """A node with at most two neighbours, into the edge between them, its neighbour, or any other (4), (6).

        A node with a single configuration has its edges' costs added to its neighbours (7).
        """
        others = self.neighbours(node)
        row = self.nodes[node]
        if row.columns == 1 and others:
            self._add_cost(others[0], row)
            for other in others:
                self._add_cost(other, self.between(node, other))
        elif len(others) == 2:
            first, second = others
            before = self.writer.product(self.between(first, node), row)
            self._add_edge(first, second, self.writer.contract(before, self.between(node, second)))
        elif others:
            self._add_cost(others[0], self.writer.contract(row, self.between(node, others[0])))
        else:
            self._add_cost(next(other for other in sorted(self.nodes) if other != node), self.writer.union(row))
        self.done["single" if row.columns == 1 else "node" if len(others) == 2 else "branch"] += 1
        self._forget(node)

    def _merge(self, kept: Collection[int], merged: int) -> bool:
        """Branch elimination: a node joins its neighbour, with a configuration for every pair of theirs (6)."""
        pairs = [
            (self.nodes[node].columns * self.nodes[other].columns, node, other)
            for node in sorted(self.nodes.keys() - set(kept))
            for other in self.neighbours(node)
        ]
        size, node, into = min(pairs, default=(merged + 1, 0, 0))
        if size > merged:
            return False
        wide, narrow = self.nodes[into].columns, self.nodes[node].columns
        of_into, of_node = np.divmod(np.arange(wide * narrow), narrow)
        pair = self.writer.gather(self.between(into, node), np.arange(size)[None, :])
        row = self.writer.product(pair, self.writer.gather(self.nodes[node], of_node[None, :]))
        row = self.writer.product(row, self.writer.gather(self.nodes[into], of_into[None, :]))
        widened = [
            (other, self.between(other, end), part)
            for end, part in ((into, of_into), (node, of_node))
            for other in self.neighbours(end)
            if other not in (into, node)
        ]
        self._forget(node)
        self._forget(into)
        self.nodes[into] = row
        self.sizes.pop(into, None)
        self.joint.add(into)
        for other, edge, part in widened:
            cells = np.arange(edge.rows)[:, None] * edge.columns + part[None, :]
            self._add_edge(other, into, self.writer.gather(edge, cells))
        self.done["branch"] += 1
        return True

    def _add_edge(self, first: int, second: int, edge: Expression) -> None:
        """Another edge of a pair; with one that is there it becomes a single one (edge elimination, equation 5)."""
        pair = (min(first, second), max(first, second))
        edge = edge if first < second else self.writer.turned(edge)
        if pair in self.edges:
            self.done["edge"] += 1
            edge = self.writer.product(self.edges[pair], edge)
        self.edges[pair] = edge
        for one, other in (pair, pair[::-1]):
            self.ends[one].add(other)
            self.sizes.pop(one, None)

    def _add_cost(self, node: int, row: Expression) -> None:
        self.nodes[node] = self.writer.product(self.nodes[node], row)

    def _forget(self, node: int) -> None:
        del self.nodes[node]
        self.sizes.pop(node, None)
        for other in self.ends.pop(node, set()):
            self.ends[other].discard(node)
            self.sizes.pop(other, None)
            del self.edges[min(node, other), max(node, other)]


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
        """With these configurations of the rest."""
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
    """P strategies, by ascending memory, without the tables that they were found in; all arrays are [P]."""

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
    merged: int = MERGED

    def exact(self, graph: CostGraph) -> bool:
        """Whether a graph needs no heuristics."""
        return self._reduce(Reduced.of(graph)[0])

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

    def left(self, graph: CostGraph) -> Reduced:
        """What exact steps leave of a graph, heuristics aside."""
        reduced, _, _ = Reduced.of(graph)
        self._reduce(reduced)
        return reduced

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
