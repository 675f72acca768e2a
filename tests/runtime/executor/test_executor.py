"""Plans on real processes train as an unsplit run does: losses, gradients and parameters, in fp64 to 1e-9."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace

import pytest

from builders.orders import gpipe_orders
from pipeplan.files import PlacedStage
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.workload.action import Action
from runtime_support import models as runtime_models
from runtime_support.plans import (
    PLACEMENTS,
    TRAINING,
    Case,
    Reports,
    assert_as_unsplit,
    four_devices,
    model_plan,
    placed_plan,
    reports_of,
)
from support.marks import always, asked_for, slow_but

BRANCH_CUTS = [("a",), ("left",), ("right", "right2"), ("join",), ("side", "end")]
LONG = ("recompute full", "circular full", "v-shape split")
LATE_CUTS = [("a",), ("right", "right2", "side"), ("left", "join", "end")]
BRANCH_DEVICES = {"apart": [0, 1, 2, 3, 1], "two on a device": [0, 1, 0, 2, 2], "one device": [0, 0, 0, 0, 0]}


@functools.cache
def cases() -> dict[str, Case]:
    """Plans that train, and how."""
    options = TRAINING
    tiny, branches, found = load_model("gpt2-tiny"), runtime_models.branches(), {}
    for split in (False, True):
        kind = "split" if split else "full"
        for placement, devices in PLACEMENTS.items():
            found[f"{placement} {kind}"] = (model_plan(tiny, devices, split=split, full_names=split), options)
        found[f"recompute {kind}"] = (model_plan(tiny, [0, 1, 2, 3], split=split, recompute=True), options)
    for number, (where, devices) in enumerate(BRANCH_DEVICES.items()):
        plan = four_devices(model_plan(branches, devices, cuts=BRANCH_CUTS, split=number % 2 == 1))
        found[f"branches {where}"] = (plan, replace(options, model="branches"))
    for split in (False, True):  # the stage of "left" takes what comes of "right2" only for its last block
        plan = model_plan(branches, [0, 1, 2], cuts=LATE_CUTS, split=split, late=True)
        found[f"branches late {'split' if split else 'full'}"] = (
            four_devices(plan),
            replace(options, model="branches"),
        )
    many = model_plan(branches, [0, 1, 2, 3, 1], cuts=BRANCH_CUTS, num_microbatches=24, orders=gpipe_orders)
    found["more messages than may be unfinished"] = (many, replace(options, model="branches"))
    found["blocking transfers"] = (many, replace(options, model="branches", blocking=True))
    return found


def refused() -> dict[str, Case]:
    """Runs that must not start."""
    options = TrainOptions("breaking", dtype="float64")
    plan = model_plan(runtime_models.breaking(lambda: None), [0, 1, 2, 3])
    model = runtime_models.chain()
    names = [block.id for block in model.blocks]
    stages = [
        PlacedStage(blocks=tuple(names[:2]), devices=(0,)),
        PlacedStage(blocks=tuple(names[2:4]), devices=(1, 2), replicas=2),
        PlacedStage(blocks=tuple(names[4:]), devices=(3,)),
    ]
    replicas = placed_plan(model, stages, num_microbatches=4)
    return {
        "refused options": (plan, options),
        "refused tensors": (plan, options),
        "refused shapes of parameters": (replicas, options),
        "refused parameters": (replicas, options),
    }


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    """[case][rank] what 4 real processes report, started once for all cases."""
    return reports_of({**asked_for(request, cases()), **refused()})


def is_quick(name: str) -> bool:
    """Of branches two cases, and of the rest those that no other is like; the others are long."""
    return name in ("branches apart", "branches late split") or not (name.startswith("branches") or name in LONG)


@slow_but("name", cases(), is_quick, always)
def test_equals_an_unsplit_run(name: str, reports: Reports) -> None:
    plan, options = cases()[name]
    model = runtime_models.branches() if options.model == "branches" else load_model(options.model)
    assert_as_unsplit(model, options, reports[name])
    assert plan.mini_batch >= 12
    assert plan.workload.has_parts == ("late" in name)


def test_tied_parameters_stand_on_different_ranks_somewhere(reports: Reports) -> None:
    """Otherwise nothing above would have summed gradients between ranks."""
    holders = {
        rank
        for rank, report in reports["one-to-one full"].items()
        if {"embedding.token.weight", "head.output.weight"} & set(report["parameters"])
    }
    assert holders == {0, 3}
    in_v_shape = [set(report["parameters"]) for report in reports["v-shape full"].values()]
    assert any({"embedding.token.weight", "head.output.weight"} <= parameters for parameters in in_v_shape)


@pytest.mark.parametrize("name", ["one-to-one full", "one-to-one split", "circular split", "v-shape full"])
def test_no_more_buffers_than_messages_whose_action_is_not_over(name: str, reports: Reports) -> None:
    """Over all steps; a message is needed from its RECV to the B, or W, of its stage and micro-batch."""
    plan, _ = cases()[name]
    for rank, program in enumerate(plan.programs):
        held, most = Counter[tuple[int, int]](), 0
        for action in map(Action.parse, program):
            place = (action.stage, action.microbatch)
            held[place] += action.kind.startswith("RECV")
            most = max(most, held.total())
            if action.kind in "BW":
                held[place] = 0
        assert 0 < reports[name][rank]["num_buffers"] <= most < len(program)


def test_ranks_that_differ_all_refuse_alike(reports: Reports) -> None:
    options = {report["refused"] for report in reports["refused options"].values()}
    assert options == {"rank 2 was started with seed 1, rank 0 with 0; start all ranks alike"}
    (tensors,) = {report["refused"] for report in reports["refused tensors"].values()}
    assert re.match(r"ranks (0 and 1|1 and 2) expect different (outputs|gradients) between stages", tensors)
    assert "b1 float64[2, 8]" in tensors
    assert "b1 float16[2, 8]" in tensors
    (shapes,) = {report["refused"] for report in reports["refused shapes of parameters"].values()}
    told = r"ranks 1 and 2 do not start with the same parameters: b2.spare is float64\[2\] .* is float64\[3\] .*"
    assert re.match(told, shapes)
    (values,) = {report["refused"] for report in reports["refused parameters"].values()}
    assert re.match(told.replace("3", "2"), values)
