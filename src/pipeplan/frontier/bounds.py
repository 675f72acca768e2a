"""What can still be in the frontier: proved before the frontier is computed.

The two-phase method of biobjective optimisation. First, strategies that are best for some weighting of memory and time
(the convex hull of the frontier) are found by minima alone, see :mod:`pipeplan.frontier.scalars`. Between two of them
that lie side by side, a frontier point must be under the *corner* made of the memory of the one and the time of the
other. Then a point of any table is of use only if, with the least that the rest adds to it, it is under a corner: in
memory, in time, and in the weighting in which both neighbours of the corner are equal. What is of no use is dropped;
the frontier stays exact. Rounding is on the safe side: limits are relaxed by one part in 10^9.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeplan.frontier.expression import Expression, in_order
from pipeplan.frontier.scalars import FloatArray, inside, optimum, outside
from pipeplan.frontier.table import IntArray, Table

__all__ = ["Bounds", "bounds_of"]

_RELAXED = 1e-9

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Solved:
    """A strategy that is best for some weights, and the least that the rest adds to every cell in them."""

    memory_bytes: int
    time_ns: int
    weights: tuple[float, float]
    rest: dict[int, FloatArray]


@dataclass(frozen=True, slots=True)
class _Corner:
    """The most memory and time, and the weightings in which they are limits."""

    memory_bytes: int
    time_ns: int
    weightings: tuple[_Solved, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The corners of a whole expression."""

    corners: tuple[_Corner, ...]

    def useful(self, key: int, table: Table) -> BoolArray:
        """Which points of the table of the parts with this key may be in a strategy of the frontier, [P]."""
        cells = np.repeat(np.arange(table.rows * table.columns), table.counts.ravel())
        useful = np.zeros(table.num_points, dtype=bool)
        for corner in self.corners:
            useful[_under(corner, key, table, cells, np.flatnonzero(~useful))] = True
        return useful


def bounds_of(root: Expression, num_weightings: int) -> Bounds:
    """Bounds from at most so many weightings, of which the first two are least memory and least time.

    The others halve the widest gap: between two best strategies, the weighting in which they are equal either finds one
    below their line or proves that there is none.
    """
    most = sum(_most(root))
    leanest = _solve(root, (1.0, 1 / (most + 1)))
    fastest = _solve(root, (1 / (most + 1), 1.0))
    closed: list[tuple[_Solved, _Solved, _Solved]] = []
    gaps = [_gap(leanest, fastest, None)]
    for _ in range(num_weightings - 2):
        if not gaps or not gaps[0][0]:
            break
        *_, left, right, _ = heapq.heappop(gaps)
        middle = _solve(root, _level(left, right))
        if _below(middle, left, right):
            for pair in ((left, middle), (middle, right)):
                heapq.heappush(gaps, _gap(*pair, middle))
        else:
            closed.append((left, right, middle))
    gaps_left = [(left, right, known or right) for *_, left, right, known in gaps]
    return Bounds(
        tuple(
            _Corner(right.memory_bytes, left.time_ns, (leanest, fastest, known))
            for left, right, known in closed + gaps_left
        )
    )


def _under(corner: _Corner, key: int, table: Table, cells: IntArray, points: IntArray) -> IntArray:
    """Those of some points of a part that can be under a corner in all of its weightings."""
    for solved in corner.weightings:
        cost = _dot(solved.weights, table.memory_bytes[points], table.time_ns[points])
        limit = _dot(solved.weights, np.int64(corner.memory_bytes), np.int64(corner.time_ns))
        points = points[cost + solved.rest[key].ravel()[cells[points]] <= limit * (1 + _RELAXED)]
    return points


def _solve(root: Expression, weights: tuple[float, float]) -> _Solved:
    values = inside(root, weights)
    rest = outside(root, values)
    taken = [(part.given, point) for part, point in optimum(root, values, weights).items()]
    memory = sum(int(table.memory_bytes[point]) for table, point in taken if table)
    time = sum(int(table.time_ns[point]) for table, point in taken if table)
    return _Solved(memory, time, weights, rest)


Gap = tuple[float, int, _Solved, _Solved, _Solved | None]


def _gap(left: _Solved, right: _Solved, known: _Solved | None) -> Gap:
    """Two neighbours, widest first: minus the area between them, and what was solved last nearby."""
    width, height = right.memory_bytes - left.memory_bytes, left.time_ns - right.time_ns
    area = -float(max(width, 0)) * float(max(height, 0))
    return (area, left.memory_bytes, left, right, known)


def _level(left: _Solved, right: _Solved) -> tuple[float, float]:
    """The weights in which two strategies are equal, the larger weight 1."""
    weights = np.array([left.time_ns - right.time_ns, right.memory_bytes - left.memory_bytes], dtype=np.float64)
    memory, time = (weights / weights.max()).tolist()
    return memory, time


def _below(middle: _Solved, left: _Solved, right: _Solved) -> bool:
    """Whether a strategy lies between two others and clearly under the line through them."""
    between = left.memory_bytes < middle.memory_bytes < right.memory_bytes
    cost, line = (_dot(middle.weights, solved.memory_bytes, solved.time_ns) for solved in (middle, left))
    return between and bool(cost < line * (1 - _RELAXED))


def _most(root: Expression) -> tuple[float, float]:
    """More memory and more time than any strategy has."""
    tables = [part.given for part in in_order(root) if part.given is not None and part.given.num_points]
    return (
        float(sum(int(table.memory_bytes.max()) for table in tables)),
        float(sum(int(table.time_ns.max()) for table in tables)),
    )


def _dot(weights: tuple[float, float], memory: Any, time: Any) -> Any:
    return weights[0] * memory + weights[1] * time
