"""Rows that are known already, in a file: a line of JSON for each cell, appended when it is done."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from pipeplan._version import __version__
from pipeplan.errors import UsageError
from pipeplan.model import sha256_of
from pipeplan.planner.request import Request

__all__ = ["Cache"]

_HEADER = {"kind": "tuning", "schema_version": 1}

Known = TypeVar("Known")


class Cache:
    """What was found of cells, by what it follows from: profile, cluster, memory, options, version, and the cell.

    Without a ``path`` it only remembers.

    Raises:
        UsageError: the file is something else, or cannot be read or written.
    """

    def __init__(self, path: str | None, request: Request) -> None:
        self.path, self._request = None if path is None else Path(path), _digest(request)
        self._known: dict[str, object] = {}
        if self.path is not None:
            self._open(self.path)

    def get(self, what: str, cell: str, kind: type[Known]) -> Known | None:
        """What is known of a cell; None if nothing is."""
        found = self._known.get(self._key(what, cell))
        if found is None:
            return None
        try:
            return TypeAdapter(kind).validate_json(json.dumps(found))
        except ValidationError as error:
            raise UsageError(
                f"--cache {self.path} has {what} of a cell that cannot be read: "
                f"{error.errors()[0]['msg']}; delete the file"
            ) from None

    def put(self, what: str, cell: str, known: object) -> None:
        """Keep what was found of a cell."""
        key = self._key(what, cell)
        self._known[key] = TypeAdapter(type(known)).dump_python(known, mode="json")
        self._append({"key": key, "known": self._known[key]})

    def _open(self, path: Path) -> None:
        try:
            text = path.read_bytes() if path.exists() else b""
            lines = text.splitlines(keepends=True)
            if lines and not lines[-1].endswith(b"\n"):  # a process ended while it wrote
                path.write_bytes(b"".join(lines[:-1]))
                lines = lines[:-1]
        except OSError as error:
            raise UsageError(f"--cache {path} cannot be read: {error.strerror}") from None
        if not lines:
            self._append(_HEADER)
        elif _read(path, 1, lines[0]) != _HEADER:
            raise UsageError(f"--cache {path} is no cache of a tuning; name another file, or none that exists")
        for number, line in enumerate(lines[1:], 2):
            entry = _read(path, number, line)
            if set(entry) != {"key", "known"}:
                raise UsageError(f"--cache {path}, line {number}: no cell of a tuning; delete the line or the file")
            self._known[str(entry["key"])] = entry["known"]

    def _append(self, entry: dict[str, object]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise UsageError(f"--cache {self.path} cannot be written: {error.strerror}") from None

    def _key(self, what: str, cell: str) -> str:
        return _sha256([self._request, what, cell])


def _digest(request: Request) -> str:
    """What rows follow from beside their cell."""
    cluster = request.cluster
    return _sha256(
        [
            __version__,
            sha256_of(request.profile),
            None if cluster is None else sha256_of(cluster),
            request.memory,
            request.num_devices,
            request.batch.mini_batch,
            request.chunks,
            request.split_backward,
            request.split_overhead_ns,
        ]
    )


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _read(path: Path, number: int, line: bytes) -> dict[str, object]:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        raise UsageError(f"--cache {path}, line {number}: no JSON object; it is no cache of a tuning")
    return entry
