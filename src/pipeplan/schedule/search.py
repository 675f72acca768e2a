"""The anytime search for a schedule, and quick first looks without a solver.

There is a valid schedule from the first moment on. Everything after only improves it, until it equals the proved
bound, the budget is spent, or the user interrupts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from operator import attrgetter

from pipeplan.errors import InfeasibleError, NotApplicableError, TooLongError, UsageError, choose_from
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.repetend import shortest_way_through, solve_pattern
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.cpsat.windows import Ramps, WholeHorizon, reschedule
from pipeplan.schedule.list_scheduling import rooms
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.modulo import modulo_schedule
from pipeplan.schedule.pattern import Pattern, compose, microbatch_by_microbatch, middle_repetition
from pipeplan.schedule.rules.language import Rules
from pipeplan.schedule.rules.sweep import schedule_of_rules
from pipeplan.schedule.state import (
    Progress,
    Schedule,
    ScheduleCandidate,
    ScheduleStep,
    SearchState,
    SearchStep,
    first_by,
    fitting,
    named,
    origin_of,
    scheduler_words,
)
from pipeplan.schedule.steps import STEPS, KnownSchedule
from pipeplan.search_constants import (
    FEWER_LEAST,
    FEWER_PART,
    FEWER_SHARE,
    FEWER_STEP,
    LENGTHENED,
    LENGTHENED_TASKS,
    MAX_WRITTEN,
    MOST_ENTRIES,
    SECONDS_PER_LOOK,
    THOROUGH_TASKS,
)
from pipeplan.time_limit import TimeUpError, checked, checkpoint
from pipeplan.units import format_bytes, format_ns, rounded_up
from pipeplan.workload.bounds import period_bound, strong_iteration_bound, weak_iteration_bound
from pipeplan.workload.engine import with_links
from pipeplan.workload.exchanges import microbatches_alike
from pipeplan.workload.memory import overflow, peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.loop import LoopedOrders
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload

SEARCHING = ("auto", "repetend")
"""Schedulers that make more of more time; the others make one schedule."""


def require_scheduler(name: str) -> None:
    """That a scheduler is one that :func:`search_schedule` knows. Raises UsageError."""
    if name not in (*SEARCHING, "rules", *CLASSIC):
        meant = choose_from(name, (*SEARCHING, "rules", *CLASSIC))
        meant = "a file with rules is given by --rules" if name.endswith((".toml", ".py")) else meant
        raise UsageError(f"--scheduler {name!r} is not known; {meant}")


def search_schedule(
    workload: Workload,
    budget: Budget,
    *,
    scheduler: str = "auto",
    rules: Rules | None = None,
    unroll: int | None = None,
    max_span: int | None = None,
    known: Schedule | None = None,
    progress: Progress | None = None,
    steps: Sequence[SearchStep] = STEPS,
) -> Schedule:
    """Search the best order of a workload's actions; of a very long one, of a shorter run that is repeated.

    ``scheduler`` is ``auto`` (everything), ``repetend`` (the best repetend, its warmup and cooldown as the pattern
    leaves them and then improved), ``rules`` (what ``rules`` make of it; without them the best of the built-in
    ones), or the name of a classic schedule. The first two try those of ``steps`` that apply. ``unroll`` None lets the
    search choose. ``max_span`` (with ``repetend``) is how many micro-batches the repetend reaches over at most
    (Tessel's N_R), each device beginning it at a moment of its own; the schedule says which it is. What is found by
    ``auto`` is no longer than a ``known`` schedule of the same workload.

    Raises:
        InfeasibleError: a device's memory is too small, the classic schedule asked for does not fit, or the rules get
            stuck.
        SearchTimeoutError: the budget ran out before anything that fits was found.
        UsageError: an unknown scheduler, a classic one that does not apply to the placement, or ``max_span`` for what
            has no repetend.
    """
    require_scheduler(scheduler)
    search = _Search(budget, scheduler, rules, unroll, max_span, progress, steps)
    shorter = named(steps, ShorterRun) or ShorterRun()
    whole = max_span is not None or (rules is not None and rules.order)
    short = None if whole else shorter.shorter(workload)
    if short is not None:
        found = search.longer(shorter, short, workload, known)
        if found is not None:
            return found
    return search.schedules(workload, known)[0]


@dataclass(frozen=True, slots=True)
class _Search:
    """The arguments of :func:`search_schedule` that do not depend on the workload."""

    budget: Budget
    scheduler: str
    rules: Rules | None
    unroll: int | None
    max_span: int | None
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
        if self.max_span is not None:
            _require_repetend(state.problem, self.max_span)
            state.max_span = self.max_span
        best = state.search()
        others = (
            replace(
                best,
                orders=each.orders,
                starts=each.starts,
                makespan_ns=state.graph.makespan(each.starts),
                scheduler=each.scheduler,
            )
            for each in (state.steady, *state.others)
            if each is not None and each is not state.best
        )
        return [_restored(state.problem, each) for each in (best, *others)]

    def longer(
        self, shorter: ShorterRun, short: Workload, workload: Workload, known: Schedule | None
    ) -> Schedule | None:
        """The best schedule of a workload by what is found of its shorter run; None if nothing of that repeats."""
        inside = replace(self, progress=self._telling(short, workload, known))
        found: list[Schedule] = []
        tried = inside.schedules(short, None)
        if self.scheduler in CLASSIC:
            found += self._classic_longer(shorter, tried.pop(), workload)
        for each in tried:
            if found and self.budget.expired:
                break
            longer = shorter.lengthened(each, workload)
            if longer is None and not found and self.scheduler in SEARCHING:
                longer = shorter.in_groups(each, workload)
            found += [] if longer is None else [longer]
        best = _best(found)
        if self.scheduler == "auto" and known is not None and (best is None or not first_by(_SHORTER, best, known)):
            best = known
        if best is None or self.scheduler == "rules":
            return best
        bound = min(best.iteration_ns, max(best.bound_ns, strong_iteration_bound(OneMicrobatch.of(workload))))
        if self.progress is not None:
            self.progress(scheduler_words(best.scheduler), best.iteration_ns, bound, self.budget.elapsed)
        return replace(best, bound_ns=bound, seconds=self.budget.elapsed)

    def _classic_longer(self, shorter: ShorterRun, short: Schedule, workload: Workload) -> list[Schedule]:
        """A classic schedule of a shorter run, repeated; none where nothing repeats, and all of it can be written.

        Raises:
            InfeasibleError: it does not fit.
            TooLongError: nothing of it repeats, and written out it is too much.
        """
        run = shorter.repeated(short.graph, short.orders, workload.num_microbatches)
        if run is not None:
            _require_room(self.scheduler, run)
            return [short.running(run, workload)]
        each, own = sum(map(len, workload.slots)), workload.num_microbatches
        if each > MAX_WRITTEN:
            least = own * MAX_WRITTEN // each
            raise TooLongError(
                f"--scheduler {self.scheduler} does not apply: nothing in it repeats in {own:,} micro-batches, "
                f"and written out its {each:,} actions and messages are more than the {MAX_WRITTEN:,} of a plan; lower "
                f"--microbatches to {least:,} or less, or choose --scheduler auto, or one that repeats, such as 1f1b"
            )
        return []

    def _telling(self, short: Workload, workload: Workload, known: Schedule | None) -> Progress | None:
        """What the search of a shorter run calls: its times are said as such, best and bound are those of the whole."""
        progress = self.progress
        if progress is None:
            return None
        best = 0 if known is None else known.iteration_ns
        bound = weak_iteration_bound(workload) if known is None else known.bound_ns
        of = f"for {short.num_microbatches:,} of {workload.num_microbatches:,} micro-batches"

        def heard(what: str, iteration_ns: int, bound_ns: int, seconds: float) -> None:
            figures = f"{format_ns(iteration_ns)}, bound {format_ns(bound_ns)}"
            progress(f"{what}: {figures}, {of}", best, bound, seconds)

        return heard


@dataclass(frozen=True)
class FirstLook(SearchStep):
    """Known schedules that are quick to make; slower ones are for a thorough look.

    Of a very long run, the ``lengthened`` best of a shorter one: a part of it is repeated, where times come to repeat
    within ``most_written`` actions, else all of it.
    """

    thorough_tasks: int = THOROUGH_TASKS
    lengthened: int = LENGTHENED
    most_written: int = LENGTHENED_TASKS
    name = "first look"
    when = "each candidate, those that take a moment; with at most {thorough_tasks} actions all, if eased"
    needed = True


PLAIN = ("1f1b", "gpipe")
"""What a plain look knows."""


def plain_look(
    workload: Workload, most_entries: int = MOST_ENTRIES, names: Sequence[str] = PLAIN, *, grouped: bool = True
) -> Schedule | None:
    """1F1B, and GPipe where that does not fit or devices have several stages: in a time linear in the actions.

    Of these the ``names`` alone; with both also 1F1B that begins with no more forwards than there is room for.

    Of one stage per device they are those of :func:`first_look`, which follows rules action by action. Of a run whose
    programs would have more entries it is a part that is repeated, or all of it, as ``grouped`` says to
    :meth:`~pipeplan.schedule.longer.ShorterRun.repeating`. None where they do not apply or fit.
    """
    fewer = max(1, most_entries // workload.entries)
    if workload.num_microbatches <= 2 * fewer:
        return _plain(workload, names)
    fewer += (workload.num_microbatches - fewer) % math.lcm(microbatches_alike(workload), workload.num_routes)
    short = _plain(workload.with_microbatches(fewer), names, bounded=False)
    return None if short is None else ShorterRun().repeating(short, workload, grouped=grouped)


def _plain(workload: Workload, names: Sequence[str], *, bounded: bool = True) -> Schedule | None:
    """The same, everything written."""
    problem = OneMicrobatch.of(workload, require_room=False)
    if not problem.workload.is_uniform:
        return None
    graph = task_graph(problem.workload)
    given = graph if problem.reduction is None else task_graph(workload)
    depths, count = problem.workload.stage_depths, problem.num_microbatches
    if len(depths) > problem.num_devices:
        orders = _forwards_first(problem)
        return timed(problem, given, orders, "gpipe", bounded=bounded) if "gpipe" in names else None
    ahead = [1 + max(depths) - depth for depth in depths]
    ways = [(name, before) for name, before in (("1f1b", ahead), ("gpipe", [count] * len(depths))) if name in names]
    if set(PLAIN) <= set(names):  # where one of them is asked for by name, it is nothing else
        fitting = [min(pair) for pair in zip(ahead, _room_upstream(problem), strict=True)]
        ways += [("1f1b", fitting)] * (min(fitting) > 0 and fitting != ahead)
    for name, before in ways:
        found = timed(problem, given, _plain_orders(problem, before), name, bounded=bounded)
        if found is not None:
            return found
    return None


def _room_upstream(problem: OneMicrobatch) -> list[int]:
    """[stage] micro-batches that there is room for, there and at every stage no deeper, which must pass them on."""
    depths, room = problem.workload.stage_depths, rooms(problem)
    least = [problem.num_microbatches] * (1 + max(depths))
    for depth, stage in zip(depths, problem.workload.stages, strict=True):
        least[depth] = min(least[depth], *(room[device] for device in stage.devices))
    upstream = [*accumulate(least, min)]
    return [upstream[depth] for depth in depths]


def _forwards_first(problem: OneMicrobatch) -> Orders:
    """[device] GPipe's order of several stages: all forwards as they are deep, then all backwards the other way."""
    depths, every = problem.workload.stage_depths, range(problem.num_microbatches)
    orders = [list[int]() for _ in range(problem.num_devices)]
    deeper = sorted(range(len(depths)), key=depths.__getitem__)
    for stages, backward in ((deeper, False), (deeper[::-1], True)):
        for stage in checked(stages, 64):
            operations = problem.stage_operations[stage]
            own = [
                operation * len(every) + m
                for m in every
                for operation in (operations[1:] if backward else operations[:1])
            ]
            for device in problem.workload.stages[stage].devices:
                orders[device] += own
    return orders


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


_SHORTER = attrgetter("iteration_ns"), attrgetter("most_bytes")


def first_look(
    workload: Workload, look: FirstLook = FirstLook(), *, thorough: bool = False, names: Collection[str] = ()
) -> Schedule | None:
    """The best of the known schedules that apply, without any search; None if none of them fits.

    With ``names`` only of these. A ``thorough`` look has those that are made by trying rules, too, where there are few
    actions. Of a very long workload the best of a shorter run are repeated, and what is always possible, one after
    another. It is the best until then when the time of a limit that is enforced is up.
    """
    _require_known_kinds(workload)
    shorter = ShorterRun()
    short = shorter.shorter(workload)
    if short is None:
        return _best(_looked(workload, look, thorough, names))
    simplest = islice(() if names else _looked(shorter.shortest(workload), look, False), 1)
    first = [*filter(None, (shorter.lengthened(each, workload) for each in simplest))]
    others = _of_shorter(shorter, short, workload, look, thorough, names, first)
    return _best(chain(first, islice(others, look.lengthened)))


def _of_shorter(
    shorter: ShorterRun,
    short: Workload,
    workload: Workload,
    look: FirstLook,
    thorough: bool,
    names: Collection[str],
    first: Sequence[Schedule],
) -> Iterator[Schedule]:
    """The known schedules of a shorter run as ones of the whole workload, the shortest of them first.

    One micro-batch after another is not timed anew where it is the ``first`` that is known already.
    """
    found = _looked(short, look, thorough, names, simplest=not first)
    for each in sorted(found, key=attrgetter("iteration_ns")):
        longer = shorter.repeating(each, workload, look.most_written)
        if longer is not None:
            yield longer


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


def _looked(
    workload: Workload, look: FirstLook, thorough: bool, names: Collection[str] = (), *, simplest: bool = True
) -> Iterator[Schedule]:
    """The known schedules that fit; those until then, where the time of a limit that is enforced is up."""
    problem = OneMicrobatch.of(workload, require_room=False)
    graph = task_graph(problem.workload)
    given = graph if problem.reduction is None else task_graph(workload)
    some = False
    try:
        for name, orders in _known_orders(problem, graph, thorough, look, names, simplest):
            found = timed(problem, given, orders, name)
            if found is not None:
                some = True
                yield found
    except TimeUpError:
        if not some:
            raise


def _require_repetend(problem: OneMicrobatch, max_span: int) -> None:
    """That micro-batches are all alike, so that something can repeat. Raises NotApplicableError."""
    if problem.reduction is not None:
        raise NotApplicableError(
            f"--max-span {max_span} is for plans with a repetend: of one route, and micro-batches of one size; leave "
            "it out"
        )


def _require_known_kinds(workload: Workload) -> None:
    """What is proved and tried here is about forwards and backwards."""
    if workload.instructions:
        kinds = ", ".join(operation.id for operation in workload.instructions[:4])
        raise UsageError(f"the workload has instructions ({kinds}), which only rules schedule; give --scheduler rules")


def _known_orders(
    problem: OneMicrobatch,
    graph: TaskGraph,
    thorough: bool,
    look: FirstLook,
    names: Collection[str],
    simplest: bool,
) -> Iterator[tuple[str, Orders]]:
    """One micro-batch after another, and the classic schedules; those that are slow to make only if ``thorough``."""
    if simplest and not names:
        yield "sequential", microbatch_by_microbatch(problem)
    thorough = thorough and graph.num_tasks <= look.thorough_tasks
    for name, classic in CLASSIC.items():
        checkpoint()
        if names and name not in names:
            continue
        wanted = names or thorough or classic.is_quick(graph.num_tasks)
        if wanted and classic.applies(problem) is None:
            orders = (classic.fitting_orders if thorough else classic.orders_looked_at)(problem, graph)
            if orders is not None:
                yield name, orders


def timed(
    problem: OneMicrobatch, given: TaskGraph, orders: Orders, scheduler: str, *, bounded: bool = True
) -> Schedule | None:
    """The schedule of the given workload by a problem's orders; None if they block each other or do not fit.

    Nothing is proved of it unless it is to be ``bounded``.
    """
    found = fitting(given, orders if problem.reduction is None else problem.reduction.from_reduced(orders))
    if found is None:
        return None
    complete, starts = found
    makespan, iteration = given.makespan(starts), given.iteration(starts)
    bound = min(iteration, weak_iteration_bound(given.workload)) if bounded else 0
    schedule = Schedule(given.workload, given, complete, starts, makespan, bound, scheduler)
    return schedule.lasting(iteration)


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


@dataclass(frozen=True)
class FewerBytes(SearchStep):
    """A schedule that is proved best once more in less memory: a pattern of the same period, or all actions anew.

    The limit goes down by ``step`` of the peak, twice as far each time that something is found, and from the first
    limit at which nothing is found half way back; it ends where less than ``least`` of the peak is open. Each question
    gets ``part`` of the time that is left. Up to ``most_tasks`` actions are ordered as one where no pattern does.
    """

    share: float = FEWER_SHARE
    step: float = FEWER_STEP
    least: float = FEWER_LEAST
    part: float = FEWER_PART
    most_tasks: int = WholeHorizon.most_tasks
    name = "fewer bytes"
    when = "the best plan is proved and written out; time is left"

    def lowered(self, known: Schedule, budget: Budget) -> Schedule | None:
        """A schedule as short whose fullest device holds less; None where none was found."""
        problem = OneMicrobatch.of(known.workload)
        state = SearchState.of(problem, budget, None)
        state.known = known
        KnownSchedule().run(state)
        if state.best is None or state.best.iteration > known.iteration_ns:
            return None
        begun = high = state.best.most_bytes
        low, step = 0, max(1, int(self.step * high))
        while high - low > max(1, int(self.least * high)) and not budget.expired:
            limit = (low + high) // 2 if low else max(0, high - step)
            if self._fits(state, known.pattern, limit):
                high, step = state.best.most_bytes, 2 * step
            else:
                low = max(1, limit)
        if high == begun:
            return None
        state.pattern = state.pattern or known.pattern
        found = _restored(problem, state.schedule)
        return replace(
            found,
            bound_ns=known.bound_ns,
            period_bound_ns=known.period_bound_ns,
            repetend_seconds=known.repetend_seconds,
        )

    def _fits(self, state: SearchState, pattern: Pattern | None, limit: int) -> bool:
        """Offer what is as short and holds at most ``limit`` bytes; whether something was found."""
        assert state.best is not None
        problem, static = state.problem, state.problem.workload.static_bytes
        left = [limit - static(device) for device in range(problem.num_devices)]
        if min(left) < 0:
            return False
        room = zip(left, problem.capacity, strict=False)
        capacity = tuple(own if known is None else min(own, known) for own, known in room)
        limited = replace(problem, capacity=(*capacity, *problem.capacity[len(capacity) :]))
        found = self._repeating(state, limited, pattern) or self._anew(state, limited)
        if found is None or found.iteration > state.best.iteration or found.most_bytes > limit:
            return False
        return state.offer(found)

    def _repeating(
        self, state: SearchState, limited: OneMicrobatch, pattern: Pattern | None
    ) -> ScheduleCandidate | None:
        """By a pattern of the same repetend time, with its shortest way through and ramps anew where that is needed."""
        assert state.best is not None
        if pattern is None or period_bound(limited) > pattern.period:
            return None
        budget, target = state.budget, state.best.iteration
        found = modulo_schedule(limited, pattern.repetend_ns) if pattern.unroll == 1 else None
        if found is None:
            seconds = self.part * budget.remaining
            _, found, _ = solve_pattern(limited, pattern.repetend_ns, budget, seconds, unroll=pattern.unroll)
        if found is None:
            return None
        inner = replace(state, problem=limited, bound=target, best=None, steady=None, others=[], progress=None)
        for shorter in (False, True):
            if shorter:
                found, _ = shortest_way_through(limited, found, budget, self.part * budget.remaining)
            inner.offer(inner.candidate(compose(limited, found), "repetend", middle_repetition(limited, found)))
            budget.charge(state.graph.num_tasks * SECONDS_PER_LOOK)
            if inner.steady is not None and inner.steady.iteration <= target:
                break
        else:
            if inner.steady is not None:
                Ramps(share=self.part).run(inner)
        if inner.steady is not None and inner.steady.iteration <= target:
            state.pattern = found
        return inner.steady

    def _anew(self, state: SearchState, limited: OneMicrobatch) -> ScheduleCandidate | None:
        """By ordering all actions as one problem."""
        best = state.best
        assert best is not None
        if state.graph.num_tasks > self.most_tasks:
            return None
        given = limited, state.graph, best.orders, best.starts, state.budget, self.part * state.budget.remaining
        found = reschedule(*given, most_ns=best.iteration)
        return None if found.orders is None else state.candidate(found.orders, f"{origin_of(best.scheduler)}+horizon")


def _one_classic(state: SearchState, name: str) -> Schedule:
    classic = CLASSIC[name]
    reason = classic.applies(state.problem)
    if reason is not None:
        raise NotApplicableError(f"--scheduler {name} does not apply: {reason}; choose another, or auto")
    orders = classic.orders(state.problem, state.graph)
    state.budget.charge(classic.seconds(state.graph.num_tasks))
    _require_room(name, LoopedOrders(state.graph, orders, [], None))
    state.offer(state.candidate(orders, name))
    return state.schedule


def _require_room(name: str, run: LoopedOrders) -> None:
    """Require that a classic schedule fits. Raises InfeasibleError."""
    over = overflow(run.graph, run.orders, loop=run.loop)
    if over is not None:
        enough = max(memory.peak_bytes for memory in peak_memory(run.graph, run.orders, run.loop))
        raise InfeasibleError(
            f"--scheduler {name} does not fit: {over}; raise --memory to {format_bytes(rounded_up(enough))}, or let "
            "--scheduler auto search"
        )
