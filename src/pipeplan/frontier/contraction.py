"""Union over the configurations in the middle: the one step under node elimination and linear DP.

``contract(A, B)[r, c]`` is the reduced union over m of ``A[r, m]`` x ``B[m, c]``: a matrix product in which points are
multiplied by *product* and added by *union* and *reduce*. Node elimination (equation 4) contracts K x K with K x K,
linear DP (Algorithm 3, line 6) 1 x K with K x K, which is why it is K times cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeplan.frontier.parallel import spread
from pipeplan.frontier.table import IntArray, Points, Table, made, paired, reduce_points, union

__all__ = ["contract"]

_BATCH_POINTS = 1 << 21
"""Sums held at once: as many as stay near the caches (16 MiB an array)."""


def contract(left: Table, right: Table, *, batch_points: int = _BATCH_POINTS) -> Table:
    """The table of ``left.rows`` x ``right.columns`` cells; ``batch_points`` bounds the sums held at once."""
    batches = _batches(left.counts @ right.counts, batch_points)
    parts = spread(lambda cells: _part(left, right, cells), batches)
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


def _part(left: Table, right: Table, cells: IntArray) -> Points:
    """The frontiers of some cells of the contraction."""
    rows, columns = np.divmod(cells, right.columns)
    shape = (len(cells), left.columns)
    points = paired(
        left,
        right,
        left.first[rows].ravel(),
        left.counts[rows].ravel(),
        right.first[:, columns].T.ravel(),
        right.counts[:, columns].T.ravel(),
        np.broadcast_to(cells[:, None], shape).ravel(),
    )
    return reduce_points(points)
