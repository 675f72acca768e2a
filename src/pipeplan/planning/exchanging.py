"""How often a plan's actions exchange the state that replicas divide: chosen by timing a short run of each way.

A stage whose parameters and gradients fit whole beside the rest is exchanged by actions of programs, which a schedule
hides; of which so many share a gather, and so many micro-batches a reduction, as is quickest and fits. Where that does
not fit, each block is exchanged inside of actions, which takes less memory.
"""

from __future__ import annotations

from dataclasses import replace

from pipeplan.costs.zero import GATHERED, IN_ACTIONS
from pipeplan.errors import PipeplanError
from pipeplan.files import PlacedStage
from pipeplan.planning.candidates import PlacementCandidate, workload_of
from pipeplan.planning.request import Request
from pipeplan.schedule.search import plain_look
from pipeplan.time_limit import checked
from pipeplan.workload.elements import ONCE, odd_neighbour
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.workload import Workload

Every = tuple[int, int]
"""For how many uses parameters are gathered, and after how many micro-batches gradients are reduced."""

SHORT_RUN = 3
"""Micro-batches for each stage in the run that is timed: ramps, and as much of the steady state."""


def exchanging_workload(request: Request, candidate: PlacementCandidate, *, split_backward: bool) -> Workload:
    """The candidate's workload, whose stages exchange by actions as often as is best, where they exchange at all.

    Raises:
        UsageError: the profile has no such costs.
    """
    inside = workload_of(request, candidate, split_backward=split_backward)
    if not _may_choose(request, candidate, inside):
        return inside
    gathers = any(stage.zero >= GATHERED for stage in inside.stages)
    best: _Found | None = None
    for reduced in checked(_numbers(inside.num_microbatches), 1):
        best = _better(best, _timed(request, candidate, (1, reduced), split_backward))
    if best is None:
        return inside
    for uses in checked(_numbers(2 * inside.num_microbatches)[1:] if gathers else (), 1):
        best = _better(best, _timed(request, candidate, (uses, best[2][1]), split_backward)) or best
    return best[3]


def _may_choose(request: Request, candidate: PlacementCandidate, workload: Workload) -> bool:
    """Whether there is something to exchange, nobody has said how, and its devices share stages as a whole."""
    stages = [stage for stage in workload.stages if _exchanges(stage.zero, stage.sharers)]
    said = any(stage.reduce_every is not None for stage in candidate.placement.stages)
    parted = request.num_parted or any(stage.num_parted for stage in workload.stages)
    odd = any(odd_neighbour(stage, workload.stages) is not None for stage in stages)
    return bool(stages) and not (said or parted or odd)


def _exchanges(level: int, sharers: int) -> bool:
    return level >= IN_ACTIONS and sharers > 1


_Found = tuple[int, int, Every, Workload]
"""Ns of a short run, its most bytes, how often, the workload."""


def _better(one: _Found | None, other: _Found | None) -> _Found | None:
    return one if other is None or (one is not None and one[:2] <= other[:2]) else other


def _numbers(most: int) -> list[int]:
    """For each, for two, four and eight of them, once an iteration."""
    return [*(each for each in (1, 2, 4, 8) if each < most), ONCE]


def _timed(request: Request, candidate: PlacementCandidate, every: Every, split_backward: bool) -> _Found | None:
    """How long a short run takes with exchanges as often as this; None where that does not fit."""
    stages = tuple(_exchanged(stage, every) for stage in candidate.placement.stages)
    placement = candidate.placement.model_copy(update={"stages": stages})
    workload = workload_of(request, replace(candidate, placement=placement), split_backward=split_backward)
    least = SHORT_RUN * len(workload.stages)
    short = workload.with_microbatches(min(workload.num_microbatches, least)) if workload.is_uniform else workload
    try:
        OneMicrobatch.of(short)  # which searches need to have room
        found = plain_look(short)
    except PipeplanError:  # what does not fit is said where it is searched
        return None
    return None if found is None else (found.iteration_ns, found.most_bytes, every, workload)


def _exchanged(stage: PlacedStage, every: Every) -> PlacedStage:
    if not _exchanges(stage.zero, stage.zero_group or stage.copies):
        return stage
    uses = every[0] if stage.zero >= GATHERED else None
    return stage.model_copy(update={"unshard_every": uses, "reduce_every": every[1]})
