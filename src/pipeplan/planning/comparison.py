"""Every known schedule for one model and its memory, compared with what the search finds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeplan.costs.throughput import Throughput, Yardstick
from pipeplan.display import Displayed
from pipeplan.errors import InfeasibleError, InvalidPlanError, PipeplanError, SearchTimeoutError, UsageError
from pipeplan.files import Placement
from pipeplan.partition.strategies import SEARCHED, STRATEGIES
from pipeplan.planning.bounds import prompt_bound
from pipeplan.planning.build_plan import Result
from pipeplan.planning.candidates import PlacementCandidate, likely_choices, not_joined
from pipeplan.planning.choices import OF_RULES, choices_of_known, found_as
from pipeplan.planning.infeasibility import most_telling
from pipeplan.planning.planners import AUTO_PLANNER, EVERY_PLANNER, PLANNERS
from pipeplan.planning.request import Batch, Request, follows_rules, input_notes, splits_by
from pipeplan.planning.steps import STEPS, EvenCut, search_plan, without
from pipeplan.planning.trials import workloads
from pipeplan.schedule.classic import CLASSIC, Classic, always, as_given
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.rules.engine import schedule_by_rules
from pipeplan.schedule.state import Progress, SearchStep
from pipeplan.search_constants import COMPARED_LEAST, COMPARED_SEARCHING, COMPARED_SECONDS, FIRST_SECONDS
from pipeplan.simulator.metrics import rates
from pipeplan.simulator.spares import Spares
from pipeplan.time_limit import Limit, TimeUpError, clock_of
from pipeplan.units import MAX_BYTES
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.elements import Again
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import overflow, peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.slices import num_sliced
from pipeplan.workload.steady_state.loop import LoopedOrders
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload

OURS = "pipeplan"
"""The name of the search's own row."""


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A schedule on a placement: times in ns, memory in bytes per device; an iteration ends with sums over replicas.

    ``microbatch_size`` counts samples over all replicas, of the stage that has most at once. ``replicas`` are the most
    of a stage, ``samples_per_replica`` the least and most that one has of a micro-batch, ``shards``, ``context``,
    ``expert``, ``expert_shards`` and ``zero`` the most of a stage, too; on ``idle_devices`` no stage stands.
    ``varied``: backward runs another way than the schedule's definition has it. ``sliced_microbatches`` have their
    first forwards in two parts.
    ``lower_bound_ns`` is of the placement and its memory, whichever way backward runs, so that gaps of its rows
    compare; ``why`` says by how much a schedule does not fit, else it is empty. ``cut_short``: the search had too
    little time for a look at everything that is open on this placement. ``choices`` say who made each of them, as
    those of a plan that a search with these flags would find.
    """

    schedule: str
    placement: str
    num_microbatches: int
    microbatch_size: int
    split_backward: bool
    recompute: Again
    replicas: int
    samples_per_replica: tuple[int, int]
    fits: bool
    makespan_ns: int
    iteration_ns: int
    bubble_rate: float
    bubble_rate_span: float
    peak_memory_bytes: tuple[int, ...]
    lower_bound_ns: int
    exposed_reduction_ns: int = 0
    exposed_step_ns: int = 0
    exposed_gather_ns: int = 0
    why: str = ""
    cut_short: bool = False
    shards: int = 1
    context: int = 1
    context_exchange: str = ""
    zero: int = 0
    expert: int = 1
    expert_shards: int = 1
    idle_devices: tuple[int, ...] = ()
    varied: bool = False
    sliced_microbatches: int = 0
    choices: Mapping[str, str] = field(default_factory=dict, compare=False)

    def figures(self) -> dict[str, object]:
        """The row as an object of ``compare --json``; where some do, it has how many forwards run in parts, how many
        devices split each expert, and how those that share sequences exchange keys and values."""
        found = asdict(self)
        if not self.sliced_microbatches:
            del found["sliced_microbatches"]
        if self.expert_shards == 1:
            del found["expert_shards"]
        if not self.context_exchange:
            del found["context_exchange"]
        return found

    @property
    def is_ours(self) -> bool:
        """Whether it is what the search found, not a known schedule."""
        return self.schedule == OURS

    @property
    def gap(self) -> float | None:
        """How far above the bound; None where it does not fit, since the bound is for the memory there is."""
        return self.iteration_ns / self.lower_bound_ns - 1 if self.fits else None

    @property
    def title(self) -> str:
        """The schedule's name; of one that is not as it is defined, with what is unlike."""
        return f"{self.schedule} {'split' if self.split_backward else 'whole'}" if self.varied else self.schedule

    @property
    def setting(self) -> Hashable:
        """What schedules of it have in common: they are compared with each other first."""
        split = tuple(getattr(self, name) for name in _SIZES)
        return self.placement, self.num_microbatches, self.microbatch_size, self.replicas, self.recompute, split


