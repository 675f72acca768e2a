"""One cell of the grid: a placement with sizes and recomputation, under every built-in rule (FlexPipe, section 6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipeplan.errors import InfeasibleError, PipeplanError, UsageError
from pipeplan.model.workload import Workload
from pipeplan.planner.candidates import Candidate, Choice, placed
from pipeplan.planner.mapping import may_move, on_cluster
from pipeplan.planner.request import Request
from pipeplan.planner.trials import Trial, workloads
from pipeplan.report.tuning import Row
from pipeplan.schedule.bounds import makespan_bound
from pipeplan.schedule.problem import Problem
from pipeplan.schedule.reduction import device_groups
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.rules.engine import schedule_by_rules
from pipeplan.schedule.rules.joining import Joined
from pipeplan.schedule.rules.separation import separate
from pipeplan.schedule.rules.sweep import built_in_rules
from pipeplan.schedule.search import Schedule, timed
from pipeplan.simulate.memory import overflow, peak_memory
from pipeplan.simulate.metrics import iteration_time, rates
from pipeplan.simulate.timing import Orders, TaskGraph, earliest_starts, task_graph

__all__ = ["Cell", "Rows", "cell_of", "rows_of", "schedule_of", "settled_cell"]

_MOST_RULES = 64
"""So many rules are tried with limits of micro-batches in flight, too; if there are more, section 6's alone."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A point of the grid, placed, and ns that no iteration of it is below.

    ``failure`` says why there is none, or why it is ``unfit`` for the memory under every schedule. Once it is
    ``settled`` its devices are chosen among the cluster's; until then the bound is one for any devices.
    """

    candidate: Candidate | None = None
    bound_ns: int = 0
    settled: bool = False
    failure: str = ""
    unfit: bool = False

    @property
    def complete(self) -> bool:
        """Whether there was time for it."""
        return self.candidate is not None or bool(self.failure)

    @property
    def error(self) -> PipeplanError:
        """The failure as it is raised."""
        return InfeasibleError(self.failure) if self.unfit else UsageError(self.failure)


@dataclass(slots=True)
class Rows:
    """What is known of a cell's rows below ``limit_ns`` (None is no limit), and whether that is all.

    ``num_failed`` sets of rules came to a stop, or their schedule does not fit.
    """

    rows: list[Row] = field(default_factory=list)
    num_failed: int = 0
    limit_ns: int | None = None
    complete: bool = False


def cell_of(request: Request, point: Choice | Candidate, stopped: Callable[[], bool]) -> Cell:
    """The cell of a point of the grid, with a bound that is quickly had; nothing where time is up."""
    if stopped():
        return Cell()
    candidate = placed(request, point)
    if not isinstance(candidate, Candidate):
        return _failed(candidate)
    movable = may_move(request, candidate)
    return _bounded(_with_free_links(request) if movable else request, candidate, closely=False)


def settled_cell(request: Request, cell: Cell, stopped: Callable[[], bool]) -> Cell:
    """The cell on devices of the cluster that are near each other, with a bound that takes longer."""
    if stopped() or cell.candidate is None:
        return Cell()
    return _bounded(request, on_cluster(request, cell.candidate) or cell.candidate, closely=True)


def _bounded(request: Request, candidate: Candidate, *, closely: bool) -> Cell:
    try:
        trial = Trial.of(request, candidate)
        problems = [Problem.of(workload) for workload in trial.ways]
    except (InfeasibleError, UsageError) as error:
        return _failed(error)
    if closely:
        trial.bounds = [max(*each) for each in zip(trial.bounds, map(makespan_bound, problems), strict=True)]
    return Cell(candidate, trial.bound_ns, settled=closely)


def _failed(error: PipeplanError) -> Cell:
    return Cell(failure=str(error), unfit=isinstance(error, InfeasibleError))


def _with_free_links(request: Request) -> Request:
    """Messages take no time, and every device has the memory of the largest: whatever the devices, no better is had."""
    limits = [limit for limit in request.memory if limit is not None]
    most = max(limits) if len(limits) == request.num_devices else None
    return replace(request, cluster=None, memory_bytes=most)


def rows_of(request: Request, asked: tuple[Cell, int | None], stopped: Callable[[], bool]) -> Rows:
    """A row for every set of rules, or for those there was time for; ``asked`` is a cell, and a limit in ns or None.

    Rules that give the same orders share a row, which has the name of the simplest. To separate gradients takes longer
    than to run rules: it is left out for orders that then could not become the cell's best, or stay below the limit.
    """
    cell, limit_ns = asked
    assert cell.candidate is not None
    found = _Finding(Rows(limit_ns=limit_ns, complete=True))
    runner: _Runner | None = None
    for workload in reversed(workloads(request, cell.candidate)):
        runner = _Runner.of(workload) if runner is None else _Runner.of(workload).sharing(runner)
        if not found.look(runner, _blank(cell.candidate, workload), stopped):
            return replace(found.rows, complete=False)
    return found.rows


@dataclass(slots=True)
class _Finding:
    """The rows of a cell as they are found."""

    rows: Rows

    def look(self, runner: _Runner, blank: Row, stopped: Callable[[], bool]) -> bool:
        """Find the rows of a workload; whether there was time for all."""
        ordered: dict[_Orders, Rules] = {}
        for rules in runner.rules:
            if stopped():
                return False
            orders = runner.orders(rules)
            if orders is None:
                self.rows.num_failed += 1
            else:
                ordered.setdefault(orders, rules)
        for orders, rules in sorted(ordered.items(), key=lambda pair: runner.bound_ns(pair[0])):
            if stopped():
                return False
            if runner.joined is None or runner.bound_ns(orders) < self._best_ns:
                self._add(blank, runner.schedule(rules, orders), rules)
        return True

    @property
    def _best_ns(self) -> float:
        limit = math.inf if self.rows.limit_ns is None else self.rows.limit_ns
        return min([limit, *(row.iteration_ns for row in self.rows.rows)])

    def _add(self, blank: Row, schedule: Schedule | None, rules: Rules) -> None:
        if schedule is None:
            self.rows.num_failed += 1
            return
        figures = rates(schedule.graph, schedule.orders, schedule.starts)
        row = replace(
            blank,
            rules=rules.name,
            iteration_ns=iteration_time(schedule.workload, figures),
            makespan_ns=figures.makespan_ns,
            bubble_rate=figures.bubble_rate,
            peak_memory_bytes=max(memory.peak_bytes for memory in peak_memory(schedule.graph, schedule.orders)),
        )
        self.rows.rows.append(row)


def schedule_of(request: Request, candidate: Candidate, row: Row) -> Schedule:
    """The schedule of one of a cell's rows, made again."""
    for workload in workloads(request, candidate):
        if _is_split(workload) == row.separated:
            runner = _Runner.of(workload)
            rules = next(rules for rules in runner.rules if rules.name == row.rules)
            orders = runner.orders(rules)
            schedule = None if orders is None else runner.schedule(rules, orders)
            assert schedule is not None
            return schedule
    raise AssertionError("a row is of one of its cell's workloads")


