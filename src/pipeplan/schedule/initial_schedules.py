"""Where a search starts from: simple schedules, the classic ones, the built-in rules, rules in time."""

from __future__ import annotations

from pipeplan.errors import InfeasibleError, SearchTimeoutError
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.repetend import solve_pattern
from pipeplan.schedule.list_scheduling import PolicySearch, list_schedule
from pipeplan.schedule.pattern import compose, microbatch_by_microbatch, sequential_time
from pipeplan.schedule.rules.sweep import built_in_rules, sweeping
from pipeplan.schedule.state import SearchState

__all__ = ["CHEAP_TASKS", "first_schedule", "offer_built_in", "offer_classics", "offer_rules"]


def first_schedule(state: SearchState) -> None:
    """A valid schedule at once: one micro-batch after another; where that does not fit, the slowest pattern.

    A micro-batch alone needs the least memory, and the pattern may run its branches in any order.
    """
    problem = state.problem
    if state.offer(state.candidate(microbatch_by_microbatch(problem), "sequential")):
        return
    feasible, pattern, _ = solve_pattern(problem, sequential_time(problem), state.budget, state.budget.remaining)
    if pattern is not None:
        state.offer(state.candidate(compose(problem, pattern), "sequential"))
    elif feasible is False:
        raise InfeasibleError(
            "no order of one micro-batch's operations fits into the devices' memory, although each of them alone does; "
            "raise --memory or --devices, or lower --microbatch-size"
        )
    else:
        raise SearchTimeoutError(
            f"no schedule that fits was found in {state.budget.elapsed:.1f} s; raise --time-limit or --memory"
        )


def offer_classics(state: SearchState, *, automatic: bool) -> None:
    """Offer the classic schedules: those that are made by trying rules, or the others.

    The others are looked at even if no time is left, so that the result is never worse; and, where there are few
    actions, also beside a best one, since they may need less memory.
    """
    if state.proved and state.graph.num_tasks > CHEAP_TASKS:
        return
    for name, classic in CLASSIC.items():
        late = state.budget.expired if automatic else state.budget.interrupted
        if classic.automatic == automatic and not late and classic.applies(state.problem) is None:
            state.offer(state.candidate(classic.orders(state.problem, state.graph), name))


CHEAP_TASKS = 5000
"""Up to this many actions the classic schedules take milliseconds and are tried in any case."""


def offer_built_in(state: SearchState) -> None:
    """The built-in rules (FlexPipe, section 6), or some of them where there are many actions."""
    graph, budget = state.graph, state.budget
    limit = budget.used + budget.seconds * _BUILT_IN_SHARE
    rules = built_in_rules(state.problem.workload)
    swept = sweeping(graph, rules[:: 1 + len(rules) * graph.num_tasks // _BUILT_IN_TASKS])
    while not state.finished and budget.used <= limit and (found := next(swept, None)) is not None:
        state.offer(state.candidate(found.orders, f"rules: {found.rules}"))
        budget.charge(graph.num_tasks * _SECONDS_PER_SWEPT_TASK)


_BUILT_IN_SHARE = 0.1
"""The part of the time limit in which the built-in rules are tried, at most."""

_BUILT_IN_TASKS = 20_000
"""So many of them are tried as have about so many actions together."""

_SECONDS_PER_SWEPT_TASK = 5e-5
"""What running rules and separating gradients costs per action where seconds are deterministic."""


def offer_rules(state: SearchState) -> None:
    """Rules tried in time, the better ones changed a little, until that stops to help."""
    problem, budget = state.problem, state.budget
    if any(len(devices) > 1 for devices in problem.devices):
        return  # greedy loses alignment where several devices must be free at once
    tuning = PolicySearch(problem, budget.seed)
    limit = budget.used + budget.seconds * _LISTING_SHARE
    while not state.finished and budget.used < limit and tuning.fruitless < _FRUITLESS:
        policy = tuning.propose()
        orders = list_schedule(problem, policy)
        candidate = None if orders is None else state.candidate(orders, "rules")
        tuning.learn(policy, None if candidate is None else candidate.makespan)
        state.offer(candidate)
        budget.charge(state.graph.num_tasks * _SECONDS_PER_TASK)


_LISTING_SHARE = 0.15
"""The part of the time limit in which rules are tried, at most."""


_FRUITLESS = 400
"""Rules are given up after so many changes without improvement."""


_SECONDS_PER_TASK = 5e-6
"""What trying a rule costs per action where seconds are deterministic."""
