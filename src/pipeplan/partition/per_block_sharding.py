"""Stages whose blocks are each split in their own way: cost frontiers of all runs of blocks on a device group.

Each run has a frontier (TensorOpt, section 3), which takes part of a second to track. What every run takes *at least*
is known at once: but for changes of layout every block is by itself, and for a weighting of memory against time the
best of each is a minimum. Sums of these minima bound the time that a run takes in some memory (the Lagrangian dual of
choosing a configuration for every block). Only what the best partitions would be made of is tracked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeplan.errors import PipeplanError
from pipeplan.files import Cluster, PlacedStage, Profile
from pipeplan.partition.chain.costs import FloatArray
from pipeplan.search_constants import FEW_CONFIGURATIONS, RUN_WEIGHTINGS
from pipeplan.sharding.bounds import RELAXED
from pipeplan.sharding.cost_model import CostModel, CostOptions, cost_model
from pipeplan.sharding.details import SplitBlocks, StageModels, split_blocks
from pipeplan.sharding.graph import CostGraph, CostTie, Strategy, undominated
from pipeplan.sharding.operator_kinds import WholeBlock, is_profiled
from pipeplan.sharding.operators import Splits, Splittable
from pipeplan.sharding.table import BoolArray, IntArray, Weights
from pipeplan.sharding.tracking import Tracked, track
from pipeplan.workload.elements import Again


@dataclass(frozen=True, slots=True)
class RunPoint:
    """A strategy of a run's blocks, on the cost model of its stage; bytes at the peak of each device."""

    model: CostModel
    strategy: Strategy
    memory_bytes: int

    @property
    def time_ns(self) -> int:
        """The time of one micro-batch, with its share of the gradient sums."""
        return self.strategy.time_ns

    @property
    def split(self) -> SplitBlocks:
        """What its devices run."""
        return split_blocks(self.model, self.strategy)

    def placed(self, devices: tuple[int, ...]) -> PlacedStage:
        """The stage on these devices."""
        split = self.split
        return PlacedStage(
            blocks=split.blocks,
            devices=devices,
            shards=len(devices),
            recompute=self.model.options.recompute,
            configurations=split.configurations,
            context_exchange=split.exchange,
            remade=split.remade,
        )


@dataclass(slots=True)
class BlockSplits:
    """The frontiers of all runs of a profile's blocks on one group of devices, for micro-batches of one size."""

    order: tuple[str, ...]
    models: StageModels
    _known: dict[int, RunFrontiers] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster | None,
        num_devices: int,
        microbatch_size: int,
        num_microbatches: int,
        closed: Collection[str] = (),
    ) -> BlockSplits | None:
        """On the first devices of a cluster, whose rows are split along no axis that is ``closed``.

        None where blocks have no costs that configurations follow from.
        """

        def rule(operation: Splittable, splits: Splits) -> bool:
            left = isinstance(operation, WholeBlock) and not splits.keys().isdisjoint(closed)
            return not left and is_profiled(operation, splits)

        options = CostOptions(blocks=True, microbatches=num_microbatches, rule=rule)
        try:
            models = StageModels.of(cost_model(profile, cluster, num_devices, microbatch_size, options=options))
            found = cls(profile.topological_order(), models)
            found.holding(1)
        except (PipeplanError, ValueError):  # blocks of unknown kinds or devices
            return None
        return found

    def recomputing(self) -> BlockSplits:
        """The same with blocks that keep only their inputs."""
        return BlockSplits(self.order, self.models.recomputing())

    def holding(self, in_flight: int) -> RunFrontiers:
        """With this number of micro-batches in flight."""
        if in_flight not in self._known:
            self._known[in_flight] = RunFrontiers.of(self.order, self.models.holding(in_flight))
        return self._known[in_flight]