_Orders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Runner:
    """A workload, its rules and graph; where backward is split, ``joined`` is the graph that the rules see.

    ``plain`` [name of rules] are the orders of the graph that the rules see, found so far, without regard to memory.
    """

    workload: Workload
    problem: Problem
    graph: TaskGraph
    joined: Joined | None
    rules: tuple[Rules, ...]
    plain: dict[str, Orders | None]

    @classmethod
    def of(cls, workload: Workload) -> _Runner:
        problem = Problem.of(workload)
        graph = task_graph(problem.workload)
        rules = built_in_rules(problem.workload)
        if len(rules) > _MOST_RULES:
            rules = built_in_rules(problem.workload, limits=(None,))
        return cls(workload, problem, graph, Joined.of(graph) if _is_split(workload) else None, tuple(rules), {})

    @property
    def seen(self) -> TaskGraph:
        """The graph that the rules see: backwards are whole."""
        return self.graph if self.joined is None else self.joined.graph

    def sharing(self, other: _Runner) -> _Runner:
        """The same with what is known of another way to run backward, if to the rules there is no difference."""
        alike = self.seen.offsets == other.seen.offsets and self.seen.durations == other.seen.durations
        return replace(self, plain=other.plain) if alike else self

    def orders(self, rules: Rules) -> _Orders | None:
        """The orders of the rules, W right behind I; None if they come to a stop, or do not fit.

        Forwards are held back for memory only where it would be too little.
        """
        if rules.name not in self.plain:
            self.plain[rules.name] = self._run(rules.but(separate=False, fit_memory=False))
        orders = self._apart(self.plain[rules.name])
        if orders is not None and overflow(self.graph, orders) is not None:
            orders = self._apart(self._run(rules.but(separate=False, fit_memory=True)))
        return orders

    def _run(self, rules: Rules) -> Orders | None:
        try:
            return schedule_by_rules(self.seen, rules)
        except (InfeasibleError, UsageError):
            return None

    def _apart(self, orders: Orders | None) -> _Orders | None:
        if orders is None:
            return None
        return tuple(map(tuple, orders if self.joined is None else self.joined.apart(orders)))

    def bound_ns(self, orders: Orders) -> int:
        """No schedule with these orders of forwards and input gradients is shorter, wherever weight gradients go."""
        operations = self.graph.workload.operations
        free: list[list[int]] = [[] for _ in self.graph.workload.links]
        weights = {number for number, operation in enumerate(operations) if operation.kind == "W"}
        bare = [[task for task in order if self.graph.operation_of[task] not in weights] for order in orders]
        starts = earliest_starts(self.graph, [*bare, *free])
        ends = map(sum, zip(starts, self.graph.durations, strict=True))
        worked = (
            min(starts[task] for task in order) + sum(self.graph.durations[task] for task in order)
            for order in orders
            if order
        )
        return max(*ends, *worked)

    def schedule(self, rules: Rules, orders: Orders) -> Schedule | None:
        """The schedule of orders, gradients separated; None if it does not fit."""
        final: Orders = orders if self.joined is None else separate(self.graph, orders)
        return timed(self.problem, self.workload, final, f"rules: {rules.name}")


def _blank(candidate: Candidate, workload: Workload) -> Row:
    replicas = max(stage.replicas for stage in candidate.placement.stages)
    return Row(
        depth=len(set(device_groups(workload))),
        replicas=replicas,
        microbatch_size=candidate.batch.microbatch_size // replicas,
        num_microbatches=candidate.batch.num_microbatches,
        placement=candidate.placement.strategy,
        recompute=candidate.recompute,
        separated=_is_split(workload),
    )


def _is_split(workload: Workload) -> bool:
    return any(operation.kind == "W" for operation in workload.operations)
