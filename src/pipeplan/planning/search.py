"""The search over everything that is left open: placements, each with its schedules, best by iteration time.

All candidates are looked at first: bounds, and known schedules alone. Those that may still become the best then get
shares of the time, the more promising ones more and more of it. There is a plan from the first look on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from pipeplan.errors import InfeasibleError, PipeplanError, SearchTimeoutError
from pipeplan.files import Placement
from pipeplan.planning.build_plan import Result, planned
from pipeplan.planning.candidates import CandidateOrError, PlacementCandidate, candidates
from pipeplan.planning.infeasibility import shortage
from pipeplan.planning.polish import ease_recomputation, expect_parts, slice_forwards
from pipeplan.planning.request import Request
from pipeplan.planning.steps import (
    STEPS,
    EaseRecomputation,
    ExplainShortage,
    LookAtCandidates,
    SearchCandidates,
    SliceForwards,
    named,
)
from pipeplan.planning.trials import Trial, on_cluster
from pipeplan.schedule.cpsat.solver import SECONDS_PER_LOOK, Budget, load_solver
from pipeplan.schedule.state import Progress, SearchStep
from pipeplan.workload.workload import Workload


def search_plan(request: Request, *, progress: Progress | None = None, steps: Sequence[SearchStep] = STEPS) -> Result:
    """Search the best plan of a placement, a strategy, or with ``auto`` of all of them, for a mini-batch.

    With ``split_backward`` left open both ways get a short look and the better one the rest of the time, and the bound
    is for both. With ``auto`` micro-batches have any of the request's sizes per replica, and recomputation is a choice
    like others; otherwise it is tried only where nothing fits without. ``steps`` are what is tried.

    Raises:
        InfeasibleError: nothing fits; the text names the device, the bytes and what to change.
        UsageError: a request that contradicts the profile.
    """
    load_solver()
    return _PlanSearch(request, Budget(request.time_limit, request.seed, request.deterministic), progress, steps).run()


class _PlanSearch:
    """What a search knows: trials in the order they were made, and why the others are not among them."""

    def __init__(
        self, request: Request, budget: Budget, progress: Progress | None, steps: Sequence[SearchStep]
    ) -> None:
        self._steps = steps
        self._looking = named(steps, LookAtCandidates) or LookAtCandidates()
        self._rounds = (named(steps, SearchCandidates) or SearchCandidates()).rounds
        self._slicing = named(steps, SliceForwards)
        self._request, self._budget, self._progress = request, budget, progress
        self._without_links = replace(request, cluster=None)
        self._trials: list[Trial] = []
        self._failures: list[PipeplanError] = []
        self._seen: set[Hashable] = set()
        self._partition_seconds = 0.0

    def run(self) -> Result:
        """Look at candidates and search among the best, in turn, until all have been looked at or time is up.

        What is only a fallback comes if there is nothing else.
        """
        for fallback in (False, True) if isinstance(self._request.placement, Placement) else (False,):
            try:
                self._alternate(candidates(self._request), fallback=fallback)
            except KeyboardInterrupt:
                if self._best is None:
                    raise
                self._budget.interrupted = True
            if self._best is not None:
                break
        return self._result()

    def _alternate(self, found: Iterator[CandidateOrError], *, fallback: bool) -> None:
        done = False
        while not done:
            done = (
                self._look(found, fallback=fallback)
                or self._budget.remaining <= self._looking.least * self._budget.seconds
            )
            self._deepen(self._rounds if done else self._rounds[:1])

    @property
    def _best(self) -> Trial | None:
        """The trial with the shortest iteration, of equals the one with fewest stages."""
        return min(self._done, key=_rank, default=None)

    @property
    def _done(self) -> list[Trial]:
        """Trials with a schedule."""
        return [trial for trial in self._trials if trial.best is not None]

    def _look(self, found: Iterator[CandidateOrError], *, fallback: bool) -> bool:
        """Take candidates as they come, until they have had their part of the time; whether that were all."""
        until = self._budget.used + self._looking.share * self._budget.remaining
        while self._best is None or (self._budget.used < until and not self._budget.interrupted):
            begun = time.monotonic()
            candidate = next(found, None)
            self._partition_seconds += time.monotonic() - begun
            if candidate is None:
                return True
            if isinstance(candidate, PipeplanError):
                self._failures.append(candidate)
            elif candidate.fallback == fallback and candidate.key not in self._seen:
                self._seen.add(candidate.key)
                self._try(candidate)
        return False

    def _try(self, candidate: PlacementCandidate) -> None:
        """Known schedules alone, unless the candidate cannot be better, or must be searched in any case."""
        best = self._best
        try:
            if best is not None and self._hopeless(Trial.of(self._without_links, candidate), best):
                return  # wherever its devices are
            trial = Trial.of(self._request, on_cluster(self._request, candidate) or candidate, self._steps)
            if self._slicing is not None:
                expect_parts(self._request, trial, self._slicing)
        except PipeplanError as error:
            self._failures.append(error)
            return
        self._trials.append(trial)
        searched = isinstance(self._request.placement, Placement) or self._request.scheduler != "auto"
        if searched or (best is not None and self._hopeless(trial, best)):
            return
        trial.look()
        self._slice(trial, finally_=False)
        self._budget.charge(SECONDS_PER_LOOK * sum(map(_num_actions, trial.ways)))
        self._report(trial)

    def _deepen(self, rounds: Sequence[tuple[int, float]]) -> None:
        """Rounds in which fewer and fewer candidates get more and more time."""
        for most, part in rounds:
            live = self._live()[:most]
            seconds = self._budget.remaining * (part if len(live) > 1 else 1.0)
            for trial in live:
                best = self._best
                if best is not None and (self._hopeless(trial, best) or self._budget.expired):
                    continue
                self._search(trial, seconds / len(live))

    def _search(self, trial: Trial, seconds: float) -> None:
        try:
            trial.search(self._request, self._budget, seconds, self._progress)
            self._slice(trial, finally_=False)
        except PipeplanError as error:
            self._failures.append(error)
            if trial.best is None:
                self._trials.remove(trial)

    def _slice(self, trial: Trial, *, finally_: bool = True) -> None:
        if self._slicing is not None:
            slice_forwards(self._request, trial, self._slicing, finally_=finally_)

    def _live(self) -> list[Trial]:
        """Trials that may become the best, the most promising first."""
        best = self._best
        live = [trial for trial in self._trials if best is None or not self._hopeless(trial, best)]
        return sorted(live, key=lambda trial: (trial.best is None, (trial.value_ns or 0) + trial.bound_ns))

    def _hopeless(self, trial: Trial, best: Trial) -> bool:
        """Whether a trial cannot give a shorter iteration than the best known."""
        assert best.value_ns is not None
        return trial.bound_ns >= best.value_ns

    def _report(self, trial: Trial) -> None:
        best = self._best
        if self._progress is not None and best is not None and best.value_ns is not None:
            bound = min(each.bound_ns for each in self._trials)
            what = f"{trial.candidate.source} {trial.candidate.placement.strategy}"
            self._progress(what, best.value_ns, min(bound, best.value_ns), self._budget.elapsed)

    def _failure(self) -> PipeplanError:
        """Why nothing was found; where memory is short, with what would do."""
        error, step = most_telling(self._failures), named(self._steps, ExplainShortage)
        if step is None or not isinstance(error, InfeasibleError) or self._budget.interrupted:
            return error
        try:
            return shortage(self._request, error, max(step.seconds, self._budget.remaining), step)
        except KeyboardInterrupt:
            return error

    def _result(self) -> Result:
        for number, finalist in enumerate(sorted(self._done, key=_rank)):
            for step in self._steps:
                if isinstance(step, EaseRecomputation) and number < step.finalists:
                    ease_recomputation(self._request, finalist, self._budget, self._progress)
                elif isinstance(step, SliceForwards) and number < step.finalists:
                    self._slice(finalist)
        trial = self._best
        if trial is None or trial.best is None:
            raise self._failure()
        schedule = trial.settled
        plan = planned(self._request, trial.candidate, schedule, trial.best.workload)
        chosen = None if isinstance(self._request.placement, Placement) else self._partition_seconds
        return Result(plan, schedule, self._budget.elapsed, chosen, self._budget.interrupted)


def _rank(trial: Trial) -> tuple[int, int]:
    assert trial.best is not None
    assert trial.value_ns is not None
    return trial.value_ns, len(trial.best.workload.stages)


def _num_actions(workload: Workload) -> int:
    return sum(map(len, workload.slots))


def most_telling(failures: Sequence[PipeplanError]) -> PipeplanError:
    """What to say where nothing was found: that it does not fit goes before what could not be asked."""
    kinds: tuple[Callable[[PipeplanError], bool], ...] = (
        lambda error: isinstance(error, InfeasibleError),
        lambda error: isinstance(error, SearchTimeoutError),
    )
    for is_kind in kinds:
        for error in failures:
            if is_kind(error):
                return error
    return failures[0]
