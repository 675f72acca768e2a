"""The search for the steady state: repetends searched, and taken from good schedules."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from pipeplan.schedule.cpsat.repetend import least_period, shortest_way_through
from pipeplan.schedule.pattern import Pattern, compose, middle_repetition, pattern_of
from pipeplan.schedule.state import SearchState
from pipeplan.workload.bounds import period_bound
from pipeplan.workload.steady_state.rate import begins_of, tasks_of_copy
from pipeplan.workload.steady_state.repetend import find_repetend

__all__ = ["MOST_ADOPTED", "adopt_repetitions", "search_repetend", "search_unrolled"]


def search_repetend(state: SearchState, unroll: int | None) -> None:
    """The best pattern of this unroll, or of unroll 1 if it is open, replayed as it is and with its shortest way."""
    share = state.budget.seconds / (_REPETEND_SHARE if unroll is None else 3)
    least = least_period(
        state.problem,
        state.budget,
        share,
        unroll=unroll or 1,
        on_pattern=lambda pattern: _offer_pattern(state, pattern),
    )
    state.repetend_seconds = state.budget.elapsed
    state.period_proved = max(period_bound(state.problem), Fraction(least.bound_ns, unroll or 1))
    if least.pattern is not None:
        _take_pattern(state, least.pattern, share)


def _take_pattern(state: SearchState, pattern: Pattern, share: float) -> None:
    """Replay a pattern better than what is known, as it is and with its shortest way through."""
    _offer_pattern(state, pattern)
    state.pattern, _ = shortest_way_through(
        state.problem, pattern, state.budget, share / 4 if state.finished else share
    )
    _offer_pattern(state, state.pattern)


def adopt_repetitions(state: SearchState) -> None:
    """Where a good schedule has a repetition of its own that is quicker than the pattern's, that is the pattern."""
    for candidate in state.others:
        if candidate.frozen or state.problem.num_microbatches < 2 or state.budget.expired:
            continue
        repetend = find_repetend(state.graph, candidate.orders, candidate.starts, MOST_ADOPTED)
        if repetend is None:
            continue
        begins = begins_of(state.graph.workload, candidate.orders, repetend.first, repetend.unroll)
        frozen = tasks_of_copy(begins, repetend.unroll, state.problem.num_microbatches)
        state.offer(replace(candidate, frozen=frozen))
        pattern = pattern_of(state.problem, candidate.orders, repetend)
        if pattern is not None and (state.pattern is None or pattern.period < state.pattern.period):
            state.pattern, state.period_proved = pattern, period_bound(state.problem)
            state.repetend_seconds = state.budget.elapsed


def search_unrolled(state: SearchState) -> None:
    """Several micro-batches per repetend, where one rounds the period up: only for less than what is known."""
    problem, budget = state.problem, state.budget
    bound = period_bound(problem)
    limit = budget.used + budget.seconds / _REPETEND_SHARE
    for unroll in range(2, _MOST_UNROLL + 1):
        reached = state.pattern.period if state.pattern is not None else None
        share = (limit - budget.used) / (_MOST_UNROLL + 1 - unroll)
        if reached == bound or unroll > problem.num_microbatches // 2 or share <= 0 or budget.expired:
            return
        least = least_period(problem, budget, share, unroll=unroll, below=reached)
        found = least.pattern
        if found is not None and (reached is None or found.period < reached):
            state.period_proved = max(bound, Fraction(least.bound_ns, unroll))
            state.repetend_seconds = budget.elapsed
            _take_pattern(state, found, share)


_REPETEND_SHARE = 8
"""The part of the time limit for the repetends of unroll 1, and again for all larger ones: one so many-th."""


_MOST_UNROLL = 4
"""Larger unrolls are not searched ..."""


MOST_ADOPTED = 8
"""... but taken from schedules that have them."""


def _offer_pattern(state: SearchState, pattern: Pattern) -> None:
    middle = middle_repetition(state.problem, pattern)
    state.offer(state.candidate(compose(state.problem, pattern), "repetend", middle))
