"""Stages of a chain when each group of devices has a frontier of ways to run its blocks, not one cost.

A group of g devices may run a run of blocks all in one way: it splits the samples (replicas), the blocks (shards),
recomputes, or any mixture; or it may split each block in a way of its own
(:mod:`pipeplan.partition.per_block_sharding`), recomputing or not. :data:`SPLITS` lists these kinds. For every run of
blocks the ways form a frontier of memory against time. Memory depends on the place in the pipeline, since the k-th
stage from the end holds k micro-batches in flight (1F1B). Under a memory limit each stage takes the fastest way that
fits, and a dynamic program over (stages from the end, devices, first block) finds the cuts whose slowest stage is
quickest. Going through the limits from the top gives the frontier of the whole partition.

Of some kinds the program knows bounds at first. The runs in its best partitions are settled: what they take replaces
the bounds, and it runs again until no bounds are left in its best partitions; then these are the best there are.

What the program leaves out (transfers, ramps) the simulation of each partition has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from pipeplan.costs import StageCost
from pipeplan.costs.after import AfterActions
from pipeplan.costs.zero import WHOLE, Zero
from pipeplan.errors import TooLargeError, UsageError
from pipeplan.files import Cluster, PlacedStage, Placement, Profile
from pipeplan.partition.chain.costs import Array, ChainCosts, FloatArray, over_all
from pipeplan.partition.chain.kernel import Layer, Programme, shortest_first
from pipeplan.partition.per_block_sharding import BlockSplits, GroupSplits, RunFrontiers, RunPoint
from pipeplan.partition.problem import Way
from pipeplan.search_constants import TABLED_BLOCKS
from pipeplan.time_limit import checkpoint
from pipeplan.workload.elements import Again


@dataclass(frozen=True, slots=True)
class SplitStage:
    """A stage, how it is split over its devices, and what it takes in its place: bytes at the peak, ns a micro-batch.

    ``given`` are its costs where a profile does not say them.
    """

    stage: PlacedStage
    memory_bytes: int
    time_ns: int
    given: StageCost | None = None


class RunTimes(Protocol):
    """What a device group takes for every run of blocks, split in one kind of way, under a memory limit."""

    @property
    def least(self) -> FloatArray:
        """[begin, end] in ns, infinite where nothing fits; until a run is settled it may be a bound."""

    def settle(self, begin: int, end: int) -> bool:
        """Find out what a run takes, where only a bound is known; whether that was new."""

    def split(self, begin: int, end: int, first: int) -> SplitStage:
        """A settled run as a stage on the devices from ``first`` on."""


class SplitKind(Protocol):
    """A kind of way in which one device group can split stages."""

    def under(self, in_flight: int, limit: float) -> RunTimes:
        """With this number of micro-batches in flight and ``limit`` bytes on each device."""


@dataclass(frozen=True, slots=True)
class ChainCut:
    """A partition: its stages, and ns of the slowest for one micro-batch."""

    stages: tuple[SplitStage, ...]
    slowest_ns: int

    @property
    def placement(self) -> Placement:
        """The stages as they are."""
        devices = sum(len(each.stage.devices) for each in self.stages)
        return Placement(strategy="stage graph", num_devices=devices, stages=tuple(each.stage for each in self.stages))

    @property
    def memory_bytes(self) -> int:
        """Memory of the device that needs most."""
        return max(each.memory_bytes for each in self.stages)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stages)

    @property
    def given(self) -> dict[int, StageCost]:
        """The costs of stages, by their place, that a profile does not say."""
        return {place: each.given for place, each in enumerate(self.stages) if each.given is not None}


@dataclass(frozen=True)
class StageFrontiers:
    """The frontiers of all runs of a profile's blocks, for a number of micro-batches of one size.

    ``most_devices`` are those of the largest group; ``recompute`` lists the choices of every stage. ``known`` are
    frontiers of the same profile that may have been looked at already. ``zero`` is what so many replicas divide of what
    they keep, None where there cannot be so many; blocks that are each split in a way of their own divide nothing.

    Raises:
        UsageError: no way has costs for this micro-batch size; or there are too many blocks (TooLargeError).
    """

    profile: Profile
    microbatch_size: int
    num_microbatches: int
    most_devices: int
    recompute: Sequence[Again]
    cluster: Cluster | None = None
    known: GroupSplits | None = None
    zero: Callable[[int], Zero | None] = lambda replicas: WHOLE

    def __post_init__(self) -> None:
        if (count := len(self.profile.blocks)) > TABLED_BLOCKS:
            raise TooLargeError(
                f"partitions of all device groups keep tables of all runs of blocks, of at most {TABLED_BLOCKS:,} "
                f"blocks and not {count:,}; group blocks, or use search"
            )
        if not self.kinds:
            raise UsageError(_no_way(self.profile, self.microbatch_size))

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The chain; a graph's blocks are in topological order."""
        return self.profile.topological_order()

    @cached_property
    def kinds(self) -> Mapping[int, Sequence[SplitKind]]:
        """{devices: ways to split stages}, for groups of powers of two and of all devices."""
        sizes = sorted({1 << power for power in range(self.most_devices.bit_length())} | {self.most_devices})
        found = {size: [kind for kinds in SPLITS for kind in kinds(self, size)] for size in sizes}
        return {size: kinds for size, kinds in found.items() if kinds}

    def fastest(self, num_devices: int, memory_bytes: int | None, most: int | None = None) -> list[ChainCut]:
        """For every number of stages, the partition of all devices with the quickest slowest stage that fits.

        Those that promise the quickest iterations come first, and ``most`` bounds how many are looked for.
        """
        search = _Cuts(self, num_devices, np.inf if memory_bytes is None else memory_bytes)
        while True:
            drafts = sorted(search.drafts(), key=lambda draft: draft.promised_ns(self.num_microbatches))[:most]
            enough = most is not None and len(drafts) == most
            if search.reach(drafts[-1].promised_ns(self.num_microbatches) if enough else math.inf):
                continue
            if not search.settle(drafts):
                return [search.cut(draft) for draft in drafts]


