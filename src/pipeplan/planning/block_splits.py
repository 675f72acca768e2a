"""Stages whose blocks are each split in a way of their own, where a candidate has them all alike.

Here: a candidate's stages at points of their device groups' frontiers (:mod:`pipeplan.partition.per_block_sharding`);
the model as one stage that is split so, and the best plans of a search with their stages split so. Not here: cuts that
are chosen for such stages (:mod:`pipeplan.partition.stage_frontier`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeplan.costs import StageCost
from pipeplan.errors import PipeplanError
from pipeplan.files import PlacedStage, Placement
from pipeplan.partition.per_block_sharding import BlockSplits, GroupSplits, RunPoint
from pipeplan.planning.candidates import (
    CandidateOrError,
    CandidateStep,
    PlacementCandidate,
    Proposal,
    any_stages,
    is_large,
)
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.trials import PlanSearch, PlanStep, Trial
from pipeplan.search_constants import FINALISTS, ONE_STAGE_SECONDS, ONE_STAGE_SHARE, SPLIT_SHARE
from pipeplan.time_limit import Limit, TimeUpError
from pipeplan.workload.elements import Again
from pipeplan.workload.mesh import EXPERTS, PLACES


def group_splits(request: Request) -> GroupSplits:
    """Of a request, which may say how many devices share sequences or experts, and then single blocks do neither."""
    asked = {PLACES: request.context, EXPERTS: request.expert}
    closed = frozenset(axis for axis, count in asked.items() if count is not None)
    return GroupSplits(request.profile, request.cluster, closed)


def split_stages(
    known: GroupSplits,
    candidate: PlacementCandidate,
    memory_bytes: int | None,
    recomputes: Sequence[Again] = (False, True),
) -> PlacementCandidate | None:
    """The candidate with every stage on several devices at the quickest point of its frontier that memory allows.

    The k-th stage from the end holds k micro-batches in flight. A stage may do with ``recomputes``. None where no stage
    has such a point.
    """
    stages = list(candidate.placement.stages)
    given: dict[int, StageCost] = {}
    limit = math.inf if memory_bytes is None else memory_bytes
    for place, stage in enumerate(stages):
        if len(stage.devices) == 1:
            continue
        in_flight = min(len(stages) - place, candidate.batch.num_microbatches)
        size = stage.microbatch_size or candidate.batch.microbatch_size
        splits = known.of(len(stage.devices), size, candidate.batch.mini_batch // size, recomputes)
        point = _quickest(splits, set(stage.blocks), in_flight, limit)
        if point is not None:
            stages[place] = point.placed(stage.devices).model_copy(update={"microbatch_size": stage.microbatch_size})
            given[place] = point.split.costs
    if not given:
        return None
    placement = candidate.placement.model_copy(update={"stages": tuple(stages)})
    every = {**(candidate.given or {}), **given}
    return replace(candidate, placement=placement, source=f"{candidate.source}, split", given=every)


def _quickest(splits: Sequence[BlockSplits], blocks: Collection[str], in_flight: int, limit: float) -> RunPoint | None:
    points = [
        each.holding(in_flight).quickest([name for name in each.order if name in blocks], limit) for each in splits
    ]
    return min((each for each in points if each is not None), key=lambda each: each.time_ns, default=None)


def may_split(request: Request) -> bool:
    """Whether the blocks of a stage may each be split in a way of their own."""
    if request.joined is not None or request.by_kinds:
        return False
    return request.num_devices > 1 and any_stages(request) and not is_large(request)


@dataclass(frozen=True)
class OneStage(CandidateStep):
    """The model as one stage on all devices, the mini-batch as one micro-batch, each block split in a way of its own.

    Of sizes that were profiled alone, since bounds are of these. Tracking the frontier may take a ``share`` of the
    time, and at least ``seconds``; not of large requests.
    """

    share: float = ONE_STAGE_SHARE
    seconds: float = ONE_STAGE_SECONDS
    name = "one stage"
    of = "the limit"
    when = f"{CandidateStep.when}; up to 4,000 blocks x devices; the micro-batch size is open, or one is asked for"

    def candidates(self, request: Request) -> Iterator[Proposal]:
        """One."""
        if may_split(request) and (request.sizes or request.batch.num_microbatches == 1):
            yield lambda: self._one(request)

    def _one(self, request: Request) -> CandidateOrError | None:
        devices = request.num_devices
        stage = PlacedStage(blocks=request.profile.topological_order(), devices=tuple(range(devices)), shards=devices)
        placement = Placement(strategy="strategy", num_devices=devices, stages=(stage,))
        whole = PlacementCandidate(placement, Batch(1, request.batch.mini_batch), False, "one stage")
        limit = Limit(math.inf if request.deterministic else max(self.seconds, self.share * request.time_limit))
        known = group_splits(request)
        try:
            with limit.enforced():
                return split_stages(known, whole, request.least_memory, request.recomputes)
        except TimeUpError as up:
            if up.limit is not limit:
                raise
            return None


@dataclass(frozen=True)
class SplitFinalists(PlanStep):
    """Stages of the best ``finalists`` with each block split in a way of its own, and known schedules of these.

    Of stages that have devices of their own. Tracking their frontiers may take a ``share`` of the limit.
    """

    finalists: int = FINALISTS
    share: float = SPLIT_SHARE
    name = "split blocks"
    of = "the limit"
    when = "the best {finalists} plans, of one stage per device; --placement auto; up to 4,000 blocks x devices"

    def applies(self, search: PlanSearch) -> bool:
        """Not where a schedule is asked for by name."""
        return search.request.scheduler == "auto" and may_split(search.request)

    def run(self, search: PlanSearch) -> None:
        """Look at them; those that may be shorter become trials."""
        request = search.request
        known = group_splits(request)
        with search.budget.share(self.share * search.budget.seconds) as share, share.ended():
            for trial in search.finalists[: self.finalists]:
                devices = [device for stage in trial.candidate.placement.stages for device in stage.devices]
                best = search.best
                proved = best is not None and best.value_ns is not None and best.value_ns <= search.bound_ns
                if len(set(devices)) == len(devices) and not proved:
                    self._try(search, split_stages(known, trial.candidate, request.least_memory, request.recomputes))

    @staticmethod
    def _try(search: PlanSearch, candidate: PlacementCandidate | None) -> None:
        with suppress(PipeplanError):  # there is a plan
            if candidate is None:
                return
            trial = Trial.of(search.request, candidate, search.steps)
            if not trial.hopeless(search.best):
                trial.look()
                search.budget.charge(trial.look_seconds)
                search.trials.append(trial)
                search.report(trial)
