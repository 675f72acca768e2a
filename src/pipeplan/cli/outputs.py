"""Where results go: found out before the work that makes them."""

from __future__ import annotations

import os
from pathlib import Path

from pipeplan.errors import FileError, UsageError

__all__ = ["require_folder", "require_stdout_once", "require_writable"]


def require_stdout_once(output: str, as_json: bool) -> None:
    """Refuse to print both a file and JSON to stdout. Raises UsageError."""
    if output == "-" and as_json:
        raise UsageError("-o - and --json would both print to stdout; write the file somewhere else with -o FILE")


def require_writable(path: str, option: str = "-o") -> None:
    """Find out before minutes of work whether the file that an option names can be written. Raises FileError."""
    folder = Path(path).absolute().parent
    if path == "-":
        return
    if not folder.is_dir():
        raise FileError(f"{path}: cannot be written: there is no folder {folder}")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise FileError(f"{path}: cannot be written; choose another file with {option}")


def require_folder(path: str, pattern: str, option: str) -> None:
    """Make the folder that an option names before minutes of work, for files named by a pattern.

    Raises:
        FileError: it cannot be made or written, or has such files already, which new ones could be taken for.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be made: {error.strerror or error}; choose a folder with {option}") from error
    if not os.access(folder, os.W_OK):
        raise FileError(f"{path}: cannot be written; choose another folder with {option}")
    there = sorted(each.name for each in folder.glob(pattern))
    if there:
        names = f"{there[0]} of another run" if len(there) == 1 else f"{len(there)} files of another run, as {there[0]}"
        raise FileError(f"{path}: has {names}; remove what is there, or choose another folder with {option}")
