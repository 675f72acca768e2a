"""Folders of checkpoints: which are complete, who trains into one, whether files are intact, and reading them.

There is one folder per step. It is written under a hidden name and renamed at the end; an old one is renamed before it
is removed. So whatever has the name of a checkpoint is one, whenever a process or the machine dies. A training locks
the folder of all; the system takes the lock from a process that dies.

Reading one runs nothing that is in it: the index, which torch pickles, may name only the classes of which torch makes
one, and the rest is read with torch's ``weights_only``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import platform
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PosixPath
from pickle import BUILD, UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from pipeplan.errors import UsageError
from pipeplan.runtime.launch.status import warn
from pipeplan.texts import of_json, on_one_line, shown

REST = "rest.pt"
"""What there is beside tensors."""

_WHOLE = re.compile(r"step-(\d{8,})")
_HIDDEN = ".step-*"
_LOCK = ".lock"
_LONGEST_HOLDER = 200


class CheckpointFolder:
    """A training's checkpoints, by steps done; the last ``num_kept`` are kept."""

    def __init__(self, path: str, num_kept: int = 2) -> None:
        self.path = Path(path)
        self._num_kept = num_kept
        self._lock: int | None = None

    def make(self) -> None:
        """Let the folder exist. Raises UsageError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--checkpoint {self.path} cannot be made: {error.strerror or error}") from error

    def lock(self) -> None:
        """Keep others from training into the folder, until :meth:`unlock` or the end of this process, however it ends.

        Raises:
            UsageError: another training does, of which the text says the process; or it cannot be told.
        """
        try:  # no link is followed, which may lead to any file
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            why = f"{_LOCK} cannot be opened: {error.strerror}"
            raise UsageError(f"--checkpoint {self.path}: {why}; remove it, or give another folder") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = on_one_line(os.pread(lock, _LONGEST_HOLDER, 0).decode(errors="replace"))
            os.close(lock)
            if not isinstance(error, BlockingIOError):  # a file system without locks
                warn(
                    f"--checkpoint {self.path} cannot be locked: {error.strerror}; see that nobody else trains into it"
                )
                return
            raise UsageError(
                f"--checkpoint {self.path} is in use by {holder or 'another training'}; wait for its end, or give "
                "another folder"
            ) from None
        with suppress(OSError):  # on a full disk nobody is told who has it
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {platform.node()}, since {time.strftime('%F %T')}".encode(), 0)
        self._lock = lock
        os.register_at_fork(after_in_child=self.unlock)  # or a copy that outlives this process would hold it

    def unlock(self) -> None:
        """Let others have the folder; the file stays, as another process may be waiting to lock it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
            _delete(leftover)
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
        _delete(hidden)


def _delete(path: Path) -> None:
    """Remove a folder; of a link, which may lead anywhere, only itself."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_INDEX = ".metadata"
_REASON = re.compile(r"WeightsUnpickler error: *(.+)")


class DamagedFileError(Exception):
    """A file cannot be read; the text says which and why."""


@contextmanager
def undamaged(folder: CheckpointFolder, step: int) -> Iterator[None]:
    """Turn what reading a damaged checkpoint raises into a UsageError that names the file and a remedy."""
    try:
        yield
    except DamagedFileError as error:
        raise UsageError(unusable(folder, step, str(error))) from error
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise UsageError(unusable(folder, step, f"rank {rank} cannot read tensors: {_brief(reason)}")) from error


def rest_of(path: Path, name: str, step: int | None = None) -> dict[str, Any]:
    """What a checkpoint has beside tensors, from its file of this name; it must be of a ``step`` that is given."""
    with _reading(name):
        found: dict[str, Any] = torch.load(_plain_file(path / name), weights_only=True)
        if not isinstance(found, dict):
            raise ValueError("it is no table of facts")
        if missing := {*_FACTS} - set(found):
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        if wrong := [fact for fact, right in _FACTS.items() if not right(found[fact])]:
            raise ValueError(f"its {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not what training writes")
        if step not in (None, found["step"]):
            raise ValueError(f"it is of step {found['step']}")
    return found


def _is_schedule(value: object) -> bool:
    """Whether it is what an optimizer is set to, group by group, and where its schedule is."""
    if value is None:
        return True
    if not (isinstance(value, tuple) and list(map(type, value)) == [list, dict]):
        return False
    return all(isinstance(group, dict) for group in value[0])


_FACTS: dict[str, Callable[[object], bool]] = {
    "step": lambda value: type(value) is int,
    "identity": lambda value: isinstance(value, dict) and all(isinstance(fact, str) for fact in value),
    "schedule": _is_schedule,
    "numbers": lambda value: isinstance(value, dict) and all(isinstance(own, dict) for own in value.values()),
}
"""{what a checkpoint has beside tensors: whether a value can be that}"""


def _plain_file(path: Path) -> Path:
    """The path of a file, and not of a device or pipe, which may have no end. Raises ValueError or OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no plain file")
    return path


