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
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeplan.search_constants import COMPILED_AFTER
from pipeplan.sharding.table import IntArray, PointLimit, Points, Table, Weights, made, union
from pipeplan.sharding.threads import nested, stoppable

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
        weights = self.limit.weights if self.limit is not None else (0.0, 0.0)
        sides = [_side(self.loops, side, weights) for side in (self.left, self.right)]
        most = np.full(size, np.inf)
        if self.limit is not None:
            largest = sum(float(np.abs(side[_COSTS]).max()) for side in sides)
            most = np.maximum(self.limit.most.ravel(), -np.finfo(np.float64).max / 2)
            most += 1e-9 * np.abs(most) + 8 * np.spacing(largest)  # rounding may add some, never leave out
        turned = _points_of_a_cell(self.left) > _points_of_a_cell(self.right)  # the longer frontiers go by in blocks
        apart = [self.strides[1:4], self.strides[4:]]
        outer, inner = (1, 0) if turned else (0, 1)
        strides = np.concatenate((self.strides[:1], apart[outer], apart[inner]))
        pieces = 1 if nested() else min(size, _PIECES)
        ends = np.linspace(0, size, pieces + 1).astype(int).tolist()

        def frontiers(stop: IntArray, cells: tuple[int, int]) -> Points | None:
            counts, points, complete = self.loops.frontiers(
                (*cells, self.columns, int(turned)), strides, sides[outer], sides[inner], most, stop
            )
            memory, time, *picks = np.ascontiguousarray(points.T)
            picked = np.stack((picks[outer], picks[inner]))
            return Points(np.repeat(np.arange(*cells), counts), memory, time, picked) if complete else None

        return made(self.rows, self.columns, union(stoppable(frontiers, pairwise(ends))))


_PIECES = 4
"""Parts of a table's cells, which threads share."""

_NONE: IntArray = np.zeros(0, np.int64)
_NOTHING = Points(_NONE, _NONE, _NONE, np.zeros((2, 0), np.int64))


_COSTS = 6
"""Where a side has what its points cost."""


def _side(loops: ModuleType, side: Table, weights: Weights) -> tuple[npt.NDArray[Any], ...]:
    """A table as the loop has it."""
    starts, memory, time = side.starts, side.memory_bytes, side.time_ns
    return (starts, memory, time, *loops.sorted_cells(starts, memory, time, *weights))


def _points_of_a_cell(side: Table) -> float:
    return side.num_points / (side.rows * side.columns)
