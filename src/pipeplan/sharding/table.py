"""Tables of frontiers, and union, reduce and product on them (TensorOpt section 3.1).

A frontier is a set of points (memory, time) of which none is at most another in both. A :class:`Table` holds one
frontier for every cell of a matrix: a node's costs are one row with a cell per configuration, an edge's costs a row
per configuration of its source and a column per configuration of its target. All operations work on whole tables.

Every point of a table made from others knows the points it was made of (``picks``), so that a strategy is read off by
walking back, whichever operations led there.

Most sums of large frontiers are of no use to the whole, and what is of use is known beforehand: a cell's sums are
wanted up to a weighted cost (:class:`PointLimit`). With the points of one side in order of that cost, each point of the
other is added to the first few of them, and the rest is never made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Weights = tuple[float, float]
"""What a byte and a nanosecond count for where both become one number."""

_PACKED_BITS = 62
"""A cell's number and a cost share one int64 key while their ranges multiply to less than two to this power."""


@dataclass(frozen=True, slots=True)
class Points:
    """Points of many cells in any order, P of them, with the points of S tables each was made of."""

    cells: IntArray  # [P]
    memory_bytes: IntArray  # [P]
    time_ns: IntArray  # [P]
    picks: IntArray  # [S, P]

    def at(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Points:
        """Some of them, in the order asked for."""
        return Points(self.cells[chosen], self.memory_bytes[chosen], self.time_ns[chosen], self.picks[:, chosen])


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A frontier per cell of a matrix of ``rows`` x ``columns`` cells, row by row.

    Points of cell c are ``starts[c]`` to ``starts[c + 1]``, with ``memory_bytes`` ascending and ``time_ns``
    descending. A cell without points is a combination that cannot be. Of a table that was computed, ``picks[s, p]`` is
    the point of its s-th source in point p; of a given one, ``picks[0, p]`` is the variant that p is.
    """

    rows: int
    columns: int
    starts: IntArray  # [rows * columns + 1]
    memory_bytes: IntArray  # [P]
    time_ns: IntArray  # [P]
    picks: IntArray  # [S, P]

    @property
    def num_points(self) -> int:
        """Points in all cells together."""
        return len(self.memory_bytes)

    @property
    def counts(self) -> IntArray:
        """Points of every cell, [rows, columns]."""
        return (self.starts[1:] - self.starts[:-1]).reshape(self.rows, self.columns)

    @property
    def first(self) -> IntArray:
        """The first point of every cell, [rows, columns]."""
        return self.starts[:-1].reshape(self.rows, self.columns)

    @property
    def cells(self) -> IntArray:
        """The cell of every point, counted row by row, [P]."""
        return np.repeat(np.arange(self.rows * self.columns), np.diff(self.starts))

    def cell_of(self, point: int) -> int:
        """The cell of a point, counted row by row."""
        return int(np.searchsorted(self.starts, point, side="right")) - 1


def table(
    memory_bytes: npt.ArrayLike, time_ns: npt.ArrayLike, allowed: npt.ArrayLike | None = None, *, copies: int = 0
) -> Table:
    """A table from arrays [K], [Ks, Kt], or with the variants of each cell last, [K, V] or [Ks, Kt, V].

    ``copies`` is the number of variants V, 0 where the arrays have no axis for them. ``allowed`` masks what cannot be.
    Each cell is reduced to its frontier.
    """
    memory, time = np.broadcast_arrays(np.asarray(memory_bytes, np.int64), np.asarray(time_ns, np.int64))
    cells_shape = memory.shape[:-1] if copies else memory.shape
    if len(cells_shape) not in (1, 2) or (copies and memory.shape[-1] != copies):
        raise ValueError(f"costs of shape {memory.shape} are neither [K] nor [Ks, Kt], with {copies} variants")
    rows, columns = (1, *cells_shape)[-2:]
    mask = np.ones(memory.shape, bool) if allowed is None else np.broadcast_to(np.asarray(allowed, bool), memory.shape)
    offered = np.flatnonzero(mask)
    cells, variants = np.divmod(offered, max(copies, 1))
    kept = reduce_points(Points(cells, memory.ravel()[offered], time.ravel()[offered], variants[None, :]))
    return made(rows, columns, kept)


def weighed(costs: Table, weights: Weights) -> FloatArray:
    """weights . (memory, time) of every point, [P]."""
    cost: FloatArray = weights[0] * costs.memory_bytes + weights[1] * costs.time_ns
    return cost


def made(rows: int, columns: int, points: Points) -> Table:
    """A table of points in order of their cells, each cell already a frontier."""
    starts = np.searchsorted(points.cells, np.arange(rows * columns + 1)).astype(np.int64)
    return Table(rows, columns, starts, points.memory_bytes, points.time_ns, points.picks)


def gather(source: Table, cells: npt.ArrayLike) -> Table:
    """The table whose cell (r, c) is the cell ``cells[r, c]`` of the source: transposed, repeated, selected."""
    wanted = np.asarray(cells, np.int64)
    points, owner = ranges(source.starts[:-1][wanted.ravel()], source.counts.ravel()[wanted.ravel()])
    taken = Points(owner, source.memory_bytes[points], source.time_ns[points], points[None, :])
    return made(wanted.shape[0], wanted.shape[1], taken)


def select(source: Table, wanted: npt.NDArray[np.bool_]) -> Table:
    """Only the points wanted, [P]."""
    points = Points(source.cells, source.memory_bytes, source.time_ns, source.picks)
    return made(source.rows, source.columns, points.at(wanted))


def ranges(first: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """The numbers first[n], first[n] + 1, ... (counts[n] of them) for every n in turn, and the n of each."""
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    return np.arange(len(owner)) + (first - ends + counts)[owner], owner


def reduce_points(points: Points) -> Points:
    """The frontier of every cell (Algorithm 1), cells ascending and memory ascending within each.

    Points are sorted by cell and memory; one stays when it is faster than all before it in its cell. Of two with the
    same memory the slower goes, and of equal ones one stays.
    """
    if not len(points.cells):
        return points
    order = np.argsort(_keys(points.cells, points.memory_bytes), kind="stable")
    cells, time = points.cells[order], points.time_ns[order]
    falling = _keys(cells[-1] - cells, time)  # each cell lies wholly under the cells before it
    best = np.minimum.accumulate(falling)
    faster = np.r_[True, falling[1:] < best[:-1]]
    kept = points.at(order[faster])
    same = (kept.cells[1:] == kept.cells[:-1]) & (kept.memory_bytes[1:] == kept.memory_bytes[:-1])
    return kept.at(np.r_[~same, True])


def _keys(cells: IntArray, values: IntArray) -> IntArray:
    """One integer per point that orders by cell, then by value."""
    lowest, span = int(values.min()), int(values.max()) - int(values.min()) + 1
    if span * (int(cells.max()) + 1) >= 1 << _PACKED_BITS:
        distinct, values = np.unique(values, return_inverse=True)
        lowest, span = 0, len(distinct)
    return cells * span + (values - lowest)


def union(parts: Sequence[Points]) -> Points:
    """The points of all parts in one set, not reduced."""
    return Points(
        np.concatenate([part.cells for part in parts]),
        np.concatenate([part.memory_bytes for part in parts]),
        np.concatenate([part.time_ns for part in parts]),
        np.concatenate([part.picks for part in parts], axis=1),
    )


@dataclass(frozen=True, slots=True)
class PointLimit:
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
    cost at most a limit is one binary search.
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
        """How many points of each of these cells cost at most ``most``, [N]; rounding may add some, never leave out."""
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

    limit: PointLimit
    left: Ranked
    right: Ranked

    @classmethod
    def of(cls, left: Table, right: Table, limit: PointLimit | None) -> Wanted | None:
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


def product(left: Table, right: Table, limit: PointLimit | None = None) -> Table:
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
