"""Everything that a search for a plan tries, in order: placements, their schedules, changes to the best plans.

A step is a frozen dataclass whose fields are its constants. A search takes the steps as an argument, so that each can
be left out: ``search_plan(request, steps=without({"windows"}))``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pipeplan.errors import PipeplanError
from pipeplan.files import Placement
from pipeplan.planning.candidates import PlacementCandidate, PublishedPlanners, StageGraphs
from pipeplan.planning.infeasibility import ExplainShortage
from pipeplan.planning.polish import EaseRecomputation, SliceForwards
from pipeplan.planning.trials import BackwardWays, PlanSearch, PlanStep, Trial, on_cluster
from pipeplan.schedule.cpsat.solver import SECONDS_PER_LOOK
from pipeplan.schedule.search import FirstLook
from pipeplan.schedule.state import SearchStep, named
from pipeplan.schedule.steps import STEPS as SCHEDULE_STEPS


@dataclass(frozen=True)
class LookAtCandidates(PlanStep):
    """Known schedules of placements as they come; with less than ``least`` of the limit left no more are looked at.

    ``chains_between`` are as in :func:`pipeplan.planning.candidates.candidates`.
    """

    share: float = 0.5
    least: float = 0.1
    chains_between: int = 8
    name = "look at candidates"
    when = "always, in turn with the search; once there is a plan, only with {least} of the limit left"
    of = "what is left"
    needed = True
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        budget = search.budget
        until = budget.used + self.share * budget.remaining
        while search.best is None or (budget.used < until and not budget.interrupted):
            candidate = search.take()
            if search.all_seen:
                return
            if candidate is not None:
                self._try(search, candidate)
        search.all_seen = budget.remaining <= self.least * budget.seconds

    def _try(self, search: PlanSearch, candidate: PlacementCandidate) -> None:
        """Known schedules alone, unless the candidate cannot be better, or must be searched in any case."""
        request, slicing = search.request, named(search.steps, SliceForwards)
        try:
            if search.best is not None and search.hopeless(Trial.of(replace(request, cluster=None), candidate)):
                return  # wherever its devices are
            trial = Trial.of(request, on_cluster(request, candidate) or candidate, search.steps)
            if slicing is not None:
                slicing.expect(request, trial)
        except PipeplanError as error:
            search.failures.append(error)
            return
        search.trials.append(trial)
        searched = isinstance(request.placement, Placement) or request.scheduler != "auto"
        if searched or search.hopeless(trial):
            return
        trial.look()
        if slicing is not None:
            slicing.at_once(request, trial)
        search.budget.charge(SECONDS_PER_LOOK * sum(len(slots) for workload in trial.ways for slots in workload.slots))
        search.report(trial)


@dataclass(frozen=True)
class SearchCandidates(PlanStep):
    """Search the most promising candidates: in each round (how many, their part of the time that is left).

    As long as there may be more candidates, the first round alone.
    """

    rounds: tuple[tuple[int, float], ...] = ((8, 0.4), (3, 0.5), (1, 1.0))
    name = "search candidates"
    when = "always, in turn with the looking; those that may become the best"
    needed = True
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        for most, part in self.rounds if search.all_seen else self.rounds[:1]:
            live = search.live[:most]
            seconds = search.budget.remaining * (part if len(live) > 1 else 1.0)
            for trial in live:
                if search.best is None or not (search.hopeless(trial) or search.budget.expired):
                    self._search(search, trial, seconds / len(live))

    def _search(self, search: PlanSearch, trial: Trial, seconds: float) -> None:
        slicing = named(search.steps, SliceForwards)
        try:
            trial.search(search.request, search.budget, seconds, search.progress)
            if slicing is not None:
                slicing.at_once(search.request, trial)
        except PipeplanError as error:
            search.failures.append(error)
            if trial.best is None:
                search.trials.remove(trial)


STEPS: tuple[SearchStep, ...] = (
    LookAtCandidates(),
    StageGraphs(),
    PublishedPlanners(),
    FirstLook(),
    SearchCandidates(),
    BackwardWays(),
    *SCHEDULE_STEPS,
    EaseRecomputation(),
    SliceForwards(),
    ExplainShortage(),
)


def without(names: Collection[str], steps: Sequence[SearchStep] = STEPS) -> tuple[SearchStep, ...]:
    """The steps without those of some names.

    Raises:
        ValueError: a name is not a step's, or that step is needed.
    """
    left_out = {step.name for step in steps if not step.needed} & set(names)
    if left_out != set(names):
        raise ValueError(f"{', '.join(sorted(set(names) - left_out))}: no step that can be switched off")
    return tuple(step for step in steps if step.name not in names)


def table(steps: Sequence[SearchStep] = STEPS) -> str:
    """The steps as a Markdown table: name, when it is tried, its share of the time."""
    rows = [("step", "tried when", "time, at most"), ("---", "---", "---"), *(step.row for step in steps)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
