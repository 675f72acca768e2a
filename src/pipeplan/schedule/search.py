"""The anytime search for a schedule: bounds, simple schedules, repetend, ramps, then the whole horizon.

There is a valid schedule from the first moment on. Everything after only improves it, until it equals the proved
bound, the budget is spent, or the user interrupts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from random import Random

from pipeplan.errors import InfeasibleError, InvalidPlanError, SearchTimeoutError, UsageError
from pipeplan.model.workload import Workload
from pipeplan.schedule.bounds import makespan_bound, period_bound
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.completion import (
    compose,
    microbatch_by_microbatch,
    middle_repetition,
    pattern_of,
    repeated_tasks,
)
from pipeplan.schedule.horizon import reschedule
from pipeplan.schedule.insertion import insert_microbatches
from pipeplan.schedule.listing import Tuning, list_schedule
from pipeplan.schedule.neighbourhoods import WINDOW_TASKS, Neighbourhood, random_neighbourhood
from pipeplan.schedule.problem import Problem
from pipeplan.schedule.repetend import (
    Pattern,
    least_period,
    sequential_time,
    shortest_way_through,
    solve_pattern,
)
from pipeplan.schedule.solver import Budget
from pipeplan.simulate.memory import overflow, peak_memory
from pipeplan.simulate.repetend import extend, find_repetend
from pipeplan.simulate.timing import TaskGraph, earliest_starts, task_graph, with_links

__all__ = ["Progress", "Schedule", "search_schedule"]

Progress = Callable[[str, int, int, float], None]
"""Called with what is being done, the best makespan and the bound (ns), and seconds since the search began."""

_WHOLE_HORIZON_TASKS = 600
"""Up to this many actions the whole horizon is one CP-SAT problem worth trying ..."""

_SMALL_TASKS, _SMALL_SHARE = 200, 0.85
"""... and up to this many it is worth most of the time left, since it ends with a proof."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The best schedule found, and what is proved about the workload.

    ``orders`` [device] task numbers and ``starts`` [task] in ns, as in :mod:`pipeplan.simulate.timing`.
    ``scheduler`` names what made it. ``pattern`` is the repetend the search found, ``period_bound_ns`` the proved
    least period per micro-batch at its unroll, and ``repetend_seconds`` how long both took from the start.
    """

    workload: Workload
    graph: TaskGraph
    orders: list[list[int]]
    starts: list[int]
    makespan_ns: int
    bound_ns: int
    scheduler: str
    pattern: Pattern | None
    period_bound_ns: Fraction
    repetend_seconds: float | None
    seconds: float
    interrupted: bool

    @property
    def optimal(self) -> bool:
        """Whether no schedule of this workload is shorter."""
        return self.makespan_ns == self.bound_ns


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A valid schedule. ``frozen`` are the tasks of one repetition in its middle, which keep it repeatable."""

    orders: list[list[int]]
    starts: list[int]
    makespan: int
    most_bytes: int
    scheduler: str
    frozen: frozenset[int] = frozenset()

    @property
    def value(self) -> tuple[int, int]:
        """Less is better: makespan, then the memory of the device that needs most."""
        return self.makespan, self.most_bytes


