"""Rescheduling windows of a schedule exactly, from a few actions to the whole horizon, and the steps that do.

A schedule is cut by two moments into what came before (kept as it is), the window, and what comes after (kept in
its order). All that matters of the two ends is numbers per action of the window:

* ``release``: when its inputs from before arrive and its devices are free;
* ``tail``: the longest path from its end through what comes after, along dependencies and device orders, and
  through what follows the actions at least: sums of gradients, steps, gathers.

The iteration is then at least the maximum of end + tail over the window, whatever its new order, and of the paths that
pass it by: exactly that where no sum waits for another stage's or device's. Memory after the window depends only on
which actions ran before, so it stays as it was; inside, a hold is an interval from the start of the action that takes
it to the end of the one that gives it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from pipeplan.schedule.cpsat.solver import Budget, load_solver, solve
from pipeplan.schedule.state import ScheduleCandidate, ScheduleStep, SearchState, origin_of
from pipeplan.search_constants import (
    FEW_TASKS,
    RAMPS_SHARE,
    WHOLE_SHARE,
    WHOLE_SHARE_OF_FEW,
    WHOLE_TASKS,
    WINDOW_SECONDS,
    WINDOW_SIZES,
)
from pipeplan.time_limit import checked
from pipeplan.workload.bounds import memory_recurrences
from pipeplan.workload.kinds import GRADIENT_ROLES
from pipeplan.workload.network_jobs import NetworkJob
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import Orders, TaskGraph

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """New orders if something better was found, and a proved bound on the iteration over all orders of the window."""

    orders: list[list[int]] | None
    bound_ns: int | None
    exhausted: bool


@dataclass(frozen=True, slots=True)
class _Window:
    """The actions between two moments, with what the rest of the schedule means for them (ns)."""

    tasks: list[int]
    release: dict[int, int]
    tail: dict[int, int]
    passing: int
    before: list[list[int]]
    after: list[list[int]]


def reschedule(
    problem: OneMicrobatch,
    graph: TaskGraph,
    orders: Orders,
    starts: Sequence[int],
    budget: Budget,
    limit: float,
    *,
    begin_ns: int = 0,
    end_ns: int | None = None,
    most_ns: int | None = None,
    on_solution: Callable[[int, int], None] | None = None,
) -> Rescheduled:
    """Find the best order of the actions that start from ``begin_ns`` on and before ``end_ns``.

    Only a shorter schedule counts; ``exhausted`` says that the best order of this window is known. The bound is
    for all schedules that keep the rest as it is: for every schedule, if the window is everything. ``on_solution``
    hears (iteration, bound) in ns, as far as tails say. With ``most_ns`` any schedule counts that is no longer, and
    the first one is taken.
    """
    unit = _unit(problem)
    whole = begin_ns == 0 and end_ns is None
    known = graph.iteration(starts) if whole else _by_tails(graph, starts)
    known = known if most_ns is None else most_ns + unit
    window = _cut(problem, graph, orders, starts, begin_ns, graph.makespan(starts) if end_ns is None else end_ns)
    if not window.tasks or window.passing >= known:
        return Rescheduled(None, None, True)
    model = _WindowModel(problem, graph, window, known)
    if whole and graph.workload.has_tail:
        model.sums_and_gathers()
    if most_ns is None:
        model.minimize()
    heard = None if on_solution is None else lambda value, bound: on_solution(value * unit, bound * unit)
    answer = solve(model.model, budget, limit, on_solution=heard)
    bound = answer.bound * unit if answer.bound is not None else None
    if answer.feasible is False:
        return Rescheduled(None, known, True)
    if not answer.feasible:
        return Rescheduled(None, bound, False)
    new = {task: answer.value(model.start[task]) for task in window.tasks}
    inside = [[task for task in order if task in new] for order in orders]
    joined = [
        [*before, *sorted(tasks, key=new.__getitem__), *after]
        for before, tasks, after in zip(window.before, inside, window.after, strict=True)
    ]
    return Rescheduled(joined, bound, answer.optimal)


def _unit(problem: OneMicrobatch) -> int:
    """Greatest common divisor of all times, in ns, and of what follows actions."""
    workload = problem.workload
    sums = [job for way in workload.ways_to_sum for job in way.gradient_sums]
    times = chain.from_iterable((job.duration_ns, *job.ahead_ns) for job in (*sums, *workload.gathers))
    return math.gcd(problem.time_unit, *workload.steps_ns, *times)


def _by_tails(graph: TaskGraph, starts: Sequence[int]) -> int:
    """Ns of the iteration, if no sum of gradients waits for another one's."""
    return max(end + after for end, after in zip(graph.last_ends(starts), graph.workload.least_after, strict=True))


