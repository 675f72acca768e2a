"""Partitions for a frontier over whole plans, in an order for which there may not be time enough."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import product

from pipeplan.errors import PipeplanError
from pipeplan.partition.per_block_sharding import GroupSplits
from pipeplan.partition.stage_frontier import StageFrontiers
from pipeplan.planning.candidates import PlacementCandidate, graphs, open_sizes
from pipeplan.planning.request import Batch, Request

__all__ = ["STEP", "PartitionTrial", "chains", "in_turn", "own_placement", "stage_graphs"]

STEP = 0.92
"""Each memory limit is at most so much of what the partition before took: frontiers of thousands help nobody."""

_COARSE = STEP**4
"""The same where limits are looked at for the first time: there may not be time for all."""

_GRAPHS = 20
"""One stage graph may take a part of the time as if so many were to share it."""

_SCHEDULED = 3
"""Of the partitions under a limit, with 1, 2, 3 ... stages, so many are scheduled: those that should be quickest."""


@dataclass(frozen=True, slots=True)
class PartitionTrial:
    """A partition, or why there is none, and the request it is for; ``promised_ns`` of one iteration, 0 if unknown.

    ``open``: its stages may yet be split block by block.
    """

    request: Request
    candidate: PlacementCandidate | PipeplanError
    promised_ns: int = 0
    open: bool = False


def chains(request: Request, splits: GroupSplits, *, quickest: bool = False) -> Iterator[PartitionTrial]:
    """Partitions of the chain with micro-batches of every size, under limit after limit.

    The sizes in turn, or the partitions that promise the ``quickest`` iterations first.
    """
    steps = (STEP,) if quickest else (_COARSE, STEP)
    sizes = [_of_size(request, splits, size, steps) for size in open_sizes(request)]
    return merge(*sizes, key=lambda asked: asked.promised_ns) if quickest else in_turn(sizes)


def _of_size(request: Request, splits: GroupSplits, size: int, steps: Sequence[float]) -> Iterator[PartitionTrial]:
    batch = Batch(request.batch.mini_batch // size, size)
    given = request.profile, size, batch.num_microbatches, request.num_devices
    how = _recomputes(request), request.cluster, splits
    try:
        stages = StageFrontiers(*given, *how)
    except PipeplanError as error:
        yield PartitionTrial(request, error)
    else:
        for step in steps:
            yield from _limited(request, stages, batch, step)


def _recomputes(request: Request) -> Sequence[bool]:
    return (False, True) if request.recompute is None else (request.recompute,)


def own_placement(request: Request) -> Iterator[PlacementCandidate]:
    """The placement that the profile says itself, if it is for so many devices, with micro-batches of every size."""
    placement = request.profile.placement
    if placement is not None and placement.num_devices == request.num_devices:
        for size, recompute in product(open_sizes(request), _recomputes(request)):
            batch = Batch(request.batch.mini_batch // size, size)
            yield PlacementCandidate(placement, batch, recompute, "the profile's own")


def _limited(request: Request, stages: StageFrontiers, batch: Batch, step: float) -> Iterator[PartitionTrial]:
    limit = request.least_memory
    while True:
        cuts = stages.fastest(request.num_devices, limit, _SCHEDULED)
        if not cuts:
            return
        asked = replace(request, memory_bytes=limit)
        for cut in cuts:
            candidate = PlacementCandidate(cut.placement, batch, False, "frontier", given=cut.given or None)
            yield PartitionTrial(asked, candidate, cut.slowest_ns * (batch.num_microbatches + cut.num_stages - 1))
        limit = int(step * max(cut.memory_bytes for cut in cuts))


def stage_graphs(request: Request, memories: Sequence[int]) -> Iterator[PartitionTrial]:
    """GraphPipe's stages under the request's limit, then under those that points were found for."""
    limits: list[int | None] = [request.least_memory]
    for memory in memories:
        if limits[-1] is None or memory <= STEP * limits[-1]:
            limits.append(memory)
    for limit in limits:
        asked = replace(request, memory_bytes=limit)
        for found in graphs(replace(asked, time_limit=request.time_limit / _GRAPHS)):
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
