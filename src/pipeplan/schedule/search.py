"""The anytime search for a schedule: bounds, simple schedules, repetend, ramps, then the whole horizon.

There is a valid schedule from the first moment on. Everything after only improves it, until it equals the proved
bound, the budget is spent, or the user interrupts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from pipeplan.errors import InfeasibleError, InvalidPlanError, UsageError
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.initial_schedules import CHEAP_TASKS, first_schedule, offer_built_in, offer_classics, offer_rules
from pipeplan.schedule.pattern import microbatch_by_microbatch
from pipeplan.schedule.rules.language import Rules
from pipeplan.schedule.rules.sweep import schedule_of_rules
from pipeplan.schedule.state import Candidate, Progress, Schedule, SearchState
from pipeplan.schedule.steady import (
    MOST_ADOPTED,
    adopt_repetitions,
    search_repetend,
    search_unrolled,
)
from pipeplan.schedule.windows import improve_ramps, improve_windows, solve_whole
from pipeplan.time_limit import checkpoint
from pipeplan.workload.bounds import weak_makespan_bound
from pipeplan.workload.memory import overflow, peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.repetend import extend, find_repetend
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph, with_links
from pipeplan.workload.workload import Workload

__all__ = ["SEARCHING", "Progress", "Schedule", "first_look", "search_schedule", "timed"]

SEARCHING = ("auto", "repetend")
"""Schedulers that make more of more time; the others make one schedule."""


def search_schedule(
    workload: Workload,
    budget: Budget,
    *,
    scheduler: str = "auto",
    rules: Rules | None = None,
    unroll: int | None = None,
    known: Schedule | None = None,
    progress: Progress | None = None,
) -> Schedule:
    """Search the best order of a workload's actions.

    ``scheduler`` is ``auto`` (everything), ``repetend`` (the best repetend, its warmup and cooldown as the pattern
    leaves them and then improved), ``rules`` (what ``rules`` make of it; without them the best of the built-in
    ones), or the name of a classic schedule. ``unroll`` None lets the search choose. What is found by ``auto`` is no
    longer than a ``known`` schedule of the same workload.

    Raises:
        InfeasibleError: a device's memory is too small, the classic schedule asked for does not fit, or the rules get
            stuck.
        SearchTimeoutError: the budget ran out before anything that fits was found.
        UsageError: an unknown scheduler, or a classic one that does not apply to the placement.
    """
    if scheduler == "rules":
        return schedule_of_rules(workload, rules, budget)
    _require_known_kinds(workload)
    problem = OneMicrobatch.of(workload)
    if scheduler in CLASSIC:
        return _restored(problem, _one_classic(SearchState.of(problem, budget, progress), scheduler))
    if scheduler not in SEARCHING:
        known_names = ", ".join((*SEARCHING, "rules", *CLASSIC))
        raise UsageError(f"--scheduler {scheduler!r} is not known; choose from {known_names}")
    repeated = _repeated(problem, budget, scheduler, unroll, progress)
    state = SearchState.of(problem, budget, progress)
    if known is not None and scheduler == "auto":
        orders = known.orders[: len(workload.devices)]
        own = orders if problem.reduction is None else problem.reduction.to_reduced(orders)
        state.offer(state.candidate(own, known.scheduler))
    return _restored(problem, repeated or _searched(state, scheduler, unroll))


def first_look(workload: Workload, *, thorough: bool = False) -> Schedule | None:
    """The best of the known schedules that apply, without any search; None if none of them fits.

    A ``thorough`` look has those that are made by trying rules, too, where there are few actions.
    """
    _require_known_kinds(workload)
    problem = OneMicrobatch.of(workload, require_room=False)
    graph = task_graph(problem.workload)
    best: Schedule | None = None
    for name, orders in _known_orders(problem, graph, thorough and graph.num_tasks <= CHEAP_TASKS):
        found = timed(problem, workload, orders, name)
        if found is not None and (best is None or found.makespan_ns < best.makespan_ns):
            best = found
    return best


def _require_known_kinds(workload: Workload) -> None:
    """What is proved and tried here is about forwards and backwards."""
    if workload.instructions:
        kinds = ", ".join(operation.id for operation in workload.instructions[:4])
        raise UsageError(f"the workload has instructions ({kinds}), which rules alone schedule; give --scheduler rules")


def _known_orders(problem: OneMicrobatch, graph: TaskGraph, thorough: bool) -> Iterator[tuple[str, Orders]]:
    """One micro-batch after another, and the classic schedules; those that are slow to make only if ``thorough``."""
    yield "sequential", microbatch_by_microbatch(problem)
    for name, classic in CLASSIC.items():
        checkpoint()
        slow = classic.automatic or (name == "greedy" and graph.num_tasks > _GREEDY_TASKS)
        if (thorough or not slow) and classic.applies(problem) is None:
            yield name, classic.orders(problem, graph)


_GREEDY_TASKS = 1_500
"""Up to so many actions the greedy schedule is quick enough for a first look: it tries many limits."""


def timed(problem: OneMicrobatch, workload: Workload, orders: Orders, scheduler: str) -> Schedule | None:
    """The schedule of a problem's orders; None if they block each other or do not fit into memory."""
    graph = task_graph(workload)
    own = orders if problem.reduction is None else problem.reduction.from_reduced(orders)
    try:
        complete = with_links(graph, own)
        starts = earliest_starts(graph, complete)
    except InvalidPlanError:
        return None
    if overflow(graph, complete) is not None:
        return None
    makespan = max(map(sum, zip(starts, graph.durations, strict=True)))
    bound = min(makespan, weak_makespan_bound(workload))
    return Schedule(workload, graph, complete, starts, makespan, bound, scheduler, None, Fraction(0), None, 0.0, False)


