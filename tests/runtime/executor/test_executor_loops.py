"""Plans with a loop run as those that are written out: the same steps, one after another, and the same gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from builders.drawn import Placed, placed, stage_graphs
from builders.loops import looped_plans, steps_of
from builders.shapes import shape_workload
from pipeplan.checker import check
from pipeplan.errors import UsageError
from pipeplan.files import PlacedStage, Plan
from pipeplan.runtime.executor.rank_program import planned_programs
from pipeplan.runtime.models.load import load_model
from pipeplan.workload.kinds import GRADIENT_ROLES
from runtime_support.models import branches
from runtime_support.plans import placed_plan
from runtime_support.threads import require_equal_to_unsplit


@settings(max_examples=10)
@given(drawn=placed(parts=False) | stage_graphs(sizes=True), data=st.data())
def test_every_step_is_as_when_written_out(drawn: Placed, data: st.DataObject) -> None:
    plans = looped_plans(drawn.workload, 8, 24)
    assume(plans)
    plan = plans[data.draw(st.sampled_from(sorted(plans)))]
    try:
        whole = planned_programs(plan.unrolled())
    except UsageError:  # what no forward led to has no gradient
        assume(False)
    for short, long in zip(planned_programs(plan), whole, strict=True):
        assert tuple(steps_of(short)) == long.steps
        assert tuple(short.texts) == long.texts
        assert (short.mini_batch, short.tensors, short.edges) == (long.mini_batch, long.tensors, long.edges)
        assert list(map(short.num_gradients, range(len(plan.stages)))) == [
            sum(step.action.stage == stage and step.action.role in GRADIENT_ROLES for step in long.steps)
            for stage in range(len(plan.stages))
        ]


def test_steps_of_forwards_before_backwards_are_as_when_written_out() -> None:
    """In two rounds, one after another."""
    plan = looped_plans(shape_workload("v", 4), 12, 60)["gpipe"]
    for short, long in zip(planned_programs(plan), planned_programs(plan.unrolled()), strict=True):
        assert short.loop is not None
        assert len(short.loop.rounds) == 2
        assert tuple(steps_of(short)) == long.steps
        assert tuple(short.texts) == long.texts


def test_steps_do_not_grow_with_the_number_of_microbatches() -> None:
    plans = [plan_of_model(many)["1f1b"] for many in (100, 10_000)]
    lengths = [[len(program.steps) for program in planned_programs(plan)] for plan in plans]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("name", ["1f1b", "sequential", "zb-h1", "gpipe"])
def test_gradients_are_those_of_an_unsplit_run(name: str) -> None:
    """Nothing of a copy is left over for the next."""
    plan = plan_of_model(20, split=name == "zb-h1", even=name == "gpipe")[name]
    assert check(plan).valid
    assert any(program.loop is not None for program in planned_programs(plan))
    require_equal_to_unsplit(load_model("gpt2-tiny"), plan)


@pytest.mark.parametrize("split", [False, True])
def test_actions_that_wait_inside_repeat_as_when_written_out(split: bool) -> None:
    """Later parts of a copy's last actions may run in the next copy, before what needs them there."""
    model = branches()
    stages = [("a",), ("right", "right2", "side"), ("left", "join", "end")]
    placed = [PlacedStage(blocks=blocks, devices=(device,)) for device, blocks in enumerate(stages)]
    workload = placed_plan(model, placed, num_microbatches=8, split=split, late=True).workload
    plans = looped_plans(workload, 8, 24)
    assert plans
    for plan in plans.values():
        assert plan.workload.has_parts
        assert check(plan).valid
        for short, long in zip(planned_programs(plan), planned_programs(plan.unrolled()), strict=True):
            assert tuple(steps_of(short)) == long.steps
    plan = plans["zb-h1" if split else "1f1b"]
    assert any(program.loop is not None for program in planned_programs(plan))
    require_equal_to_unsplit(model, plan)


def plan_of_model(many: int, *, split: bool = False, even: bool = False) -> dict[str, Plan]:
    """A chain of three stages, the last of two replicas."""
    model = load_model("gpt2-tiny")
    ids = [block.id for block in model.blocks]
    third = len(ids) // 3
    stages = [
        PlacedStage(blocks=tuple(ids[:third]), devices=(0,)),
        PlacedStage(blocks=tuple(ids[third : 2 * third]), devices=(1,)),
        PlacedStage(blocks=tuple(ids[2 * third :]), devices=(2, 3), replicas=2),
    ]
    plan = placed_plan(model, stages, num_microbatches=8, microbatch_size=2, split=split)
    workload = plan.workload
    if even:  # forwards run ahead where a stage is quicker than those after it, so that nothing repeats
        same = (replace(operation, duration_ns=1_000) for operation in workload.operations)
        hops = [
            tuple(replace(hop, latency_ns=0, occupancy_ns=0) for hop in each.hops) for each in workload.dependencies
        ]
        free = (replace(each, hops=its) for each, its in zip(workload.dependencies, hops, strict=True))
        workload = replace(workload, operations=tuple(same), dependencies=tuple(free))
    return looped_plans(workload, 8, many)
