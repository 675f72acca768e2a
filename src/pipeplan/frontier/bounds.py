"""What can still be in the frontier: proved before the frontier is computed.

The two-phase method of biobjective optimisation. First, strategies that are best for some weighting of memory and time
(the convex hull of the frontier) are found by minima alone, see :mod:`pipeplan.frontier.scalars`. Between two of them
that lie side by side, a frontier point must be under the *corner* made of the memory of the one and the time of the
other. Then a point of any table is of use only if, with the least that the rest adds to it, it is under a corner: in
memory, in time, and in the weighting in which both neighbours of the corner are equal. What is of no use is dropped;
the frontier stays exact. Rounding is on the safe side: limits are relaxed by one part in 10^9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeplan.frontier.expression import Expression, in_order
from pipeplan.frontier.hull import Gap, Solved, hull_of
from pipeplan.frontier.pairing import Limit
from pipeplan.frontier.scalars import inside, optimum, outside
from pipeplan.frontier.table import FloatArray, IntArray, Table, Weights

__all__ = ["Bounds", "Corner", "Weighing", "bounds_of", "corner_of", "ends_of", "solved", "weighing"]

_RELAXED = 1e-9

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Weighing:
    """A strategy that is best for some weights, and the least that the rest adds to every cell in them."""

    solved: Solved
    rest: dict[int, FloatArray]

    def cost(self, memory: Any, time: Any) -> Any:
        """Memory and time in these weights."""
        return self.solved.at[0] * memory + self.solved.at[1] * time

    @property
    def least(self) -> float:
        """The least that any strategy costs in these weights."""
        return float(self.cost(self.solved.memory_bytes, self.solved.time_ns))


@dataclass(frozen=True, slots=True)
class Corner:
    """Weightings, and the most that a strategy of use costs in each; the last is that of the gap's line."""

    weighings: tuple[Weighing, ...]
    most: tuple[float, ...]

    def lower(self, most: float) -> Corner:
        """With another limit in the weights of the line."""
        return replace(self, most=(*self.most[:-1], most))

    def under(self, key: int, table: Table, cells: IntArray, points: IntArray) -> IntArray:
        """Those of some points of a part's table that can be under the corner in all of its weightings."""
        for weighing, most in zip(self.weighings, self.most, strict=True):
            cost = weighing.cost(table.memory_bytes[points], table.time_ns[points])
            points = points[cost + weighing.rest[key].ravel()[cells[points]] <= most * (1 + _RELAXED)]
        return points


@dataclass(frozen=True, slots=True)
class Bounds:
    """The corners of a whole expression."""

    corners: tuple[Corner, ...]

    def useful(self, key: int, table: Table) -> BoolArray:
        """Which points of the table of the parts with this key may be in a strategy of the frontier, [P]."""
        useful = np.zeros(table.num_points, dtype=bool)
        for corner in self.corners:
            useful[corner.under(key, table, table.cells, np.flatnonzero(~useful))] = True
        return useful

    def limit(self, key: int) -> Limit | None:
        """What of such a table is worth making, where one line says it."""
        if len(self.corners) > 1:
            return None
        weighing, most = self.corners[0].weighings[-1], self.corners[0].most[-1]
        return Limit(weighing.solved.at, most * (1 + _RELAXED) - weighing.rest[key])


def bounds_of(root: Expression, num_weightings: int) -> Bounds:
    """Bounds from at most so many weightings, of which the first two are least memory and least time."""
    ends = ends_of(root)
    known: dict[Weights, Weighing] = {each.solved.at: each for each in ends}

    def solve(weights: Weights) -> Solved:
        known[weights] = weighing(root, weights)
        return known[weights].solved

    gaps = hull_of(solve, (ends[0].solved, ends[1].solved), 0.0, num_weightings)
    return Bounds(tuple(corner_of(gap, ends, known.get(gap.weights, ends[1])) for gap in gaps))


def ends_of(root: Expression) -> tuple[Weighing, Weighing]:
    """The strategies of least memory and of least time, and of those with as much the best in the other."""
    tables = [part.given for part in in_order(root) if part.given is not None and part.given.num_points]
    most = float(sum(int(table.memory_bytes.max()) + int(table.time_ns.max()) for table in tables))
    return weighing(root, (1.0, 1 / (most + 1))), weighing(root, (1 / (most + 1), 1.0))


def corner_of(gap: Gap, ends: tuple[Weighing, Weighing], line: Weighing) -> Corner:
    """What a strategy in a gap can cost at most: no more memory than the one end, no more time than the other."""
    weighings = (*ends, line)
    memory, time = gap.right.memory_bytes, gap.left.time_ns
    return Corner(weighings, tuple(float(each.cost(memory, time)) for each in weighings))


def weighing(root: Expression, weights: Weights) -> Weighing:
    """The least cost in these weights, as a whole and of every cell's rest.

    Raises:
        ValueError: the whole has no strategy.
    """
    values = inside(root, weights)
    if np.isinf(values[root.key]).all():
        raise ValueError("no strategy: configurations allowed for each operator and tensor do not fit together")
    return Weighing(solved(optimum(root, values, weights), weights), outside(root, values))


def solved(taken: Mapping[Expression, int], weights: Weights) -> Solved:
    """The strategy of these points of the given tables, best for these weights."""
    tables = [(part.given, point) for part, point in taken.items()]
    memory = sum(int(table.memory_bytes[point]) for table, point in tables if table)
    time = sum(int(table.time_ns[point]) for table, point in tables if table)
    return Solved(memory, time, weights)
