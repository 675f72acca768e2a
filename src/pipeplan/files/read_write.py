"""Reading and writing the file formats: strict, every version there was, atomic; ``-`` is stdin or stdout.

Files are data from strangers: reading one imports no code, opens no other file and runs nothing. Every
problem is reported with its path inside the file, such as ``blocks[3].costs[0].forward_ns``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from pipeplan.errors import FileError, choose_from, did_you_mean
from pipeplan.files.base import (
    MIGRATIONS,
    SHORT_FORMS,
    Content,
    File,
    FileModel,
    Form,
    canonical_text,
    completed,
    current_version,
    form_of_version,
    keys_at,
    sha256_of_text,
)
from pipeplan.files.cluster import Cluster
from pipeplan.files.cover import Cover
from pipeplan.files.modules import Modules
from pipeplan.files.placement import Placement
from pipeplan.files.plan import Plan
from pipeplan.files.profile import Profile
from pipeplan.texts import escaped, shown, shown_key
from pipeplan.workload.elements import Element


def to_json(model: FileModel) -> str:
    """The text of a file: keys in declared order, one list element or short list a line, newline at the end."""
    content = model.model_dump(mode="json")
    short = SHORT_FORMS.get((content.get("kind", ""), content.get("schema_version", 0)))
    return layout(short.said(content) if short else content)


def layout(value: object) -> str:
    """Human-readable JSON: whatever fits on one line is on one, with a newline at the end."""
    return _layout(value, 0, {}) + "\n"


def write_file(model: FileModel, path: str) -> None:
    """Write a file atomically; ``-`` is stdout. Raises FileError; the old file stays if writing fails."""
    write_text(to_json(model), path)


def write_text(text: str | bytes, path: str) -> None:
    """Write text, or bytes, through a temporary file beside a path and a rename; ``-`` is stdout. Raises FileError."""
    content = text.encode() if isinstance(text, str) else text
    target = Path(path)
    try:
        if path == "-":
            _print(content.decode())
        elif target.exists() and not target.is_file():  # /dev/null, a pipe: nothing to replace
            target.write_bytes(content)
        else:
            _replace(target.resolve(), content)  # a link keeps pointing at the file
    except BrokenPipeError:  # the reader of stdout left
        raise
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{'stdout' if path == '-' else path}: cannot be written: {reason}") from None


def _print(text: str) -> None:
    """Write the text of a file to stdout, in UTF-8 as all files are, whatever stdout's encoding is."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
    else:  # what a program or a test has put there
        sys.stdout.write(text)
    sys.stdout.flush()


def require_writable(path: str, option: str = "-o") -> None:
    """Find out before minutes of work whether :func:`write_text` can write a file, by what it would do first.

    Raises:
        FileError: it cannot; another file is to be given with the option.
    """
    if path == "-":
        return
    target = Path(path).absolute()
    try:
        target = target.resolve()
        folder = target.parent
        if not folder.is_dir():
            raise FileError(f"{path}: cannot be written: there is no folder {folder}; make it, or choose with {option}")
        if target.is_dir():
            raise FileError(f"{path}: cannot be written: it is a folder; choose a file with {option}")
        if target.exists() and not os.access(target, os.W_OK):
            raise FileError(f"{path}: cannot be written: it is write-protected; choose another file with {option}")
        if target.is_file() and not _may_be_replaced(target):
            raise FileError(f"{path}: cannot be replaced: it is another user's; choose another file with {option}")
        if not target.exists() or target.is_file():
            with tempfile.TemporaryFile(prefix=_temporary_prefix(target), dir=folder) as trial:
                trial.write(bytes(4096))  # a full disk has files, but no room in them
    except (OSError, RuntimeError) as error:  # a circle of links is a RuntimeError
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{path}: cannot be written: {reason}; choose another file with {option}") from None


def _may_be_replaced(target: Path) -> bool:
    """Whether its name may be given to another file: in folders such as /tmp only by the owner of either."""
    folder = target.parent.stat()
    return not folder.st_mode & stat.S_ISVTX or os.geteuid() in (0, folder.st_uid, target.stat().st_uid)


