"""A new instruction, from its definition to real processes, which import this file: it makes what it carries darker."""

import math

from instruction_models import GATHERED, plan_by_rules, two_losses

from pipeplan.runtime.instructions import register
from pipeplan.runtime.launch import run_local
from pipeplan.runtime.options import RunOptions
from pipeplan.schedule.rules import Instruction, Rules

register("DIM", lambda context: {block: context.attributes["by"] * each for block, each in context.inputs.items()})


def test_a_new_instruction_reaches_real_processes(paths_for_ranks: None) -> None:
    dim = Instruction("DIM", after=("ALLGATHER",), before=("*_loss",), every=2, attributes={"by": 0.0})
    plan = plan_by_rules(two_losses(), Rules(in_flight=3, instructions=(GATHERED, dim)))
    options = RunOptions("instruction_models:two_losses", num_steps=1, instructions="test_new_instruction")
    (step,) = run_local(plan, options, lambda step: None).steps
    assert math.isclose(step.loss, math.log(4), rel_tol=1e-6), "in the dark all four of a group look alike"
