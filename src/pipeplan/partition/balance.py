"""The exact balanced split of a chain into contiguous stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

__all__ = ["Cost", "Fits", "balanced_split", "least_split"]

Cost = Callable[[int, int, int], int]
"""(stage, begin, end) -> what blocks begin..end-1 cost as that stage: not negative, and not less for more blocks."""

Fits = Callable[[int, int, int], bool]
"""(stage, begin, end) -> whether blocks begin..end-1 fit as that stage; fewer of them fit if all do."""

_IMPOSSIBLE = float("inf")


def balanced_split(times: Sequence[int], num_stages: int, fits: Fits | None = None) -> tuple[int, ...] | None:
    """First block of each stage, for the split of a chain that minimises the longest stage.

    ``times`` [block] in ns. Among the splits with the least longest stage, one with the least sum of squares of the
    stages' times is taken. None if no split fits.
    """
    sums = [0, *accumulate(times)]
    return least_split(lambda _, begin, end: sums[end] - sums[begin], len(times), num_stages, fits)


def least_split(cost: Cost, num_blocks: int, num_stages: int, fits: Fits | None = None) -> tuple[int, ...] | None:
    """First block of each stage, for the split that minimises the dearest stage, then the sum of squared costs.

    Every stage has at least one block; of equal splits always the same one is taken. None if no split fits.

    A min-max dynamic programme over (stages, blocks), twice: for the dearest stage, then for the squares under it.
    Ranges are tried from short to long and given up as soon as they cost too much or do not fit, so that 400 blocks
    and 32 stages take a fraction of a second.
    """
    dearest = _table(cost, num_blocks, num_stages, fits, _IMPOSSIBLE, max)
    bottleneck = dearest[num_stages][num_blocks][0]
    if bottleneck == _IMPOSSIBLE:
        return None
    squares = _table(cost, num_blocks, num_stages, fits, bottleneck, lambda before, price: before + price * price)
    begins, end = [], num_blocks
    for stage in range(num_stages, 0, -1):
        end = squares[stage][end][1]
        begins.append(end)
    return tuple(reversed(begins))


def _table(
    cost: Cost,
    num_blocks: int,
    num_stages: int,
    fits: Fits | None,
    most: float,
    join: Callable[[float, int], float],
) -> list[list[tuple[float, int]]]:
    """[stages][blocks] (least value of the first blocks in so many stages, where the last stage begins).

    Entries of integers stay integers, however large; only what is impossible is a float.
    """
    table = [[(_IMPOSSIBLE, 0)] * (num_blocks + 1) for _ in range(num_stages + 1)]
    table[0][0] = (0, 0)
    for stage in range(1, num_stages + 1):
        before = table[stage - 1]
        for end in range(num_blocks if stage == num_stages else stage, num_blocks - (num_stages - stage) + 1):
            best = (_IMPOSSIBLE, 0)
            for begin in range(end - 1 if stage > 1 else 0, stage - 2, -1):
                price = cost(stage - 1, begin, end)
                if price > most or join(0, price) >= best[0] or not (fits is None or fits(stage - 1, begin, end)):
                    break
                value = join(before[begin][0], price)
                if value < best[0]:
                    best = (value, begin)
            table[stage][end] = best
    return table