@dataclass(frozen=True, slots=True)
class NotThere:
    """A schedule that does not apply to a placement, or (``schedule`` None) one on which nothing is possible.

    Not ``reached``: there was no time to find out.
    """

    schedule: str | None
    placement: str
    why: str
    reached: bool = True


@dataclass(frozen=True, slots=True)
class Comparison(Displayed):
    """Rows best first, those that fit before those that do not; and what there is none for.

    An iteration has ``mini_batch`` samples. ``memory_bytes`` [device] are what plans may use, beside ``reserve_bytes``.
    ``yardstick`` says what a sample is, ``notes`` what is free. Where no row fits, ``shortage`` says what would do.
    Where something is not reached, it should be in about ``enough_seconds``, by what took how long until then; None
    where that is not known. ``full_devices`` counts each device by its speed; 0 is as many as there are.
    ``spares`` say what spare ones cost.
    """

    name: str
    num_devices: int
    mini_batch: int
    memory_bytes: tuple[int | None, ...]
    rows: tuple[ComparisonRow, ...]
    missing: tuple[NotThere, ...]
    interrupted: bool
    yardstick: Yardstick
    notes: tuple[str, ...] = ()
    shortage: PipeplanError | None = None
    enough_seconds: float | None = None
    reserve_bytes: tuple[int, ...] = ()
    full_devices: float = 0.0
    spares: Spares | None = None

    def __repr__(self) -> str:
        return f"<Comparison {self.name!r}: {len(self.rows)} rows, {len(self.missing)} missing>"

    @property
    def batch(self) -> Batch | None:
        """How all rows cut the mini-batch; None where they differ."""
        found = {Batch(row.num_microbatches, row.microbatch_size) for row in self.rows}
        return found.pop() if len(found) == 1 else None

    def throughput(self, row: ComparisonRow) -> Throughput:
        """The throughput of a row's iteration."""
        return self.yardstick.throughput(self.mini_batch, row.iteration_ns, self.full_devices or self.num_devices)

    @property
    def _shortage_figures(self) -> dict[str, object]:
        """Where no row fits, why, and what would do, as a search has it."""
        if isinstance(self.shortage, InfeasibleError):
            return self.shortage.figures()
        return {} if self.shortage is None else {"error": str(self.shortage), "would_do": []}

    def figures(self) -> dict[str, object]:
        """The object of ``compare --json``."""
        return {
            "name": self.name,
            "num_devices": self.num_devices,
            "mini_batch": self.mini_batch,
            "num_microbatches": None if self.batch is None else self.batch.num_microbatches,
            "microbatch_size": None if self.batch is None else self.batch.microbatch_size,
            "memory_bytes": list(self.memory_bytes),
            **({"reserve_bytes": list(self.reserve_bytes)} if any(self.reserve_bytes) else {}),
            "rows": [
                row.figures() | {"applies": True, "gap": row.gap} | self.throughput(row).figures() for row in self.rows
            ],
            "not_applicable": [
                {"schedule": each.schedule, "placement": each.placement, "why": each.why, "applies": False}
                for each in self.missing
                if each.reached
            ],
            "not_reached": [
                {"schedule": each.schedule, "placement": each.placement, "why": each.why}
                for each in self.missing
                if not each.reached
            ],
            "enough_seconds": self.enough_seconds,
            "interrupted": self.interrupted,
            **self._shortage_figures,
            **({} if self.spares is None else {"spares": self.spares.figures()}),
            "notes": list(self.notes),
        }


