"""The loops of frontier tracking compiled: sums of frontiers, and of least costs, without ever storing them.

Imported only by :mod:`pipeplan.sharding.compiled`, since importing and compiling take longer than small frontiers.

Most sums of two frontiers are dominated by others. So those of a cell are gone through twice. First each leaves its
time in the bucket of its memory, if it is the least there. A sum of the second round is of use only if no bucket of
less memory has a time as short, and nothing in its own is at most as large in both. Neighbours of a frontier are added
to a point of the other one in blocks: where a bucket before all of a block's sums has a time shorter than all of
theirs, or all cost too much, none is made. What is left, little more than the frontier, is sorted and reduced as
:func:`pipeplan.sharding.table.reduce_points` does, so that of equal sums the same one stays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import float64, int64, njit, types

from pipeplan.sharding.table import BoolArray, FloatArray, IntArray

_NEVER = np.int64(2**62)
_MANY_BUCKETS, _MOST_BUCKETS = 1 << 13, 1 << 16
"""Of a cell with few sums there are two of each sum, up to many; of one with more, one for each ``_SUMS``."""
_SUMS = 16
_BLOCK = 4
"""Neighbours of a frontier that are passed over together where the first's memory and the last's time are too much."""

_Ints, _Floats = int64[::1], float64[::1]
_Side = types.Tuple((_Ints, _Ints, _Ints, _Ints, _Ints, _Floats, _Floats, _Floats, _Ints, _Floats))
Side = tuple[npt.NDArray[Any], ...]


@njit([types.int64[:, ::1](types.int64[:, ::1])], cache=True, nogil=True)
def _larger(points: IntArray) -> IntArray:
    """With room for as many points again."""
    larger = np.empty((2 * points.shape[0], 4), np.int64)
    larger[: points.shape[0]] = points
    return larger


@njit([_Ints(types.int64[:, ::1], int64)], cache=True, nogil=True)
def _by_memory(points: IntArray, size: int) -> IntArray:
    """The order of the first points by memory, equal ones as they are: merge sort from runs of eight."""
    memory, order = points[:, 0], np.arange(size)
    for begin in range(0, size, 8):
        for at in range(begin + 1, min(begin + 8, size)):
            one, place = order[at], at
            while place > begin and memory[order[place - 1]] > memory[one]:
                order[place] = order[place - 1]
                place -= 1
            order[place] = one
    width, other = 8, np.empty(size, np.int64)
    while width < size:
        for begin in range(0, size, 2 * width):
            middle, end = min(begin + width, size), min(begin + 2 * width, size)
            low, high = begin, middle
            for at in range(begin, end):
                if high >= end or (low < middle and memory[order[low]] <= memory[order[high]]):
                    other[at] = order[low]
                    low += 1
                else:
                    other[at] = order[high]
                    high += 1
        order, other = other, order
        width *= 2
    return order


@njit([types.void(_Ints, _Ints, int64)], cache=True, nogil=True)
def _climb(best: IntArray, stairs: IntArray, size: int) -> None:
    """The least time of all buckets before each."""
    fewest = _NEVER
    for at in range(size):
        stairs[at] = fewest
        fewest = min(fewest, best[at])


@njit([types.boolean(_Ints, _Ints, int64, _Floats, _Floats)], cache=True, nogil=True)
def _sooner(one: IntArray, other: IntArray, turned: int, ranks: FloatArray, inner_ranks: FloatArray) -> bool:
    """Whether of two equal sums the one is made of points that are ranked before the other's."""
    for side in (turned, 1 - turned):
        of = inner_ranks if side else ranks
        a, b = one[2 + side], other[2 + side]
        if of[a] != of[b]:
            return bool(of[a] < of[b])
        if a != b:
            return bool(a < b)
    return False


