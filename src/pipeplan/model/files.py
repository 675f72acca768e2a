"""Reading and writing the file formats: strict, atomic, ``-`` for stdin and stdout.

Files are data from strangers: reading one imports no code, opens no other file and runs nothing. Every
problem is reported with its path inside the file, such as ``blocks[3].costs[0].forward_ns``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeplan.errors import FileError
from pipeplan.model.base import FileModel
from pipeplan.model.cluster import Cluster
from pipeplan.model.elements import Element
from pipeplan.model.placement import Placement
from pipeplan.model.plan import Plan
from pipeplan.model.profile import Profile

__all__ = [
    "FORMATS",
    "parse",
    "read_bytes",
    "read_cluster",
    "read_placement",
    "read_plan",
    "read_profile",
    "sha256_of",
    "to_json",
    "write_file",
    "write_text",
]

FORMATS: dict[str, type[FileModel]] = {
    "profile": Profile,
    "cluster": Cluster,
    "plan": Plan,
    "placement": Placement,
}
"""Every file format by its ``kind``."""

_REMEDIES = {
    ("profile", "plan"): "search it first (pipeplan search PROFILE -o plan.json)",
    ("plan", "profile"): "give the profile that it was searched for",
}
"""What to do with one kind of file (first) where another (second) is needed."""

MAX_FILE_BYTES = 1 << 30
_SHOWN_PROBLEMS = 8

Model = TypeVar("Model", bound=FileModel)


def read_profile(path: str) -> Profile:
    """Read and validate a profile file; ``-`` is stdin. Raises FileError."""
    return _read(path, Profile)


def read_cluster(path: str) -> Cluster:
    """Read and validate a cluster file; ``-`` is stdin. Raises FileError."""
    return _read(path, Cluster)


def read_plan(path: str) -> Plan:
    """Read and validate a plan file; ``-`` is stdin. Raises FileError."""
    return _read(path, Plan)


def read_placement(path: str) -> Placement:
    """Read and validate a placement file; ``-`` is stdin. Raises FileError."""
    return _read(path, Placement)


def parse(data: bytes | str, model: type[Model], where: str = "<data>") -> Model:
    """Validate JSON text as one of the formats.

    Raises:
        FileError: the text is not JSON or breaks the format; one problem a line, with path and reason;
            or, in one line, it is another of them.
    """
    kind = model.model_fields["kind"].default
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        details = _own_problems(error.errors(include_url=False))
    except (RecursionError, ValueError) as error:  # nesting or digits beyond what the parser takes
        raise FileError(f"{where}: not readable as JSON: {error}") from None
    if details[0]["type"] == "json_invalid":
        raise FileError(f"{where}: not readable as JSON: {details[0]['ctx']['error']}") from None
    _require_kind(details, kind, where)
    problems = [_problem(detail) for detail in details[:_SHOWN_PROBLEMS]]
    if len(details) > _SHOWN_PROBLEMS:
        problems.append(f"... and {len(details) - _SHOWN_PROBLEMS} more")
    raise FileError(f"{where}: not a valid {kind} file (docs/schema/{kind}.schema.json describes it):", problems)


def _require_kind(details: list[ErrorDetails], kind: str, where: str) -> None:
    """Say so in one line where the file is another one of ours. Raises FileError."""
    given = next((detail["input"] for detail in details if detail["loc"] == ("kind",)), None)
    if isinstance(given, str) and given in FORMATS:
        remedy = _REMEDIES.get((given, kind), f"give a {kind}")
        raise FileError(f"{where}: this is a {given}, where a {kind} is needed; {remedy}")


def to_json(model: FileModel) -> str:
    """The text of a file: keys in declared order, one list element or short list a line, newline at the end."""
    data = model.model_dump(mode="json", exclude_defaults=False)
    return _layout(data, 0) + "\n"


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
    if target.exists() and not target.is_file():  # /dev/null, a pipe: nothing to replace
        _write_through(text, target)
        return
    temporary = None
    try:
        target = target.resolve()  # a link keeps pointing at the file
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def sha256_of(model: FileModel) -> str:
    """Fingerprint of a file's meaning: sha256 of its canonical JSON, independent of layout."""
    return hashlib.sha256(model.model_dump_json().encode()).hexdigest()


def _read(path: str, model: type[Model]) -> Model:
    return parse(read_bytes(path), model, "<stdin>" if path == "-" else path)


def read_bytes(path: str) -> bytes:
    """All of a file, which may not be larger than :data:`MAX_FILE_BYTES`; ``-`` is stdin. Raises FileError."""
    try:
        if path == "-":
            return sys.stdin.buffer.read(MAX_FILE_BYTES)
        size = Path(path).stat().st_size
        if size > MAX_FILE_BYTES:
            raise FileError(f"{path}: {size} bytes is more than the {MAX_FILE_BYTES} a file may have")
        return Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None


def _write_through(text: str, target: Path) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"{target}: cannot be written: {error.strerror or error}") from None


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _own_problems(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without lists that are too short only because reading them stopped at a problem told already."""
    inside = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in inside]


def _problem(detail: ErrorDetails) -> str:
    """One line: path in the file, what was expected, and what stands there where it is short."""
    place = ""
    for part in detail["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{_key(part)}" if place else _key(part)
    message = detail["msg"].removeprefix("Value error, ").replace("Tuple should", "List should")
    message = message.replace("Unexpected keyword argument", "Extra inputs are not permitted")
    if not place and detail["type"] == "value_error":  # about several parts of the file; the message names them
        return message
    given = detail.get("input")
    if detail["type"] == "missing" or isinstance(given, dict | list | tuple | FileModel | Element):
        shown = ""
    else:
        text = repr(given)
        shown = f", got {text if len(text) <= 80 else text[:77] + '...'}"
    return f"{place or 'file'}: {message}{shown}"


def _key(text: str) -> str:
    """A key of the file as it may be shown: no control characters, not too long."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."


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
