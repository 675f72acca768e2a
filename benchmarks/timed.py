"""How fast pipeplan's search gets somewhere, and whether orders from anywhere make a valid plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.checker import check
from pipeplan.planning.build_plan import assemble
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import search_schedule
from pipeplan.schedule.state import Schedule
from pipeplan.workload.bounds import period_bound, strong_iteration_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph
from pipeplan.workload.workload import Workload

__all__ = ["Timed", "makespan_of", "timed_search"]


@dataclass(frozen=True, slots=True)
class Timed:
    """What a search found, the seconds up to its shortest schedule, and up to one within the target, None if never."""

    schedule: Schedule
    best_seconds: float
    target_seconds: float | None


def timed_search(workload: Workload, limit: float, target: int, *, seed: int = 0, stop: bool = False) -> Timed:
    """Search for ``limit`` seconds, or with ``stop`` until a schedule takes at most ``target`` ns."""
    budget = Budget(limit, seed)
    heard: list[tuple[int, float]] = []

    def hear(what: str, makespan: int, bound: int, seconds: float) -> None:
        if not heard or makespan < heard[-1][0]:
            heard.append((makespan, seconds))
        if stop and makespan <= target:
            budget.interrupt()

    schedule = search_schedule(workload, budget, progress=hear)
    makespan_of(schedule.graph, schedule.orders)
    reached = [seconds for makespan, seconds in heard if makespan <= target]
    best = next(seconds for makespan, seconds in heard if makespan <= schedule.makespan_ns)
    return Timed(schedule, best, reached[0] if schedule.makespan_ns <= target else None)


def makespan_of(graph: TaskGraph, orders: Sequence[Sequence[int]]) -> int:
    """The makespan in ns of a workload in these orders, by pipeplan's own clock, once the plan has passed the check.

    Raises:
        InvalidPlanError: the orders wait for each other, or the plan is not valid.
    """
    problem = OneMicrobatch.of(graph.workload)
    plan = assemble(graph, orders, strong_iteration_bound(problem), period_bound(problem), "benchmark")
    check(plan).require("the plan of these orders")
    return plan.predicted.makespan_ns
