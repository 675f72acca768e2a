"""DAPPLE's planner (Fan et al. 2021): contiguous stages on devices of machines, with the least pipeline latency.

*Latency.* Sending between two stages is a stage of its own, whose forward sends outputs and whose backward sends
gradients, without an all-reduce. Of stages s, M micro-batches take, along the *pivot* stage Q that bounds the steady
phase:

    sum of F of stages 0 .. Q + (M - 1)(F_Q + B_Q) + max over s of (all-reduce of s + sum of B of stages s .. Q)

that is the way of the first micro-batch down to Q, the steady phase, and the way of the last one back up, until the
last stage's gradients are summed. For stages after the pivot the sum is negative: they end before it, by B of the
stages between. Q is looked for from the last stage on: an earlier one takes over if its steady phase is longer than
that of the pivot so far with what lies between them.

*Plans.* A state is (blocks that are planned, devices they take). What is not planned is one stage on all devices that
are left, so every state is a plan; of several plans with the same state the one with the least latency is kept, and
another stage is split off the last one: for each number of its blocks, of its devices, and for each policy of where
these devices are.

*Policies.* **Fresh first** takes devices of machines of which none is taken, **append first** of machines of which some
are, each if they suffice; **scatter first** equally many of all machines of which some are taken, or of all where that
is none, or not enough. Machines of equal size are alike: states that differ in which of them has what are one. Links
of the innermost level join the devices of a machine; where there is only one level, all are in one machine. Policies
multiply states: of more than 1,000 blocks times devices they are left out, and stages take devices in order, over links
and with sums as these have them.

Replicas have equal parts of each micro-batch. While plans are compared, the last stage has as many as devices are left,
each with that part of the time; here they are then as many as divide the micro-batch, so that devices may stay idle.
Memory is that of 1F1B for the number of stages that follow, and no part of a state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeplan.costs import UNLIMITED
from pipeplan.files import Placement
from pipeplan.partition.baselines import StageTable, for_each_size, require_few_blocks
from pipeplan.partition.chain.costs import Array
from pipeplan.partition.problem import Partition, PartitionProblem, Way
from pipeplan.search_constants import MOST_OF_MACHINES
from pipeplan.time_limit import checked

Load = tuple[int, int, int]
"""Of a stage: forward and backward of a micro-batch, and the gradients' all-reduce, in ns."""

Devices = tuple[int, ...]


def dapple(problem: PartitionProblem) -> Iterator[Partition]:
    """The plan with the least latency of those that are looked at, for each size.

    Per state only the best is kept, so it is not always the least latency of all plans.

    Raises:
        NoPartitionError: no plan that was looked at fits into memory.
        TooLargeError: the blocks are too many.
    """
    require_few_blocks(problem, "DAPPLE")
    order = problem.order

    def planned(problem: PartitionProblem, ways: Sequence[Way]) -> Partition | None:
        value, stages = _StatePlans(problem, ways, order).best()
        if value >= UNLIMITED:
            return None
        placed = tuple(
            ways[each.way].placed(order[each.begin : each.end], 0).model_copy(update={"devices": each.devices})
            for each in stages
        )
        return Partition(Placement(strategy="stage graph", num_devices=problem.num_devices, stages=placed), value)

    return for_each_size(problem, planned, "no plan that DAPPLE's planner looks at fits")


def latency(stages: Sequence[Load], num_microbatches: int) -> int:
    """The pipeline latency of stages, in ns, those of sending among them."""
    *before, last = (np.array(stage) for stage in stages)
    return int(_Begun.of(before, num_microbatches - 1).latency([last]))


@dataclass(frozen=True, slots=True)
class _Begun:
    """The first stages of a pipeline, for whatever follows: ``rounds`` micro-batches come after the first one.

    ``forwards`` and ``backwards`` are their sums, ``ending`` is the longest all-reduce less the backwards of the stages
    before. A stage before the pivot takes over as soon as its ``keys``, ascending, are above what the pivot so far
    takes with what lies between it and these stages; ``ways`` [key] is what the latency is but for the ending then,
    where others may have taken over from that stage in turn.
    """

    rounds: int
    forwards: int
    backwards: int
    ending: int
    keys: Array
    ways: Array

    @classmethod
    def of(cls, stages: Sequence[Array], rounds: int) -> _Begun:
        """With these loads, one after another."""
        forwards = backwards = 0
        ending, keys, ways = -UNLIMITED, list[int](), list[int]()  # keys descend from the first stage on
        for forward, backward, wait in (map(int, stage) for stage in stages):
            both = forward + backward
            ending = max(ending, wait - backwards)
            forwards, backwards = forwards + forward, backwards + backward
            steady = rounds * both
            whole = next((way for key, way in zip(reversed(keys), reversed(ways), strict=True) if key > steady), None)
            own = forwards + backwards + steady if whole is None else whole
            kept = [(key - both, way) for key, way in zip(keys, ways, strict=True) if key - both > steady]
            keys, ways = [key for key, _ in kept] + [steady], [way for _, way in kept] + [own]
        found = (np.array(each[::-1], dtype=np.int64) for each in (keys, ways))
        return cls(rounds, forwards, backwards, ending, *found)

    def latency(self, after: Sequence[Array]) -> Array:
        """[...] ns where these loads [quantity, ...] follow."""
        ends, forwards, backwards, ending = list[Array](), self.forwards, self.backwards, np.int64(self.ending)
        for forward, backward, wait in after:
            ending = np.maximum(ending, wait - backwards)
            forwards, backwards = forwards + forward, backwards + backward
            ends.append(forwards + backwards)
        pivot = self.rounds * (after[-1][0] + after[-1][1])  # its steady phase, with what lies before it
        way = ends[-1] + pivot
        for (forward, backward, _), end in zip(reversed(after[:-1]), reversed(ends[:-1]), strict=True):
            steady = self.rounds * (forward + backward)
            way = np.where(steady > pivot, end + steady, way)
            pivot = np.where(steady > pivot, steady, pivot + forward + backward)
        place = np.searchsorted(self.keys, pivot, side="right")
        found: Array = np.where(place < len(self.keys), np.append(self.ways, 0)[place], way) + ending
        return found


