"""Eight processes rehearse a folded plan: replicas and split blocks, each process with its own program alone."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeplan import estimate
from pipeplan.cli.profile_verb import LoadFactor
from pipeplan.files import PlacedStage, Plan, read_plan, to_json
from pipeplan.files.folded import folded_plan
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.options import TrainOptions
from runtime_support.plans import Unsplit, placed_plan
from runtime_support.threads import require_equal_to_unsplit
from runtime_support.warm import warm_ranks
from support.commands import pipeplan

SEED = 3
HOW = "--seed", str(SEED), "--dtype", "float64", "--lr", "1e-3", "--weight-decay", "0"
OPTIONS = partial(TrainOptions, seed=SEED, dtype="float64", learning_rate=1e-3, weight_decay=0.0)

SPLITS = {
    "gpt2-tiny": (
        ("--estimate", "--device", "h100-80gb", "--shards", "1,2"),
        ("--tp", "2", "--dp", "2", "--pp", "2", "--zero", "1"),
    ),
    "gpt2-experts-tiny": (
        ("--threads", "1", "--expert", "1,2"),
        ("--ep", "2", "--dp", "4", "--pp", "2", "--zero", "1"),
    ),
}
"""{model: how its profile and its plan say that blocks are split, or experts shared}"""


@pytest.mark.parametrize(
    ("name", "sizes", "players"),
    [
        ("gpt2-tiny", {"shards": 2, "replicas": 2, "zero": 1}, 4),
        ("gpt2-tiny", {"context": 2, "replicas": 2}, 4),
        ("gpt2-experts-tiny", {"expert": 2, "replicas": 4}, 4),
    ],
    ids=str,
)
def test_eight_ranks_of_a_folded_plan_compute_what_one_would(name: str, sizes: dict[str, Any], players: int) -> None:
    """As threads, each with the program that it unfolds for itself: the same without processes."""
    model = load_model(name)
    folded = _on_eight(model, **sizes)
    assert (folded.players_each, folded.num_devices) == (players, 8)
    require_equal_to_unsplit(model, folded)


def test_ranks_of_a_folded_plan_that_run_nothing_may_be_any_number() -> None:
    """One before the others, and so the player of the first program."""
    model = load_model("gpt2-tiny")
    folded = _on_eight(model, 1, shards=2, replicas=2)
    assert [own.count for own in folded.players] == [1, 4, 4]
    assert (folded.players_each, folded.num_devices, folded.placed.num_devices) == (4, 9, 9)
    require_equal_to_unsplit(model, folded)


def _on_eight(model: Model, first: int = 0, each: int = 4, **sizes: Any) -> Plan:
    """A folded plan of two stages on four devices, or so many, each, from a first one on."""
    ids = [block.id for block in model.blocks]
    cut = len(ids) // 2
    stages = [
        PlacedStage(blocks=tuple(own), devices=tuple(range(begin, begin + each)), microbatch_size=4, **sizes)
        for own, begin in ((ids[:cut], first), (ids[cut:], first + each))
    ]
    return folded_plan(placed_plan(model, stages, num_microbatches=3, microbatch_size=4))


@pytest.mark.slow
def test_a_process_of_a_folded_plan_may_run_nothing(tmp_path: Path) -> None:
    """The first of five has no stage; the trace has all five."""
    name, path, trace = "gpt2-tiny", tmp_path / "plan.json", tmp_path / "trace.json"
    model = load_model(name, seed=SEED)
    plan = _on_eight(model, 1, 2, replicas=2, zero=1)
    assert [own.count for own in plan.players] == [1, 2, 2]
    path.write_text(to_json(plan))
    with warm_ranks():
        done = pipeplan("run", path, "--model", name, *HOW, "--local", "--steps", "2", "--json", "--trace", trace)
    assert done.returncode == 0, done.stderr
    unsplit = Unsplit(model, OPTIONS(name))
    expected = [unsplit.step(step, plan.mini_batch) for step in range(2)]
    assert [step["loss"] for step in json.loads(done.stdout)["steps"]] == pytest.approx(expected, rel=1e-9)
    beside = pipeplan("simulate", path, "--measured", trace, "--json")
    assert beside.returncode == 0, beside.stderr
    assert len(json.loads(beside.stdout)["measured"]["devices"]) == 5


@pytest.mark.slow
def test_eight_processes_rehearse_a_folded_plan_and_count_its_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences and experts are shared; what ``run --json`` says of these is what ``profile --load-factor`` reads.

    Ranks connect as they need to, which more than 64 do by themselves.
    """
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    name, path, counted = "gpt2-experts-tiny", tmp_path / "plan.json", tmp_path / "run.json"
    model = load_model(name, seed=SEED)
    plan = _on_eight(model, expert=2, context=2, replicas=2)
    assert (plan.players_each, plan.num_devices) == (4, 8)
    path.write_text(to_json(plan))
    with warm_ranks():
        done = pipeplan("run", path, "--model", name, *HOW, "--local", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    counted.write_text(done.stdout)
    said = json.loads(done.stdout)
    unsplit = Unsplit(model, OPTIONS(name))
    expected = [unsplit.step(step, plan.mini_batch) for step in range(2)]
    assert [step["loss"] for step in said["steps"]] == pytest.approx(expected, rel=1e-9)
    uneven = [block["tokens_per_rank"] for block in said["experts"]["blocks"]]
    assert all(len(own) in (2, 4, 8) and max(own) > min(own) for own in uneven)
    load = LoadFactor().convert(str(counted), None, None)
    assert load == said["experts"]["load_factor"] > 1
    even, fullest = (
        estimate(name, device="h100-80gb", microbatch=(1,), expert=(2,), load_factor=each).blocks[2]
        for each in (1.0, load)
    )
    (own,), (more,) = ([row for row in each.costs if row.expert == 2] for each in (even, fullest))
    assert own.forward_ns < more.forward_ns
    assert more.activation_bytes == math.ceil(load * own.activation_bytes)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("model", SPLITS)
def test_eight_processes_train_a_folded_plan_as_one_would(model: str, tmp_path: Path) -> None:
    profile, plan, trace = (tmp_path / name for name in ("profile.json", "plan.json", "trace.json"))
    priced, sizes = SPLITS[model]
    assert pipeplan("profile", model, "--microbatch", "1,2", *priced, "-o", profile).returncode == 0
    asked = "--devices", "8", *sizes, "--mini-batch", "16", "--deterministic", "--time-limit", "1s"
    found = pipeplan("search", profile, *asked, "-o", plan)
    assert found.returncode == 0, found.stderr
    folded = folded_plan(read_plan(str(plan)))
    assert folded.players_each >= 2
    plan.write_text(to_json(folded))
    with warm_ranks():
        done = pipeplan("run", plan, "--model", model, *HOW, "--local", "--steps", "2", "--trace", trace, "--json")
    assert done.returncode == 0, done.stderr
    unsplit = Unsplit(load_model(model, seed=SEED), OPTIONS(model))
    expected = [unsplit.step(step, folded.mini_batch) for step in range(2)]
    assert [step["loss"] for step in json.loads(done.stdout)["steps"]] == pytest.approx(expected, rel=1e-9)
    beside = pipeplan("simulate", plan, "--measured", trace, "--json")
    assert beside.returncode == 0, beside.stderr
    assert len(json.loads(beside.stdout)["measured"]["devices"]) == 8
