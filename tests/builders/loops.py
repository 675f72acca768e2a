"""Schedules of few micro-batches, made longer by a loop, and their plans."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from pipeplan.files import Plan
from pipeplan.planning.build_plan import assemble
from pipeplan.runtime.executor.rank_program import Program, ProgramStep
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.pattern import microbatch_by_microbatch
from pipeplan.schedule.search import timed
from pipeplan.schedule.state import Schedule
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.loop import LoopedOrders
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload

SHORTER = ShorterRun()


def known(workload: Workload) -> Iterator[Schedule]:
    """Classic schedules, and one micro-batch after another."""
    problem = OneMicrobatch.of(workload, require_room=False)
    graph = task_graph(problem.workload)
    orders = {
        name: classic.orders(problem, graph)
        for name, classic in CLASSIC.items()
        if classic.is_quick(graph.num_tasks) and classic.applies(problem) is None
    }
    for name, order in {**orders, "sequential": microbatch_by_microbatch(problem)}.items():
        found = timed(problem, task_graph(workload), order, name)
        if found is not None:
            yield found


def plan_with_loop(schedule: Schedule | LoopedOrders, scheduler: str = "any") -> Plan:
    """Its plan, as it is read from a file."""
    skipped = 0 if schedule.loop is None else schedule.loop.skipped
    workload = schedule.graph.workload
    bound = weak_iteration_bound(workload.with_microbatches(workload.num_microbatches + skipped))
    found = assemble(schedule.graph, schedule.orders, bound, Fraction(0), scheduler, loop=schedule.loop)
    return Plan.model_validate_json(found.model_dump_json())


def looped_plans(workload: Workload, few: int, many: int) -> dict[str, Plan]:
    """By what made it, each plan with a loop for ``many`` rounds of all stages, of a schedule for a ``few``."""
    each = OneMicrobatch.of(workload, require_room=False).microbatches_per_round
    short, whole = (workload.with_microbatches(each * number) for number in (few, many))
    longer = ((schedule.scheduler, SHORTER.lengthened(schedule, whole)) for schedule in known(short))
    return {name: plan_with_loop(found) for name, found in longer if found is not None and found.loop is not None}


def steps_of(program: Program) -> Iterator[ProgramStep]:
    """All that a program runs."""
    loop = program.loop
    if loop is None:
        yield from program.steps
        return
    yield from program.steps[: loop.begun]
    yield from (program.steps[turn.step].later(turn, loop) for turn in loop.turns())