@dataclass(slots=True)
class GroupSplits:
    """The same for groups of any number of devices and micro-batches of any size, each looked at once."""

    profile: Profile
    cluster: Cluster | None
    closed: Collection[str] = ()
    _known: dict[tuple[int, int, int], tuple[BlockSplits, ...]] = field(default_factory=dict)

    def of(
        self, num_devices: int, microbatch_size: int, num_microbatches: int, recompute: Sequence[Again]
    ) -> list[BlockSplits]:
        """As :meth:`BlockSplits.of`, recomputing all or nothing; none where there are none."""
        key = num_devices, microbatch_size, num_microbatches
        if key not in self._known:
            plain = BlockSplits.of(self.profile, self.cluster, *key, self.closed)
            self._known[key] = () if plain is None else (plain, plain.recomputing())
        return [self._known[key][again] for again in recompute if isinstance(again, bool) and self._known[key]]


@dataclass(slots=True)
class RunFrontiers:
    """The frontiers of all runs of blocks for one number of micro-batches in flight; run i..j has blocks i to j - 1.

    ``order`` is topological. ``costs`` are the bytes and ns of every configuration of each block, and ``workspaces``
    its workspaces, [K]; ``useful`` are the configurations that no other one replaces everywhere. ``tied`` is what
    blocks share, and ``beside`` are the costs of these blocks, by place, without it.
    """

    order: tuple[str, ...]
    models: StageModels
    costs: list[tuple[IntArray, IntArray]]
    tied: list[_Tied]
    beside: dict[int, tuple[IntArray, IntArray]]
    workspaces: dict[str, IntArray]
    useful: dict[str, IntArray]
    _known: dict[object, _Levels] = field(default_factory=dict)

    @classmethod
    def of(cls, order: tuple[str, ...], models: StageModels) -> RunFrontiers:
        """The frontiers of a model's stages."""
        ways = models.whole.configurations
        workspaces = {name: np.array([way.workspace_bytes for way in ways[name]], np.int64) for name in order}
        useful = undominated(models.whole.graph, workspaces)
        costs = [(table.memory_bytes, table.time_ns) for table in (models.nodes[name].costs for name in order)]
        tied = [_Tied.of(tie, order) for tie in models.whole.ties]
        lowered = {node.name: node.costs for node in models.whole.graph.lowered().nodes} if tied else {}
        tables = {place: lowered[order[place]] for each in tied for place in each.places}
        beside = {place: (table.memory_bytes, table.time_ns) for place, table in tables.items()}
        return cls(order, models, costs, tied, beside, workspaces, useful)

    def least_times(self, limit: float) -> FloatArray:
        """[begin, end] ns that no strategy of a run that fits into ``limit`` bytes is below; infinite where none fits.

        What blocks hold adds up. Of workspace a run has at least the most that one of its blocks cannot do without.
        """
        space = limit - _largest([sizes.min() for sizes in self.workspaces.values()])
        runs = np.tri(len(self.order) + 1, k=-1, dtype=np.bool_).T
        possible = runs & (self._least((1.0, 0.0)) <= space)
        found = self._least((0.0, 1.0))
        for weight in self._weightings() if np.isfinite(limit) else ():
            best = self._least((weight, 1.0))
            np.maximum(found, best - weight * space, out=found)
        return np.where(possible, np.floor(found * (1 - RELAXED)), np.inf)

    def _least(self, weights: Weights) -> FloatArray:
        """[begin, end] the least that the blocks of every run cost together, what several of them share once."""
        least = [_least(each, weights) for each in self.costs]
        found, length = _sums(least), len(self.order)
        several = [each.count(length) > 1 for each in self.tied]
        for place, costs in self.beside.items():
            shares = np.any(
                [runs for each, runs in zip(self.tied, several, strict=True) if place in each.places], axis=0
            )
            found -= (shares & _runs_with(place, length)) * (least[place] - _least(costs, weights))
        for each, runs in zip(self.tied, several, strict=True):
            found += runs * each.least(weights)
        return found

    def _weightings(self) -> Sequence[float]:
        """Ns per byte between neighbours on the frontiers of blocks, where the best choice changes."""
        distinct = {id(memory): (memory, time) for memory, time in self.costs}.values()
        every = sorted({slope for memory, time in distinct for slope in _slopes(memory, time)})
        return every[:: -(-len(every) // RUN_WEIGHTINGS)] if every else []

    def quickest(self, blocks: Sequence[str], limit: float) -> RunPoint | None:
        """The quickest strategy of blocks, a run or others, that fits into ``limit`` bytes; None where none does."""
        key = self._key(blocks)
        if key not in self._known:
            sizes = {name: self.workspaces[name] for name in blocks}
            self._known[key] = _Levels(self.models.graph(blocks), sizes, {name: self.useful[name] for name in blocks})
        found = self._known[key].quickest(limit)
        if found is None:
            return None
        strategy, memory = found
        model = self.models.model(blocks)
        chosen = [strategy.configurations[name] for name in self._known[key].workspaces]
        names = {node.name: 0 for node in model.operators.nodes} | dict(zip(blocks, chosen, strict=True))
        own = Strategy(strategy.memory_bytes, strategy.time_ns, names, dict.fromkeys(names, 0), strategy.edge_variants)
        return RunPoint(model, own, memory)

    def around(self, begin: int, end: int) -> FloatArray:
        """[begin, end] ns by which a run around this one may be quicker at most, for every run.

        Changing what enters and leaves this one may be spared, and so may sums and step of what another block shares.
        """
        edges = [self.models.edges[link].costs for link in self.models.ends(self.order[begin:end])]
        spared = np.full((len(self.order) + 1,) * 2, float(sum(int(costs.time_ns.max()) for costs in edges)))
        for each in self.tied:
            spared += each.spared_around(begin, end, len(self.order))
        return spared

    def _key(self, blocks: Sequence[str]) -> object:
        """Equal for runs that cost the same."""
        place = {name: index for index, name in enumerate(blocks)}
        links = self.models.links(place)
        ends = [(place.get(link.source), place.get(link.target), id(self.models.edges[link].costs)) for link in links]
        users = ((tie, tuple(place.get(user.operator) for user in tie.users)) for tie in self.models.whole.ties)
        ties = tuple((id(tie), places) for tie, places in users if any(each is not None for each in places))
        return tuple(id(self.models.nodes[name].costs) for name in blocks), tuple(ends), ties


@dataclass(frozen=True, slots=True)
class _Tied:
    """What blocks share, and their places in the order."""

    tie: CostTie
    places: tuple[int, ...]

    @classmethod
    def of(cls, tie: CostTie, order: Sequence[str]) -> _Tied:
        """By the order of blocks."""
        return cls(tie, tuple(order.index(user.operator) for user in tie.users))

    def count(self, length: int) -> FloatArray:
        """[begin, end] how many of the blocks each run has."""
        found: FloatArray = np.sum([_runs_with(place, length) for place in self.places], axis=0, dtype=np.float64)
        return found

    def least(self, weights: Weights) -> float:
        """The least that several of the blocks cost for it together."""
        apart = self.tie.apart_ns
        every = ((user.memory_bytes, np.minimum(user.time_ns, apart) + user.step_ns) for user in self.tie.users)
        return min(_least(own, weights) for own in every)

    def spared_around(self, begin: int, end: int, length: int) -> FloatArray:
        """[begin, end] ns that a run around this one spares at most, because it has more of the blocks."""
        mine = [user for user, place in zip(self.tie.users, self.places, strict=True) if begin <= place < end]
        most = sum(float((user.time_ns + user.step_ns).max()) for user in mine)
        found: FloatArray = np.where(self.count(length) > len(mine), most, 0.0)
        return found


def _least(costs: tuple[IntArray, IntArray], weights: Weights) -> float:
    """The minimum over all configurations."""
    return float((weights[0] * costs[0] + weights[1] * costs[1]).min())


def _runs_with(place: int, length: int) -> BoolArray:
    """[begin, end] whether each run has the block at a place."""
    number = np.arange(length + 1)
    found: BoolArray = np.outer(number <= place, number > place)
    return found


def _sums(values: Sequence[float]) -> FloatArray:
    """[begin, end] the sum over every run of one value per block."""
    until = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))
    found: FloatArray = until[None, :] - until[:, None]
    return found


