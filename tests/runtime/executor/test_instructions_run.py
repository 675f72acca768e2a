"""Instructions in real processes: gradients are those of an unsplit run, whoever moves the outputs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeplan.checker import check
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Plan
from pipeplan.runtime.executor.custom_ops import Context, CustomFunction, CustomOpRunner, custom_ops_of, register
from pipeplan.runtime.executor.message_graph import Message
from pipeplan.runtime.executor.process_groups import ProcessGroups
from pipeplan.runtime.executor.rank_program import planned_programs, programs_of
from pipeplan.runtime.executor.stage import MiniBatch, StageError
from pipeplan.runtime.executor.tensors import TensorSlots, TensorSpec
from pipeplan.runtime.launch.job import RunOptions
from pipeplan.runtime.launch.status import Board, Progress
from pipeplan.runtime.models.given_names import found_at
from pipeplan.runtime.models.spec import Model
from pipeplan.schedule.rules import CustomOp, Rules, SubmoduleRules
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.bounds import weak_iteration_bound
from runtime_support import new_instruction
from runtime_support.instruction_models import (
    GATHERED,
    one_loss,
    plan_by_rules,
    searched_plan,
    shared_loss,
    towers_plan,
    two_losses,
)
from runtime_support.plans import TRAINING, Reports, assert_as_unsplit, four_devices, reports_of
from support.marks import always, asked_for, slow_but

GATHER = CustomOp("GATHER", after=("image.*", "text.*"), before=("loss",), every=2, duration_ns=500)
ALLGATHER = replace(GATHERED, duration_ns=500)
TURN = replace(ALLGATHER, kind="TURN", attributes={"times": 1.0})

SIZED = tuple(
    SubmoduleRules(blocks=f"{name}.*", placement="one-to-one", devices=devices, in_flight=8, microbatch_size=size)
    for name, devices, size in (("image", (0, 2), "b // 4"), ("text", (2, 4), "b // 2"))
)
"""Towers with micro-batches of their own, for a loss of four samples."""

NAMES = ("one_loss", "two_losses", "shared_loss")
ONE, TWO, SHARED = one_loss(), two_losses(), shared_loss()
PLANS: dict[str, tuple[Model, Plan]] = {
    "gather": (ONE, towers_plan(ONE, [GATHER])),
    "gather, split": (ONE, towers_plan(ONE, [GATHER], split=True)),
    "gather, beside computing": (ONE, towers_plan(ONE, [replace(GATHER, devices=(1,))])),
    "gather, replicas": (ONE, towers_plan(ONE, [GATHER], replicas=2)),
    "all-gather": (TWO, towers_plan(TWO, [ALLGATHER])),
    "all-gather, split": (TWO, towers_plan(TWO, [ALLGATHER], split=True)),
    "all-gather, replicas": (TWO, towers_plan(TWO, [ALLGATHER], replicas=2)),
    "one after the other": (TWO, towers_plan(TWO, [ALLGATHER, replace(TURN, after=("ALLGATHER",))])),
    "our own, replicas": (TWO, towers_plan(TWO, [TURN], replicas=2)),
    "all-gather, split loss": (SHARED, towers_plan(SHARED, [replace(ALLGATHER, before=("join",))])),
    "between forward and backward": (
        ONE,
        towers_plan(ONE, [replace(ALLGATHER, after=("1F", "3F"), before=("1B", "3B"))]),
    ),
    "by counts": (
        ONE,
        towers_plan(ONE, [replace(GATHER, check_prev=lambda s, done, own, m, unit: done >= min(4, 3 + 2 * m))]),
    ),
    "sizes of submodules": (ONE, searched_plan(ONE, Rules(submodules=SIZED))),
    "sizes of submodules, gather": (
        ONE,
        searched_plan(ONE, Rules(submodules=SIZED, instructions=(replace(GATHER, every=1, devices="before"),))),
    ),
    "in halves": (TWO, towers_plan(TWO, [replace(ALLGATHER, every=1)])),
}
MODELS = "runtime_support.instruction_models"
PATHS = {id(model): f"{MODELS}:{name}" for model, name in zip((ONE, TWO, SHARED), NAMES, strict=True)}


EMULATED = {name: PLANS[name] for name in ("gather, beside computing", "all-gather, replicas", "one after the other")}


LONG = ("gather, split", "gather, replicas", "all-gather, split", "our own, replicas", "sizes of submodules")
"""Of the plans those whose kinds others show together."""


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    asked = asked_for(request, dict.fromkeys(PLANS))
    options = replace(TRAINING, instructions=MODELS, num_steps=2)
    cases = {
        name: (plan, replace(options, model=PATHS[id(model)])) for name, (model, plan) in PLANS.items() if name in asked
    }
    emulation = RunOptions(num_steps=2, stretch=1.0)  # predictions are not those of slower actions
    emulated = {f"emulated {name}": (slower(plan), emulation) for name, (_, plan) in EMULATED.items()}
    new = replace(options, model=PATHS[id(TWO)], num_steps=1, instructions="runtime_support.new_instruction")
    return reports_of(cases | emulated | {"dim": (four_devices(new_instruction.plan()), new)})


def slower(plan: Plan) -> Plan:
    """The plan's programs with actions that last so long that sleeping is exact enough."""
    operations = tuple(replace(each, duration_ns=2_000_000) for each in plan.operations)
    return plan.model_copy(update={"operations": operations})