@dataclass(slots=True)
class _State:
    """What the search knows so far: the best schedule, and the best of those with a repetition frozen in them.

    ``others`` are the best few of different makespan or memory, the best one among them.
    """

    problem: Problem
    graph: TaskGraph
    budget: Budget
    progress: Progress | None
    bound: int
    best: _Candidate | None = None
    steady: _Candidate | None = None
    others: list[_Candidate] = field(default_factory=list)
    pattern: Pattern | None = None
    period_proved: Fraction = Fraction(0)
    repetend_seconds: float | None = None
    whole_known: bool = False

    @classmethod
    def of(cls, problem: Problem, budget: Budget, progress: Progress | None) -> _State:
        """Nothing but the bounds."""
        graph = task_graph(problem.workload)
        return cls(problem, graph, budget, progress, makespan_bound(problem), period_proved=period_bound(problem))

    def candidate(
        self, orders: list[list[int]], scheduler: str, frozen: frozenset[int] = frozenset()
    ) -> _Candidate | None:
        """The schedule of these orders; None if they block each other or do not fit into memory."""
        try:
            orders = with_links(self.graph, orders)
            starts = earliest_starts(self.graph, orders)
        except InvalidPlanError:
            return None
        if overflow(self.graph, orders) is not None:
            return None
        makespan = max(start + duration for start, duration in zip(starts, self.graph.durations, strict=True))
        most = max(memory.peak_bytes for memory in peak_memory(self.graph, orders))
        return _Candidate(orders, starts, makespan, most, scheduler, frozen)

    def offer(self, candidate: _Candidate | None) -> bool:
        """Keep the candidate where it is better than what is known; whether it was anywhere."""
        if candidate is None:
            return False
        better = False
        if not any(candidate.value == other.value for other in self.others):
            self.others = sorted([*self.others, candidate], key=lambda other: other.value)[: _POOL + 1]
        if candidate.frozen and (self.steady is None or candidate.value < self.steady.value):
            self.steady, better = candidate, True
        if self.best is None or candidate.value < self.best.value:
            self.best, better = candidate, True
            self.report(candidate.scheduler)
        return better

    def raise_bound(self, bound: int | None) -> None:
        """A proof that no schedule is shorter."""
        if bound is not None and bound > self.bound:
            self.bound = min(bound, self.chosen.makespan)
            self.report("bound")

    def report(self, what: str, value: int | None = None, bound: int | None = None) -> None:
        """Say what is known, or what the solver says it is about to know."""
        if self.progress is not None and self.best is not None:
            best, proved = self.best.makespan, self.bound
            self.progress(what, min(best, value or best), max(proved, bound or proved), self.budget.elapsed)

    @property
    def chosen(self) -> _Candidate:
        """The shortest schedule; among equals one that can be repeated."""
        assert self.best is not None
        if self.steady is not None and self.steady.makespan <= self.best.makespan:
            return self.steady
        return self.best

    @property
    def finished(self) -> bool:
        """Whether the best is proved best, or there is no time left."""
        assert self.best is not None
        return self.best.makespan <= self.bound or self.budget.expired


def search_schedule(
    workload: Workload,
    budget: Budget,
    *,
    scheduler: str = "auto",
    unroll: int | None = None,
    progress: Progress | None = None,
) -> Schedule:
    """Search the best order of a workload's actions.

    ``scheduler`` is ``auto`` (everything), ``repetend`` (the best repetend, its warmup and cooldown as the pattern
    leaves them and then improved) or the name of a classic schedule. ``unroll`` None lets the search choose.

    Raises:
        InfeasibleError: a device's memory is too small, or the classic schedule asked for does not fit.
        SearchTimeoutError: the budget ran out before anything that fits was found.
        UsageError: an unknown scheduler, or a classic one that does not apply to the placement.
    """
    problem = Problem.of(workload)
    if scheduler in CLASSIC:
        return _one_classic(_State.of(problem, budget, progress), scheduler)
    if scheduler not in ("auto", "repetend"):
        raise UsageError(f"--scheduler {scheduler!r} is not known; choose from auto, repetend, {', '.join(CLASSIC)}")
    repeated = _repeated(problem, budget, scheduler, unroll, progress)
    return repeated or _searched(_State.of(problem, budget, progress), scheduler, unroll)


def _searched(state: _State, scheduler: str, unroll: int | None) -> Schedule:
    """Search until proved, out of time, or interrupted."""
    try:
        _first(state)
        return _improve(state, scheduler, unroll)
    except KeyboardInterrupt:  # between two solves; inside one the solver stops and the search goes on to its end
        if state.best is None:
            raise
        state.budget.interrupted = True
        return _result(state)