class _OnDevices(NamedTuple):
    begin: int
    end: int
    way: int
    devices: Devices


class _Kept(NamedTuple):
    """The best plan of a state: of what is planned its stages, their loads with those of sending, devices taken of each
    machine, and how many more stages may follow before one of them does not fit."""

    value: int
    stages: tuple[_OnDevices, ...]
    loads: tuple[Load, ...]
    taken: tuple[int, ...]
    spare: int


_LASTING = 1 << 30
"""Stages that may follow one which holds all micro-batches."""


class _StatePlans:
    """Plans for one micro-batch size: of each range of blocks ``forward``, ``backward``, ``most`` [begin, end, way]."""

    def __init__(self, problem: PartitionProblem, ways: Sequence[Way], order: Sequence[str]) -> None:
        self.problem, self.ways, self.num_blocks = problem, ways, len(order)
        self.stages, sums, rows = StageTable.of_chain(problem, ways, order), problem.chain(order), [w.row for w in ways]
        begins, ends = self.stages.begins, self.stages.ends
        forward = (sums.forward[:, ends] - sums.forward[:, begins])[rows]
        self.forward, self.backward = self._grid(forward), self._grid(sums.time(begins, ends)[rows] - forward)
        self.most, self.sizes = self._grid(self.stages.most), sums.gradients(begins, ends)[0]
        self.count = problem.mini_batch // ways[0].microbatch_size
        links, devices = problem.links, problem.num_devices
        levels = links.levels(devices) if links else [devices]
        self.node = levels[0] if len(levels) > 1 else devices
        self.size = self.node if self.num_blocks * devices <= MOST_OF_MACHINES else devices
        self.machines = [min(self.size, devices - first) for first in range(0, devices, self.size)]
        self.passing = links.passing(order, ways[0].microbatch_size) if links else None
        self.messages: dict[tuple[Devices, Devices], Array] = {}
        self.waits: dict[tuple[int, Devices], Array] = {}

    def best(self) -> tuple[int, tuple[_OnDevices, ...]]:
        """The least latency of the plans looked at that fit, and its stages."""
        best, found = UNLIMITED, tuple[_OnDevices, ...]()
        states: list[dict[object, _Kept]] = [{} for _ in range(self.num_blocks)]
        states[0][()] = _Kept(UNLIMITED, (), (), (0,) * len(self.machines), _LASTING)
        for begin in range(self.num_blocks):
            for kept in checked(list(states[begin].values()), 1):
                for last, value in self._lasts(begin, kept):
                    if value < best:
                        best, found = value, (*kept.stages, last)
                self._extend(states, begin, kept)
        return best, found

    def _lasts(self, begin: int, kept: _Kept) -> Iterator[tuple[_OnDevices, int]]:
        """What is not planned as one stage that fits, and the latency with it."""
        begun = _Begun.of([np.array(load) for load in kept.loads], self.count - 1)
        for way, devices in self._remaining(kept.taken):
            if self.most[begin, -1, way] >= 1:
                before = kept.stages[-1].devices if kept.stages else ()
                after = self._loads(before, begin, self.num_blocks, way, devices)
                yield _OnDevices(begin, self.num_blocks, way, devices), int(begun.latency(after))

    def _extend(self, states: list[dict[object, _Kept]], begin: int, kept: _Kept) -> None:
        """Split a stage off the last one, in every way, that leaves it a block and a device."""
        begun = _Begun.of([np.array(load) for load in kept.loads], self.count - 1)
        before = kept.stages[-1].devices if kept.stages else ()
        cuts, left = np.arange(begin + 1, self.num_blocks), self.problem.num_devices - sum(kept.taken)
        for way, each in enumerate(self.ways):
            if each.replicas >= left or not len(cuts) or kept.spare < 1:
                continue
            most = self.most[begin, cuts, way]
            spares = np.minimum(np.where(most >= self.count, _LASTING, most - 2), kept.spare - 1)
            for counts in self._policies(kept.taken, each.replicas):
                devices = self._devices(kept.taken, counts)
                taken = tuple(map(sum, zip(kept.taken, counts, strict=True)))
                loads = self._loads(before, begin, cuts, way, devices)
                values = np.full(len(cuts), UNLIMITED)
                free = self._devices(taken, [size - own for size, own in zip(self.machines, taken, strict=True)])
                for last, _ in self._remaining(taken):
                    after = [*loads, *self._loads(devices, cuts, self.num_blocks, last, free)]
                    np.minimum(values, begun.latency(after), out=values)
                key = tuple(sorted(zip(self.machines, taken, strict=True)))
                own = [np.broadcast_to(load.reshape(3, -1), (3, len(cuts))).T.tolist() for load in loads]
                for place in np.flatnonzero((spares >= 0) & (values < UNLIMITED)).tolist():
                    cut, value = begin + 1 + place, int(values[place])
                    if (known := states[cut].get(key)) is None or value < known.value:
                        stages = *kept.stages, _OnDevices(begin, cut, way, devices)
                        more = (tuple(load[place]) for load in own)
                        states[cut][key] = _Kept(value, stages, (*kept.loads, *more), taken, int(spares[place]))

    def _loads(
        self, before: Devices, begins: int | Array, ends: int | Array, way: int, devices: Devices
    ) -> list[Array]:
        """Of stages that divide what there is evenly over devices, and of sending to each from ``before``, if any."""
        replicas = self.ways[way].replicas
        own = [each[begins, ends, way] * replicas // len(devices) for each in (self.forward, self.backward)]
        stage = np.stack(np.broadcast_arrays(*own, self._sums(way, devices)[begins, ends]))
        return [*([self._message(before, devices)[:, begins]] if before else []), stage]

    def _remaining(self, taken: tuple[int, ...]) -> list[tuple[int, Devices]]:
        """The ways of a stage on all devices that are left, or on as many of them as it can have replicas."""
        free = [size - count for size, count in zip(self.machines, taken, strict=True)]
        count = max((way.replicas for way in self.ways if way.replicas <= sum(free)), default=0)
        devices = self._devices(taken, free)[:count]
        return [(place, devices) for place, way in enumerate(self.ways) if way.replicas == count]

    def _devices(self, taken: Sequence[int], counts: Sequence[int]) -> Devices:
        """The next ones of each machine."""
        firsts = [machine * self.size + count for machine, count in enumerate(taken)]
        return tuple(first + place for first, count in zip(firsts, counts, strict=True) for place in range(count))

    def _policies(self, taken: Sequence[int], need: int) -> list[tuple[int, ...]]:
        """How many devices of each machine: by fresh first, append first, scatter first, where these differ."""
        free = [size - count for size, count in zip(self.machines, taken, strict=True)]
        fresh = [left if not count else 0 for left, count in zip(free, taken, strict=True)]
        used = [left if count else 0 for left, count in zip(free, taken, strict=True)]
        found = [_filled(able, need) for able in (fresh, used) if sum(able) >= need]
        found.append(_scattered(used if sum(used) >= need else free, need))
        return list(dict.fromkeys(found))

    def _sums(self, way: int, devices: Devices) -> Array:
        """[begin, end] ns of what follows a stage's actions: of sums over machines it counts how many each has."""
        key = way, tuple(sorted(Counter(device // self.node for device in devices).values()))
        if key not in self.waits:
            links, own = self.problem.links, self.ways[way]._replace(replicas=len(devices))
            sizes, places = np.unique(self.sizes, return_inverse=True)
            each = [
                self.problem.waiting(size, own) if links is None else links.after(size, devices)
                for size in sizes.tolist()
            ]
            self.waits[key] = self._grid(np.array(each, dtype=np.int64)[places][None])[..., 0]
        return self.waits[key]

    def _message(self, sources: Devices, targets: Devices) -> Array:
        """[quantity, cut] the load of sending what passes a cut."""
        key = tuple(d // self.node for d in sources), tuple(d // self.node for d in targets)
        if key not in self.messages:
            forth = back = np.zeros(self.num_blocks + 1, dtype=np.int64)
            if self.problem.links is not None and self.passing is not None:
                forth = self.problem.links.split(sources, targets, self.passing[0])
                back = self.problem.links.split(targets, sources, self.passing[1])
            self.messages[key] = np.stack([forth, back, np.zeros_like(forth)])
        return self.messages[key]

    def _grid(self, values: Array) -> Array:
        """[begin, end, way] of [way, stage]."""
        found = np.zeros((self.num_blocks + 1, self.num_blocks + 1, len(values)), dtype=np.int64)
        found[self.stages.begins, self.stages.ends] = values.T
        return found


def _filled(able: Sequence[int], need: int) -> tuple[int, ...]:
    """Of one machine after another as many as it has."""
    counts = []
    for left in able:
        counts.append(min(left, need))
        need -= counts[-1]
    return tuple(counts)


def _scattered(able: Sequence[int], need: int) -> tuple[int, ...]:
    """Of each machine in turn one, as long as it has one."""
    counts = [0] * len(able)
    while need:
        for machine, left in enumerate(able):
            if need and counts[machine] < left:
                counts[machine] += 1
                need -= 1
    return tuple(counts)
