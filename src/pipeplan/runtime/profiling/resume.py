"""What a measurement that has not ended has so far, in a file beside the profile's, so that none of it is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeplan.errors import FileError, UsageError
from pipeplan.files import File, FileModel, parse, write_text
from pipeplan.files.base import CurrentVersion, current_version
from pipeplan.files.read_write import read_bytes
from pipeplan.workload.elements import Bytes, Count, Items, Name, Nanoseconds

__all__ = ["KeptRow", "RowKey", "UnfinishedProfile"]

_SAVE_EVERY_S = 5.0
"""A crash loses no more than this; writing more often would disturb what is measured."""


@dataclass(frozen=True, slots=True)
class RowKey:
    """What is measured: a block at a micro-batch size, one device's share of it among ``shards``."""

    block: str
    size: int
    shards: int = 1
    recompute: bool = False

    @property
    def label(self) -> str:
        """For progress and errors."""
        split = f", split over {self.shards} devices" if self.shards > 1 else ""
        return f"block {self.block!r} at micro-batch size {self.size}{split}{', recomputed' * self.recompute}"


class KeptRow(FileModel):
    """Measurements of one kind of block in one case.

    ``times`` are of each timed run: F, B, I, W in ns.
    """

    block: Name
    microbatch_size: Count
    shards: Count = 1
    recompute: bool = False
    activation_bytes: Bytes
    weight_grad_bytes: Bytes
    workspace_bytes: Bytes
    times: Items[tuple[Nanoseconds, Nanoseconds, Nanoseconds, Nanoseconds]] = ()

    @property
    def key(self) -> RowKey:
        """What was measured."""
        return RowKey(self.block, self.microbatch_size, self.shards, self.recompute)


class _UnfinishedFile(File):
    """The file: what was asked for, and the rows so far."""

    schema_version: Annotated[int, CurrentVersion("partial-profile")] = current_version("partial-profile")
    kind: Literal["partial-profile"] = "partial-profile"
    question: dict[str, str]
    rows: Items[KeptRow] = ()


class UnfinishedProfile:
    """The rows so far, by what was measured; without a path they are in no file."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._question: dict[str, str] = {}
        self._rows: dict[RowKey, KeptRow] = {}
        self._saved_s = time.monotonic()

    def open(self, question: Mapping[str, str]) -> None:
        """Take up what the file has, if there is one; ``question`` says all that the measurements depend on.

        Raises:
            UsageError: the file is of another question; the text names the difference.
            FileError: it cannot be read.
        """
        self._question = dict(question)
        if self.path is None or not self.path.exists():
            return
        found = self._read(self.path)
        for name in dict.fromkeys([*question, *found.question]):
            before, now = found.question.get(name, "nothing"), question.get(name, "nothing")
            if before != now:
                raise UsageError(
                    f"{self.path} has a measurement that has not ended, with {name} {before}, and now it is {now}; "
                    "ask for the same to go on with it, delete it to start anew, or choose another file with -o"
                )
        self._rows = {row.key: row for row in found.rows}

    @staticmethod
    def _read(path: Path) -> _UnfinishedFile:
        content = read_bytes(str(path))
        try:
            return parse(content, _UnfinishedFile, str(path))
        except FileError as error:
            raise FileError(f"{path}: not what an interrupted measurement keeps; delete it", error.problems) from None

    def row(self, key: RowKey) -> KeptRow | None:
        """What is kept of it."""
        return self._rows.get(key)

    def put(self, row: KeptRow) -> None:
        """Keep a row in place of the one before of the same key."""
        self._rows[row.key] = row

    @property
    def is_due(self) -> bool:
        """Whether the file is to be written again while measuring."""
        return self.path is not None and time.monotonic() - self._saved_s >= _SAVE_EVERY_S

    def save(self) -> None:
        """Write the file atomically, if there is something to keep. Raises FileError."""
        if self.path is not None and self._rows:
            file = _UnfinishedFile(question=self._question, rows=tuple(self._rows.values()))
            write_text(file.model_dump_json() + "\n", str(self.path))
        self._saved_s = time.monotonic()

    def remove(self) -> None:
        """Delete the file: the profile has been written."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
