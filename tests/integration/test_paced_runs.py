"""Runs in phases at the pace of the slowest stage: as soon over as without it, and the same as when written out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from builders.chains import chain_workload
from builders.loops import plan_with_loop
from pipeplan.checker import check
from pipeplan.files import Plan
from pipeplan.schedule.search import plain_look, timed
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.elements import Dependency
from pipeplan.workload.kinds import Role
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.pace import at_own_pace, paced_run, phases_of
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload


def uneven(seed: int, num_microbatches: int, *, forwards: bool, occupancy: int = 0) -> Workload:
    """A chain of stages of random times, in which quick ones come before slow ones; links that may be busy, or none."""
    drawn = random.Random(seed)
    found = chain_workload(drawn.randint(2, 5), num_microbatches, lag=3)
    operations = [replace(each, duration_ns=drawn.randint(5, 60)) for each in found.operations]
    dependencies = [*found.dependencies]
    if occupancy:
        dependencies = [
            replace(each, hops=tuple(replace(hop, occupancy_ns=occupancy, bytes=1) for hop in each.hops))
            for each in dependencies
        ]
    if forwards:
        operations = [replace(each, acquire_bytes=0) for each in operations if each.role is Role.FORWARD]
        ids = {each.id for each in operations}
        dependencies = [each for each in dependencies if {each.source, each.target} <= ids]
    return replace(found, operations=tuple(operations), dependencies=tuple(dependencies))


def as_written(workload: Workload) -> int:
    """The makespan in ns of GPipe, or of forwards alone, with nothing that keeps a pace."""
    problem = OneMicrobatch.of(workload, require_room=False)
    graph = task_graph(workload)
    orders = [list[int]() for _ in workload.devices]
    for phase in (True, False):
        for stage, operations in enumerate(problem.stage_operations):
            own = [x for x in operations if (workload.operations[x].role is Role.FORWARD) is phase]
            orders[stage] += [graph.offsets[x] + m for m in range(workload.num_microbatches) for x in own]
    found = timed(problem, graph, orders, "any")
    assert found is not None
    return found.makespan_ns


def paced(workload: Workload, most_written: int = 100_000) -> Plan | None:
    own = [int(each.role is not Role.FORWARD) for each in workload.operations]
    phases = (*own, *(own[transfer.source] for transfer in workload.transfers))
    run = paced_run(workload, phases, most_written)
    return None if run is None else plan_with_loop(run)


@pytest.mark.parametrize("forwards", [True, False])
@pytest.mark.parametrize("occupancy", [0, 70])
@pytest.mark.parametrize("seed", range(5))
def test_it_takes_no_longer_than_stages_that_run_ahead(forwards: bool, occupancy: int, seed: int) -> None:
    workload = uneven(seed, 60, forwards=forwards, occupancy=occupancy)
    plan = paced(workload)
    assert plan is not None
    assert plan.num_written < plan.num_microbatches == 60
    full = Plan.model_validate_json(plan.unrolled().model_dump_json())
    assert check(plan).problems == check(full).problems == ()
    assert simulate(plan).rates.makespan_ns == simulate(full).rates.makespan_ns == as_written(workload)


def test_what_is_written_does_not_grow_and_slower_is_shorter() -> None:
    workload = uneven(3, 10**6, forwards=True)
    whole, short = paced(workload), paced(workload, 5 * workload.entries)
    assert whole is not None
    assert short is not None
    assert whole.num_written == paced(uneven(3, 60, forwards=True)).num_written  # type: ignore[union-attr]
    assert short.num_written <= whole.num_written
    assert check(short).problems == ()
    assert simulate(short).rates.makespan_ns >= simulate(whole).rates.makespan_ns


def test_an_action_before_its_pace_and_one_after_it_are_found() -> None:
    plan = paced(uneven(4, 60, forwards=True))
    assert plan is not None
    place = next(number for number, each in enumerate(plan.operations) if each.pace_ns is not None)
    for more, rule in ((1, "inputs"), (-1, "earliest")):
        pace = plan.operations[place].pace_ns
        assert pace is not None
        operations = [*plan.operations]
        operations[place] = replace(operations[place], pace_ns=pace + more)
        damaged = plan.model_copy(update={"operations": tuple(operations)})
        assert rule in {problem.rule for problem in check(damaged).problems}


def test_a_first_look_of_a_deep_pipeline_of_forwards_is_a_paced_one() -> None:
    """Stages that become slower and slower, of which nothing repeats where each is as quick as it can."""
    found = chain_workload(40, 10**5)
    operations = [
        replace(each, duration_ns=10 + each.stage, acquire_bytes=0)
        for each in found.operations
        if each.role is Role.FORWARD
    ]
    between = [Dependency(source=f"{s}F", target=f"{s + 1}F", hops=each.hops) for s, each in _forward_edges(found)]
    workload = replace(found, operations=tuple(operations), dependencies=tuple(between))
    schedule = plain_look(workload)
    assert schedule is not None
    assert schedule.loop is not None
    assert schedule.graph.num_tasks < 20_000
    assert check(plan_with_loop(schedule)).problems == ()


def _forward_edges(workload: Workload) -> list[tuple[int, Dependency]]:
    return [
        (each.source_stage, each)
        for each in workload.dependencies
        if each.source_role is each.target_role is Role.FORWARD
    ]


def test_with_other_costs_the_pace_is_theirs() -> None:
    workload = uneven(2, 1_000, forwards=False)
    plan = paced(workload)
    assert plan is not None
    doubled = replace(
        plan.workload,
        operations=tuple(replace(each, duration_ns=2 * each.duration_ns, pace_ns=None) for each in plan.operations),
    )
    again = at_own_pace(doubled, plan.workload)
    assert [each.pace_ns for each in again.operations] == [
        None if each.pace_ns is None else 2 * each.pace_ns for each in plan.operations
    ]


def test_1f1b_is_no_run_in_phases() -> None:
    schedule = plain_look(chain_workload(4, 8))
    assert schedule is not None
    assert schedule.scheduler == "1f1b"
    assert phases_of(schedule.graph, schedule.orders) is None
