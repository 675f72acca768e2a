"""A new instruction, from its definition to a plan; real processes import this file. What it carries becomes darker."""

import math

from pipeplan.files import Plan
from pipeplan.runtime.executor.custom_ops import register
from pipeplan.schedule.rules import CustomOp, Rules
from runtime_support.instruction_models import GATHERED, plan_by_rules, two_losses
from runtime_support.plans import Reports

register("DIM", lambda context: {block: context.attributes["by"] * each for block, each in context.inputs.items()})


def plan() -> Plan:
    dim = CustomOp("DIM", after=("ALLGATHER",), before=("*_loss",), every=2, attributes={"by": 0.0})
    return plan_by_rules(two_losses(), Rules(in_flight=3, instructions=(GATHERED, dim)))


def assert_dark(reports: Reports) -> None:
    (loss, *_) = reports["dim"][0]["losses"]
    assert math.isclose(loss, math.log(4), rel_tol=1e-6), "in the dark all four of a group look alike"
