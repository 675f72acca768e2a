"""Expressions computed as plain minima of ``weights`` . (memory, time), and what each cell costs at best in the whole.

With weights the frontier's operations become sums and minima of numbers, so every cell of every table has two:
*inside*, the least of its own points, and *outside*, the least that all the rest adds when this cell is used. A point
of the cell can be in no strategy cheaper than itself plus the outside. Both are found by going through the expression
once forward and once backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeplan.frontier.expression import Expression, in_order
from pipeplan.frontier.parallel import spread
from pipeplan.frontier.table import FloatArray, IntArray, Table, Weights, weighed
from pipeplan.time_limit import checkpoint

__all__ = ["inside", "optimum", "outside"]

_SPREAD_SUMS = 1 << 20
"""Sums that are worth a thread of their own."""


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
        return _least(part.given, weighed(part.given, weights))
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
    rows = -(-left.shape[0] // max(1, min(left.shape[0], left.size * right.shape[1] // _SPREAD_SUMS)))
    right = np.ascontiguousarray(right)
    parts = [left[start : start + rows] for start in range(0, left.shape[0], rows)]
    if len(parts) == 1:
        return _of_rows(left, right)
    return np.concatenate(spread(lambda part: _of_rows(part, right), parts))


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


def _least(table: Table, values: FloatArray) -> FloatArray:
    """The least value of every cell, infinite where it has no point."""
    cells = np.full(table.rows * table.columns, np.inf)
    filled = np.flatnonzero(table.counts.ravel())
    cells[filled] = np.minimum.reduceat(values, table.starts[:-1][filled])
    return cells.reshape(table.rows, table.columns)


def _cheapest(table: Table, cell: int, weights: Weights) -> int:
    points: IntArray = np.arange(table.starts[cell], table.starts[cell + 1])
    costs = weights[0] * table.memory_bytes[points] + weights[1] * table.time_ns[points]
    return int(points[np.argmin(costs)])
