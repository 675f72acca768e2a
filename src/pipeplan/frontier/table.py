"""Tables of frontiers, and union and reduce on them (TensorOpt section 3.1).

A frontier is a set of points (memory, time) of which none is at most another in both. A :class:`Table` holds one
frontier for every cell of a matrix: a node's costs are one row with a cell per configuration, an edge's costs a row
per configuration of its source and a column per configuration of its target. All operations work on whole tables.

Every point of a table made from others knows the points it was made of (``picks``), so that a strategy is read off by
walking back, whichever operations led there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "FloatArray",
    "IntArray",
    "Points",
    "Table",
    "Weights",
    "gather",
    "made",
    "ranges",
    "reduce_points",
    "select",
    "table",
    "union",
    "weighed",
]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Weights = tuple[float, float]
"""What a byte and a nanosecond count for where both are told as one number."""

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
        return np.diff(self.starts).reshape(self.rows, self.columns)

    @property
    def first(self) -> IntArray:
        """The first point of every cell, [rows, columns]."""
        return self.starts[:-1].reshape(self.rows, self.columns)

    @property
    def cells(self) -> IntArray:
        """The cell of every point, counted row by row, [P]."""
        return np.repeat(np.arange(self.rows * self.columns), np.diff(self.starts))

    def cell_of(self, point: int) -> int:
        """The cell that a point lies in, counted row by row."""
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
    starts = _starts(points.cells, rows * columns)
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


def _starts(cells: IntArray, num_cells: int) -> IntArray:
    return np.searchsorted(cells, np.arange(num_cells + 1)).astype(np.int64)


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
