"""Stages of a chain when each group of devices has a frontier of ways to run its blocks, not one cost.

A group of g devices may run a run of blocks all in one way: it splits the samples (replicas), the blocks (shards),
recomputes, or any mixture; or it may split each block in a way of its own
(:mod:`pipeplan.partition.per_block_sharding`), recomputing or not. For every run of blocks these ways form a frontier
of memory against time. Memory depends on the place in the pipeline, since the k-th stage from the end holds k
micro-batches in flight (1F1B). Under a memory limit each stage takes the fastest way that fits, and a dynamic program
over (stages from the end, devices, first block) finds the cuts whose slowest stage is quickest. Going through the
limits from the top gives the frontier of the whole partition.

Of runs split block by block the program knows bounds at first. The frontiers of those in its best partitions are
tracked, their times take the place of the bounds, and it runs again until no bounds are left in its best partitions:
then these are the best there are.

What the program leaves out (transfers, ramps) the simulation of each partition has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from pipeplan.errors import UsageError
from pipeplan.files import Cluster, PlacedStage, Placement, Profile
from pipeplan.partition.chain.costs import Array, FloatArray, over_all
from pipeplan.partition.chain.kernel import Programme, shortest_first
from pipeplan.partition.per_block_sharding import (
    BlockSplits,
    GroupSplits,
    RunFrontiers,
    RunPoint,
    UniformRuns,
    UniformWay,
    UniformWays,
)
from pipeplan.time_limit import checkpoint

__all__ = ["ChainCut", "StageFrontiers"]


@dataclass(frozen=True, slots=True)
class ChainCut:
    """A partition: ns of its slowest stage for one micro-batch, and bytes of the device that needs most.

    ``splits`` are the strategies of stages, by their place, whose blocks are each split in a way of its own.
    """

    placement: Placement
    slowest_ns: int
    memory_bytes: int
    splits: Mapping[int, RunPoint]

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.placement.stages)


@dataclass(frozen=True, slots=True)
class StageFrontiers:
    """The frontiers of all runs of a profile's blocks, for so many micro-batches of one size.

    ``order`` is the chain; a graph's blocks stand in topological order. ``splits`` are the frontiers of groups of so
    many devices.
    """

    order: tuple[str, ...]
    num_microbatches: int
    runs: tuple[UniformRuns, ...]
    splits: Mapping[int, Sequence[BlockSplits]]

    @classmethod
    def of(
        cls,
        profile: Profile,
        microbatch_size: int,
        num_microbatches: int,
        num_devices: int,
        recompute: Sequence[bool],
        cluster: Cluster | None = None,
        splits: GroupSplits | None = None,
    ) -> StageFrontiers:
        """The ways for groups of up to so many devices; sizes are powers of two, and all devices.

        ``splits`` are frontiers of the same profile that may be known already.

        Raises:
            UsageError: no way has costs for this micro-batch size.
        """
        order = profile.topological_order()
        groups = sorted({1 << power for power in range(num_devices.bit_length())} | {num_devices})
        pricing = UniformWays(profile, order, microbatch_size, num_microbatches, cluster)
        found = [runs for group in groups if group <= num_devices for runs in pricing.possible(group, recompute)]
        known = splits or GroupSplits(profile, cluster)
        several = [group for group in groups if 1 < group <= num_devices]
        own = {group: known.of(group, microbatch_size, num_microbatches, recompute) for group in several}
        if not found and not any(own.values()):
            raise UsageError(_no_way(profile, microbatch_size))
        return cls(order, num_microbatches, tuple(found), own)

    def fastest(self, num_devices: int, memory_bytes: int | None, most: int | None = None) -> list[ChainCut]:
        """For every number of stages, the partition of all devices with the quickest slowest stage that fits.

        Those that promise the quickest iterations come first, and at most so many are looked for.
        """
        search = _Cuts(self, num_devices, np.inf if memory_bytes is None else memory_bytes)
        while True:
            drafts = sorted(search.drafts(), key=lambda draft: draft.promised_ns(self.num_microbatches))[:most]
            if not search.settle(drafts):
                return [search.cut(draft) for draft in drafts]


@dataclass(frozen=True, slots=True)
class _Draft:
    """Runs of blocks with their groups, in order; of some, times may be bounds. ``stages``: (begin, end, devices)."""

    slowest_ns: int
    stages: tuple[tuple[int, int, int], ...]

    def promised_ns(self, num_microbatches: int) -> int:
        """Of an iteration without transfers, were all stages as slow as the slowest."""
        return self.slowest_ns * (num_microbatches + len(self.stages) - 1)


@dataclass(slots=True)
class _Cuts:
    """Partitions of all devices under one limit; ``groups`` are those of the k-th stage from the end."""

    frontiers: StageFrontiers
    num_devices: int
    limit: float
    groups: list[dict[int, _GroupTimes]] = field(init=False)

    def __post_init__(self) -> None:
        places = min(self.num_devices, len(self.frontiers.order))
        self.groups = [{}, *(self._groups(place) for place in range(1, places + 1))]

    def _groups(self, place: int) -> dict[int, _GroupTimes]:
        """What groups of every size take for every run of blocks."""
        checkpoint()
        runs, splits = self.frontiers.runs, self.frontiers.splits
        in_flight = min(place, self.frontiers.num_microbatches)
        most = self.num_devices - place + 1  # every other stage behind it has one at least
        sizes = sorted(size for size in {each.way.num_devices for each in runs} | set(splits) if size <= most)
        return {
            size: _GroupTimes.of(
                [each for each in runs if each.way.num_devices == size],
                [each.holding(in_flight) for each in splits.get(size, ())],
                in_flight,
                self.limit,
                len(self.frontiers.order),
            )
            for size in sizes
        }

    def drafts(self) -> Iterator[_Draft]:
        """The best of every number of stages, by what is known.

        The programme adds stages in front of the last ones, so its cuts are numbered from the end.
        """
        last, sizes = len(self.frontiers.order), sorted(self.groups[1])
        programme = Programme(last + 1, np.inf, devices=sizes, num_devices=self.num_devices, by_way=True)
        candidates = shortest_first(np.zeros(last + 1, dtype=np.int64))
        layers = [programme.start()]
        for groups in self.groups[1:]:
            checkpoint()
            layers.append(programme.extended(layers[-1], _price(groups, sizes, last), candidates))
            slowest = float(layers[-1].values[self.num_devices, last])
            if np.isfinite(slowest):
                traced = programme.traced(layers[1:], last)
                yield _Draft(int(slowest), tuple((last - end, last - begin, sizes[way]) for begin, end, way in traced))

    def settle(self, drafts: Sequence[_Draft]) -> bool:
        """Have the frontiers tracked of runs of which only bounds are known; whether there were any."""
        wanted = {
            (len(draft.stages) - index, size, begin, end)
            for draft in drafts
            for index, (begin, end, size) in enumerate(draft.stages)
        }
        new = [self.groups[place][size].settle(begin, end) for place, size, begin, end in sorted(wanted)]  # all of them
        return any(new)

    def cut(self, draft: _Draft) -> ChainCut:
        """The partition of a settled draft, on the devices in order."""
        placed: list[PlacedStage] = []
        splits: dict[int, RunPoint] = {}
        first, memory = 0, 0.0
        for index, (begin, end, size) in enumerate(draft.stages):
            group = self.groups[len(draft.stages) - index][size]
            devices, blocks = tuple(range(first, first + size)), self.frontiers.order[begin:end]
            split = group.split(begin, end)
            if split is None:
                way, bytes_ = group.way(begin, end)
                placed.append(
                    PlacedStage(
                        blocks=blocks,
                        devices=devices,
                        shards=way.shards,
                        replicas=way.replicas,
                        recompute=way.recompute,
                    )
                )
            else:
                splits[index], bytes_ = split, split.memory_bytes
                ways = split.configurations
                placed.append(
                    PlacedStage(
                        blocks=blocks, devices=devices, shards=size, recompute=split.recompute, configurations=ways
                    )
                )
            first, memory = first + size, max(memory, bytes_)
        placement = Placement(strategy="stage graph", num_devices=self.num_devices, stages=tuple(placed))
        return ChainCut(placement, draft.slowest_ns, int(memory), splits)


@dataclass(slots=True)
class _Own:
    """Runs of blocks that are each split in a way of its own, recomputing or not.

    ``least`` is what they take at least, [n + 1, n + 1]; ``tracked`` are those of which it is known what they take,
    with their quickest strategies that fit.
    """

    frontiers: RunFrontiers
    limit: float
    least: FloatArray
    tracked: dict[tuple[int, int], RunPoint | None] = field(default_factory=dict)

    def track(self, begin: int, end: int) -> None:
        """Track a run's frontier. Runs around it take no less, but for what they spare at its ends."""
        blocks = self.frontiers.order[begin:end]
        point = self.frontiers.quickest(blocks, self.limit)
        self.tracked[begin, end] = point
        time = np.inf if point is None else point.time_ns
        around = self.least[: begin + 1, end:]
        np.maximum(around, time - self.frontiers.at_ends(blocks), out=around)
        self.least[begin, end] = time


