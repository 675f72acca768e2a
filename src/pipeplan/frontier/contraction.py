"""Union over the configurations in the middle: the one step under node elimination and linear DP.

``contract(A, B)[r, c]`` is the reduced union over m of ``A[r, m]`` x ``B[m, c]``: a matrix product in which points are
multiplied by *product* and added by *union* and *reduce*. Node elimination (equation 4) contracts K x K with K x K,
linear DP (Algorithm 3, line 6) 1 x K with K x K, which is why it is K times cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeplan.frontier.pairing import CellPairs, Limit, Wanted, paired
from pipeplan.frontier.parallel import spread
from pipeplan.frontier.table import IntArray, Points, Table, made, reduce_points, union

__all__ = ["contract"]

_BATCH_POINTS = 1 << 21
"""Sums held at once: as many as stay near the caches (16 MiB an array)."""


def contract(left: Table, right: Table, limit: Limit | None = None, *, batch_points: int = _BATCH_POINTS) -> Table:
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
