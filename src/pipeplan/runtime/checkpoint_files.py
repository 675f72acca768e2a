"""Where checkpoints lie: one folder per step, which has its name only when all of it is on the disk.

Needs no torch. A checkpoint is written into a hidden folder and renamed at the end; an old one is renamed before it is
removed. So whatever has the name of a checkpoint is one, whenever a process or the machine dies.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from pipeplan.errors import UsageError

__all__ = ["CheckpointFolder"]

_WHOLE = re.compile(r"step-(\d{8,})")
_HIDDEN = ".step-*"


class CheckpointFolder:
    """The folder of a training's checkpoints; numbers are those of steps done.

    Args:
        path: need not exist.
        num_kept: how many checkpoints are left when a new one is there.
    """

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
