"""Improving a schedule by rescheduling parts of it: ramps, windows, the whole."""

from __future__ import annotations

from dataclasses import replace

from pipeplan.schedule.cpsat.window_model import reschedule
from pipeplan.schedule.state import Candidate, SearchState

__all__ = ["improve_ramps", "improve_windows", "solve_whole"]

_WINDOW_TASKS = (40, 80, 160, 320)
"""Sizes of windows in which everything may change: what CP-SAT decides in about a second, and less."""


def improve_ramps(state: SearchState) -> None:
    """Reschedule what runs before and after the frozen repetition: warmup and cooldown, as Tessel's IV-C."""
    limit = state.budget.used + state.budget.seconds / _RAMP_SHARE
    for size in _WINDOW_TASKS:
        improved = True
        while improved and not _steady_is_done(state, limit):
            assert state.steady is not None
            improved = False
            for begin, end in _windows(state.steady, size):
                if not _steady_is_done(state, limit):
                    improved = _try_window(state, state.steady, begin, end) or improved


_RAMP_SHARE = 8
"""The part of the time limit that the ramps of a repeatable schedule get, at most."""


def _steady_is_done(state: SearchState, limit: float) -> bool:
    if state.steady is None or state.budget.expired or state.budget.used > limit:
        return True
    return state.steady.makespan <= state.bound


def solve_whole(state: SearchState) -> None:
    """The whole horizon as one problem, which also proves a bound."""
    if state.graph.num_tasks > _WHOLE_HORIZON_TASKS:
        return
    assert state.best is not None
    found = reschedule(
        state.problem,
        state.graph,
        state.best.orders,
        state.best.starts,
        state.budget,
        state.budget.remaining * (_SMALL_SHARE if state.graph.num_tasks <= _SMALL_TASKS else 0.5),
        on_solution=lambda value, bound: state.report("horizon", value, bound),
    )
    if found.orders is not None:
        state.offer(state.candidate(found.orders, f"{_origin(state.best.scheduler)}+horizon"))
    state.raise_bound(found.bound_ns)


_WHOLE_HORIZON_TASKS = 600
"""Up to this many actions the whole horizon is one CP-SAT problem worth trying ..."""


_SMALL_TASKS, _SMALL_SHARE = 200, 0.85
"""... and up to this many it is worth most of the time left, since it ends with a proof."""


def improve_windows(state: SearchState) -> None:
    """Reschedule windows that slide over the whole schedule, from its two ends first, growing while nothing helps."""
    for size in _WINDOW_TASKS:
        improved = True
        while improved and not state.finished:
            assert state.best is not None
            improved = False
            for begin, end in _windows(replace(state.best, frozen=frozenset()), size):
                if not state.finished:
                    improved = _try_window(state, replace(state.best, frozen=frozenset()), begin, end) or improved
        if size >= state.graph.num_tasks:
            return


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


def _try_window(state: SearchState, candidate: Candidate, begin: int, end: int) -> bool:
    """Offer the candidate with a better order of a window, if there is one; whether it was better."""
    found = reschedule(
        state.problem,
        state.graph,
        candidate.orders,
        candidate.starts,
        state.budget,
        _WINDOW_SECONDS,
        begin_ns=begin,
        end_ns=end,
    )
    if found.orders is None:
        return False
    return state.offer(state.candidate(found.orders, f"{_origin(candidate.scheduler)}+windows", candidate.frozen))


_WINDOW_SECONDS = 1.0


def _origin(scheduler: str) -> str:
    """What a rescheduled schedule began as; ``1f1b+`` is a name of its own."""
    return scheduler.removesuffix("+windows").removesuffix("+horizon")
