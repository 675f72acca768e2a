"""TensorOpt's models as the frontier splits them: points of their frontiers train as an unsplit run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeplan.files import PlacedStage
from pipeplan.runtime.executor.stage import _Values
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.workload.elements import Remade
from runtime_support.frontiers import DEVICES, PAPERS, SAMPLES, chosen, frontier_of
from runtime_support.plans import TRAINING, Case, Reports, Unsplit, assert_as_unsplit, placed_plan, reports_of
from runtime_support.threads import require_equal_to_unsplit
from runtime_support.warm import warm_ranks
from support.commands import pipeplan
from support.marks import asked_for, slow_but


@slow_but("name", PAPERS, "candle-uno-tiny".__eq__, lambda name: name.startswith(("vgg16", "wide-resnet", "gpt2")))
def test_points_of_frontiers_train_as_an_unsplit_run(name: str) -> None:
    request, found = frontier_of(name)
    for index in set(chosen(name).values()):
        require_equal_to_unsplit(load_model(name), found.plan(request, index))


@slow_but("name", PAPERS, "candle-uno-tiny".__eq__)
def test_stages_of_a_pipeline_make_tensors_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each those between its own blocks; what travels between them is kept as it came."""
    request, found = frontier_of(name)
    whole, model, made = found.described(request, chosen(name)["again"]).stages[0], load_model(name), Counter[str]()
    ways = dict(zip(whole.blocks, whole.configurations, strict=True))
    half = len(ways) // 2
    stages = [
        PlacedStage(
            blocks=blocks,
            devices=devices,
            shards=DEVICES,
            configurations=tuple(ways[block] for block in blocks),
            remade=tuple(each for each in whole.remade if {each.source, each.target} <= {*blocks}),
        )
        for blocks, devices in ((whole.blocks[:half], (0, 1, 2, 3)), (whole.blocks[half:], (4, 5, 6, 7)))
    ]
    assert any(stage.remade for stage in stages)
    for kept in ("after", "before"):
        do = getattr(_Values, f"let_go_{kept}")

        def let_go(values: _Values, source: str, block: str, *copy: Any, do: Any = do) -> None:
            made[f"{source} {block}"] += 1
            do(values, source, block, *copy)

        monkeypatch.setattr(_Values, f"let_go_{kept}", let_go)
    count = 1 if name.startswith("wide-resnet") else 2  # batch norm is over a micro-batch
    require_equal_to_unsplit(model, placed_plan(model, stages, num_microbatches=count, microbatch_size=SAMPLES))
    names = {f"{each.source} {each.target}" for stage in stages for each in stage.remade}
    assert made == dict.fromkeys(names, count * DEVICES)


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    """Of two points of each frontier, by four processes."""
    cases: dict[str, Case] = {}
    for name in asked_for(request, dict.fromkeys(PAPERS)):
        asked, splits = frontier_of(name)
        for what in ("leanest", "again"):
            plan = splits.plan(asked, chosen(name)[what])
            cases[f"{name} {what}"] = plan, replace(TRAINING, model=name, clip_norm=1e-3)
    return reports_of(cases)


@slow_but("name", PAPERS, lambda _: False, lambda name: name not in ("lstm-tiny-operators", "dlrm-tiny"))
def test_four_processes_train_points_of_frontiers_as_one_would(name: str, reports: Reports) -> None:
    """Losses, gradients and updated parameters, on gloo."""
    for what in ("leanest", "again"):
        options = replace(TRAINING, model=name, clip_norm=1e-3)
        assert_as_unsplit(load_model(name), options, reports[f"{name} {what}"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm-tiny", pytest.param("candle-uno-tiny", marks=pytest.mark.long)])
def test_commands_lead_from_a_profile_to_a_run(name: str, tmp_path: Path) -> None:
    """``profile``, ``frontier`` and ``run``, whose losses are those of an unsplit run."""
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    estimated = "--estimate", "--device", "v100-16gb", "--microbatch", "1,2,4"
    assert pipeplan("profile", name, *estimated, "-o", profile).returncode == 0
    asked = "--devices", 2, "--mini-batch", SAMPLES, "--point", 1
    assert pipeplan("frontier", profile, *asked, "-o", plan).returncode == 0
    assert json.loads(plan.read_text())["stages"][0]["remade"]
    how = "--seed", 5, "--dtype", "float64", "--lr", "1e-3", "--weight-decay", "0"
    with warm_ranks():
        done = pipeplan("run", plan, "--model", name, *how, "--local", "--steps", 2, "--json")
    assert done.returncode == 0, done.stderr
    options = TrainOptions(name, seed=5, dtype="float64", learning_rate=1e-3, weight_decay=0.0)
    unsplit = Unsplit(load_model(name), options)
    expected = [unsplit.step(step, SAMPLES) for step in range(2)]
    assert [step["loss"] for step in json.loads(done.stdout)["steps"]] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("remade", "told"),
    [
        ([Remade(source="layer0", target="nowhere", kept="after")], "have 'nowhere', which is not one of its blocks"),
        ([Remade(source="layer0", target="layer1", kept="before")] * 2, "the tensor from 'layer0' to 'layer1' twice"),
    ],
)
def test_tensors_that_cannot_be_made_again_are_refused(remade: list[Remade], told: str) -> None:
    blocks = tuple(block.id for block in load_model("lstm-tiny-operators").blocks)
    ways = ("copies2",) * len(blocks)
    with pytest.raises(ValueError, match=told):
        PlacedStage(blocks=blocks, devices=(0, 1), shards=2, configurations=ways, remade=tuple(remade))
    with pytest.raises(ValueError, match="have configurations and are not recomputed"):
        PlacedStage(
            blocks=blocks, devices=(0, 1), shards=2, configurations=ways, remade=tuple(remade[:1]), recompute=True
        )
