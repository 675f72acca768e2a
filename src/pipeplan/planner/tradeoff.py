"""The frontier over whole plans: iteration time against memory per device against devices.

For every number of devices and every micro-batch size, stages are cut under one memory limit after another, from none
down to where nothing fits; each stage takes its way to run from its device group's frontier
(:mod:`pipeplan.partition.stage_frontier`), and every partition gets the best known schedule under that limit. While
there is time, GraphPipe's stages join them. What is simulated counts: a point stays if no other has at most its memory,
time and devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pipeplan.errors import InfeasibleError, PipeplanError
from pipeplan.model import Plan
from pipeplan.partition.stage_frontier import StageFrontiers
from pipeplan.planner.batch import Batch
from pipeplan.planner.candidates import Candidate, graphs, open_sizes
from pipeplan.planner.finishing import planned
from pipeplan.planner.mapping import on_cluster
from pipeplan.planner.request import Request
from pipeplan.planner.stage_splits import StageSplits
from pipeplan.planner.trials import Trial
from pipeplan.simulate.memory import peak_memory

__all__ = ["PlanFrontier", "PlanPoint", "plan_frontier"]

_STEP = 0.92
"""Each memory limit is at most so much of what the partition before took: frontiers of thousands help nobody."""

_GRAPHS = 20
"""One stage graph may take a part of the time as if so many were to share it."""

_SCHEDULED = 3
"""Of the partitions under a limit, with 1, 2, 3 ... stages, so many are scheduled: those that should be quickest."""


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """A plan of the frontier with what it takes; memory is the peak of the device that needs most, with workspace."""

    plan: Plan
    memory_bytes: int
    workspace_bytes: int
    iteration_ns: int
    num_devices: int


@dataclass(frozen=True, slots=True)
class PlanFrontier:
    """Plans that no other plan found beats in memory, time and devices together, fewest devices and memory first."""

    points: tuple[PlanPoint, ...]
    num_tried: int
    seconds: float
    interrupted: bool


@dataclass(frozen=True, slots=True)
class _Tried:
    """A trial that fits and what it takes, to be compared."""

    request: Request
    trial: Trial
    memory_bytes: int
    workspace_bytes: int
    iteration_ns: int

    @property
    def figures(self) -> tuple[int, int, int]:
        return self.request.num_devices, self.memory_bytes, self.iteration_ns


def plan_frontier(request: Request, device_counts: Sequence[int]) -> PlanFrontier:
    """The frontier of a request's profile and mini-batch over so many devices each.

    The request's memory is the most that any plan may take. Ends when all partitions have been tried, at the time limit
    or at Ctrl-C, with what there is.

    Raises:
        InfeasibleError: nothing fits.
    """
    begun = time.monotonic()
    search = _Search(begun + request.options.time_limit)
    requests = [_on(request, count) for count in device_counts]
    interrupted = False
    try:
        search.try_all(_in_turn([_chains(asked) for asked in requests]))
        search.try_all(_split(StageSplits(request), list(search.best)))
        search.try_all(_in_turn([_graphs(asked, search.memories(asked.num_devices)) for asked in requests]))
    except KeyboardInterrupt:
        interrupted = True
    if not search.best:
        raise search.failures[0] if search.failures else InfeasibleError("no plan fits; raise --memory or --devices")
    points = [_point(tried) for tried in sorted(search.best, key=lambda tried: tried.figures)]
    return PlanFrontier(tuple(points), search.num_tried, time.monotonic() - begun, interrupted)


@dataclass(slots=True)
class _Search:
    """What has been found until the time is up."""

    until: float
    best: list[_Tried] = field(default_factory=list)
    failures: list[PipeplanError] = field(default_factory=list)
    num_tried: int = 0

    def try_all(self, found: Iterator[Asked]) -> None:
        """Try partitions, each with the request it is made for; at least until something fits."""
        while not self.best or time.monotonic() < self.until:
            asked, candidate = next(found, (None, None))
            if asked is None or candidate is None:
                return
            if isinstance(candidate, PipeplanError):
                self.failures.append(candidate)
                continue
            self.num_tried += 1
            tried = _tried(asked, candidate, self.best)
            if tried is not None:
                self.best = _with(self.best, tried)

    def memories(self, num_devices: int) -> list[int]:
        """The memory of the points on so many devices, most first."""
        return sorted(
            (each.memory_bytes for each in self.best if each.request.num_devices == num_devices), reverse=True
        )


Asked = tuple[Request, Candidate | PipeplanError]


def _in_turn(found: Sequence[Iterator[Asked]]) -> Iterator[Asked]:
    """One of each, again and again: there may not be time for all."""
    for each in zip_longest(*found):
        yield from filter(None, each)


def _on(request: Request, num_devices: int) -> Request:
    cluster = request.cluster.first(num_devices) if request.cluster is not None else None
    return replace(request, num_devices=num_devices, cluster=cluster)


def _chains(request: Request) -> Iterator[Asked]:
    """Partitions of the chain with micro-batches of every size, under limit after limit."""
    recomputes = (False, True) if request.options.recompute is None else (request.options.recompute,)
    for size in open_sizes(request):
        try:
            stages = StageFrontiers.of(request.profile, size, request.num_devices, recomputes)
        except PipeplanError as error:
            yield request, error
        else:
            yield from _limited(request, stages, Batch(request.batch.mini_batch // size, size))


def _limited(request: Request, stages: StageFrontiers, batch: Batch) -> Iterator[Asked]:
    limit = request.least_memory
    while True:
        cuts = stages.fastest(request.num_devices, batch.num_microbatches, limit)
        quickest = sorted(cuts, key=lambda cut: cut.slowest_ns * (batch.num_microbatches + cut.num_stages - 1))
        if not quickest:
            return
        asked = replace(request, memory_bytes=limit)
        for cut in quickest[:_SCHEDULED]:
            yield asked, Candidate(cut.placement, batch, False, "frontier")
        limit = int(_STEP * max(cut.memory_bytes for cut in quickest[:_SCHEDULED]))


def _graphs(request: Request, memories: Sequence[int]) -> Iterator[Asked]:
    """GraphPipe's stages under the request's limit, then under those that points were found for."""
    short = replace(request.options, time_limit=request.options.time_limit / _GRAPHS)
    for limit in (request.least_memory, *memories):
        asked = replace(request, memory_bytes=limit)
        for found in graphs(replace(asked, options=short)):
            yield asked, found


def _split(splits: StageSplits, best: Sequence[_Tried]) -> Iterator[Asked]:
    """The points again with every stage on several devices split as its own frontier says, under the same limits."""
    for tried in best:
        asked = tried.request
        found = splits.split(tried.trial.candidate, asked.least_memory)
        if found is not None:
            yield asked, found


def _tried(request: Request, candidate: Candidate, best: Sequence[_Tried]) -> _Tried | None:
    """A candidate with the best known schedule; None if it does not fit, or cannot be better than what there is."""
    try:
        trial = Trial.of(request, on_cluster(request, candidate) or candidate)
    except PipeplanError:
        return None
    static = max(map(trial.ways[0].static_bytes, range(request.num_devices)))
    if any(_beats(each.figures, (request.num_devices, static, trial.bound_ns)) for each in best):
        return None
    trial.look()
    if trial.best is None or trial.value_ns is None:
        return None
    peak = max(peak_memory(trial.best.graph, trial.best.orders), key=lambda each: each.peak_bytes)
    return _Tried(request, trial, peak.peak_bytes, peak.workspace_bytes, trial.value_ns)


def _with(best: Sequence[_Tried], found: _Tried) -> list[_Tried]:
    """The frontier with another point, if it belongs there."""
    if any(_beats(each.figures, found.figures) for each in best):
        return list(best)
    return [each for each in best if not _beats(found.figures, each.figures)] + [found]


def _beats(figures: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """At most as much of everything."""
    return all(own <= other for own, other in zip(figures, others, strict=True))


def _point(tried: _Tried) -> PlanPoint:
    trial = tried.trial
    assert trial.best is not None
    plan = planned(tried.request, trial.candidate, trial.settled, trial.best.workload)
    memory = tried.memory_bytes, tried.workspace_bytes
    return PlanPoint(plan, *memory, plan.predicted.iteration_ns, tried.request.num_devices)
