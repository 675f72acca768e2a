"""Stages with replicas, micro-batch sizes of their own, parts and routes train as an unsplit run, on real processes."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from pipeplan.checker import check
from pipeplan.files import PlacedStage, Plan, Recipe
from pipeplan.reporting.timeline import predicted_trace
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.profiling.build_profile import block_graph_of
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.kinds import PARAMETERS
from runtime_support.plans import TRAINING, Case, Reports, assert_as_unsplit, placed_plan, profile_of, reports_of
from support.marks import always, asked_for, slow_but

FLOAT32 = Recipe(name="fp32", optimizer="sgd")
BRANCHES, CHAIN, TINY = "runtime_support.models:branches", "runtime_support.models:chain", "gpt2-tiny"
CUTS = {
    BRANCHES: [("a",), ("left",), ("right", "right2"), ("join",), ("side", "end")],
    CHAIN: [("b0", "b1"), ("b2",), ("b3",), ("b4", "end")],
}

Group = tuple[tuple[int, ...], int]
"""Devices, each a replica, and micro-batch size."""

GROUPS: dict[str, tuple[str, list[Group]]] = {
    "a branch with replicas and twice the size": (
        BRANCHES,
        [((0,), 2), ((1, 2), 4), ((3,), 2), ((0,), 2), ((3,), 2)],
    ),
    "replicas around branches": (BRANCHES, [((0, 1), 2), ((2,), 1), ((3,), 4), ((1, 0), 4), ((2, 3), 4)]),
    "two, one, two replicas": (CHAIN, [((0, 1), 2), ((2,), 2), ((2,), 2), ((3, 0), 2)]),
    "one, four, two replicas": (CHAIN, [((3,), 4), ((3, 2, 1, 0), 4), ((0, 2), 4), ((1,), 4)]),
    "sizes halve and double": (CHAIN, [((0,), 4), ((1,), 2), ((2,), 1), ((3,), 4)]),
    "devices with several sizes": (CHAIN, [((0,), 1), ((3,), 4), ((0,), 2), ((3,), 1)]),
    "replicas of other sizes": (CHAIN, [((0, 1), 4), ((1, 2), 2), ((2, 3), 4), ((3, 0), 2)]),
}
PARTS: dict[str, tuple[list[tuple[int, ...]], list[int]]] = {
    "a micro-batch in parts": ([(0,), (1,), (2,), (3,)], [1, 1, 1, 0]),
    "two in parts": ([(0,), (1,), (2,), (3,)], [2, 2, 2, 1]),
    "parts of replicas": ([(0, 1), (1, 2), (2,), (3, 0)], [2, 1, 2, 0]),
}

NAMES = [*GROUPS, *PARTS, "first and last on one device", "down and up"]


@functools.cache
def cases() -> dict[str, Case]:
    """Plans, every other one with split backward, and how they train."""
    options = replace(TRAINING, model=TINY)
    found: dict[str, Case] = {}
    for number, (name, (model, groups)) in enumerate(GROUPS.items()):
        split = number % 2 == 1
        plan = placed_plan(load_model(model), stages_of(model, groups), num_microbatches=6, split=split)
        found[name] = plan, replace(options, model=model)
    for number, (name, (devices, parted)) in enumerate(PARTS.items()):
        stages = [
            stage.model_copy(update={"num_parted": count})
            for stage, count in zip(stages_of(CHAIN, [(group, 4) for group in devices]), parted, strict=True)
        ]
        split = number % 2 == 0
        plan = placed_plan(load_model(CHAIN), stages, num_microbatches=4, microbatch_size=4, split=split)
        found[name] = plan, replace(options, model=CHAIN)
    found["first and last on one device"] = first_and_last(), options
    plan = placed_plan(load_model(TINY), down_and_up(), num_microbatches=6, num_routes=2)
    found["down and up"] = plan, options
    return found


def first_and_last() -> Plan:
    """Embedding and head, which share a table, on device 0 and replicas of both beside it; with the model's bytes."""
    model = load_model(TINY)
    sized = block_graph_of(model, torch.float32)
    known = {block.spec.id: block.trainable for block in sized.blocks}
    made = profile_of(model)
    blocks = tuple(block.model_copy(update={"parameters": known[block.id]}) for block in made.blocks)
    ids = [block.id for block in model.blocks]
    groups = [(ids[:3], (0, 1)), (ids[3:6], (2,)), (ids[6:8], (3,)), (ids[8:], (3, 0))]
    stages = [PlacedStage(blocks=tuple(own), devices=on, replicas=len(on)) for own, on in groups]
    profile = made.model_copy(update={"recipe": FLOAT32, "blocks": blocks, "tied": sized.tied})
    return placed_plan(model, stages, num_microbatches=4, split=True, profile=profile)


