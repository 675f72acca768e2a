"""A rank that is killed at any point of a checkpoint's writing loses nothing; two runs do not share a folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeplan.errors import ExecutionError, UsageError
from pipeplan.files import Plan, write_file
from pipeplan.runtime.launch.job import job_of
from pipeplan.runtime.launch.local import watch_local
from pipeplan.runtime.training.checkpoint_folder import CheckpointFolder, require_checksums
from pipeplan.runtime.training.options import TrainOptions
from runtime_support import models
from runtime_support.plans import model_plan
from runtime_support.warm import share_server, warm_left_over, warm_ranks
from support.commands import pipeplan
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


def training(plan: Plan, folder: Path, *, resume: bool) -> Mapping[str, Any]:
    options = TrainOptions(
        "runtime_support.models:chain",
        num_steps=NUM_STEPS,
        dtype="float64",
        num_threads=1,
        checkpoint=str(folder),
        checkpoint_every=1,
        resume=resume,
    )
    return job_of(plan, options)


def losses_of(training: Mapping[str, Any], dies: tuple[int, str, int] = (-1, "", 0)) -> list[float]:
    """What two forked ranks report, of which one may die."""
    found: list[float] = []

    def listen(rank: int, report: Mapping[str, Any]) -> None:
        if report["event"] == "step":
            found.append(report["step"]["loss"])

    job = {"training": training, **dict(zip(("victim", "at", "calls"), dies, strict=True))}
    with warm_ranks():
        watch_local("runtime_support.killed_rank:work", [()] * 2, job, 60 * 10**9, listen)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the undisturbed training keeps its checkpoints."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def undisturbed(plan: Plan, trained: Path) -> list[float]:
    return losses_of(training(plan, trained, resume=False))


QUICK = ("before it has its name",)


@slow_but("point", POINTS, lambda point: point in QUICK)
def test_a_rank_killed_while_a_checkpoint_is_written_loses_nothing(
    point: str, plan: Plan, undisturbed: list[float], tmp_path: Path
) -> None:
    victim, name, calls, whole = POINTS[point]
    with pytest.raises(ExecutionError, match=rf"^rank {victim} was killed \(SIGKILL\) after step \d: writing a checkp"):
        losses_of(training(plan, tmp_path, resume=False), (victim, name, calls))
    folder = CheckpointFolder(str(tmp_path))
    assert folder.whole() == whole
    for step in whole:
        require_checksums(folder.of(step))
    assert losses_of(training(plan, tmp_path, resume=bool(whole))) == undisturbed[max(whole, default=0) :]
    assert folder.whole() == [NUM_STEPS - 1, NUM_STEPS]
    assert not list(tmp_path.glob(".step-*"))


def test_a_training_goes_on_from_nothing_that_has_changed(
    plan: Plan, undisturbed: list[float], trained: Path, tmp_path: Path
) -> None:
    assert len(undisturbed) == NUM_STEPS
    kept = shutil.copytree(trained, tmp_path / "kept")
    shard = CheckpointFolder(str(kept)).of(NUM_STEPS) / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    with pytest.raises(UsageError, match=rf"{shard.parent.name} is damaged \(__1_0\.distcp: .*its checksum"):
        losses_of(training(plan, kept, resume=True))


# Two commands in one folder ---------------------------------------------------------------------------------------


def started(folder: Path, *arguments: object) -> int:
    """The command in a process of its own, whose ranks are forked, too; its output is in the folder."""
    process = os.fork()
    if not process:
        code = 1
        try:
            share_server()
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            done = pipeplan(*arguments, cwd=folder)
            (folder / "said").write_text(done.stderr)
            code = done.returncode
        finally:
            os._exit(code)
    return process


def test_a_folder_has_one_run_at_a_time(plan: Plan, undisturbed: list[float], tmp_path: Path) -> None:
    """A second one is refused, the first goes on, and where it is killed its lock keeps nobody out."""
    write_file(plan, str(tmp_path / "plan.json"))
    folder = CheckpointFolder(str(tmp_path / "kept"))
    asked = f"run plan.json --model runtime_support.models:gated --steps {NUM_STEPS} --dtype float64 --local --json"
    command = (*asked.split(), "--checkpoint", "kept", "--checkpoint-every", 1)
    with warm_ranks():
        first = started(tmp_path, *command)
        await_step(folder, 2, first)
        second = pipeplan(*command, cwd=tmp_path)
        assert second.returncode == 2
        told = r"--checkpoint kept is in use by process (\d+) on \S+, since \S+ \S+; wait for its end, or give another"
        said = re.search(told, second.stderr)
        assert said is not None, second.stderr
        assert int(said[1]) in warm_left_over(), "a rank of the first"
        (tmp_path / "go-2").touch()
        await_step(folder, 3, first)
        for step in (2, 3):  # the one before is being dropped
            require_checksums(folder.of(step))
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        while warm_left_over():
            time.sleep(0.01)
        assert f"process {said[1]} on " in (folder.path / ".lock").read_text(), "what is left of it"
        (tmp_path / "go-3").touch()
        third = pipeplan(*command, "--resume", cwd=tmp_path)
    assert third.returncode == 0, third.stderr
    assert [step["loss"] for step in json.loads(third.stdout)["steps"]] == undisturbed[3:]
    assert folder.whole() == [3, 4]


def await_step(folder: CheckpointFolder, step: int, process: int) -> None:
    """Wait for a checkpoint of a training that goes on."""
    while step not in folder.whole():
        assert os.waitpid(process, os.WNOHANG) == (0, 0), "it has ended"
        time.sleep(0.01)