def write_elsewhere(text: str | bytes, path: str) -> str | None:
    """Write what could not go to ``path`` to a temporary file: its name, or None where there is no room for one."""
    name, kept = Path(path).name if path != "-" else "stdout", None
    try:
        handle, kept = tempfile.mkstemp(prefix="pipeplan-", suffix=f"-{name[-_LONGEST_NAME:]}")
        with os.fdopen(handle, "wb") as stream:
            stream.write(text.encode() if isinstance(text, str) else text)
    except OSError:
        if kept is not None:  # half of it
            os.unlink(kept)
        return None
    return kept


_LONGEST_NAME = 100


def _temporary_prefix(target: Path) -> str:
    return f".{target.name[:_LONGEST_NAME]}."


def _replace(target: Path, content: bytes) -> None:
    """Write beside the file and rename; its mode stays. Raises OSError."""
    mode = target.stat().st_mode & 0o777 if target.exists() else None
    handle, temporary = temporary_beside(target)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def temporary_beside(target: Path) -> tuple[int, str]:
    """A new file beside another, open, with the mode that new files have. Raises OSError.

    ``tempfile`` gives its files another mode, and to ask for the umask is to change it, for all threads.
    """
    while True:
        temporary = target.with_name(f"{_temporary_prefix(target)}{secrets.token_hex(4)}")
        with contextlib.suppress(FileExistsError):
            return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), str(temporary)


_text_of = json.JSONEncoder(ensure_ascii=False).encode


def _layout(value: object, depth: int, known: dict[tuple[str, int], str]) -> str:
    """JSON with what fits in 110 columns on one line, and everything else one element a line.

    What is ``known`` by its text on one line is not made again: blocks that are alike have the same rows.
    """
    flat = _text_of(value)
    if len(flat) + depth * 2 <= 110 or not isinstance(value, dict | list) or not value:
        return flat
    if (flat, depth) not in known:
        known[flat, depth] = _on_lines(value, depth, known)
    return known[flat, depth]


def _on_lines(value: dict[str, Any] | list[Any], depth: int, known: dict[tuple[str, int], str]) -> str:
    pad, end = "  " * (depth + 1), "\n" + "  " * depth
    if isinstance(value, dict):
        rows = [f"{pad}{_text_of(key)}: {_layout(item, depth + 1, known)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + end + "}"
    if all(isinstance(item, str | int | float) or _is_short(item) for item in value):
        return "[\n" + _wrapped([_text_of(item) for item in value], pad) + end + "]"
    return "[\n" + ",\n".join(pad + _layout(item, depth + 1, known) for item in value) + end + "]"


def _is_short(item: object) -> bool:
    """Whether it is a list of a few numbers: many of these share a line, as numbers do."""
    return isinstance(item, list) and len(item) <= 4 and all(isinstance(each, int | float) for each in item)


def _wrapped(items: list[str], pad: str) -> str:
    """Scalars and short lists filled into lines of 110 columns."""
    lines, line = [], pad
    for item in items:
        if len(line) + len(item) > 108 and line.strip():
            lines.append(line.rstrip())
            line = pad
        line += item + ", "
    lines.append(line.rstrip().rstrip(","))
    return "\n".join(lines)


FORMATS: dict[str, type[File]] = {
    "profile": Profile,
    "cluster": Cluster,
    "plan": Plan,
    "placement": Placement,
    "modules": Modules,
    "cover": Cover,
}
"""Every file format by its ``kind``."""

_REMEDIES = {
    ("profile", "plan"): "search it first (pipeplan search PROFILE -o plan.json)",
    ("plan", "profile"): "give the profile that it was searched for",
}
"""What to do with one kind of file (first) where another (second) is needed."""

MAX_FILE_BYTES = 1 << 30
_SHOWN_PROBLEMS = 8

Model = TypeVar("Model", bound=File)


