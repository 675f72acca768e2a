"""What stages of a chain cost, for one choice of cuts and for many ranges of blocks at once.

A range has blocks begin..end-1 and is given by its two ends: two integers or two arrays of any equal shapes, as which
the results come back. Cuts are given as ``begins``: the first block of each stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED, StageCost, TiedShare
from pipeplan.costs.held_once import Repeat
from pipeplan.time_limit import checkpoint
from pipeplan.workload.kinds import GRADIENTS, STATE_KINDS, MemoryBytes

Range = tuple[int, int]
"""Blocks begin..end-1 of the chain."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of stages of a device: the activations of all, the most they take while they run, what is always there.

    ``tied`` is what of that others may share.
    """

    activations: int = 0
    peak: int = 0
    statics: int = 0
    tied: frozenset[TiedShare] = frozenset()


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks in a line, the device of each stage, and the memory of each device.

    ``times``, ``statics`` and ``activations`` [block + 1] are running sums over the blocks, in ns and bytes;
    ``workspaces`` [block] and ``memory`` [device] are bytes, None is no limit; ``devices`` [stage]. ``costs`` are the
    same for many ranges at once. Times are at speed 1; ``speeds`` are those of [device], none where all have that.
    """

    times: Sequence[int]
    statics: Sequence[int]
    activations: Sequence[int]
    workspaces: Sequence[int]
    devices: Sequence[int]
    memory: Sequence[int | None]
    costs: ChainCosts
    speeds: Sequence[float] = ()

    @classmethod
    def of(
        cls,
        costs: Sequence[StageCost],
        devices: Sequence[int],
        memory: Sequence[int | None],
        speeds: Sequence[float] = (),
    ) -> Chain:
        """The chain of blocks with these ``costs`` [block]."""
        sums = ChainCosts.of(costs)
        lists = sums.compute.tolist(), sums.sums[4].tolist(), sums.activations.tolist(), sums.widest[0].tolist()
        return cls(*lists, devices, memory, sums, speeds)

    @property
    def num_blocks(self) -> int:
        """Blocks in the chain."""
        return len(self.workspaces)

    @property
    def num_stages(self) -> int:
        """Stages it is cut into."""
        return len(self.devices)

    @property
    def limited(self) -> bool:
        """Whether some device's memory is."""
        return any(limit is not None for limit in self.memory)

    @property
    def hopeless(self) -> bool:
        """Whether no cut can fit: all blocks together, or one alone, take more than there is."""
        limits = [limit for limit in self.memory if limit is not None]
        if len(limits) < len(self.memory):
            return False
        alone = max(self.bytes_of([(block, block + 1)]) for block in range(self.num_blocks))
        return self.held([(0, self.num_blocks)]).statics + self.activations[-1] > sum(limits) or alone > max(limits)

    def timed(self, times: Iterable[int]) -> Chain:
        """The chain with other ``times`` [block]."""
        return replace(self, times=list(accumulate(times, initial=0)))

    def time(self, begin: int, end: int) -> int:
        """Forward and backward of these blocks, in ns."""
        return self.times[end] - self.times[begin]

    def time_on(self, device: int, begin: int, end: int) -> int:
        """The same on a device."""
        return taken_ns(self.time(begin, end), self.speeds[device]) if self.speeds else self.time(begin, end)

    def ranges(self, begins: Sequence[int]) -> list[Range]:
        """[stage] its blocks."""
        return list(zip(begins, (*begins[1:], self.num_blocks), strict=True))

    def ranges_on(self, device: int, begins: Sequence[int]) -> list[Range]:
        """The blocks of a device's stages, in the order of the chain."""
        return [each for each, where in zip(self.ranges(begins), self.devices, strict=True) if where == device]

    def bytes_of(self, ranges: Sequence[Range]) -> int:
        """The least memory of a device whose stages have these blocks, in the order of the chain."""
        held = self.held(ranges)
        return held.peak + held.statics

    def all_bytes_of(self, ranges: Sequence[tuple[Array, Array]]) -> Array:
        """:meth:`bytes_of` many devices at once: (begins, ends) of the first stage of each, of the second one, ..."""
        held = peak = statics = np.zeros_like(ranges[0][0])
        for begins, ends in ranges:
            held = held + _between(self.costs.activations, begins, ends)
            peak = np.maximum(peak, held + self.costs.workspace(begins, ends))
            statics = statics + _between(self.costs.sums[4], begins, ends)
        for each, before in self.costs.tied:
            blocks = np.sum([before[ends] - before[begins] for begins, ends in ranges], axis=0)
            statics = statics - each.state.total * np.maximum(0, blocks - 1)
        return peak + statics

    def held(self, ranges: Sequence[Range]) -> Held:
        """What a device's stages of these blocks take, in the order of the chain."""
        held = peak = 0
        for begin, end in ranges:
            held += self.activations[end] - self.activations[begin]
            peak = max(peak, held + max(self.workspaces[begin:end]))
        statics = sum(self.statics[end] - self.statics[begin] for begin, end in ranges)
        tied = []
        for each, before in self.costs.tied:
            blocks = sum(int(before[end] - before[begin]) for begin, end in ranges)
            if blocks:
                tied.append(each)
                statics -= each.state.total * (blocks - 1)
        return Held(held, peak, statics, frozenset(tied))

    def bytes_between(self, before: Held, begins: Array, ends: Array, after: Held) -> Array:
        """:meth:`bytes_of` a device that runs these blocks between others, for many ranges of blocks."""
        running = np.maximum(self.costs.workspace(begins, ends), after.peak)
        running += before.activations + self.costs.activation(begins, ends)
        needed: Array = np.maximum(before.peak, running) + self.costs.statics(begins, ends)
        needed -= sum(each.state.total for each in before.tied & after.tied)
        for each, blocks in self.costs.tied:
            if each in before.tied | after.tied:
                needed -= each.state.total * (blocks[ends] > blocks[begins])
        return needed + before.statics + after.statics

    def loads(self, begins: Sequence[int]) -> list[int]:
        """[device] ns of work for one micro-batch."""
        loads = [0] * len(self.memory)
        for (begin, end), device in zip(self.ranges(begins), self.devices, strict=True):
            loads[device] += self.time_on(device, begin, end)
        return loads

    def longest(self, begins: Sequence[int]) -> int:
        """Ns of work of the longest stage for one micro-batch."""
        return max(self.time_on(device, *each) for device, each in zip(self.devices, self.ranges(begins), strict=True))

    def missing(self, begins: Sequence[int]) -> list[int]:
        """[device] bytes by which it is too small; 0 where it is not."""
        if not self.limited:
            return [0] * len(self.memory)
        ranges: list[list[Range]] = [[] for _ in self.memory]
        for each, device in zip(self.ranges(begins), self.devices, strict=True):
            ranges[device].append(each)
        return [
            0 if limit is None else max(0, self.bytes_of(each) - limit)
            for each, limit in zip(ranges, self.memory, strict=True)
        ]