def stages_of(model: str, groups: list[Group]) -> list[PlacedStage]:
    """The model's blocks, cut, on these groups."""
    return [
        PlacedStage(blocks=blocks, devices=devices, replicas=len(devices), microbatch_size=size)
        for blocks, (devices, size) in zip(CUTS[model], groups, strict=True)
    ]


def down_and_up() -> list[PlacedStage]:
    """A chain on four devices, and the same in the opposite order for every other micro-batch."""
    ids = [block.id for block in load_model(TINY).blocks]
    cuts = [tuple(ids[:3]), tuple(ids[3:5]), tuple(ids[5:7]), tuple(ids[7:])]
    return [
        PlacedStage(blocks=blocks, devices=(3 - index if route else index,), route=route)
        for route in (0, 1)
        for index, blocks in enumerate(cuts)
    ]


LONG = ("replicas around branches", "one, four, two replicas", "devices with several sizes", "two in parts")
"""Between others in what they show."""


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    """[case][rank] what 4 real processes report, started once for all cases."""
    looked_at = ("down and up", "two, one, two replicas", "first and last on one device")  # in tests of one case
    asked = asked_for(request, dict.fromkeys(NAMES))
    return reports_of({name: case for name, case in cases().items() if name in asked or name in looked_at})


@slow_but("name", NAMES, lambda name: name not in LONG, always)
def test_equals_an_unsplit_run(name: str, reports: Reports) -> None:
    _, options = cases()[name]
    model: Model = load_model(options.model)
    assert_as_unsplit(model, options, reports[name])


@slow_but("name", NAMES, lambda name: name not in LONG, always)
def test_check_accepts_it_and_its_trace_has_all_of_the_programs(name: str) -> None:
    plan, _ = cases()[name]
    check(plan).require(name)
    found = sorted(event["name"] for event in predicted_trace(simulate(plan)).events() if event["ph"] == "X")
    assert found == sorted(text for program in plan.programs for text in program)


def test_parameters_have_copies(reports: Reports) -> None:
    """Otherwise nothing above would have summed gradients of copies; a tied one stands twice on a rank that has one."""
    holders = {
        rank for rank, report in reports["down and up"].items() if "embedding.token.weight" in report["parameters"]
    }
    assert holders == {0, 3}
    tied = {"b0.layers.0.weight", "b4.layers.0.weight"}
    both = [rank for rank, report in reports["two, one, two replicas"].items() if tied <= set(report["parameters"])]
    assert both == [0]


def test_ranks_hold_what_the_plan_says(reports: Reports) -> None:
    """Rank 0 has embedding and head, and their table once; ranks 1 and 3 have a copy each."""
    name = "first and last on one device"
    plan, _ = cases()[name]
    (table,) = plan.tied
    assert table.stages == (0, 3)
    states = plan.workload.states
    assert [2 * states[rank][PARAMETERS] for rank in range(4)] == [reports[name][rank]["bytes"] for rank in range(4)]
    stages = [stage.parameter_bytes for stage in plan.stages if 0 in stage.devices]
    assert states[0][PARAMETERS] == sum(stages) - table.parameter_bytes > 0, "run in float64, profiled in float32"


def test_parts_and_whole_micro_batches_are_sent_together() -> None:
    plan, _ = cases()["two in parts"]
    texts = set(plan.programs[2])
    assert {"2F1.0", "2F1.1", "2SEND_F1", "2SEND_F0.0"} <= texts
    assert "2SEND_F0" not in texts
