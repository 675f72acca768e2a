"""The exact balanced split of a chain into contiguous stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.partition.chain import Array

__all__ = ["MOST_RANGES", "Cost", "Fits", "balanced_split", "least_split"]

Cost = Callable[[int, Array, Array], Array]
"""(kind of stage, begins, ends) -> what blocks begin..end-1 cost as such a stage, for many ranges at once: not
negative, and not less for more blocks."""

Fits = Callable[[int, Array, Array], NDArray[np.bool_]]
"""(kind of stage, begins, ends) -> whether blocks begin..end-1 fit as such a stage; fewer of them fit if all do."""

_Values = NDArray[Any]
"""Integers of 64 bits, or of any size where these are too short: never floats."""

MOST_RANGES = 2**20
"""Ranges looked at together, which bounds memory."""


def balanced_split(
    times: Sequence[int], num_stages: int, fits: Callable[[int, int, int], bool] | None = None
) -> tuple[int, ...] | None:
    """First block of each stage, for the split of a chain that minimises the longest stage.

    ``times`` [block] in ns; ``fits`` (stage, begin, end) says whether blocks begin..end-1 do as that stage. Among the
    splits with the least longest stage, one with the least sum of squares of the stages' times is taken. None if no
    split fits.
    """
    sums = np.array([0, *accumulate(times)])

    def cost(kind: int, begins: Array, ends: Array) -> Array:
        times_of: Array = sums[ends] - sums[begins]
        return times_of

    if fits is None:
        return least_split(cost, len(times), [0] * num_stages)
    one_by_one = np.vectorize(fits, otypes=[bool])
    return least_split(cost, len(times), range(num_stages), one_by_one)


def least_split(cost: Cost, num_blocks: int, kinds: Sequence[int], fits: Fits | None = None) -> tuple[int, ...] | None:
    """First block of each stage, for the split that minimises the dearest stage, then the sum of squared costs.

    ``kinds`` [stage] says which stages cost and hold the same; they count from 0. Every stage has at least one block;
    of equal splits always the same one is taken. None if no split fits.

    A min-max dynamic programme over (stages, blocks), twice: for the dearest stage, then for the squares under it.
    Of the ranges that end at a block only those are looked at that fit and cost no more than a bound, which is first
    halved for as long as that leaves a split.
    """
    ends = np.arange(1, num_blocks + 1)
    fitting = [np.zeros_like(ends) for _ in range(max(kinds) + 1)]
    if fits is not None:
        fitting = [_least(partial(fits, kind), ends, known) for kind, known in enumerate(fitting)]

    def cheap(most: int, kind: int, begins: Array, ends: Array) -> NDArray[np.bool_]:
        return cost(kind, begins, ends) <= most

    def within(most: int) -> list[Array]:
        """[kind][end - 1] the first block of the longest range that fits and costs no more."""
        return [_least(partial(cheap, most, kind), ends, known) for kind, known in enumerate(fitting)]

    if num_blocks < len(kinds) or not _leads_through(fitting, kinds):
        return None
    most = max(int(cost(kind, np.array([0]), ends[-1:])[0]) for kind in range(len(fitting)))
    while most and _leads_through(within(most // 2), kinds):
        most //= 2
    most, _ = _best(cost, within(most), kinds, most, lambda before, price: np.maximum(before, price))
    return _best(cost, within(most), kinds, len(kinds) * most**2, lambda before, price: before + price * price)[1]


def _least(holds: Callable[[Array, Array], NDArray[np.bool_]], ends: Array, known: Array) -> Array:
    """[end] the least begin, from what is ``known`` on, for which that holds; the end itself if it holds for none.

    What holds for blocks holds for fewer of them, so that bisection finds it.
    """
    low, high = known.copy(), ends.copy()
    while (open_ := low < high).any():
        middle = np.minimum((low + high) // 2, ends - 1)
        right = holds(middle, ends)
        high, low = np.where(open_ & right, middle, high), np.where(open_ & ~right, middle + 1, low)
    return high


def _leads_through(firsts: Sequence[Array], kinds: Sequence[int]) -> bool:
    """Whether stages of these kinds can have all blocks, if ranges begin at ``firsts`` [kind][end - 1] at the least."""
    reached = np.zeros(len(firsts[0]) + 1, dtype=np.int64)
    reached[0] = 1
    for kind in kinds:
        before = np.concatenate(([0], np.cumsum(reached)))
        reached = np.concatenate(([0], before[1:-1] > before[firsts[kind]]))
    return bool(reached[-1])


def _best(
    cost: Cost,
    firsts: Sequence[Array],
    kinds: Sequence[int],
    most: int,
    join: Callable[[_Values, _Values], _Values],
) -> tuple[int, tuple[int, ...]]:
    """The least value of a split, which is ``most`` at the most, and the first block of each of its stages.

    ``join`` adds a stage's cost to what those before it amount to.
    """
    num_blocks, none = len(firsts[0]), most + 1
    values: _Values = np.full(num_blocks + 1, none, dtype=np.int64 if none < 2**61 else object)
    values[0] = 0
    chosen = []
    for kind in kinds:
        ends = np.arange(1, num_blocks + 1)
        parts = np.array_split(ends, 1 + num_blocks * int((ends - firsts[kind]).max()) // MOST_RANGES)
        rows = [_row(partial(cost, kind), firsts[kind], values, part, none, join) for part in parts]
        values, begins = (np.concatenate(column) for column in zip(([none], [0]), *rows, strict=True))
        chosen.append(begins)
    end, found = num_blocks, []
    for begins in reversed(chosen):
        end = int(begins[end])
        found.append(end)
    return int(values[-1]), tuple(reversed(found))


def _row(
    cost: Callable[[Array, Array], Array],
    firsts: Array,
    before: _Values,
    ends: Array,
    none: int,
    join: Callable[[_Values, _Values], _Values],
) -> tuple[_Values, Array]:
    """([end] the least value with one stage more, or more than can be; [end] where that stage begins: late if equal).

    ``firsts`` [end - 1], ``before`` [begin].
    """
    ends, firsts = ends[:, None], firsts[ends - 1, None]
    begins = ends - 1 - np.arange(max(1, (ends - firsts).max()))
    inside = begins >= firsts
    begins = np.maximum(begins, 0)
    prices = cost(begins, ends).astype(before.dtype)
    joined = np.where(inside, join(before[begins], prices), none)
    best = joined.argmin(axis=1)[:, None]
    return np.take_along_axis(joined, best, 1)[:, 0], np.take_along_axis(begins, best, 1)[:, 0]
