"""Product: the sums of every point of one frontier with every point of another, or of those sums that are wanted.

Most sums of large frontiers are of no use to the whole, and what is of use is known beforehand: a cell's sums are
wanted up to a weighted cost (:class:`Limit`). With the points of one side in order of that cost, each point of the
other is added to the first so many of them, and the rest is never made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.frontier.table import FloatArray, IntArray, Points, Table, Weights, made, ranges, reduce_points, weighed

__all__ = ["CellPairs", "Limit", "Ranked", "Wanted", "paired", "product"]


@dataclass(frozen=True, slots=True)
class Limit:
    """What is wanted of a table: points with ``weights`` . (memory, time) up to ``most`` of their cell, [R, C]."""

    weights: Weights
    most: FloatArray


@dataclass(frozen=True, slots=True)
class CellPairs:
    """N pairs of cells of two tables, and for each the cell that its sums go to, [N]."""

    left: IntArray
    right: IntArray
    into: IntArray


@dataclass(frozen=True, slots=True)
class Ranked:
    """Points of a table in order of their cells and, within each, of weighted cost: ``order`` and ``keys``, [P].

    A key is the cell's number times ``span`` plus the cost over the least of all, so that how many points of a cell
    cost at most so much is one binary search.
    """

    starts: IntArray
    order: IntArray
    keys: FloatArray
    costs: FloatArray
    span: float
    lowest: float

    @classmethod
    def of(cls, source: Table, weights: Weights) -> Ranked:
        """The points of a table that has some."""
        costs = weighed(source, weights)
        lowest, span = float(costs.min()), float(np.ptp(costs)) + 1.0
        keys = source.cells * span + (costs - lowest)
        order = np.argsort(keys, kind="stable")
        return cls(source.starts, order, keys[order], costs[order], span, lowest)

    def least(self, cells: IntArray) -> FloatArray:
        """The least cost of each of these cells, infinite where one has no point, [N]."""
        first = self.starts[cells]
        return np.where(first < self.starts[cells + 1], self.costs[np.minimum(first, len(self.costs) - 1)], np.inf)

    def num_up_to(self, cells: IntArray, most: FloatArray) -> IntArray:
        """How many points of each of these cells cost at most so much, [N]; rounding may add some, never leave out."""
        most = np.maximum(most, -2 * abs(self.lowest) - self.span)  # all that is less takes none, also minus infinity
        most = most - self.lowest + 8 * np.spacing(self.keys[-1]) + 1e-9 * np.abs(most)
        some = np.flatnonzero((most >= 0) & (self.starts[cells] < self.starts[cells + 1]))
        within = cells[some]
        found = np.searchsorted(self.keys, within * self.span + np.minimum(most[some], self.span), side="right")
        counts = np.zeros(len(cells), np.int64)
        counts[some] = np.clip(found, self.starts[within], self.starts[within + 1]) - self.starts[within]
        return counts


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sums of the points of two tables are wanted: those up to a limit of the cell that they go to."""

    limit: Limit
    left: Ranked
    right: Ranked

    @classmethod
    def of(cls, left: Table, right: Table, limit: Limit | None) -> Wanted | None:
        """What is wanted of the sums of two tables, None if that is everything."""
        if limit is None or not left.num_points or not right.num_points:
            return None
        return cls(limit, Ranked.of(left, limit.weights), Ranked.of(right, limit.weights))

    def points(self, pairs: CellPairs) -> tuple[IntArray, IntArray, IntArray]:
        """The left point, the right point and the cell of every sum."""
        most = self.limit.most.ravel()[pairs.into]
        some = self.left.num_up_to(pairs.left, most - self.right.least(pairs.right))
        a, pair = ranges(self.left.starts[pairs.left], some)
        some = self.right.num_up_to(pairs.right[pair], most[pair] - self.left.costs[a])
        b, of = ranges(self.right.starts[pairs.right[pair]], some)
        return self.left.order[a[of]], self.right.order[b], pairs.into[pair[of]]


def product(left: Table, right: Table, limit: Limit | None = None) -> Table:
    """Cell by cell, every point of one with every point of the other, reduced; one row or column is used for all."""
    shape = np.broadcast_shapes((left.rows, left.columns), (right.rows, right.columns))
    sides = [
        np.broadcast_to(np.arange(side.rows * side.columns).reshape(side.rows, side.columns), shape).ravel()
        for side in (left, right)
    ]
    pairs = CellPairs(sides[0], sides[1], np.arange(len(sides[0])))
    points = paired(left, right, pairs, Wanted.of(left, right, limit))
    return made(shape[0], shape[1], reduce_points(points))


def paired(left: Table, right: Table, pairs: CellPairs, wanted: Wanted | None = None) -> Points:
    """The sums of pairs of cells, all or those wanted; not reduced."""
    a, b, cells = wanted.points(pairs) if wanted else _every(left, right, pairs)
    memory = left.memory_bytes[a] + right.memory_bytes[b]
    return Points(cells, memory, left.time_ns[a] + right.time_ns[b], np.stack((a, b)))


def _every(left: Table, right: Table, pairs: CellPairs) -> tuple[IntArray, IntArray, IntArray]:
    """The left point, the right point and the cell of every sum."""
    counts = np.diff(left.starts)[pairs.left], np.diff(right.starts)[pairs.right]
    within, pair = ranges(np.zeros_like(counts[0]), counts[0] * counts[1])
    in_left, in_right = np.divmod(within, counts[1][pair])
    return left.starts[pairs.left][pair] + in_left, right.starts[pairs.right][pair] + in_right, pairs.into[pair]
