"""Stages of a chain when each group of devices has a frontier of ways to run its blocks, not one cost.

A group of g devices may split the samples (replicas), the blocks (shards), recompute, or any mixture: for every run of
blocks these ways form a frontier of memory against time. Memory depends on the place in the pipeline, since the k-th
stage from the end holds k micro-batches in flight (1F1B). Under a memory limit each stage takes the fastest way that
fits, and a dynamic program over (stages from the end, devices, first block) finds the cuts whose slowest stage is
quickest. Going through the limits from the top gives the frontier of the whole partition.

What the program leaves out (transfers, gradient sums, ramps) the simulation of each partition has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeplan.costs import group_costs
from pipeplan.errors import UsageError
from pipeplan.model import PlacedStage, Placement, Profile

__all__ = ["Cut", "StageFrontiers", "Way"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Way:
    """How a device group runs its blocks."""

    replicas: int
    shards: int
    recompute: bool

    @property
    def num_devices(self) -> int:
        """Devices of the group."""
        return self.replicas * self.shards


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition: ns of its slowest stage for one micro-batch, and bytes of the device that needs most."""

    placement: Placement
    slowest_ns: int
    memory_bytes: int

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.placement.stages)


@dataclass(frozen=True, slots=True)
class _Runs:
    """What a way costs for every run of blocks i..j-1: arrays [n + 1, n + 1], bytes per device and ns."""

    way: Way
    time: FloatArray
    static: FloatArray
    held: FloatArray
    workspace: FloatArray

    def memory(self, in_flight: int) -> FloatArray:
        """Bytes with so many micro-batches in flight."""
        return self.static + in_flight * self.held + self.workspace


@dataclass(frozen=True, slots=True)
class StageFrontiers:
    """The frontiers of all runs of a profile's blocks, for micro-batches of one size.

    ``order`` is the chain; a graph's blocks stand in topological order.
    """

    order: tuple[str, ...]
    microbatch_size: int
    runs: tuple[_Runs, ...]

    @classmethod
    def of(cls, profile: Profile, microbatch_size: int, num_devices: int, recompute: Sequence[bool]) -> StageFrontiers:
        """The ways for groups of up to so many devices; sizes are powers of two, and all devices.

        Raises:
            UsageError: no way has costs for this micro-batch size.
        """
        order = profile.topological_order()
        found = list(_possible(profile, order, microbatch_size, num_devices, recompute))
        if not found:
            raise UsageError(_no_way(profile, microbatch_size))
        return cls(order, microbatch_size, tuple(found))

    def fastest(self, num_devices: int, num_microbatches: int, memory_bytes: int | None) -> Iterator[Cut]:
        """For every number of stages, the partition of all devices with the quickest slowest stage that fits."""
        num_blocks = len(self.order)
        rest = [{0: np.where(np.arange(num_blocks + 1) == num_blocks, 0.0, np.inf)}]
        stages: list[dict[int, _Group]] = [{}]
        for place in range(1, min(num_devices, num_blocks) + 1):
            stages.append(self._groups(min(place, num_microbatches), memory_bytes))
            rest.append(_joined(stages[-1], rest[-1], num_devices))
            slowest = float(rest[-1][num_devices][0]) if num_devices in rest[-1] else np.inf
            if np.isfinite(slowest):
                yield self._cut(stages, rest, num_devices)

    def _groups(self, in_flight: int, memory_bytes: int | None) -> dict[int, _Group]:
        """What groups of every size take for every run of blocks."""
        limit = np.inf if memory_bytes is None else memory_bytes
        sizes = sorted({runs.way.num_devices for runs in self.runs})
        return {
            size: _Group.of([r for r in self.runs if r.way.num_devices == size], in_flight, limit) for size in sizes
        }

    def _cut(self, stages: list[dict[int, _Group]], rest: list[Rest], num_devices: int) -> Cut:
        """The stages behind the last entry of ``rest``, on the devices in order."""
        placed: list[PlacedStage] = []
        begin, left, memory = 0, num_devices, 0.0
        for groups, after in zip(stages[:0:-1], rest[-2::-1], strict=True):
            options = [
                (np.maximum(group.times[begin], after[left - size]), size)
                for size, group in groups.items()
                if left - size in after
            ]
            slowest, size = min(options, key=lambda option: float(option[0].min()))
            end = int(np.argmin(slowest))
            way = groups[size].way(begin, end)
            placed.append(
                PlacedStage(
                    blocks=self.order[begin:end],
                    devices=tuple(range(num_devices - left, num_devices - left + size)),
                    shards=way.shards,
                    replicas=way.replicas,
                    recompute=way.recompute,
                )
            )
            memory = max(memory, float(groups[size].memory[begin, end]))
            begin, left = end, left - size
        placement = Placement(strategy="stage graph", num_devices=num_devices, stages=tuple(placed))
        return Cut(placement, int(rest[-1][num_devices][0]), int(memory))


