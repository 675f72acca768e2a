"""The parts of a search: its steps, its state (candidates, the best of them, bounds), and its result."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, TypeVar

from pipeplan.errors import InvalidPlanError, NotApplicableError, SumError, UsageError
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.pattern import Pattern
from pipeplan.search_constants import OTHERS_KEPT
from pipeplan.time_limit import TimeUpError
from pipeplan.workload.bounds import period_bound, strong_iteration_bound, weak_iteration_bound
from pipeplan.workload.engine import with_links
from pipeplan.workload.few_device_bounds import FewDeviceBounds
from pipeplan.workload.memory import fits, peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.slices import repetend_of
from pipeplan.workload.steady_state.loop import LoopCut, LoopedOrders
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload

Progress = Callable[[str, int, int, float], None]
"""Called with what is being done, the best iteration and the bound (ns), and seconds since the search began.

As long as there is no schedule the iteration is 0, and so is the bound where that is to be said at once; later a bound
of 0 is one that is not known."""


@dataclass(frozen=True)
class Schedule:
    """The best schedule found, and what is proved about the workload.

    ``orders`` [device] task numbers and ``starts`` [task] in ns, as in :mod:`pipeplan.workload.task_graph`.
    Where a very long run repeats a ``loop`` these are of its written part, a ``graph`` of fewer micro-batches, and
    ``makespan_ns`` is of all. ``scheduler`` names what made it. ``pattern`` is the repetend the search found,
    ``period_bound_ns`` the proved least period per micro-batch at its unroll, and ``repetend_seconds`` how long both
    took from the start. ``repetend`` [operation] is the first micro-batch of the repetend that was asked for by its
    span, and its unroll; else whatever repeats is taken. ``notes`` say what went wrong on the way.
    """

    workload: Workload
    graph: TaskGraph
    orders: list[list[int]]
    starts: list[int]
    makespan_ns: int
    bound_ns: int
    scheduler: str
    loop: LoopCut | None = None
    pattern: Pattern | None = None
    repetend: tuple[tuple[int, ...], int] | None = None
    period_bound_ns: Fraction = Fraction(0)
    repetend_seconds: float | None = None
    seconds: float = 0.0
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    def running(self, run: LoopedOrders, workload: Workload, mark: str = "") -> Schedule:
        """The same of another workload, with its orders and times; ``mark`` is added to what made it."""
        makespan = run.graph.makespan(run.starts) + run.skipped_ns
        iteration = run.graph.iteration(run.starts, run.skipped_ns)
        found = replace(
            self,
            workload=workload,
            graph=run.graph,
            orders=run.orders,
            starts=run.starts,
            loop=run.loop,
            makespan_ns=makespan,
            bound_ns=min(iteration, weak_iteration_bound(workload)),
            scheduler=self.scheduler + mark,
        )
        return found.lasting(iteration)

    def lasting(self, iteration_ns: int) -> Schedule:
        """The same, of which is known how long its iteration lasts: working that out takes a while."""
        self.__dict__["iteration_ns"] = iteration_ns
        return self

    @property
    def optimal(self) -> bool:
        """Whether no schedule of this workload has a shorter iteration."""
        return self.iteration_ns == self.bound_ns

    @cached_property
    def iteration_ns(self) -> int:
        """Ns until each device has ended its last action, and all that follows."""
        return self.graph.iteration(self.starts, 0 if self.loop is None else self.loop.skipped_ns)

    @cached_property
    def most_bytes(self) -> int:
        """The memory of the device that needs most."""
        return most_bytes(self.graph, self.orders, self.loop)

    @cached_property
    def fullest(self) -> tuple[int, int | None]:
        """Bytes of the device that has least left, or most without a limit, and of what plans may use of it."""
        peaks = (memory.peak_bytes for memory in peak_memory(self.graph, self.orders, self.loop, self.starts))
        devices = self.graph.workload.devices
        each = [(peak, device.usable_bytes) for peak, device in zip(peaks, devices, strict=False)]
        return max(each, key=lambda own: own[0] if own[1] is None else own[0] - own[1])

    @cached_property
    def repeats(self) -> bool:
        """Whether a part in its middle can be repeated for more micro-batches."""
        return self.loop is not None or repetend_of(self.graph, self.orders) is not None


@dataclass(frozen=True, slots=True)
class ScheduleCandidate:
    """A valid schedule. ``frozen`` are the tasks of one repetition in its middle, which keep it repeatable.

    ``kept`` are those of all repetitions, where a span is asked for: only what is before and after them may change.
    """

    orders: list[list[int]]
    starts: list[int]
    iteration: int
    most_bytes: int
    scheduler: str
    frozen: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()

    @property
    def value(self) -> tuple[int, int, bool, int]:
        """Less is better: iteration, the memory of the device that needs most, no repetition, what is less simple."""
        return self.iteration, self.most_bytes, not self.frozen, complexity(self.scheduler)


@dataclass(frozen=True)
class SearchStep:
    """One thing that a search tries; the fields are its constants.

    ``when`` says the precondition in words, with fields in braces. ``share`` is the part of the time that it gets at
    most: of the whole limit, or of what ``of`` says. What is ``needed`` cannot be switched off.
    """

    share: float = 1.0
    name: ClassVar[str]
    when: ClassVar[str]
    of: ClassVar[str] = "the limit"
    needed: ClassVar[bool] = False

    @property
    def row(self) -> tuple[str, str, str]:
        """Name, precondition and share as a table has them."""
        share = "what is left" if self.share == 1.0 else f"{self.share:.4g} of {self.of}"
        return self.name, self.when.format(**asdict(self)), share


class ScheduleStep(SearchStep, ABC):
    """A step of the search for a schedule."""

    @abstractmethod
    def applies(self, state: SearchState) -> bool:
        """Whether the precondition holds."""

    @abstractmethod
    def run(self, state: SearchState) -> None:
        """Improve what is known."""


AnyStep = TypeVar("AnyStep", bound=SearchStep)


def named(steps: Sequence[SearchStep], kind: type[AnyStep]) -> AnyStep | None:
    """The step of a kind; None where it is switched off."""
    return next((step for step in steps if isinstance(step, kind)), None)


@dataclass(slots=True)
class SearchState:
    """What the search knows so far: the best schedule, and the best of those with a repetition frozen in them.

    ``steps`` are tried in order. ``scheduler`` is ``auto``, for all of them, or ``repetend``; ``unroll`` that of the
    only pattern to search for, None where it is open, and ``max_span`` how many micro-batches it reaches over at most;
    ``known`` a schedule that is known from elsewhere.

    ``others`` are the best few of different iteration or memory, the best one among them. ``least_period`` in ns is
    proved for every unroll; ``proofs`` are those by a few devices, once begun.
    """

    problem: OneMicrobatch
    graph: TaskGraph
    budget: Budget
    progress: Progress | None
    bound: int
    steps: Sequence[ScheduleStep] = ()
    scheduler: str = "auto"
    unroll: int | None = None
    max_span: int | None = None
    known: Schedule | None = None
    best: ScheduleCandidate | None = None
    steady: ScheduleCandidate | None = None
    others: list[ScheduleCandidate] = field(default_factory=list)
    pattern: Pattern | None = None
    period_proved: Fraction = Fraction(0)
    least_period: Fraction = Fraction(0)
    proofs: list[FewDeviceBounds] = field(default_factory=list)
    repetend_seconds: float | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, problem: OneMicrobatch, budget: Budget, progress: Progress | None) -> SearchState:
        """Nothing but the bounds."""
        graph = task_graph(problem.workload)
        bound, period = strong_iteration_bound(problem), period_bound(problem)
        return cls(problem, graph, budget, progress, bound, period_proved=period, least_period=period)

    def search(self) -> Schedule:
        """Try the steps until the user interrupts; the best schedule of the problem.

        A step that fails for a reason that nobody foresaw is noted once there is a schedule.

        Raises:
            InfeasibleError: no schedule fits into memory.
            SearchTimeoutError: the budget ran out before anything that fits was found.
            TimeUpError: so did the time of a limit that is enforced.
        """
        try:
            for step in self.steps:
                if not self.budget.interrupted:
                    self._try(step)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.budget.interrupt()
        except TimeUpError:
            if self.best is None:
                raise
        return self.schedule

    def _try(self, step: ScheduleStep) -> None:
        with noted(step.name, self.notes, lambda _: not step.needed and self.best is not None):
            if step.applies(self):
                step.run(self)

    @property
    def schedule(self) -> Schedule:
        """The chosen schedule, and what is proved."""
        best = self.best
        assert best is not None
        return Schedule(
            self.problem.workload,
            self.graph,
            best.orders,
            best.starts,
            self.graph.makespan(best.starts),
            self.bound,
            best.scheduler,
            pattern=self.pattern,
            repetend=None if self.max_span is None else self._cut(best.frozen),
            period_bound_ns=max(self.period_proved, self.least_period),
            repetend_seconds=self.repetend_seconds,
            seconds=self.budget.elapsed,
            interrupted=self.budget.interrupted,
            notes=tuple(self.notes),
        )

    def _cut(self, frozen: frozenset[int]) -> tuple[tuple[int, ...], int] | None:
        """[operation] the first micro-batch of one repetition, and how many it has of each; None without any."""
        if not frozen:
            return None
        own: dict[int, list[int]] = {}
        for task in frozen:
            x, m = divmod(task, self.problem.num_microbatches)
            own.setdefault(x, []).append(m)
        return tuple(min(own[x]) for x in range(len(self.problem.workload.operations))), len(own[0])

    def candidate(
        self,
        orders: list[list[int]],
        scheduler: str,
        frozen: frozenset[int] = frozenset(),
        kept: frozenset[int] = frozenset(),
    ) -> ScheduleCandidate | None:
        """The schedule of these orders; None if they block each other or do not fit into memory."""
        timed = fitting(self.graph, orders)
        if timed is None:
            return None
        orders, starts = timed
        iteration = self.graph.iteration(starts)
        return ScheduleCandidate(orders, starts, iteration, most_bytes(self.graph, orders), scheduler, frozen, kept)

    def offer(self, candidate: ScheduleCandidate | None) -> bool:
        """Keep the candidate where it is better than what is known; whether it was anywhere."""
        if candidate is None:
            return False
        better = False
        if not any(candidate.value[:2] == other.value[:2] for other in self.others):
            self.others = sorted([*self.others, candidate], key=lambda other: other.value)[: OTHERS_KEPT + 1]
        if candidate.frozen and (self.steady is None or candidate.value < self.steady.value):
            self.steady, better = candidate, True
        if self.best is None or candidate.value < self.best.value:
            self.best, better = candidate, True
            self.report(scheduler_words(candidate.scheduler))
        return better

    def raise_bound(self, bound: int | None) -> None:
        """A proof that no schedule is shorter."""
        if bound is not None and bound > self.bound:
            assert self.best is not None
            self.bound = min(bound, self.best.iteration)
            self.report("bound")

    def report(self, what: str, value: int | None = None, bound: int | None = None) -> None:
        """Report the best and the bound, or what the solver is about to find."""
        if self.progress is not None and self.best is not None:
            best, proved = self.best.iteration, self.bound
            self.progress(what, min(best, value or best), max(proved, bound or proved), self.budget.elapsed)

    @property
    def finished(self) -> bool:
        """Whether the best is proved best, or no order is better, or there is no time left."""
        return self.proved or self.in_any_order or self.budget.expired

    @property
    def in_any_order(self) -> bool:
        """Whether an iteration takes as long in any order: a stage alone waits for nothing, and ends with a gradient.

        Exchanges of its actions run beside them, which orders can change.
        """
        workload = self.problem.workload
        waits = any(lag for *_, lag in workload.edges)
        return len(workload.stages) == 1 and not waits and not workload.exchanges

    @property
    def proved(self) -> bool:
        """Whether the best is proved best."""
        assert self.best is not None
        return self.best.iteration <= self.bound


@contextmanager
def noted(what: str, notes: list[str], is_something: Callable[[Exception], bool]) -> Iterator[None]:
    """Once there is something in spite of an error, that only ends what runs inside, and is noted and warned of.

    Nobody's best plan is lost with a step that could only have made it better. That a request is wrong is said, but not
    that some of its numbers add up to too much, or that a schedule is not for some stages.
    """
    try:
        yield
    except TimeUpError:
        raise
    except Exception as error:
        of_request = isinstance(error, UsageError) and not isinstance(error, SumError | NotApplicableError)
        if of_request or not is_something(error):
            raise
        text = f"the step {what!r} ended with {type(error).__name__}{f': {error}' if str(error) else ''}"
        if text not in notes:
            notes.append(text)
            warnings.warn(f"{text}; what was found without it stands", stacklevel=2)


def fitting(graph: TaskGraph, orders: Orders) -> tuple[list[list[int]], list[int]] | None:
    """Orders with those of links, and starts [task] in ns; None if they block each other or do not fit into memory."""
    try:
        complete = with_links(graph, orders)
        starts = earliest_starts(graph, complete)
    except InvalidPlanError:
        return None
    return (complete, starts) if fits(graph, complete) else None


def most_bytes(graph: TaskGraph, orders: Orders, loop: LoopCut | None = None) -> int:
    """The memory of the device that needs most."""
    return max(memory.peak_bytes for memory in peak_memory(graph, orders, loop))


def first_by(keys: Sequence[Callable[[Schedule], int]], found: Schedule, best: Schedule) -> bool:
    """Whether a schedule is less in the first key in which they differ; keys that cost time may come last."""
    return next((here < there for key in keys if (here := key(found)) != (there := key(best))), False)


def complexity(scheduler: str) -> int:
    """How far from simple what made a schedule is: a known schedule 0, then rules, a pattern, anything optimised."""
    whole = _in_one(scheduler)
    if whole != origin_of(whole):
        return 3
    return 2 if whole == "repetend" else int(whole.startswith("rules"))


def scheduler_words(scheduler: str) -> str:
    """What made a schedule, in words for people; ``scheduler`` is its identifier in files.

    Of what was found by ordering parts anew (``+windows``, ``+horizon``, ``+weights``, ``+hoisted``) it
    says from which schedule.
    Names of classic schedules and of rules stay as they are, as do those of plans from elsewhere.
    """
    whole = _in_one(scheduler)
    origin = origin_of(whole)
    name = origin.removeprefix("rules: ")
    words = _ORIGINS.get(origin, origin if name == origin else "rules" if name == "rules" else f"rules {name}")
    if whole != origin:
        words = f"optimised, from {words}"
    elif origin == "repetend":
        words = "optimised repeating pattern"
    groups = ", group by group" if scheduler.removesuffix("+slices").endswith("+groups") else ""
    return f"{words}{groups}{', leading forwards sliced' if scheduler.endswith('+slices') else ''}"


def _in_one(scheduler: str) -> str:
    """What made a schedule, of its micro-batches in one go and with whole forwards."""
    return scheduler.removesuffix("+slices").removesuffix("+groups")


_ORIGINS = {
    "sequential": "one micro-batch after another",
    "repetend": "a repeating pattern",
    "rules": "list scheduling",
}


def origin_of(scheduler: str) -> str:
    """What a rescheduled schedule began as; ``1f1b+`` is a name of its own."""
    return scheduler.removesuffix("+windows").removesuffix("+horizon").removesuffix("+weights").removesuffix("+hoisted")
