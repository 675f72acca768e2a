"""Stages that each run their blocks in the way that suits these, from the best layouts whose stages all run alike.

A large table of words, a tower of another kind, a few dense layers before those with experts: what such blocks take and
keep on so many shards, replicas or parts of a sequence is another than of their neighbours. Here: for each stage of a
layout the quickest way to run it on its devices that leaves the others room, by closed forms of time and memory, and
the cut levelled for that. Not here: stages on more or fewer devices (:mod:`pipeplan.planning.moves`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise, product
from typing import NamedTuple

import numpy as np

from pipeplan.costs.after import AfterActions
from pipeplan.costs.zero import IN_ACTIONS, WHOLE, Exchanging, Experts, Zero
from pipeplan.errors import PipeplanError, UsageError
from pipeplan.files import PlacedStage
from pipeplan.partition.chain.costs import FloatArray
from pipeplan.partition.chain.rebalance import even
from pipeplan.partition.problem import Pricing
from pipeplan.partition.recomputation import Holding, kept_whole, levels_of
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.candidates import (
    UNDIVIDED,
    PlacementCandidate,
    SplitSizes,
    any_stages,
    has_table,
    holdings_of,
    is_large,
    kept_choice,
    likely_choices,
    open_splits,
    placed,
    sharings,
)
from pipeplan.planning.moves import levelled, may_move_blocks
from pipeplan.planning.request import Request
from pipeplan.planning.trials import PlanSearch, PlanStep, Trial
from pipeplan.planning.uniform_space import Blocks, Choice, KeptBytes
from pipeplan.planning.usual import USUAL
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.search_constants import (
    OWN_WAYS_CUTS,
    OWN_WAYS_GAIN,
    OWN_WAYS_LESS,
    OWN_WAYS_MOST,
    OWN_WAYS_SHARE,
    OWN_WAYS_TRIES,
)
from pipeplan.time_limit import checked, checkpoint
from pipeplan.workload.elements import Again, recompute_of


@dataclass(frozen=True)
class OwnWays(PlanStep):
    """The best ``most`` layouts with each stage in a way of its own, those that should be shorter looked at.

    By at least ``gain``, by closed forms, than the best plan and than the same with all stages alike. Where true orders
    do not fit, again with so much ``less`` memory, ``tries`` times in all.
    """

    share: float = OWN_WAYS_SHARE
    most: int = OWN_WAYS_MOST
    gain: float = OWN_WAYS_GAIN
    less: float = OWN_WAYS_LESS
    tries: int = OWN_WAYS_TRIES
    name = "own ways"
    of = "what is left, each turn"
    when = (
        "in turn with the search; the best {most} layouts of stages in a line and alike; --placement auto, splits of "
        "blocks open; without --planner, --rules, --slices, --max-span"
    )
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        """Look at them; what is shorter is a trial like others."""
        request = search.request
        if not may_choose_ways(request):
            return
        with search.budget.share(self.share * search.budget.remaining) as share, share.ended():
            for choice in islice(_shapes(request), self.most):
                best = search.best
                if share.expired or best is None or best.value_ns is None or best.value_ns <= search.bound_ns:
                    return
                if search.is_first((self.name, choice)):
                    candidate = placed(request.within(None), choice, even)
                    if isinstance(candidate, PlacementCandidate):
                        self._try(search, candidate, share)

    def _try(self, search: PlanSearch, alike: PlacementCandidate, share: Budget) -> None:
        request, room = search.request, 1.0
        for _ in range(self.tries):
            checkpoint()
            value = None if search.best is None else search.best.value_ns
            candidate = with_own_ways(request, alike, self.gain, room, value)
            if candidate is None or not search.is_new(candidate):
                return
            with suppress(PipeplanError):  # it has no costs
                trial = Trial.of(request, candidate, search.steps)
                if trial.hopeless(search.best):
                    return
                trial.look_within(request, share, candidate.usual if is_large(request) else None, others=False)
                if trial.best is not None:
                    search.trials.append(trial)
                    search.report(trial)
                    return
            room *= self.less


def may_choose_ways(request: Request) -> bool:
    """Whether stages may be split otherwise than each other, on devices that are alike."""
    return has_table(request) and any_stages(request) and may_move_blocks(request) and not request.uneven


def _shapes(request: Request) -> Iterator[Choice]:
    """The best layout of each number of positions and stages, and of samples, that has several stages on one route."""
    seen = set[object]()
    for each in checked(likely_choices(request)):
        choice = each.choice
        shape = choice.strategy, choice.per_position, choice.positions, choice.replicas * choice.width, choice.batch
        alone = choice.positions == 1 or STRATEGIES[choice.strategy].two_ways
        if not alone and shape not in seen:
            seen.add(shape)
            yield choice


def with_own_ways(
    request: Request, candidate: PlacementCandidate, gain: float = 0.0, room: float = 1.0, best_ns: int | None = None
) -> PlacementCandidate | None:
    """The candidate with each stage in the quickest way that fits into a part of the ``room`` there is, and levelled.

    None if by closed forms it is not shorter by a part ``gain`` than with all stages in the same way, and than
    ``best_ns``, or stages are no uniform layout's of a chain.
    """
    choice, stages = kept_choice(candidate), candidate.placement.stages
    if choice is None or candidate.placement.num_routes > 1 or candidate.given:
        return None
    order = request.profile.topological_order()
    if tuple(chain.from_iterable(stage.blocks for stage in stages)) != tuple(order):
        return None
    usual = candidate.usual or next((each for each in USUAL if each.strategy == choice.strategy), None)
    if usual is None:
        return None
    found = _WaysOfStages.of(request, replace(choice, usual=usual), stages, room)
    best = None if found is None else min(found.levelled(), key=lambda each: each.busiest_ns, default=None)
    if found is None or best is None or len({found.ways[way][:2] for way in best.ways}) == 1:
        return None
    part = np.array(best.busiest_ns / 3)
    ramps = max(0.0, float(usual.bubble(part, part, part, choice.per_position)))
    whole = choice.batch.num_microbatches * best.busiest_ns + ((choice.positions or 1) - 1) * ramps
    if best.busiest_ns >= (1 - gain) * min(map(found.alike, (found.ends, best.ends))) or whole >= (1 - gain) * (
        best_ns or np.inf
    ):
        return None
    own = tuple(
        stage.model_copy(update=found.said(way, begin, end))
        for stage, way, (begin, end) in zip(stages, best.ways, pairwise(best.ends), strict=True)
    )
    placement = candidate.placement.model_copy(update={"stages": own})
    return replace(candidate, placement=placement, usual=usual, source=f"{candidate.source}, own ways")


class _OwnWay(NamedTuple):
    """How a stage may run on its devices."""

    split: SplitSizes
    replicas: int
    zero: Zero
    again: Again

    @property
    def copies(self) -> int:
        """How many times parameters are there."""
        return self.replicas * self.split.context

    @property
    def experts(self) -> Experts:
        """What its devices have of experts."""
        among = self.split.expert, self.split.shards, self.copies, self.zero.level, self.zero.group
        return Experts.among(*among, split=self.split.expert_shards)


@dataclass(frozen=True, slots=True)
class _WayCosts:
    """[block] ns of a micro-batch, with its part of what follows all of them, and running sums of it; bytes of state,
    of a micro-batch in flight, of one that owes its weight gradient, and of an action."""

    before: FloatArray
    state: FloatArray
    held: FloatArray
    owed: FloatArray
    workspace: FloatArray


class _Assigned(NamedTuple):
    """Where stages end, and the number of each stage's way."""

    busiest_ns: float
    ends: tuple[int, ...]
    ways: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _WaysOfStages:
    """The stages of a layout, ``place`` [stage] the position of each, and how each may run: ``costs`` [way] of blocks.

    Stages whose blocks share a parameter run alike.
    """

    request: Request
    blocks: Blocks
    holdings: Sequence[Holding]
    ways: Sequence[_OwnWay]
    costs: Sequence[_WayCosts]
    ends: tuple[int, ...]
    place: Sequence[int]
    limit: float

    @classmethod
    def of(cls, request: Request, choice: Choice, stages: Sequence[PlacedStage], room: float) -> _WaysOfStages | None:
        """Of a choice of the table, cut into these stages. None where no other way has costs."""
        assert choice.usual is not None
        blocks = Blocks.of(request.profile)
        samples, count = choice.batch.microbatch_size, choice.batch.num_microbatches
        known = {
            way: costs
            for way in checked(_possible(request, len(stages[0].devices), samples), 1)
            if way.split.context == stages[0].context  # neighbours share sequences alike
            and (costs := _costs_of(request, blocks, way, samples, count, splits=choice.usual.splits)) is not None
        }
        if len(known) < 2:
            return None
        holdings = sorted(holdings_of(request, choice), key=lambda each: each.stage)
        limits = [limit for limit in request.memory if limit is not None]
        limit = room * min(limits) if limits else np.inf
        lengths = np.cumsum([0, *(len(stage.blocks) for stage in stages)]).tolist()
        place = [each.position for each in holdings]
        return cls(request, blocks, holdings, [*known], [*known.values()], tuple(lengths), place, limit)

    def levelled(self) -> Iterator[_Assigned]:
        """Ways and cuts in turn: the ways that are quickest for a cut, then that which is levelled for these."""
        ends, seen = self.ends, set[tuple[int, ...]]()
        while ends not in seen and len(seen) < OWN_WAYS_CUTS:
            checkpoint()
            seen.add(ends)
            ways = self._quickest(ends)
            if ways is None:
                return
            yield _Assigned(self.busiest(ends, ways), ends, tuple(ways))
            before = np.array([self.costs[way].before for way in ways])
            found = levelled(np.array(ends), before, np.array(self.place))
            ends = ends if found is None else tuple(found.tolist())

    def alike(self, ends: tuple[int, ...]) -> float:
        """The same ns where all stages run in the same way, the quickest that fits; infinite where none does."""
        ranges = list(pairwise(ends))
        bytes_, stages = _Bytes.of(self, ranges, self._units(ranges)), len(ranges)
        able = (way for way in range(len(self.ways)) if not bytes_.lacking([way] * stages).any())
        return min((self.busiest(ends, [way] * stages) for way in able), default=np.inf)

    def busiest(self, ends: Sequence[int], ways: Sequence[int]) -> float:
        """Ns of a micro-batch on the busiest position."""
        loads = [0.0] * (1 + max(self.place))
        for at, way, (begin, end) in zip(self.place, ways, pairwise(ends), strict=True):
            loads[at] += float(self.costs[way].before[end] - self.costs[way].before[begin])
        return max(loads)

    def _quickest(self, ends: tuple[int, ...]) -> list[int] | None:
        """[stage] its quickest way; where they do not fit together, what costs least for the bytes that it saves."""
        ranges = list(pairwise(ends))
        units = self._units(ranges)
        bytes_ = _Bytes.of(self, ranges, units)
        times = [np.sum([self._times(*ranges[stage]) for stage in unit], axis=0) for unit in units]
        found = [0] * len(ranges)
        for unit, each in zip(units, times, strict=True):
            bytes_.take(found, unit, int(np.argmin(each)))
        while (short := bytes_.lacking(found)).any():
            checkpoint()
            changes = []
            for unit, each in zip(units, times, strict=True):
                own = {self.place[stage] for stage in unit}
                if any(short[at] for at in own):
                    saved = np.sum([short[at] - bytes_.lacking_with(found, unit, at) for at in own], axis=0)
                    slower = each - each[found[unit[0]]]
                    worth = np.where(slower > 0, slower / np.maximum(saved, 1e-9), slower * saved)
                    worth = np.where(saved > 0, worth, np.inf)
                    way = int(np.lexsort((-saved, worth))[0])
                    changes.append((float(worth[way]), -float(saved[way]), unit, way))
            least = min(changes, default=None)
            if least is None or least[0] == np.inf:
                return None
            bytes_.take(found, *least[2:])
        return found

    def _times(self, begin: int, end: int) -> FloatArray:
        """[way] ns of these blocks as a stage."""
        return np.array([costs.before[end] - costs.before[begin] for costs in self.costs])

    def _units(self, ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Stages that run alike: those whose blocks share a parameter, else each alone."""
        order = {block: number for number, block in enumerate(self.request.profile.topological_order())}
        unit_of = list(range(len(ranges)))
        for tied in self.request.profile.tied:
            places = [order[block] for block in tied.blocks]
            sharing = [number for number, (a, b) in enumerate(ranges) if any(a <= place < b for place in places)]
            same = {unit_of[stage] for stage in sharing}
            unit_of = [min(same) if unit in same else unit for unit in unit_of]
        return [[stage for stage, own in enumerate(unit_of) if own == unit] for unit in dict.fromkeys(unit_of)]

    def said(self, number: int, begin: int, end: int) -> Mapping[str, object]:
        """What a stage of these blocks says."""
        way, order, ends = self.ways[number], self.request.profile.topological_order(), kept_whole(self.request.profile)
        blocks = order[begin:end]
        again = recompute_of(tuple(False if block in ends else way.again for block in blocks)) if way.again else None
        return {
            **UNDIVIDED,
            "blocks": tuple(blocks),
            "shards": way.split.shards,
            "replicas": way.replicas,
            "context": way.split.context,
            "expert": way.split.expert,
            "expert_shards": way.split.expert_shards if way.split.expert > 1 else None,
            "recompute": again,
            **way.zero.keys(way.copies),
        }


@dataclass(frozen=True, slots=True)
class _Bytes:
    """[stage, way] bytes that a stage keeps and holds at its ``place``, and of its largest action."""

    place: Sequence[int]
    kept: FloatArray
    widest: FloatArray
    limit: float

    @classmethod
    def of(cls, ways: _WaysOfStages, ranges: Sequence[tuple[int, int]], units: Sequence[Sequence[int]]) -> _Bytes:
        """Of stages of these blocks; what those of a unit share is there once, where they are at one place."""
        kept, widest = np.zeros((len(ranges), len(ways.ways))), np.zeros((len(ranges), len(ways.ways)))
        for way, costs in enumerate(ways.costs):
            for stage, ((begin, end), own) in enumerate(zip(ranges, ways.holdings, strict=True)):
                kept[stage, way] = costs.state[end] - costs.state[begin]
                kept[stage, way] += own.in_flight * (costs.held[end] - costs.held[begin])
                kept[stage, way] += own.owed * (costs.owed[end] - costs.owed[begin])
                widest[stage, way] = costs.workspace[begin:end].max(initial=0.0)
        shared = [float(ways.blocks.counted_again(each.split.shards, each.zero).total) for each in ways.ways]
        for unit in units:
            if len(unit) > 1 and len({ways.place[stage] for stage in unit}) == 1:
                kept[unit[0]] -= np.array(shared)
        return cls(ways.place, kept, widest, ways.limit)

    def take(self, ways: list[int], unit: Sequence[int], way: int) -> None:
        """Have the stages of a unit run so."""
        for stage in unit:
            ways[stage] = way

    def lacking(self, ways: Sequence[int]) -> FloatArray:
        """[place] bytes that it lacks."""
        every = range(1 + max(self.place))
        return np.array([self.lacking_with(ways, (), at)[0] for at in every])

    def lacking_with(self, ways: Sequence[int], unit: Sequence[int], at: int) -> FloatArray:
        """[way] bytes that a place lacks where the stages of a unit run so, and others as they do."""
        kept, widest = np.zeros(self.kept.shape[1]), np.zeros(self.kept.shape[1])
        for stage, place in enumerate(self.place):
            if place == at:
                own = slice(None) if stage in unit else ways[stage]
                kept, widest = kept + self.kept[stage, own], np.maximum(widest, self.widest[stage, own])
        found: FloatArray = np.maximum(0.0, kept + widest - self.limit)
        return found


def _possible(request: Request, devices: int, samples: int) -> Iterator[_OwnWay]:
    """Every way to run a stage on so many devices, with micro-batches of so many samples."""
    levels = levels_of(request.profile) if len(request.recomputes) > 1 else request.recomputes
    for split in open_splits(request):
        replicas, rest = divmod(devices, split.width)
        if rest or samples % replicas or devices % split.expert:
            continue
        zeros = sharings(request, replicas * split.context, split.shards)
        yield from (_OwnWay(split, replicas, zero, again) for zero, again in product(zeros, levels))


def _costs_of(
    request: Request, blocks: Blocks, way: _OwnWay, samples: int, count: int, *, splits: bool
) -> _WayCosts | None:
    """None where a block has no such costs."""
    split, zero, experts = way.split, way.zero, way.experts
    plain = Pricing(samples // way.replicas, False, split.shards, WHOLE, split.context, experts._replace(zero=WHOLE))
    try:
        whole, again = blocks.columns(plain), blocks.columns(plain._replace(recompute=way.again))
        kept = blocks.kept(split.shards, zero, experts)
    except UsageError:
        return None
    ends = kept_whole(request.profile)
    first = np.array([name in ends for name in blocks.each])

    def column(name: str) -> FloatArray:
        found: FloatArray = np.where(first, getattr(whole, name), getattr(again, name)).astype(np.float64)
        return found

    backward = column("backward_ns")
    if splits:
        backward = np.where(again.split, column("input_grad_ns") + column("weight_grad_ns"), backward)
    computing = column("forward_ns") + backward
    computing = computing + _exchanged(request, blocks, way, computing)
    computing = computing + _after(request, kept, whole.state.sum(axis=1), blocks, way) / count
    kinds, gathered = list(blocks.kinds), blocks.states.exchanged(split.shards, zero, experts).workspace_bytes

    def sums(values: FloatArray) -> FloatArray:
        found: FloatArray = np.concatenate(([0.0], np.cumsum(values[kinds])))
        return found

    return _WayCosts(
        before=sums(computing),
        state=np.concatenate(([0.0], np.cumsum(kept.each.astype(np.float64)))),
        held=sums(column("activation_bytes")),
        owed=sums(column("weight_grad_bytes")),
        workspace=(column("workspace_bytes") + gathered)[kinds],
    )


def _exchanged(request: Request, blocks: Blocks, way: _OwnWay, computing: FloatArray) -> FloatArray:
    """[kind of block] ns by which it is longer for what copies exchange of it with each micro-batch."""
    if request.cluster is None or way.zero.level < IN_ACTIONS:
        return np.zeros(len(blocks.each))
    near = Exchanging.on_first(request.cluster, way.split.shards, way.copies, way.zero, way.experts)
    gather, reduce = blocks.states.exchanged(way.split.shards, way.zero, way.experts).times(near)
    exchanged = (2 * gather + reduce).astype(np.float64)
    found: FloatArray = np.maximum(near.contention * exchanged, exchanged - computing)
    return found


def _after(request: Request, kept: KeptBytes, state: FloatArray, blocks: Blocks, way: _OwnWay) -> FloatArray:
    """[kind of block] its part of what follows all actions: as its state is one of that of all blocks."""

    def sharing(zero: Zero, copies: int) -> Zero:
        return zero

    after = AfterActions.of(request.profile, request.cluster, way.split.shards, partial(sharing, way.zero))
    whole = float(np.dot(state, blocks.counts))
    every = after(max(1, kept.gradient_bytes), way.copies) if whole else 0
    found: FloatArray = every * state / max(1.0, whole)
    return found