Rest = dict[int, FloatArray]
"""[devices] the ns of the slowest stage from each block on, [n + 1]."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The fastest way of a group for every run of blocks: ns, infinite where none fits, bytes, and which it is."""

    ways: tuple[Way, ...]
    times: FloatArray  # [n + 1, n + 1]
    memory: FloatArray  # [n + 1, n + 1]
    chosen: npt.NDArray[np.intp]

    @classmethod
    def of(cls, runs: Sequence[_Runs], in_flight: int, limit: float) -> _Group:
        memory = np.stack([each.memory(in_flight) for each in runs])
        times = np.where(memory <= limit, np.stack([each.time for each in runs]), np.inf)
        chosen = times.argmin(axis=0)
        ways = tuple(each.way for each in runs)
        return cls(ways, times.min(axis=0), np.take_along_axis(memory, chosen[None], axis=0)[0], chosen)

    def way(self, begin: int, end: int) -> Way:
        """How to run these blocks."""
        return self.ways[int(self.chosen[begin, end])]


def _joined(groups: dict[int, _Group], after: Rest, num_devices: int) -> Rest:
    """One stage more in front: for every number of devices, the best group and the best cut."""
    joined: Rest = {}
    for size, group in groups.items():
        for left, times in after.items():
            if left + size <= num_devices:
                found = np.maximum(group.times, times[None, :]).min(axis=1)
                joined[left + size] = np.minimum(joined.get(left + size, np.inf), found)
    return joined


def _possible(
    profile: Profile, order: Sequence[str], microbatch_size: int, num_devices: int, recompute: Sequence[bool]
) -> Iterator[_Runs]:
    """Every way that all blocks have costs for."""
    shards = sorted(set.intersection(*({row.shards for row in block.costs} for block in profile.blocks)))
    groups = {1 << power for power in range(num_devices.bit_length())} | {num_devices}
    for group in sorted(size for size in groups if size <= num_devices):
        for split in shards:
            if group % split == 0 and microbatch_size % (group // split) == 0:
                for again in recompute:
                    try:
                        yield _runs(profile, order, microbatch_size, Way(group // split, split, again))
                    except UsageError:  # this size was not profiled with so many shards
                        continue


def _no_way(profile: Profile, microbatch_size: int) -> str:
    """Why no group can run any of the blocks."""
    known = {block.id: sorted({row.shards for row in block.costs}) for block in profile.blocks}
    first = profile.blocks[0].id
    other = next((name for name, shards in known.items() if not set(shards) & set(known[first])), None)
    if other is None:
        return f"profile {profile.name!r} has no costs for micro-batches of {microbatch_size} samples"
    return (
        f"blocks of profile {profile.name!r} run on different numbers of devices alone: {first!r} has costs for shards "
        f"{', '.join(map(str, known[first]))}, {other!r} for {', '.join(map(str, known[other]))}; add rows with common "
        "shards, or give pipeplan search a --placement that says where each block runs"
    )


def _runs(profile: Profile, order: Sequence[str], microbatch_size: int, way: Way) -> _Runs:
    size = microbatch_size // way.replicas
    costs = group_costs(profile, [[block] for block in order], size, way.shards, recompute=way.recompute)
    first = np.arange(len(order) + 1)
    possible = first[:, None] < first[None, :]
    workspaces = np.array([cost.workspace_bytes for cost in costs], dtype=np.float64)
    largest = np.zeros(possible.shape)
    for begin in range(len(order)):
        largest[begin, begin + 1 :] = np.maximum.accumulate(workspaces[begin:])
    return _Runs(
        way,
        time=np.where(possible, _sums([cost.forward_ns + cost.backward_ns for cost in costs]), np.inf),
        static=_sums([2 * cost.parameter_bytes + cost.optimizer_bytes for cost in costs]),
        held=_sums([cost.activation_bytes for cost in costs]),
        workspace=largest,
    )


def _sums(values: Sequence[int]) -> FloatArray:
    """The sum over every run i..j-1, [n + 1, n + 1]."""
    until = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))
    sums: FloatArray = until[None, :] - until[:, None]
    return sums
