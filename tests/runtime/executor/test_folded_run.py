"""Eight processes rehearse a folded plan: replicas and split blocks, each process with its own program alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeplan.files import read_plan, to_json
from pipeplan.files.folded import folded_plan
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.training.options import TrainOptions
from runtime_support.plans import Unsplit
from support.commands import pipeplan

TINY, SEED = "gpt2-tiny", 3


@pytest.mark.slow
@pytest.mark.long
def test_eight_processes_train_a_folded_plan_as_one_would(tmp_path: Path) -> None:
    profile, plan, trace = (tmp_path / name for name in ("profile.json", "plan.json", "trace.json"))
    split = "--microbatch", "1,2", "--shards", "1,2"
    assert pipeplan("profile", TINY, "--estimate", "--device", "h100-80gb", *split, "-o", profile).returncode == 0
    sizes = "--devices", "8", "--tp", "2", "--dp", "2", "--pp", "2", "--zero", "1", "--mini-batch", "16"
    found = pipeplan("search", profile, *sizes, "--deterministic", "--time-limit", "1s", "-o", plan)
    assert found.returncode == 0, found.stderr
    folded = folded_plan(read_plan(str(plan)))
    assert folded.players_each >= 2
    plan.write_text(to_json(folded))
    how = "--seed", str(SEED), "--dtype", "float64", "--lr", "1e-3", "--weight-decay", "0"
    done = pipeplan("run", plan, "--model", TINY, *how, "--local", "--steps", "2", "--trace", trace, "--json")
    assert done.returncode == 0, done.stderr
    options = TrainOptions(TINY, seed=SEED, dtype="float64", learning_rate=1e-3, weight_decay=0.0)
    unsplit = Unsplit(load_model(TINY, seed=SEED), options)
    expected = [unsplit.step(step, folded.mini_batch) for step in range(2)]
    assert [step["loss"] for step in json.loads(done.stdout)["steps"]] == pytest.approx(expected, rel=1e-9)
    beside = pipeplan("simulate", plan, "--measured", trace, "--json")
    assert beside.returncode == 0, beside.stderr
    assert len(json.loads(beside.stdout)["measured"]["devices"]) == 8
