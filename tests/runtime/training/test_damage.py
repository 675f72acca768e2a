"""Damaged checkpoints are refused with the file, why, and how to go on."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path, PosixPath
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import _get_layout

from pipeplan.errors import UsageError
from pipeplan.runtime.training.checkpoint import Checkpoints, TrainingState
from pipeplan.runtime.training.checkpoint_folder import (
    CheckpointFolder,
    DamagedFileError,
    PlainReader,
    metadata_of,
    require_checksums,
    rest_of,
    undamaged,
    write_checksums,
)
from pipeplan.runtime.training.master_copies import LossScale
from runtime_support.killed_rank import killed_after
from support.marks import one_in

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
        torch.save({"step": step, "identity": {}, "schedule": None, "numbers": {}, "checksums": True}, path / REST)
        write_checksums(path, {})
        found.publish(step)
    return found


def read(folder: CheckpointFolder, step: int) -> float:
    """All of a checkpoint; the sum of its tensor."""
    path, room = folder.of(step), torch.zeros(500)
    with undamaged(folder, step):
        rest, metadata = rest_of(path, REST, step), metadata_of(path)
        load({"parameters/a": room}, storage_reader=PlainReader(path), no_dist=True)
    assert rest["step"] == step
    assert set(metadata.state_dict_metadata) == {"parameters/a"}
    return float(room.sum())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def write_less(path: Path) -> None:
    torch.save({"step": 20, "identity": {}}, path)


def write_as_of_another_step(path: Path) -> None:
    path.write_bytes((path.parent.parent / "step-00000010" / REST).read_bytes())


def write_facts(**facts: object) -> Callable[[Path], None]:
    """Some facts that training does not write, or all of them ``instead``."""

    def harm(path: Path) -> None:
        whole = {"step": 20, "identity": {}, "schedule": None, "numbers": {}} | facts
        torch.save(facts.get("instead", whole), path)

    return harm


def test_a_whole_one_is_read(folder: CheckpointFolder) -> None:
    assert read(folder, 10) == read(folder, 20) == 500


@pytest.mark.parametrize(
    ("file", "harm", "told"),
    [
        (REST, Path.unlink, r"rest\.pt: it is not there"),
        (REST, cut, r"rest\.pt: RuntimeError: PytorchStreamReader"),
        (REST, overwrite, r"rest\.pt: it is not what was written"),
        (REST, write_less, r"rest\.pt: it has no numbers, schedule"),
        (REST, write_as_of_another_step, r"rest\.pt: it is of step 10"),
        (REST, write_facts(instead=[1]), r"rest\.pt: it is no table of facts"),
        (REST, write_facts(step="20"), r"rest\.pt: its step is not what training writes"),
        (
            REST,
            write_facts(identity=[], numbers={"a": 1}),
            r"rest\.pt: its identity, numbers are not what training writes",
        ),
        (REST, write_facts(schedule=(1, 2, 3)), r"rest\.pt: its schedule is not what training writes"),
        (REST, write_facts(schedule=([1], {})), r"rest\.pt: its schedule is not what training writes"),
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


@pytest.mark.parametrize(
    "facts", [{}, {"schedule": None}, {"schedule": ([{}], {"base_lrs": 1})}, {"scale": {"value": 1.0}}]
)
def test_facts_that_do_not_fit_are_refused(
    facts: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of optimizer, schedule and loss scale; their checksums are right."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.param_groups[0]["params"] = []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scale = LossScale(value=4.0) if "scale" in facts else None
    held = TrainingState([], {"a": torch.ones(3)}, optimizer, schedule, {}, scale)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    folder, ranks = CheckpointFolder(str(tmp_path)), MagicMock(gather=lambda value: [value])
    path = folder.begin(20)
    save({"buffers/a": torch.ones(3)}, storage_writer=FileSystemWriter(path), no_dist=True)
    settings = [{key: value for key, value in optimizer.param_groups[0].items() if key != "params"}]
    right = {
        "step": 20,
        "identity": {},
        "schedule": (settings, schedule.state_dict()),
        "numbers": {},
        "checksums": True,
    }
    torch.save(right | facts, path / REST)
    write_checksums(path, {})
    folder.publish(20)
    checkpoints = Checkpoints(folder, held, ranks, MagicMock(rank=0))
    if not facts:
        assert checkpoints._load(20) == 20
        return
    with pytest.raises(UsageError, match=r"is damaged \(rest\.pt: optimizer and schedule cannot be put where it says"):
        checkpoints._load(20)


def test_damage_of_the_only_one(folder: CheckpointFolder) -> None:
    (folder.of(10) / REST).unlink()
    with pytest.raises(UsageError, match=r"step-00000010 is damaged .* there is none before it: remove .* start over"):
        read(folder, 10)


# Checksums --------------------------------------------------------------------------------------------------------


FILES = (".metadata", "__0_0.distcp", "checksums.json", REST)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_told_with_the_file(file: str, seed: int, folder: CheckpointFolder) -> None:
    path = folder.of(20) / file
    content, rng = bytearray(path.read_bytes()), random.Random(f"{file}{seed}")
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    told = rf"step-00000020 is damaged \({re.escape(file)}: .*; the one before is step-00000010: remove this folder"
    with pytest.raises(UsageError, match=told), undamaged(folder, 20):
        require_checksums(folder.of(20))
    require_checksums(folder.of(10))


def of_these(folder: CheckpointFolder, names: Iterable[str]) -> None:
    """Checksums that are right of themselves, of files that somebody names."""
    digests = dict.fromkeys(names, "0" * 64)
    content = {"files": digests, "sha256": hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()}
    (folder.of(20) / "checksums.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["../step-00000010/rest.pt", "/dev/zero", "..", ""])
def test_checksums_are_of_files_of_the_checkpoint(name: str, folder: CheckpointFolder) -> None:
    of_these(folder, [name])
    with pytest.raises(DamagedFileError, match=r"checksums\.json: it has .*, which is no file of the checkpoint"):
        require_checksums(folder.of(20))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_has_no_end_is_not_read(file: str, kind: str, folder: CheckpointFolder) -> None:
    path = folder.of(20) / file
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=rf"{re.escape(file)}: it is no plain file"), undamaged(folder, 20):
        require_checksums(folder.of(20))
    with suppress(UsageError):
        read(folder, 20)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("of", [PosixPath, TensorProperties, _get_layout], ids=["class", "part", "function"])
def test_an_index_changes_nothing_that_was_there_before(of: Any, slots: bool, folder: CheckpointFolder) -> None:
    """What names something and then sets its attributes, as pickles set those of what they have made."""
    pushed = {"planted": 1}
    body = pickle.dumps((None, pushed) if slots else pushed, protocol=2)
    named = f"c{of.__module__}\n{of.__name__}\n".encode()
    content = pickle.PROTO + b"\x02" + named + body.removeprefix(pickle.PROTO + b"\x02").removesuffix(b".") + b"b."
    (folder.of(20) / ".metadata").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"\.metadata: it is not what was written \(it changes what is not"):
        metadata_of(folder.of(20))
    assert not hasattr(of, "planted")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_copy_of_the_process_does_not_keep_the_lock(folder: CheckpointFolder) -> None:
    """Such as a loader's worker, which outlives a rank that is killed."""
    folder.lock()
    copy = os.fork()
    if not copy:
        signal.pause()
    try:
        other = CheckpointFolder(str(folder.path))
        with pytest.raises(UsageError, match="is in use by process"):
            other.lock()
        folder.unlock()
        for _ in range(1000):  # the copy may not have begun
            with suppress(UsageError):
                other.lock()
                break
            time.sleep(0.01)
        other.unlock()
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)
    other.lock()
    other.unlock()


