"""How often a plan's actions exchange the state that replicas divide: chosen by timing a short run of each way.

A stage whose parameters and gradients fit whole beside the rest is exchanged by actions of programs, which a schedule
hides; of which so many share a gather, and so many micro-batches a reduction, as is quickest and fits. Where that does
not fit, or only with all recomputed and is then no quicker, each block is exchanged inside of actions, which takes less
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from pipeplan.costs.zero import GATHERED, IN_ACTIONS
from pipeplan.errors import PipeplanError
from pipeplan.files import PlacedStage, Placement
from pipeplan.planning.candidates import PlacementCandidate, is_large, workload_of
from pipeplan.planning.request import Request
from pipeplan.schedule.list_scheduling import list_schedule, policies
from pipeplan.schedule.search import plain_look, timed
from pipeplan.schedule.state import Schedule
from pipeplan.search_constants import EXCHANGE_NUMBERS, EXCHANGES_MUCH, EXCHANGES_RUN
from pipeplan.time_limit import checked
from pipeplan.workload.elements import ONCE, odd_neighbour
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload

What = TypeVar("What")

Every = tuple[int, int]
"""For how many uses parameters are gathered, and after how many micro-batches gradients are reduced."""


def exchanging_workload(request: Request, candidate: PlacementCandidate, *, split_backward: bool) -> Workload:
    """The candidate's workload, whose stages exchange by actions as often as is best, where they exchange at all.

    Raises:
        UsageError: the profile has no such costs.
    """
    inside = workload_of(request, candidate, split_backward=split_backward)
    if is_large(request) or not may_choose(request, candidate, inside):  # of large ones only those of the best
        return inside
    found = _by_actions(request, candidate, inside, split_backward)
    recomputes = request.recompute is None and request.least_memory is not None
    if found is None and recomputes and not all(stage.recompute is True for stage in inside.stages):
        found = _by_actions(request, _recomputed(candidate), inside, split_backward)
    if found is None:
        return inside
    blockwise = _looked_at(inside)
    return inside if blockwise is not None and found[0] > EXCHANGES_MUCH * blockwise.iteration_ns else found[3]


def _by_actions(
    request: Request, candidate: PlacementCandidate, inside: Workload, split_backward: bool
) -> _Found | None:
    """Exchanges by actions as often as is quickest, where they fit."""
    return quickest_every(inside, lambda every: _timed(request, candidate, every, split_backward))


Tried = tuple[int, int, Every, What]
"""Ns of an iteration, its most bytes, how often exchanges are, and what was made so."""


def quickest_every(workload: Workload, tried: Callable[[Every], Tried[What] | None]) -> Tried[What] | None:
    """How often exchanges by actions are quickest, of what is ``tried``; None where nothing fits."""
    best: Tried[What] | None = None
    for reduced in checked(_numbers(workload.num_microbatches), 1):
        best = _better(best, tried((1, reduced)))
    if best is None or all(stage.zero < GATHERED for stage in workload.stages):
        return best
    for uses in checked(_numbers(2 * workload.num_microbatches)[1:], 1):
        best = _better(best, tried((uses, best[2][1]))) or best
    return best


def _recomputed(candidate: PlacementCandidate) -> PlacementCandidate:
    """The candidate with all stages recomputed."""
    stages = tuple(stage.model_copy(update={"recompute": True}) for stage in candidate.placement.stages)
    return replace(candidate, placement=candidate.placement.model_copy(update={"stages": stages}))


def may_choose(request: Request, candidate: PlacementCandidate, workload: Workload) -> bool:
    """Whether there is something to exchange, nobody has said how, and its devices share stages as a whole."""
    stages = [stage for stage in workload.stages if _exchanges(stage.zero, stage.sharers)]
    said = any(stage.reduce_every is not None for stage in candidate.placement.stages)
    parted = request.num_parted or any(stage.num_parted for stage in workload.stages)
    odd = any(odd_neighbour(stage, workload.stages) is not None for stage in stages)
    if request.only is not None or request.zero_exchange == "inside":  # targets exchange in their own way
        return False
    return bool(stages) and not (said or parted or odd)


def _exchanges(level: int, sharers: int) -> bool:
    return level >= IN_ACTIONS and sharers > 1


_Found = Tried[Workload]


def _better(one: Tried[What] | None, other: Tried[What] | None) -> Tried[What] | None:
    return one if other is None or (one is not None and one[:2] <= other[:2]) else other


def _numbers(most: int) -> list[int]:
    """For each, for two, four and eight of them, once an iteration."""
    return [*(each for each in EXCHANGE_NUMBERS if each < most), ONCE]


def _timed(request: Request, candidate: PlacementCandidate, every: Every, split_backward: bool) -> _Found | None:
    """How long a short run takes with exchanges as often as this; None where that does not fit."""
    placement = exchanged_placement(candidate.placement, every)
    workload = workload_of(request, replace(candidate, placement=placement), split_backward=split_backward)
    found = _looked_at(workload)
    return None if found is None else (found.iteration_ns, found.most_bytes, every, workload)


def _looked_at(workload: Workload) -> Schedule | None:
    """A short run by 1F1B, or of several stages per device by a list; None where that does not fit."""
    least = EXCHANGES_RUN * len(workload.stages)
    short = workload.with_microbatches(min(workload.num_microbatches, least)) if workload.is_uniform else workload
    try:
        problem = OneMicrobatch.of(short)  # which searches need to have room
        found = plain_look(short)
        if found is not None:
            return found
        graph = task_graph(problem.workload)
        orders = list_schedule(problem, graph, next(policies()))
        given = graph if problem.reduction is None else task_graph(short)
        return None if orders is None else timed(problem, given, orders, "list")
    except PipeplanError:  # what does not fit is said where it is searched
        return None


def exchanged_placement(placement: Placement, every: Every) -> Placement:
    """The placement whose stages exchange by actions as often as this, where they exchange."""
    return placement.model_copy(update={"stages": tuple(_exchanged(stage, every) for stage in placement.stages)})


def _exchanged(stage: PlacedStage, every: Every) -> PlacedStage:
    if not _exchanges(stage.zero, stage.zero_group or stage.copies):
        return stage
    uses = every[0] if stage.zero >= GATHERED else None
    return stage.model_copy(update={"unshard_every": uses, "reduce_every": every[1]})
