"""Whether the loops of frontier tracking run compiled (:mod:`pipeplan.sharding.kernels`), and how they are called.

Importing them takes half a second, and compiling, once for each machine, some seconds more. So numpy does what is
small, and what went before in a process decides: from so many sums on, the rest is compiled. Without numba, an extra,
numpy does everything. Either way the results are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import numpy as np

from pipeplan.search_constants import COMPILED_AFTER
from pipeplan.sharding.table import FloatArray, IntArray, PointLimit, Points, Ranked, Table, made, union
from pipeplan.sharding.threads import stoppable

_offered = 0.0


def kernels(num_sums: float) -> ModuleType | None:
    """The compiled loops, where so many more sums are worth it."""
    global _offered
    _offered += num_sums
    return _imported() if _offered > COMPILED_AFTER else None


@cache
def _imported() -> ModuleType | None:
    if find_spec("numba") is None:
        return None
    try:
        return import_module("pipeplan.sharding.kernels")
    except RuntimeError:  # nowhere to keep what is compiled, and compiling each time takes longer than most frontiers
        return None


def contract(loops: ModuleType, left: Table, right: Table, limit: PointLimit | None = None) -> Table:
    """As :func:`pipeplan.sharding.graph.contract`."""
    strides = (left.columns, left.columns, 0, 1, 0, 1, right.columns)
    return _CellSums(loops, left, right, limit, left.rows, right.columns, np.array(strides)).made()


def product(loops: ModuleType, left: Table, right: Table, limit: PointLimit | None = None) -> Table:
    """As :func:`pipeplan.sharding.table.product`."""
    rows, columns = np.broadcast_shapes((left.rows, left.columns), (right.rows, right.columns))
    apart = [
        step
        for side in (left, right)
        for step in (side.columns if side.rows > 1 else 0, 1 if side.columns > 1 else 0, 0)
    ]
    return _CellSums(loops, left, right, limit, rows, columns, np.array([1, *apart])).made()


@dataclass(frozen=True, slots=True)
class _CellSums:
    """What the compiled loop is given; ``strides`` as it has them."""

    loops: ModuleType
    left: Table
    right: Table
    limit: PointLimit | None
    rows: int
    columns: int
    strides: IntArray

    def made(self) -> Table:
        """The table of all cells, by threads."""
        size = self.rows * self.columns
        if not self.left.num_points or not self.right.num_points:
            return made(self.rows, self.columns, _NOTHING)
        sides = [_SortedCells.of(side, self.limit) for side in (self.left, self.right)]
        most = np.full(size, np.inf)
        if self.limit is not None:
            largest = sum(float(np.abs(side.costs).max()) for side in sides)
            most = np.maximum(self.limit.most.ravel(), -np.finfo(np.float64).max / 2)
            most += 1e-9 * np.abs(most) + 8 * np.spacing(largest)  # rounding may add some, never leave out
        ends = np.linspace(0, size, min(size, _PIECES) + 1).astype(int).tolist()

        def frontiers(stop: IntArray, cells: tuple[int, int]) -> Points | None:
            counts, points, complete = self.loops.frontiers(
                (*cells, self.columns),
                self.strides,
                sides[0].arrays,
                sides[0].costs,
                sides[1].arrays,
                sides[1].costs,
                most,
                stop,
            )
            memory, time, a, b = np.ascontiguousarray(points.T)
            picks = np.stack((sides[0].order[a], sides[1].order[b]))
            return Points(np.repeat(np.arange(*cells), counts), memory, time, picks) if complete else None

        return made(self.rows, self.columns, union(stoppable(frontiers, pairwise(ends))))


_PIECES = 4
"""Parts of a table's cells, which threads share."""

_NONE: IntArray = np.zeros(0, np.int64)
_NOTHING = Points(_NONE, _NONE, _NONE, np.zeros((2, 0), np.int64))


@dataclass(frozen=True, slots=True)
class _SortedCells:
    """A table as the loop has it: cell by cell, the points of each by ascending cost, the p-th is ``order[p]``."""

    arrays: tuple[IntArray, ...]
    costs: FloatArray
    order: IntArray

    @classmethod
    def of(cls, side: Table, limit: PointLimit | None) -> _SortedCells:
        if limit is None:
            order, costs = np.arange(side.num_points), np.zeros(side.num_points)
        else:
            ranked = Ranked.of(side, limit.weights)
            order, costs = ranked.order, ranked.costs
        first = np.minimum(side.starts[:-1], side.num_points - 1)
        lows, highs = side.memory_bytes[first], side.memory_bytes[np.maximum(side.starts[1:] - 1, 0)]
        return cls((side.starts, side.memory_bytes[order], side.time_ns[order], lows, highs), costs, order)