def compare(
    request: Request, *, rules: Rules | None = None, progress: Progress | None = None, within: Limit | None = None
) -> Comparison:
    """Time every classic schedule on the request's placement, or on every strategy's, and search one there.

    That of ``rules`` is one more; beside rules with an ``order``, which has no replicas, no plan has any.

    Where the placement is left open, a search over everything comes first, for half of the time, with its own
    placement. Sizes of micro-batches and recomputation are chosen as a search does, on each placement for itself. Where
    nothing fits, schedules are those of the least memory with which a plan was found.

    Raises:
        KeyboardInterrupt: interrupted before there was anything to show.
        SearchTimeoutError: no time to find what fits on any placement.
        UsageError: no placement is possible, or the rules have instructions.
    """
    request = replace(request, folds=False)  # rows are of devices
    if rules is not None and rules.order and request.replicas is None:
        request = replace(request, replicas=1)  # an order has none, and belongs beside schedules of the same stages
    if request.planner == EVERY_PLANNER:
        asked = replace(request, planner=AUTO_PLANNER)
        return compare_on([*_placements(asked), *_in_line(asked)], asked, progress, within, rules, tuple(PLANNERS))
    return compare_on(_placements(request), request, progress, within, rules)


def _placements(request: Request) -> list[Placement | str]:
    """What is compared: what is asked for, or what a search may choose and every strategy; of a planner its own."""
    if request.placement != "auto" or request.planner != "auto":
        return [request.placement]
    return ["auto", *SEARCHED]


def _in_line(request: Request) -> list[str]:
    """What systems for chains make of a model with branches, where the placement is open."""
    if request.placement != "auto" or not_joined(request.profile) is None:
        return []
    return [name for name, strategy in STRATEGIES.items() if strategy.in_line]


def compare_on(
    placements: Sequence[Placement | str],
    request: Request,
    progress: Progress | None = None,
    within: Limit | None = None,
    rules: Rules | None = None,
    planners: Sequence[str] = (),
) -> Comparison:
    """The same on each of some placements, of which ``auto`` is any, and 1F1B on the stages of published planners.

    The time limit, which ends with ``within``, is shared between them, and on each between the search and the classic
    schedules. When it is up, or at Ctrl-C, what is known is the answer, and what was not reached is said to be missing.
    """
    clock = clock_of(within)
    limit = Budget(request.time_limit, deterministic=request.deterministic, whole=within, clock=clock)
    rows = _RowsSoFar(request, limit, rules)
    shares = [len(placements) - 1 or 1 if wanted == "auto" else 1 for wanted in placements] + [1] * len(planners)
    with rows.limit.hearing_interrupts():
        for index, wanted in enumerate(placements):
            name = wanted if isinstance(wanted, str) else wanted.strategy
            if rows.limit.interrupted or (rows.waited and rows.limit.over):
                rows.add_failure(name, SearchTimeoutError(_NO_TIME))
                continue
            try:
                asked = replace(request, placement=wanted)
                if isinstance(wanted, str) and wanted in STRATEGIES and len(placements) > 1:
                    with rows.limit.ended():
                        asked = _laid_out(request, asked)
                rows.search(replace(asked, time_limit=rows.seconds_for(shares, index)), progress)
            except KeyboardInterrupt:
                rows.limit.interrupt()
            except (InfeasibleError, SearchTimeoutError, UsageError) as error:
                rows.add_failure(name, error)
            except Exception as error:
                rows.add_error(name, error)
        for index, name in enumerate(planners, len(placements)):
            try:
                if rows.limit.interrupted or (rows.waited and rows.limit.over):
                    raise SearchTimeoutError(_NO_TIME)
                rows.add_planner(replace(request, planner=name, time_limit=rows.seconds_for(shares, index)))
            except KeyboardInterrupt:
                rows.limit.interrupt()
            except (InfeasibleError, SearchTimeoutError, UsageError) as error:
                rows.add_failure(name, error)
            except Exception as error:
                rows.add_error(name, error)
    return rows.comparison()


