"""A chain cut into stages by dynamic programming, whatever a stage costs.

A *cut* is a place where a stage may end: number 0 is before all blocks, the last one after them. In the simplest case
cuts are the borders between blocks; they may as well be nested sets of blocks (Piper's downsets). A *layer* says for
every cut, and every number of devices, what the stages up to there amount to; one stage more makes the next layer.
Numbers are integers or, with ``inf`` for what cannot be, floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED
from pipeplan.partition.chain.costs import Array
from pipeplan.search_constants import CANDIDATES_AT_ONCE, MOST_RANGES
from pipeplan.time_limit import checked

Values = NDArray[Any]
"""Integers of 64 bits, or of any size where these are too short; floats only where costs are floats."""

Price = Callable[[Array, Array], Values]
"""(begins, ends) -> [way, ...] what a stage between these cuts costs, run in each of the ways a stage can run."""

Cost = Callable[[int, Array, Array], Array]
"""(kind of stage, begins, ends) -> what blocks begin..end-1 cost as such a stage, for many ranges at once: not
negative, and not less for more blocks."""

Fits = Callable[[int, Array, Array], NDArray[np.bool_]]
"""(kind of stage, begins, ends) -> whether blocks begin..end-1 fit as such a stage; fewer of them fit if all do."""


@dataclass(frozen=True, slots=True)
class Layer:
    """[devices, cut] the least value of stages up to a cut; where the last of them begins, and the way it runs.

    One row and one column more, the last ones, are for what cannot be.
    """

    values: Values
    begins: Array
    ways: Array


@dataclass(frozen=True, slots=True)
class Programme:
    """What all layers have in common.

    ``none`` is the value of what cannot be, larger than any that can; ``join`` adds a stage's cost to the value of
    the stages before it. ``devices`` [way] are those of a stage, out of ``num_devices``.

    ``candidates`` [cut, candidate] are the cuts where a stage that ends at a cut may begin, and -1 after them. Of
    equal stages the first candidate is taken, then its first way; with ``by_way`` the other way round.
    """

    num_cuts: int
    none: float
    join: Callable[[Values, Values], Values] = np.maximum
    devices: Sequence[int] = (0,)
    num_devices: int = 0
    by_way: bool = False
    left: Array = field(
        init=False, repr=False
    )  # [devices, way] those that stages before have; -1 is that of no devices

    def __post_init__(self) -> None:
        left = np.maximum(-1, np.arange(self.num_devices + 1)[:, None] - np.array(self.devices))
        object.__setattr__(self, "left", left)

    def start(self, num_devices: Sequence[int] = (0,)) -> Layer:
        """No stage yet, and how many devices may be left without one: 0 where all must have one."""
        layer = self._impossible()
        layer.values[list(num_devices), 0] = 0
        return layer

    def extended(self, before: Layer, price: Price, candidates: Array) -> Layer:
        """One stage more after ``before``."""
        after, count = self._impossible(), self.num_cuts - 1
        parts = 1 + count * candidates.shape[1] * len(self.devices) * (self.num_devices + 1) // MOST_RANGES
        for part in checked(range(parts), 1):
            ends = np.arange(1 + count * part // parts, 1 + count * (part + 1) // parts)
            if len(ends):
                self._fill(after, before.values, price, candidates, ends)
        return after

    def repeated(self, start: Layer, price: Price, candidates: Array) -> Layer:
        """Any number of stages, each with the same costs at any position: one layer for all of them."""
        for end in checked(range(1, self.num_cuts), 4):
            self._fill(start, start.values, price, candidates, np.array([end]))
        return start

    def _impossible(self) -> Layer:
        shape, kind = (self.num_devices + 2, self.num_cuts + 1), np.int64 if isinstance(self.none, int) else np.float64
        values = np.full(shape, self.none, dtype=object if kind is np.int64 and self.none >= 2**61 else kind)
        return Layer(values, np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64))

    def _fill(self, layer: Layer, before: Values, price: Price, candidates: Array, ends: Array) -> None:
        """The values of some cuts in a layer, after those ``before``."""
        begins = candidates[ends]
        if len(ends) < self.num_cuts - 1:
            begins = begins[:, : max(1, int((begins >= 0).sum(axis=1).max()))]
        prices = price(np.maximum(begins, 0), ends[:, None])
        prices = np.where(begins >= 0, prices, 0).astype(before.dtype, copy=False)  # others might overflow when squared
        joined = self.join(before[self.left].take(begins, axis=2), prices)  # [devices, way, end, candidate]
        joined = joined.transpose((0, 2, 1, 3) if self.by_way else (0, 2, 3, 1))
        flat = joined.reshape(len(self.left), len(ends), -1)
        chosen = flat.argmin(axis=2)
        if self.by_way:
            layer.ways[:-1, ends], chosen = np.divmod(chosen, begins.shape[1])
        elif len(self.devices) > 1:
            chosen, layer.ways[:-1, ends] = np.divmod(chosen, len(self.devices))
        layer.values[:-1, ends] = np.minimum(flat.min(axis=2), self.none)
        layer.begins[:-1, ends] = begins[np.arange(len(ends)), chosen]

    def traced(self, layers: Sequence[Layer], end: int) -> Iterator[tuple[int, int, int]]:
        """(begin, end, way) of each stage up to a cut on all devices, the last of them first."""
        devices = self.num_devices
        for layer in reversed(layers):
            if not end:
                return
            begin, way = int(layer.begins[devices, end]), int(layer.ways[devices, end])
            yield begin, end, way
            end, devices = begin, devices - self.devices[way]


def shortest_first(firsts: Array) -> Array:
    """Candidates, from the one next to each end back to ``firsts`` [cut]."""
    ends = np.arange(len(firsts))[:, None]
    back = 1 + np.arange(max(1, int((ends[:, 0] - firsts).max())))
    found = np.empty((len(firsts), len(back)), dtype=np.int64)
    few = CANDIDATES_AT_ONCE // len(back) + 1
    for at in checked(range(0, len(firsts), few), 1):
        begins = ends[at : at + few] - back
        found[at : at + few] = np.where(begins >= firsts[at : at + few, None], begins, -1)
    return found


def balanced_split(times: Sequence[int], num_stages: int) -> tuple[int, ...] | None:
    """First block of each stage, for the split of a chain that minimises the longest stage.

    ``times`` [block] in ns. Among the splits with the least longest stage, one with the least sum of squares of the
    stages' times is taken. None if there are fewer blocks than stages.
    """
    sums = np.array([0, *accumulate(times)])

    def cost(kind: int, begins: Array, ends: Array) -> Array:
        times_of: Array = sums[ends] - sums[begins]
        return times_of

    return least_split(cost, len(times), [0] * num_stages)


def least_split(cost: Cost, num_blocks: int, kinds: Sequence[int], fits: Fits | None = None) -> tuple[int, ...] | None:
    """First block of each stage, for the split that minimises the dearest stage, then the sum of squared costs.

    ``kinds`` [stage] says which stages cost and hold the same; they count from 0. Every stage has at least one block;
    of equal splits the one whose later stages are shortest is taken. None if no split fits.

    A programme over (stages, blocks), twice: for the dearest stage, then for the squares under it.
    """
    ends = np.arange(num_blocks + 1)
    fitting = [np.zeros_like(ends) for _ in range(max(kinds) + 1)]
    if fits is not None:
        fitting = [first_holding(partial(fits, kind), known) for kind, known in enumerate(fitting)]

    def cheap(most: int, kind: int, begins: Array, ends: Array) -> NDArray[np.bool_]:
        return cost(kind, begins, ends) <= most

    def within(most: int) -> list[Array]:
        """[kind][cut] the first block of the longest range before it that fits and costs no more."""
        return [first_holding(partial(cheap, most, kind), known) for kind, known in enumerate(fitting)]

    if num_blocks < len(kinds) or not _leads_through(fitting, kinds):
        return None
    if len(kinds) == 1:
        return (0,)
    # only ranges under a bound are looked at, which is halved as long as that leaves a split
    most = max(int(cost(kind, np.array([0]), ends[-1:])[0]) for kind in range(len(fitting)))
    while most and _leads_through(within(most // 2), kinds):
        most //= 2
    most, _ = _best(cost, within(most), kinds, most, np.maximum)
    return _best(cost, within(most), kinds, len(kinds) * most**2, lambda before, price: before + price * price)[1]


def first_holding(holds: Callable[[Array, Array], NDArray[np.bool_]], known: Array) -> Array:
    """[cut] the least begin, from what is ``known`` on, for which that holds; the cut itself if it holds for none.

    What holds for blocks holds for fewer of them, so that bisection finds it.
    """
    ends = np.arange(1, len(known))
    low, high = known[1:].copy(), ends.copy()
    while (open_ := low < high).any():
        middle = np.minimum((low + high) // 2, ends - 1)
        right = holds(middle, ends)
        high, low = np.where(open_ & right, middle, high), np.where(open_ & ~right, middle + 1, low)
    return np.concatenate(([0], high))


def _leads_through(firsts: Sequence[Array], kinds: Sequence[int]) -> bool:
    """Whether stages of these kinds can have all blocks, if ranges begin at ``firsts`` [kind][cut] at the least."""
    reached = np.zeros(len(firsts[0]), dtype=np.int64)
    reached[0] = 1
    for kind in checked(kinds, 64):
        before = np.concatenate(([0], np.cumsum(reached)))
        reached = (before[:-1] > before[firsts[kind]]).astype(np.int64)
    return bool(reached[-1])


def _best(
    cost: Cost, firsts: Sequence[Array], kinds: Sequence[int], most: int, join: Callable[[Values, Values], Values]
) -> tuple[int, tuple[int, ...]]:
    """The least value of a split, which is ``most`` at the most, and the first block of each of its stages."""
    num_cuts = len(firsts[0])
    programme = Programme(num_cuts, most + 1, join)
    candidates = [shortest_first(each) for each in firsts]
    layers = [programme.start()]
    for kind in checked(kinds, 16):
        layers.append(programme.extended(layers[-1], _alone(partial(cost, kind)), candidates[kind]))
    begins = [begin for begin, _, _ in programme.traced(layers[1:], num_cuts - 1)]
    return int(layers[-1].values[0, num_cuts - 1]), tuple(reversed(begins))


@dataclass(frozen=True, slots=True)
class ShortestStages:
    """[stages - 1][cut] the least longest stage of all blocks before a cut, and where the last of these begins.

    Of equal splits the one whose later stages are longest is taken.
    """

    longest: list[Array]
    lasts: list[Array]

    @classmethod
    def of(cls, sums: Array, num_stages: int) -> ShortestStages:
        """For blocks with running ``sums`` [cut] of their times, and any number of stages up to that.

        The later the last stage begins, the less it takes, and the more those before it: the best begin is where they
        take as long as it, or just before that.
        """
        before = np.full(len(sums), UNLIMITED)
        before[0] = 0
        layers = []
        for number in checked(range(num_stages), 16):
            values, lasts = np.full(len(sums), UNLIMITED), np.zeros(len(sums), dtype=np.int64)
            ends = np.arange(number + 1, len(sums))  # each stage has a block
            last = number + np.searchsorted(before[number:-1] + sums[number:-1], sums[ends])
            late = np.minimum(last, ends - 1)
            early = np.minimum(np.maximum(last - 1, number), late)
            early = np.maximum(np.searchsorted(sums, sums[early]), number)  # blocks without a time change nothing
            found = [np.maximum(before[each], sums[ends] - sums[each]) for each in (early, late)]
            values[ends], lasts[ends] = np.minimum(*found), np.where(found[0] <= found[1], early, late)
            layers.append((values, lasts))
            before = values
        return cls([values for values, _ in layers], [lasts for _, lasts in layers])

    def begins_of(self, num_blocks: int, num_stages: int) -> tuple[int, ...]:
        """The split of the first ``num_blocks`` blocks, at least as many as stages."""
        begins: list[int] = []
        end = num_blocks
        for lasts in reversed(self.lasts[:num_stages]):
            end = int(lasts[end])
            begins.append(end)
        return tuple(reversed(begins))


def _alone(cost: Callable[[Array, Array], Array]) -> Price:
    """The price of stages that run in only one way."""
    return lambda begins, ends: cost(begins, ends)[None]
