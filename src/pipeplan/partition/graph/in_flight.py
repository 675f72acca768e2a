"""Samples in flight under kFkB schedules (GraphPipe, Table 3.2), and what stages need of those before them, in arrays.

A stage that runs kFkB starts with some forwards, then runs k backwards and k forwards in turn, and ends with the
backwards that are left; stages have micro-batch sizes of their own. How many samples one holds at most follows from
those of the stages after it.

With 1F1B a stage x before stages y has, by that table, ``max over y of max(i_y + b_y, i_y - b_y + 2 b_x)`` samples in
flight. So all that counts of the stages y is a :class:`Need`: the largest ``i + b`` and the largest ``i - b``. What it
stands for is a function, the samples in flight of a stage with a given micro-batch size; of the needs that stand for
the same one, the *largest* is taken, for then one function is below another exactly if both of its numbers are.

For bounds, needs are rounded down to *states*: the total to a number in a grid, the difference to the total less twice
a micro-batch size. With one stage after another nothing but the total is rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.partition.problem import Way
from pipeplan.search_constants import GRID
from pipeplan.workload.kinds import Role


@dataclass(frozen=True, slots=True)
class KFKB:
    """The kFkB schedule of a stage: how many forwards and backwards alternate, and samples in a micro-batch."""

    k: int
    microbatch_size: int

    @property
    def samples(self) -> int:
        """Samples in k micro-batches."""
        return self.k * self.microbatch_size


def samples_in_flight(stage: KFKB, successor: KFKB, of_successor: int) -> int:
    """Samples in flight at a stage, given a stage after it that has ``of_successor`` in flight (Table 3.2).

    One micro-batch size divides the other. The last stage has ``stage.samples`` in flight.
    """
    size, larger = stage.microbatch_size, max(stage.microbatch_size, successor.microbatch_size)
    own, others = stage.samples, successor.samples
    if others < size:
        return of_successor + own - others + size
    if own < successor.microbatch_size:
        return of_successor + successor.microbatch_size
    if own <= others:
        return of_successor + larger * (1 if own == larger else 2)
    return of_successor + (own if others == larger else own - others + 2 * larger)


def flows(sizes: Sequence[int], edges: Iterable[tuple[int, int]], mini_batch: int) -> list[int]:
    """[stage] samples in flight with 1F1B, for stages in topological order with these micro-batch sizes."""
    held = list(sizes)
    for source, target in sorted(edges, reverse=True):
        needed = samples_in_flight(KFKB(1, sizes[source]), KFKB(1, sizes[target]), held[target])
        held[source] = min(mini_batch, max(held[source], needed))
    return held


def kfkb_word(stage: KFKB, in_flight: int, mini_batch: int) -> Iterator[Role]:
    """Forwards and backwards in the order of a stage's schedule; each role goes through the micro-batches in order."""
    count = mini_batch // stage.microbatch_size
    forwards = min(count, -(-in_flight // stage.microbatch_size))
    backwards = 0
    yield from itertools.repeat(Role.FORWARD, forwards)
    while backwards < count:
        some = min(stage.k, count - backwards)
        yield from itertools.repeat(Role.BACKWARD, some)
        backwards += some
        more = min(stage.k, count - forwards)
        yield from itertools.repeat(Role.FORWARD, more)
        forwards += more


Integers = NDArray[np.int64]


class Need(NamedTuple):
    """The largest ``in flight + micro-batch size`` and ``in flight - micro-batch size`` of stages, in samples."""

    total: int
    difference: int


@dataclass(frozen=True)
class Needs:
    """Needs under these choices; without ``limited`` memory all needs are one state."""

    choices: Sequence[Way]
    mini_batch: int
    limited: bool

    @cached_property
    def none(self) -> Need:
        """What is needed where no stage comes after."""
        totals, differences = self.largest(np.array([0]), np.array([-4 * self.mini_batch]))
        return Need(int(totals[0]), int(differences[0]))

    @cached_property
    def sizes(self) -> Integers:
        """Micro-batch sizes, ascending."""
        return np.array(sorted({choice.microbatch_size for choice in self.choices}), dtype=np.int64)

    @cached_property
    def each(self) -> Integers:
        """[choice] its micro-batch size."""
        return np.array([choice.microbatch_size for choice in self.choices], dtype=np.int64)

    @cached_property
    def replicas(self) -> Integers:
        """[choice] its devices."""
        return np.array([choice.replicas for choice in self.choices], dtype=np.int64)

    @cached_property
    def rows(self) -> Integers:
        """[choice] its row."""
        return np.array([choice.row for choice in self.choices], dtype=np.int64)

    @cached_property
    def repeats(self) -> Integers:
        """[choice] micro-batches of a mini-batch."""
        return self.mini_batch // self.each

    def in_flight(self, totals: Integers, differences: Integers) -> Integers:
        """[need, choice] samples in flight of a stage before what needs that."""
        needed = np.maximum(totals[:, None], differences[:, None] + 2 * self.each)
        held: Integers = np.minimum(self.mini_batch, np.maximum(self.each, needed))
        return held

    def after(self, in_flight: Integers) -> tuple[Integers, Integers]:
        """[need, choice] what stages with these samples in flight need."""
        return self.largest(in_flight + self.each, in_flight - self.each)

    def largest(self, totals: Integers, differences: Integers) -> tuple[Integers, Integers]:
        """The largest needs that say the same.

        A difference makes none if the total is more even for the largest size that does not have all samples in
        flight anyway.
        """
        least = self.sizes[0]
        totals = np.minimum(self.mini_batch, np.maximum(np.maximum(totals, least), differences + 2 * least))
        largest = np.minimum(self.mini_batch, -(-(self.mini_batch - differences) // 2))
        place = np.searchsorted(self.sizes, largest) - 1
        size = self.sizes[np.maximum(place, 0)]
        raised = np.maximum(differences, np.maximum(totals - 2 * size, -size))
        return totals, np.where((place < 0) | (totals >= self.mini_batch), self.mini_batch, raised)

    # States --------------------------------------------------------------------------------------------------------

    @cached_property
    def totals(self) -> Integers:
        """Totals that states have, ascending from 0."""
        if not self.limited:
            return np.zeros(1, dtype=np.int64)
        least = int(self.sizes[0])
        found, step = set(range(2 * GRID + 1)), 2
        while GRID * step * least < self.mini_batch:
            found |= {step * number for number in range(GRID, 2 * GRID + 1)}
            step *= 2
        values = sorted({min(self.mini_batch, least * number) for number in found})
        return np.array(values, dtype=np.int64)

    @property
    def num_states(self) -> int:
        """Pairs of a total and a size."""
        return len(self.totals) * (len(self.sizes) if self.limited else 1)

    def states(self, totals: Integers, differences: Integers) -> Integers:
        """The states of needs, rounded down."""
        if not self.limited:
            return np.zeros(np.shape(totals), dtype=np.int64)
        place = np.searchsorted(self.totals, totals, side="right") - 1
        half = -(-(self.totals[place] - differences) // 2)
        size = np.minimum(np.searchsorted(self.sizes, half), len(self.sizes) - 1)
        return place * len(self.sizes) + size

    def state(self, need: Need) -> int:
        """The state of one need."""
        return int(self.states(np.array([need.total]), np.array([need.difference]))[0])

    @cached_property
    def held(self) -> Integers:
        """[state, choice] samples in flight of a stage before it."""
        if not self.limited:
            return np.minimum(self.mini_batch, self.each)[None, :]
        totals = np.repeat(self.totals, len(self.sizes))
        return self.in_flight(totals, totals - 2 * np.tile(self.sizes, len(self.totals)))

    @cached_property
    def following(self) -> Integers:
        """[state, choice] the state before such a stage."""
        return self.states(*self.after(self.held))

    @cached_property
    def microbatches(self) -> Integers:
        """[state, choice] micro-batches in flight."""
        return -(-self.held // self.each)
