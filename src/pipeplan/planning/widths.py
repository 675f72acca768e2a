"""Stages of different widths: of a small chain every cut, each stage on devices and split in a way of its own.

A stage's devices are shards times parts of sequences times replicas, and they share experts among them. All this may
differ from stage to stage, and what replicas divide, but for the parts of sequences, which are handed on as they are.
All stages have micro-batches of one size. Of devices of different speeds a stage may have any, and is as fast as the
slowest. Here: every such layout of a few blocks on a few devices, compared by the exact times of 1F1B where messages
take no time. Not here: layouts of equal stages (:mod:`pipeplan.planning.uniform_space`), of which there are few enough
for any size.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from operator import le
from typing import NamedTuple

from pipeplan.costs import StageCost
from pipeplan.costs.after import AfterActions
from pipeplan.costs.kinds import kinds_on, on_kinds
from pipeplan.costs.zero import Experts, Zero
from pipeplan.errors import UsageError
from pipeplan.files import PlacedStage, Placement, Profile
from pipeplan.partition.chain.autopipe import measured
from pipeplan.partition.chain.costs import StageTimes
from pipeplan.partition.problem import Pricing, together
from pipeplan.partition.recomputation import kept_whole, levels_of
from pipeplan.planning.candidates import (
    BoundedProposal,
    CandidateStep,
    PlacementCandidate,
    Proposal,
    SplitSizes,
    any_stages,
    open_splits,
    sharings,
)
from pipeplan.planning.request import Batch, Request
from pipeplan.search_constants import WIDTHS_BLOCKS, WIDTHS_DEVICES, WIDTHS_MOST
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Again, ContextExchange, recompute_of


@dataclass(frozen=True)
class EveryWidth(CandidateStep):
    """Every cut of a small chain into stages that each have ways to run of their own, the quickest first.

    Up to ``blocks`` blocks on up to ``devices`` devices; the ``most`` that are the quickest with 1F1B, where messages
    take no time. All others are no better, where that is so and 1F1B is asked for.
    """

    blocks: int = WIDTHS_BLOCKS
    devices: int = WIDTHS_DEVICES
    most: int = WIDTHS_MOST
    name = "every width"
    when = f"{CandidateStep.when}; chains of at most {{blocks}} blocks, {{devices}} devices"

    def candidates(self, request: Request) -> Iterator[Proposal]:
        profile = request.profile
        if len(profile.blocks) > self.blocks or not 1 < request.num_devices <= self.devices:
            return
        if not any_stages(request) or not _in_one_line(profile):
            return
        links = () if request.cluster is None else request.cluster.levels
        free = not links and not any(edge.transfer_ns for edge in profile.edges)
        for each in _Widths.of(request).quickest(self.most):
            propose = partial(_placed, request, each)
            yield BoundedProposal(propose, each.actions_ns) if free and request.scheduler == "1f1b" else propose


class _StageWidth(NamedTuple):
    """How a stage runs its blocks, and what it takes: ns of a forward and a backward, and of what follows them all."""

    split: SplitSizes
    replicas: int
    zero: Zero
    recompute: tuple[Again, ...]
    forward_ns: int
    backward_ns: int
    after_ns: int
    devices: tuple[int, ...]

    @property
    def work_ns(self) -> int:
        """The work of a micro-batch."""
        return self.forward_ns + self.backward_ns

    def beats(self, other: _StageWidth) -> bool:
        """Whether it takes no longer in anything."""
        return all(map(le, self.times, other.times))

    @property
    def times(self) -> tuple[int, int, int]:
        """What it takes."""
        return self.forward_ns, self.backward_ns, self.after_ns


_Stages = tuple[tuple[tuple[int, int], ...], tuple[_StageWidth, ...]]
"""[stage] its blocks, and its way."""


class _WidthLayout(NamedTuple):
    """Stages one after the other: [stage] its blocks, as the first and the one after the last, and its way."""

    batch: Batch
    ranges: tuple[tuple[int, int], ...]
    ways: tuple[_StageWidth, ...]
    actions_ns: int
    usual_ns: int


@dataclass(slots=True)
class _Widths:
    """What stages of a request may be, each looked up once."""

    request: Request
    order: tuple[str, ...]
    splits: Mapping[tuple[int, ContextExchange | None], Sequence[SplitSizes]]
    known: dict[tuple[int, int, Pricing], list[tuple[StageCost, tuple[Again, ...]]]]
    blocks: dict[Pricing, list[StageCost] | None]
    after: dict[tuple[int, Zero, float, tuple[str, ...]], AfterActions]
    speeds: Sequence[float]
    kinds: Sequence[Sequence[int]]

    @classmethod
    def of(cls, request: Request) -> _Widths:
        """The widths of a request."""
        request = request.priced or request
        speeds, memory, own = request.speeds, request.memory, request.kinds
        kinds: dict[object, list[int]] = {}
        for device, speed in enumerate(speeds):
            kinds.setdefault((speed, own[device], memory[device]) if request.uneven else None, []).append(device)
        splits: dict[tuple[int, ContextExchange | None], list[SplitSizes]] = {}
        for each in open_splits(request):
            splits.setdefault((each.context, each.exchange), []).append(each)
        order = tuple(request.profile.topological_order())
        return cls(request, order, splits, {}, {}, {}, speeds, list(kinds.values()))

    def quickest(self, most: int) -> list[_WidthLayout]:
        """So many of those that fit with what 1F1B has in flight, the quickest with it first."""
        request, found = self.request, list[_WidthLayout]()
        for size, splits in product(_sizes(request), self.splits.values()):
            batch = Batch(request.batch.mini_batch // size, size)
            for count in range(1, min(len(self.order), request.num_devices) + 1):
                for ranges, ways in self._stages(batch, count, splits, found, most):
                    times = StageTimes(tuple(way.forward_ns for way in ways), tuple(way.backward_ns for way in ways))
                    actions = measured(times, batch.num_microbatches).iteration_ns
                    usual = max(actions, *(batch.num_microbatches * way.work_ns + way.after_ns for way in ways), 0)
                    insort(found, _WidthLayout(batch, ranges, ways, actions, usual), key=lambda each: each.usual_ns)
                    del found[most:]
        return found

    def _stages(
        self, batch: Batch, count: int, splits: Sequence[SplitSizes], found: Sequence[_WidthLayout], most: int
    ) -> Iterator[_Stages]:
        """Every cut into ``count`` stages with every way of each, but for those that take longer than all ``found``.

        A stage waits for those before it, works through all micro-batches, and then they wait for it.
        """
        blocks, number = len(self.order), batch.num_microbatches

        def extended(
            ranges: tuple[tuple[int, int], ...], ways: tuple[_StageWidth, ...], before: int
        ) -> Iterator[_Stages]:
            begin, left = ranges[-1][1] if ranges else 0, count - len(ways)
            if not left:
                yield ranges, ways
                return
            used = {device for way in ways for device in way.devices}
            free = [[device for device in kind if device not in used] for kind in self.kinds]
            for end in range(blocks if left == 1 else begin + 1, blocks - left + 2):
                for way in self._ways((begin, end), batch, splits, free, left):
                    least = number * way.work_ns + max(before, way.after_ns)
                    if len(found) < most or least < found[-1].usual_ns:
                        yield from extended((*ranges, (begin, end)), (*ways, way), before + way.work_ns)

        yield from checked(extended((), (), 0), 16)

    def _ways(
        self,
        blocks: tuple[int, int],
        batch: Batch,
        splits: Sequence[SplitSizes],
        free: Sequence[Sequence[int]],
        left: int,
    ) -> Iterator[_StageWidth]:
        """How a stage may run on the first of the ``free`` devices of each kind, where it fits.

        It leaves one to each of the ``left`` stages from it on, but for itself.
        """
        most = sum(map(len, free)) - left + 1
        for split in splits:
            for replicas in range(1, most // split.width + 1):
                if batch.microbatch_size % replicas or split.width * replicas % split.expert:
                    continue
                for devices in _first_of(free, split.width * replicas):
                    quickest = list[_StageWidth]()  # dividing more takes less memory, but rarely less time
                    for way in self._fitting(blocks, batch, split, devices, left):
                        if not any(each.beats(way) for each in quickest):
                            quickest.append(way)
                    yield from quickest

    def _fitting(
        self, blocks: tuple[int, int], batch: Batch, split: SplitSizes, devices: tuple[int, ...], left: int
    ) -> Iterator[_StageWidth]:
        """With each division of what replicas keep the quickest way that fits; none where a group leaves its node."""
        request, width = self.request, split.width
        units = [devices[at : at + width] for at in range(0, len(devices), width)]
        if any(len({x // request.unit for x in own}) > 1 for own in units):
            return
        replicas, held = len(units), min(batch.num_microbatches, left)
        copies = replicas * split.context
        limit = min((size for x in devices if (size := request.memory[x])), default=math.inf)
        speed = min(self.speeds[device] for device in devices)
        names = () if request.cluster is None else request.cluster.names
        kinds = kinds_on(request.profile, (names[device] for device in devices)) if names else ()
        for zero in sharings(request, copies, split.shards):
            among = split.expert, split.shards, copies, zero.level, zero.group
            experts = Experts.among(*among, split=split.expert_shards)
            pricing = Pricing(
                batch.microbatch_size // replicas,
                False,
                split.shards,
                zero,
                split.context,
                experts,
                speed,
                kinds,
                split.exchange,
            )
            fitting = (each for each in self._costs(blocks, pricing) if each[0].memory_bytes(held) <= limit)
            if (found := next(fitting, None)) is not None:
                cost, recompute = found
                after = self._after((split.shards, zero, speed, kinds), cost.gradient_bytes, copies)
                yield _StageWidth(split, replicas, zero, recompute, cost.forward_ns, cost.backward_ns, after, devices)

    def _after(self, how: tuple[int, Zero, float, tuple[str, ...]], gradients: int, copies: int) -> int:
        """Ns of what follows all actions with these shards, division of state and speed, on the first devices."""
        if how not in self.after:
            profile, cluster, (shards, zero, speed, kinds) = self.request.profile, self.request.cluster, how
            self.after[how] = AfterActions.of(on_kinds(profile, kinds), cluster, shards, lambda _: zero, speed)
        return self.after[how](gradients, copies)

    def _costs(self, blocks: tuple[int, int], pricing: Pricing) -> list[tuple[StageCost, tuple[Again, ...]]]:
        """What a stage may recompute of its blocks and what it then costs, the quickest first."""
        key = *blocks, pricing
        if key not in self.known:
            levels = levels_of(self.request.profile) if len(self.request.recomputes) > 1 else self.request.recomputes
            kept = kept_whole(self.request.profile) if len(levels) > 1 else ()
            each: list[list[tuple[StageCost, Again]]] = []
            for place in range(*blocks):
                own = [(level, self._block(place, pricing._replace(recompute=level))) for level in levels]
                allowed = [(cost, level) for level, cost in own if cost and not (level and self.order[place] in kept)]
                each.append(allowed)
            found = [(_sum([cost for cost, _ in some]), tuple(level for _, level in some)) for some in product(*each)]
            self.known[key] = sorted(found, key=lambda one: (one[0].compute_ns, one[0].activation_bytes))
        return self.known[key]

    def _block(self, place: int, pricing: Pricing) -> StageCost | None:
        """A block as a stage of its own; None where it has no such costs."""
        if pricing not in self.blocks:
            try:
                self.blocks[pricing] = pricing.costs(self.request.profile, self.order)
            except UsageError:
                self.blocks[pricing] = None
        costs = self.blocks[pricing]
        return None if costs is None else costs[place]


def _first_of(kinds: Sequence[Sequence[int]], count: int) -> Iterator[tuple[int, ...]]:
    """Every choice of so many devices of these kinds, the first ones of each."""
    if not kinds:
        yield from [()] * (not count)
        return
    for own in range(min(count, len(kinds[0])), -1, -1):
        for others in _first_of(kinds[1:], count - own):
            yield (*kinds[0][:own], *others)


def _in_one_line(profile: Profile) -> bool:
    """Whether every block feeds the next, and no other."""
    order = profile.topological_order()
    return {(edge.source, edge.target) for edge in profile.edges} == set(pairwise(order))


def _sum(costs: Sequence[StageCost]) -> StageCost:
    """What blocks cost that run one after another."""
    return together([(cost,) for cost in costs])[0]


def _sizes(request: Request) -> Iterator[int]:
    """Micro-batch sizes of the stages: those a replica may have, times the replicas of some stage."""
    mini_batch = request.batch.mini_batch
    if not request.sizes:
        yield request.batch.microbatch_size
        return
    most = max(request.sizes) * request.num_devices
    yield from (size for size in range(1, most + 1) if mini_batch % size == 0)


def _placed(request: Request, layout: _WidthLayout) -> PlacementCandidate:
    order = tuple(request.profile.topological_order())
    stages = tuple(
        PlacedStage(
            blocks=order[begin:end],
            devices=way.devices,
            shards=way.split.shards,
            replicas=way.replicas,
            context=way.split.context,
            context_exchange=way.split.exchange,
            expert=way.split.expert,
            expert_shards=way.split.expert_shards if way.split.expert > 1 else None,
            recompute=recompute_of(way.recompute) if any(way.recompute) else None,
            **way.zero.keys(way.replicas * way.split.context),
        )
        for (begin, end), way in zip(layout.ranges, layout.ways, strict=True)
    )
    placement = Placement(strategy="one-to-one", num_devices=request.num_devices, stages=stages)
    return PlacementCandidate(placement, layout.batch, False, "every width")