def _largest(values: Sequence[float]) -> FloatArray:
    """[begin, end] the largest of every run of one value per block."""
    each = np.asarray(values, dtype=np.float64)
    found = np.zeros((len(each) + 1, len(each) + 1))
    for begin in range(len(each)):
        found[begin, begin + 1 :] = np.maximum.accumulate(each[begin:])
    return found


def _slopes(memory: IntArray, time: IntArray) -> Iterator[float]:
    order = np.lexsort((time, memory))
    best: tuple[int, int] | None = None
    for more, quicker in zip(memory[order].tolist(), time[order].tolist(), strict=True):
        if best is None or quicker < best[1]:
            if best is not None and more > best[0]:
                yield (best[1] - quicker) / (more - best[0])
            best = more, quicker


@dataclass(slots=True)
class _Levels:
    """A run's frontier, and those of its configurations with less and less workspace as far as they were needed.

    Only the largest workspace counts, which is not tracked: it comes on top of a strategy. ``useful`` configurations
    are few, so that finding out what is in no frontier strategy would take longer than tracking.
    """

    graph: CostGraph
    workspaces: Mapping[str, IntArray]
    useful: Mapping[str, IntArray]
    _known: dict[int | None, _Level | None] = field(default_factory=dict)

    def quickest(self, limit: float) -> tuple[Strategy, int] | None:
        """The quickest strategy that fits, and its bytes.

        Points that need too much workspace hide only strategies that need less: these are looked at next.
        """
        best: tuple[Strategy, int] | None = None
        below: int | None = None
        while (level := self._level(below)) is not None:
            found, below = level.quickest(limit)
            if found is not None and (best is None or found[0].time_ns < best[0].time_ns):
                best = found
            if below is None:
                break
        return best

    def _level(self, below: int | None) -> _Level | None:
        """The frontier of the configurations with workspace ``below`` some bytes; None where there is none."""
        if below not in self._known:
            kept = {
                name: useful if below is None else useful[self.workspaces[name][useful] < below]
                for name, useful in self.useful.items()
            }
            every = {node.name: kept.get(node.name, np.zeros(1, np.int64)) for node in self.graph.nodes}
            try:
                tracked = track(self.graph.restricted(every), pruned=max(map(len, every.values())) > FEW_CONFIGURATIONS)
            except ValueError:  # what is left cannot follow each other
                self._known[below] = None
            else:
                self._known[below] = _Level(tracked, kept, self.workspaces)
        return self._known[below]


