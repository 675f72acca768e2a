"""The loops of frontier tracking compiled: sums of frontiers, and of least costs, without ever storing them.

Imported only by :mod:`pipeplan.sharding.compiled`, since importing and compiling take longer than small frontiers.

Most sums of two frontiers are dominated by others. So those of a cell are gone through twice. First each leaves its
time in the bucket of its memory, if it is the least there. A sum of the second round is of use only if no bucket of
less memory has a time as short, and nothing in its own is at most as large in both. What is left, little more than the
frontier, is sorted and reduced as :func:`pipeplan.sharding.table.reduce_points` does, so that of equal sums the same
one stays.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, njit, types

from pipeplan.sharding.table import FloatArray, IntArray

_NEVER = np.int64(2**62)
_MOST_BUCKETS = 1 << 14
"""Of a cell, else two of each of its sums."""

_Ints, _Floats = int64[::1], float64[::1]
_Side = types.UniTuple(_Ints, 5)


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


@njit(
    [
        types.Tuple((_Ints, types.int64[:, ::1], int64))(
            types.UniTuple(int64, 3), _Ints, _Side, _Floats, _Side, _Floats, _Floats, _Ints
        )
    ],
    cache=True,
    nogil=True,
)
def frontiers(
    shape: tuple[int, int, int],
    strides: IntArray,
    left: tuple[IntArray, ...],
    left_costs: FloatArray,
    right: tuple[IntArray, ...],
    right_costs: FloatArray,
    most: FloatArray,
    stop: IntArray,
) -> tuple[IntArray, IntArray, int]:
    """The frontiers of cells ``shape[0]`` to ``shape[1]`` of sums over a middle, each cell's number row by row.

    ``shape[2]`` are the columns, and ``strides`` says how many values the middle has, and by how many cells of the left
    table a row, a column and a middle are apart, and of the right one. A side is (starts, memory, time, least and
    largest memory of its cells), with the points of each cell by ascending cost. A pair is wanted whose costs add up to
    at most ``most`` of its cell.

    Returns the number of points of each cell, [P, 4] their memory, time, left and right point, and whether it went to
    the end: it does not once ``stop`` is set.
    """
    first, last, columns = shape
    starts, memory, time, lows, highs = left
    other_starts, other_memory, other_time, other_lows, other_highs = right
    counts = np.zeros(last - first, np.int64)
    made, size = np.empty((1024, 4), np.int64), 0
    some = np.empty((1024, 4), np.int64)
    best, best_memory = np.empty(_MOST_BUCKETS, np.int64), np.empty(_MOST_BUCKETS, np.int64)
    for cell in range(first, last):
        row, column = cell // columns, cell % columns
        limit = most[cell]
        low, high, wanted = _NEVER, -_NEVER, 0
        for middle in range(strides[0]):
            one = row * strides[1] + column * strides[2] + middle * strides[3]
            two = row * strides[4] + column * strides[5] + middle * strides[6]
            begin, end = other_starts[two], other_starts[two + 1]
            for a in range(starts[one], starts[one + 1]):
                rest = limit - left_costs[a]
                while end > begin and right_costs[end - 1] > rest:
                    end -= 1
                if end == begin:
                    break
                wanted += end - begin
                low = min(low, lows[one] + other_lows[two])
                high = max(high, highs[one] + other_highs[two])
        if not wanted:
            continue
        num_buckets = 1
        while num_buckets < min(_MOST_BUCKETS, 2 * wanted):
            num_buckets *= 2
        shift = 0
        while (high - low) >> shift >= num_buckets:
            shift += 1
        best[:num_buckets] = _NEVER
        best_memory[:num_buckets] = _NEVER
        found = 0
        for second in range(2):
            for middle in range(strides[0]):
                one = row * strides[1] + column * strides[2] + middle * strides[3]
                two = row * strides[4] + column * strides[5] + middle * strides[6]
                begin, end = other_starts[two], other_starts[two + 1]
                for a in range(starts[one], starts[one + 1]):
                    rest = limit - left_costs[a]
                    while end > begin and right_costs[end - 1] > rest:
                        end -= 1
                    if end == begin:
                        break
                    if stop[0]:
                        return counts, made[:0], 0
                    m_a, t_a = memory[a] - low, time[a]
                    if not second:
                        for b in range(begin, end):
                            m, t = m_a + other_memory[b], t_a + other_time[b]
                            at = m >> shift
                            if t <= best[at] and (t < best[at] or m < best_memory[at]):
                                best[at] = t
                                best_memory[at] = m
                        continue
                    for b in range(begin, end):
                        m, t = m_a + other_memory[b], t_a + other_time[b]
                        at = m >> shift
                        if t < best[at] and m <= best_memory[at]:
                            if found == some.shape[0]:
                                some = _larger(some)
                            some[found, 0], some[found, 1], some[found, 2], some[found, 3] = m, t, a, b
                            found += 1
            if not second:
                fewest = _NEVER
                for at in range(num_buckets):  # from its own least time to that of all buckets before it
                    own = best[at]
                    best[at] = fewest
                    fewest = min(fewest, own)
        before, fewest = size, _NEVER
        for at in _by_memory(some, found):
            if some[at, 1] >= fewest:
                continue
            fewest = some[at, 1]
            if size > before and made[size - 1, 0] == some[at, 0] + low:
                size -= 1
            if size == made.shape[0]:
                made = _larger(made)
            made[size] = some[at]
            made[size, 0] += low
            size += 1
        counts[cell - first] = size - before
    return counts, made[:size], 1


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
