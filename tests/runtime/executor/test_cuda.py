"""Plans on a GPU: several processes share it over gloo. Exact in fp64, close in bfloat16, with autocast, too.

NCCL wants a GPU for each process, and is not tested here.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.options import TrainOptions
from runtime_support import models as runtime_models
from runtime_support.plans import (
    PLACEMENTS,
    Case,
    Reports,
    assert_as_unsplit,
    four_devices,
    model_plan,
    placed_plan,
    reports_of,
    split_stage,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

BRANCH_CUTS = [("a",), ("left",), ("right", "right2"), ("join",), ("side", "end")]
OPTIONS = TrainOptions(
    "gpt2-tiny",
    num_steps=3,
    dtype="float64",
    learning_rate=1e-2,
    weight_decay=0.1,
    clip_norm=0.1,
    seed=3,
    device="cuda",
    backend="gloo",
)
NEAR = 0.1
"""Of losses near ln 64: what three steps in bfloat16 differ by, where sums run in another order."""


@functools.cache
def cases() -> dict[str, Case]:
    """In fp64 the placements, full and split, branches and recomputation; in bfloat16 and under autocast a v-shape.

    Sequences over four devices, of which torch's kernels are in bfloat16 alone.
    """
    tiny, branches, found = load_model("gpt2-tiny"), runtime_models.branches(), {}
    for split in (False, True):
        kind = "split" if split else "full"
        for placement, devices in PLACEMENTS.items():
            found[f"{placement} {kind}"] = (model_plan(tiny, devices, split=split), OPTIONS)
        plan = four_devices(model_plan(branches, [0, 1, 2, 3, 1], cuts=BRANCH_CUTS, split=split))
        found[f"branches {kind}"] = (plan, replace(OPTIONS, model="branches"))
    found["recompute"] = (model_plan(tiny, [0, 1, 2, 3], recompute=True), OPTIONS)
    for name in ("tessel-mt5-tiny", "tessel-flava-tiny", "dlrm-tiny"):
        found[name] = (model_plan(load_model(name), [0, 1, 2, 3], split=True), replace(OPTIONS, model=name))
    vshape = model_plan(tiny, PLACEMENTS["v-shape"], split=True)
    whole = " ".join(block.id for block in tiny.blocks)
    for way in ("gathered", "ring"):
        shared = placed_plan(tiny, [split_stage(whole, (0, 1, 2, 3), 1, context=4, context_exchange=way)], split=True)
        found[f"sequences {way}"] = (shared, OPTIONS)
        found[f"near {way} bfloat16"] = (shared, replace(OPTIONS, dtype="bfloat16"))
    found["near bfloat16"] = (vshape, replace(OPTIONS, dtype="bfloat16"))
    found["near autocast"] = (vshape, replace(OPTIONS, dtype="float32", precision="bf16-autocast"))
    return found


@pytest.fixture(scope="module")
def reports() -> Reports:
    return reports_of(cases())


def model_of(options: TrainOptions) -> Model:
    return runtime_models.branches() if options.model == "branches" else load_model(options.model)


@pytest.mark.parametrize("name", [name for name in cases() if not name.startswith("near")])
def test_equals_an_unsplit_run_on_the_cpu(name: str, reports: Reports) -> None:
    options = cases()[name][1]
    assert_as_unsplit(model_of(options), options, reports[name])


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith("near")])
def test_short_formats_come_close(name: str, reports: Reports) -> None:
    """All ranks know the same losses, which fall as those in float64 do."""
    exact = reports["v-shape split"][0]["losses"]
    for report in reports[name].values():
        assert report["losses"] == reports[name][0]["losses"]
        assert report["losses"] == pytest.approx(exact, abs=NEAR)
        assert report["distances"]["loss"] < NEAR