def _cut(
    problem: OneMicrobatch, graph: TaskGraph, orders: Orders, starts: Sequence[int], begin: int, end: int
) -> _Window:
    before = [[task for task in order if starts[task] < begin] for order in orders]
    inside = [[task for task in order if begin <= starts[task] < end] for order in orders]
    after = [[task for task in order if starts[task] >= end] for order in orders]
    tasks = sorted({task for order in inside for task in order})
    through = _paths_after(graph, after, starts)
    release = dict.fromkeys(tasks, 0)
    tail = {task: _following(graph, task) for task in tasks}
    passing = 0
    chosen = set(tasks)
    for device, order in enumerate(before):
        free = starts[order[-1]] + graph.durations[order[-1]] if order else 0
        for task in inside[device]:
            release[task] = max(release[task], free)
        passing = max(passing, free + (through[after[device][0]] if after[device] else 0))
    for task in {task for order in before for task in order}:
        passing = max(passing, starts[task] + graph.durations[task] + _following(graph, task))
        for other, lag in graph.successors[task]:
            ready = starts[task] + graph.durations[task] + lag
            if other in chosen:
                release[other] = max(release[other], ready)
            elif other in through:
                passing = max(passing, ready + through[other])
    for device, order in enumerate(inside):
        for task in order:
            if after[device]:
                tail[task] = max(tail[task], through[after[device][0]])
    for task in tasks:
        for other, lag in graph.successors[task]:
            if other in through:
                tail[task] = max(tail[task], lag + through[other])
    return _Window(tasks, release, tail, passing, before, after)


def _following(graph: TaskGraph, task: int) -> int:
    """A lower bound in ns on what follows a task's end."""
    item = graph.operation_of[task]
    return graph.workload.least_after[item] if task < graph.num_actions else 0


def _paths_after(graph: TaskGraph, after: Orders, starts: Sequence[int]) -> dict[int, int]:
    """[task] longest path in ns from its start to the end of everything, in the kept order after the window."""
    following: dict[int, list[tuple[int, int]]] = {
        task: [*graph.successors[task]] for task in {task for order in after for task in order}
    }
    for order in after:
        for task, other in zip(order, order[1:], strict=False):
            following[task].append((other, 0))
    through: dict[int, int] = {}
    for last in sorted(following, key=starts.__getitem__, reverse=True):
        open_ = [last]  # what waits for a message inside may start before what sends it does
        while open_:
            task = open_[-1]
            rest = [(lag, other) for other, lag in following[task] if other in following]
            if missing := [other for _, other in rest if other not in through]:
                open_ += missing
                continue
            longest = max((lag + through[other] for lag, other in rest), default=0)
            through[task] = graph.durations[task] + max(_following(graph, task), longest, 0)
            open_.pop()
    return through