def _laid_out(request: Request, asked: Request) -> Request:
    """A strategy's request with the sizes that its usual schedule is shortest with, where blocks may be split.

    Of one strategy alone what is not said is 1, and with one device per stage every other layout looks better.
    """
    table = likely_choices(request) if request.placement == "auto" else []
    own = next((each.choice for each in table if each.choice.strategy == asked.placement), None)
    if own is None:
        return asked
    return replace(
        asked,
        shards=own.shards,
        context=own.context,
        positions=own.positions,
        replicas=own.replicas,
        chunks=asked.chunks or own.chunks,
    )


_NO_TIME = "there was not enough time; raise --time-limit"


class _RowsSoFar:
    """What the comparison knows so far, placement after placement, so that an interruption leaves it whole."""

    def __init__(self, request: Request, limit: Budget, rules: Rules | None = None) -> None:
        self._request = request
        self._rules = rules
        self._schedules = {**CLASSIC, **({} if rules is None else {f"{OF_RULES}{rules.name}": _by_rules(rules)})}
        self.limit = limit
        self._rows: list[ComparisonRow] = []
        self._missing: list[NotThere] = []
        self._failures: list[PipeplanError] = []
        self._timed: set[Hashable] = set()
        self._best_ns: int | None = None
        self._bound: int | None = None
        self._seconds = 0.0
        """What timing has taken, of all that is no row of ours."""

    @property
    def waited(self) -> bool:
        """Whether there is a row, or one was waited for in vain: after the limit no other is waited for."""
        return bool(self._rows) or any(isinstance(why, SearchTimeoutError) for why in self._failures)

    def seconds_for(self, shares: Sequence[int], index: int) -> float:
        """Time for one of the placements: its share of what is left, or of all where no clock counts."""
        if self._request.deterministic and not self.limit.interrupted:
            return self.limit.seconds * shares[index] / sum(shares)
        return self.limit.remaining * shares[index] / sum(shares[index:])

    def search(self, asked: Request, progress: Progress | None) -> None:
        """The rows of a placement; where nothing fits, those of what would do with more memory.

        Raises:
            PipeplanError: there is no plan, whatever the memory.
        """
        clocked = not asked.deterministic
        limit = Limit(asked.time_limit if clocked else math.inf, whole=self.limit, clock=self.limit.clock)
        try:
            first = replace(asked, time_limit=asked.time_limit * COMPARED_SEARCHING) if clocked else asked
            found = search_plan(first, progress=self._listen(progress), within=self.limit, steps=self._steps(first))
        except InfeasibleError as error:
            self._failures.append(error)
            seconds = limit.remaining * COMPARED_SEARCHING if clocked else asked.time_limit
            asked = replace(asked.within(error.enough_bytes or MAX_BYTES), time_limit=seconds)
            found = search_plan(asked, within=self.limit, steps=self._steps(asked))
        self._add(asked, found, limit)

    @staticmethod
    def _steps(asked: Request) -> Sequence[SearchStep]:
        """What is tried: of a planner by name nothing that only stands in for its plan."""
        return STEPS if asked.planner == AUTO_PLANNER else without({EvenCut.name})

    def add_planner(self, asked: Request) -> None:
        """A row of 1F1B, with whole forwards and backwards, on the stages that a published planner chooses.

        Raises:
            PipeplanError: it chooses none.
        """
        alone = replace(asked, scheduler="1f1b", rules=None, num_parted=0, split_backward=False, late_inputs=False)
        result = search_plan(alone, within=self.limit, steps=self._steps(alone))
        recompute = any(stage.recomputes for stage in result.plan.stages)
        row = _ours(result, recompute, self._request.memory)
        self._rows.append(replace(row, schedule="1f1b", placement=asked.planner, cut_short=False))

    def _listen(self, progress: Progress | None) -> Progress | None:
        """The progress callback of a search: it reports the best and the bound over all placements."""
        if progress is None:
            return None
        best = self._best_ns
        if best is not None and self._bound is None and self._request.placement == "auto":
            self._bound = prompt_bound(self._request, self.limit)
        bound = self._bound

        def heard(what: str, best_ns: int, bound_ns: int, seconds: float) -> None:
            least = best_ns if best is None or not best_ns else min(best, best_ns)
            progress(what, least, min(least, bound_ns if bound is None else bound), self.limit.elapsed)

        return heard

    def _add(self, asked: Request, result: Result, limit: Limit) -> None:
        """The search's row, and those of the classic schedules on its placement, for the memory that there is.

        Those are timed until the limit is over, or half of what is left for the other placements; on the first
        placement not before the process has worked for a while, however late it is.
        """
        plan, memory = result.plan, self._request.memory
        recompute = any(stage.recomputes for stage in plan.stages)
        ours = _ours(result, recompute, memory)
        if ours.fits:
            self._best_ns = min(ours.iteration_ns, ours.iteration_ns if self._best_ns is None else self._best_ns)
        alone = not self._rows
        self._rows.append(ours)
        placement, batch = plan.placed.whole, Batch(ours.num_microbatches, ours.microbatch_size)
        if (placement, batch, recompute) in self._timed:
            return
        self._timed.add((placement, batch, recompute))
        placed = replace(asked, placement=placement, batch=batch, num_devices=plan.num_devices, chunks=None, sizes=())
        candidate = PlacementCandidate(placement, batch, recompute, "compared")
        if self.limit.interrupted:
            own = self.limit.interrupted_at + COMPARED_SECONDS - self.limit.clock() if alone else 0.0
            limit = Limit(own, clock=self.limit.clock)
        elif limit.remaining < COMPARED_LEAST * self.limit.remaining:
            limit = Limit(COMPARED_LEAST * self.limit.remaining, whole=self.limit, clock=self.limit.clock)
        if alone and not self.limit.interrupted:
            limit.wait(0.0, FIRST_SECONDS)
        timing = _Timing(placed, candidate, ours, memory, self._schedules, self._rules)
        begun = self.limit.elapsed
        with limit.ended():
            timing.run()
        self._seconds += self.limit.elapsed - begun
        if limit.interrupted:
            self.limit.interrupt()
        self._rows += timing.rows
        self._missing += timing.missing

    def add_failure(self, placement: str, error: PipeplanError) -> None:
        """A placement on which nothing is possible."""
        self._failures.append(error)
        self._missing.append(NotThere(None, placement, str(error), not isinstance(error, SearchTimeoutError)))

    def add_error(self, placement: str, error: Exception) -> None:
        """What went wrong on a placement: rows that there are stand. Raises it where there are none."""
        if not self._rows or isinstance(error, TimeUpError):
            raise error
        self.add_failure(placement, PipeplanError(_ended_with(error)))

    def comparison(self) -> Comparison:
        """All of it, best first; without any row, the first reason raised."""
        if not self._rows:
            raise KeyboardInterrupt if self.limit.interrupted else self._first_failure
        request = self._request
        rows: dict[Hashable, ComparisonRow] = {}
        for row in sorted(_never_longer(self._rows), key=_rank):
            rows.setdefault((row.schedule, row.varied, row.setting, row.fits), row)
        fits = any(row.fits for row in self._rows)
        return Comparison(
            request.profile.name,
            request.num_devices,
            request.batch.mini_batch,
            tuple(request.memory),
            tuple(rows.values()),
            tuple(self._missing),
            self.limit.interrupted,
            Yardstick.of(
                request.profile, () if request.cluster is None else request.cluster.names[: request.num_devices]
            ),
            tuple(input_notes(request)),
            None if fits else most_telling(self._failures),
            self._enough_seconds,
            tuple(request.reserve),
            sum(request.speeds),
        )

    @property
    def _first_failure(self) -> PipeplanError:
        """That nothing fits goes before what could not be asked of other placements."""
        short = (error for error in self._failures if isinstance(error, InfeasibleError))
        return next(short, self._failures[0])

    @property
    def _enough_seconds(self) -> float | None:
        """About how long would do for all: a placement, and a schedule on one, takes as long as those until now."""
        schedules = [each for each in self._missing if not each.reached and each.schedule is not None]
        placements = [each for each in self._missing if not each.reached and each.schedule is None]
        timed = sum(row.schedule != OURS for row in self._rows)
        reached = len({row.placement for row in self._rows})
        if not (schedules or placements) or (schedules and not timed):
            return None
        timing = len(schedules) * self._seconds / timed / (1 - COMPARED_SEARCHING) if schedules else 0.0
        return self.limit.seconds * (1 + len(placements) / reached) + timing


