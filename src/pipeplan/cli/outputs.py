"""Where results go: found out before the work that makes them."""

from __future__ import annotations

import os
from pathlib import Path

from pipeplan.errors import FileError, UsageError

__all__ = ["require_stdout_once", "require_writable"]


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