def _restored(problem: OneMicrobatch, found: Schedule) -> Schedule:
    """The schedule of the workload that was given, where it was searched in rounds; links carry what they can."""
    if problem.reduction is None:
        return found
    workload = problem.reduction.workload
    graph = task_graph(workload)
    orders = with_links(graph, problem.reduction.from_reduced(found.orders))
    starts = earliest_starts(graph, orders)
    makespan = max(map(sum, zip(starts, graph.durations, strict=True)))
    return replace(found, workload=workload, graph=graph, orders=orders, starts=starts, makespan_ns=makespan)


def _searched(state: SearchState, scheduler: str, unroll: int | None) -> Schedule:
    """Search until proved, out of time, or interrupted."""
    try:
        first_schedule(state)
        return _improve(state, scheduler, unroll)
    except KeyboardInterrupt:  # between two solves; inside one the solver stops and the search goes on to its end
        if state.best is None:
            raise
        state.budget.interrupted = True
        return _result(state)


def _improve(state: SearchState, scheduler: str, unroll: int | None) -> Schedule:
    """Everything after the first valid schedule, most valuable first, as long as there is time."""
    early = scheduler == "auto" and state.graph.num_tasks <= CHEAP_TASKS
    if early:
        offer_classics(state, automatic=False)
    search_repetend(state, unroll)
    if scheduler == "auto":
        offer_classics(state, automatic=True)
        if not early:
            offer_classics(state, automatic=False)
        offer_built_in(state)
        offer_rules(state)
    if unroll is None:
        adopt_repetitions(state)
    if unroll is None and scheduler == "repetend":
        search_unrolled(state)
    for step in (improve_ramps, solve_whole, improve_windows, solve_whole):
        if not state.finished:
            step(state)
    if not state.chosen.frozen:
        _with_less_memory(state)
    return _result(state)


