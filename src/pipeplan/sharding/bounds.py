"""What cannot be in the frontier, proved before it is computed: by minima and by its convex hull.

With weights of memory and time the frontier's operations become sums and minima of numbers, so every cell of every
table has two: *inside*, the least of its own points, and *outside*, the least that all the rest adds when this cell is
used. A point of the cell can be in no strategy cheaper than itself plus the outside. Both are found by going through
the expression once forward and once backward.

A strategy that is best for some weighting lies on the convex hull of the frontier. Between two of them that lie side by
side every strategy is above a line: that of the weighting in which they are equal, at the least value it has. From that
follows by which factor a strategy between them can be better, in memory against the one, in time against the other.
The widest gap is halved until no factor exceeds what was asked for, or the gap holds no strategy below its line.

A frontier point in a gap must be under the *corner* made of the memory of the one end and the time of the other. So a
point of any table is of use only if, with the least that the rest adds to it, it is under a corner: in memory, in time,
and in the weighting of the line (the two-phase method of biobjective optimisation). Limits are relaxed by one part in
10^9, so that rounding loses nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeplan.search_constants import AS_QUICK, SPREAD_SUMS
from pipeplan.sharding.compiled import kernels
from pipeplan.sharding.graph import Expression, in_order
from pipeplan.sharding.table import BoolArray, FloatArray, IntArray, PointLimit, Table, Weights, weighed
from pipeplan.sharding.threads import spread
from pipeplan.time_limit import checkpoint

RELAXED = 1e-9
"""The share by which limits are relaxed, so that rounding loses nothing."""


def inside(root: Expression, weights: Weights, known: dict[int, FloatArray] | None = None) -> dict[int, FloatArray]:
    """The least weighted cost of every cell of every part, [rows, columns], by the part's key; with those ``known``."""
    values = {} if known is None else known
    for part in in_order(root):
        checkpoint()
        if part.key not in values:
            values[part.key] = _inside(part, weights, [values[source.key] for source in part.sources])
    return values


def outside(root: Expression, values: dict[int, FloatArray]) -> dict[int, FloatArray]:
    """The least that the rest of the whole adds to every cell of every part, [rows, columns], by the part's key.

    For parts that are equal, wherever they stand: the least of all their places.
    """
    rest = {root.key: np.zeros((root.rows, root.columns))}
    distinct: dict[int, Expression] = {}
    for part in in_order(root):
        checkpoint()
        distinct.setdefault(part.key, part)
    for part in reversed(distinct.values()):  # whatever is made of a part comes before it
        shares = _shares(part, rest[part.key], [values[source.key] for source in part.sources])
        for source, share in zip(part.sources, shares, strict=True):
            rest[source.key] = np.minimum(rest[source.key], share) if source.key in rest else share
    return rest


def optimum(root: Expression, values: dict[int, FloatArray], weights: Weights) -> dict[Expression, int]:
    """The point of every given table in a strategy of least weighted cost, of a root of one cell."""
    taken: dict[Expression, int] = {}
    stack = [(root, 0, 0)]
    while stack:
        part, row, column = stack.pop()
        if part.given is not None:
            taken[part] = _cheapest(part.given, row * part.columns + column, weights)
        elif part.cells is not None:
            stack.append((part.sources[0], *divmod(int(part.cells[row, column]), part.sources[0].columns)))
        elif part.operation == "contract":
            left, right = part.sources
            middle = int(np.argmin(values[left.key][row] + values[right.key][:, column]))
            stack += [(left, row, middle), (right, middle, column)]
        else:
            stack += [(side, min(row, side.rows - 1), min(column, side.columns - 1)) for side in part.sources]
    return taken


def _inside(part: Expression, weights: Weights, sources: Sequence[FloatArray]) -> FloatArray:
    if part.given is not None:
        return _least(part.given, weights)
    if part.cells is not None:
        chosen: FloatArray = sources[0].ravel()[part.cells]
        return chosen
    if part.operation == "contract":
        return _min_plus(*sources)
    return sources[0] + sources[1]


def _shares(part: Expression, rest: FloatArray, sources: Sequence[FloatArray]) -> list[FloatArray]:
    """The outside of each source of a part, from the part's own."""
    if part.given is not None:
        return []
    if part.cells is not None:
        flat = np.full(sources[0].size, np.inf)
        np.minimum.at(flat, part.cells.ravel(), rest.ravel())
        return [flat.reshape(sources[0].shape)]
    left, right = sources
    if part.operation == "contract":
        return [_min_plus(rest, right.T), _min_plus(left.T, rest)]
    return [_narrowed(rest + right, left.shape), _narrowed(rest + left, right.shape)]