class _WindowModel:
    """Variables, constraints and objective of one window, in units of the problem's time unit."""

    def __init__(self, problem: OneMicrobatch, graph: TaskGraph, window: _Window, known_ns: int) -> None:
        load_solver()
        from ortools.sat.python import cp_model

        self._problem, self._graph, self._window = problem, graph, window
        self._unit = unit = _unit(problem)
        self._count = problem.num_microbatches
        self.model = model = cp_model.CpModel()
        self._latest = latest = known_ns // unit - 1
        self.start = {
            task: model.new_int_var(
                window.release[task] // unit,
                latest - (graph.durations[task] + window.tail[task]) // unit,
                f"s{graph.label(task)}",
            )
            for task in window.tasks
        }
        self.end = model.new_int_var(window.passing // unit, max(latest, window.passing // unit), "end")
        self._intervals = {
            task: model.new_fixed_size_interval_var(start, graph.durations[task] // unit, "")
            for task, start in self.start.items()
        }
        self._on_device = [
            [task for task in window.tasks if device in problem.devices[task // self._count]]
            for device in range(len(problem.on_device))
        ]
        self._dependencies()
        self._microbatch_order()
        self._recurrences()
        self._exclusive_devices()
        self._memory(known_ns)
        self._tails()

    def _dependencies(self) -> None:
        for task in checked(self._window.tasks, 64):
            for other, lag in self._graph.successors[task]:
                if other in self.start:
                    self.model.add(
                        self.start[other] >= self.start[task] + (self._graph.durations[task] + lag) // self._unit
                    )

    def _microbatch_order(self) -> None:
        """Micro-batches are alike: each operation runs them in order (Property 4.1)."""
        for task in self._window.tasks:
            if (task + 1) % self._count and task + 1 in self.start:
                self.model.add(self.start[task + 1] >= self.start[task] + self._graph.durations[task] // self._unit)

    def _recurrences(self) -> None:
        """What memory says about order, which the solver would find out only by trying."""
        for recurrence in memory_recurrences(self._problem):
            source, target = recurrence.source * self._count, recurrence.target * self._count
            for m in range(recurrence.distance, self._count):
                before, after = source + m - recurrence.distance, target + m
                if before in self.start and after in self.start:
                    duration = self._graph.durations[before] // self._unit
                    self.model.add(self.start[after] >= self.start[before] + duration)

    def _exclusive_devices(self) -> None:
        for tasks in self._on_device:
            if len(tasks) > 1:
                self.model.add_no_overlap([self._intervals[task] for task in tasks])

    def _memory(self, known_ns: int) -> None:
        """Holds as intervals, and the workspace of what runs, within each device's capacity."""
        for device, capacity in enumerate(self._problem.capacity):
            if capacity is not None and self._on_device[device]:
                self._memory_of(device, capacity, known_ns)

    def _memory_of(self, device: int, capacity: int, known_ns: int) -> None:
        held_before = set(self._window.before[device])
        held_inside = set(self._on_device[device])
        end = known_ns // self._unit
        intervals: list[cp_model.IntervalVar] = []
        demands: list[int] = []
        for hold in self._problem.holds_on(device):
            for m in checked(range(self._count)):
                source, target = hold.source * self._count + m, hold.target * self._count + m
                if target in held_before or (source not in held_before and source not in held_inside):
                    continue
                if source in held_before and target not in held_inside:
                    capacity -= hold.size
                    continue
                begin = self.start[source] if source in held_inside else 0
                until = (
                    self.start[target] + self._graph.durations[target] // self._unit if target in held_inside else end
                )
                length = self.model.new_int_var(0, end, "")
                intervals.append(self.model.new_interval_var(begin, length, until, ""))
                demands.append(hold.size)
        capacity -= self._held_apart(device, end, intervals, demands)
        for task in self._on_device[device]:
            if self._problem.workspace[task // self._count]:
                intervals.append(self._intervals[task])
                demands.append(self._problem.workspace[task // self._count])
        if sum(demands) > capacity:
            unit = math.gcd(*demands)
            self.model.add_cumulative(intervals, [demand // unit for demand in demands], capacity // unit)

    def _held_apart(self, device: int, end: int, intervals: list[cp_model.IntervalVar], demands: list[int]) -> int:
        """Add what a device holds until others have ended; the bytes that stay held for the whole window."""
        gone = set[int]().union(*self._window.before)
        held_before, throughout = set(self._window.before[device]), 0
        for hold in self._problem.apart_on(device):
            for m in checked(range(self._count)):
                source, *targets = (x * self._count + m for x in (hold.source, *hold.targets))
                if gone.issuperset(targets) or (source not in held_before and source not in self.start):
                    continue
                inside = [target for target in targets if target in self.start]
                stays = any(target not in gone and target not in self.start for target in targets)
                if source in held_before and stays:
                    throughout += hold.size
                    continue
                until = self.model.new_int_var(0, end, "")
                for target in inside:
                    self.model.add(until >= self.start[target] + self._graph.durations[target] // self._unit)
                length = self.model.new_int_var(0, end, "")
                begin = self.start.get(source, 0)
                intervals.append(self.model.new_interval_var(begin, length, end if stays else until, ""))
                demands.append(hold.size)
        return throughout

    def _tails(self) -> None:
        for task, start in self.start.items():
            rest = (self._graph.durations[task] + self._window.tail[task]) // self._unit
            self.model.add(self.end >= start + rest)

    def sums_and_gathers(self) -> None:
        """What follows the actions of the whole schedule, in whatever order networks run it."""
        workload, unit = self._graph.workload, self._unit
        last = {
            item: self.start[self._graph.offsets[item + 1] - 1] + workload.durations[item] // unit
            for item in range(len(workload.operations))
        }
        stepped = [self.model.new_int_var(0, self._latest, "") for _ in workload.devices]
        for item, operation in enumerate(workload.operations):
            for device in workload.stages[operation.stage].devices:
                self.model.add(stepped[device] >= last[item] + workload.steps_ns[device] // unit)
        ways = workload.ways_to_sum
        taken = [self.model.new_bool_var("") for _ in ways] if len(ways) > 1 else [None]
        self.model.add_exactly_one(each for each in taken if each is not None) if len(ways) > 1 else None
        for way, chosen in zip(ways, taken, strict=True):
            ready = [
                [
                    last[item] - job.ahead_ns[job.stages.index(each.stage)] // unit
                    for item, each in enumerate(workload.operations)
                    if each.role in GRADIENT_ROLES and each.stage in job.stages
                ]
                for job in way.gradient_sums
            ]
            for job, end in zip(way.gradient_sums, self._on_networks(way.gradient_sums, ready, chosen), strict=True):
                for device in job.devices:
                    step = self.model.add(stepped[device] >= end + workload.steps_ns[device] // unit)
                    step.only_enforce_if([] if chosen is None else chosen)
        own = [[stepped[device] for device in job.devices] for job in workload.gathers]
        for end in (*stepped, *self._on_networks(workload.gathers, own)):
            self.model.add(self.end >= end)

    def _on_networks(
        self,
        jobs: Sequence[NetworkJob],
        ready: Sequence[Sequence[cp_model.LinearExprT]],
        chosen: cp_model.IntVar | None = None,
    ) -> list[cp_model.LinearExprT]:
        """The ends of jobs, none of which begins before it is ``ready`` [job] nor beside another one on a network.

        They run only if they are ``chosen``, if that is given.
        """
        starts = [self.model.new_int_var(0, self._latest, "") for _ in jobs]
        lengths = [job.duration_ns // self._unit for job in jobs]
        intervals = [
            self.model.new_fixed_size_interval_var(start, length, "")
            if chosen is None
            else self.model.new_optional_fixed_size_interval_var(start, length, chosen, "")
            for start, length in zip(starts, lengths, strict=True)
        ]
        for start, moments in zip(starts, ready, strict=True):
            for moment in moments:
                self.model.add(start >= moment)
        for device in range(len(self._graph.workload.devices)):
            own = [interval for interval, job in zip(intervals, jobs, strict=True) if device in job.devices]
            self.model.add_no_overlap(own)
        return [start + length for start, length in zip(starts, lengths, strict=True)]

    def minimize(self) -> None:
        """Look for the shortest schedule, instead of any."""
        self.model.minimize(self.end)


@dataclass(frozen=True)
class _Rescheduling(ScheduleStep):
    """Reschedule windows of about ``sizes`` actions, each for ``seconds``, growing while nothing helps.

    CP-SAT decides in about a second what may change in the largest of them, and less.
    """

    sizes: tuple[int, ...] = WINDOW_SIZES
    seconds: float = WINDOW_SECONDS

    def applies(self, state: SearchState) -> bool:
        return not state.finished

    def improve(self, state: SearchState, size: int, candidate: Callable[[], ScheduleCandidate | None]) -> None:
        """Try windows of a size as long as one of them helps and there still is a ``candidate``."""
        improved = True
        while improved and (found := candidate()) is not None:
            improved = False
            for window in _windows(found, size):
                if (now := candidate()) is not None:
                    improved = _try_window(state, now, window, self.seconds) or improved


@dataclass(frozen=True)
class Ramps(_Rescheduling):
    """Reschedule what runs before and after the frozen repetition: warmup and cooldown, as Tessel's IV-C."""

    share: float = RAMPS_SHARE
    name = "ramps"
    when = "nothing proved best; some schedule can be repeated"

    def run(self, state: SearchState) -> None:
        limit = state.budget.used + state.budget.seconds * self.share

        def candidate() -> ScheduleCandidate | None:
            late = state.budget.expired or state.budget.used > limit
            proved = state.steady is not None and state.steady.iteration <= state.bound
            return None if late or proved else state.steady

        for size in self.sizes:
            self.improve(state, size, candidate)


@dataclass(frozen=True)
class WholeHorizon(ScheduleStep):
    """The whole horizon as one problem, which also proves a bound.

    With at most ``few_tasks`` it is worth more of the time, since it ends with a proof.
    """

    share: float = WHOLE_SHARE
    most_tasks: int = WHOLE_TASKS
    few_tasks: int = FEW_TASKS
    share_of_few: float = WHOLE_SHARE_OF_FEW
    name = "whole horizon"
    when = "nothing proved best; at most {most_tasks} actions; the span is open"
    of = "what is left"

    def applies(self, state: SearchState) -> bool:
        return not state.finished and state.graph.num_tasks <= self.most_tasks and state.max_span is None

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
            on_solution=lambda value, bound: state.report(
                "horizon", None if state.graph.workload.has_tail else value, bound
            ),
        )
        if found.orders is not None:
            state.offer(state.candidate(found.orders, f"{origin_of(state.best.scheduler)}+horizon"))
        state.raise_bound(found.bound_ns)


@dataclass(frozen=True)
class SlidingWindows(_Rescheduling):
    """Reschedule windows that slide over the whole schedule, from its two ends first."""

    name = "windows"
    when = "nothing proved best; the span is open"

    def applies(self, state: SearchState) -> bool:
        return not state.finished and state.max_span is None

    def run(self, state: SearchState) -> None:
        def candidate() -> ScheduleCandidate | None:
            """The best schedule, of which everything may change."""
            assert state.best is not None
            return None if state.finished else replace(state.best, frozen=frozenset())

        for size in self.sizes:
            self.improve(state, size, candidate)
            if size >= state.graph.num_tasks:
                return


def _windows(candidate: ScheduleCandidate, size: int) -> list[tuple[int, int]]:
    """Moments between which about ``size`` actions start: both ends first, then overlapping by half.

    None reaches into the frozen repetition, or those that are kept.
    """
    held = candidate.kept or candidate.frozen
    moments = sorted(candidate.starts)
    step = max(1, size // 2)
    begins = list(range(0, max(1, len(moments) - step), step))
    begins.sort(key=lambda begin: min(begin, len(moments) - begin))
    first = min((candidate.starts[task] for task in held), default=moments[-1] + 1)
    last = max((candidate.starts[task] for task in held), default=-1)
    windows = []
    for begin in begins:
        start, end = moments[begin], moments[begin + size] if begin + size < len(moments) else moments[-1] + 1
        if start < first:
            windows.append((start, min(end, first)))
        if end > last + 1 and candidate.frozen:
            windows.append((max(start, last + 1), end))
    return windows


def _try_window(state: SearchState, candidate: ScheduleCandidate, window: tuple[int, int], seconds: float) -> bool:
    """Offer the candidate with a better order of a window, if there is one; whether it was better."""
    if held := candidate.kept or candidate.frozen:  # the window may be of a schedule before this one
        first = min(candidate.starts[task] for task in held)
        last = max(candidate.starts[task] for task in held)
        early = window[0] < first
        window = (window[0], min(window[1], first)) if early else (max(window[0], last + 1), window[1])
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
    scheduler = f"{origin_of(candidate.scheduler)}+windows"
    return state.offer(state.candidate(found.orders, scheduler, candidate.frozen, candidate.kept))