def read_profile(path: str) -> Profile:
    """Read and validate a profile file; ``-`` is stdin. Raises FileError."""
    return _read(path, Profile)


def read_cluster(path: str) -> Cluster:
    """Read and validate a cluster file; ``-`` is stdin. Raises FileError."""
    return _read(path, Cluster)


def read_plan(path: str) -> Plan:
    """Read and validate a plan file; ``-`` is stdin. Raises FileError."""
    return _read(path, Plan)


def read_modules(path: str) -> Modules:
    """Read and validate a file of modules; ``-`` is stdin. Raises FileError."""
    return _read(path, Modules)


def read_cover(path: str) -> Cover:
    """Read and validate a file of kernel backends by block; ``-`` is stdin. Raises FileError."""
    return _read(path, Cover)


def read_placement(path: str) -> Placement:
    """Read and validate a placement file; ``-`` is stdin. Raises FileError."""
    return _read(path, Placement)


def parse(data: bytes | str, model: type[Model], where: str = "<data>") -> Model:
    """Validate JSON text as one of the formats, of its current version or an earlier one.

    Raises:
        FileError: the text is not JSON or breaks the format; one problem a line, with path and reason;
            or, in one line, it is another of them.
    """
    kind = model.model_fields["kind"].default
    current, version = current_version(kind), None
    complaint = f"{where}: not a valid {kind} file (docs/schema/{kind}.schema.json describes it):"
    try:
        head = _FileHead.model_validate_json(data)
        _require_kind(head.kind, kind, where)
        if problem := _version_problem(head.schema_version, current):
            raise FileError(complaint, [problem])
        version = head.schema_version
        data = _whole(data, kind, version, complaint)
        if head.schema_version == current or kind not in FORMATS:  # others are kept for a while, not for later versions
            return model.model_validate_json(data).read_from(where)
        complaint = f"{where}: not a valid {kind} file of {_version(head)} (docs/files.md, Versions):"
        return _migrated(from_json(data), kind, head.schema_version, model).read_from(where)
    except ValidationError as error:
        form = form_of_version(kind, version) if kind in FORMATS and version is not None else {}
        raise _refusal(error, where, complaint, form) from None
    except (RecursionError, ValueError) as error:  # nesting or digits beyond what the parser takes
        raise FileError(f"{where}: not readable as JSON: {error}") from None


def _whole(data: bytes | str, kind: str, version: int, complaint: str) -> bytes | str:
    """A file's text with all that it says in short. Raises FileError; ValueError where it is no JSON."""
    short = SHORT_FORMS.get((kind, version))
    if short is None or (short.mark not in data if isinstance(data, str) else short.mark.encode() not in data):
        return data
    content = from_json(data)
    try:
        return canonical_text(short.whole(content))
    except ValueError as error:
        raise FileError(complaint, [str(error)]) from None


class _FileHead(BaseModel):
    """What says how to read the rest. A file without a version is of the first, which let it be left out."""

    model_config = ConfigDict(extra="ignore")

    kind: Any = None
    schema_version: Any = 1


def _version(head: _FileHead) -> str:
    missing = "schema_version" not in head.model_fields_set
    return f"version {head.schema_version}{', which one without schema_version is' * missing}"


def _require_kind(given: object, kind: str, where: str) -> None:
    """Say so in one line where the file is another one of ours. Raises FileError."""
    if isinstance(given, str) and given in FORMATS and given != kind:
        remedy = _REMEDIES.get((given, kind), f"give a {kind}")
        raise FileError(f"{where}: this is a {given}, where a {kind} is needed; {remedy}")


def _version_problem(given: object, current: int) -> str | None:
    """Why a file of this version cannot be read; None if it can."""
    if type(given) is int and 1 <= given <= current:
        return None
    known = "1" if current == 1 else f"1 to {current}"
    is_newer = type(given) is int and given > current
    remedy = "read it with the newer pipeplan that wrote it" if is_newer else "say which version the file follows"
    return f"schema_version: Input should be {known}, got {shown(given)}; {remedy}"