# Cuts -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draft:
    """Runs of blocks with their groups, in order; of some, times may be bounds. ``stages``: (begin, end, devices)."""

    slowest_ns: int
    stages: tuple[tuple[int, int, int], ...]

    def promised_ns(self, num_microbatches: int) -> int:
        """The iteration without transfers, if all stages were as slow as the slowest."""
        return self.slowest_ns * (num_microbatches + len(self.stages) - 1)


@dataclass(slots=True)
class _Cuts:
    """Partitions of all devices under one limit; ``groups`` are those of the k-th stage from the end, by size.

    Looking at a stage's groups takes time, so that there are only as many as :meth:`reach` has found reason for. The
    last stage holds least in flight: were all stages like it, none would be slower, which bounds what more of them
    would take. ``least_ns`` [number of stages] says so, infinite where none fit.
    """

    frontiers: StageFrontiers
    num_devices: int
    limit: float
    groups: list[dict[int, _GroupTimes]] = field(init=False)
    least_ns: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = [{}, self._groups(1)]
        last = len(self.frontiers.order)
        alike = self._layers([self.groups[1]] * min(self.num_devices, last))
        self.least_ns = [math.inf, *(float(layer.values[self.num_devices, last]) for layer in alike)]

    def reach(self, promised_ns: float) -> bool:
        """Look at the groups of more stages if some number of them may promise less; whether one does.

        What more stages promise is not known; it is no less than were all like the last one. They are looked at up to
        the first such number, or where nothing is promised yet to twice as many as before.
        """
        filling, known = self.frontiers.num_microbatches - 1, len(self.groups)
        more = range(known, len(self.least_ns))
        able = (place for place in more if self.least_ns[place] * (filling + place) < promised_ns)
        last = next(able, 0)
        if last and math.isinf(promised_ns):
            last = max(last, min(2 * known, len(self.least_ns)) - 1)
        self.groups += [self._groups(place) for place in range(known, last + 1)]
        return last > 0

    def _groups(self, place: int) -> dict[int, _GroupTimes]:
        """What groups of every size take for every run of blocks."""
        checkpoint()
        in_flight = min(place, self.frontiers.num_microbatches)
        most = self.num_devices - place + 1  # every stage after it has one at least
        return {
            size: _GroupTimes([kind.under(in_flight, self.limit) for kind in kinds])
            for size, kinds in self.frontiers.kinds.items()
            if size <= most
        }

    def drafts(self) -> Iterator[_Draft]:
        """The best of every number of stages, by what is known.

        The programme adds stages in front of the last ones, so its cuts are numbered from the end.
        """
        last, sizes, layers = len(self.frontiers.order), self._sizes, list[Layer]()
        for layer in self._layers(self.groups[1:]):
            layers.append(layer)
            slowest = float(layer.values[self.num_devices, last])
            if np.isfinite(slowest):
                traced = self._programme.traced(layers, last)
                yield _Draft(int(slowest), tuple((last - end, last - begin, sizes[way]) for begin, end, way in traced))

    def _layers(self, groups: Sequence[Mapping[int, _GroupTimes]]) -> Iterator[Layer]:
        """Of one stage, of two and so on, the k-th from the end with the k-th ``groups``."""
        last, layer = len(self.frontiers.order), self._programme.start()
        candidates = shortest_first(np.zeros(last + 1, dtype=np.int64))
        for each in groups:
            checkpoint()
            layer = self._programme.extended(layer, _price(each, self._sizes, last), candidates)
            yield layer

    @property
    def _sizes(self) -> list[int]:
        return sorted(self.groups[1])

    @property
    def _programme(self) -> Programme:
        last = len(self.frontiers.order)
        return Programme(last + 1, np.inf, devices=self._sizes, num_devices=self.num_devices, by_way=True)

    def settle(self, drafts: Sequence[_Draft]) -> bool:
        """Settle all runs of which only bounds are known; whether there were any."""
        wanted = {
            (len(draft.stages) - index, size, begin, end)
            for draft in drafts
            for index, (begin, end, size) in enumerate(draft.stages)
        }
        new = [self.groups[place][size].settle(begin, end) for place, size, begin, end in sorted(wanted)]  # all of them
        return any(new)

    def cut(self, draft: _Draft) -> ChainCut:
        """The partition of a settled draft, on the devices in order."""
        placed: list[SplitStage] = []
        first = 0
        for index, (begin, end, size) in enumerate(draft.stages):
            placed.append(self.groups[len(draft.stages) - index][size].best(begin, end).split(begin, end, first))
            first += size
        return ChainCut(tuple(placed), draft.slowest_ns)


