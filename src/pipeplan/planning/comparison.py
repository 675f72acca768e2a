"""Every known schedule for one model and its memory, beside what the search finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pipeplan.costs.throughput import Throughput, Yardstick
from pipeplan.errors import InfeasibleError, InvalidPlanError, SearchTimeoutError, UsageError
from pipeplan.files import Placement
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.bounds import request_bound
from pipeplan.planning.build_plan import Result
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.request import Request, link_notes
from pipeplan.planning.steps import search_plan
from pipeplan.planning.trials import workloads
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.state import Progress
from pipeplan.simulator.metrics import iteration_time, rates
from pipeplan.time_limit import Limit
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import overflow, peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph

OURS = "pipeplan"
"""The name of the search's own row."""


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A schedule on a placement: times in ns, memory in bytes per device; an iteration ends with sums over replicas.

    ``replicas`` are the most of a stage, ``samples_per_replica`` the least and most that one has of a micro-batch;
    ``lower_bound_ns`` is of the placement and its memory, whichever way backward runs, so that gaps of its rows
    compare; ``why`` says by how much a schedule does not fit, else it is empty.
    """

    schedule: str
    placement: str
    split_backward: bool
    recompute: bool
    replicas: int
    samples_per_replica: tuple[int, int]
    fits: bool
    makespan_ns: int
    iteration_ns: int
    bubble_rate: float
    bubble_rate_span: float
    peak_memory_bytes: tuple[int, ...]
    lower_bound_ns: int
    why: str = ""

    @property
    def gap(self) -> float | None:
        """How far above the bound; None where it does not fit, since the bound is for the memory there is."""
        return self.makespan_ns / self.lower_bound_ns - 1 if self.fits else None


@dataclass(frozen=True, slots=True)
class NotThere:
    """A schedule that does not apply to a placement, or (``schedule`` None) one on which nothing is possible."""

    schedule: str | None
    placement: str
    why: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows best first, those that fit before those that do not; and what there is none for.

    ``yardstick`` says what a sample is, ``notes`` what is free.
    """

    name: str
    num_devices: int
    num_microbatches: int
    microbatch_size: int
    memory_bytes: tuple[int | None, ...]
    rows: tuple[ComparisonRow, ...]
    missing: tuple[NotThere, ...]
    interrupted: bool
    yardstick: Yardstick
    notes: tuple[str, ...] = ()

    def throughput(self, row: ComparisonRow) -> Throughput:
        """Of a row's iteration."""
        return self.yardstick.throughput(
            self.num_microbatches * self.microbatch_size, row.iteration_ns, self.num_devices
        )

    def figures(self) -> dict[str, object]:
        """The object of ``compare --json``."""
        return {
            "name": self.name,
            "num_devices": self.num_devices,
            "num_microbatches": self.num_microbatches,
            "microbatch_size": self.microbatch_size,
            "memory_bytes": list(self.memory_bytes),
            "rows": [
                asdict(row) | {"applies": True, "gap": row.gap} | self.throughput(row).figures() for row in self.rows
            ],
            "not_applicable": [asdict(missing) | {"applies": False} for missing in self.missing],
            "interrupted": self.interrupted,
            "notes": list(self.notes),
        }


def compare(request: Request, *, progress: Progress | None = None, within: Limit | None = None) -> Comparison:
    """Time every classic schedule on the request's placement, or on every strategy's, and search one there.

    Raises:
        InfeasibleError: nothing fits on any placement.
        KeyboardInterrupt: interrupted before there was anything to show.
        SearchTimeoutError: no time to find what fits on any placement.
        UsageError: no placement is possible.
    """
    placements = list(STRATEGIES) if request.placement == "auto" else [request.placement]
    return compare_on(placements, request, progress, within)