_InPython: Any = pickle._Unpickler  # whose steps stubs do not have


class _IndexUnpickler(_InPython):  # type: ignore[misc]  # as it is of any type
    """Makes of an index what torch makes one of, and nothing else, and changes nothing that was there before.

    It is Python's own in Python, as the one in C also sets attributes of the classes and functions that are named.
    """

    def load_build(self) -> None:
        """Set the attributes of something that was made. Raises UnpicklingError where it was not."""
        made = self.stack[-2] if len(self.stack) > 1 else None
        if type(made) not in _MADE:
            raise UnpicklingError("WeightsUnpickler error: it changes what is not its own")
        super().load_build()

    dispatch = {**_InPython.dispatch, BUILD[0]: load_build}

    def find_class(self, module: str, name: str) -> Any:
        """One of the plain classes, or a number format. Raises UnpicklingError."""
        plain = _PLAIN.get((module, name))
        if plain is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            plain = getattr(torch, name)
        if plain is None:
            raise _not_plain(module, name)
        return plain


def _not_plain(module: str, name: str) -> UnpicklingError:
    return UnpicklingError(f"WeightsUnpickler error: it names {shown(f'{module}.{name}')}, which is not plain data")


def _memory_format(of: object, name: object) -> _MEM_FORMAT_ENCODING:
    """What Python before 3.11.4 writes for one of these: an attribute of their class."""
    if of is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise _not_plain("builtins", "getattr")
    return _MEM_FORMAT_ENCODING[str(name)]


_MADE = (
    *(Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata, ChunkStorageMetadata, TensorProperties),
    _StorageInfo,
)

_PLAIN: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__name__): each for each in (*_MADE, _MEM_FORMAT_ENCODING)},
    ("builtins", "getattr"): _memory_format,
    ("pathlib", "PosixPath"): PosixPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
}
"""What the index of a checkpoint is made of, beside numbers, texts, lists and dictionaries. To call any of these does
nothing but make it."""


class PlainReader(FileSystemReader):
    """torch's reader, with an index that is read without running anything."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._index = path

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Which tensors there are, and where."""
        return metadata_of(self._index)


def _plain_index(path: Path) -> Metadata:
    """The index, whose parts are what they should be. Raises UnpicklingError or ValueError."""
    with _plain_file(path / _INDEX).open("rb") as file:
        found = _IndexUnpickler(file).load()
    if not isinstance(found, Metadata):
        raise ValueError("it is no index")
    for name, tensor in found.state_dict_metadata.items():
        plain = isinstance(tensor, TensorStorageMetadata) and isinstance(tensor.properties.dtype, torch.dtype)
        if not (isinstance(name, str) and plain and isinstance(getattr(tensor, "size", None), torch.Size)):
            raise ValueError(f"it has {shown(name)}, which is not a tensor")
    for index, stored in (found.storage_data or {}).items():
        placed = isinstance(index, MetadataIndex) and isinstance(stored, _StorageInfo)
        if not (placed and isinstance(stored.relative_path, str) and _SHARD.fullmatch(stored.relative_path)):
            raise ValueError("it has a tensor that lies in no file of the checkpoint")
        if not all(isinstance(each, int) and each >= 0 for each in (stored.offset, stored.length)):
            raise ValueError(f"it has a tensor at no place of {stored.relative_path}")
    return found