@dataclass(slots=True)
class _GroupTimes:
    """What a group of devices takes for every run of blocks in any kind of way, of equal ones the first."""

    kinds: Sequence[RunTimes]
    times: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self.times = np.minimum.reduce([each.least for each in self.kinds])

    def best(self, begin: int, end: int) -> RunTimes:
        """The kind in which a run is, or may be, quickest."""
        return min(self.kinds, key=lambda each: float(each.least[begin, end]))

    def settle(self, begin: int, end: int) -> bool:
        """Settle a run in the kind that promises most; whether that was new."""
        new = self.best(begin, end).settle(begin, end)
        if new:
            self.times = np.minimum.reduce([each.least for each in self.kinds])
        return new


def _price(groups: Mapping[int, _GroupTimes], sizes: Sequence[int], last: int) -> Callable[[Array, Array], FloatArray]:
    """What stages take on groups of each size, some of which may be too large, for cuts numbered from the end."""
    none = np.full((last + 1, last + 1), np.inf)
    times = np.stack([groups[size].times if size in groups else none for size in sizes])
    return lambda begins, ends: times[:, last - ends, last - begins]


# Kinds of splits ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _UniformRuns:
    """Every way of a group in which all blocks run alike.

    ``costs`` [way] of the chain; ``times`` [way, begin, end] in ns, with a share of the gradients' all-reduce in each
    micro-batch.
    """

    order: tuple[str, ...]
    ways: tuple[Way, ...]
    costs: tuple[ChainCosts, ...]
    times: FloatArray

    def under(self, in_flight: int, limit: float) -> RunTimes:
        """The fastest that fits."""
        count = len(self.order)
        memory = np.stack(
            [over_all(count, lambda *ends, own=own: own.memory(*ends, in_flight), math.inf) for own in self.costs]
        )
        times = np.where(memory <= limit, self.times, np.inf)
        return _UniformTimes(self, memory, times.argmin(axis=0), times.min(axis=0))


@dataclass(frozen=True, slots=True)
class _UniformTimes:
    """The fastest of the ways that fit: ``chosen`` [begin, end]; ``memory`` [way, begin, end] of each."""

    runs: _UniformRuns
    memory: FloatArray
    chosen: Array
    least: FloatArray

    def settle(self, begin: int, end: int) -> bool:
        """It is known what every run takes."""
        return False

    def split(self, begin: int, end: int, first: int) -> SplitStage:
        """As the fastest way has it."""
        way = int(self.chosen[begin, end])
        stage = self.runs.ways[way].placed(self.runs.order[begin:end], first)
        return SplitStage(stage, int(self.memory[way, begin, end]), int(self.least[begin, end]))


def _all_alike(frontiers: StageFrontiers, num_devices: int) -> Iterator[SplitKind]:
    """All blocks in one way, for which all have costs."""
    priced = {way: _costs(frontiers, way) for way in _ways(frontiers, num_devices)}
    costs = {way: each for way, each in priced.items() if each is not None}
    if costs:
        times = np.stack([over_all(each.num_blocks, each.time, math.inf) for each in costs.values()])
        yield _UniformRuns(frontiers.order, tuple(costs), tuple(costs.values()), times)


