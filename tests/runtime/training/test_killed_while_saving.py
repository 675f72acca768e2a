"""A rank that is killed at any point of a checkpoint's writing loses nothing; two runs do not share a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeplan.errors import ExecutionError
from pipeplan.files import Plan
from pipeplan.runtime.launch.job import job_of
from pipeplan.runtime.launch.local import watch_local
from pipeplan.runtime.training.checkpoint_folder import CheckpointFolder, require_checksums
from pipeplan.runtime.training.options import TrainOptions
from runtime_support import models
from runtime_support.plans import model_plan
from runtime_support.warm import warm_ranks
from support.marks import slow_but

NUM_STEPS = 4
FOLDER = "pipeplan.runtime.training.checkpoint_folder"

POINTS: dict[str, tuple[int, str, int, list[int]]] = {
    "before its tensors are written": (1, "torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data", 0, []),
    "tensors written": (1, "torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data", 3, [1, 2]),
    "the index written": (0, "torch.distributed.checkpoint.filesystem:FileSystemWriter.finish", 3, [1, 2]),
    "its checksums taken": (1, f"{FOLDER}:hashlib.file_digest", 3, [1, 2]),
    "in the middle of the checksums' file": (0, "json:dump", 0, []),
    "the checksums written": (0, "pipeplan.runtime.training.checkpoint:write_checksums", 3, [1, 2]),
    "before it has its name": (0, f"{FOLDER}:_sync", 5, [1, 2]),
    "with its name": (0, f"{FOLDER}:_sync", 6, [1, 2, 3]),
    "an old one renamed": (0, f"{FOLDER}:shutil.rmtree", 0, [2, 3]),
    "an old one removed": (0, f"{FOLDER}:shutil.rmtree", 1, [2, 3]),
}
"""Which rank is killed when it has called what how often (0: the first time, instead), and which are whole then."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return model_plan(models.chain(), [0, 1], num_microbatches=2, microbatch_size=1)


def training(plan: Plan, folder: Path, *, resume: bool) -> dict[str, Any]:
    options = TrainOptions(
        "runtime_support.models:chain",
        num_steps=NUM_STEPS,
        dtype="float64",
        num_threads=1,
        checkpoint=str(folder),
        checkpoint_every=1,
        resume=resume,
    )
    return {"name": folder.name, **job_of(plan, options)}


def losses_of(trainings: Sequence[Mapping[str, Any]], dies: tuple[int, str, int] = (-1, "", 0)) -> dict[str, list[float]]:
    """What each training, by name, of two forked ranks reports; of which one may die."""
    found: dict[str, list[float]] = {each["name"]: [] for each in trainings}

    def listen(rank: int, report: Mapping[str, Any]) -> None:
        if report["event"] == "step":
            found[report["name"]].append(report["step"]["loss"])

    job = {"trainings": trainings, **dict(zip(("victim", "at", "calls"), dies, strict=True))}
    with warm_ranks():
        watch_local("runtime_support.killed_rank:work", [()] * 2, job, 60 * 10**9, listen)
    return found


@pytest.fixture(scope="module")
def undisturbed(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return losses_of([training(plan, folder, resume=False)])[folder.name]


QUICK = ("tensors written", "before it has its name", "an old one renamed")


@slow_but("point", POINTS, lambda point: point in QUICK)
def test_a_rank_killed_while_a_checkpoint_is_written_loses_nothing(
    point: str, plan: Plan, undisturbed: list[float], tmp_path: Path
) -> None:
    victim, name, calls, whole = POINTS[point]
    with pytest.raises(ExecutionError, match=rf"^rank {victim} was killed \(SIGKILL\) after step \d: writing a checkp"):
        losses_of([training(plan, tmp_path, resume=False)], (victim, name, calls))
    folder = CheckpointFolder(str(tmp_path))
    assert folder.whole() == whole
    for step in whole:
        require_checksums(folder.of(step))
    after = losses_of([training(plan, tmp_path, resume=bool(whole))])
    assert after[tmp_path.name] == undisturbed[max(whole, default=0) :]
    assert folder.whole() == [NUM_STEPS - 1, NUM_STEPS]
    assert not list(tmp_path.glob(".step-*"))