def _repeated(
    problem: Problem, budget: Budget, scheduler: str, unroll: int | None, progress: Progress | None
) -> Schedule | None:
    """A very long run: a shorter one is searched, and the repetend of what was found there repeated.

    None where the run is not long, or nothing that can be repeated up to its end is found.
    """
    count = problem.num_microbatches
    fewer = max(_LONG_TASKS // problem.num_operations, 2 * problem.num_devices)
    fewer -= (fewer - count) % _UNROLLS
    if count < 2 * fewer:
        return None
    share = Budget(budget.remaining * _SHORTER_SHARE, budget.seed, budget.deterministic, budget.workers)
    state = _State.of(Problem.of(problem.workload.with_microbatches(fewer)), share, progress)
    found = _searched(state, scheduler, unroll)
    budget.spent += share.spent
    budget.interrupted = budget.interrupted or share.interrupted
    longer = [_extended(state, candidate, count) for candidate in (state.best, state.steady) if candidate is not None]
    whole = _State.of(problem, budget, progress)
    for orders in longer:
        whole.offer(None if orders is None else whole.candidate(orders, state.chosen.scheduler))
    if whole.best is None:
        return None
    if scheduler == "auto" and not whole.finished:
        _classics(whole, automatic=False)
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


def _extended(state: _State, candidate: _Candidate, count: int) -> list[list[int]] | None:
    """The orders of a schedule for more micro-batches; None without a repetend that reaches them."""
    repetend = find_repetend(state.graph, candidate.orders, candidate.starts, _MOST_ADOPTED)
    if repetend is None or (count - state.problem.num_microbatches) % repetend.unroll:
        return None
    return extend(state.problem.workload, candidate.orders, repetend, count)[1]


def _first(state: _State) -> None:
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


def _improve(state: _State, scheduler: str, unroll: int | None) -> Schedule:
    """Everything after the first valid schedule, most valuable first, as long as there is time."""
    early = scheduler == "auto" and state.graph.num_tasks <= _CHEAP_TASKS
    if early:
        _classics(state, automatic=False)
    _repetend(state, unroll)
    if scheduler == "auto":
        _classics(state, automatic=True)
        if not early:
            _classics(state, automatic=False)
        _insertion(state)
        _listing(state)
    if unroll is None:
        _adopt_repetitions(state)
        _unrolled(state)
    for step in (_ramps, _whole, _windows_everywhere, _whole, _wander):
        if not state.finished:
            step(state)
    if not state.chosen.frozen:
        _with_less_memory(state)
    return _result(state)


def _result(state: _State) -> Schedule:
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


def _one_classic(state: _State, name: str) -> Schedule:
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


def _classics(state: _State, *, automatic: bool) -> None:
    """Offer the classic schedules: those that are made by trying rules, or the others, which take no time."""
    if state.finished and state.graph.num_tasks > _CHEAP_TASKS:
        return
    for name, classic in CLASSIC.items():  # also beside a best one: they may need less memory
        if classic.automatic == automatic and not state.budget.expired and classic.applies(state.problem) is None:
            state.offer(state.candidate(classic.orders(state.problem, state.graph), name))


_CHEAP_TASKS = 5000
"""Up to so many actions what takes milliseconds is tried in any case: the classic schedules, insertion."""


def _insertion(state: _State) -> None:
    """Micro-batches put one by one into the devices' gaps: another start, and for stages on several devices, too."""
    if not state.finished and state.graph.num_tasks <= _CHEAP_TASKS:
        orders = insert_microbatches(state.problem.without_links)
        state.offer(None if orders is None else state.candidate(orders, "insertion"))


def _listing(state: _State) -> None:
    """Rules tried in time, the better ones changed a little, until that stops to help."""
    problem, budget = state.problem, state.budget
    if any(len(devices) > 1 for devices in problem.devices):
        return  # greedy loses alignment where several devices must be free at once
    tuning = Tuning(problem, budget.seed)
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


def _repetend(state: _State, unroll: int | None) -> None:
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


def _take_pattern(state: _State, pattern: Pattern, share: float) -> None:
    """Replay a pattern better than what is known, as it is and with its shortest way through."""
    _offer_pattern(state, pattern)
    state.pattern, _ = shortest_way_through(
        state.problem, pattern, state.budget, share / 4 if state.finished else share
    )
    _offer_pattern(state, state.pattern)


def _adopt_repetitions(state: _State) -> None:
    """Where a good schedule has a repetition of its own that is quicker than the pattern's, that is the pattern."""
    for candidate in state.others:
        if candidate.frozen or state.problem.num_microbatches < 2 or state.budget.expired:
            continue
        repetend = find_repetend(state.graph, candidate.orders, candidate.starts, _MOST_ADOPTED)
        if repetend is None:
            continue
        state.offer(replace(candidate, frozen=repeated_tasks(state.problem, candidate.orders, repetend)))
        pattern = pattern_of(state.problem, candidate.orders, repetend)
        if pattern is not None and (state.pattern is None or pattern.period < state.pattern.period):
            state.pattern, state.period_proved = pattern, period_bound(state.problem)
            state.repetend_seconds = state.budget.elapsed


def _unrolled(state: _State) -> None:
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

_MOST_ADOPTED = 8
"""... but taken from schedules that have them."""


def _offer_pattern(state: _State, pattern: Pattern) -> None:
    middle = middle_repetition(state.problem, pattern)
    state.offer(state.candidate(compose(state.problem, pattern), "repetend", frozenset(middle)))


def _ramps(state: _State) -> None:
    """Reschedule what runs before and after the frozen repetition: warmup and cooldown, as Tessel's IV-C."""
    limit = state.budget.used + state.budget.seconds / _RAMP_SHARE
    for size in WINDOW_TASKS:
        improved = True
        while improved and not _steady_is_done(state, limit):
            assert state.steady is not None
            improved = False
            for begin, end in _windows(state.steady, size):
                if not _steady_is_done(state, limit):
                    improved = _try_window(state, state.steady, begin, end) or improved


def _with_less_memory(state: _State) -> None:
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
    _repetend(other, None)
    _ramps(other)
    if other.steady is not None and state.best is not None and other.steady.makespan <= state.best.makespan:
        state.steady = other.steady


_RAMP_SHARE = 8
"""The part of the time limit that the ramps of a repeatable schedule get, at most."""


def _steady_is_done(state: _State, limit: float) -> bool:
    if state.steady is None or state.budget.expired or state.budget.used > limit:
        return True
    return state.steady.makespan <= state.bound


def _windows_everywhere(state: _State) -> None:
    """Reschedule windows that slide over the whole schedule, from its two ends first, growing while nothing helps."""
    for size in WINDOW_TASKS:
        improved = True
        while improved and not state.finished:
            assert state.best is not None
            improved = False
            for begin, end in _windows(replace(state.best, frozen=frozenset()), size):
                if not state.finished:
                    improved = _try_window(state, replace(state.best, frozen=frozenset()), begin, end) or improved
        if size >= state.graph.num_tasks:
            return


def _wander(state: _State) -> None:
    """Neighbourhoods of random kind, place and size until the time is up, in the best schedule and some others."""
    random = Random(state.budget.seed)
    pool = state.others[1:]
    while not state.finished and not state.whole_known:
        assert state.best is not None
        index = random.randrange(len(pool)) if pool and random.random() < _ELSEWHERE else None
        candidate = state.best if index is None else pool[index]
        chosen = random_neighbourhood(state.problem, candidate.starts, random)
        better = _reschedule(state, replace(candidate, frozen=frozenset()), chosen)
        state.offer(better)
        if index is not None and better is not None:
            pool[index] = better


_POOL = 4
"""So many other schedules are improved beside the best ..."""

_ELSEWHERE = 0.4
"""... and this part of the tries goes to them."""


def _windows(candidate: _Candidate, size: int) -> list[tuple[int, int]]:
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


def _try_window(state: _State, candidate: _Candidate, begin: int, end: int) -> bool:
    return state.offer(_reschedule(state, candidate, Neighbourhood(begin, end)))


def _reschedule(state: _State, candidate: _Candidate, chosen: Neighbourhood) -> _Candidate | None:
    """The candidate with a better order of a neighbourhood; None if none was found."""
    found = reschedule(
        state.problem,
        state.graph,
        candidate.orders,
        candidate.starts,
        state.budget,
        _WINDOW_SECONDS,
        begin_ns=chosen.begin_ns,
        end_ns=chosen.end_ns,
        free=chosen.free,
    )
    if found.orders is None:
        return None
    return state.candidate(found.orders, f"{_origin(candidate.scheduler)}+windows", candidate.frozen)


_WINDOW_SECONDS = 1.0


def _whole(state: _State) -> None:
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
    state.whole_known = found.exhausted


def _origin(scheduler: str) -> str:
    """What a rescheduled schedule began as; ``1f1b+`` is a name of its own."""
    return scheduler.removesuffix("+windows").removesuffix("+horizon")