@slow_but("name", PLANS, lambda name: name not in LONG, always)
def test_gradients_are_those_of_an_unsplit_run(name: str, reports: Reports) -> None:
    model, plan = PLANS[name]
    assert check(plan).problems == ()
    assert simulate(plan).rates.makespan_ns == plan.predicted.makespan_ns
    assert_as_unsplit(model, replace(TRAINING, model=model.name, num_steps=2), reports[name])


@pytest.mark.parametrize("name", EMULATED)
def test_emulations_take_no_less_than_the_prediction(name: str, reports: Reports) -> None:
    """Nothing starts before what it waits for, instructions included; how much later depends on the machine."""
    workload = slower(PLANS[name][1]).workload
    least = weak_iteration_bound(workload)
    assert all(ns >= least for ns in reports[f"emulated {name}"][0]["iterations_ns"])


def test_submodules_run_with_their_own_sizes() -> None:
    for name in ("sizes of submodules", "sizes of submodules, gather"):
        sizes = {stage.blocks[0]: stage.microbatch_size for stage in PLANS[name][1].stages if stage.blocks}
        assert sizes == {"image.0": 1, "image.1": 1, "text.0": 2, "text.1": 2, "loss": 4}


def test_rules_that_never_let_an_instruction_run_name_it() -> None:
    """It waits for two micro-batches of each tower, of which no more than one may be in flight."""
    with pytest.raises(InfeasibleError, match="0F1 is ready, but stage 0 has its 1 micro-batches in flight"):
        plan_by_rules(TWO, Rules(in_flight=1, instructions=(ALLGATHER,)))


# Programs --------------------------------------------------------------------------------------------------------


def test_programs_lead_tensors_through_instructions() -> None:
    model, plan = PLANS["gather"]
    programs = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)
    tensors = programs[0].tensors
    assert tensors[Message("F", 1, 5)] == ("image.1",)
    assert tensors[Message("F", 3, 5)] == ("text.1",)
    assert tensors[Message("GATHER", 5, 4)] == ("image.1", "text.1")
    assert tensors[Message("B", 4, 3)] == ("text.1",), "gradients go straight back"
    assert Message("F", 3, 4) not in tensors
    part = programs[1].custom_ops[5]
    assert (part.devices, part.takers) == ((1, 3), {Message("GATHER", 5, 4): (1,)})
    assert all(step.gives == () for step in programs[3].steps if str(step.action).startswith("5GATHER"))
    (first,) = [i for i in programs[1].steps if str(i.action) == "5GATHER0"]
    assert first.held == ((Message("F", 1, 5), 1, (0, 1, 2, 3)), (Message("F", 3, 5), 3, (0, 1, 2, 3)))
    assert all(program.lines == {(1, 3)} for program in programs)