def _rank(row: ComparisonRow) -> tuple[bool, int, bool, int]:
    """What fits comes first, then the shortest, ours before its equals, then the least memory."""
    return not row.fits, row.iteration_ns, not row.is_ours, max(row.peak_memory_bytes)


def _ours(result: Result, recompute: Again, memory: Sequence[int | None]) -> ComparisonRow:
    plan, predicted, tail = result.plan, result.plan.predicted, result.tail
    over = overflow(result.schedule.graph, result.schedule.orders, memory, result.schedule.loop)
    return ComparisonRow(
        OURS,
        plan.placement,
        plan.workload.num_microbatches,
        plan.workload.microbatch_size,
        result.schedule.workload.splits_backward,
        recompute,
        max(stage.replicas for stage in plan.stages),
        plan.workload.samples_per_replica,
        over is None,
        predicted.makespan_ns,
        predicted.iteration_ns,
        predicted.bubble_rate,
        predicted.bubble_rate_span,
        tuple(each.peak_bytes for each in predicted.memory),
        predicted.lower_bound_ns,
        tail.exposed_reduction_ns,
        tail.exposed_step_ns,
        tail.exposed_gather_ns,
        "" if over is None else str(over),
        cut_short=result.candidates.left > 0 and not result.interrupted,
        choices=plan.provenance.choices,
        **_stands(result.schedule.workload),
    )


