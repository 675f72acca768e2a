"""The exact balanced split of a chain into contiguous stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

__all__ = ["balanced_split"]

Fits = Callable[[int, int, int], bool]
"""(stage, begin, end) -> whether blocks begin..end-1 fit as that stage; shorter ranges fit if longer ones do."""

_IMPOSSIBLE = float("inf")


def balanced_split(times: Sequence[int], num_stages: int, fits: Fits | None = None) -> tuple[int, ...] | None:
    """First block of each stage, for the split of a chain that minimises the longest stage.

    ``times`` [block] in ns; every stage has at least one block. Among the splits with the least longest stage, one
    with the least sum of squares of the stages' times is taken. None if no split fits.

    A min-max dynamic programme over (stages, blocks), twice: for the longest stage, then for the squares under it.
    Ranges are tried from short to long and given up as soon as they are too long or do not fit.
    """
    sums = [0, *accumulate(times)]
    longest = _table(sums, num_stages, fits, _IMPOSSIBLE, max)
    bottleneck = longest[num_stages][len(times)][0]
    if bottleneck == _IMPOSSIBLE:
        return None
    squares = _table(sums, num_stages, fits, bottleneck, lambda before, time: before + time * time)
    begins, end = [], len(times)
    for stage in range(num_stages, 0, -1):
        end = squares[stage][end][1]
        begins.append(end)
    return tuple(reversed(begins))


def _table(
    sums: Sequence[int],
    num_stages: int,
    fits: Fits | None,
    longest_allowed: float,
    join: Callable[[float, float], float],
) -> list[list[tuple[float, int]]]:
    """[stages][blocks] (least value of the first blocks in so many stages, where the last stage begins)."""
    count = len(sums) - 1
    table = [[(_IMPOSSIBLE, 0)] * (count + 1) for _ in range(num_stages + 1)]
    table[0][0] = (0, 0)
    for stage in range(1, num_stages + 1):
        before = table[stage - 1]
        for end in range(stage, count - (num_stages - stage) + 1):
            best = (_IMPOSSIBLE, 0)
            for begin in range(end - 1, stage - 2, -1):
                time = sums[end] - sums[begin]
                if time > longest_allowed or join(0, time) >= best[0]:
                    break
                if fits is not None and not fits(stage - 1, begin, end):
                    break
                value = join(before[begin][0], time)
                if value < best[0]:
                    best = (value, begin)
            table[stage][end] = best
    return table