@njit(
    [types.Tuple((_Ints, _Ints, _Floats, _Floats, _Floats, _Ints, _Floats))(_Ints, _Ints, _Ints, float64, float64)],
    cache=True,
    nogil=True,
)
def sorted_cells(starts: IntArray, memory: IntArray, time: IntArray, of_memory: float, of_time: float) -> Side:
    """What the loop over sums asks of a table besides its points, with what a byte and a nanosecond count for.

    The least and the largest memory of every cell, and its least cost; the cost of every point; what it is ranked by
    where sums are equal; and the cells' points in blocks: the first block of every cell, and the least cost of each.
    """
    cells, points = len(starts) - 1, len(memory)
    lows, highs, least = np.zeros(cells, np.int64), np.zeros(cells, np.int64), np.full(cells, np.inf)
    blocks = np.zeros(cells + 1, np.int64)
    costs, ranks = np.zeros(points), np.zeros(points)
    lowest, highest = np.inf, -np.inf
    for point in range(points):
        costs[point] = of_memory * memory[point] + of_time * time[point]
        lowest, highest = min(lowest, costs[point]), max(highest, costs[point])
    span = highest - lowest + 1.0
    for cell in range(cells):
        begin, end = starts[cell], starts[cell + 1]
        blocks[cell + 1] = blocks[cell] + (end - begin + _BLOCK - 1) // _BLOCK
        if begin < end:
            lows[cell], highs[cell] = memory[begin], memory[end - 1]
        for point in range(begin, end):
            ranks[point] = cell * span + (costs[point] - lowest)
    of_blocks = np.full(blocks[cells], np.inf)
    for cell in range(cells):
        begin = starts[cell]
        for point in range(begin, starts[cell + 1]):
            block = blocks[cell] + (point - begin) // _BLOCK
            of_blocks[block] = min(of_blocks[block], costs[point])
            least[cell] = min(least[cell], costs[point])
    return lows, highs, least, costs, ranks, blocks, of_blocks


