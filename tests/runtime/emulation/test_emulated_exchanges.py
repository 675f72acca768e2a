"""A network that follows a program, as a rank that emulates has it: every action starts when the plan has it start."""

from __future__ import annotations

import pytest

from builders.sharded import sharded_plan
from pipeplan.runtime.executor.rank_program import planned_programs
from pipeplan.workload.kinds import Role
from pipeplan.workload.program_network import ProgramNetwork


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("stretch", [1, 10])
def test_networks_let_actions_start_when_the_plan_does(rank: int, stretch: int) -> None:
    """In a time in which the rank is never late, from a step's beginning at 7 ns on."""
    plan = sharded_plan()
    network = ProgramNetwork(plan.stages, plan.programs[rank], lambda ns: stretch * ns)
    network.restart(7)
    free = 0
    steps = [
        step
        for step in planned_programs(plan)[rank].steps
        if step.message is None and step.action.role is not Role.STATE
    ]
    waited = 0
    for step in steps:
        operation, number = plan.operation(step.action.operation), step.action.microbatch
        inputs = [
            plan.starts_ns[each.source][number] + plan.operation(each.source).duration_ns + each.lag_ns
            for each in plan.dependencies
            if each.target == operation.id
        ]
        ready, exchanged = max([free, *inputs]), network.exchange(step.counter, step.action)
        start = plan.starts_ns[operation.id][number]
        assert 7 + stretch * start == max(7 + stretch * ready, exchanged)
        waited += exchanged > 7 + stretch * ready
        network.begin(step.action, 7 + stretch * start)
        free = start + operation.duration_ns
    assert waited, "some action waits for the network"
    assert len(steps) == 6
    assert len(plan.programs[rank]) > 18
