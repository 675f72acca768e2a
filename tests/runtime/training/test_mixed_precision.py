"""Training with master copies: as torch's ``fully_shard`` with its mixed precision, and in as many bytes as planned."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.amp.grad_scaler import GradScaler

from pipeplan.files import Plan, Recipe
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.training.master_copies import LossScale
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS
from runtime_support.plans import Case, Reports, model_plan, reports_of
from runtime_support.sharded_plans import halves, one_stage, sharded_plan
from support.marks import always, asked_for, slow_but

CHAIN = "runtime_support.models:untied_chain"
RANK = (sys.executable, "-m", "runtime_support.mixed_rank")
TRAINING = TrainOptions(CHAIN, num_steps=3, learning_rate=1e-2, weight_decay=0.1, seed=3)
BF16, FP16 = Recipe(name="bf16-mixed"), Recipe(name="fp16-mixed")
WIDE = Recipe(name="fp16-mixed", gradient_dtype="fp32")

STAGES: dict[str, tuple[Recipe, Callable[[], list[Any]], bool]] = {
    "zero 0": (BF16, partial(halves, CHAIN, 0), True),
    "zero 1": (BF16, partial(halves, CHAIN, 1), True),
    "zero 2": (BF16, partial(halves, CHAIN, 2), False),
    "zero 3": (BF16, partial(halves, CHAIN, 3), True),
    "zero 1, float16": (WIDE, partial(halves, CHAIN, 1), False),
    "zero 1 in groups, all of float16": (FP16, partial(one_stage, CHAIN, 1, zero_group=2), False),
}
PIPELINES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "pipeline": (BF16, {"split": True}),
    "pipeline, float16": (WIDE, {"split": False}),
    "overflow, then float16": (WIDE, {"split": True}),
    "resumed whole": (BF16, {"split": False, "num_microbatches": 10, "microbatch_size": 2}),
    "resumed, float16": (WIDE, {"split": True, "num_microbatches": 10, "microbatch_size": 2}),
}
WHOLE = {name: recipe for name, (recipe, *_) in (PIPELINES | STAGES).items()}
"""Recipes of plans whose blocks no devices split."""

LONG = ("pipeline, float16", "resumed, float16", "zero 0", "zero 2")
"""Of these, between whose formats and levels of ZeRO others are."""

TOWERS = "runtime_support.models:pairing"
SHARDED = {
    f"shards{' zero 1' * level}{', float16' * (recipe is not BF16)}": (recipe, level)
    for level, recipe in ((0, BF16), (1, BF16), (1, WIDE))
}
"""Plans that split blocks over two devices, with two replicas of each share."""


@functools.cache
def plan_by(name: str) -> Plan:
    """The plan of a case."""
    if name in PIPELINES:
        recipe, how = PIPELINES[name]
        sizes = {"num_microbatches": 6, "microbatch_size": 4} | how
        return model_plan(load_model(CHAIN), [0, 1, 2, 3], **sizes).model_copy(update={"recipe": recipe})
    if name in SHARDED:
        recipe, level = SHARDED[name]
        return sharded_plan(TOWERS, one_stage(TOWERS, level, shards=2), recipe, split=bool(level))
    recipe, stages, split = STAGES[name]
    return sharded_plan(CHAIN, stages(), recipe, split=split)


RESUMED = {"zero 3": "resumed whole", "zero 1, float16": "resumed, float16"}
"""Checkpoints of divided state from which a pipeline of whole parameters goes on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixed")


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, folder: Path) -> Reports:
    """[case][rank]; two of the cases go on from what the one before them has written."""
    asked = {*asked_for(request, WHOLE | SHARDED)}
    asked |= {before for before, after in RESUMED.items() if after in asked}
    order = sorted(asked, key=[*STAGES, *PIPELINES, *SHARDED].index)
    models = dict.fromkeys(SHARDED, TOWERS)
    cases: dict[str, Case] = {name: (plan_by(name), replace(TRAINING, model=models.get(name, CHAIN))) for name in order}
    for before, after in RESUMED.items():
        if after not in cases:
            continue
        kept = replace(TRAINING, checkpoint=str(folder / after))
        cases[before] = cases[before][0], kept
        weights = str(folder / f"{after}.safetensors")
        cases[after] = cases[after][0], replace(kept, resume=True, num_steps=5, export_weights=weights)
    return reports_of(cases, "runtime_support.mixed_rank:compare", RANK)


@slow_but("name", SHARDED, "shards zero 1, float16".__eq__, always)
def test_shards_round_as_torch_does(name: str, reports: Reports) -> None:
    """What shards add up is rounded otherwise than in one piece: no farther from float64 than torch's run is."""
    for report in reports[name].values():
        own, others = report["errors"]
        assert 0 < own < 2 * others < 0.1 * report["norm"]
        assert report["losses"] == pytest.approx(report["others"], rel=2e-2)


@slow_but("name", WHOLE, lambda name: name not in LONG, always)
def test_trains_as_torch_does(name: str, reports: Reports) -> None:
    """Losses, and parameters after three steps; torch adds gradients of float16 up in float32, too."""
    recipe = WHOLE[name]
    computes = "torch.bfloat16" if recipe.name == "bf16-mixed" else "torch.float16"
    wide = recipe != FP16
    for report in reports[name].values():
        assert report["formats"] == ([computes, "torch.float32"] if wide else [computes])
        assert report["losses"] == pytest.approx(report["others"], rel=1e-6 if wide else 1e-3)
        assert report["distance"] <= (1e-6 if wide else 1e-3)
        assert len(set(report["losses"])) == (2 if name in RESUMED.values() else 3)


@slow_but("name", STAGES, lambda name: name not in LONG, always)
def test_ranks_hold_what_the_plan_says(name: str, reports: Reports) -> None:
    plan = plan_by(name)
    for rank, report in reports[name].items():
        for kind in (PARAMETERS, GRADIENTS, MASTER, OPTIMIZER):
            planned = sum(stage.state[kind] for stage in plan.stages if rank in stage.devices)
            assert report["held"][kind.key] == planned, (rank, kind.key)


@pytest.mark.parametrize("name", ["resumed whole"])
def test_files_of_weights_have_master_copies(name: str, reports: Reports, folder: Path) -> None:
    """In float32, which 16 bits could not hold."""
    assert reports[name]
    found = load_file(folder / f"{name}.safetensors")
    assert {each.dtype for each in found.values()} == {torch.float32}
    assert not any(torch.equal(each, each.bfloat16().float()) for each in found.values() if each.numel() > 8)


def test_the_loss_scale_goes_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossScale, "PATIENCE", 3)
    theirs, ours = GradScaler("cpu", growth_interval=3), LossScale()
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflows in (False, True, False, False, False, True, True, False, False, False, False):
        assert theirs.scale(torch.ones(())) == ours.value
        weight.grad = torch.tensor([float("inf") if overflows else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflows)
