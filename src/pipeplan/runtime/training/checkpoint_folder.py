"""Where checkpoints lie, one folder per step, and reading one that may be damaged.

A checkpoint is written into a hidden folder and renamed at the end; an old one is renamed before it is removed. So
whatever has the name of a checkpoint is one, whenever a process or the machine dies.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from pipeplan.errors import UsageError

_WHOLE = re.compile(r"step-(\d{8,})")
_HIDDEN = ".step-*"


class CheckpointFolder:
    """A training's checkpoints, by steps done, of which ``num_kept`` are left when there is a new one."""

    def __init__(self, path: str, num_kept: int = 2) -> None:
        self.path = Path(path)
        self._num_kept = num_kept

    def make(self) -> None:
        """Let the folder exist. Raises UsageError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--checkpoint {self.path} cannot be made: {error.strerror or error}") from error

    def whole(self) -> list[int]:
        """Checkpoints that are there, ascending."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(found[1]) for found in map(_WHOLE.fullmatch, names) if found)

    def of(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.path / f"step-{step:08}"

    def begin(self, step: int) -> Path:
        """A name for a checkpoint to be written; what earlier runs have left half done is removed."""
        for leftover in self.path.glob(_HIDDEN):
            shutil.rmtree(leftover)
        return self.part(step)

    def part(self, step: int) -> Path:
        """The folder in which a checkpoint is written."""
        return self.path / f".step-{step:08}.part"

    def publish(self, step: int) -> None:
        """Give a checkpoint its name: all its files are on the disk. Then remove the oldest that are too many."""
        _sync(self.part(step))
        if self.of(step).exists():
            self._remove(step)
        self.part(step).rename(self.of(step))
        _sync(self.path)
        for old in self.whole()[: -self._num_kept]:
            self._remove(old)

    def _remove(self, step: int) -> None:
        hidden = self.path / f".step-{step:08}.old"
        self.of(step).rename(hidden)
        shutil.rmtree(hidden)


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_INDEX = ".metadata"
_FACTS = {"step", "identity", "schedule", "numbers"}
_REASON = re.compile(r"WeightsUnpickler error: *(.+)")


class _DamagedFileError(Exception):
    """A file cannot be read; the text says which and why."""


@contextmanager
def undamaged(folder: CheckpointFolder, step: int) -> Iterator[None]:
    """Turn what reading a damaged checkpoint raises into a UsageError that names the file and a remedy."""
    try:
        yield
    except _DamagedFileError as error:
        raise UsageError(_told(folder, step, str(error))) from error
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise UsageError(_told(folder, step, f"rank {rank} cannot read tensors: {_brief(reason)}")) from error


def rest_of(path: Path, name: str) -> dict[str, Any]:
    """What a checkpoint has beside tensors, from its file of this name."""
    with _reading(name):
        found: dict[str, Any] = torch.load(path / name, weights_only=True)
        if missing := _FACTS - set(found):
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
    return found


def metadata_of(path: Path) -> Metadata:
    """Which tensors a checkpoint has; all files that they lie in are there, and long enough."""
    with _reading(_INDEX):
        found = FileSystemReader(path).read_metadata()
        ends: dict[str, int] = {}
        for stored in found.storage_data.values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in ends.items():
        with _reading(name):
            size = (path / name).stat().st_size
            if size < end:
                raise ValueError(f"it has {size} bytes of {end}")
    return found


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _DamagedFileError(f"{name}: it is not there") from error
    except Exception as error:  # whatever unpickling makes of other bytes
        raise _DamagedFileError(f"{name}: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    """The first line of what an error says, and its kind where that is not plain; of torch's advice only the reason."""
    text = str(error)
    if isinstance(error, UnpicklingError) or "weights_only" in text:
        reason = _REASON.search(text)
        return f"it is not what was written{f' ({reason[1]})' if reason else ''}"
    first = text.partition("\n")[0]
    return first if type(error) is ValueError else f"{type(error).__name__}: {first}".removesuffix(": ")


def _told(folder: CheckpointFolder, step: int, what: str) -> str:
    before = [other for other in folder.whole() if other < step]
    remedy = (
        f"the one before is {folder.of(before[-1]).name}: remove this folder to go on from it"
        if before
        else "there is none before it: remove this folder, and start anew without --resume"
    )
    return f"{folder.of(step)} is damaged ({what}); {remedy}"
