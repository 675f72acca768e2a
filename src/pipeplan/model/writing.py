"""Writing the file formats: laid out for readers, atomically, ``-`` for stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from pipeplan.errors import FileError
from pipeplan.model.base import FileModel

__all__ = ["layout", "to_json", "write_file", "write_text"]


def to_json(model: FileModel) -> str:
    """The text of a file: keys in declared order, one list element or short list a line, newline at the end."""
    return layout(model.model_dump(mode="json"))


def layout(value: object) -> str:
    """JSON for readers: what fits on one line stands on one, and a newline at the end."""
    return _layout(value, 0) + "\n"


def write_file(model: FileModel, path: str) -> None:
    """Write a file atomically; ``-`` is stdout. Raises FileError; the old file stays if writing fails."""
    write_text(to_json(model), path)


def write_text(text: str, path: str) -> None:
    """Write text to a path through a temporary file beside it and a rename; ``-`` is stdout. Raises FileError."""
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = Path(path)
    try:
        if target.exists() and not target.is_file():  # /dev/null, a pipe: nothing to replace
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target.resolve(), text)  # a link keeps pointing at the file
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None


def _replace(target: Path, text: str) -> None:
    """Write beside the file and rename; its mode stays. Raises OSError."""
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _layout(value: object, depth: int) -> str:
    """JSON with what fits in 110 columns on one line, and everything else one element a line."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + depth * 2 <= 110 or not isinstance(value, dict | list) or not value:
        return flat
    pad = "  " * (depth + 1)
    if isinstance(value, dict):
        rows = [
            f"{pad}{json.dumps(key, ensure_ascii=False)}: {_layout(item, depth + 1)}" for key, item in value.items()
        ]
        return "{\n" + ",\n".join(rows) + "\n" + "  " * depth + "}"
    if all(isinstance(item, str | int | float) for item in value):
        return (
            "[\n" + _wrapped([json.dumps(item, ensure_ascii=False) for item in value], pad) + "\n" + "  " * depth + "]"
        )
    return "[\n" + ",\n".join(pad + _layout(item, depth + 1) for item in value) + "\n" + "  " * depth + "]"


def _wrapped(items: list[str], pad: str) -> str:
    """Scalars filled into lines of 110 columns."""
    lines, line = [], pad
    for item in items:
        if len(line) + len(item) > 108 and line.strip():
            lines.append(line.rstrip())
            line = pad
        line += item + ", "
    lines.append(line.rstrip().rstrip(","))
    return "\n".join(lines)