def _min_plus(left: FloatArray, right: FloatArray) -> FloatArray:
    """min over m of left[r, m] + right[m, c]."""
    num_sums = left.size * right.shape[1]
    loops = kernels(num_sums / AS_QUICK)
    of_rows = _of_rows if loops is None else loops.min_plus
    rows = -(-left.shape[0] // max(1, min(left.shape[0], num_sums // SPREAD_SUMS)))
    left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
    parts = [left[start : start + rows] for start in range(0, left.shape[0], rows)]
    if len(parts) == 1:
        only: FloatArray = of_rows(left, right)
        return only
    return np.concatenate(spread(lambda part: of_rows(part, right), parts))


def _of_rows(left: FloatArray, right: FloatArray) -> FloatArray:
    result = np.full((left.shape[0], right.shape[1]), np.inf)
    sums = np.empty_like(result)
    for column, row in zip(np.ascontiguousarray(left.T), right, strict=True):
        np.add(column[:, None], row[None, :], out=sums)
        np.minimum(result, sums, out=result)
    return result


def _narrowed(values: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """The least over the rows or columns that one served for."""
    axes = tuple(axis for axis in (0, 1) if shape[axis] == 1 and values.shape[axis] > 1)
    least: FloatArray = values.min(axis=axes, keepdims=True) if axes else values
    return least


def _least(table: Table, weights: Weights) -> FloatArray:
    """The least weighted cost of every cell, infinite where it has no point."""
    loops = kernels(0)
    if loops is not None:
        cells: FloatArray = loops.least(table.starts, table.memory_bytes, table.time_ns, *weights)
    else:
        cells = np.full(table.rows * table.columns, np.inf)
        filled = np.flatnonzero(table.counts.ravel())
        cells[filled] = np.minimum.reduceat(weighed(table, weights), table.starts[:-1][filled])
    return cells.reshape(table.rows, table.columns)


def _cheapest(table: Table, cell: int, weights: Weights) -> int:
    points: IntArray = np.arange(table.starts[cell], table.starts[cell + 1])
    costs = weights[0] * table.memory_bytes[points] + weights[1] * table.time_ns[points]
    return int(points[np.argmin(costs)])


@dataclass(frozen=True, slots=True)
class Solved:
    """A strategy that is best for some weights; ``at`` says where it was found."""

    memory_bytes: int
    time_ns: int
    at: Weights


@dataclass(frozen=True, slots=True)
class Gap:
    """Two neighbours, and a line that every strategy between them is on or above: weights . (memory, time) >= least."""

    left: Solved
    right: Solved
    weights: Weights
    least: float

    @property
    def factor(self) -> float:
        """By how much a strategy between the two can beat both: the one in time, the other in memory.

        At memory m it beats the left one in time by at most ``left.time / line(m)``, which rises with m, and the right
        one in memory by ``right.memory / m``, which falls; the larger of both has its least where they meet.
        """
        low, high = float(self.left.memory_bytes), float(self.right.memory_bytes)
        for _ in range(60):
            middle = (low + high) / 2
            if self._faster(middle) < self.right.memory_bytes / max(middle, 1.0):
                low = middle
            else:
                high = middle
        return min(self._faster(high), self.right.memory_bytes / max(low, 1.0))

    def _faster(self, memory: float) -> float:
        line = (self.least - self.weights[0] * memory) / self.weights[1] if self.weights[1] else 0.0
        return self.left.time_ns / max(line, float(self.right.time_ns), 1.0)


def hull_of(
    solve: Callable[[Weights], Solved | None], ends: tuple[Solved, Solved], within: float, most: int
) -> list[Gap]:
    """The gaps between neighbours on the hull, by ascending memory, from its leanest to its fastest strategy.

    ``solve`` finds a strategy of least weighted cost, or none where there is no more time. No gap has a factor above
    1 + ``within``, unless time or ``most`` weightings were not enough, or a gap has nothing on its line but its ends:
    those are left as they are.
    """
    open_, closed = [_entry(Gap(*ends, (1.0, 0.0), 0.0))], []
    for _ in range(most - len(ends)):
        if not open_ or -open_[0][0] <= 1 + within:
            break
        gap = open_[0][-1]
        middle = solve(level(gap.left, gap.right))
        if middle is None:
            break
        heapq.heappop(open_)
        least = _cost(middle.at, middle)
        if least >= _cost(middle.at, gap.left) * (1 - RELAXED):
            closed.append(Gap(gap.left, gap.right, middle.at, least))
            continue
        for pair in ((gap.left, middle), (middle, gap.right)):
            heapq.heappush(open_, _entry(Gap(*pair, middle.at, least)))
    gaps = [*closed, *(entry[-1] for entry in open_)]
    return sorted(gaps, key=lambda gap: (gap.left.memory_bytes, gap.right.memory_bytes))


Entry = tuple[float, int, int, Gap]


def _entry(gap: Gap) -> Entry:
    return (-gap.factor, gap.left.memory_bytes, gap.right.memory_bytes, gap)


def level(left: Solved, right: Solved) -> Weights:
    """The weights in which two strategies are equal, the larger one 1."""
    memory, time = float(left.time_ns - right.time_ns), float(right.memory_bytes - left.memory_bytes)
    largest = max(memory, time, 1e-300)
    return memory / largest, time / largest


def _cost(weights: Weights, solved: Solved) -> float:
    return weights[0] * solved.memory_bytes + weights[1] * solved.time_ns


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

    def of(self, root: Expression) -> Weighing:
        """The same weights for fewer configurations, of which the rest is made; the strategy stays what bounds them."""
        return replace(self, rest=outside(root, inside(root, self.solved.at)))


@dataclass(frozen=True, slots=True)
class Corner:
    """Weightings, and the most that a useful strategy costs in each; the last is that of the gap's line."""

    weighings: tuple[Weighing, ...]
    most: tuple[float, ...]

    def lower(self, most: float) -> Corner:
        """With another limit in the weights of the line."""
        return replace(self, most=(*self.most[:-1], most))

    def under(self, key: int, table: Table, cells: IntArray, points: IntArray) -> IntArray:
        """Those of some points of a part's table that can be under the corner in all of its weightings."""
        for weighing, most in zip(self.weighings, self.most, strict=True):
            cost = weighing.cost(table.memory_bytes[points], table.time_ns[points])
            points = points[cost + weighing.rest[key].ravel()[cells[points]] <= most * (1 + RELAXED)]
        return points


@dataclass(frozen=True, slots=True)
class Bounds:
    """The corners of a whole expression."""

    corners: tuple[Corner, ...]

    def useful(self, key: int, table: Table) -> BoolArray:
        """Which points of the table of the parts with this key may be in a strategy of the frontier, [P]."""
        loops = kernels(0)
        if loops is not None:
            each = [pair for corner in self.corners for pair in zip(corner.weighings, corner.most, strict=True)]
            limits = np.array([(*weighing.solved.at, most * (1 + RELAXED)) for weighing, most in each])
            rests = np.array([weighing.rest[key].ravel() for weighing, _ in each])
            points = table.starts, table.memory_bytes, table.time_ns
            found: BoolArray = loops.under(*points, limits, rests, len(self.corners[0].weighings))
            return found
        useful = np.zeros(table.num_points, dtype=bool)
        for corner in self.corners:
            useful[corner.under(key, table, table.cells, np.flatnonzero(~useful))] = True
        return useful

    def limit(self, key: int) -> PointLimit | None:
        """What of such a table is worth making, where one line says it."""
        if len(self.corners) > 1:
            return None
        weighing, most = self.corners[0].weighings[-1], self.corners[0].most[-1]
        return PointLimit(weighing.solved.at, most * (1 + RELAXED) - weighing.rest[key])


def bounds_of(root: Expression, num_weightings: int) -> Bounds:
    """Bounds from at most ``num_weightings``, of which the first two are least memory and least time."""
    ends = ends_of(root)
    known: dict[Weights, Weighing] = {each.solved.at: each for each in ends}

    def solve(weights: Weights) -> Solved:
        known[weights] = weighing(root, weights)
        return known[weights].solved

    gaps = hull_of(solve, (ends[0].solved, ends[1].solved), 0.0, num_weightings)
    return Bounds(tuple(corner_of(gap, ends, known.get(gap.weights, ends[1])) for gap in gaps))


def ends_of(root: Expression) -> tuple[Weighing, Weighing]:
    """The strategies of least memory and of least time, and of those with as much the best in the other."""
    leanest, quickest = end_weights(root)
    return weighing(root, leanest), weighing(root, quickest)


def end_weights(root: Expression) -> tuple[Weights, Weights]:
    """The weights in which they are best."""
    tables = [part.given for part in in_order(root) if part.given is not None and part.given.num_points]
    most = float(sum(int(table.memory_bytes.max()) + int(table.time_ns.max()) for table in tables))
    return (1.0, 1 / (most + 1)), (1 / (most + 1), 1.0)


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
    values, taken = cheapest(root, weights)
    return Weighing(solved(taken, weights), outside(root, values))


def cheapest(root: Expression, weights: Weights) -> tuple[dict[int, FloatArray], dict[Expression, int]]:
    """What is :func:`inside` in these weights, and the :func:`optimum`.

    Raises:
        ValueError: the whole has no strategy.
    """
    values = inside(root, weights)
    if np.isinf(values[root.key]).all():
        raise ValueError("no strategy: configurations allowed for each operator and tensor do not fit together")
    return values, optimum(root, values, weights)


def solved(taken: Mapping[Expression, int], weights: Weights) -> Solved:
    """The strategy of these points of the given tables, best for these weights."""
    tables = [(part.given, point) for part, point in taken.items()]
    memory = sum(int(table.memory_bytes[point]) for table, point in tables if table)
    time = sum(int(table.time_ns[point]) for table, point in tables if table)
    return Solved(memory, time, weights)
