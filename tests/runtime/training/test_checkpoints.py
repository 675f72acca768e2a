"""Training stops at any step and goes on under another plan, with the losses of a run that did not stop."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.runtime.launch.job import StepResult
from pipeplan.runtime.launch.local import watch_local
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.losses import Finding
from pipeplan.runtime.training import trainer as training
from pipeplan.runtime.training.checkpoint_folder import CheckpointFolder
from pipeplan.runtime.training.options import TrainOptions
from runtime_support.known import look_over
from runtime_support.pairs import CHAIN, PAIRS, TINY, UNTIED, chain_of, pair
from runtime_support.plans import TOLERANCE, TRAINING, four_devices, model_plan
from runtime_support.warm import warm_ranks
from support.marks import asked_for, slow_but

RANK = (sys.executable, "-m", "runtime_support.checkpoint_rank")
NUM_STEPS = 4

Leg = tuple[Plan, TrainOptions, int]
"""A plan, how it trains, and up to which step."""


SLOW = (
    "replicas come and go",
    "parameters divided, then optimizers, then whole",
    "whole, then gradients divided, then parameters",
    "tiles, then other tiles, then stages",
    "and the other way round",
    "whole, then split over three",
    "experts over four, then sequences too, then whole",
    "a configuration's experts and sequences over two, then whole",
    "whole, then experts over two",
    "whole, then shares in stages, then shares with optimizers divided, then with all",
    "a configuration's shares in stages, then divided, then sequences shared, then whole",
    "branches",
)
LONG = (
    "a configuration's shares in stages, then divided, then sequences shared, then whole",
    "replicas come and go",
    "parameters divided, then optimizers, then whole",
    "whole, then shares in stages, then shares with optimizers divided, then with all",
    "and the other way round",
    "whole, then split over three",
    "whole, then gradients divided, then parameters",
    "whole, then experts over two",
    "branches",
)
"""Of the pairs, the long ones among the slow."""


def legs_of(model: str, plans: Sequence[Plan], folder: Path, **options: Any) -> list[Leg]:
    """Stop at random steps; the learning rate changes, and gradients are clipped."""
    chosen = random.Random(f"{folder.name}").sample(range(1, NUM_STEPS), len(plans) - 1)
    base = replace(TRAINING, model=model, num_steps=NUM_STEPS, checkpoint=str(folder), **options)
    ends = [*sorted(chosen), NUM_STEPS]
    return [
        (four_devices(plan), replace(base, resume=index > 0), end)
        for index, (plan, end) in enumerate(zip(plans, ends, strict=True))
    ]


def told(cases: Mapping[str, list[Leg]]) -> dict[str, list[list[dict[str, Any]]]]:
    """[case][rank][leg] what 4 real processes report."""
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in cases}
    job = {
        name: [
            {"plan": plan.model_dump_json(), "options": options.as_json(), "until": until}
            for plan, options, until in legs
        ]
        for name, legs in cases.items()
    }

    def listen(rank: int, report: Mapping[str, Any]) -> None:
        found[report["name"]].append(report["legs"])

    with warm_ranks(look_over, [(leg["plan"], leg["options"]) for legs in job.values() for leg in legs]):
        watch_local("runtime_support.checkpoint_rank:work", [()] * 4, job, TRAINING.timeout_ns, listen, RANK)
    return found


def refusals(folder: Path) -> dict[str, list[Leg]]:
    """Runs that a checkpoint of two steps does not fit."""
    plan, other = model_plan(load_model(TINY), [0, 1, 2, 3]), chain_of((0,), (1,), (2,), (3,))
    base = replace(TRAINING, num_steps=NUM_STEPS, checkpoint=str(folder))
    again = replace(base, resume=True)
    wrong: dict[str, Leg] = {
        "in use": (plan, base, NUM_STEPS),
        "seed": (plan, replace(again, seed=4), NUM_STEPS),
        "steps": (plan, replace(again, num_steps=2), 2),
        "model": (other, replace(again, model=CHAIN), NUM_STEPS),
        "width": (plan, replace(again, model="runtime_support.checkpoint_models:wider"), NUM_STEPS),
    }
    nothing = (plan, replace(again, checkpoint=str(folder / "nowhere")), NUM_STEPS)
    first = {"first": [(plan, base, 2)], "nothing": [nothing]}
    return first | {name: [leg] for name, leg in wrong.items()}


TOLD = {
    "in use": "has step-00000002; give --resume, or another folder",
    "seed": "step-00000002 was trained with --seed 3, and this run is with --seed 4; resume with the same",
    "steps": "--steps 2: .* holds 2 steps, and --steps is the total; give more",
    "model": "--model gpt2-tiny, and this run is with --model chain",
    "width": r"parameters/embedding\.\S+ is float64\[16, 32\], and in the model float64\[20, 32\]; resume",
    "nothing": "--resume: .*nowhere has no whole checkpoint; leave --resume out to start",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, folder: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """[case][rank][leg], all by the same processes."""
    asked = asked_for(request, dict.fromkeys([*PAIRS, "counting", *TOLD]))
    cases = {name: legs_of(*pair(name), folder / name) for name in asked if name in PAIRS}
    if "counting" in asked:
        tiny = pair("four devices, then two, then one")[1][1:]
        own = "runtime_support.checkpoint_models:Counting"
        cases["counting"] = legs_of(TINY, tiny, folder / "counting", optimizer=own)
    return told(cases | (refusals(folder / "refused") if TOLD.keys() & asked.keys() else {}))


@slow_but("name", [*PAIRS, "counting"], lambda name: name not in SLOW, LONG.__contains__)
def test_losses_and_parameters_are_those_of_an_unsplit_run(name: str, reports: Any, folder: Path) -> None:
    for rank in reports[name]:
        first = [leg["first"] for leg in rank]
        assert first == [leg["first"] for leg in reports[name][0]]
        assert first == sorted({0, *first}), "each goes on where the one before has stopped"
        assert max(leg["distance"] for leg in rank) < TOLERANCE


def test_copies_are_written_once_and_old_checkpoints_removed(reports: Any, folder: Path) -> None:
    for name in PAIRS.keys() & reports:
        kept = CheckpointFolder(str(folder / name))
        assert len(kept.whole()) == 2, "three were written in one case"
        assert {entry.name for entry in kept.path.iterdir()} == {kept.of(step).name for step in kept.whole()} | {
            ".lock"
        }
        for step in kept.whole():
            metadata = FileSystemReader(kept.of(step)).read_metadata()
            known = sum(each.length for each in metadata.storage_data.values())
            written = sum(file.stat().st_size for file in kept.of(step).glob("*.distcp"))
            assert known == written, "no file has anything that the index does not know"
            names = {index.fqn for index in metadata.storage_data}
            stages = [stage for plan in pair(name)[1] for stage in plan.stages]
            split = any(one.shards * one.sharers * one.expert > 1 or one.configurations for one in stages)
            assert split or len(names) == len(metadata.storage_data), name
            tied = {"parameters/b4.layers.0.weight", "parameters/head.output.weight"}
            assert pair(name)[0] == UNTIED or not tied & names, "a tied parameter has one name"


@pytest.mark.parametrize("name", list(TOLD))
def test_what_does_not_fit_is_refused_by_all(name: str, reports: Any) -> None:
    for ((leg,),) in zip(reports[name], strict=True):
        assert re.search(TOLD[name], leg["refused"]), leg["refused"]


def test_no_checkpoint_behind_numbers_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [StepResult(0, 1.0, 1, 1), StepResult(1, math.nan, 1, 1), StepResult(2, 1.0, 1, 1, math.inf)]
    trainer, progress, plan = MagicMock(), MagicMock(), MagicMock()
    plan.provenance.tokens_per_sample = None
    trainer.resume.return_value = trainer.stopping = 0
    trainer.step.side_effect = [(step, []) for step in steps]
    trainer.all_ranks.gather.return_value = [{}]
    trainer.evaluation.return_value = None
    monkeypatch.setattr(training, "Trainer", lambda *_: trainer)
    monkeypatch.setattr(training, "losses_of", lambda *_: Finding({}))
    shown = MagicMock()
    options = TrainOptions("gpt2-tiny", num_steps=3, checkpoint="saved", checkpoint_every=1)
    assert training.train(plan, options, progress, shown).steps == tuple(steps)
    assert [type(call.args[0]).__name__ for call in shown.call_args_list] == ["Started", *3 * ["StepResult"]]
    assert trainer.save.call_count == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--checkpoint .*file/deeper cannot be made: Not a directory"):
        CheckpointFolder(str(tmp_path / "file" / "deeper")).make()


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path), num_kept=2)
    for name in (".step-00000009.part", ".step-00000008.old", "step-7", "other"):
        (tmp_path / name).mkdir()
    assert folder.whole() == []
    for step in (1, 2, 100_000_000, 3):
        folder.begin(step).mkdir()
        folder.publish(step)
    assert folder.whole() == [3, 100_000_000]
    assert not list(tmp_path.glob(".step-*"))
