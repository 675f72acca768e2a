"""The anytime search for a schedule, and quick first looks without a solver.

There is a valid schedule from the first moment on. Everything after only improves it, until it equals the proved
bound, the budget is spent, or the user interrupts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter

from pipeplan.errors import InfeasibleError, UsageError, choose_from
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.pattern import microbatch_by_microbatch
from pipeplan.schedule.rules.language import Rules
from pipeplan.schedule.rules.sweep import schedule_of_rules
from pipeplan.schedule.state import (
    Progress,
    Schedule,
    ScheduleStep,
    SearchState,
    SearchStep,
    first_by,
    fitting,
    named,
)
from pipeplan.schedule.steps import STEPS
from pipeplan.time_limit import TimeUpError, checked, checkpoint
from pipeplan.units import format_bytes, rounded_up
from pipeplan.workload.bounds import strong_makespan_bound, weak_makespan_bound
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import overflow, peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload

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
    steps: Sequence[SearchStep] = STEPS,
) -> Schedule:
    """Search the best order of a workload's actions; of a very long one, of a shorter run that is repeated.

    ``scheduler`` is ``auto`` (everything), ``repetend`` (the best repetend, its warmup and cooldown as the pattern
    leaves them and then improved), ``rules`` (what ``rules`` make of it; without them the best of the built-in
    ones), or the name of a classic schedule. The first two try those of ``steps`` that apply. ``unroll`` None lets the
    search choose. What is found by ``auto`` is no longer than a ``known`` schedule of the same workload.

    Raises:
        InfeasibleError: a device's memory is too small, the classic schedule asked for does not fit, or the rules get
            stuck.
        SearchTimeoutError: the budget ran out before anything that fits was found.
        UsageError: an unknown scheduler, or a classic one that does not apply to the placement.
    """
    if scheduler not in (*SEARCHING, "rules", *CLASSIC):
        meant = choose_from(scheduler, (*SEARCHING, "rules", *CLASSIC))
        raise UsageError(f"--scheduler {scheduler!r} is not known; {meant}")
    search = _Search(budget, scheduler, rules, unroll, progress, steps)
    shorter = named(steps, ShorterRun) or ShorterRun()
    short = shorter.shorter(workload)
    if short is not None:
        found = search.longer(shorter, short, workload, known)
        if found is not None:
            return found
    return search.schedules(workload, known)[0]


@dataclass(frozen=True, slots=True)
class _Search:
    """What is asked of :func:`search_schedule`, whatever workload it is tried on."""

    budget: Budget
    scheduler: str
    rules: Rules | None
    unroll: int | None
    progress: Progress | None
    steps: Sequence[SearchStep]

    def schedules(self, workload: Workload, known: Schedule | None) -> list[Schedule]:
        """The best schedule of a workload, and then others, of which a part may repeat."""
        if self.scheduler == "rules":
            return [schedule_of_rules(workload, self.rules, self.budget)]
        _require_known_kinds(workload)
        state = SearchState.of(OneMicrobatch.of(workload), self.budget, self.progress)
        if self.scheduler in CLASSIC:
            return [_restored(state.problem, _one_classic(state, self.scheduler))]
        state.steps = [step for step in self.steps if isinstance(step, ScheduleStep)]
        state.scheduler, state.unroll, state.known = self.scheduler, self.unroll, known
        best = state.search()
        others = (
            replace(best, orders=each.orders, starts=each.starts, makespan_ns=each.makespan, scheduler=each.scheduler)
            for each in (state.steady, *state.others)
            if each is not None and each is not state.best
        )
        return [_restored(state.problem, each) for each in (best, *others)]

    def longer(
        self, shorter: ShorterRun, short: Workload, workload: Workload, known: Schedule | None
    ) -> Schedule | None:
        """The best schedule of a workload by what is found of its shorter run; None if nothing of that repeats."""
        silent = replace(self, progress=None)  # what is found there is of other times
        found: list[Schedule] = []
        for each in silent.schedules(short, None):
            if found and self.budget.expired:
                break
            longer = shorter.lengthened(each, workload)
            found += [] if longer is None else [longer]
        best = _best(found)
        if self.scheduler == "auto" and known is not None and (best is None or not first_by(_SHORTER, best, known)):
            best = known
        if best is None or self.scheduler == "rules":
            return best
        bound = strong_makespan_bound(OneMicrobatch.of(workload))
        return replace(best, bound_ns=min(best.makespan_ns, max(best.bound_ns, bound)), seconds=self.budget.elapsed)


@dataclass(frozen=True)
class FirstLook(SearchStep):
    """Known schedules that are quick to make; slower ones are for a thorough look.

    Of a very long run, the ``lengthened`` best of a shorter one of which a part can be repeated after at most
    ``most_written`` actions.
    """

    thorough_tasks: int = 5_000
    lengthened: int = 3
    most_written: int = 20_000
    name = "first look"
    when = "each candidate, those that take a moment; with at most {thorough_tasks} actions all, if eased"
    needed = True


def plain_look(workload: Workload) -> Schedule | None:
    """1F1B, and GPipe where that does not fit, of one stage per device: written down, in a time linear in the actions.

    They are those of :func:`first_look`, which follows rules action by action. None where they do not apply or fit.
    """
    problem = OneMicrobatch.of(workload, require_room=False)
    if len(problem.workload.stages) > problem.num_devices or not problem.workload.is_uniform:
        return None
    graph = task_graph(problem.workload)
    given = graph if problem.reduction is None else task_graph(workload)
    depths, count = problem.workload.stage_depths, problem.num_microbatches
    for name, before in (("1f1b", [1 + max(depths) - depth for depth in depths]), ("gpipe", [count] * len(depths))):
        found = timed(problem, given, _plain_orders(problem, before), name)
        if found is not None:
            return found
    return None


def _plain_orders(problem: OneMicrobatch, before: Sequence[int]) -> Orders:
    """[device] as many forwards as ``before`` [stage] says, then backwards with weight gradients, and forwards."""
    count, orders = problem.num_microbatches, [list[int]() for _ in range(problem.num_devices)]
    for stage, (forward, *backward) in enumerate(problem.stage_operations):
        (device,) = problem.workload.stages[stage].devices
        order, ahead = orders[device], min(before[stage], count)
        order += [forward * count + m for m in range(ahead)]
        for m in checked(range(count), 4096):
            order += [x * count + m for x in backward]
            if m + ahead < count:
                order.append(forward * count + m + ahead)
    return orders


_SHORTER = attrgetter("makespan_ns"), attrgetter("most_bytes")


def first_look(workload: Workload, look: FirstLook = FirstLook(), *, thorough: bool = False) -> Schedule | None:
    """The best of the known schedules that apply, without any search; None if none of them fits.

    A ``thorough`` look has those that are made by trying rules, too, where there are few actions. Of a very long
    workload the best of a shorter run are repeated, and what is always possible, one micro-batch after another. It is
    the best until then when the time of a limit that is enforced is up.
    """
    _require_known_kinds(workload)
    shorter = ShorterRun()
    short = shorter.shorter(workload)
    if short is None:
        return _best(_looked(workload, look, thorough=thorough))
    known = sorted(_looked(short, look, thorough=thorough), key=attrgetter("makespan_ns"))
    longer = filter(None, (shorter.lengthened(each, workload, look.most_written) for each in known))
    simplest = islice(_looked(shorter.shortest(workload), look, thorough=False), 1)
    last = filter(None, (shorter.lengthened(each, workload) for each in simplest))
    return _best(chain(islice(longer, look.lengthened), last))


def _best(schedules: Iterable[Schedule]) -> Schedule | None:
    """The best; of those until then, where the time of a limit that is enforced is up on the way."""
    best: Schedule | None = None
    try:
        for found in schedules:
            if best is None or first_by(_SHORTER, found, best):
                best = found
    except TimeUpError:
        if best is None:
            raise
    return best


def _looked(workload: Workload, look: FirstLook, *, thorough: bool) -> Iterator[Schedule]:
    """The known schedules that fit; those until then, where the time of a limit that is enforced is up."""
    problem = OneMicrobatch.of(workload, require_room=False)
    graph = task_graph(problem.workload)
    given = graph if problem.reduction is None else task_graph(workload)
    some = False
    try:
        for name, orders in _known_orders(problem, graph, thorough, look):
            found = timed(problem, given, orders, name)
            if found is not None:
                some = True
                yield found
    except TimeUpError:
        if not some:
            raise


def _require_known_kinds(workload: Workload) -> None:
    """What is proved and tried here is about forwards and backwards."""
    if workload.instructions:
        kinds = ", ".join(operation.id for operation in workload.instructions[:4])
        raise UsageError(f"the workload has instructions ({kinds}), which only rules schedule; give --scheduler rules")


def _known_orders(
    problem: OneMicrobatch, graph: TaskGraph, thorough: bool, look: FirstLook
) -> Iterator[tuple[str, Orders]]:
    """One micro-batch after another, and the classic schedules; those that are slow to make only if ``thorough``."""
    yield "sequential", microbatch_by_microbatch(problem)
    thorough = thorough and graph.num_tasks <= look.thorough_tasks
    for name, classic in CLASSIC.items():
        checkpoint()
        if (thorough or classic.is_quick(graph.num_tasks)) and classic.applies(problem) is None:
            yield name, classic.orders(problem, graph)


def timed(problem: OneMicrobatch, given: TaskGraph, orders: Orders, scheduler: str) -> Schedule | None:
    """The schedule of the given workload by a problem's orders; None if they block each other or do not fit."""
    found = fitting(given, orders if problem.reduction is None else problem.reduction.from_reduced(orders))
    if found is None:
        return None
    complete, starts = found
    makespan = given.makespan(starts)
    bound = min(makespan, weak_makespan_bound(given.workload))
    return Schedule(given.workload, given, complete, starts, makespan, bound, scheduler)


def _restored(problem: OneMicrobatch, found: Schedule) -> Schedule:
    """The schedule of the workload that was given, where it was searched in rounds; links carry what they can."""
    if problem.reduction is None:
        return found
    workload = problem.reduction.workload
    graph = task_graph(workload)
    orders = with_links(graph, problem.reduction.from_reduced(found.orders))
    starts = earliest_starts(graph, orders)
    makespan = graph.makespan(starts)
    return replace(found, workload=workload, graph=graph, orders=orders, starts=starts, makespan_ns=makespan)


def _one_classic(state: SearchState, name: str) -> Schedule:
    classic = CLASSIC[name]
    reason = classic.applies(state.problem)
    if reason is not None:
        raise UsageError(f"--scheduler {name} does not apply: {reason}; choose another, or auto")
    orders = classic.orders(state.problem, state.graph)
    over = overflow(state.graph, orders)
    if over is not None:
        enough = max(memory.peak_bytes for memory in peak_memory(state.graph, orders))
        raise InfeasibleError(
            f"--scheduler {name} does not fit: {over}; raise --memory to {format_bytes(rounded_up(enough))}, or let "
            "--scheduler auto search"
        )
    state.offer(state.candidate(orders, name))
    return state.schedule