@dataclass(slots=True)
class _GroupTimes:
    """What a group of devices takes for every run of blocks: ns, infinite where nothing fits, [n + 1, n + 1].

    ``uniform`` is all blocks in one way, the fastest that fits; ``own`` each in its own.
    """

    ways: tuple[UniformWay, ...]
    memory: FloatArray  # bytes of the chosen way
    uniform: FloatArray
    chosen: npt.NDArray[np.intp]
    own: tuple[_Own, ...]
    times: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self.times = self._least()

    def _least(self) -> FloatArray:
        least: FloatArray = np.minimum.reduce([self.uniform, *(each.least for each in self.own)])
        return least

    @classmethod
    def of(
        cls,
        runs: Sequence[UniformRuns],
        frontiers: Sequence[RunFrontiers],
        in_flight: int,
        limit: float,
        num_blocks: int,
    ) -> _GroupTimes:
        """Of the ways of a group, and of the frontiers of its runs."""
        none = np.full((num_blocks + 1, num_blocks + 1), np.inf)  # argmin needs one
        needed = [over_all(num_blocks, partial(each.costs.memory, in_flight=in_flight), np.inf) for each in runs]
        memory = np.stack([*needed, none])
        times = np.where(memory <= limit, np.stack([*(each.time for each in runs), none]), np.inf)
        own = tuple(_Own(each, limit, each.least_times(limit)) for each in frontiers)
        chosen = times.argmin(axis=0)
        taken, fastest = (np.take_along_axis(each, chosen[None], axis=0)[0] for each in (memory, times))
        return cls(tuple(each.way for each in runs), taken, fastest, chosen, own)

    def way(self, begin: int, end: int) -> tuple[UniformWay, float]:
        """The fastest for all blocks of a run, and its bytes."""
        return self.ways[int(self.chosen[begin, end])], float(self.memory[begin, end])

    def _best(self, begin: int, end: int) -> _Own | None:
        """Where a run is, or may be, faster with each block in its own way."""
        best = min(self.own, key=lambda own: float(own.least[begin, end]), default=None)
        return best if best is not None and best.least[begin, end] < self.uniform[begin, end] else None

    def split(self, begin: int, end: int) -> RunPoint | None:
        """The strategy of a settled run, where it is faster than any way for all of its blocks."""
        best = self._best(begin, end)
        return None if best is None else best.tracked[begin, end]

    def settle(self, begin: int, end: int) -> bool:
        """Track a run's frontier where its bound promises something; whether that was new."""
        best = self._best(begin, end)
        if best is None or (begin, end) in best.tracked:
            return False
        best.track(begin, end)
        self.times = self._least()
        return True


def _price(groups: Mapping[int, _GroupTimes], sizes: Sequence[int], last: int) -> Callable[[Array, Array], FloatArray]:
    """What stages take on groups of each size, some of which may be too large, for cuts numbered from the end."""
    none = np.full((last + 1, last + 1), np.inf)
    times = np.stack([groups[size].times if size in groups else none for size in sizes])
    return lambda begins, ends: times[:, last - ends, last - begins]


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
