"""A chain of blocks to be cut into stages on given devices: what a choice of cuts means for each device.

Cuts are given as ``begins``: the first block of each stage. Memory is what a device takes at the very least, when
one micro-batch is in flight: parameters, gradients and optimizer state of all its stages, the activations of its
stages up to the one that runs, and that one's workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.costs import StageCost
from pipeplan.partition.chain_costs import Array, ChainCosts

__all__ = ["Chain", "Held", "Range"]

Range = tuple[int, int]
"""Blocks begin..end-1 of the chain."""


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
    ``workspaces`` [block] and ``memory`` [device] are bytes, None is no limit; ``devices`` [stage]. ``costs`` are the
    same for many ranges at once.
    """

    times: Sequence[int]
    statics: Sequence[int]
    activations: Sequence[int]
    workspaces: Sequence[int]
    devices: Sequence[int]
    memory: Sequence[int | None]
    costs: ChainCosts

    @classmethod
    def of(cls, costs: Sequence[StageCost], devices: Sequence[int], memory: Sequence[int | None]) -> Chain:
        """The chain of blocks with these ``costs`` [block]."""
        sums = ChainCosts.of(costs)
        lists = sums.compute.tolist(), sums.static.tolist(), sums.activations.tolist(), sums.widest[0].tolist()
        return cls(*lists, devices, memory, sums)

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

    def bytes_between(self, before: Held, begins: Array, ends: Array, after: Held) -> Array:
        """:meth:`bytes_of` a device that runs these blocks between others, for many ranges of blocks."""
        running = np.maximum(self.costs.workspace(begins, ends), after.peak)
        running += before.activations + self.costs.activation(begins, ends)
        needed: Array = np.maximum(before.peak, running) + self.costs.statics(begins, ends)
        return needed + before.statics + after.statics

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