def compare_on(
    placements: Sequence[Placement | str],
    request: Request,
    progress: Progress | None = None,
    within: Limit | None = None,
) -> Comparison:
    """The same on each of some placements.

    The time limit, which ends with ``within``, is shared between them, and on each between the search and the classic
    schedules. When it is up, or at Ctrl-C, what is known is the answer, and what was not reached is said to be missing.
    """
    rows = _RowsSoFar(request, Budget(request.time_limit, deterministic=request.deterministic, whole=within))
    with rows.limit.hearing_interrupts():
        for index, wanted in enumerate(placements):
            name = wanted if isinstance(wanted, str) else wanted.strategy
            if rows.limit.interrupted or (rows.some and rows.limit.over):
                rows.add_failure(name, SearchTimeoutError("there was no time for it; raise --time-limit"))
                continue
            left = len(placements) - index
            chunked = isinstance(wanted, str) and STRATEGIES[wanted].chunked
            share, begun = rows.seconds_left / left, rows.limit.elapsed
            asked = replace(
                request,
                placement=wanted,
                chunks=request.chunks if len(placements) == 1 or chunked else None,
                sizes=(),
                time_limit=share if request.deterministic else share * _SEARCHING,
            )
            try:
                found = search_plan(asked, progress=rows.listen(progress), within=rows.limit)
            except KeyboardInterrupt:
                rows.limit.interrupt()
            except (InfeasibleError, SearchTimeoutError, UsageError) as error:
                rows.add_failure(name, error)
            else:
                rows.add(found, math.inf if request.deterministic else begun + share - rows.limit.elapsed)
    return rows.comparison()


_LAST_SECONDS = 0.5
"""For timing the classic schedules of a placement whose search was interrupted."""

_SEARCHING = 0.8
"""The part of a placement's time that the search has; the rest is for timing the classic schedules there."""


_Failure = InfeasibleError | SearchTimeoutError | UsageError


class _RowsSoFar:
    """What the comparison knows so far, placement after placement, so that an interruption leaves it whole."""

    def __init__(self, request: Request, limit: Budget) -> None:
        self._request = request
        self.limit = limit
        self._rows: list[ComparisonRow] = []
        self._missing: list[NotThere] = []
        self._failures: list[_Failure] = []
        self._limits: tuple[int | None, ...] = ()
        self._seconds = 0.0
        self._best_ns: int | None = None
        self._bound: int | None = None

    @property
    def some(self) -> bool:
        """Whether there is a row."""
        return bool(self._rows)

    @property
    def seconds_left(self) -> float:
        """Time for the searches to come; none after an interruption."""
        limit = self._request.time_limit
        return max(0.0, limit - self._seconds) if self._request.deterministic else min(limit, self.limit.remaining)

    def listen(self, progress: Progress | None) -> Progress | None:
        """What a search calls: the best and the bound that are said are those of all placements."""
        if progress is None:
            return None
        best = self._best_ns
        if best is not None and self._bound is None and self._request.placement == "auto":
            self._bound = request_bound(self._request)
        bound = self._bound

        def heard(what: str, best_ns: int, bound_ns: int, seconds: float) -> None:
            least = best_ns if best is None or not best_ns else min(best, best_ns)
            progress(what, least, min(least, bound_ns if bound is None else bound), self._seconds + seconds)

        return heard

    def add(self, result: Result, seconds: float = math.inf) -> None:
        """The search's row, and those of the classic schedules on its placement that are timed in so many seconds."""
        self._seconds += result.seconds
        iteration = result.plan.predicted.iteration_ns
        self._best_ns = iteration if self._best_ns is None else min(self._best_ns, iteration)
        self._limits = tuple(device.memory_bytes for device in result.plan.devices)
        recompute = any(stage.recompute for stage in result.plan.stages)
        ours = _ours(result, recompute)
        self._rows.append(ours)
        placement = result.plan.placed.whole
        placed = replace(
            self._request, placement=placement, num_devices=len(result.plan.devices), chunks=None, sizes=()
        )
        candidate = PlacementCandidate(placement, placed.batch, recompute, "compared")
        left = dict.fromkeys(CLASSIC, "there was no time for it; raise --time-limit")
        limit = Limit(_LAST_SECONDS) if self.limit.interrupted else Limit(seconds, whole=self.limit)
        with limit.ended():
            problems = [OneMicrobatch.of(workload) for workload in workloads(placed, candidate)]
            for name in CLASSIC:
                rows, left[name] = _classic(name, problems, recompute, ours.lower_bound_ns)
                self._rows += rows
                if rows:
                    del left[name]
        if limit.interrupted:
            self.limit.interrupt()
        self._missing += [NotThere(name, ours.placement, reason) for name, reason in left.items()]

    def add_failure(self, placement: str, error: _Failure) -> None:
        """A placement on which nothing is possible."""
        self._failures.append(error)
        self._missing.append(NotThere(None, placement, str(error)))

    def comparison(self) -> Comparison:
        """All of it, best first; without any row, the first reason raised."""
        if not self._rows:
            raise KeyboardInterrupt if self.limit.interrupted else self._failures[0]
        request = self._request
        return Comparison(
            request.profile.name,
            request.num_devices,
            request.batch.num_microbatches,
            request.batch.microbatch_size,
            self._limits,
            tuple(sorted(self._rows, key=_rank)),
            tuple(self._missing),
            self.limit.interrupted,
            Yardstick.of(request.profile),
            tuple(link_notes(request)),
        )


