"""Damaged checkpoints are refused with the file, why, and how to go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipeplan.errors import UsageError
from pipeplan.runtime.training.checkpoint import CheckpointFolder, metadata_of, rest_of, undamaged

# in one process there is no process group
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

REST = "rest.pt"
TENSORS = "__0_0.distcp"


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Has checkpoints of 10 and of 20 steps."""
    found = CheckpointFolder(str(tmp_path))
    for step in (10, 20):
        path = found.begin(step)
        save({"parameters/a": torch.ones(500)}, storage_writer=FileSystemWriter(path), no_dist=True)
        torch.save({"step": step, "identity": {}, "schedule": None, "numbers": {}}, path / REST)
        found.publish(step)
    return found


def read(folder: CheckpointFolder, step: int) -> float:
    """All of a checkpoint; the sum of its tensor."""
    path, room = folder.of(step), torch.zeros(500)
    with undamaged(folder, step):
        rest, metadata = rest_of(path, REST), metadata_of(path)
        load({"parameters/a": room}, storage_reader=FileSystemReader(path), no_dist=True)
    assert rest["step"] == step
    assert set(metadata.state_dict_metadata) == {"parameters/a"}
    return float(room.sum())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def write_less(path: Path) -> None:
    torch.save({"step": 20, "identity": {}}, path)


def test_a_whole_one_is_read(folder: CheckpointFolder) -> None:
    assert read(folder, 10) == read(folder, 20) == 500


@pytest.mark.parametrize(
    ("file", "harm", "told"),
    [
        (REST, Path.unlink, r"rest\.pt: it is not there"),
        (REST, cut, r"rest\.pt: RuntimeError: PytorchStreamReader"),
        (REST, overwrite, r"rest\.pt: it is not what was written"),
        (REST, write_less, r"rest\.pt: it has no numbers, schedule"),
        (".metadata", Path.unlink, r"\.metadata: it is not there"),
        (".metadata", cut, r"\.metadata: it is not what was written"),
        (TENSORS, Path.unlink, r"__0_0\.distcp: it is not there"),
        (TENSORS, cut, r"__0_0\.distcp: it has 100 bytes of \d{4}"),
        (TENSORS, overwrite, "rank 0 cannot read tensors: it is not what was written"),
    ],
)
def test_damage_is_told_with_the_one_before(
    file: str, harm: Callable[[Path], None], told: str, folder: CheckpointFolder
) -> None:
    harm(folder.of(20) / file)
    with pytest.raises(UsageError) as caught:
        read(folder, 20)
    text = str(caught.value)
    before = "the one before is step-00000010: remove this folder to go on from it"
    assert re.fullmatch(rf"{folder.of(20)} is damaged \({told}[^\n]*\); {before}", text), text
    assert read(folder, 10) == 500


def test_damage_of_the_only_one(folder: CheckpointFolder) -> None:
    (folder.of(10) / REST).unlink()
    with pytest.raises(UsageError, match=r"step-00000010 is damaged .* there is none before it: remove .* start anew"):
        read(folder, 10)
