"""Whatever rank fails wherever: the run ends soon, says rank, action and cause, and leaves no process.

``benchmarks/chaos.py`` does the same at random places, many times.
"""

from __future__ import annotations

import pytest

from pipeplan.files import PlacedStage, Plan
from pipeplan.runtime.training.options import TrainOptions
from runtime_support import models as runtime_models
from runtime_support.faults import Fault, run_with
from runtime_support.plans import model_plan, placed_plan
from support.marks import slow_but


def split_chain() -> Plan:
    return model_plan(runtime_models.chain(), [0, 1, 1, 0], split=True, num_microbatches=4, microbatch_size=1)


def replicas() -> Plan:
    """Rank 0, then two replicas that share every micro-batch."""
    names = [block.id for block in runtime_models.chain().blocks]
    stages = [
        PlacedStage(blocks=tuple(names[:2]), devices=(0,)),
        PlacedStage(blocks=tuple(names[2:]), devices=(1, 2), replicas=2),
    ]
    return placed_plan(runtime_models.chain(), stages, num_microbatches=2)


def counter_of(plan: Plan, rank: int, kind: str) -> int:
    """Where the last action of a kind stands in a rank's program."""
    return max(counter for counter, text in enumerate(plan.programs[rank]) if kind in text)


CASES = {
    "killed before it imports anything": ("split", Fault("killed", 1, "STARTING")),
    "ends while connecting": ("split", Fault("ended", 0, "CONNECTING")),
    "started with another plan": ("split", Fault("other plan", 1)),
    "raises in W": ("split", Fault("raised", 0, step=1, counter=counter_of(split_chain(), 0, "W"))),
    "stopped while sending": ("split", Fault("stopped", 1, step=1, counter=counter_of(split_chain(), 1, "SEND"))),
    "replica killed before it receives": ("replicas", Fault("killed", 2, counter=counter_of(replicas(), 2, "RECV"))),
    "killed while gradients are summed": ("replicas", Fault("killed", 1, "REDUCING", step=1)),
    "stopped where all tell each other": ("replicas", Fault("stopped", 2, "REPORTING", step=1)),
    "killed while a checkpoint is written": ("split", Fault("killed", 0, "SAVING", step=1)),
    "endless optimizer": ("replicas", Fault("endless", 0, "UPDATING", step=2)),
}
QUICK = ("started with another plan", "raises in W", "killed while gradients are summed", "ends while connecting")


@slow_but("name", CASES, lambda name: name in QUICK)
def test_ends_with_one_message_and_no_process_left(name: str) -> None:
    plan, fault = CASES[name]
    made = {"split": split_chain, "replicas": replicas}[plan]()
    ending = run_with(fault, made, TrainOptions("runtime_support.models:chain", dtype="float64"), warm=True)
    assert ending.is_right, f"{ending.error} is not {ending.expected}"
    assert ending.left == []
    assert ending.checkpoint_loads, "there is one behind every step, whole whatever happens"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("stopped", marks=pytest.mark.long), "killed"])
def test_under_torchrun(kind: str) -> None:
    """A stopped rank could not take the signal that torchrun ends it with; a killed one is named before who lost it."""
    fault = Fault(kind, 0, step=1, counter=counter_of(split_chain(), 0, "W"))
    ending = run_with(
        fault, split_chain(), TrainOptions("runtime_support.models:chain", dtype="float64"), torchrun=True
    )
    assert ending.is_right, f"{ending.error} is not {ending.expected}"
    assert ending.left == []
    assert ending.checkpoint_loads
