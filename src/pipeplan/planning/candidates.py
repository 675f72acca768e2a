"""Candidate placements: strategies for chains, with replicas; stages as a graph; the plans of published planners."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from itertools import accumulate, chain, groupby, islice, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from pipeplan.costs import UNLIMITED, StageCost, build_workload, stage_costs
from pipeplan.costs.after import AfterActions
from pipeplan.costs.blocks import splitting_remedy
from pipeplan.costs.communication import Same
from pipeplan.costs.context import open_exchanges
from pipeplan.costs.stages import FOLD_LEAST, shared_in
from pipeplan.costs.wide_groups import GroupSizes, says_messages
from pipeplan.costs.zero import GATHERED, IN_ACTIONS, WHOLE, Zero
from pipeplan.errors import InfeasibleError, SearchTimeoutError, UsageError
from pipeplan.files import Block, PlacedStage, Placement, Profile
from pipeplan.partition.chain.autopipe import autopipe, polished
from pipeplan.partition.chain.costs import Array, Chain
from pipeplan.partition.chain.rebalance import balanced, even
from pipeplan.partition.dapple import dapple
from pipeplan.partition.graph.search import graphpipe
from pipeplan.partition.links import CountedLinks
from pipeplan.partition.mapping import neighbours, num_neighbours
from pipeplan.partition.pipedream import pipedream
from pipeplan.partition.piper import piper
from pipeplan.partition.placement import Cut, can_spread, place, place_submodules, undivided
from pipeplan.partition.problem import Partition, PartitionProblem, Pricing, free
from pipeplan.partition.recomputation import FittingChain, Holding, kept_whole, levels_of, recomputing
from pipeplan.partition.strategies import SEARCHED, STRATEGIES
from pipeplan.planning.choices import EVEN
from pipeplan.planning.request import SUBMODULES, Batch, Request, first_layers_open, submodules_of
from pipeplan.planning.restrictions import layers_in
from pipeplan.planning.uniform_space import Blocks, BoundedChoice, Choice, best_first
from pipeplan.planning.usual import USUAL, Counts, Usual, excess
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.state import SearchStep
from pipeplan.search_constants import (
    CHECKS,
    CHUNKS,
    FAR,
    FEW_LOOKED_AT,
    FIRST_STAGES,
    LARGE,
    LOOKED_AT_MORE,
    MANY_GROUPS,
    MANY_KINDS,
    MOST_ENTRIES,
    PER_DEVICE,
    PLANNERS_DOWNSETS,
    PLANNERS_MOST,
    PLANNERS_QUESTION,
    PLANNERS_SECONDS,
    PLANNERS_SHARE,
    QUICK_ROWS,
    RECOMPUTED_BLOCKS,
    RECOMPUTED_MOST,
    RECOMPUTED_QUESTION,
    RECOMPUTED_SECONDS,
    RECOMPUTED_SHARE,
    SHORTAGE_SECONDS,
    STAGE_GRAPHS_ANY_SHARE,
    STAGE_GRAPHS_CHUNKS,
    STAGE_GRAPHS_QUESTION,
    STAGE_GRAPHS_SECONDS,
    STAGE_GRAPHS_SHARE,
    STAGE_GRAPHS_TOLERANCE,
    WORTH,
    WRITTEN_MORE,
)
from pipeplan.texts import counted
from pipeplan.time_limit import CountedClock, Limit, TimeUpError, checked
from pipeplan.units import MAX_BYTES, format_bytes, named_devices, rounded_up
from pipeplan.workload.elements import Again, ContextExchange, recompute_of
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A placement for micro-batches of a size, recomputing or not where stages do not say.

    ``source`` says who made it. A ``fallback`` is for when nothing else fits. ``given`` are the costs of stages whose
    blocks are each split in a way of its own, by the stage's place. ``usual`` is the schedule it was cut for. Where
    stages were cut for the links between their devices they ``stay`` there.
    """

    placement: Placement
    batch: Batch
    recompute: Again
    source: str
    fallback: bool = False
    given: Mapping[int, StageCost] | None = None
    usual: Usual | None = None
    stay: bool = False

    @property
    def key(self) -> Hashable:
        """Equal for candidates that mean the same."""
        return self.placement, self.batch, self.recompute

    @property
    def size_per_replica(self) -> int:
        """Samples of a micro-batch on each replica of its first stage."""
        return self.batch.microbatch_size // self.placement.stages[0].replicas


CandidateOrError = PlacementCandidate | InfeasibleError | SearchTimeoutError | UsageError
"""A placement, or why there is none."""

Proposal = Callable[[], CandidateOrError | None]
"""What makes a placement, which may take its time; None where there is none beside those of other proposals."""


class CandidateStep(SearchStep, ABC):
    """Placements other than chains. Where it is tried stages may be of any form."""

    when = "--placement auto, without --slices, --shard-shared, --replicas, --pp, and --tp, --cp, --ep or --etp above 1"

    @abstractmethod
    def candidates(self, request: Request) -> Iterator[Proposal]:
        """One after another."""


def candidates(
    request: Request, steps: Sequence[SearchStep], chains_between: int, chains_first: int = 0
) -> Iterator[Proposal]:
    """All placements that the request leaves open, cheap ones to find first.

    What ``steps`` find takes longer than chains do, so that ``chains_between`` of these come between each two of those,
    and of large requests ``chains_first`` before: there may not be time for all candidates.
    """
    if isinstance(request.placement, Placement):
        yield from (partial(_as_is, each) for each in _given(request, request.placement))
        return
    if request.levelled is not request:
        roomy = iter(()) if request.roomy is None else candidates(request.roomy, steps, chains_between, chains_first)
        unbounded = (each.propose if isinstance(each, BoundedProposal) else each for each in roomy)
        yield from in_turns([unbounded, candidates(request.levelled, steps, chains_between, chains_first)])
        return
    yield from (partial(_as_is, each) for each in own_placement(request))
    chains = _chains(request)
    if is_large(request):
        yield from islice(chains, chains_first)
    if any_form(request):
        found = in_turns([step.candidates(request) for step in steps if isinstance(step, CandidateStep)])
        if open_splits(request) == (SplitSizes(1, 1),):
            yield from islice(found, 1)
        for graph in found:
            yield from islice(chains, chains_between)
            yield graph
    yield from chains


def in_turns(streams: Sequence[Iterator[Proposal]]) -> Iterator[Proposal]:
    """One of each after another, as long as there are some: none has to wait for all of another."""
    left = deque(streams)
    while left:
        stream = left.popleft()
        for proposal in islice(stream, 1):
            yield proposal
            left.append(stream)


def _given(request: Request, placement: Placement) -> Iterator[PlacementCandidate]:
    every = list(_exchanging(request.profile, sharing(request, placement)))
    for recompute, each in product(request.recomputes, every):
        yield PlacementCandidate(each, request.batch, recompute, "given", _is_fallback(request, recompute))


