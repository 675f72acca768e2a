"""A chain of blocks to be cut into stages on given devices: what a choice of cuts means for each device.

Cuts are given as ``begins``: the first block of each stage. Memory is what a device takes at the very least, when
one micro-batch is in flight: parameters, gradients and optimizer state of all its stages, the activations of its
stages up to the one that runs, and that one's workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import StageCost

__all__ = ["Array", "Chain", "Held", "Range", "Sums"]

Array = NDArray[np.int64]

Range = tuple[int, int]
"""Blocks begin..end-1 of the chain."""


@dataclass(frozen=True, slots=True)
class Sums:
    """A chain's running sums, in ns and bytes, for many ranges begin..end-1 of its blocks at once.

    ``widest`` [power, begin] is the largest workspace of the 2^power blocks from ``begin`` on.
    """

    times: Array
    statics: Array
    activations: Array
    widest: Array

    @classmethod
    def of(
        cls, times: Sequence[int], statics: Sequence[int], activations: Sequence[int], workspaces: Sequence[int]
    ) -> Self:
        """Those of running sums [block + 1] and workspaces [block]."""
        rows = [np.array(workspaces, dtype=np.int64)]
        for power in range(len(workspaces).bit_length() - 1):
            ahead = np.concatenate((rows[-1][2**power :], np.zeros(2**power, dtype=np.int64)))
            rows.append(np.maximum(rows[-1], ahead))
        return cls(np.array(times), np.array(statics), np.array(activations), np.array(rows))

    def time(self, begins: Array, ends: Array) -> Array:
        """Forward and backward of these blocks, in ns."""
        times: Array = self.times[ends] - self.times[begins]
        return times

    def workspace(self, begins: Array, ends: Array) -> Array:
        """The largest workspace among these blocks, in bytes; no range is empty. Two powers cover each."""
        power = np.frexp(ends - begins)[1] - 1
        largest: Array = np.maximum(self.widest[power, begins], self.widest[power, ends - 2**power])
        return largest

    def bytes_of(self, before: Held, begins: Array, ends: Array, after: Held) -> Array:
        """:meth:`Chain.bytes_of` a device that runs these blocks between others."""
        held = before.activations + self.activations[ends] - self.activations[begins]
        running = held + np.maximum(self.workspace(begins, ends), after.peak)
        statics = before.statics + after.statics + self.statics[ends] - self.statics[begins]
        needed: Array = statics + np.maximum(before.peak, running)
        return needed


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of stages of a device: the activations of all, the most they take while they run, what is always there."""

    activations: int = 0
    peak: int = 0
    statics: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks in a line, the device of each stage, and the memory of each device.

    ``times``, ``statics`` and ``activations`` [block + 1] are running sums over the blocks, in ns and bytes;
    ``workspaces`` [block] and ``memory`` [device] are bytes, None is no limit; ``devices`` [stage]. ``sums`` are the
    same once more, for many ranges at once.
    """

    times: Sequence[int]
    statics: Sequence[int]
    activations: Sequence[int]
    workspaces: Sequence[int]
    devices: Sequence[int]
    memory: Sequence[int | None]
    sums: Sums

    @classmethod
    def of(cls, costs: Sequence[StageCost], devices: Sequence[int], memory: Sequence[int | None]) -> Chain:
        """The chain of blocks with these ``costs`` [block]."""
        times = [0, *accumulate(cost.forward_ns + cost.backward_ns for cost in costs)]
        statics = [0, *accumulate(2 * cost.parameter_bytes + cost.optimizer_bytes for cost in costs)]
        activations = [0, *accumulate(cost.activation_bytes for cost in costs)]
        workspaces = [cost.workspace_bytes for cost in costs]
        sums = Sums.of(times, statics, activations, workspaces)
        return cls(times, statics, activations, workspaces, devices, memory, sums)

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
        return self.statics[-1] + self.activations[-1] > sum(limits) or alone > max(limits)

    def time(self, begin: int, end: int) -> int:
        """Forward and backward of these blocks, in ns."""
        return self.times[end] - self.times[begin]

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

    def held(self, ranges: Sequence[Range]) -> Held:
        """What a device's stages of these blocks take, in the order of the chain."""
        held = peak = 0
        for begin, end in ranges:
            held += self.activations[end] - self.activations[begin]
            peak = max(peak, held + max(self.workspaces[begin:end]))
        return Held(held, peak, sum(self.statics[end] - self.statics[begin] for begin, end in ranges))

    def fits(self, device: int, ranges: Sequence[Range]) -> bool:
        """Whether a device holds stages of these blocks."""
        limit = self.memory[device]
        return limit is None or self.bytes_of(ranges) <= limit

    def loads(self, begins: Sequence[int]) -> list[int]:
        """[device] ns of work for one micro-batch."""
        loads = [0] * len(self.memory)
        for (begin, end), device in zip(self.ranges(begins), self.devices, strict=True):
            loads[device] += self.time(begin, end)
        return loads

    def longest(self, begins: Sequence[int]) -> int:
        """Ns of work of the longest stage for one micro-batch."""
        return max(self.time(begin, end) for begin, end in self.ranges(begins))

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