def test_ranks_share_the_files(folder: CheckpointFolder) -> None:
    (folder.of(20) / TENSORS).write_bytes(b"")
    refused = 0
    for rank in range(5):
        try:
            require_checksums(folder.of(20), rank, 5)
        except DamagedFileError:
            refused += 1
    assert refused == 1


def test_checksums_that_are_not_there(folder: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.of(20) / "checksums.json").unlink()
    with pytest.raises(DamagedFileError, match=r"checksums\.json: it is not there"):
        require_checksums(folder.of(20))
    torch.save({"step": 20, "identity": {}, "schedule": None, "numbers": {}}, folder.of(20) / REST)
    require_checksums(folder.of(20))
    assert "step-00000020 has no checksums: an earlier pipeplan wrote it" in capsys.readouterr().err


# An index from a stranger -----------------------------------------------------------------------------------------


class Runs:
    """What a pickle of it runs when it is read."""

    def __init__(self, *call: object) -> None:
        self._call = call

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call[0], self._call[1:]


CALLS = {
    "a command": (os.system, "touch RAN"),
    "code": (exec, "open('RAN', 'w')"),
    "a file": (open, "RAN", "w"),
    "an attribute": (getattr, os, "system"),
    "an attribute of what is plain": (getattr, _MEM_FORMAT_ENCODING, "mro"),
    "a function of torch": (torch.load, "RAN"),
    "a module of torch": (torch.hub.load, "RAN"),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_an_index_runs_nothing(name: str, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder.of(20)
    monkeypatch.chdir(path)
    index = metadata_of(path)
    index.planner_data = Runs(*CALLS[name]) if name != "an attribute" else Runs(getattr, "text", "upper")
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(
        UsageError, match=r"step-00000020 is damaged \(\.metadata: it is not what was written \(it names '"
    ):
        read(folder, 20)
    assert not (path / "RAN").exists()


def test_an_index_of_an_older_python_is_read(folder: CheckpointFolder) -> None:
    """Python before 3.11.4, as some systems have it, writes a member of an enumeration as an attribute of that."""
    index = metadata_of(folder.of(20))
    index.planner_data = Runs(getattr, _MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    (folder.of(20) / ".metadata").write_bytes(pickle.dumps(index))
    assert metadata_of(folder.of(20)).planner_data is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@pytest.mark.parametrize("elsewhere", ["../step-00000010/__0_0.distcp", "/etc/passwd", "..", ".metadata"])
def test_tensors_lie_in_the_checkpoint(elsewhere: str, folder: CheckpointFolder) -> None:
    index = metadata_of(folder.of(20))
    for stored in index.storage_data.values():
        stored.relative_path = elsewhere
    (folder.of(20) / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UsageError, match="it has a tensor that lies in no file of the checkpoint"):
        read(folder, 20)


@pytest.mark.parametrize("made", [1, None, [], {"state_dict_metadata": {}}, "text"])
def test_an_index_is_one(made: object, folder: CheckpointFolder) -> None:
    (folder.of(20) / ".metadata").write_bytes(pickle.dumps(made))
    with pytest.raises(UsageError, match=r"\.metadata: it is no index"):
        read(folder, 20)


# Two trainings in one folder --------------------------------------------------------------------------------------


def holding(folder: Path) -> int:
    """A process that has locked the folder."""
    told, tell = os.pipe()
    process = os.fork()
    if not process:
        CheckpointFolder(str(folder)).lock()
        os.write(tell, b"locked")
        signal.pause()
    assert os.read(told, 6) == b"locked"
    os.close(told)
    os.close(tell)
    return process


def test_a_folder_is_one_trainings_until_it_ends_or_dies(tmp_path: Path) -> None:
    mine, other = CheckpointFolder(str(tmp_path)), CheckpointFolder(str(tmp_path))
    holder = holding(tmp_path)
    try:
        told = rf"--checkpoint {tmp_path} is in use by process {holder} on \S+, since 2\S+ \S+; wait for its end"
        with pytest.raises(UsageError, match=told):
            mine.lock()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    mine.lock()
    with pytest.raises(UsageError, match=rf"is in use by process {os.getpid()} on "):
        other.lock()
    mine.unlock()
    other.lock()
    other.unlock()
    assert mine.whole() == []


def test_links_in_a_folder_from_a_stranger_lead_nowhere(folder: CheckpointFolder, tmp_path: Path) -> None:
    """Neither the lock nor what is removed is what a link leads to."""
    precious = tmp_path / "elsewhere"
    precious.mkdir()
    (precious / "file").write_text("precious")
    (folder.path / ".lock").symlink_to(precious / "file")
    with pytest.raises(UsageError, match=r"\.lock cannot be opened: .*; remove it, or give another folder"):
        folder.lock()
    (folder.path / ".step-00000001.part").symlink_to(precious)
    (folder.path / ".step-00000002.old").touch()
    (folder.path / "step-00000005").symlink_to(precious)
    folder.begin(30).mkdir()
    folder.publish(30)
    assert folder.whole() == [20, 30]
    assert (precious / "file").read_text() == "precious"


def test_a_lock_without_room_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    mine = CheckpointFolder(str(tmp_path))
    mine.lock()
    with pytest.raises(UsageError, match="is in use by another training"):
        CheckpointFolder(str(tmp_path)).lock()
    mine.unlock()


def test_file_systems_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    CheckpointFolder(str(tmp_path)).lock()
    assert "cannot be locked: Operation not supported; see that nobody else trains into it" in capsys.readouterr().err


# A process that dies while a checkpoint becomes one ---------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        "hashlib:file_digest",
        "os:fsync",
        "pathlib:Path.rename",
        "shutil:rmtree",
        "json:dump",
        "pipeplan.runtime.training.checkpoint_folder:_sync",
    ],
)
@pytest.mark.parametrize("calls", [0, 1], ids=["instead", "behind"])
@one_in(2, "again", [False, True], first=1, ids=["new", "again"])
def test_death_at_any_step_loses_nothing(step: str, calls: int, again: bool, folder: CheckpointFolder) -> None:
    """By SIGKILL: in the first call, or behind it."""
    number = 20 if again else 30  # one of that name is replaced
    files = {entry.name: entry.read_bytes() for entry in folder.of(10).iterdir() if entry.name != "checksums.json"}

    def write() -> None:
        path = folder.begin(number)
        path.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)
        write_checksums(path, {})
        folder.publish(number)

    process = os.fork()
    if not process:
        with killed_after(step, calls):
            write()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    for each in folder.whole():
        require_checksums(folder.of(each))
    assert 10 in folder.whole() or 20 in folder.whole()
    assert len(folder.whole()) >= 1 + (not again)
    write()
    assert max(folder.whole()) == number
    require_checksums(folder.of(number))
    assert not list(folder.path.glob(".step-*"))
