"""Rules as a source of schedules for a search: those of one set of rules, or the best of the built-in ones."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from pipeplan.errors import InfeasibleError
from pipeplan.model.workload import Workload
from pipeplan.schedule import bounds
from pipeplan.schedule.problem import Problem
from pipeplan.schedule.rules.language import Rules
from pipeplan.schedule.rules.sweep import Swept, built_in_rules, run_rules, sweep
from pipeplan.schedule.solver import Budget
from pipeplan.schedule.state import Schedule
from pipeplan.simulate.bounds import makespan_bound
from pipeplan.simulate.timing import TaskGraph, task_graph

__all__ = ["schedule_of_rules"]

_SECONDS_PER_TASK = 3e-5
"""What one set of rules costs per action where seconds are deterministic."""


def schedule_of_rules(workload: Workload, rules: Rules | None, budget: Budget) -> Schedule:
    """The schedule that rules make of a workload; without rules the shortest of those of the built-in ones.

    Raises:
        InfeasibleError: the rules get stuck, or do not fit into memory; the text names them.
        UsageError: they do not apply to the workload.
    """
    graph = task_graph(workload)
    if rules is not None:
        return _schedule(graph, run_rules(graph, rules), budget)
    tried = built_in_rules(workload)
    found = sweep(workload, _while_there_is_time(tried, budget, graph.num_tasks), graph=graph)
    if not found:
        raise InfeasibleError(
            f"none of the {len(tried)} built-in rules makes a schedule that fits into memory; raise --memory, lower "
            "--microbatch-size, or let --scheduler auto search"
        )
    return _schedule(graph, found[0], budget)


def _while_there_is_time(tried: list[Rules], budget: Budget, num_tasks: int) -> Iterator[Rules]:
    """The rules one by one, the first in any case."""
    for number, rules in enumerate(tried):
        if number and budget.expired:
            return
        yield rules
        budget.charge(num_tasks * _SECONDS_PER_TASK)


def _schedule(graph: TaskGraph, swept: Swept, budget: Budget) -> Schedule:
    bound = min(swept.makespan_ns, _bound(graph.workload))
    return Schedule(
        graph.workload,
        graph,
        swept.orders,
        swept.starts,
        swept.makespan_ns,
        bound,
        f"rules: {swept.rules.name}",
        None,
        Fraction(0),
        None,
        budget.elapsed,
        budget.interrupted,
    )


def _bound(workload: Workload) -> int:
    """Ns that no schedule is below: the searches' own bound, which is proved for forwards and backwards of whole
    micro-batches; work and dependencies alone where there are instructions or parts."""
    plain = makespan_bound(workload)
    if workload.instructions or any(slots.num_parted for slots in workload.slots):
        return plain
    return max(plain, bounds.makespan_bound(Problem.of(workload, require_room=False)))