_SHARD = re.compile(r"__[0-9]+_[0-9]+\.distcp")


def metadata_of(path: Path) -> Metadata:
    """Which tensors a checkpoint has; all files that they lie in are there, and long enough."""
    with _reading(_INDEX):
        found = _plain_index(path)
        ends: dict[str, int] = {}
        for stored in found.storage_data.values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in ends.items():
        with _reading(name):
            size = _plain_file(path / name).stat().st_size
            if size < end:
                raise ValueError(f"it has {size} bytes of {end}")
    return found


_CHECKSUMS = "checksums.json"


def digests_of(path: Path, names: Iterable[str]) -> dict[str, str]:
    """The sha256 of each of these files of a folder. Raises OSError, or ValueError where one is no plain file."""
    found = {}
    for name in names:
        with _plain_file(path / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def write_checksums(path: Path, known: Mapping[str, str]) -> None:
    """Write the checksums of a checkpoint's files; those that are ``known`` are not read again. Raises OSError."""
    names = [entry.name for entry in path.iterdir() if entry.name != _CHECKSUMS]
    digests = {**known, **digests_of(path, sorted(set(names) - set(known)))}
    with (path / _CHECKSUMS).open("w", encoding="utf-8") as file:
        json.dump({"files": digests, "sha256": _digest(digests)}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def _digest(digests: Mapping[str, str]) -> str:
    """A checksum of the checksums, so that a corrupt one is not mistaken for a corrupt file."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def require_checksums(path: Path, rank: int = 0, num_ranks: int = 1) -> None:
    """Compare a rank's share of a checkpoint's files with their checksums; one without is of an earlier pipeplan.

    Raises:
        DamagedFileError: a file is not what was written.
    """
    if not (path / _CHECKSUMS).exists():
        if rest_of(path, REST).get("checksums"):
            raise DamagedFileError(f"{_CHECKSUMS}: it is not there")
        if rank == 0:
            warn(f"{path} has no checksums: an earlier pipeplan wrote it, and what has changed since goes unnoticed")
        return
    with _reading(_CHECKSUMS):
        content = of_json(_plain_file(path / _CHECKSUMS).read_bytes())
        if not isinstance(content, dict) or content.get("sha256") != _digest(content["files"]):
            raise ValueError("it is not what was written")
        for name in content["files"]:
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"it has {shown(name)}, which is no file of the checkpoint")
    for name in sorted(content["files"])[rank::num_ranks]:
        with _reading(name):
            if digests_of(path, [name])[name] != content["files"][name]:
                raise ValueError("it is not what was written: its checksum differs")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedFileError(f"{name}: it is not there") from error
    except Exception as error:  # whatever unpickling makes of other bytes
        raise DamagedFileError(f"{name}: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    """The first line of what an error says, and its kind where that is not plain; of torch's advice only the reason."""
    text = str(error)
    if isinstance(error, UnpicklingError) or "weights_only" in text:
        reason = _REASON.search(text)
        return f"it is not what was written{f' ({reason[1]})' if reason else ''}"
    first = text.partition("\n")[0]
    return first if type(error) is ValueError else f"{type(error).__name__}: {first}".removesuffix(": ")


def unusable(folder: CheckpointFolder, step: int, what: str) -> str:
    """What to say of a checkpoint that is damaged, and from which to go on."""
    before = [other for other in folder.whole() if other < step]
    remedy = (
        f"the one before is {folder.of(before[-1]).name}: remove this folder to go on from it"
        if before
        else "there is none before it: remove this folder, and start over without --resume"
    )
    return f"{folder.of(step)} is damaged ({what}); {remedy}"