def _ways(frontiers: StageFrontiers, num_devices: int) -> Iterator[Way]:
    """Every way of a group, with shards that all blocks know."""
    size = frontiers.microbatch_size
    for shards in sorted(set.intersection(*({row.shards for row in each.rows()} for each in frontiers.profile.blocks))):
        if num_devices % shards or size % (num_devices // shards):
            continue
        if (zero := frontiers.zero(num_devices // shards)) is not None:
            for again in frontiers.recompute:
                yield Way(size, num_devices // shards, recompute=again, shards=shards, zero=zero)


def _costs(frontiers: StageFrontiers, way: Way) -> ChainCosts | None:
    """The chain's costs in one way; None where blocks have none for its samples."""
    try:
        alone = way.pricing().costs(frontiers.profile, frontiers.order)
    except UsageError:
        return None
    after = AfterActions.of(frontiers.profile, frontiers.cluster, way.shards, frontiers.zero)
    sums = [after(cost.gradient_bytes, way.replicas) for cost in alone]
    shares = [-(-each // frontiers.num_microbatches) for each in sums]
    each = zip(alone, shares, strict=True)
    return ChainCosts.of([replace(cost, backward_ns=cost.backward_ns + share) for cost, share in each])


@dataclass(frozen=True, slots=True)
class _OwnRuns:
    """Each block in a way of its own."""

    splits: BlockSplits
    num_devices: int

    def under(self, in_flight: int, limit: float) -> RunTimes:
        """Bounds, until frontiers are tracked."""
        frontiers = self.splits.holding(in_flight)
        return _OwnTimes(frontiers, self.num_devices, limit, frontiers.least_times(limit))


@dataclass(slots=True)
class _OwnTimes:
    """``tracked`` are the runs of which it is known what they take, with their quickest strategies that fit."""

    frontiers: RunFrontiers
    num_devices: int
    limit: float
    least: FloatArray
    tracked: dict[tuple[int, int], RunPoint | None] = field(default_factory=dict)

    def settle(self, begin: int, end: int) -> bool:
        """Track a run's frontier. Runs around it take no less, but for what they spare at its ends."""
        if (begin, end) in self.tracked:
            return False
        blocks = self.frontiers.order[begin:end]
        point = self.frontiers.quickest(blocks, self.limit)
        self.tracked[begin, end] = point
        time = np.inf if point is None else point.time_ns
        around = self.least[: begin + 1, end:]
        np.maximum(around, time - self.frontiers.around(begin, end)[: begin + 1, end:], out=around)
        self.least[begin, end] = time
        return True

    def split(self, begin: int, end: int, first: int) -> SplitStage:
        """As the quickest strategy has it."""
        point = self.tracked[begin, end]
        assert point is not None
        devices = tuple(range(first, first + self.num_devices))
        return SplitStage(point.placed(devices), point.memory_bytes, point.time_ns, point.split.costs)


def _block_by_block(frontiers: StageFrontiers, num_devices: int) -> Iterator[SplitKind]:
    """Each block in a way of its own, recomputing or not."""
    if num_devices > 1:
        known = frontiers.known or GroupSplits(frontiers.profile, frontiers.cluster)
        given = num_devices, frontiers.microbatch_size, frontiers.num_microbatches, frontiers.recompute
        yield from (_OwnRuns(splits, num_devices) for splits in known.of(*given))


SPLITS: tuple[Callable[[StageFrontiers, int], Iterator[SplitKind]], ...] = (_all_alike, _block_by_block)
"""The kinds of ways in which a group of devices can split stages; of equally quick ones the first is taken."""


def _no_way(profile: Profile, microbatch_size: int) -> str:
    """Why no group can run any of the blocks."""
    known = {block.id: sorted({row.shards for row in block.rows()}) for block in profile.blocks}
    first = profile.blocks[0].id
    other = next((name for name, shards in known.items() if not set(shards) & set(known[first])), None)
    if other is None:
        return f"profile {profile.name!r} has no costs for micro-batches of {microbatch_size} samples"
    return (
        f"blocks of profile {profile.name!r} run only on different numbers of devices: {first!r} has costs for shards "
        f"{', '.join(map(str, known[first]))}, {other!r} for {', '.join(map(str, known[other]))}; add rows with common "
        "shards, or give pipeplan search a --placement that says where each block runs"
    )
