"""Every known schedule for one model and its memory, beside what the search finds."""

from __future__ import annotations

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
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.state import Progress
from pipeplan.simulator.metrics import iteration_time, rates
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import overflow, peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.loop import LoopedOrders
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


def compare(request: Request, *, progress: Progress | None = None) -> Comparison:
    """Time every classic schedule on the request's placement, or on every strategy's, and search one there.

    Raises:
        InfeasibleError: nothing fits on any placement.
        KeyboardInterrupt: interrupted before there was anything to show.
        SearchTimeoutError: no time to find what fits on any placement.
        UsageError: no placement is possible.
    """
    return compare_on(list(STRATEGIES) if request.placement == "auto" else [request.placement], request, progress)


def compare_on(placements: Sequence[Placement | str], request: Request, progress: Progress | None = None) -> Comparison:
    """The same on each of some placements.

    The time limit is shared between them. An interruption ends the search or the timing under way; on the placements
    after it the search only has its start, and the classic schedules are still timed.
    """
    rows = _RowsSoFar(request)
    for index, wanted in enumerate(placements):
        chunked = isinstance(wanted, str) and STRATEGIES[wanted].chunked
        asked = replace(
            request,
            placement=wanted,
            chunks=request.chunks if len(placements) == 1 or chunked else None,
            sizes=(),
            time_limit=rows.seconds_left / (len(placements) - index),
        )
        try:
            rows.add(search_plan(asked, progress=rows.listen(progress)))
        except KeyboardInterrupt:
            rows.interrupted = True
        except (InfeasibleError, SearchTimeoutError, UsageError) as error:
            rows.add_failure(wanted if isinstance(wanted, str) else wanted.strategy, error)
    return rows.comparison()


_Failure = InfeasibleError | SearchTimeoutError | UsageError


class _RowsSoFar:
    """What the comparison knows so far, placement after placement, so that an interruption leaves it whole."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._rows: list[ComparisonRow] = []
        self._missing: list[NotThere] = []
        self._failures: list[_Failure] = []
        self._limits: tuple[int | None, ...] = ()
        self._seconds = 0.0
        self._best_ns: int | None = None
        self._bound_ns = request_bound(request) if request.placement == "auto" else None
        self.interrupted = False

    @property
    def seconds_left(self) -> float:
        """Time for the searches to come; none after an interruption."""
        return 0.0 if self.interrupted else max(0.0, self._request.time_limit - self._seconds)

    def listen(self, progress: Progress | None) -> Progress | None:
        """What a search calls: the best and the bound that are said are those of all placements."""
        if progress is None:
            return None
        best, bound = self._best_ns, self._bound_ns

        def heard(what: str, best_ns: int, bound_ns: int, seconds: float) -> None:
            least = best_ns if best is None else min(best, best_ns)
            progress(what, least, min(least, bound_ns if bound is None else bound), self._seconds + seconds)

        return heard

    def add(self, result: Result) -> None:
        """The search's row, and those of the classic schedules on its placement."""
        self.interrupted = self.interrupted or result.interrupted
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
        problems = [OneMicrobatch.of(workload) for workload in workloads(placed, candidate)]
        for name in CLASSIC:
            rows, reason = _classic(name, problems, recompute, ours.lower_bound_ns)
            self._rows += rows
            self._missing += [] if rows else [NotThere(name, ours.placement, reason)]

    def add_failure(self, placement: str, error: _Failure) -> None:
        """A placement on which nothing is possible."""
        self._failures.append(error)
        self._missing.append(NotThere(None, placement, str(error)))

    def comparison(self) -> Comparison:
        """All of it, best first; without any row, the first reason raised."""
        if not self._rows:
            raise self._failures[0] if self._failures else KeyboardInterrupt
        request = self._request
        return Comparison(
            request.profile.name,
            request.num_devices,
            request.batch.num_microbatches,
            request.batch.microbatch_size,
            self._limits,
            tuple(sorted(self._rows, key=_rank)),
            tuple(self._missing),
            self.interrupted,
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
            row = _row(name, problem, recompute, bound_ns)
        except InvalidPlanError as error:
            reasons.append(f"its actions would wait for each other: {error}")
            continue
        if row is None:
            reasons.append(f"nothing in it repeats, and {problem.num_microbatches} micro-batches are too many without")
        else:
            rows.append(row)
    return _better(rows), next(iter(reasons), "")


def _better(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The shortest of the rows that fit, and the shortest of those that do not."""
    kinds = [[row for row in rows if row.fits is fits] for fits in (True, False)]
    return [min(kind, key=lambda row: row.iteration_ns) for kind in kinds if kind]


def _row(name: str, problem: OneMicrobatch, recompute: bool, bound_ns: int) -> ComparisonRow | None:
    """None where a very long run has no round to be repeated."""
    given = problem.workload if problem.reduction is None else problem.reduction.workload
    shorter = ShorterRun()
    short = shorter.shorter(given)
    if short is not None:
        problem = OneMicrobatch.of(short, require_room=False)
    made = CLASSIC[name].orders(problem, task_graph(problem.workload))
    graph = task_graph(short or given)
    orders = with_links(graph, made if problem.reduction is None else problem.reduction.from_reduced(made))
    run: LoopedOrders | None = LoopedOrders(graph, orders, earliest_starts(graph, orders), None)
    if short is not None:
        run = shorter.repeated(graph, orders, given.num_microbatches)
    if run is None:
        return None
    graph, orders = run.graph, run.orders
    figures, over = rates(graph, orders, run.starts, run.loop), overflow(graph, orders)
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
