"""Steps that reschedule parts of a schedule: warmup and cooldown, the whole horizon, windows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.schedule.cpsat.window_model import reschedule
from pipeplan.schedule.state import Candidate, ScheduleStep, SearchState, origin_of

__all__ = ["Ramps", "WholeHorizon", "Windows"]

_SIZES = (40, 80, 160, 320)
"""Actions of windows in which everything may change: what CP-SAT decides in about a second, and less."""

_SECONDS = 1.0
"""For one window."""


@dataclass(frozen=True)
class Ramps(ScheduleStep):
    """Reschedule what runs before and after the frozen repetition: warmup and cooldown, as Tessel's IV-C."""

    share: float = 1 / 8
    sizes: tuple[int, ...] = _SIZES
    seconds: float = _SECONDS
    name = "ramps"
    when = "nothing proved best; some schedule can be repeated"

    def applies(self, state: SearchState) -> bool:
        return not state.finished

    def run(self, state: SearchState) -> None:
        limit = state.budget.used + state.budget.seconds * self.share
        for size in self.sizes:
            improved = True
            while improved and not self._done(state, limit):
                assert state.steady is not None
                improved = False
                for window in _windows(state.steady, size):
                    if not self._done(state, limit):
                        improved = _try_window(state, state.steady, window, self.seconds) or improved

    def _done(self, state: SearchState, limit: float) -> bool:
        if state.steady is None or state.budget.expired or state.budget.used > limit:
            return True
        return state.steady.makespan <= state.bound


@dataclass(frozen=True)
class WholeHorizon(ScheduleStep):
    """The whole horizon as one problem, which also proves a bound.

    With at most ``few_tasks`` it is worth more of the time, since it ends with a proof.
    """

    share: float = 0.5
    most_tasks: int = 600
    few_tasks: int = 200
    share_of_few: float = 0.85
    name = "whole horizon"
    when = "nothing proved best; at most {most_tasks} actions"
    of = "what is left"

    def applies(self, state: SearchState) -> bool:
        return not state.finished and state.graph.num_tasks <= self.most_tasks

    def run(self, state: SearchState) -> None:
        assert state.best is not None
        share = self.share_of_few if state.graph.num_tasks <= self.few_tasks else self.share
        found = reschedule(
            state.problem,
            state.graph,
            state.best.orders,
            state.best.starts,
            state.budget,
            state.budget.remaining * share,
            on_solution=lambda value, bound: state.report("horizon", value, bound),
        )
        if found.orders is not None:
            state.offer(state.candidate(found.orders, f"{origin_of(state.best.scheduler)}+horizon"))
        state.raise_bound(found.bound_ns)


@dataclass(frozen=True)
class Windows(ScheduleStep):
    """Reschedule windows that slide over the whole schedule, from its two ends first, growing while nothing helps."""

    sizes: tuple[int, ...] = _SIZES
    seconds: float = _SECONDS
    name = "windows"
    when = "nothing proved best"

    def applies(self, state: SearchState) -> bool:
        return not state.finished

    def run(self, state: SearchState) -> None:
        for size in self.sizes:
            improved = True
            while improved and not state.finished:
                improved = False
                for window in _windows(_free(state), size):
                    if not state.finished:
                        improved = _try_window(state, _free(state), window, self.seconds) or improved
            if size >= state.graph.num_tasks:
                return


def _free(state: SearchState) -> Candidate:
    """The best schedule, of which everything may change."""
    assert state.best is not None
    return replace(state.best, frozen=frozenset())


def _windows(candidate: Candidate, size: int) -> list[tuple[int, int]]:
    """Moments between which about ``size`` actions start: both ends first, then overlapping by half.

    None reaches into the frozen repetition.
    """
    moments = sorted(candidate.starts)
    step = max(1, size // 2)
    begins = list(range(0, max(1, len(moments) - step), step))
    begins.sort(key=lambda begin: min(begin, len(moments) - begin))
    first = min((candidate.starts[task] for task in candidate.frozen), default=moments[-1] + 1)
    last = max((candidate.starts[task] for task in candidate.frozen), default=-1)
    windows = []
    for begin in begins:
        start, end = moments[begin], moments[begin + size] if begin + size < len(moments) else moments[-1] + 1
        if start < first:
            windows.append((start, min(end, first)))
        if end > last + 1 and candidate.frozen:
            windows.append((max(start, last + 1), end))
    return windows


def _try_window(state: SearchState, candidate: Candidate, window: tuple[int, int], seconds: float) -> bool:
    """Offer the candidate with a better order of a window, if there is one; whether it was better."""
    found = reschedule(
        state.problem,
        state.graph,
        candidate.orders,
        candidate.starts,
        state.budget,
        seconds,
        begin_ns=window[0],
        end_ns=window[1],
    )
    if found.orders is None:
        return False
    return state.offer(state.candidate(found.orders, f"{origin_of(candidate.scheduler)}+windows", candidate.frozen))
