"""What is said while work goes on, how it is interrupted, and where results go."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

from pipeplan.errors import FileError, UsageError

if TYPE_CHECKING:
    from pipeplan._api import Progress

__all__ = [
    "Shown",
    "Status",
    "interrupt_on_sigterm",
    "require_folder",
    "require_stdout_once",
    "require_writable",
    "warnings_told",
]


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


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end work as Ctrl-C does: a search with the best plan so far, a run with its processes."""
    signal.signal(signal.SIGTERM, _as_interrupt)


def _as_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


class Status:
    """A line on stderr with the clock, the best value, the bound and the gap; nothing unless stderr is a terminal."""

    def __enter__(self) -> Progress | None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._line = Progress(
            SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console, transient=True
        )
        if not console.is_terminal:
            return None
        self._line.start()
        self._task = self._line.add_task("searching", total=None)
        return self._update

    def _update(self, what: str, best_ns: int, bound_ns: int, seconds: float) -> None:
        from pipeplan.units import format_ns

        gap = best_ns / bound_ns - 1
        text = f"best {format_ns(best_ns)}  bound {format_ns(bound_ns)}  gap {gap:.2%}  by {what} at {seconds:.1f}s"
        self._line.update(self._task, description=text)

    def __exit__(self, *_: object) -> None:
        if self._line.live.is_started:
            self._line.stop()


@contextmanager
def warnings_told() -> Iterator[None]:
    """Pipeplan's own warnings in the form of its other messages, on stderr when all is measured."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning):
        click.echo(f"pipeplan: warning: {text}", err=True)


class Shown:
    """A progress bar on stderr; nothing unless it is a terminal. ``what`` runs now."""

    def __init__(self, doing: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.what = "nothing yet"
        console = Console(stderr=True)
        columns = (
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[what]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(doing, total=None, what="")

    def __enter__(self) -> Shown:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int, what: str) -> None:
        """Called before each run."""
        self.what = what
        self._progress.update(self._task, completed=done, total=total, what=what)
