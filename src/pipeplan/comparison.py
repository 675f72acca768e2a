"""Every known schedule for one model and its memory, beside what the search finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeplan.errors import InfeasibleError, InvalidPlanError, SearchTimeoutError, UsageError
from pipeplan.model import Cluster, Placement, Profile
from pipeplan.partition import STRATEGIES
from pipeplan.planner import Batch, Candidate, Options, Request, Result, search_plan, workloads
from pipeplan.report.comparison import OURS, Comparison, NotThere, Row
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.problem import Problem
from pipeplan.schedule.search import Progress
from pipeplan.simulate.memory import overflow, peak_memory
from pipeplan.simulate.metrics import rates
from pipeplan.simulate.timing import earliest_starts, task_graph, with_links

__all__ = ["compare"]


def compare(
    profile: Profile,
    placements: Sequence[Placement | str],
    batch: Batch,
    options: Options,
    *,
    num_devices: int,
    chunks: int | None = None,
    cluster: Cluster | None = None,
    memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Time every classic schedule on each of the placements, and search one there.

    The time limit is shared between the placements. An interruption ends the search or the timing under way; on
    the placements after it the search only has its start, and the classic schedules are still timed.

    Raises:
        InfeasibleError: nothing fits on any placement.
        KeyboardInterrupt: interrupted before there was anything to show.
        SearchTimeoutError: no time to find what fits on any placement.
        UsageError: no placement is possible.
    """
    found = _Found(profile, batch, options, cluster, memory_bytes)
    for index, wanted in enumerate(placements):
        try:
            result = search_plan(
                profile,
                wanted,
                batch,
                replace(options, time_limit=found.seconds_left / (len(placements) - index)),
                num_devices=num_devices,
                chunks=chunks if len(placements) == 1 or _has_chunks(wanted) else None,
                cluster=cluster,
                memory_bytes=memory_bytes,
                progress=progress,
            )
            found.add(result)
        except KeyboardInterrupt:
            found.interrupted = True
        except (InfeasibleError, SearchTimeoutError, UsageError) as error:
            found.add_failure(wanted if isinstance(wanted, str) else wanted.strategy, error)
    return found.comparison(num_devices)


def _has_chunks(wanted: Placement | str) -> bool:
    """Whether it takes a number of stages per device."""
    return isinstance(wanted, str) and STRATEGIES[wanted].chunked


_Failure = InfeasibleError | SearchTimeoutError | UsageError


class _Found:
    """What the comparison knows so far, placement after placement, so that an interruption leaves it whole."""

    def __init__(
        self, profile: Profile, batch: Batch, options: Options, cluster: Cluster | None, memory_bytes: int | None
    ) -> None:
        self._profile, self._batch, self._options = profile, batch, options
        self._cluster, self._memory_bytes = cluster, memory_bytes
        self._rows: list[Row] = []
        self._missing: list[NotThere] = []
        self._failures: list[_Failure] = []
        self._limits: tuple[int | None, ...] = ()
        self._seconds = 0.0
        self.interrupted = False

    @property
    def seconds_left(self) -> float:
        """Time for the searches to come; none after an interruption."""
        return 0.0 if self.interrupted else max(0.0, self._options.time_limit - self._seconds)

    def add(self, result: Result) -> None:
        """The search's row, and those of the classic schedules on its placement."""
        self.interrupted = self.interrupted or result.interrupted
        self._seconds += result.seconds
        self._limits = tuple(device.memory_bytes for device in result.plan.devices)
        recompute = any(stage.recompute for stage in result.plan.stages)
        ours = _ours(result, recompute)
        self._rows.append(ours)
        ways = workloads(self._request(result), Candidate(result.plan.placed, self._batch, recompute, "compared"))
        problems = [Problem.of(workload) for workload in ways]
        for name in CLASSIC:
            rows, reason = _classic(name, problems, recompute, ours.lower_bound_ns)
            self._rows += rows
            self._missing += [] if rows else [NotThere(name, ours.placement, reason)]

    def _request(self, result: Result) -> Request:
        return Request(
            self._profile,
            result.plan.placed,
            len(result.plan.devices),
            None,
            self._batch,
            (self._batch.microbatch_size,),
            self._options,
            self._cluster,
            self._memory_bytes,
            None,
        )

    def add_failure(self, placement: str, error: _Failure) -> None:
        """A placement on which nothing is possible."""
        self._failures.append(error)
        self._missing.append(NotThere(None, placement, str(error)))

    def comparison(self, num_devices: int) -> Comparison:
        """All of it, best first; without any row, the first reason raised."""
        if not self._rows:
            raise self._failures[0] if self._failures else KeyboardInterrupt
        return Comparison(
            self._profile.name,
            num_devices,
            self._batch.num_microbatches,
            self._batch.microbatch_size,
            self._limits,
            tuple(sorted(self._rows, key=_rank)),
            tuple(self._missing),
            self.interrupted,
        )


def _rank(row: Row) -> tuple[bool, int, bool, int]:
    """What fits comes first, then the shortest, ours before its equals, then the least memory."""
    return not row.fits, row.makespan_ns, row.schedule != OURS, max(row.peak_memory_bytes)


def _ours(result: Result, recompute: bool) -> Row:
    plan, predicted = result.plan, result.plan.predicted
    return Row(
        OURS,
        plan.placement,
        any(operation.kind == "I" for operation in plan.operations),
        recompute,
        True,
        predicted.makespan_ns,
        predicted.bubble_rate,
        predicted.bubble_rate_span,
        tuple(memory.peak_bytes for memory in predicted.memory),
        predicted.lower_bound_ns,
    )


def _classic(name: str, problems: Sequence[Problem], recompute: bool, bound_ns: int) -> tuple[list[Row], str]:
    """A classic schedule's rows over the ways of running backward, and why it has none where it has none."""
    rows: list[Row] = []
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


def _better(rows: Sequence[Row]) -> list[Row]:
    """The shortest of the rows that fit, and the shortest of those that do not."""
    kinds = [[row for row in rows if row.fits is fits] for fits in (True, False)]
    return [min(kind, key=lambda row: row.makespan_ns) for kind in kinds if kind]


def _row(name: str, problem: Problem, recompute: bool, bound_ns: int) -> Row:
    made = CLASSIC[name].orders(problem, task_graph(problem.workload))
    given = problem.workload if problem.reduction is None else problem.reduction.workload
    graph = task_graph(given)
    orders = with_links(graph, made if problem.reduction is None else problem.reduction.from_reduced(made))
    starts = earliest_starts(graph, orders)
    figures, over = rates(graph, orders, starts), overflow(graph, orders)
    return Row(
        name,
        problem.workload.placement,
        "I" in problem.kinds,
        recompute,
        over is None,
        figures.makespan_ns,
        figures.bubble_rate,
        figures.bubble_rate_span,
        tuple(memory.peak_bytes for memory in peak_memory(graph, orders)),
        bound_ns,
        "" if over is None else str(over),
    )