def _migrated(content: Content, kind: str, version: int, model: type[Model]) -> Model:
    """Content of an earlier version as the model of today. Raises ValidationError."""
    content = completed(content, form_of_version(kind, version))
    sha256 = sha256_of_text(canonical_text(content))
    content = escaped(content)  # texts could have any character then
    for step in range(version, current_version(kind)):
        migrated = MIGRATIONS[kind, step](content) | {"schema_version": step + 1}
        content = completed(migrated, form_of_version(kind, step + 1))
    return model.model_validate_json(canonical_text(content)).read_as(sha256)


def _read(path: str, model: type[Model]) -> Model:
    return parse(read_bytes(path), model, "<stdin>" if path == "-" else path)


def read_bytes(path: str) -> bytes:
    """All of a file, which may not be larger than :data:`MAX_FILE_BYTES`; ``-`` is stdin. Raises FileError."""
    try:
        with contextlib.ExitStack() as stack:
            file = sys.stdin.buffer if path == "-" else stack.enter_context(open(path, "rb"))
            size = 0 if path == "-" else os.fstat(file.fileno()).st_size
            content = file.read(MAX_FILE_BYTES + 1) if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if max(size, len(content)) > MAX_FILE_BYTES:  # a device or pipe does not say beforehand how much it has
        much = f"{size} bytes is" if size else "it has"
        raise FileError(f"{path}: {much} more than the {MAX_FILE_BYTES} a file may have")
    return content


def read_text(path: str) -> str:
    """The text of a file in UTF-8, with the limit of :func:`read_bytes`; ``-`` is stdin. Raises FileError."""
    try:
        return read_bytes(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        where = "<stdin>" if path == "-" else path
        raise FileError(f"{where}: cannot be read: no text in UTF-8: {error.reason} at byte {error.start}") from None


def _refusal(error: ValidationError, where: str, complaint: str, form: Form) -> FileError:
    """The error for a file that does not follow its format."""
    details = _own_problems(error.errors(include_url=False))
    if details[0]["type"] == "json_invalid":
        return FileError(f"{where}: not readable as JSON: {details[0]['ctx']['error']}")
    problems = [_problem(detail, form) for detail in details[:_SHOWN_PROBLEMS]]
    if len(details) > _SHOWN_PROBLEMS:
        problems.append(f"... and {len(details) - _SHOWN_PROBLEMS} more")
    return FileError(complaint, problems)


def _own_problems(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without lists that are too short only because reading them stopped at a problem that is reported already."""
    inside = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in inside]


def _problem(detail: ErrorDetails, form: Form) -> str:
    """One line: path in the file, what was expected, what stands there where it is short, and keys for unknown ones."""
    place = ""
    for part in detail["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{shown_key(part)}" if place else shown_key(part)
    message = detail["msg"].removeprefix("Value error, ").replace("Tuple should", "List should")
    message = message.replace("Unexpected keyword argument", "Extra inputs are not permitted")
    if not place and detail["type"] == "value_error":  # about several parts of the file; the message names them
        return message
    given = detail.get("input")
    if detail["type"] != "missing" and not isinstance(given, dict | list | tuple | FileModel | Element):
        message += f", got {shown(given)}"
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        *parents, key = detail["loc"]
        known = keys_at(form, parents)
        message += f"; {choose_from(str(key), known)}" * bool(known)
    if isinstance(given, str) and (question := did_you_mean(given, _allowed(detail))):
        message += f"; {question}"
    return f"{place or 'file'}: {message}"


def _allowed(detail: ErrorDetails) -> list[str]:
    """The allowed values, if the error is about one of some names."""
    if detail["type"] == "literal_error":
        return re.findall("'([^']*)'", detail["ctx"]["expected"])
    pattern = detail["ctx"]["pattern"] if detail["type"] == "string_pattern_mismatch" else ""
    names = re.fullmatch(r"\^\(([a-z|-]+)\)\$", pattern)
    return names[1].split("|") if names else []
