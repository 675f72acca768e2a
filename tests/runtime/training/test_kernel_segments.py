"""Stages whose blocks kernel backends run train as unsplit runs of eager torch do; what is wrong is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pipeplan
from pipeplan import _api
from pipeplan.errors import UsageError
from pipeplan.files import BackendFusion, CostRow, PlacedStage, Plan, Profile
from pipeplan.kernels.backend import known_backends
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo import zoo_model
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.workload.elements import Segment
from runtime_support import models
from runtime_support.lone_rank import lone_rank
from runtime_support.plans import TRAINING, assert_as_unsplit, placed_plan, profile_of, reports_of
from runtime_support.warm import warm_ranks
from support.marks import slow_but

OWN = "runtime_support.kernel_backends"


def with_rows(model: Model, *groups: Segment) -> Profile:
    """Made-up costs of a model, and of groups that backends run."""
    plain = profile_of(model)

    def row(backend: str, size: int) -> CostRow:
        return CostRow(microbatch_size=size, backend=backend, forward_ns=900, backward_ns=1500, activation_bytes=64)

    own: dict[tuple[str, ...], tuple[CostRow, ...]] = {}
    for group in groups:
        own[group.blocks] = tuple(row(group.backend, size) for size in (1, 2, 4))
    blocks = (b.model_copy(update={"costs": (*b.costs, *own.get((b.id,), ()))}) for b in plain.blocks)
    fusions = (BackendFusion(blocks=blocks, costs=rows) for blocks, rows in own.items() if len(blocks) > 1)
    return plain.model_copy(update={"blocks": tuple(blocks), "fusions": tuple(fusions)})


def segment(backend: str, *blocks: str) -> Segment:
    return Segment(blocks=blocks, backend=backend)


def stage(device: int, *segments: Segment, **more: Any) -> PlacedStage:
    blocks = tuple(block for each in segments for block in each.blocks)
    return PlacedStage(**{"blocks": blocks, "devices": (device,), "segments": segments, **more})


def plan_of(model: Model, *stages: PlacedStage, **how: Any) -> Plan:
    groups = [each for own in stages for each in own.segments if each.backend != "eager"]
    return placed_plan(model, stages, profile=with_rows(model, *groups), **how)


def options(name: str) -> TrainOptions:
    asked = replace(TRAINING, model=f"runtime_support.models:{name}", backend_rules=(OWN,))
    found = _api._with_kernels(asked)
    assert isinstance(found, TrainOptions)
    return found


def test_gradients_are_those_of_eager_torch() -> None:
    """On 4 real ranks: skips around segments and inside of them, a loss inside, tied weights, replicas, I and W."""
    cases = {
        "branches": plan_of(
            models.branches(),
            stage(0, segment("same", "a"), segment("eager", "left")),
            stage(1, segment("same", "right", "right2", "side")),
            stage(2, segment("eager", "join"), segment("same", "end"), devices=(2, 3), replicas=2),
            split=True,
        ),
        "chain": plan_of(
            models.chain(),
            stage(0, segment("eager", "b0"), segment("same", "b1")),
            stage(1, segment("same", "b2", "b3"), devices=(1, 3), replicas=2),
            PlacedStage(blocks=("b4", "end"), devices=(2,)),
            split=True,
        ),
    }
    reports = reports_of({name: (plan, options(name)) for name, plan in cases.items()})
    for name, plan in cases.items():
        assert pipeplan.check(plan).valid
        assert_as_unsplit(getattr(models, name)(), options(name), reports[name])


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (
            "wrong",
            "stage 1: backend wrong is to run b2 to b3, and is refused: its numbers are off eager's by 0.01 of",
        ),
        ("absent", "backend absent is to run b2 to b3, and is refused: no-such-distribution is not installed"),
        ("unheard", "there is no such backend here; known are absent, attention-"),
    ],
)
def test_what_is_wrong_is_refused_by_name(backend: str, said: str) -> None:
    plan = plan_of(
        models.chain(),
        PlacedStage(blocks=("b0", "b1"), devices=(0,)),
        stage(1, segment(backend, "b2", "b3"), segment("eager", "b4", "end")),
    )
    with warm_ranks(), pytest.raises(UsageError, match=said):
        _api.run(plan, options("chain"))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_gpt_trains_with_other_backends_in_every_stage(*, fused: bool) -> None:
    """On 4 gloo processes in float32: compiled, forced and plain stages have eager's losses, to 0.0001 of them."""
    model = zoo_model("gpt2-tiny", sequence=16)
    ids = [block.id for block in model.blocks]
    first = [segment("inductor", *ids[1:3])] if fused else [segment("onednn-off", id_) for id_ in ids[1:3]]
    stages = [
        stage(0, segment("eager", *ids[:1]), *first),
        stage(1, segment("attention-math", ids[3]), segment("onednn-off", *ids[4:5])),
        stage(2, segment("attention-flash", ids[5]), segment("inductor" if fused else "onednn-off", ids[6])),
        stage(3, segment("eager", *ids[7:])),
    ]
    plain = [each.model_copy(update={"segments": ()}) for each in stages]
    asked = TrainOptions("gpt2-tiny", num_steps=3, dtype="float32", sequence=16, seed=1, timeout_ns=240 * 10**9)
    with warm_ranks():
        found = [
            [step.loss for step in _api.run(plan_of(model, *each, split=True), asked).result.steps]
            for each in (stages, plain)
        ]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@slow_but("backend", ["torchscript", "onnxruntime", "openvino"], lambda backend: backend == "torchscript")
def test_inference_runs_by_segments(backend: str) -> None:
    """Backends that only run forward have two blocks at once and one alone; libraries of graphs on two devices."""
    if (reason := known_backends()[backend].absence("cpu", training=False)) is not None:
        pytest.skip(f"{backend}: {reason}")
    devices = 1 if backend == "torchscript" else 2
    plain = profile_of(zoo_model("gpt2-tiny", sequence=16))
    sizes = {"microbatch_size": 2, "activation_bytes": 64}
    eager = (CostRow(forward_ns=1000, **sizes),)
    own = (*eager, CostRow(forward_ns=100, backend=backend, **sizes))
    blocks = tuple(
        block.model_copy(update={"costs": own if block.id == "layer0.ffn" else eager}) for block in plain.blocks
    )
    pair = BackendFusion(blocks=("layer1.attention", "layer1.ffn"), costs=(own[1],))
    found = plain.model_copy(update={"mode": "inference", "blocks": blocks, "fusions": (pair,)})
    how: dict[str, Any] = {"devices": devices, "microbatches": 2, "time_limit": 1, "deterministic": True}
    how |= {"placement": "one-to-one"}  # each block runs once
    by_eager = pipeplan.search(found, **how).plan
    plan = pipeplan.search(found, kernels="auto", **how).plan
    compiled = [each.blocks for stage in plan.stages for each in stage.segments if each.backend == backend]
    assert compiled == [("layer0.ffn",), pair.blocks]
    assert len(plan.stages) == devices
    assert pipeplan.check(plan, profile=found).valid
    with lone_rank() if devices == 1 else warm_ranks():
        runs = [pipeplan.run(each, "gpt2-tiny", steps=2, seed=1, sequence=16) for each in (by_eager, plan)]
    wanted, losses = ([step.loss for step in each.result.steps] for each in runs)
    assert losses == pytest.approx(wanted, rel=1e-5)
