"""Training with master copies: as torch's ``fully_shard`` with its mixed precision, and in as many bytes as planned."""

from __future__ import annotations

import sys
from dataclasses import replace
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

CHAIN = "runtime_support.models:untied_chain"
RANK = (sys.executable, "-m", "runtime_support.mixed_rank")
TRAINING = TrainOptions(CHAIN, num_steps=3, learning_rate=1e-2, weight_decay=0.1, seed=3)
BF16, FP16 = Recipe(name="bf16-mixed"), Recipe(name="fp16-mixed")
WIDE = Recipe(name="fp16-mixed", gradient_dtype="fp32")

STAGES: dict[str, tuple[Recipe, list[Any], bool]] = {
    "zero 0": (BF16, halves(CHAIN, 0), True),
    "zero 1": (BF16, halves(CHAIN, 1), True),
    "zero 2": (BF16, halves(CHAIN, 2), False),
    "zero 3": (BF16, halves(CHAIN, 3), True),
    "zero 1, float16": (WIDE, halves(CHAIN, 1), False),
    "zero 1 in groups, all of float16": (FP16, one_stage(CHAIN, 1, zero_group=2), False),
}


def pipeline(recipe: Recipe, *, split: bool, num_microbatches: int = 6, microbatch_size: int = 4) -> Plan:
    sizes = {"num_microbatches": num_microbatches, "microbatch_size": microbatch_size}
    plan = model_plan(load_model(CHAIN), [0, 1, 2, 3], split=split, **sizes)
    return plan.model_copy(update={"recipe": recipe})


PLANS: dict[str, Plan] = {
    "pipeline": pipeline(BF16, split=True),
    "pipeline, float16": pipeline(WIDE, split=False),
    **{name: sharded_plan(CHAIN, own, recipe, split=split) for name, (recipe, own, split) in STAGES.items()},
    "overflow, then float16": pipeline(WIDE, split=True),
    "resumed whole": pipeline(BF16, split=False, num_microbatches=10, microbatch_size=2),
    "resumed, float16": pipeline(WIDE, split=True, num_microbatches=10, microbatch_size=2),
}

TOWERS = "runtime_support.models:pairing"
SHARDED = {
    f"shards{' zero 1' * level}{', float16' * (recipe is not BF16)}": sharded_plan(
        TOWERS, one_stage(TOWERS, level, shards=2), recipe, split=bool(level)
    )
    for level, recipe in ((0, BF16), (1, BF16), (1, WIDE))
}
"""Plans that split blocks over two devices, with two replicas of each share."""

RESUMED = {"zero 3": "resumed whole", "zero 1, float16": "resumed, float16"}
"""Checkpoints of divided state from which a pipeline of whole parameters goes on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixed")


@pytest.fixture(scope="module")
def reports(folder: Path) -> Reports:
    """[case][rank]; two of the cases go on from what the one before them has written."""
    cases: dict[str, Case] = {name: (plan, TRAINING) for name, plan in PLANS.items()}
    for before, after in RESUMED.items():
        kept = replace(TRAINING, checkpoint=str(folder / after))
        cases[before] = cases[before][0], kept
        weights = str(folder / f"{after}.safetensors")
        cases[after] = cases[after][0], replace(kept, resume=True, num_steps=5, export_weights=weights)
    cases |= {name: (plan, replace(TRAINING, model=TOWERS)) for name, plan in SHARDED.items()}
    return reports_of(cases, "runtime_support.mixed_rank:compare", RANK)


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.slow
def test_shards_round_as_torch_does(name: str, reports: Reports) -> None:
    """What shards add up is rounded otherwise than in one piece: no farther from float64 than torch's run is."""
    for report in reports[name].values():
        own, others = report["errors"]
        assert 0 < own < 2 * others < 0.1 * report["norm"]
        assert report["losses"] == pytest.approx(report["others"], rel=2e-2)


@pytest.mark.parametrize("name", PLANS)
def test_trains_as_torch_does(name: str, reports: Reports) -> None:
    """Losses, and parameters after three steps; torch adds gradients of float16 up in float32, too."""
    recipe = PLANS[name].recipe
    assert recipe is not None
    computes = "torch.bfloat16" if recipe.name == "bf16-mixed" else "torch.float16"
    wide = recipe != FP16
    for report in reports[name].values():
        assert report["formats"] == ([computes, "torch.float32"] if wide else [computes])
        assert report["losses"] == pytest.approx(report["others"], rel=1e-6 if wide else 1e-3)
        assert report["distance"] <= (1e-6 if wide else 1e-3)
        assert len(set(report["losses"])) == (2 if name in RESUMED.values() else 3)


@pytest.mark.parametrize("name", STAGES)
def test_ranks_hold_what_the_plan_says(name: str, reports: Reports) -> None:
    plan = PLANS[name]
    for rank, report in reports[name].items():
        for kind in (PARAMETERS, GRADIENTS, MASTER, OPTIMIZER):
            planned = sum(stage.state[kind] for stage in plan.stages if rank in stage.devices)
            assert report["held"][kind.key] == planned, (rank, kind.key)


def test_files_of_weights_have_master_copies(reports: Reports, folder: Path) -> None:
    """In float32, which 16 bits could not hold."""
    assert reports["resumed whole"]
    found = load_file(folder / "resumed whole.safetensors")
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
