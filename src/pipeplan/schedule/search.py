"""The anytime search for a schedule: bounds, simple schedules, repetend, ramps, then the whole horizon.

There is a valid schedule from the first moment on. Everything after only improves it, until it equals the proved
bound, the budget is spent, or the user interrupts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random

from pipeplan.errors import InfeasibleError, InvalidPlanError, UsageError
from pipeplan.model.workload import Workload
from pipeplan.schedule.bounds import makespan_bound, period_bound
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.completion import compose, microbatch_by_microbatch
from pipeplan.schedule.horizon import reschedule
from pipeplan.schedule.problem import Problem
from pipeplan.schedule.repetend import LeastPeriod, Pattern, least_period, shortest_way_through
from pipeplan.schedule.solver import Budget
from pipeplan.simulate.memory import overflow
from pipeplan.simulate.timing import TaskGraph, earliest_starts, task_graph

__all__ = ["Progress", "Schedule", "search_schedule"]

Progress = Callable[[str, int, int, float], None]
"""Called with what is being done, the best makespan and the bound (ns), and seconds since the search began."""

_WHOLE_HORIZON_TASKS = 600
"""Up to this many actions the whole horizon is one CP-SAT problem worth trying."""


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


@dataclass(slots=True)
class _State:
    """What the search knows so far."""

    problem: Problem
    graph: TaskGraph
    budget: Budget
    progress: Progress | None
    bound: int
    orders: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    makespan: int = 0
    scheduler: str = ""
    whole_known: bool = False

    def offer(self, orders: list[list[int]], scheduler: str) -> bool:
        """Take the orders if they are valid and shorter than what is known."""
        try:
            starts = earliest_starts(self.graph, orders)
        except InvalidPlanError:
            return False
        makespan = max(start + duration for start, duration in zip(starts, self.graph.durations, strict=True))
        if self.orders and makespan >= self.makespan:
            return False
        if overflow(self.graph, orders) is not None:
            return False
        self.orders, self.starts, self.makespan, self.scheduler = orders, starts, makespan, scheduler
        self.report(scheduler)
        return True

    def raise_bound(self, bound: int | None) -> None:
        """A proof that no schedule is shorter."""
        if bound is not None and bound > self.bound:
            self.bound = min(bound, self.makespan)
            self.report("bound")

    def report_from_solver(self, value: int, bound: int) -> None:
        """Progress from inside a solve of the whole horizon."""
        if self.progress is not None:
            self.progress("horizon", min(value, self.makespan), max(bound, self.bound), self.budget.elapsed)

    def report(self, what: str) -> None:
        """Say what is known."""
        if self.progress is not None:
            self.progress(what, self.makespan, self.bound, self.budget.elapsed)

    @property
    def finished(self) -> bool:
        return self.makespan <= self.bound or self.budget.expired


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
        UsageError: an unknown scheduler, or a classic one that does not apply to the placement.
    """
    problem = Problem.of(workload)
    graph = task_graph(workload)
    state = _State(problem, graph, budget, progress, makespan_bound(problem))
    if scheduler not in ("auto", "repetend"):
        _one_classic(state, scheduler)
        return _result(state, None, period_bound(problem), None)
    state.offer(microbatch_by_microbatch(problem), "sequential")
    try:
        return _improve(state, scheduler, unroll)
    except KeyboardInterrupt:  # between two solves; inside one the solver stops and the search goes on to its end
        budget.interrupted = True
        return _result(state, None, period_bound(problem), None)


def _improve(state: _State, scheduler: str, unroll: int | None) -> Schedule:
    """Everything after the first valid schedule, most valuable first, as long as there is time."""
    if scheduler == "auto":
        _classics(state)
    least, period_proved, seconds = _repetend(state, unroll)
    for step in (_ramps, _whole, _wander):
        if not state.finished:
            step(state)
    return _result(state, least.pattern, period_proved, seconds)


def _result(state: _State, pattern: Pattern | None, period: Fraction, seconds: float | None) -> Schedule:
    return Schedule(
        state.problem.workload,
        state.graph,
        state.orders,
        state.starts,
        state.makespan,
        state.bound,
        state.scheduler,
        pattern,
        period,
        seconds,
        state.budget.elapsed,
        state.budget.interrupted,
    )


def _one_classic(state: _State, name: str) -> None:
    if name not in CLASSIC:
        raise UsageError(f"--scheduler {name!r} is not known; choose from auto, repetend, {', '.join(CLASSIC)}")
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
    state.offer(orders, name)