@dataclass(slots=True)
class _Level:
    """A tracked frontier of some configurations."""

    tracked: Tracked
    kept: Mapping[str, IntArray]
    workspaces: Mapping[str, IntArray]
    _known: dict[int, tuple[Strategy, int]] = field(default_factory=dict)

    def quickest(self, limit: float) -> tuple[tuple[Strategy, int] | None, int | None]:
        """The quickest point that fits, with its bytes; and the most workspace of quicker ones that do not."""
        too_much: int | None = None
        for point in range(int(np.searchsorted(self.tracked.memory_bytes, limit, side="right")) - 1, -1, -1):
            strategy, workspace = self._point(point)
            if strategy.memory_bytes + workspace <= limit:
                return (strategy, strategy.memory_bytes + workspace), too_much
            too_much = max(too_much or 0, workspace)
        return None, too_much

    def _point(self, point: int) -> tuple[Strategy, int]:
        """A point's strategy with the whole graph's configurations, and its workspace."""
        if point not in self._known:
            found = self.tracked.strategy(point)
            names = {name: int(self.kept[name][found.configurations[name]]) for name in self.kept}
            workspace = max(int(self.workspaces[name][index]) for name, index in names.items())
            own = Strategy(found.memory_bytes, found.time_ns, names, found.node_variants, found.edge_variants)
            self._known[point] = own, workspace
        return self._known[point]
