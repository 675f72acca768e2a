"""A rank that emulates follows a program's exchanges: every action starts, or goes on inside, when the plan has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from builders.loops import steps_of
from builders.sharded import Pair, long_plan, random_plan
from pipeplan.files import Plan
from pipeplan.runtime.emulation.devices import EmulatedRunner, _stamped, specs_of
from pipeplan.runtime.emulation.emulate import _NO_SAMPLES
from pipeplan.runtime.executor.message_graph import hops_of
from pipeplan.runtime.executor.rank_program import ProgramStep, planned_programs
from pipeplan.workload.action import StateAction
from pipeplan.workload.elements import ONCE
from pipeplan.workload.kinds import Role
from pipeplan.workload.program_network import ProgramNetwork


@dataclass
class Exact:
    """The time of a device, and of others that agree with it, which is never late."""

    stretch: int
    free: int = 7

    def free_ns(self) -> int:
        return self.free

    def until(self, end_ns: int) -> None:
        self.free = end_ns

    def stretched(self, ns: int) -> int:
        return self.stretch * ns

    def latest(self, ns: int) -> int:
        return ns


def arrivals(plan: Plan, step: ProgramStep) -> list[int]:
    """When the plan has what a step waits for."""
    return [
        plan.starts_ns[each.source][step.action.microbatch]
        + source.duration_ns
        - source.left_ns(each.source_part)
        + each.lag_ns
        for each in plan.dependencies
        if each.target == step.action.operation and each.target_part == (step.part or 0)
        for source in [plan.operation(each.source)]
    ]


@pytest.mark.parametrize("stretch", [1, 10])
@pytest.mark.parametrize("late", [False, True])
def test_actions_start_and_end_when_the_plan_has_it(late: bool, stretch: int) -> None:
    """Of random plans, in a time in which no rank is ever late, from a step's beginning at 7 ns on."""
    waited = inside = 0
    for seed in range(12):
        more = assert_as_planned(random_plan(seed, late=late)[0], stretch)
        waited, inside = waited + more[0], inside + more[1]
    assert waited > 50, "for the network"
    assert (inside > 10) == late


@pytest.mark.parametrize(
    ("every", "last_every", "split", "late"),
    [((1, 1), (2, 2), False, False), ((4, 1), (ONCE, ONCE), True, False), ((2, 1), (1, 2), False, True)],
)
def test_so_they_do_in_each_copy_of_a_round(every: Pair, last_every: Pair, split: bool, late: bool) -> None:
    """Ranks run a loop's exchanges as they are written: what they keep does not grow with the micro-batches."""
    plan = long_plan(every, last_every, split=split, late=late)
    waited, _ = assert_as_planned(plan, stretch=1)
    assert waited > 50


def assert_as_planned(plan: Plan, stretch: int) -> tuple[int, int]:
    """How many actions of all ranks waited for an exchange, and how many parts of them for a message inside."""
    whole = plan.unrolled()
    programs, hops = planned_programs(plan), hops_of(plan)
    waited = inside = 0
    for program in programs:
        pace = Exact(stretch)
        known: Any = pace
        network = ProgramNetwork(plan.stages, pace.stretched)
        network.restart(7)
        specs = specs_of(programs, hops, 1024)
        runner = EmulatedRunner(plan, program.tensors, specs, known, known, network)
        for step in steps_of(program):
            if step.action.role is Role.STATE:
                network.ask(StateAction(step.action.stage, step.action.kind, step.action.part))
            elif step.message is None:
                there = [7 + stretch * each for each in arrivals(whole, step)]
                begun = max(pace.free, *there, 0)
                inside += bool(step.part) and begun > pace.free
                runner.run(step, {(0,): [("rows", _stamped((1, 2), each)) for each in there]}, _NO_SAMPLES)
                waited += assert_in_time(whole, step, begun, pace)
    return waited, inside


def assert_in_time(plan: Plan, step: ProgramStep, begun: int, pace: Exact) -> bool:
    """Each part ends no later than planned, the last one not sooner; says whether it waited for an exchange."""
    operation, part = plan.operation(step.action.operation), step.part or 0
    took = operation.parts_ns[part] if operation.parts_ns else operation.duration_ns
    start = plan.starts_ns[operation.id][step.action.microbatch]
    end = 7 + pace.stretch * (start + operation.begin_ns(part) + took)
    assert pace.free == end if step.part is None or step.is_last else pace.free <= end
    return pace.free > begun + pace.stretch * took
