"""What partitions the frontier of whole plans tries, each under one limit of memory after another.

Here: uniform layouts as ``search`` has them, chains whose stages each take their way from their device group's
frontier (:mod:`pipeplan.partition.stage_frontier`), GraphPipe's stages; and the chains among them that promise most as
candidates of ``search``. Not here: which of them stay
(:mod:`pipeplan.planning.plan_frontier`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import merge
from itertools import islice

from pipeplan.errors import PipeplanError, SearchTimeoutError, UsageError
from pipeplan.partition.per_block_sharding import GroupSplits
from pipeplan.partition.stage_frontier import StageFrontiers
from pipeplan.planning.candidates import (
    CandidateOrError,
    CandidateStep,
    PlacementCandidate,
    Proposal,
    StageGraphs,
    any_stages,
    in_part_of_time,
    is_large,
    open_sizes,
    placed,
    uniform_layouts,
)
from pipeplan.planning.request import Batch, Request
from pipeplan.search_constants import (
    LIMIT_COARSE,
    LIMIT_GRAPHS,
    LIMIT_PASSED,
    LIMIT_SCHEDULED,
    LIMIT_STEP,
    STAGE_WAYS_MOST,
    STAGE_WAYS_QUESTION,
    STAGE_WAYS_SECONDS,
    STAGE_WAYS_SHARE,
)
from pipeplan.workload.elements import Again


@dataclass(frozen=True)
class _UnderLimits:
    """How limits follow one another, and how much is looked at under each.

    Each memory limit is at most ``step`` of what the partition before took, and where limits are looked at for the
    first time ``coarse`` of it: frontiers of thousands help nobody, and there may not be time for all. Of the
    partitions under a limit, with 1, 2, 3 ... stages, and of the uniform layouts, ``scheduled`` are scheduled: those
    that should be quickest; uniform layouts that cannot be cut so as to fit are passed over, up to ``passed``. One
    stage graph may take its part of the time, were ``graphs`` to share it.
    """

    step: float = LIMIT_STEP
    coarse: float = LIMIT_COARSE
    scheduled: int = LIMIT_SCHEDULED
    passed: int = LIMIT_PASSED
    graphs: int = LIMIT_GRAPHS


HOW = _UnderLimits()


@dataclass(frozen=True, slots=True)
class PartitionTrial:
    """A partition, or why there is none, and the request it is for; ``promised_ns`` of one iteration, 0 if unknown.

    ``open``: its stages may yet be split block by block.
    """

    request: Request
    candidate: PlacementCandidate | PipeplanError
    promised_ns: int = 0
    open: bool = False


def says_sizes(request: Request) -> bool:
    """Whether only uniform layouts are as a request says: it fixes how many devices split or run something, or asks."""
    splits = request.shards, request.context, request.expert, request.expert_shards
    return any((request.uniform, *splits, request.positions, request.replicas)) or request.chunks not in (None, 1)


def uniform(request: Request) -> Iterator[PartitionTrial]:
    """Uniform layouts under limit after limit, of each those that should be quickest; at first in coarse steps."""
    for step in (HOW.coarse, HOW.step):
        limit = request.least_memory
        while True:
            asked, found = request.within(limit), list[float]()
            for each in islice(uniform_layouts(asked), HOW.scheduled + HOW.passed):
                candidate = placed(asked, each.choice)
                if isinstance(candidate, PlacementCandidate):
                    found.append(each.usual_bytes)
                    yield PartitionTrial(asked, candidate, int(each.usual_ns))
                if len(found) == HOW.scheduled:
                    break
            if not found:
                break
            most = int(max(found))
            limit = int(step * (most if limit is None else min(limit, most)))


def chains(request: Request, splits: GroupSplits, *, quickest: bool = False) -> Iterator[PartitionTrial]:
    """Partitions of the chain with micro-batches of every size, under limit after limit.

    The sizes in turn, or the partitions that promise the ``quickest`` iterations first.
    """
    steps = (HOW.step,) if quickest else (HOW.coarse, HOW.step)
    sizes = [_of_size(request, splits, size, steps) for size in open_sizes(request)]
    return merge(*sizes, key=lambda asked: asked.promised_ns) if quickest else in_turn(sizes)


def _of_size(request: Request, splits: GroupSplits, size: int, steps: Sequence[float]) -> Iterator[PartitionTrial]:
    batch = Batch(request.batch.mini_batch // size, size)
    given = request.profile, size, batch.num_microbatches, request.num_devices
    how = _recomputes(request), request.cluster, splits, request.sharing
    try:
        stages = StageFrontiers(*given, *how)
    except PipeplanError as error:
        yield PartitionTrial(request, error)
    else:
        for step in steps:
            yield from _limited(request, stages, batch, step)


def _recomputes(request: Request) -> Sequence[Again]:
    return (False, True) if request.recompute is None else (request.recompute,)


def _limited(request: Request, stages: StageFrontiers, batch: Batch, step: float) -> Iterator[PartitionTrial]:
    limit = request.least_memory
    while True:
        cuts = stages.fastest(request.num_devices, limit, HOW.scheduled)
        if not cuts:
            return
        asked = request.within(limit)
        for cut in cuts:
            candidate = PlacementCandidate(cut.placement, batch, False, "frontier", given=cut.given or None)
            yield PartitionTrial(asked, candidate, cut.slowest_ns * (batch.num_microbatches + cut.num_stages - 1))
        limit = int(step * max(cut.memory_bytes for cut in cuts))


def stage_graphs(request: Request, memories: Sequence[int]) -> Iterator[PartitionTrial]:
    """GraphPipe's stages under the request's limit, then under those that points were found for."""
    limits: list[int | None] = [request.least_memory]
    for memory in memories:
        if limits[-1] is None or memory <= HOW.step * limits[-1]:
            limits.append(memory)
    for limit in limits:
        asked = request.within(limit)
        for propose in StageGraphs().candidates(replace(asked, time_limit=request.time_limit / HOW.graphs)):
            found = propose()
            if found is not None:
                yield PartitionTrial(asked, found, open=True)


def in_turn(found: Sequence[Iterator[PartitionTrial]]) -> Iterator[PartitionTrial]:
    """One of each, again and again, none before it is its turn: there may not be time for all."""
    waiting = deque(found)
    while waiting:
        turn = waiting.popleft()
        for asked in turn:
            yield asked
            waiting.append(turn)
            break


@dataclass(frozen=True)
class StageWays(CandidateStep):
    """The chains of the frontier that promise most: each stage splits its blocks or its samples, and recomputes, in the
    way that takes least in the memory it has at its place, on a number of devices of its own.

    Of each size of micro-batches the best of each number of stages, up to ``most``; finding those of one may take a
    ``share`` of the time, and at least ``seconds``. Not of large requests, for which the programme takes longer than
    all else.
    """

    most: int = STAGE_WAYS_MOST
    share: float = STAGE_WAYS_SHARE
    seconds: float = STAGE_WAYS_SECONDS
    name = "stage ways"
    when = f"{CandidateStep.when}; up to 4,000 blocks x devices"
    of = "the limit, each size"

    def candidates(self, request: Request) -> Iterator[Proposal]:
        """The best of each size, then the next best."""
        if request.num_devices == 1 or not any_stages(request) or says_sizes(request) or is_large(request):
            return
        how = self.most, self.share, self.seconds
        quickest = [_Quickest(request, size, *how) for size in open_sizes(request)]
        for number in range(self.most):
            for own in quickest:
                yield partial(own.at, number)


@dataclass(frozen=True)
class _Quickest:
    """The ``most`` chains of a size of micro-batches that promise most within the request's memory.

    Finding them may take a ``share`` of the time, and at least ``seconds``.
    """

    request: Request
    size: int
    most: int
    share: float
    seconds: float

    @cached_property
    def _found(self) -> list[CandidateOrError]:
        request = self.request
        batch = Batch(request.batch.mini_batch // self.size, self.size)
        given = request.profile, self.size, batch.num_microbatches, request.num_devices
        how = _recomputes(request), request.cluster, None, request.sharing
        try:
            with in_part_of_time(request, self.share, self.seconds, STAGE_WAYS_QUESTION):
                cuts = StageFrontiers(*given, *how).fastest(request.num_devices, request.least_memory, self.most)
        except UsageError:  # no way has costs for this size
            return []
        except SearchTimeoutError as error:
            return [error]
        return [PlacementCandidate(cut.placement, batch, False, "stage ways", given=cut.given or None) for cut in cuts]

    def at(self, number: int) -> CandidateOrError | None:
        """The candidate with this number, if there is one; or, in place of the first, why there is none."""
        return self._found[number] if number < len(self._found) else None