def test_what_only_watches_sees_what_leaves_a_stage() -> None:
    watch = CustomOp("WATCH", after=("image.0",), duration_ns=1)
    plan = towers_plan(ONE, [watch])
    programs = programs_of(plan, [block.id for block in ONE.blocks], ONE.edges, ONE.name)
    assert programs[0].tensors[Message("F", 0, 5)] == ("image.0",)
    assert planned_programs(plan)[0].tensors[Message("F", 0, 5)] == ("0>5",)


def test_two_ways_are_one_too_many() -> None:
    other = replace(GATHER, kind="ALLGATHER")
    plan = towers_plan(ONE, [GATHER, other])
    with pytest.raises(UsageError, match="outputs of stage 1 come to stage 4 by way of 5GATHER and 6ALLGATHER"):
        programs_of(plan, [block.id for block in ONE.blocks], ONE.edges, ONE.name)


def test_kinds_that_nobody_knows_are_refused_before_anything_starts() -> None:
    plan = towers_plan(ONE, [replace(GATHER, kind="NOBODY")])
    with pytest.raises(UsageError, match=r"runs 5NOBODY0, and nothing says what NOBODY does; call .*register.*--instr"):
        custom_ops_of(plan)
    with pytest.raises(UsageError, match="--instructions 'no_such_module' cannot be imported"):
        found_at("no_such_module", "--instructions")


def runner(function: CustomFunction) -> CustomOpRunner:
    """Rank 1's end of the gathering instruction, with another function."""
    model, plan = PLANS["gather"]
    program = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)[1]
    board = os.memfd_create("board")
    os.truncate(board, Board.size(4))
    group = ProcessGroups(program.lines, Progress(Board(board, 4), 1)).of((1, 3))
    os.close(board)
    return CustomOpRunner(program.custom_ops[5], program, function, group, {}, torch.device("cpu"))


def broken(context: Context) -> dict[str, torch.Tensor]:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (broken, "instruction GATHER: ValueError: no such thing"),
        (
            lambda context: {"text.1": context.inputs["text.1"]},
            "instruction GATHER asks for block 'text.1' in context.inputs, which has it only on rank 3; take it from "
            r"context.brought\(\)",
        ),
        (
            lambda context: {"text.1": context.inputs["text.7"]},
            "instruction GATHER asks for block 'text.7', and what comes to it is of 'image.1', 'text.1'",
        ),
        (
            lambda context: {"image.1": torch.ones(4)},
            "instruction GATHER returned no tensor for block 'text.1', which a later action takes on rank 1",
        ),
    ],
)
def test_functions_that_fail(function: CustomOp, text: str) -> None:
    end = runner(function)
    (first,) = [i for i in end.program.steps if str(i.action) == "5GATHER0"]
    with pytest.raises(StageError, match=text):
        end.run(first, {first.samples[0]: [("image.1", torch.ones(4))]}, MiniBatch({}, 1))


def test_a_new_instruction_takes_few_lines(reports: Reports) -> None:
    """Definition, rules, plan and what is expected of real processes are all in that file."""
    new_instruction.assert_dark(reports)
    lines = Path(new_instruction.__file__).read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) < 20


def test_what_is_not_there_by_then_is_refused() -> None:
    """An instruction that counts less than its samples has nothing to bring."""
    rows = TensorSlots({Message("GATHER", 5, 4): ("image.1",)}, {"image.1": TensorSpec((8,), torch.float64)})
    rows.put(Message("GATHER", 5, 4), (0, 1))
    with pytest.raises(UsageError, match="stage 4 takes what stage 5 makes of sample 2, which is not there by then"):
        rows.take(Message("GATHER", 5, 4), (0, 1, 2, 3))


def test_a_kind_has_one_function() -> None:
    with pytest.raises(UsageError, match="instruction GATHER is already"):
        register("GATHER", lambda context: {})
    with pytest.raises(UsageError, match="'gather' cannot be an instruction"):
        register("gather", lambda context: {})