@njit(
    [types.Tuple((_Ints, types.int64[:, ::1], int64))(types.UniTuple(int64, 4), _Ints, _Side, _Side, _Floats, _Ints)],
    cache=True,
    nogil=True,
)
def frontiers(
    shape: tuple[int, int, int, int], strides: IntArray, outer: Side, inner: Side, most: FloatArray, stop: IntArray
) -> tuple[IntArray, IntArray, int]:
    """The frontiers of cells ``shape[0]`` to ``shape[1]`` of sums over a middle, each cell's number row by row.

    ``shape[2]`` are the columns, and ``strides`` says how many values the middle has, and by how many cells of the
    outer table a row, a column and a middle are apart, and of the inner one. A side is (starts, memory, time), followed
    by what :func:`sorted_cells` says. A pair is wanted whose costs add up to at most ``most`` of its cell. Of equal
    sums that of the least ranked point of the left table stays, which is the outer one unless ``shape[3]``, and of
    these that of the least ranked one of the right table.

    Returns the number of points of each cell, [P, 4] their memory, time, outer and inner point, and whether it went to
    the end: it does not once ``stop`` is set.
    """
    first, last, columns, turned = shape
    starts, memory, time, lows, highs, least, costs, ranks, _, _ = outer
    other_starts, other_memory, other_time, other_lows, other_highs, other_least = inner[:6]
    other_costs, other_ranks, blocks, of_blocks = inner[6:]
    counts = np.zeros(last - first, np.int64)
    made, size = np.empty((1024, 4), np.int64), 0
    some = np.empty((1024, 4), np.int64)
    best, best_memory = np.empty(_MOST_BUCKETS, np.int64), np.empty(_MOST_BUCKETS, np.int64)
    stairs = np.empty(_MOST_BUCKETS, np.int64)
    for cell in range(first, last):
        row, column = cell // columns, cell % columns
        limit = most[cell]
        low, high, wanted = _NEVER, -_NEVER, 0
        for middle in range(strides[0]):
            one = row * strides[1] + column * strides[2] + middle * strides[3]
            two = row * strides[4] + column * strides[5] + middle * strides[6]
            if not least[one] + other_least[two] <= limit:
                continue
            low = min(low, lows[one] + other_lows[two])
            high = max(high, highs[one] + other_highs[two])
            num = other_starts[two + 1] - other_starts[two]
            for a in range(starts[one], starts[one + 1]):
                if wanted >= _MOST_BUCKETS * _SUMS:
                    break
                if costs[a] + other_least[two] <= limit:
                    wanted += num
        if not wanted:
            continue
        num_buckets = 1
        while num_buckets < min(_MOST_BUCKETS, 2 * wanted, max(_MANY_BUCKETS, wanted // _SUMS)):
            num_buckets *= 2
        shift = 0
        while (high - low) >> shift >= num_buckets:
            shift += 1
        best[:num_buckets] = _NEVER
        best_memory[:num_buckets] = _NEVER
        stairs[:num_buckets] = _NEVER
        found, seen, again = 0, 0, num_buckets
        for second in range(2):
            for middle in range(strides[0]):
                one = row * strides[1] + column * strides[2] + middle * strides[3]
                two = row * strides[4] + column * strides[5] + middle * strides[6]
                if not least[one] + other_least[two] <= limit:
                    continue
                begin, end = other_starts[two], other_starts[two + 1]
                for a in range(starts[one], starts[one + 1]):
                    rest = limit - costs[a]
                    if not other_least[two] <= rest:
                        continue
                    if stop[0]:
                        return counts, made[:0], 0
                    m_a, t_a = memory[a] - low, time[a]
                    if not second and seen >= again:
                        again = 4 * seen
                        _climb(best, stairs, num_buckets)
                    for block in range(blocks[two], blocks[two + 1]):
                        start = begin + (block - blocks[two]) * _BLOCK
                        finish = min(start + _BLOCK, end)
                        if of_blocks[block] > rest:
                            continue
                        if stairs[(m_a + other_memory[start]) >> shift] <= t_a + other_time[finish - 1]:
                            continue
                        seen += finish - start
                        for b in range(start, finish):
                            if other_costs[b] > rest:
                                continue
                            m, t = m_a + other_memory[b], t_a + other_time[b]
                            at = m >> shift
                            if not second:
                                if t <= best[at] and (t < best[at] or m < best_memory[at]):
                                    best[at] = t
                                    best_memory[at] = m
                            elif t < stairs[at] and m <= best_memory[at]:
                                if found == some.shape[0]:
                                    some = _larger(some)
                                some[found, 0], some[found, 1], some[found, 2], some[found, 3] = m, t, a, b
                                found += 1
            if not second:
                _climb(best, stairs, num_buckets)
        before, fewest = size, _NEVER
        for at in _by_memory(some, found):
            m, t = some[at, 0] + low, some[at, 1]
            same = size > before and made[size - 1, 0] == m
            if t > fewest or (t == fewest and not same):
                continue
            if same and t == fewest and not _sooner(some[at], made[size - 1], turned, ranks, other_ranks):
                continue
            fewest = t
            if same:
                size -= 1
            if size == made.shape[0]:
                made = _larger(made)
            made[size] = some[at]
            made[size, 0] = m
            size += 1
        counts[cell - first] = size - before
    return counts, made[:size], 1


@njit([_Floats(_Ints, _Ints, _Ints, float64, float64)], cache=True, nogil=True)
def least(starts: IntArray, memory: IntArray, time: IntArray, of_memory: float, of_time: float) -> FloatArray:
    """The least weighted cost of every cell, infinite where it has no point."""
    costs = np.full(len(starts) - 1, np.inf)
    for cell in range(len(starts) - 1):
        for point in range(starts[cell], starts[cell + 1]):
            costs[cell] = min(costs[cell], of_memory * memory[point] + of_time * time[point])
    return costs


@njit(
    [types.boolean[::1](_Ints, _Ints, _Ints, types.float64[:, ::1], types.float64[:, ::1], int64)],
    cache=True,
    nogil=True,
)
def under(
    starts: IntArray, memory: IntArray, time: IntArray, limits: FloatArray, rests: FloatArray, together: int
) -> BoolArray:
    """Which points are under some corner: what they cost and their cell's rest is at most a limit in all its weights.

    ``limits`` are [W, 3]: what a byte and a nanosecond count for, and the limit; ``rests`` [W, cells]. So many weights
    ``together`` are a corner's.
    """
    found = np.zeros(len(memory), np.bool_)
    for cell in range(len(starts) - 1):
        for point in range(starts[cell], starts[cell + 1]):
            for corner in range(0, len(limits), together):
                inside = True
                for at in range(corner, corner + together):
                    cost = limits[at, 0] * memory[point] + limits[at, 1] * time[point]
                    if not cost + rests[at, cell] <= limits[at, 2]:
                        inside = False
                        break
                if inside:
                    found[point] = True
                    break
    return found


@njit([float64[:, ::1](float64[:, ::1], float64[:, ::1])], cache=True, nogil=True)
def min_plus(left: FloatArray, right: FloatArray) -> FloatArray:
    """min over m of left[r, m] + right[m, c]."""
    result = np.full((left.shape[0], right.shape[1]), np.inf)
    for row in range(left.shape[0]):
        for middle in range(left.shape[1]):
            cost = left[row, middle]
            if cost == np.inf:
                continue
            for column in range(right.shape[1]):
                total = cost + right[middle, column]
                if total < result[row, column]:
                    result[row, column] = total
    return result
