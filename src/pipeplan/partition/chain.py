"""A chain of blocks to be cut into stages on given devices: what a choice of cuts means for each device.

Cuts are given as ``begins``: the first block of each stage. Memory is what a device takes at the very least, when
one micro-batch is in flight: parameters, gradients and optimizer state of all its stages, the activations of its
stages up to the one that runs, and that one's workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipeplan.costs import StageCosts

__all__ = ["Chain", "Range"]

Range = tuple[int, int]
"""Blocks begin..end-1 of the chain."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks in a line, the device of each stage, and the memory of each device.

    ``times``, ``statics`` and ``activations`` [block + 1] are running sums over the blocks, in ns and bytes;
    ``workspaces`` [block] and ``memory`` [device] are bytes, None is no limit; ``devices`` [stage].
    """

    times: Sequence[int]
    statics: Sequence[int]
    activations: Sequence[int]
    workspaces: Sequence[int]
    devices: Sequence[int]
    memory: Sequence[int | None]

    @classmethod
    def of(cls, costs: Sequence[StageCosts], devices: Sequence[int], memory: Sequence[int | None]) -> Chain:
        """The chain of blocks with these ``costs`` [block]."""
        return cls(
            [0, *accumulate(cost.forward_ns + cost.backward_ns for cost in costs)],
            [0, *accumulate(2 * cost.parameter_bytes + cost.optimizer_bytes for cost in costs)],
            [0, *accumulate(cost.activation_bytes for cost in costs)],
            [cost.workspace_bytes for cost in costs],
            devices,
            memory,
        )

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
        held = peak = 0
        for begin, end in ranges:
            held += self.activations[end] - self.activations[begin]
            peak = max(peak, held + max(self.workspaces[begin:end]))
        return peak + sum(self.statics[end] - self.statics[begin] for begin, end in ranges)

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
