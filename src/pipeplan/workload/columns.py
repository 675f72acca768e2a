"""Columns: arrays with a place for each action of an operation, of an order or of all orders.

What is asked of all of them at once is asked of arrays. Here: numbers, lines, samples. Not here: times and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pipeplan.workload.samples import Slots

IntArray = NDArray[np.int64]

EXACT = 2**62
"""What is computed in 64 bits stays below it; larger numbers are Python's own integers, in arrays all the same."""


def column(values: Sequence[int] | IntArray, times: int = 1) -> IntArray:
    """The values as an array, in which sums of so many of them are exact."""
    found = np.asarray(values)
    if not found.size:
        return np.zeros(0, np.int64)
    if found.dtype.kind == "i" and max(int(found.max()), -int(found.min())) * times < EXACT:
        return found.astype(np.int64, copy=False)
    return np.array([*map(int, values)], dtype=object)


@dataclass(frozen=True, slots=True)
class Lines(Sequence[Sequence[int]]):
    """The orders of devices and links, one after another: a line's are ``tasks[begins[line] : begins[line + 1]]``.

    They stand wherever orders do: each line is made a list when it is asked for.
    """

    tasks: IntArray
    begins: IntArray

    @classmethod
    def of(cls, orders: Sequence[Sequence[int]]) -> Lines:
        """The same orders."""
        if isinstance(orders, Lines):
            return orders
        begins = [0, *accumulate(map(len, orders))]
        return cls(np.fromiter(chain.from_iterable(orders), np.int64, begins[-1]), np.array(begins))

    def __len__(self) -> int:
        return len(self.begins) - 1

    @overload
    def __getitem__(self, line: int) -> list[int]: ...
    @overload
    def __getitem__(self, line: slice) -> Lines: ...

    def __getitem__(self, line: int | slice) -> list[int] | Lines:
        """The tasks of a line, or some lines that follow each other."""
        if isinstance(line, slice):
            begin, end, _ = line.indices(len(self))
            begins = self.begins[begin : max(begin, end) + 1]
            return Lines(self.tasks[begins[0] : begins[-1]], begins - begins[0])
        begin, end = self.begins[range(len(self))[line]], self.begins[range(1, len(self) + 1)[line]]
        found: list[int] = self.tasks[begin:end].tolist()
        return found

    def __iter__(self) -> Iterator[list[int]]:
        tasks: list[int] = self.tasks.tolist()
        return (tasks[begin:end] for begin, end in self.bounds)

    def once(self, leaders: Sequence[int]) -> tuple[Lines, list[int], list[int]]:
        """Of lines that are the same as their leader's only that, which lines those are, and [line] its place there."""
        begins, found, places = self.begins.tolist(), list[int](), list[int]()
        for line, leader in zip(range(len(self)), leaders, strict=True):
            own, others = (self.tasks[begins[each] : begins[each + 1]] for each in (line, leader))
            if leader < line and np.array_equal(own, others):
                places.append(places[leader])
            else:
                places.append(len(found))
                found.append(line)
        if len(found) == len(self):
            return self, found, places
        parts = [self.tasks[begins[line] : begins[line + 1]] for line in found]
        return Lines(np.concatenate(parts), np.array([0, *accumulate(map(len, parts))])), found, places

    @property
    def bounds(self) -> Iterator[tuple[int, int]]:
        """Where each line begins, and where it ends."""
        return pairwise(self.begins.tolist())

    @property
    def counts(self) -> IntArray:
        """[line] how many tasks it has."""
        return np.diff(self.begins)

    @property
    def numbers(self) -> IntArray:
        """[place] the line that it is in."""
        return np.repeat(np.arange(len(self.begins) - 1), self.counts)

    @property
    def followers(self) -> IntArray:
        """The places that have another before them in their line."""
        follows = np.ones(len(self.tasks), dtype=bool)
        follows[self.begins[:-1][self.counts > 0]] = False
        return np.flatnonzero(follows)

    def running(self, values: IntArray) -> IntArray:
        """[place] the sum of the values in its line up to and with its own."""
        sums = np.cumsum(values)
        before = np.concatenate((np.zeros(1, sums.dtype), sums))[self.begins[:-1]]
        return sums - np.repeat(before, self.counts)

    def highest(self, values: IntArray) -> list[int | None]:
        """[line] the first place with the largest of its values; None for a line without tasks."""
        found: list[int | None] = [None] * (len(self.begins) - 1)
        lines = np.flatnonzero(self.counts)
        if len(lines):
            most = np.maximum.reduceat(values, self.begins[lines])
            places = np.flatnonzero(values == np.repeat(most, self.counts[lines]))
            for line, place in zip(lines, places[np.searchsorted(places, self.begins[lines])], strict=True):
                found[int(line)] = int(place)
        return found


def distinct(values: IntArray) -> bool:
    """Whether no two of the values are the same."""
    values = np.sort(values)
    return not (values[1:] == values[:-1]).any()


def counted(values: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct ones of the values, ascending, and how often each is there."""
    values = np.sort(values)
    first = np.flatnonzero(np.concatenate((np.ones(min(1, len(values)), bool), values[1:] != values[:-1])))
    return values[first], np.diff(np.append(first, len(values)))


def sharing(own: Slots, others: Slots) -> tuple[IntArray, IntArray]:
    """[action of one] the first action of others, and the one after the last, that hold any of its samples."""
    if others.plain:
        begins, ends = samples(own)
        first = np.maximum(0, (begins - others.offset - others.size) // others.stride + 1)
        return first, np.minimum(others.count, np.maximum(first, -(-(ends - others.offset) // others.stride)))
    found = [others.sharing(own.samples(number)) for number in range(len(own))]
    return np.array([each.start for each in found], np.int64), np.array([each.stop for each in found], np.int64)


def samples(slots: Slots) -> tuple[IntArray, IntArray]:
    """[action] its first sample, and the one after its last."""
    if slots.plain:
        begins = slots.offset + np.arange(slots.count) * slots.stride
        return begins, begins + slots.size
    found = np.array([slots.samples(number) for number in range(len(slots))], np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def spread(first: IntArray, after: IntArray) -> tuple[IntArray, IntArray]:
    """(place, number) of all numbers from ``first`` [place] up to ``after`` [place]."""
    counts = np.maximum(after - first, 0)
    places = np.repeat(np.arange(len(counts)), counts)
    return places, np.arange(len(places)) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def microbatches(slots: Slots) -> IntArray:
    """[action] its micro-batch."""
    numbers = np.arange(len(slots))
    if slots.run == slots.every:
        return np.where(numbers < 2 * slots.num_parted, numbers // 2, numbers - slots.num_parted)
    groups, place = np.divmod(numbers - slots.num_parted, slots.run)
    return np.where(numbers < 2 * slots.num_parted, numbers // 2, slots.first + groups * slots.every + place)