def _with_less_memory(state: SearchState) -> None:
    """The best schedule cannot be repeated: look for one as short that can, with no more memory than one that can.

    Without a cap, patterns with many micro-batches in flight are as good as any to the solver; with one it finds
    those that fill and drain sooner.
    """
    if state.steady is None or state.budget.expired:
        return
    static = state.problem.workload.static_bytes
    peaks = peak_memory(state.graph, state.steady.orders)
    most = max(memory.peak_bytes - static(device) for device, memory in enumerate(peaks))
    limits = tuple(most if capacity is None else min(most, capacity) for capacity in state.problem.capacity)
    other = replace(state, problem=replace(state.problem, capacity=limits), best=None, steady=None, progress=None)
    other.offer(state.steady)
    search_repetend(other, None)
    improve_ramps(other)
    if other.steady is not None and state.best is not None and other.steady.makespan <= state.best.makespan:
        state.steady = other.steady


def _result(state: SearchState) -> Schedule:
    chosen = state.chosen
    return Schedule(
        state.problem.workload,
        state.graph,
        chosen.orders,
        chosen.starts,
        chosen.makespan,
        state.bound,
        chosen.scheduler,
        state.pattern,
        state.period_proved,
        state.repetend_seconds,
        state.budget.elapsed,
        state.budget.interrupted,
    )


def _one_classic(state: SearchState, name: str) -> Schedule:
    classic = CLASSIC[name]
    reason = classic.applies(state.problem)
    if reason is not None:
        raise UsageError(f"--scheduler {name} does not apply: {reason}; choose another, or auto")
    orders = classic.orders(state.problem, state.graph)
    over = overflow(state.graph, orders)
    if over is not None:
        raise InfeasibleError(
            f"--scheduler {name} does not fit: {over}; raise --memory, or let --scheduler auto search"
        )
    state.offer(state.candidate(orders, name))
    return _result(state)


def _repeated(
    problem: OneMicrobatch, budget: Budget, scheduler: str, unroll: int | None, progress: Progress | None
) -> Schedule | None:
    """A very long run: a shorter one is searched, and the repetend of what was found there repeated.

    None where the run is not long, or nothing that can be repeated up to its end is found.
    """
    count = problem.num_microbatches
    fewer = max(_LONG_TASKS // problem.num_operations, 2 * problem.num_devices)
    fewer -= (fewer - count) % _UNROLLS
    if count < 2 * fewer:
        return None
    with budget.share(budget.remaining * _SHORTER_SHARE) as share:
        state = SearchState.of(OneMicrobatch.of(problem.workload.with_microbatches(fewer)), share, progress)
        found = _searched(state, scheduler, unroll)
    longer = [_extended(state, candidate, count) for candidate in (state.best, state.steady) if candidate is not None]
    whole = SearchState.of(problem, budget, progress)
    for orders in longer:
        whole.offer(None if orders is None else whole.candidate(orders, state.chosen.scheduler))
    if whole.best is None:
        return None
    if scheduler == "auto" and not whole.proved:
        offer_classics(whole, automatic=False)
    return replace(
        found,
        workload=problem.workload,
        graph=whole.graph,
        orders=whole.chosen.orders,
        starts=whole.chosen.starts,
        makespan_ns=whole.chosen.makespan,
        bound_ns=whole.bound,
        scheduler=whole.chosen.scheduler,
        seconds=budget.elapsed,
    )


_LONG_TASKS = 20_000
"""Runs at least twice as long as so many actions, and as two micro-batches per device, are planned that short ..."""


_UNROLLS = 12
"""... with fewer micro-batches by a multiple of this: repetends of unroll 1, 2, 3, 4 and 6 reach the whole number."""


_SHORTER_SHARE = 0.8
"""The part of the time in which the shorter run is searched; the rest is for repeating it."""


def _extended(state: SearchState, candidate: Candidate, count: int) -> list[list[int]] | None:
    """The orders of a schedule for more micro-batches; None without a repetend that reaches them."""
    repetend = find_repetend(state.graph, candidate.orders, candidate.starts, MOST_ADOPTED)
    if repetend is None or (count - state.problem.num_microbatches) % repetend.unroll:
        return None
    return extend(state.problem.workload, candidate.orders, repetend, count)[1]