_SIZES = ("shards", "context", "expert", "expert_shards", "zero")


def _stands(workload: Workload) -> dict[str, Any]:
    """What its stages run on, and how many forwards they have in parts, in the words of rows."""
    stages = workload.stages
    most: dict[str, Any] = {name: max(getattr(each, name) for each in stages) for name in _SIZES}
    shared = dict.fromkeys(each.context_exchange for each in stages if each.context > 1)
    most |= {"context_exchange": ", ".join(shared)} if shared else {}
    return most | {"idle_devices": workload.idle_devices, "sliced_microbatches": num_sliced(workload)}


def _never_longer(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The rows, with what is known in place of a search that found nothing as short on the same kind of placement."""
    known: dict[Hashable, ComparisonRow] = {}
    for row in sorted(rows, key=_rank):
        if row.fits:
            known.setdefault((row.placement, row.replicas), row)
    return [
        replace(best, schedule=OURS, cut_short=True, varied=False, choices=found_as(row.choices, best.schedule))
        if row.schedule == OURS
        and row.fits
        and (best := known[row.placement, row.replicas]).iteration_ns < row.iteration_ns
        else row
        for row in rows
    ]


def _by_rules(rules: Rules) -> Classic:
    """The schedule of rules, as known ones are made."""
    if rules.instructions:
        raise UsageError(
            f"rules {rules.name!r} have instructions, which known schedules cannot run; give --rules to search"
        )
    return Classic(always, as_given(lambda workload, graph: schedule_by_rules(graph, rules)), splits=splits_by(rules))


@dataclass(slots=True)
class _Timing:
    """Known schedules on one placement, one after another; what is there at any moment is whole.

    ``left`` are those that were not reached, which at first are all.
    """

    request: Request
    candidate: PlacementCandidate
    ours: ComparisonRow
    memory: Sequence[int | None]
    schedules: Mapping[str, Classic]
    rules: Rules | None
    rows: list[ComparisonRow] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Time them as they are, then recomputing where they do not fit and that is open."""
        self.left = list(self.schedules)
        candidate, problems = self.candidate, self._problems(self.candidate)
        for name, classic in self.schedules.items():  # why one does not apply is known in no time
            reasons = [reason for problem in problems if (reason := classic.applies(problem)) is not None]
            if len(reasons) == len(problems):
                self.reasons[name] = reasons[0]
                self.left.remove(name)
        for name in [*self.left]:
            rows = self._timed(name, problems, candidate.recompute, self.ours.lower_bound_ns)
            self.rows += rows
            if rows and not any(row.fits for row in rows) and self.request.recompute is None:
                self.left.append(f"{name} recomputing")
            self.left.remove(name)
        for name in [name for name in self.schedules if f"{name} recomputing" in self.left]:
            self.rows += self._recomputing(name)
            self.left.remove(f"{name} recomputing")

    @property
    def missing(self) -> list[NotThere]:
        """What has no row: what does not apply, and what was not reached."""
        place = self.ours.placement
        unreached = [NotThere(name, place, _NO_TIME, reached=False) for name in self.left]
        return [*(NotThere(name, place, why) for name, why in self.reasons.items()), *unreached]

    def _problems(self, candidate: PlacementCandidate) -> list[OneMicrobatch]:
        request = replace(self.request, placement=candidate.placement)
        return [OneMicrobatch.of(workload, require_room=False) for workload in workloads(request, candidate)]

    def _timed(
        self, name: str, problems: Sequence[OneMicrobatch], recompute: Again, bound_ns: int
    ) -> list[ComparisonRow]:
        """The rows of a schedule, or the reason why there is none."""
        rules, rows = (None if name in CLASSIC else self.rules), list[ComparisonRow]()
        if rules is not None and not follows_rules(self.request.profile, self.candidate.placement, rules):
            why = "these rules are for stages that stand otherwise"
        else:
            rows, why = _classic(name, self.schedules[name], problems, recompute, bound_ns, self.memory)
        if not rows:
            self.reasons[name] = why
        return [
            replace(
                row,
                cut_short=self.ours.cut_short,
                choices=choices_of_known(self.ours.choices, name, row.split_backward, varied=row.varied),
            )
            for row in rows
        ]

    def _recomputing(self, name: str) -> list[ComparisonRow]:
        """Those rows that fit once stages recompute on devices that are too small, until it fits or all do."""
        candidate, over = self.candidate, set[int]()
        rows = [row for row in self.rows if row.schedule == name]
        while True:
            peaks = min((row.peak_memory_bytes for row in rows), key=sum)
            small = {
                device
                for device, (peak, limit) in enumerate(zip(peaks, self.memory, strict=True))
                if limit is not None and peak > limit
            }
            if small <= over:
                return []
            over |= small
            stages = tuple(
                stage if over.isdisjoint(stage.devices) else stage.model_copy(update={"recompute": True})
                for stage in candidate.placement.stages
            )
            placement = candidate.placement.model_copy(update={"stages": stages})
            problems = self._problems(replace(candidate, placement=placement))
            bound = min(self.ours.lower_bound_ns, *(weak_iteration_bound(problem.workload) for problem in problems))
            rows = self._timed(name, problems, True, bound)
            if any(row.fits for row in rows):
                return [row for row in rows if row.fits]
            if not rows:
                del self.reasons[name]
                return []


def _classic(
    name: str,
    classic: Classic,
    problems: Sequence[OneMicrobatch],
    recompute: Again,
    bound_ns: int,
    memory: Sequence[int | None],
) -> tuple[list[ComparisonRow], str]:
    """A classic schedule's rows over the ways of running backward, and why it has none where it has none."""
    rows: list[ComparisonRow] = []
    reasons: list[str] = []
    for problem in problems:
        reason = classic.applies(problem)
        if reason is not None:
            reasons.append(reason)
            continue
        try:
            row = _row(name, classic, problem, recompute, bound_ns, memory)
        except InvalidPlanError as error:
            reasons.append(f"its actions would wait for each other: {error}")
            continue
        except (InfeasibleError, UsageError) as error:  # rules get stuck, or are for other stages
            reasons.append(str(error))
            continue
        except TimeUpError:
            raise
        except Exception as error:  # the other rows stand
            reasons.append(_ended_with(error))
            continue
        if row is None:
            reasons.append(f"nothing in it repeats, and {problem.num_microbatches} micro-batches are too many without")
        else:
            rows.append(row)
    return _as_defined_and_varied(rows), next(iter(reasons), "")


def _ended_with(error: Exception) -> str:
    return f"looking at it ended with {type(error).__name__}{f': {error}' if str(error) else ''}"


def _as_defined_and_varied(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """A schedule as it is defined; and with backward the other way where only one of them fits, or that is shorter."""
    defined = next((row for row in rows if not row.varied), None)
    return [
        row
        for row in rows
        if defined in (None, row) or row.fits != defined.fits or row.iteration_ns < defined.iteration_ns
    ]


def defined_run(classic: Classic, workload: Workload) -> LoopedOrders | None:
    """A workload as a known schedule is defined; of a very long run a shorter one, of which a round is repeated.

    None where a very long run has no round to be repeated.
    """
    shorter = ShorterRun()
    short = shorter.shorter(workload)
    run = written_run(classic, short or workload)
    return run if short is None else shorter.repeated(run.graph, run.orders, workload.num_microbatches)


def written_run(classic: Classic, workload: Workload) -> LoopedOrders:
    """The same with every action written, however many there are."""
    problem = OneMicrobatch.of(workload, require_room=False)
    made, graph = classic.orders(problem, task_graph(problem.workload)), task_graph(workload)
    orders = with_links(graph, made if problem.reduction is None else problem.reduction.from_reduced(made))
    return LoopedOrders(graph, orders, earliest_starts(graph, orders), None)


def _row(
    name: str,
    classic: Classic,
    problem: OneMicrobatch,
    recompute: Again,
    bound_ns: int,
    memory: Sequence[int | None],
) -> ComparisonRow | None:
    """None where a very long run has no round to be repeated."""
    given = problem.workload if problem.reduction is None else problem.reduction.workload
    run = defined_run(classic, given)
    if run is None:
        return None
    graph, orders = run.graph, run.orders
    graph = graph.summed_best(run.starts, 0 if run.loop is None else run.loop.skipped_ns)
    figures, over = rates(graph, orders, run.starts, run.loop), overflow(graph, orders, memory, run.loop)
    tail = figures.tail
    return ComparisonRow(
        name,
        problem.workload.placement,
        given.num_microbatches,
        given.microbatch_size,
        problem.workload.splits_backward,
        recompute,
        max(stage.replicas for stage in given.stages),
        given.samples_per_replica,
        over is None,
        figures.makespan_ns,
        figures.iteration_ns,
        figures.bubble_rate,
        figures.bubble_rate_span,
        tuple(each.peak_bytes for each in peak_memory(graph, orders, run.loop)),
        bound_ns,
        tail.exposed_reduction_ns,
        tail.exposed_step_ns,
        tail.exposed_gather_ns,
        "" if over is None else str(over),
        **_stands(given),
        varied=problem.workload.splits_backward != classic.splits,
    )