def taken_ns(ns: int, speed: float) -> int:
    """What a stage takes on a device of some speed, to a ns for each block: what cuts are chosen by."""
    return math.ceil(ns / speed)


Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]

Place = int | Array
"""Where a range begins or ends, or ranges do."""


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """Running ``sums`` [kind, ..., block + 1] of what blocks cost, in ns and bytes.

    ``widest`` [..., power, begin] is the largest workspace of the 2^power blocks from ``begin`` on. ``repeated``
    [begin, end] are bytes that the blocks of a range count as held, and together do not hold. ``tied`` is what blocks
    share, which a range with several of them has once: each with how many of them there are before each cut [cut]; of
    several rows it is the first one's, and ``tied_rows`` [tied, row] are those of all. ``transfer_ns`` is what sending
    between any two stages takes, where that is looked at.
    """

    sums: Array
    widest: Array
    repeated: Array | None = None
    transfer_ns: int = 0
    tied: tuple[tuple[TiedShare, Array], ...] = ()
    tied_rows: tuple[tuple[TiedShare, ...], ...] = ()
    _stages: dict[tuple[int, int, int], StageCost] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, costs: Sequence[StageCost], repeats: Iterable[Repeat] = (), transfer_ns: int = 0) -> Self:
        """Those of blocks with these ``costs`` [block], each as a stage of its own."""
        repeated = _sums_inside(list(repeats), len(costs))
        return cls(_sums([costs])[:, 0], _widest([costs])[0], repeated, transfer_ns, _tied(costs))

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[StageCost]]) -> Self:
        """Those of the same blocks for several rows, of equal shards: all results then begin with [row]."""
        found = [_tied(row) for row in rows]
        shares = tuple(tuple(each for each, _ in of_rows) for of_rows in zip(*found, strict=True))
        return cls(_sums(rows), _widest(rows), tied=found[0], tied_rows=shares)

    @property
    def forward(self) -> Array:
        """Ns of forward before each cut, [..., cut], as all of these."""
        return self._sum(0)

    @property
    def compute(self) -> Array:
        """Ns of forward and backward."""
        return self._sum(1)

    @property
    def activations(self) -> Array:
        """Bytes for each micro-batch in flight."""
        return self._sum(2)

    def _sum(self, kind: int) -> Array:
        found: Array = self.sums[kind]
        return found

    @property
    def num_blocks(self) -> int:
        """Blocks in the chain."""
        return int(self.sums.shape[-1]) - 1

    def stages(self, begins: Sequence[int]) -> StageTimes:
        """What each stage takes when the chain is cut so, for a single row."""
        bounds = np.array((*begins, self.num_blocks))
        forwards, totals = np.diff(self.forward[bounds]), np.diff(self.compute[bounds])
        return StageTimes(tuple(forwards.tolist()), tuple((totals - forwards).tolist()), self.transfer_ns)

    def stage(self, begin: int, end: int, row: int) -> StageCost:
        """What one range costs as a stage, of several rows; searches ask for the same ones again and again."""
        if (begin, end, row) not in self._stages:
            self._stages[begin, end, row] = self._stage(begin, end, row)
        return self._stages[begin, end, row]

    def _stage(self, begin: int, end: int, row: int) -> StageCost:
        between = self.sums[:, row, end] - self.sums[:, row, begin]
        forward, compute, activations, _, _, *kept = between.tolist()
        shares = [(each[row], before) for each, (_, before) in zip(self.tied_rows, self.tied, strict=True)]
        tied = [(each, before[end] - before[begin]) for each, before in shares if before[end] > before[begin]]
        again = sum((each.state * int(blocks - 1) for each, blocks in tied), MemoryBytes())
        power = (end - begin).bit_length() - 1
        return StageCost(
            forward,
            compute - forward,
            activation_bytes=activations,
            workspace_bytes=int(max(self.widest[row, power, begin], self.widest[row, power, end - (1 << power)])),
            state=MemoryBytes(zip(STATE_KINDS, kept, strict=True)) - again,
            tied=frozenset(each for each, _ in tied),
        )

    def time(self, begins: Place, ends: Place) -> Array:
        """Ns of forward and backward."""
        return _between(self.compute, begins, ends)

    def gradients(self, begins: Place, ends: Place) -> Array:
        """Bytes of gradients, which replicas sum."""
        return _between(self._sum(3), begins, ends) - self._again(begins, ends, lambda each: each.state[GRADIENTS])

    def statics(self, begins: Place, ends: Place) -> Array:
        """Bytes that are held all the time."""
        return _between(self._sum(4), begins, ends) - self._again(begins, ends, lambda each: each.state.total)

    def sizes(self) -> Callable[[int, int], int]:
        """:meth:`gradients` of single ranges on the first row, for searches that ask for many."""
        sums = self._sum(3)[0].tolist()
        tied = [(each.state[GRADIENTS], before.tolist()) for each, before in self.tied]

        def size(begin: int, end: int) -> int:
            again: int = sum(own * max(0, before[end] - before[begin] - 1) for own, before in tied)
            whole: int = sums[end] - sums[begin]
            return whole - again

        return size

    def _again(self, begins: Place, ends: Place, size: Callable[[TiedShare], int]) -> Place:
        """What blocks count of what they share, beyond the first time."""
        again: Place = 0
        rows = self.tied_rows or [()] * len(self.tied)
        for (each, before), shares in zip(self.tied, rows, strict=True):
            blocks = np.maximum(0, before[ends] - before[begins] - 1)
            again = again + (np.multiply.outer(list(map(size, shares)), blocks) if shares else size(each) * blocks)
        return again

    def activation(self, begins: Place, ends: Place) -> Array:
        """Bytes that a micro-batch in flight holds."""
        held = _between(self.activations, begins, ends)
        return held if self.repeated is None else np.maximum(0, held - self.repeated[begins, ends])

    def workspace(self, begins: Place, ends: Place) -> Array:
        """The largest workspace, in bytes; no range is empty. Two powers cover each."""
        power = np.frexp(ends - begins)[1] - 1
        largest: Array = np.maximum(self.widest[..., power, begins], self.widest[..., power, ends - 2**power])
        return largest

    def memory(self, begins: Place, ends: Place, in_flight: Place) -> Array:
        """Bytes with this number of micro-batches in flight."""
        needed: Array = in_flight * self.activation(begins, ends) + self.workspace(begins, ends)
        return needed + self.statics(begins, ends)

    def most_in_flight(self, begins: Place, ends: Place, limit: int) -> Array:
        """Micro-batches whose activations fit into ``limit`` bytes beside the rest; -1 if not even the rest does."""
        left = limit - self.statics(begins, ends) - self.workspace(begins, ends)
        each = self.activation(begins, ends)
        return np.where(left < 0, -1, np.where(each > 0, left // np.maximum(each, 1), UNLIMITED))


@dataclass(frozen=True, slots=True)
class StageTimes:
    """``forwards`` and ``backwards`` [stage] of a micro-batch, and what one transfer between stages takes, in ns."""

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    transfer_ns: int = 0

    @property
    def num_stages(self) -> int:
        """Stages of the chain."""
        return len(self.forwards)

    @property
    def totals(self) -> tuple[int, ...]:
        """[stage] forward and backward."""
        return tuple(map(int.__add__, self.forwards, self.backwards))


@dataclass(frozen=True, slots=True)
class Fitting:
    """Knows of a chain's blocks whether some of them fit into ``memory_bytes`` as a stage.

    A stage holds parameters, gradients, optimizer state, the activations of one micro-batch for itself and one for
    every stage after it, at most of all there are, and the largest workspace. Splitting forwards changes none of it.
    """

    costs: ChainCosts
    memory_bytes: int
    num_microbatches: int

    def needs(self, num_stages: int, stages: Place, begins: Place, ends: Place) -> Array:
        """Bytes of blocks begin..end-1 as that of ``num_stages``."""
        in_flight = np.minimum(self.num_microbatches, num_stages - stages)
        return self.costs.memory(begins, ends, in_flight)

    def fits(self, num_stages: int, stages: Place, begins: Place, ends: Place) -> np.ndarray:
        """Whether blocks begin..end-1 fit as that of ``num_stages``."""
        return self.needs(num_stages, stages, begins, ends) <= self.memory_bytes

    def all_fit(self, begins: Sequence[int]) -> bool:
        """Whether every stage of a cut does."""
        bounds = np.array((*begins, self.costs.num_blocks))
        return bool(self.fits(len(begins), np.arange(len(begins)), bounds[:-1], bounds[1:]).all())

    def any_cut(self, num_stages: int) -> bool:
        """Whether some cut into ``num_stages`` fits: that whose stages, first to last, take as much as fits.

        More blocks never need less, so if any cut fits this one does.
        """
        begin, count = 0, self.costs.num_blocks
        for stage in range(num_stages):
            ends = np.arange(begin + 1, count - (num_stages - stage - 1) + 1)
            fitting = int(self.fits(num_stages, stage, begin, ends).sum())
            if not fitting:
                return False
            begin = int(ends[fitting - 1])
        return begin == count


def over_all(num_blocks: int, of: Callable[[Array, Array], Array], none: float) -> FloatArray:
    """[begin, end] the value ``of`` every range of blocks, and ``none`` where there is no range."""
    checkpoint()
    found = np.full((num_blocks + 1, num_blocks + 1), none)
    ranges = np.triu_indices(num_blocks + 1, 1)
    found[ranges] = of(*ranges)
    return found


def _between(sums: Array, begins: Place, ends: Place) -> Array:
    between: Array = sums[..., ends] - sums[..., begins]
    return between


def _sums(rows: Sequence[Sequence[StageCost]]) -> Array:
    """[kind, row, block + 1] of forward, compute, activations, gradients, static, and each kind of state."""
    kinds = {id(cost): cost for row in rows for cost in row}  # blocks that are alike have the same
    places = {kind: place for place, kind in enumerate(kinds)}
    numbers = [
        (
            *(cost.forward_ns, cost.compute_ns, cost.activation_bytes, cost.gradient_bytes, cost.static_bytes),
            *(cost.state[kind] for kind in STATE_KINDS),
        )
        for cost in kinds.values()
    ]
    values = np.array(numbers, dtype=np.int64)[[[places[id(cost)] for cost in row] for row in rows]]
    sums = np.zeros((values.shape[2], values.shape[0], values.shape[1] + 1), dtype=np.int64)
    np.cumsum(np.moveaxis(values, 2, 0), axis=2, out=sums[:, :, 1:])
    return sums


def _tied(costs: Sequence[StageCost]) -> tuple[tuple[TiedShare, Array], ...]:
    """What blocks share, and how many of them there are before each cut."""
    found = dict.fromkeys(each for cost in costs for each in sorted(cost.tied))
    holders = {each: [each in cost.tied for cost in costs] for each in found}
    return tuple((each, np.cumsum([0, *own])) for each, own in holders.items())


def _widest(rows: Sequence[Sequence[StageCost]]) -> Array:
    """[row, power, begin]"""
    levels = [np.array([[cost.workspace_bytes for cost in row] for row in rows], dtype=np.int64)]
    for power in range(len(rows[0]).bit_length() - 1):
        widest = levels[-1].copy()
        np.maximum(widest[:, : -(2**power)], levels[-1][:, 2**power :], out=widest[:, : -(2**power)])
        levels.append(widest)
    return np.stack(levels, axis=1)


def _sums_inside(repeats: Sequence[Repeat], count: int) -> Array | None:
    """[begin, end] bytes of the repeats whose two blocks both are among blocks begin .. end-1."""
    if not repeats:
        return None
    table = np.zeros((count + 1, count + 1), dtype=np.int64)
    for first, second, size in repeats:
        table[first, second + 1] += size
    found: Array = np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
    return found
