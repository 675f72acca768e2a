"""Eliminations: a graph of frontiers made smaller step by step, written down as expressions.

What is to be computed, written down before it is: tables made of tables, identical ones known as such.

Eliminations and linear DP only write expressions; :mod:`pipeplan.sharding.reducing` computes them, as frontiers or as
plain minima. In one expression every given table stands once, so it is a tree. Parts of it with the same ``key`` are
equal: identical layers have identical tables, which are computed once.

Union over the configurations in the middle: the one step under node elimination and linear DP.

``contract(A, B)[r, c]`` is the reduced union over m of ``A[r, m]`` x ``B[m, c]``: a matrix product in which points are
multiplied by *product* and added by *union* and *reduce*. Node elimination (equation 4) contracts K x K with K x K,
linear DP (Algorithm 3, line 6) 1 x K with K x K, which is why it is K times cheaper.

Eliminations: a graph of frontiers made smaller, exactly where that can be (TensorOpt section 3.2).

Costs do not care which way a tensor runs, so neighbours are counted without direction: whatever has at most two of
them is eliminated exactly, which takes apart every series-parallel graph, and a decoder whose layers all read one
encoder. Only what remains is merged with a neighbour, configuration by configuration, or settled by a heuristic.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pipeplan.sharding.graph import CostGraph
from pipeplan.sharding.table import (
    CellPairs,
    IntArray,
    PointLimit,
    Points,
    Table,
    Wanted,
    made,
    paired,
    reduce_points,
    spread,
    table,
    union,
)

__all__ = ["Expression", "Reduced", "Writer", "contract", "in_order"]


Operation = Literal["given", "product", "contract", "gather"]


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """A table of ``rows`` x ``columns`` cells: a given one, or an operation on others (``cells``: what it gathers)."""

    operation: Operation
    rows: int
    columns: int
    key: int
    sources: tuple[Expression, ...] = ()
    given: Table | None = None
    cells: IntArray | None = None


@dataclass(slots=True)
class Writer:
    """Makes expressions and numbers them by what they are made of."""

    numbers: dict[Hashable, int] = field(default_factory=dict)

    def given(self, costs: Table) -> Expression:
        """A given table, known by its content, variants included."""
        content = hashlib.blake2b(digest_size=16)
        for array in (costs.starts, costs.memory_bytes, costs.time_ns, costs.picks):
            content.update(array.tobytes())
        key = self._number("given", costs.rows, costs.columns, content.digest())
        return Expression("given", costs.rows, costs.columns, key, given=costs)

    def product(self, left: Expression, right: Expression) -> Expression:
        """Cell by cell; one row or column serves all."""
        rows, columns = np.broadcast_shapes((left.rows, left.columns), (right.rows, right.columns))
        return Expression("product", rows, columns, self._number("product", left.key, right.key), (left, right))

    def contract(self, left: Expression, right: Expression) -> Expression:
        """The union over the middle."""
        key = self._number("contract", left.key, right.key)
        return Expression("contract", left.rows, right.columns, key, (left, right))

    def gather(self, source: Expression, cells: IntArray) -> Expression:
        """Cell (r, c) is the cell ``cells[r, c]`` of the source."""
        key = self._number("gather", source.key, cells.shape, cells.tobytes())
        return Expression("gather", cells.shape[0], cells.shape[1], key, (source,), cells=cells)

    def turned(self, source: Expression) -> Expression:
        """Rows and columns exchanged."""
        return self.gather(source, np.arange(source.rows * source.columns).reshape(source.rows, source.columns).T)

    def union(self, row: Expression) -> Expression:
        """One cell: the frontier over all cells of a row, whichever configuration is taken."""
        return self.contract(row, self.given(table(np.zeros((row.columns, 1)), 0)))

    def _number(self, *made_of: Hashable) -> int:
        return self.numbers.setdefault(made_of, len(self.numbers))


def in_order(root: Expression) -> list[Expression]:
    """All parts of an expression, sources before what is made of them."""
    return list(_before(root))[::-1]


def _before(root: Expression) -> Iterator[Expression]:
    """Every part before its sources."""
    stack = [root]
    while stack:
        part = stack.pop()
        yield part
        stack.extend(part.sources)


_BATCH_POINTS = 1 << 21
"""Sums held at once: as many as stay near the caches (16 MiB an array)."""


def contract(left: Table, right: Table, limit: PointLimit | None = None, *, batch_points: int = _BATCH_POINTS) -> Table:
    """The table of ``left.rows`` x ``right.columns`` cells, or what is wanted of it.

    ``batch_points`` bounds the sums held at once.
    """
    batches = _batches(left.counts @ right.counts, batch_points)
    wanted = Wanted.of(left, right, limit)
    parts = spread(lambda cells: _part(left, right, cells, wanted), batches)
    return made(left.rows, right.columns, union(parts))


def _batches(sums: IntArray, batch_points: int) -> Iterator[IntArray]:
    """Runs of cells, row by row, of at most so many sums (or a single cell), from the sums of each, [R, C]."""
    ends = np.cumsum(sums.ravel())
    start = 0
    while start < len(ends):
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + batch_points, side="right")))
        yield np.arange(start, stop)
        start = stop


def _part(left: Table, right: Table, cells: IntArray, wanted: Wanted | None) -> Points:
    """The frontiers of some cells of the contraction."""
    rows, columns = np.divmod(cells, right.columns)
    middle = np.arange(left.columns)
    pairs = CellPairs(
        (rows[:, None] * left.columns + middle).ravel(),
        (middle * right.columns + columns[:, None]).ravel(),
        np.repeat(cells, left.columns),
    )
    return reduce_points(paired(left, right, pairs, wanted))


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
        steps = sorted(self._steps(kept), key=lambda step: step[1:] if in_order else step)
        if steps:
            self._remove(steps[0][1])
            return True
        return self._merge(kept, merged)

    def _steps(self, kept: Collection[int]) -> Iterator[tuple[int, int]]:
        """(combinations to go through, node) of every node that can be eliminated exactly."""
        for node in self.nodes.keys() - set(kept):
            others = self.neighbours(node)
            if len(others) <= 2 or self.nodes[node].columns == 1:
                yield math.prod(self.nodes[end].columns for end in (node, *others)), node

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
        self.ends[first].add(second)
        self.ends[second].add(first)

    def _add_cost(self, node: int, row: Expression) -> None:
        self.nodes[node] = self.writer.product(self.nodes[node], row)

    def _forget(self, node: int) -> None:
        del self.nodes[node]
        for other in self.ends.pop(node, set()):
            self.ends[other].discard(node)
            del self.edges[min(node, other), max(node, other)]