def _classics(state: _State) -> None:
    for name, classic in CLASSIC.items():
        if not state.finished and classic.applies(state.problem) is None:
            state.offer(classic.orders(state.problem, state.graph), name)


def _repetend(state: _State, unroll: int | None) -> tuple[LeastPeriod, Fraction, float]:
    """The best pattern over the unrolls tried, replayed; and the proved least period per micro-batch."""
    problem, budget = state.problem, state.budget
    bound = period_bound(problem)
    share = budget.seconds / 3
    best = least_period(problem, budget, share, unroll=unroll or 1)
    tried = [best]
    if unroll is None:
        for more in range(2, _MOST_UNROLL + 1):
            reached = best.pattern.period if best.pattern is not None else None
            if reached == bound or budget.expired or more > problem.num_microbatches // 2:
                break
            found = least_period(problem, budget, share / _MOST_UNROLL, unroll=more)
            tried.append(found)
            if found.pattern is not None and (reached is None or found.pattern.period < reached):
                best = found
    seconds = budget.elapsed
    if best.pattern is not None:
        state.offer(compose(problem, best.pattern), "repetend")
        if not state.finished:
            shorter, _ = shortest_way_through(problem, best.pattern, budget, share)
            best = LeastPeriod(shorter, best.bound_ns, best.seconds)
            state.offer(compose(problem, shorter), "repetend")
    chosen = best.pattern.unroll if best.pattern is not None else 1
    proved = max(bound, Fraction(best.bound_ns, chosen))
    return best, proved, seconds


_MOST_UNROLL = 4


def _ramps(state: _State) -> None:
    """Reschedule windows that slide over the schedule, from its two ends first, growing while nothing helps."""
    for size in _WINDOW_TASKS:
        improved = True
        while improved and not state.finished:
            improved = _sweep(state, size)
        if size >= state.graph.num_tasks:
            return


def _sweep(state: _State, size: int) -> bool:
    """Every window once; whether any was improved."""
    improved = False
    for begin, end in _windows(state, size):
        improved = _try_window(state, begin, end) or improved
    return improved


def _wander(state: _State) -> None:
    """Windows of random place and size until the time is up: neighbourhoods the sweeps did not have."""
    random = Random(state.budget.seed)
    while not state.finished and not state.whole_known:
        size = random.choice(_WINDOW_TASKS)
        moments = sorted(state.starts)
        begin = random.randrange(max(1, len(moments) - size // 2))
        end = begin + random.randint(size // 2, size)
        _try_window(state, moments[begin], moments[end] if end < len(moments) else moments[-1] + 1)


_WINDOW_TASKS = (40, 80, 160, 320)


def _windows(state: _State, size: int) -> list[tuple[int, int]]:
    """Moments between which about ``size`` actions start: both ends first, then overlapping by half."""
    moments = sorted(state.starts)
    step = max(1, size // 2)
    begins = list(range(0, max(1, len(moments) - step), step))
    begins.sort(key=lambda begin: min(begin, len(moments) - begin))
    windows = []
    for begin in begins:
        end = begin + size
        windows.append((moments[begin], moments[end] if end < len(moments) else moments[-1] + 1))
    return windows


def _try_window(state: _State, begin: int, end: int) -> bool:
    if state.finished:
        return False
    found = reschedule(
        state.problem,
        state.graph,
        state.orders,
        state.starts,
        state.budget,
        _WINDOW_SECONDS,
        begin_ns=begin,
        end_ns=end,
    )
    return found.orders is not None and state.offer(found.orders, f"{_origin(state.scheduler)}+windows")


_WINDOW_SECONDS = 1.0


def _whole(state: _State) -> None:
    """The whole horizon as one problem, which also proves a bound."""
    if state.graph.num_tasks > _WHOLE_HORIZON_TASKS:
        return
    found = reschedule(
        state.problem,
        state.graph,
        state.orders,
        state.starts,
        state.budget,
        state.budget.remaining / 2,
        on_solution=lambda value, bound: state.report_from_solver(value, bound),
    )
    if found.orders is not None:
        state.offer(found.orders, f"{_origin(state.scheduler)}+horizon")
    state.raise_bound(found.bound_ns)
    state.whole_known = found.exhausted


def _origin(scheduler: str) -> str:
    return scheduler.partition("+")[0] if not scheduler.startswith("1f1b+") else "1f1b+"