def _rank(row: ComparisonRow) -> tuple[bool, int, bool, int]:
    """What fits comes first, then the shortest, ours before its equals, then the least memory."""
    return not row.fits, row.iteration_ns, row.schedule != OURS, max(row.peak_memory_bytes)


def _ours(result: Result, recompute: bool) -> ComparisonRow:
    plan, predicted = result.plan, result.plan.predicted
    return ComparisonRow(
        OURS,
        plan.placement,
        result.schedule.workload.splits_backward,
        recompute,
        max(stage.replicas for stage in plan.stages),
        plan.workload.samples_per_replica,
        True,
        predicted.makespan_ns,
        predicted.iteration_ns,
        predicted.bubble_rate,
        predicted.bubble_rate_span,
        tuple(memory.peak_bytes for memory in predicted.memory),
        predicted.lower_bound_ns,
    )


def _classic(
    name: str, problems: Sequence[OneMicrobatch], recompute: bool, bound_ns: int
) -> tuple[list[ComparisonRow], str]:
    """A classic schedule's rows over the ways of running backward, and why it has none where it has none."""
    rows: list[ComparisonRow] = []
    reasons: list[str] = []
    for problem in problems:
        reason = CLASSIC[name].applies(problem)
        if reason is not None:
            reasons.append(reason)
            continue
        try:
            rows.append(_row(name, problem, recompute, bound_ns))
        except InvalidPlanError as error:
            reasons.append(f"its actions would wait for each other: {error}")
    return _better(rows), next(iter(reasons), "")


def _better(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The shortest of the rows that fit, and the shortest of those that do not."""
    kinds = [[row for row in rows if row.fits is fits] for fits in (True, False)]
    return [min(kind, key=lambda row: row.iteration_ns) for kind in kinds if kind]


def _row(name: str, problem: OneMicrobatch, recompute: bool, bound_ns: int) -> ComparisonRow:
    made = CLASSIC[name].orders(problem, task_graph(problem.workload))
    given = problem.workload if problem.reduction is None else problem.reduction.workload
    graph = task_graph(given)
    orders = with_links(graph, made if problem.reduction is None else problem.reduction.from_reduced(made))
    starts = earliest_starts(graph, orders)
    figures, over = rates(graph, orders, starts), overflow(graph, orders)
    return ComparisonRow(
        name,
        problem.workload.placement,
        problem.workload.splits_backward,
        recompute,
        max(stage.replicas for stage in given.stages),
        given.samples_per_replica,
        over is None,
        figures.makespan_ns,
        iteration_time(given, figures),
        figures.bubble_rate,
        figures.bubble_rate_span,
        tuple(memory.peak_bytes for memory in peak_memory(graph, orders)),
        bound_ns,
        "" if over is None else str(over),
    )
