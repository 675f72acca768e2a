"""What a search finds for small models runs, and comes to the loss and gradients of an unsplit run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeplan.checker import check
from pipeplan.errors import UsageError
from pipeplan.files import Plan, Profile, to_json
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.options import TrainOptions
from runtime_support.plans import Unsplit, profile_of
from runtime_support.threads import require_equal_to_unsplit
from runtime_support.warm import warm_ranks
from support.commands import pipeplan
from support.marks import slow_but

SEED = 3
MODELS = ("gpt2-tiny", "mmt-tiny", "gpt2-experts-tiny", "tessel-mt5-tiny")
WAYS: dict[str, dict[str, Any]] = {
    "open": {},
    "tp": {"shards": 2},
    "cp": {"context": 2},
    "dp": {"replicas": 2},
    "tp and dp": {"shards": 2, "replicas": 2},
    "cp and dp": {"context": 2, "replicas": 2},
    "vp": {"chunks": 2, "placement": "circular"},
    "recompute": {"recompute": True},
    "zero 1": {"replicas": 2, "zero": 1},
    "zero 1, tp": {"replicas": 2, "zero": 1, "shards": 2},
    "zero 3, tp": {"replicas": 2, "zero": 3, "shards": 2},
    "bidirectional": {"placement": "bidirectional"},
    "whole backward": {"split_backward": False},
    "little memory": {"memory_bytes": 60_000},
}
CASES = [(model, devices, way) for model in MODELS for devices in (2, 4, 8) for way in WAYS]
QUICK, SLOW = ("gpt2-tiny", 2, "open"), [("gpt2-tiny", 4, "zero 1, tp"), ("mmt-tiny", 4, "open")]


REHEARSED = [
    ("gpt2-tiny", 4, "open"),
    ("gpt2-tiny", 4, "zero 3, tp"),
    ("mmt-tiny", 4, "dp"),
    ("gpt2-experts-tiny", 4, "tp and dp"),
    ("gpt2-tiny", 8, "cp and dp"),
    ("tessel-mt5-tiny", 8, "zero 1, tp"),
]
"""On as many processes, which exchange by gloo."""


def kept(profile: Profile) -> Profile:
    """The same blocks with parameters, so that what replicas divide and memory count, on as many shards as heads."""
    blocks = tuple(
        block.model_copy(
            update={"parameter_bytes": 4_000, "costs": tuple(row for row in block.costs if row.shards <= 2)}
        )
        for block in profile.blocks
    )
    return profile.model_copy(update={"blocks": blocks})


def searched(own: Model, devices: int, way: str) -> Plan:
    """What is found for a model, or skipped where its sizes do not divide."""
    profile = kept(profile_of(own))
    try:
        asked = Request.of(
            profile, devices=devices, mini_batch=8, time_limit=0.3, deterministic=True, seed=SEED, **WAYS[way]
        )
        plan = search_plan(asked).plan
    except UsageError as refused:
        pytest.skip(str(refused))
    check(plan, profile).require()
    return plan


@pytest.mark.filterwarnings("ignore:pipeplan run", "ignore:--zero . divides nothing:UserWarning", "ignore:Dropout x")
@slow_but("model, devices, way", CASES, QUICK.__eq__, lambda case: case not in SLOW)
def test_plans_run_as_the_model_does(model: str, devices: int, way: str) -> None:
    own = load_model(model, seed=SEED)
    require_equal_to_unsplit(own, searched(own, devices, way))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:--zero . divides nothing:UserWarning")
@pytest.mark.parametrize(("model", "devices", "way"), REHEARSED)
def test_processes_on_gloo_run_them_as_the_model_does(model: str, devices: int, way: str, tmp_path: Path) -> None:
    own = load_model(model, seed=SEED)
    path, plan = tmp_path / "plan.json", searched(own, devices, way)
    path.write_text(to_json(plan))
    how = "--seed", str(SEED), "--dtype", "float64", "--lr", "1e-3", "--weight-decay", "0"
    with warm_ranks():
        done = pipeplan("run", path, "--model", model, *how, "--local", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    options = TrainOptions(model, seed=SEED, dtype="float64", learning_rate=1e-3, weight_decay=0.0)
    unsplit = Unsplit(own, options)
    expected = [unsplit.step(step, plan.mini_batch) for step in range(2)]
    assert [step["loss"] for step in json.loads(done.stdout)["steps"]] == pytest.approx(expected, rel=1e-9)