def own_placement(request: Request) -> Iterator[PlacementCandidate]:
    """The profile's own placement, if it is for that number of devices and any other may be chosen instead."""
    placement = request.profile.placement
    if placement is None or placement.num_devices != request.num_devices or not any_stages(request):
        return
    if request.uniform or request.chunks is not None or request.joined is not None:
        return
    for size, recompute in product(open_sizes(request), _again(request)):
        batch = Batch(request.batch.mini_batch // size, size)
        yield PlacementCandidate(sharing(request, placement), batch, recompute, "the profile's own")


def as_asked(request: Request) -> Iterator[PlacementCandidate]:
    """Those of a request that says where stages stand, by a placement or a strategy, whatever the memory limit is."""
    for recompute in _again(request) if request.placement != "auto" else ():
        asked = replace(request, recompute=recompute)
        for each in map(partial(placed, asked), grid(asked)):
            if isinstance(each, PlacementCandidate):
                yield each


def _again(request: Request) -> Sequence[Again]:
    """What to recompute, be there a memory limit or not."""
    return (False, True) if request.recompute is None else (request.recompute,)


def _exchanging(profile: Profile, placement: Placement) -> Iterator[Placement]:
    """The placement, and those whose stages exchange keys and values otherwise, where that is open."""
    splits = [(stage.shards, stage.context) for stage in placement.stages]
    others = {split: way for split, way in open_exchanges(profile).items() if split in splits}
    yield placement
    for ways in islice(product(*((None, way) for way in others.values())), 1, None):
        said = {split: {"context_exchange": way} for split, way in zip(others, ways, strict=True) if way is not None}
        changed = zip(placement.stages, splits, strict=True)
        stages = tuple(stage.model_copy(update=said.get(split, {})) for stage, split in changed)
        yield placement.model_copy(update={"stages": stages})


UNDIVIDED: dict[str, Any] = {"zero": 0, "zero_group": None, "unshard_every": None, "reduce_every": None}
"""What a placed stage says whose replicas divide nothing."""


def sharing(request: Request, placement: Placement) -> Placement:
    """A placement whose replicas divide what the request says, where it says that; else what they say themselves."""
    if request.zero is None:
        return placement
    shared = [(stage, request.sharing(stage.copies)) for stage in placement.stages]
    stages = tuple(
        stage if zero is None else stage.model_copy(update=UNDIVIDED | zero.keys(stage.copies))
        for stage, zero in shared
    )
    return placement.model_copy(update={"stages": stages})


def is_large(request: Request) -> bool:
    """Whether there is so much that the best rows of the table of layouts are to be looked at before anything else."""
    return request.num_devices * len(request.profile.blocks) > LARGE


def grid(request: Request) -> Iterator[Choice | PlacementCandidate | UsageError]:
    """The same without stages as a graph, to be placed: each strategy cut in one way, evenly by time."""
    yield from _given(request, request.placement) if isinstance(request.placement, Placement) else _choices(request)


def strategy_choices(request: Request) -> list[Choice]:
    """What strategies for chains leave open, where there are sizes for it."""
    return [choice for choice in _choices(request) if isinstance(choice, Choice)]


def placed(request: Request, point: Choice | PlacementCandidate, cut: Cut | None = None) -> CandidateOrError:
    """The candidate of a point of the grid, for this request."""
    request = request.levelled
    return point if isinstance(point, PlacementCandidate) else _tried(_chain, request, point, "balanced", cut)


def least_held(request: Request, choice: Choice) -> float:
    """Bytes that the fullest device of a choice holds at least, with one micro-batch, wherever its blocks are cut.

    It is not known, and 0, where rules make the stages, or where all devices split shared blocks. Raises UsageError: a
    block has no such costs.
    """
    if choice.spread or choice.strategy == SUBMODULES:
        return 0.0
    request = request.levelled
    return _blocks_of(Same(request)).least_bytes(choice.pricing, _positions(request, choice))


def kept_choice(candidate: PlacementCandidate) -> Choice | None:
    """A strategy's candidate with nothing recomputed, before it is cut; None if stages are no strategy's, or unlike."""
    strategy, stages = STRATEGIES.get(candidate.placement.strategy), candidate.placement.stages
    alike = {(*(getattr(each, name) for name in _ALIKE), each.expert_shards or 1, Zero.of(each)) for each in stages}
    groups = {each.devices for each in stages}
    if strategy is None or len(alike) > 1 or any(each.configurations or each.num_parted for each in stages):
        return None
    ((shards, replicas, context, exchange, expert, expert_shards, zero),) = alike
    chunks, rest = divmod(len(stages), len(groups) * candidate.placement.num_routes)
    if rest:
        return None
    own = (candidate.placement.strategy, replicas, candidate.batch, False, False, shards, len(groups), zero)
    split: dict[str, Any] = {"context": context, "expert": expert, "expert_shards": expert_shards}
    return Choice(*own, chunks=chunks if strategy.chunked else None, exchange=exchange, **split)


_ALIKE = ("shards", "replicas", "context", "context_exchange", "expert")


def _as_is(candidate: CandidateOrError) -> CandidateOrError:
    return candidate


@dataclass(frozen=True, slots=True)
class BoundedProposal:
    """A proposal of which it is known, before it is made, ns that no iteration of it is below, maybe by its ``row`` of
    the table of layouts."""

    propose: Proposal
    least_ns: int
    row: BoundedChoice | None = None

    def __call__(self) -> CandidateOrError | None:
        """Make it."""
        return self.propose()


class SplitSizes(NamedTuple):
    """How many devices split each block, and into how many parts each sequence is divided, each with that many devices.

    Of these and of their replicas each ``expert`` share experts, of which ``expert_shards`` split each. Parts of
    sequences ``exchange`` keys and values so; None: as the profile has it.
    """

    shards: int
    context: int
    expert: int = 1
    expert_shards: int = 1
    exchange: ContextExchange | None = None

    @classmethod
    def asked(cls, request: Request) -> SplitSizes:
        """As the request says, else 1; where it says only how many share experts, as few split each as may."""
        expert = request.expert or 1
        split = request.profile.expert_shards_on(expert, request.expert_shards)
        return cls(request.shards or 1, request.context or 1, expert, split)

    @property
    def width(self) -> int:
        """Devices of a replica at each position."""
        return self.shards * self.context

    @property
    def sharing(self) -> tuple[int, int, int]:
        """Which rows of a block have costs for it, but for its shards."""
        return self.context, self.expert, self.expert_shards

    @property
    def rest(self) -> dict[str, Any]:
        """All but the shards, by their names."""
        return {name: getattr(self, name) for name in self._fields if name != "shards"}

    def each_exchange(self, request: Request) -> Iterator[SplitSizes]:
        """As the profile has it, and where the other way to exchange keys and values may be better with that, too."""
        yield self
        other = open_exchanges(request.profile).get((self.shards, self.context))
        if other is not None:
            yield self._replace(exchange=other)


def open_splits(request: Request) -> tuple[SplitSizes, ...]:
    """How devices may share a chain's blocks and its sequences, for which all blocks have costs: those of a node.

    And of several whole ones where the profile says what they send each other.

    Without that, costs have the time of messages inside a node. One where a strategy is asked for and nothing is said,
    as with replicas.
    """
    asked = request.shards, request.context, request.expert, request.expert_shards
    if None not in asked or request.placement != "auto" or request.spread:
        return tuple(SplitSizes.asked(request).each_exchange(request))
    blocks = request.profile.once("splits", lambda: _splits_of(request.profile))
    sizes = sorted({tuple(experts) for _, rows in blocks for _, _, *experts in rows})
    known = (
        {
            SplitSizes(shards, context, each[0], each[1])
            for shards, context, *experts in rows
            for each in ((tuple(experts),) if has_experts else sizes)
        }
        for has_experts, rows in blocks
    )
    most = max(min(request.unit, request.num_devices), (request.shards or 1) * (request.context or 1))
    common = [
        each
        for each in sorted(set.intersection(*known), key=lambda each: (*each[2:4], each.context, each.shards))
        if all(count in (None, own) for count, own in zip(asked, each[:4], strict=True))
        and (each.width <= most or _is_priced(request, each))
        and each.expert <= request.num_devices
        and (request.only is None or request.only.splits_experts(each.shards, each.expert_shards))
    ]
    return tuple(chain.from_iterable(each.each_exchange(request) for each in common or [SplitSizes.asked(request)]))


def _is_priced(request: Request, split: SplitSizes) -> bool:
    """Whether sequences are shared by whole nodes, of whose messages costs have what these take there."""
    whole = request.unit % split.shards == 0 and split.width % request.unit == 0 and split.width <= request.num_devices
    sizes = GroupSizes(split.shards, split.context, split.expert, split.expert_shards)
    profile = request.stated_profile
    return whole and profile.once(("says messages", sizes), lambda: says_messages(profile, sizes))


def _splits_of(profile: Profile) -> set[tuple[bool, tuple[tuple[int, int, int, int], ...]]]:
    """Of each block whether it has experts, and for how many shards, parts of a sequence and of experts it has rows."""
    return {(bool(block.expert_parameters), tuple(row.key[1:5] for row in block.costs)) for block in profile.kinds}


def uniform_choices(request: Request) -> list[BoundedChoice]:
    """Chains whose blocks may be split, best first: all uniform choices that may fit, on all devices or on some.

    None where there is no table of them.
    """
    return _uniform_of(Same(request.levelled)) if has_table(request) else []


def likely_choices(request: Request) -> list[BoundedChoice]:
    """The same; of a large request only pipelines as long as there are devices and blocks for.

    Shorter ones leave devices idle, and are most of the table: of Mixtral on 512 devices it has 948,945 choices, which
    take 19 s of work, and 110,277 of these, 3.3 s.
    """
    return longest_choices(request) if is_large(request) else uniform_choices(request)


def longest_choices(request: Request) -> list[BoundedChoice]:
    """The same; of any request only pipelines as long as there are devices and blocks for. None without a table."""
    return _uniform_of(Same(request.levelled), _Length.EACH_LONGEST) if has_table(request) else []


def uniform_layouts(request: Request) -> Iterator[BoundedChoice]:
    """The same where no block is split, too; a layout once for each schedule that is usual for it."""
    yield from _uniform_of(Same(request.levelled))


def has_table(request: Request) -> bool:
    """Whether uniform layouts are one table. Of whole blocks in pipelines of any length there are fewer choices, on all
    devices: where a strategy is asked for, where blocks are no chain, whose stages are rather a graph, or where shared
    ones may be spread. Of a large request each of these takes seconds, and the best rows come first."""
    plain = open_splits(request) == (SplitSizes(1, 1),) and request.positions is None
    if plain and request.placement == "auto" and not is_large(request):
        plain = not is_chain(request.profile) or any(True in _spreads(request, each) for each in _replicas(request))
    else:
        plain &= request.placement != "auto"
    plain &= not (first_layers_open(request) and isinstance(request.placement, str))
    return not (plain or isinstance(request.placement, Placement) or request.placement == SUBMODULES)


def is_chain(profile: Profile) -> bool:
    """Whether every block waits for the one before it, and that for its gradient, possibly among others."""

    def found() -> bool:
        edges = {(edge.source, edge.target) for edge in profile.edges if edge.gradient}
        return all(pair in edges for pair in pairwise(block.id for block in profile.blocks))

    return profile.once("chain", found)


class _Length(Enum):
    """Which pipelines a table has: all, the longest of everything else alike, or these of one strategy alone, and then
    without what exchanges state unless that is asked for."""

    ANY, EACH_LONGEST, LONGEST = range(3)


@lru_cache(maxsize=8)
def _uniform_of(
    same: Same[Request], length: _Length = _Length.ANY, only: tuple[SplitSizes, ...] | None = None
) -> list[BoundedChoice]:
    """The table of a request, which several steps of its search go through, or ``only`` that of some splits."""
    request = same.thing
    choices = [each for split in only or open_splits(request) for each in _uniform(request, split, length)]
    return best_first(request, choices, _blocks_of(same))


def _uniform(request: Request, split: SplitSizes, length: _Length) -> Iterator[Choice]:
    """With these numbers of shards and sequence parts: every number of replicas and positions, every strategy and size,
    and what is recomputed.

    Only the longest pipelines of one strategy are few even for many devices, and what fits anywhere mostly fits in
    one of them.
    """
    longest = length is _Length.LONGEST
    again = _ways_again(request)
    width, blocks, uneven = split.width, len(request.profile.blocks), request.uneven
    rest, units = split.rest, num_neighbours(request.cluster, request.num_devices, width)
    every: Sequence[int] = range(1, units + 1) if request.placement == "auto" else (1,)
    if request.positions is not None and request.replicas is None:
        every = range(units // request.positions, 0, -1)  # as samples may not divide among all that there is room for
    known = _profiled(request, 1, False, split)
    whole = [each for each in every if request.batch.mini_batch % each == 0]  # others have no micro-batches to share
    for replicas in checked(whole if request.replicas is None else (request.replicas,), 1):
        batches = list(_batches(request, replicas, False, split, known))
        if not batches or split.width * replicas % split.expert:
            continue
        strategies = _by_name(request)[:1] if longest else _strategies(request)
        shared = sharings(request, replicas * split.context, split.shards)
        if longest and request.zero is None:
            shared = [zero for zero in shared if zero.level < IN_ACTIONS]  # exchanges take time to time
        for zero, batch, strategy in checked(product(shared, batches, strategies), 1):
            how = STRATEGIES[strategy]
            if (batch.num_microbatches % 2 and how.two_ways) or (request.chunks not in (None, 1) and not how.chunked):
                continue  # a target's may be of both kinds
            for chunks in _chunks(request, strategy)[: 1 if longest else None]:
                most = min(units // replicas, blocks // (chunks or 1))
                lengths = _lengths(request, units, most)[0 if length is _Length.ANY else -1 :]
                for positions, (recompute, levels) in product(lengths, again):
                    if not _allows(request, strategy, positions, batch):
                        continue
                    if positions > 1 or strategy == "one-to-one" or request.placement != "auto":
                        own = (strategy, replicas, batch, recompute, False, split.shards, positions, zero, levels)
                        choice = Choice(*own, chunks=chunks, **rest)
                        yield choice
                        if uneven:
                            yield replace(choice, backwards=True)


def _lengths(request: Request, units: int, most: int) -> Sequence[int]:
    """How many positions a pipeline may have, of ``most``: as asked; of very many groups of devices more than half.

    Shorter ones leave half of the devices idle, and no bound of theirs is lower.
    """
    if request.positions is not None:
        return [request.positions] * (request.positions <= most)
    return range(1 if units <= MANY_GROUPS else most // 2 + 1, most + 1)


def _ways_again(request: Request) -> list[tuple[Again, tuple[Again, ...]]]:
    """What all blocks recompute, or else the levels of which each has what it must while that is open.

    For a target whose blocks recompute alike it is one of all; of one that takes the first layers of each stage, as
    many of these as must.
    """
    if len(request.recomputes) == 1 or request.only is None or not request.only.alike:
        return [(False, levels_of(request.profile))] if len(request.recomputes) > 1 else [(request.recomputes[0], ())]
    if first_layers_open(request):
        return [*((each, ()) for each in request.recomputes), (False, (False, True))]
    return [(each, ()) for each in request.recomputes]


def _directions(choice: Choice, uneven: bool) -> Iterator[Choice]:
    """Along the devices; where some are faster than others, also from the last to the first."""
    yield choice
    if uneven:
        yield replace(choice, backwards=True)


def _chunks(request: Request, strategy: str) -> Sequence[int | None]:
    """How many stages a position may have on each route: as asked; those of a V or W are two, or as asked."""
    if not STRATEGIES[strategy].chunked:
        return (None,)
    if request.chunks is not None:
        return (request.chunks,)
    return CHUNKS if strategy == "circular" else (2,)


def sharings(request: Request, replicas: int, shards: int = 1) -> list[Zero]:
    """What replicas may divide of what they keep: as asked; or nothing, or by any level: where links are known, and
    without them where memory is limited and nothing else fits, or is weighed against time.

    What levels 2 and 3 exchange with each micro-batch is for groups of all replicas, or of as many as a node has; not
    where blocks share parameters.
    """
    asked, only = request.sharing(replicas), request.only
    weighed = request.knows_links or (request.any_level and request.least_memory is not None)
    if request.zero is not None or replicas == 1 or not weighed:
        return [] if asked is None else [asked]
    near = math.gcd(replicas, request.unit // shards)
    groups = dict.fromkeys(group for group in (replicas, near) if group > 1)
    levels = () if shared_in(request.profile) else (IN_ACTIONS, GATHERED)
    found = [WHOLE, Zero(1, replicas), *(Zero(level, group) for level, group in product(levels, groups))]
    if only is None:
        return found
    able = [zero for zero in found if zero.level in only.zero]
    return able if only.zero_groups else [zero for zero in able if zero.group in (1, replicas)]


def even_cuts(
    request: Request,
    before_next: Callable[[], None] = lambda: None,
    wanted: Callable[[Choice], bool] = lambda choice: True,
    *,
    held: int | None = None,
) -> Iterator[PlacementCandidate]:
    """Chains cut evenly by time, in the order in which they are likely to fit and to be quick: the quickest to plan.

    Where blocks may be split, those come first that usually take least time, of the longest pipelines and then of all.
    Else those with fewest stages, each on as many replicas, then those that recompute: of these every size of
    micro-batches, that first which should be the quickest. Each should fit with what 1F1B has in flight, of that at
    most ``held`` micro-batches, or the schedule that is asked for; it takes a time linear in blocks and devices.
    ``before_next`` is called whenever one has been tried, or does not fit, and before another is looked for. Only what
    is ``wanted``, at the moment when it is its turn, is cut.
    """
    request = request.levelled
    blocks, limits = _blocks_of(Same(request)), [limit for limit in request.memory if limit is not None]
    room = max(limits) if len(limits) == request.num_devices else math.inf
    known: dict[Pricing, tuple[list[StageCost], int]] = {}
    for choice in checked(_followed(filter(wanted, checked(_plain(request), 16)), before_next), 1):
        if choice.usual in (None, USUAL[0]) and choice.strategy == "one-to-one":
            if choice.pricing not in known:
                costs = blocks.costs(choice.pricing)
                known[choice.pricing] = costs, 0 if request.profile.tied else sum(cost.static_bytes for cost in costs)
            costs, kept = known[choice.pricing]
            groups = _groups(request, choice)
            if kept > room * len(groups) or len(costs) < len(groups):
                continue  # whatever is cut where
            _, begins, fit = _even(request, costs, groups, choice.batch, held)
        elif choice.levels:
            begins, fit = _evenly(fitting_chain(request, choice)), False
        else:
            candidate = placed(request, choice, even)
            if isinstance(candidate, PlacementCandidate):
                yield replace(candidate, source=EVEN)
            continue
        if fit:
            yield cut_so(request, choice, EVEN, begins)
        elif choice.levels and (again := fitting_chain(request, choice).chosen(begins)) is not None:
            yield cut_so(request, choice, EVEN, begins, again)


def shorter_cuts(request: Request, before_next: Callable[[], None] = lambda: None) -> Iterator[PlacementCandidate]:
    """Of strategies whose pipelines have very many stages the same on fewer devices, as :func:`even_cuts` has them.

    They are only to begin with, as they take less to plan: where a strategy is asked for, and not on how many devices,
    a large request leaves open nothing but the longest pipeline, of which devices have several stages each. Half as
    many positions, again and again, until there are no more than :data:`FIRST_STAGES`, where that fits with what 1F1B
    has in flight.
    """
    request = request.levelled
    if not is_large(request) or has_table(request) or request.placement in ("auto", "one-to-one", SUBMODULES):
        return
    blocks = _blocks_of(Same(request))
    for choice in checked(_plain(request), 1):
        positions = _positions(request, choice)
        while positions > 1 and _num_stages(choice, positions) > FIRST_STAGES:
            positions //= 2
        if choice.spread or choice.positions is not None or positions == _positions(request, choice):
            return
        shorter = replace(choice, positions=positions)
        if not _allows(request, choice.strategy, positions, choice.batch):
            continue
        before_next()
        groups = _groups(request, shorter)
        if _even(request, blocks.costs(shorter.pricing), groups, shorter.batch)[2]:
            candidate = placed(request, shorter, even)
            if isinstance(candidate, PlacementCandidate):
                yield replace(candidate, source=EVEN)


def _followed(choices: Iterable[Choice], after_each: Callable[[], None]) -> Iterator[Choice]:
    """The same, and what is to be done after each, before the next is found."""
    for choice in choices:
        yield choice
        after_each()


def _evenly(chain: FittingChain) -> tuple[int, ...]:
    """The even cut of a chain, with nothing computed again."""
    return even(_unlimited(chain, chain.ways[0][1]))


def _unlimited(chain: FittingChain, costs: Sequence[StageCost]) -> Chain:
    """The chain with these costs [block], without a look at memory."""
    own = chain.holdings[: chain.num_stages]
    speeds = {each.position: each.speed for each in own}
    slow = [speeds[position] for position in range(len(speeds))] if set(speeds.values()) != {1.0} else []
    return Chain.of(costs, [each.position for each in own], [None] * len(speeds), slow)


@lru_cache(maxsize=4)
def _blocks_of(same: Same[Request]) -> Blocks:
    """The blocks of a request's profile, those that cost the same as one."""
    return Blocks.of(same.thing.profile)


def _plain(request: Request) -> Iterator[Choice]:
    """The choices of :func:`even_cuts`."""
    name = request.scheduler
    if has_table(request):
        able, seen, same = _by_name(request), set[Choice](), Same(request)
        open_ = open_splits(request)
        many = len(_blocks_of(same).each) * len(open_) > MANY_KINDS
        firsts = [(one,) for one in open_] if many else [open_]
        tables = [*((_Length.LONGEST, own) for own in firsts), (_Length.ANY, None)]
        for each in chain.from_iterable(_written_first(request, _uniform_of(same, *which)) for which in tables):
            suits = each.choice.strategy in able and (name != "auto" or _is_first(request, each.choice))
            suits &= request.zero is not None or each.choice.zero.level < IN_ACTIONS
            if suits and each.choice not in seen:
                seen.add(each.choice)
                yield each.choice
    elif name != "auto" or request.chunks not in (None, 1) or request.placement not in ("auto", "one-to-one"):
        groups = [list(alike) for _, alike in groupby(strategy_choices(request), lambda choice: choice.replicas)]
        if is_large(request) and request.placement != SUBMODULES:
            groups.sort(key=lambda alike: min(_written(request, each) for each in alike))
        for alike in groups:
            yield from _best_size_first(request, alike)
    else:
        for recompute, replicas in product(request.recomputes, sorted(_replicas(request), reverse=True)):
            count, zero = request.num_devices // replicas, request.sharing(replicas)
            if zero is None or request.num_devices % replicas or count > len(request.profile.blocks):
                continue
            sizes = [
                Choice("one-to-one", replicas, batch, recompute, False, zero=zero)
                for batch in _batches(request, replicas, False)
            ]
            yield from _best_size_first(request, sizes)


def _is_first(request: Request, choice: Choice) -> bool:
    """Whether a row is one to begin with: that of 1F1B, or what is usual for another strategy that is asked for.

    By its name, or by how many stages devices have.
    """
    asked = request.placement != "auto" or request.chunks not in (None, 1)
    other = choice.usual is not None and choice.usual.strategy != USUAL[0].strategy
    return (asked and other) or choice.usual == USUAL[0]


def _written_first(request: Request, rows: Sequence[BoundedChoice]) -> Sequence[BoundedChoice]:
    """The rows of a large request, with those first that are quick to write, or quick as they are written at first.

    1F1B and GPipe may begin again and again with few micro-batches, and then take little in any pipeline, but long
    where it is filled and emptied each time (:func:`_filling`). Where a schedule is asked for by name it is one run,
    which of the longest pipelines has millions of entries. What may fit comes before what cannot.
    """
    if not is_large(request):
        return rows
    limits = [limit for limit in request.memory if limit is not None]
    room = max(limits) if len(limits) == request.num_devices else math.inf
    if request.scheduler == "auto":
        return sorted(rows, key=lambda each: (each.usual_bytes > room, each.usual_ns * _filling(request, each.choice)))
    return sorted(rows, key=lambda each: (each.least_bytes > room, *_written(request, each.choice)))


def _filling(request: Request, choice: Choice) -> float:
    """How many times as long as a whole run the groups of micro-batches take that a first plan of it may write."""
    positions, count = _positions(request, choice), choice.batch.num_microbatches
    group = max(1, MOST_ENTRIES // (4 * choice.width * choice.replicas * positions * choice.per_position))
    if count <= 2 * group or group >= 2 * positions:
        return 1.0  # all of it, or a part that repeats
    return math.ceil(count / group) * (group + positions - 1) / (count + positions - 1)


def _written(request: Request, choice: Choice) -> tuple[int, int]:
    """How many times fourfold of :data:`MOST_ENTRIES` the programs of all devices have, messages among them: where a
    part repeats, and where nothing does."""
    looked_at = replace(choice, positions=_positions(request, choice)).actions_looked_at
    every = 2 * choice.width * choice.replicas
    repeated, whole = (
        max(0, math.ceil(math.log(every * actions / MOST_ENTRIES, WRITTEN_MORE)))
        for actions in (looked_at, num_actions(request, choice))
    )
    return repeated, whole


def _positions(request: Request, choice: Choice) -> int:
    """Groups of devices, of so many replicas each, that a choice has stages on."""
    return choice.positions or max(1, request.num_devices // (choice.replicas * choice.width))


def num_actions(request: Request, choice: Choice) -> int:
    """So many at least has a run of it in which nothing repeats: forwards and backwards of every stage.

    None are known of submodules, whose stages rules make.
    """
    if choice.strategy == SUBMODULES:
        return 0
    routes = 1 + STRATEGIES[choice.strategy].two_ways
    stages = _num_stages(choice, _positions(request, choice))
    return (1 if request.profile.is_inference else 2) * stages * choice.batch.num_microbatches // routes


def _num_stages(choice: Choice, positions: int) -> int:
    """Stages of both routes on so many positions."""
    return positions * choice.per_position * (1 + STRATEGIES[choice.strategy].two_ways)


def _wide(request: Request, choice: Choice) -> list[tuple[int, ...]]:
    """Groups of devices that split each block, as many as the choice has stages and replicas for."""
    units = neighbours(request.cluster, request.num_devices, choice.width)
    units = units[::-1] if choice.backwards else units
    return units if choice.positions is None else units[: choice.positions * choice.replicas]


def _groups(request: Request, choice: Choice) -> list[tuple[int, ...]]:
    """[position] its devices, replica after replica."""
    units, each = _wide(request, choice), choice.replicas
    return [tuple(chain.from_iterable(units[at : at + each])) for at in range(0, len(units) - each + 1, each)]


def _even(
    request: Request,
    costs: Sequence[StageCost],
    groups: Sequence[Sequence[int]],
    batch: Batch,
    held: int | None = None,
) -> tuple[Chain, tuple[int, ...], bool]:
    """A chain of blocks with these costs on groups of devices, its even cut, and whether that fits with 1F1B.

    With what that has in flight of as many micro-batches as the ``batch`` has, or are ``held``.
    """
    known = groups[: len(costs)]
    chain = Chain.of(costs, range(len(known)), _limits_of(request, known), _speeds_of(request, known))
    begins = even(chain)
    ranges = chain.ranges(begins)
    most = held or batch.num_microbatches
    fit = all(_fits_in_flight(chain, place, ranges, most) for place in checked(range(len(known))))
    return chain, begins, fit


def _limits_of(request: Request, groups: Sequence[Sequence[int]]) -> list[int | None]:
    """[group] the least memory of its devices; None is no limit."""
    memory = request.memory
    if len(set(memory)) == 1:  # as on most clusters: thousands of devices are not looked at one by one
        return [memory[0]] * len(groups)
    known = [[memory[device] for device in group] for group in groups]
    return [min((limit for limit in own if limit is not None), default=None) for own in known]


def _speeds_of(request: Request, groups: Sequence[Sequence[int]]) -> list[float]:
    """[group] that of its slowest device; none where all have speed 1."""
    speeds = request.speeds
    if set(speeds) == {1.0}:
        return []
    found = [min(speeds[device] for device in group) for group in groups]
    return found if set(found) != {1.0} else []


def _best_size_first(request: Request, choices: Sequence[Choice]) -> list[Choice]:
    """Choices with as many replicas, those first whose size is the shortest by 1F1B on the even cut, where that fits.

    There may not be time for all. How long it takes is its first micro-batch, then the longest stage for each other,
    with backward whole or in halves as they may be: a profile may have either of them disturbed.
    """
    batches, same = {choice.batch: None for choice in choices}, Same(request)
    if len(batches) < 2 or choices[0].replicas > request.num_devices:
        return list(choices)
    worth: dict[Batch, tuple[bool, int]] = {}
    recomputes = dict.fromkeys(choice.recompute for choice in choices)
    for batch, recompute in product(checked(batches, 1), recomputes):
        replicas = choices[0].replicas
        try:
            first = choices[0]
            pricing = first.pricing._replace(samples=batch.microbatch_size // replicas, recompute=recompute)
            costs = _block_costs(same, pricing)
        except UsageError:  # blocks are split where they stand
            return list(choices)
        chain, begins, fit = _even(request, costs, _groups(request, choices[0]), batch)
        ways = [chain] + [chain.timed(_halves(costs))] * (request.split_backward is not False)
        longest = [way.times[-1] + (batch.num_microbatches - 1) * way.longest(begins) for way in ways]
        found = not fit, longest[-1] if request.split_backward else min(longest)
        worth[batch] = min(found, worth.get(batch, found))
    return sorted(choices, key=lambda choice: worth[choice.batch])


def _halves(costs: Sequence[StageCost]) -> list[int]:
    """[block] ns of forward and backward in two halves; in one where it has none."""
    return [
        cost.compute_ns
        if cost.input_grad_ns is None or cost.weight_grad_ns is None
        else cost.forward_ns + cost.input_grad_ns + cost.weight_grad_ns
        for cost in costs
    ]


def _fits_in_flight(chain: Chain, place: int, ranges: Sequence[tuple[int, int]], num_microbatches: int) -> bool:
    """Whether a stage of these blocks has room for as many micro-batches as 1F1B has in flight there."""
    limit = chain.memory[place]
    if limit is None:
        return True
    held = chain.held([ranges[place]])
    more = min(chain.num_stages - place, num_microbatches) - 1
    return held.peak + held.statics + more * held.activations <= limit


def _choices(request: Request) -> Iterator[Choice | UsageError]:
    """Strategies with every number of replicas, size and recomputation that is open.

    All strategies come early: there may not be time for all candidates.
    """
    for replicas in _replicas(request):
        zero = request.sharing(replicas * (request.context or 1))
        if zero is None:
            continue
        positions = request.positions or request.num_devices // (replicas * _width(request))
        batches = {spread: list(_batches(request, replicas, spread)) for spread in _spreads(request, replicas)}
        if not any(batches.values()):
            yield _no_size(request, replicas, max(batches))
        for batch in dict.fromkeys(chain.from_iterable(batches.values())):
            for recompute, strategy in product(request.recomputes, _strategies(request)):
                for spread, possible in batches.items():
                    if batch in possible and _allows(request, strategy, positions, batch):
                        own = (strategy, replicas, batch, recompute, spread, request.shards or 1, request.positions)
                        choice = Choice(*own, zero, chunks=request.chunks, **SplitSizes.asked(request).rest)
                        yield from _directions(choice, request.uneven)


def _strategies(request: Request) -> Iterable[str]:
    assert isinstance(request.placement, str)
    if request.placement != "auto":
        return (request.placement,)
    if request.only is not None:
        return request.only.placements
    every = ("one-to-one",) if request.num_parted else SEARCHED
    return [each for each in every if STRATEGIES[each].chunked or request.chunks in (None, 1)]


def _allows(request: Request, strategy: str, positions: int, batch: Batch) -> bool:
    """Whether the target of the plan, if it has one, can have stages so."""
    return request.only is None or request.only.allows(strategy, positions, batch.num_microbatches)


def _by_name(request: Request) -> list[str]:
    """Those for which the schedule is that is asked for, or else all; where devices have several stages that may."""
    every, known = list(_strategies(request)), CLASSIC.get(request.scheduler)
    return [each for each in every if known is not None and each in known.strategies] or every


def any_stages(request: Request) -> bool:
    """Whether stages may be of any form, one on each group of devices."""
    return any_form(request) and request.chunks in (None, 1)


def any_form(request: Request) -> bool:
    """Whether stages may be of any form, with as many on each group of devices as is said.

    Forwards in parts are for one stage per device, all with one size; shared blocks are spread beside chains.
    """
    free = request.placement == "auto" and request.only is None and not request.num_parted and not request.spread
    whole = {request.shards, request.context, request.expert, request.expert_shards} <= {None, 1}
    return free and request.replicas is request.positions is None and whole


def _chains(request: Request) -> Iterator[Proposal]:
    """Every choice with the balanced cut, and with AutoPipe's where that is for: one stage per device."""
    rows = _likely_first(request) if is_large(request) and has_table(request) else iter(uniform_choices(request))
    some = False
    for each in rows:
        some = True
        yield BoundedProposal(partial(_tried, _chain, request, each.choice, "balanced", None), each.least_ns, each)
        if _is_for_autopipe(request, each.choice):
            yield BoundedProposal(partial(_autopipe, request, each.choice), each.least_ns, each)
    if some:
        return
    if has_table(request) and request.least_memory is not None:
        yield partial(_unfit_rows, request)
    for _, alike in groupby(_choices(request), lambda choice: choice.replicas if isinstance(choice, Choice) else None):
        choices = list(alike)
        yield from (partial(_as_is, choice) for choice in choices if isinstance(choice, UsageError))
        for choice in _best_size_first(request, [choice for choice in choices if isinstance(choice, Choice)]):
            yield partial(_tried, _chain, request, choice, "balanced", None)
            if _is_for_autopipe(request, choice):
                yield partial(_autopipe, request, choice)


def _unfit_rows(request: Request) -> InfeasibleError | None:
    """That rows of the table are left out for want of memory, where there are some with enough of it.

    It is said before what others that were asked for could not be: those are no reason.
    """
    least = min((each.least_bytes for each in likely_choices(request.within(MAX_BYTES))), default=None)
    if least is None:
        return None
    devices, memory = named_devices(request.num_devices), format_bytes(request.least_memory or 0)
    needed = format_bytes(rounded_up(math.ceil(least)))
    return InfeasibleError(
        f"no plan was found for {devices} of {memory}: by closed form every layout needs more; --memory of less than "
        f"{needed} cannot do for those alike in all stages"
    )


def _likely_first(request: Request) -> Iterator[BoundedChoice]:
    """The table of a large request, which takes long to make: before it what is :func:`likely <likely_choices>`.

    Of that come first what is quick to look at, the best row of each strategy and schedule that should take no longer
    than the best of all by more than ``FAR``, as what one kind's closed form leaves out all its rows lack. By what
    these turn out to take the search puts off others of their kind (:mod:`.form_errors`).
    """
    likely = likely_choices(request)
    best = {(each.choice.strategy, each.choice.usual): each for each in reversed(likely)}
    kinds = [each for each in best.values() if each.usual_ns <= FAR * likely[0].usual_ns]
    kinds.sort(key=lambda each: each.choice.actions_looked_at)
    first = {id(each): each for each in chain(quick_ones(likely), kinds, likely)}
    yield from first.values()
    seen = {each.choice for each in first.values()}
    yield from (each for each in quick_first(uniform_choices(request)) if each.choice not in seen)


def quick_first(rows: Sequence[BoundedChoice]) -> Iterator[BoundedChoice]:
    """The rows, best first, but before all others the best few of those whose schedules are quick to make.

    Of the best rows of many devices a look takes seconds each, and what they should be shorter by is often less than
    what closed forms are off by: first come, of each strategy and schedule, the best :data:`QUICK_ROWS` of at most
    :data:`FEW_LOOKED_AT` actions, then of four times as many, and so on; none that should take longer than the best by
    more than its schedule is quicker to make, :data:`WORTH` for each four times as many actions.
    """
    quick = quick_ones(rows)
    taken = set(map(id, quick))
    yield from quick
    yield from (each for each in rows if id(each) not in taken)


def quick_ones(rows: Sequence[BoundedChoice]) -> list[BoundedChoice]:
    """Those that come first, as said there."""
    taken = dict[int, BoundedChoice]()
    all_of_them = rows[0].choice.actions_looked_at if rows else 0
    near = [
        (actions, each)
        for each in checked(rows)
        if (actions := each.choice.actions_looked_at) < all_of_them
        and each.usual_ns <= rows[0].usual_ns * WORTH ** math.log(all_of_them / actions, LOOKED_AT_MORE)
    ]
    most = FEW_LOOKED_AT
    while most < all_of_them:
        had = Counter[Hashable]()
        for actions, each in near:
            kind = each.choice.strategy, each.choice.usual
            if actions <= most and had[kind] < QUICK_ROWS:
                had[kind] += 1
                taken[id(each)] = each
        most *= LOOKED_AT_MORE
    return list(taken.values())


def _is_for_autopipe(request: Request, choice: Choice) -> bool:
    stages = choice.positions or request.num_devices // choice.replicas
    if choice.levels or choice.expert > 1 or choice.exchange is not None or request.uneven:
        return False  # its cut is chosen with what is recomputed, or for devices that are alike
    return choice.strategy == "one-to-one" and not choice.spread and 1 < stages <= len(request.profile.blocks)


def _chain(request: Request, choice: Choice, source: str, cut: Cut | None) -> PlacementCandidate:
    if choice.levels and cut is None:
        return _fitting(request, choice, source)
    batch, strategy = choice.batch, choice.strategy
    how: dict[str, Any] = {
        "microbatch_size": batch.microbatch_size,
        "memory_bytes": request.memory,
        "recompute": choice.recompute,
        "replicas": choice.replicas,
        "zero": choice.zero,
        "cut": cut,
        "speeds": request.speeds,
    }
    if strategy == SUBMODULES:
        assert request.rules is not None  # choose_placement
        submodules = submodules_of(request.rules, request.num_devices // choice.replicas, batch.microbatch_size)
        placement = place_submodules(request.profile, submodules, request.num_devices, **how)
    elif batch.num_microbatches % 2 and STRATEGIES[strategy].two_ways:
        raise UsageError(
            f"--placement {strategy} needs an even number of micro-batches, not {batch.num_microbatches}; give "
            f"--microbatches {batch.num_microbatches + 1}"
        )
    else:
        how |= {"chunks": choice.chunks, "spread": choice.spread, "wide": _wide(request, choice)}
        how |= {"context": choice.context, "expert": choice.expert, "expert_shards": choice.expert_shards}
        how["exchange"] = choice.exchange
        placement = place(request.profile, strategy, request.num_devices, **how)
    fallback = _is_fallback(request, choice.recompute)
    return PlacementCandidate(placement, batch, choice.recompute, source, fallback, usual=choice.usual)


def fitting_chain(request: Request, choice: Choice) -> FittingChain:
    """The blocks of a choice, to recompute what its usual schedule's memory asks for.

    Raises:
        UsageError: a block has no such costs.
    """
    order, kept = request.profile.topological_order(), kept_whole(request.profile)
    same = Same(request)
    ways = [(each, _block_costs(same, choice.pricing._replace(recompute=each))) for each in choice.levels]
    known = request.joined if first_layers_open(request) else None
    layers = None if known is None else layers_in(known, order)
    return FittingChain(ways, [block in kept for block in order], holdings_of(request, choice), layers)


def holdings_of(request: Request, choice: Choice) -> list[Holding]:
    """What its usual schedule has in flight of each stage of a choice, route by route."""
    how, usual = STRATEGIES[choice.strategy], choice.usual
    assert usual is not None  # it is of the table
    groups, chunks = _groups(request, choice), choice.per_position
    count, every = np.array(choice.batch.num_microbatches), np.arange(len(groups))

    def of(counts: Counts | None) -> Array:
        """[chunk, position] micro-batches."""
        each = [0.0] * chunks if counts is None else counts(np.array(len(groups)), count, chunks, every)
        return np.ceil([np.broadcast_to(own, len(groups)) for own in each]).astype(np.int64)

    held, owed = of(usual.in_flight), of(usual.owed)
    limits = [UNLIMITED if limit is None else limit for limit in _limits_of(request, groups)]
    speeds = _speeds_of(request, groups)
    return [
        Holding(
            at,
            stage,
            int(held[stage // len(groups), at]),
            int(owed[stage // len(groups), at]),
            limits[at],
            speeds[at] if speeds else 1.0,
        )
        for route in how.routes(len(groups), chunks)
        for stage, at in enumerate(route)
    ]


@lru_cache(maxsize=64)
def _block_costs(same: Same[Request], pricing: Pricing) -> list[StageCost]:
    """[block] in the order that is cut."""
    return _blocks_of(same).costs(pricing)


def _fitting(request: Request, choice: Choice, source: str) -> PlacementCandidate:
    """The chain of a choice, cut so that each stage recomputes of its blocks what it must."""
    chain, usual = fitting_chain(request, choice), choice.usual
    assert usual is not None  # it is of the table
    limits, short = [each.limit for each in chain.holdings], [0] * (1 + max(each.position for each in chain.holdings))
    for _ in checked(range(CHECKS), 1):
        found = cut_to_fit(chain, choice)
        if found is None:
            break
        candidate = cut_so(request, choice, source, *found)
        if usual.exact:
            return candidate
        over = excess(workload_of(request, candidate, split_backward=usual.splits), usual)
        if over is None or not any(over):
            return candidate
        short = [2 * before + more if more else before for before, more in zip(short, over, strict=True)]
        pairs = zip(chain.holdings, limits, strict=True)
        fewer = tuple(each._replace(limit=limit - short[each.position]) for each, limit in pairs)
        chain = replace(chain, holdings=fewer)
    raise InfeasibleError(
        f"no cut into {chain.num_stages} stages was found that fits with {usual.name or 'any schedule'}, whatever is "
        "recomputed; raise --memory, or give more --devices"
    )


def cut_to_fit(chain: FittingChain, choice: Choice) -> tuple[tuple[int, ...], list[list[Again]]] | None:
    """The first block of each stage of a choice's chain, and what each stage recomputes; None where no cut fits."""
    if choice.strategy == "one-to-one" and chain.layers is None:
        begins = chain.cut()
        if begins is None:
            begins = _evenly(chain)  # there may only have been too many ways to look at all
        elif choice.usual == USUAL[0]:
            begins = polished(chain, begins, choice.batch.num_microbatches, chain)
        again = chain.chosen(begins)
        return None if again is None else (begins, again)
    return chain.levelled(lambda costs: balanced(_unlimited(chain, costs)))


def workload_of(request: Request, candidate: PlacementCandidate, *, split_backward: bool) -> Workload:
    """The workload of a candidate, with backward split or whole: the same where it is asked for again.

    Raises:
        UsageError: the profile has no such costs.
    """
    return _workload_of(Same(request), Same(candidate), split_backward=split_backward)


@lru_cache(maxsize=2)  # what a cut has been checked with is then looked at
def _workload_of(same: Same[Request], same_candidate: Same[PlacementCandidate], *, split_backward: bool) -> Workload:
    request, candidate = same.thing, same_candidate.thing
    return build_workload(
        request.profile,
        candidate.placement,
        num_microbatches=candidate.batch.num_microbatches,
        microbatch_size=candidate.batch.microbatch_size,
        split_backward=split_backward,
        split_overhead_ns=request.split_overhead_ns,
        recompute=candidate.recompute,
        cluster=request.cluster,
        memory_bytes=request.whole_memory,
        reserve_bytes=request.reserve,
        given=candidate.given,
        whole_messages=bool(request.rules and request.rules.instructions),
        fold_least=FOLD_LEAST if request.folds and not (request.rules and request.rules.names_devices) else 0,
    )


def cut_so(
    request: Request,
    choice: Choice,
    source: str,
    begins: Sequence[int],
    again: Sequence[Sequence[Again]] | None = None,
) -> PlacementCandidate:
    """The candidate of a choice whose stages begin there, and each recompute this of their blocks, if anything."""
    order, groups, how = request.profile.topological_order(), _groups(request, choice), STRATEGIES[choice.strategy]
    ranges = list(pairwise((*begins, len(order))))
    routes = how.routes(len(groups), choice.per_position)
    places = [
        (route, position, *own) for route, each in enumerate(routes) for position, own in zip(each, ranges, strict=True)
    ]
    stages = tuple(
        PlacedStage(
            blocks=order[begin:end],
            devices=groups[position],
            shards=choice.shards,
            replicas=choice.replicas,
            context=choice.context,
            context_exchange=choice.exchange,
            expert=choice.expert,
            expert_shards=choice.expert_shards if choice.expert > 1 else None,
            route=route,
            recompute=None if again is None else recompute_of(again[number]),
            **choice.zero.keys(choice.copies),
        )
        for number, (route, position, begin, end) in enumerate(places)
    )
    placement = Placement(
        strategy=choice.strategy, num_devices=request.num_devices, num_routes=len(routes), stages=stages
    )
    return PlacementCandidate(placement, choice.batch, choice.recompute, source, usual=choice.usual)


def _is_fallback(request: Request, recompute: Again) -> bool:
    """Recomputing on stages that were given, where it was not asked for; otherwise it is a choice like others."""
    return bool(recompute) and request.recompute is None and isinstance(request.placement, Placement)


def _replicas(request: Request) -> Sequence[int]:
    """Copies of the whole pipeline; one where a strategy is asked for and nothing is said.

    Few and many in turn: one pipeline is what little memory allows, copies of the whole model are quick where they fit,
    and there may not be time for all.
    """
    if request.replicas is not None:
        return (request.replicas,)
    if request.positions is not None:
        most = max(1, request.num_devices // (_width(request) * request.positions))
        return [count for count in range(most, 0, -1) if request.batch.mini_batch % count == 0]
    if request.placement != "auto":
        return (1,)
    counts = [count for count in range(1, request.num_devices + 1) if request.num_devices % count == 0]
    in_turn = chain.from_iterable(zip(counts, reversed(counts), strict=True))
    return list(dict.fromkeys(in_turn))


def _width(request: Request) -> int:
    """Devices of a replica at each position, as far as given."""
    return (request.shards or 1) * (request.context or 1)


def _batches(
    request: Request, replicas: int, spread: bool, split: SplitSizes | None = None, known: tuple[int, int] | None = None
) -> Iterator[Batch]:
    """Micro-batches that replicas can share, of sizes per replica that blocks were profiled around (``known``)."""
    mini_batch, unit = request.batch.mini_batch, replicas * (2 if request.num_parted else 1)
    dividing = [size for size in _sizes(request, replicas) if mini_batch % size == 0 and size % unit == 0]
    low, high = (known or _profiled(request, replicas, spread, split)) if dividing else (1, 0)  # looks at every block
    for size in dividing:
        if low <= size // replicas <= high:
            yield Batch(mini_batch // size, size)


def _sizes(request: Request, replicas: int) -> list[int]:
    """Micro-batch sizes of all replicas together: what each may have, or the one that is fixed."""
    return [size * replicas for size in request.sizes] or [request.batch.microbatch_size]


def _no_size(request: Request, replicas: int, spread: bool) -> UsageError:
    low, high = _profiled(request, replicas, spread)
    if low > high:
        return _no_costs(request, replicas, spread)
    if request.placement != "auto" and request.num_devices % (replicas * _width(request)):  # whatever the size
        return undivided(request.num_devices, replicas)
    return UsageError(
        f"micro-batch size {' or '.join(map(str, _sizes(request, replicas)))} does not work with "
        f"{counted(replicas, 'replica')}: it must divide the mini-batch of {_mini_batch(request)} "
        f"and give each replica {low} to {high} samples"
        f"{', an even number for --slices' if request.num_parted else ''}; "
        + (", or ".join(_other_sizes(request, replicas, low, high, spread)) or "profile it with larger --microbatch")
    )


def _mini_batch(request: Request) -> str:
    """Its samples, and where the number comes from where nobody said it."""
    batch = request.batch
    if not request.samples_assumed:
        return str(batch.mini_batch)
    size = counted(batch.microbatch_size, "sample")
    return (
        f"{batch.mini_batch} (by default {PER_DEVICE} micro-batches of {size} for each device; --mini-batch changes it)"
    )


def _other_sizes(request: Request, replicas: int, low: int, high: int, spread: bool) -> Iterator[str]:
    """Changes of one flag each with which replicas can share micro-batches."""
    mini_batch, asked = request.batch.mini_batch, _sizes(request, replicas)
    unit = replicas * (2 if request.num_parted else 1)
    able = [size for size in range(unit, high * replicas + 1, unit) if low * replicas <= size]
    if dividing := [size for size in able if mini_batch % size == 0]:
        nearest = min(dividing, key=lambda size: min(abs(size - each) for each in asked))
        above, below = nearest == dividing[-1] < min(asked), nearest == dividing[0] > max(asked)
        bound = "of at most " if above else "of at least " if below else "such as "
        yield "choose " + (f"a --microbatch-size {bound}{nearest}" if dividing[1:] else f"--microbatch-size {nearest}")
    if len(asked) > 1 and (open_ := [size for size in asked if size in able]):
        yield f"choose --mini-batch {-(-mini_batch // open_[0]) * open_[0]}"
    others = [count for count in range(1, request.num_devices + 1) if request.num_devices % count == 0]
    if fitting := [str(count) for count in others if any(_batches(request, count, spread))]:
        yield f"choose --replicas of {', '.join(fitting)}"


def _profiled(request: Request, replicas: int, spread: bool, split: SplitSizes | None = None) -> tuple[int, int]:
    """The least and most samples per device for which every block has costs as placed; none: (1, 0)."""
    blocks, own = request.profile.kinds, split or SplitSizes.asked(request)
    ways = [split.shards if split else shards_of(request, replicas, spread, block) for block in blocks]
    sizes = [
        [row.microbatch_size for row in block.rows(*own.sharing) if row.shards == way]
        for block, way in zip(blocks, ways, strict=True)
    ]
    return (max(map(min, sizes)), min(map(max, sizes))) if all(sizes) else (1, 0)


def shards_of(request: Request, replicas: int, spread: bool, block: Block) -> int:
    """Over how many devices strategies split a block, where that is not open."""
    return request.num_devices // replicas if spread and block.shared else request.shards or 1


def _or(remedy: str | None) -> str:
    return "" if remedy is None else f", or {remedy}"


def _no_costs(request: Request, replicas: int, spread: bool) -> UsageError:
    """Some block has no costs for how strategies would place it, or blocks have no costs in common."""
    for block in request.profile.blocks:
        known = sorted({row.shards for row in block.rows(*SplitSizes.asked(request).sharing)})
        shards = shards_of(request, replicas, spread, block)
        if shards not in known:
            return UsageError(
                f"block {block.id!r} of profile {request.profile.name!r} has costs for {', '.join(map(str, known))} "
                f"shards, but placement {request.placement}, {replicas} cop{'y' if replicas == 1 else 'ies'} on "
                f"{request.num_devices} devices, needs {shards}; change --replicas, leave out --shard-shared and a "
                "--placement where the profile has its own" + _or(splitting_remedy(request.profile, [shards]))
            )
    return UsageError(
        f"the blocks of profile {request.profile.name!r} have no micro-batch size in common; profile all of them with "
        "the same --microbatch"
    )


def _spreads(request: Request, replicas: int) -> Sequence[bool]:
    wanted = request.spread
    if wanted is not None:
        return (wanted,)
    if _width(request) > 1:
        return (False,)
    possible = can_spread(request.profile, request.num_devices // replicas)
    return (False, True) if possible else (False,)


def _autopipe(request: Request, choice: Choice) -> CandidateOrError | None:
    try:
        sizes = [choice.batch.microbatch_size]
        units = len(_wide(request, choice))
        alone = {"replicas": choice.replicas, "shards": choice.shards, "context": choice.context, "devices": units}
        problem = _problem(request, sizes, (choice.recompute,), **alone)
        placement = next(autopipe(replace(problem, all_reduce=free))).placement
    except (InfeasibleError, UsageError):
        return None
    begins = tuple(accumulate((len(stage.blocks) for stage in placement.stages[:-1]), initial=0))
    return _tried(_chain, request, choice, "AutoPipe", lambda chain: begins)


def _problem(
    request: Request,
    sizes: Sequence[int],
    recompute: Sequence[Again],
    *,
    chunks: int = 1,
    replicas: int | None = None,
    shards: int = 1,
    context: int = 1,
    devices: int | None = None,
) -> PartitionProblem:
    """The question for partitioners that give every stage devices of its own, or one of the ``chunks`` of them.

    Each of the ``devices``, by default all, stands for ``shards`` of them for each of ``context`` parts of sequences.
    """
    memory = request.least_memory
    after = AfterActions.of(request.profile, request.cluster, shards, request.sharing)
    units = devices or request.num_devices
    return PartitionProblem.of(
        request.profile,
        units * chunks,
        request.batch.mini_batch,
        microbatch_sizes=sizes,
        memory_bytes=None if memory is None else memory // chunks,
        recompute=recompute,
        replicas=replicas,
        zero=lambda replicas: request.sharing(replicas * context),
        shards=shards,
        context=context,
        all_reduce=lambda size, replicas: after(size, min(replicas, units) * context),  # more never go round
        steps=after.steps,
        patience=math.inf if request.deterministic else SHORTAGE_SECONDS,
    )


@contextmanager
def in_part_of_time(request: Request, share: float, seconds: float, question: float) -> Iterator[None]:
    """What finds stages inside has a ``share`` of the limit, and at least so many ``seconds``.

    Where work is counted it is here, too: ``question`` seconds between two looks at the time.

    Raises:
        SearchTimeoutError: it has taken all of that.
    """
    most = max(seconds, share * request.time_limit)
    limit = Limit(most, clock=CountedClock(question)) if request.deterministic else Limit(most)
    try:
        with limit.enforced():
            yield
    except TimeUpError as up:
        if up.limit is not limit:
            raise
        raise SearchTimeoutError("partitioning took all the time it had; raise --time-limit") from None


@dataclass(frozen=True)
class StageGraphs(CandidateStep):
    """GraphPipe's stages: with any sizes, and with one size for all stages.

    One may take its ``share`` of the time, with any sizes ``any_share``, and at least ``seconds``. Its bottleneck may
    miss the least by ``tolerance``; schedules differ by more. Of graphs with branches ``chunks`` stages per device are
    tried where nothing is said; chains have strategies for that.
    """

    share: float = STAGE_GRAPHS_SHARE
    any_share: float = STAGE_GRAPHS_ANY_SHARE
    seconds: float = STAGE_GRAPHS_SECONDS
    tolerance: float = STAGE_GRAPHS_TOLERANCE
    chunks: int = STAGE_GRAPHS_CHUNKS
    name = "stage graphs"
    of = "the limit, each; with any sizes 0.3"

    def candidates(self, request: Request) -> Iterator[Proposal]:
        if not any_form(request):
            return
        sizes_of_stages = open_sizes(request)
        choices = [sizes_of_stages, *([size] for size in sizes_of_stages if len(sizes_of_stages) > 1)]
        for sizes in choices if any_stages(request) else ():
            yield partial(_tried, self._graph, request, sizes)
        if request.chunks is not None or _branches(request.profile):
            for sizes in choices:
                yield partial(_tried, self._graph, request, sizes, request.chunks or self.chunks)

    def alone(self, request: Request) -> Iterator[Proposal]:
        """Only what GraphPipe chooses: of all sizes, of stages with the replicas that are asked for, or any."""
        sizes = open_sizes(request)
        if request.replicas is not None and len(sizes) > 1:  # which share each micro-batch
            sizes = [size for size in sizes if size % request.replicas == 0]
        yield partial(_tried, self._graph, request, sizes, lines=False)

    def _graph(
        self, request: Request, sizes: Sequence[int], chunks: int = 1, *, lines: bool = True
    ) -> PlacementCandidate:
        """Stages as a graph, or as a line where ``lines`` are tried, too; with several chunks each device runs as many
        stages, in turn.
        """
        problem = _problem(request, sizes, request.recomputes, chunks=chunks, replicas=request.replicas)
        share = self.share if len(sizes) == 1 else self.any_share
        with in_part_of_time(request, share, self.seconds, STAGE_GRAPHS_QUESTION):
            placement = next(graphpipe(problem, tolerance=self.tolerance, lines=lines)).placement
        if max(stage.replicas for stage in placement.stages) > request.num_devices:
            raise UsageError(f"a stage with more replicas than the {request.num_devices} devices cannot go round them")
        size = max(stage.microbatch_size or 0 for stage in placement.stages)
        batch = Batch(request.batch.mini_batch // size, size)
        placed = _around(placement, request.num_devices)
        held = Counter(chain.from_iterable(stage.devices for stage in placed.stages))
        if request.chunks is not None and set(held.values()) != {request.chunks}:
            raise UsageError(f"--chunks {request.chunks}: GraphPipe's stages are not as many on every device")
        return PlacementCandidate(placed, batch, False, "GraphPipe")


@dataclass(frozen=True)
class RecomputedBlocks(CandidateStep):
    """Chains whose stages each recompute of their blocks what they must, for every size.

    Stages have replicas of their own, or all as many. Those come first that are the shortest by 1F1B; finding these may
    take a ``share`` of the time, and at least ``seconds``. Up to ``most`` blocks times devices, and ``blocks`` blocks,
    beyond which they take too long.
    """

    share: float = RECOMPUTED_SHARE
    seconds: float = RECOMPUTED_SECONDS
    most: int = RECOMPUTED_MOST
    blocks: int = RECOMPUTED_BLOCKS
    name = "recomputed blocks"
    of = "the limit"
    when = (
        f"{CandidateStep.when}; memory is limited, recomputation is open; at most {{most}} blocks x devices, "
        "{blocks} blocks"
    )

    def candidates(self, request: Request) -> Iterator[Proposal]:
        count = len(request.profile.blocks)
        if request.recompute is not None or request.least_memory is None or not any_stages(request):
            return
        if request.num_devices * count > self.most or count > self.blocks:
            return
        yield from (partial(_as_is, candidate) for candidate in self._shortest_first(request))
        for replicas in _replicas(request):
            for size in open_sizes(request):
                if size % replicas == 0:
                    yield partial(_of_replicas, request, size, replicas)

    def _shortest_first(self, request: Request) -> list[CandidateOrError]:
        found: list[tuple[int, PlacementCandidate]] = []
        why = list[CandidateOrError]()
        try:
            with in_part_of_time(request, self.share, self.seconds, RECOMPUTED_QUESTION):
                found.extend(_recomputed_blocks(request, size, None) for size in open_sizes(request))  # ever more bytes
        except (InfeasibleError, SearchTimeoutError, UsageError) as error:
            why.append(error)
        if not found:
            return why
        return [candidate for _, candidate in sorted(found, key=lambda each: each[0]) if _recomputes(candidate)]


def _of_replicas(request: Request, size: int, replicas: int) -> CandidateOrError | None:
    try:
        candidate = _recomputed_blocks(request, size, replicas)[1]
    except (InfeasibleError, SearchTimeoutError, UsageError) as error:
        return error
    return candidate if _recomputes(candidate) else None


def _recomputes(candidate: PlacementCandidate) -> bool:
    """Whether some stage does; without that other planners have the same stages."""
    return any(stage.recompute for stage in candidate.placement.stages)


def _recomputed_blocks(request: Request, size: int, replicas: int | None) -> tuple[int, PlacementCandidate]:
    """The chain with the fastest slowest stage, and how long 1F1B takes with it, in ns."""
    problem = _problem(request, [size], levels_of(request.profile), replicas=replicas)
    partition = next(recomputing(problem, kept_whole(request.profile)))
    stages = partition.placement.stages
    batch = Batch(request.batch.mini_batch // size, size)
    costs = [
        stage_costs(request.profile, each.blocks, size // each.replicas, recompute=each.recompute or False)
        for each in stages
    ]
    filling = sum(cost.compute_ns for cost in costs) - max(cost.compute_ns for cost in costs)
    candidate = PlacementCandidate(partition.placement, batch, False, "recomputed blocks")
    return partition.value_ns + filling, candidate


def _branches(profile: Profile) -> bool:
    """Whether some block feeds several others, or none but the last does."""
    sources = [edge.source for edge in profile.edges]
    return len(set(sources)) < max(len(sources), len(profile.blocks) - 1)


def _around(placement: Placement, num_devices: int) -> Placement:
    """Stages on ``num_devices`` in order, round and round where they have more."""
    taken = [tuple(sorted(device % num_devices for device in stage.devices)) for stage in placement.stages]
    return Placement(
        strategy="stage graph" if sum(map(len, taken)) <= num_devices else "stage graph, circular",
        num_devices=num_devices,
        stages=tuple(
            stage.model_copy(update={"devices": devices})
            for stage, devices in zip(placement.stages, taken, strict=True)
        ),
    )


def open_sizes(request: Request) -> list[int]:
    """Micro-batch sizes of which each divides the next, and the mini-batch."""
    if not request.sizes:
        return [request.batch.microbatch_size]
    mini_batch = request.batch.mini_batch
    most = max(request.sizes) * request.num_devices
    return [1 << power for power in range(most.bit_length()) if mini_batch % (1 << power) == 0 and 1 << power <= most]


@dataclass(frozen=True)
class PublishedPlanners(CandidateStep):
    """PipeDream's, DAPPLE's and Piper's stages, for every size.

    Each may take a ``share`` of the time, and at least ``seconds``. Up to ``most`` blocks times devices, beyond which
    DAPPLE's take too long. Piper's where the graph has no more than ``downsets`` sets of blocks that may come before a
    cut.
    """

    share: float = PLANNERS_SHARE
    seconds: float = PLANNERS_SECONDS
    most: int = PLANNERS_MOST
    downsets: int = PLANNERS_DOWNSETS
    name = "published planners"
    of = "the limit, each"
    when = f"{CandidateStep.when}; at most {{most}} blocks x devices"

    def candidates(self, request: Request) -> Iterator[Proposal]:
        if not any_stages(request) or request.num_devices * len(request.profile.blocks) > self.most:
            return
        planners: dict[str, Partitioner] = {
            "PipeDream": partial(pipedream, beside=False),
            "DAPPLE": dapple,
            "Piper": partial(piper, max_downsets=self.downsets),
        }
        for (name, planner), size in product(planners.items(), open_sizes(request)):
            yield partial(_tried, self._one, request, name, planner, size)

    def _one(self, request: Request, name: str, planner: Partitioner, size: int) -> PlacementCandidate:
        problem = _problem(request, [size], request.recomputes)
        with in_part_of_time(request, self.share, self.seconds, PLANNERS_QUESTION):
            placement = next(planner(problem)).placement
        batch = Batch(request.batch.mini_batch // size, size)
        return PlacementCandidate(placement, batch, False, name)


Partitioner = Callable[[PartitionProblem], Iterator[Partition]]


def published_alone(request: Request, name: str, planner: Partitioner, *, places: bool = False) -> Iterator[Proposal]:
    """Only what a planner of stages in a line chooses: for each size, since its paper is given one.

    Stages recompute all alike, as is asked. The planner may ``place`` stages on devices, where they stay. Where blocks
    are no line, every stage still waits for the one before it, as in the systems that these planners are for.
    """
    for size, again in product(_sizes_of_replicas(request), request.recomputes):
        yield partial(_tried, _alone, request, name, planner, size, again, stay=places)


def _alone(
    request: Request, name: str, planner: Partitioner, size: int, again: Again, *, stay: bool
) -> PlacementCandidate:
    return _in_a_line(request, name, planner(_linked(request, size, (again,))), size, stay=stay)


def piper_alone(request: Request) -> Iterator[Proposal]:
    """Only what Piper's planner chooses, as :func:`published_alone`: stages split their blocks, and recompute some."""
    for size in _sizes_of_replicas(request):
        yield partial(_tried, _by_piper, request, size)


def _by_piper(request: Request, size: int) -> PlacementCandidate:
    counts = {1} if request.shards == 1 else {row.shards for row in request.profile.blocks[0].costs}
    found, errors = list[PartitionProblem](), list[UsageError]()
    for shards in sorted(count for count in counts if count <= request.num_devices):
        try:
            found.append(_linked(request, size, request.recomputes, shards))
        except UsageError as error:  # not all blocks have costs for that
            errors.append(error)
    if not found:
        raise errors[0]
    return _in_a_line(request, "Piper", piper(found[0], split=found[1:]), size)


def _sizes_of_replicas(request: Request) -> list[int]:
    """Open sizes that the replicas which are asked for can share."""
    sizes = open_sizes(request)
    return [size for size in sizes if size % (request.replicas or 1) == 0] or sizes


def _in_a_line(
    request: Request, name: str, found: Iterator[Partition], size: int, *, stay: bool = False
) -> PlacementCandidate:
    placement = next(found).placement
    if not_joined(request.profile) is not None:
        placement = placement.model_copy(update={"strategy": "sequential"})
    batch = Batch(request.batch.mini_batch // size, size)
    return PlacementCandidate(placement, batch, False, name, stay=stay)


def _linked(request: Request, size: int, recomputes: Sequence[Again], shards: int = 1) -> PartitionProblem:
    """The question for planners that count messages, and sums where stages stand.

    Raises:
        UsageError: blocks were not profiled for so many shards.
    """
    devices = request.num_devices // shards
    problem = _problem(request, [size], recomputes, replicas=request.replicas, shards=shards, devices=devices)
    after = AfterActions.of(request.profile, request.cluster, shards, request.sharing)
    return replace(problem, links=CountedLinks(request.cluster, request.profile.edges, after.on))


def not_joined(profile: Profile) -> tuple[str, str] | None:
    """The first two neighbours in topological order that no edge joins; None where blocks are a line.

    A line may have edges beside those from each block to the next.
    """
    joined = {(edge.source, edge.target) for edge in profile.edges}
    return next((pair for pair in pairwise(profile.topological_order()) if pair not in joined), None)


def _tried(make: Callable[..., PlacementCandidate], *arguments: object, **named: object) -> CandidateOrError:
    try:
        return make(*arguments, **named)
    except (InfeasibleError, SearchTimeoutError, UsageError) as error:
        return error
