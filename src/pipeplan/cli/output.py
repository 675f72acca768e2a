"""Where a command's text and files go: the one place that prints, and output files that are tested before the work."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from pipeplan import _api
from pipeplan.errors import FileError, InfeasibleError, UsageError
from pipeplan.texts import on_one_line, printable, shortened, with_short_lines

if TYPE_CHECKING:
    from pipeplan._api import FileModel, Plan

_COMMAND = "pipeplan.command"


def keep_command_line(ctx: click.Context, arguments: Sequence[str]) -> None:
    """Remember what the command line is, for the files that are written."""
    ctx.meta[_COMMAND] = shlex.join(["pipeplan", *arguments])


def command_line() -> str:
    """The command line of the verb that runs, as a user types it, on one line that a file may have."""
    return shortened(on_one_line(click.get_current_context().meta.get(_COMMAND, "")), _LONGEST_COMMAND)


_LONGEST_COMMAND = 8192
"""Characters of a command line that are kept, which is what a text of a file may have."""


def say(text: str, *, err: bool = False, wrap: bool = False) -> None:
    """Print a line, or lines: whatever of a file, the command line or an error is in it moves no terminal.

    With ``wrap`` between words, as wide as where it goes. A message that nobody can get any more, as where the terminal
    has gone, ends nothing: files are still to be written.
    """
    text = printable(with_short_lines(text) if err else text)
    if wrap:
        from pipeplan.reporting.layout import wrapped

        text = wrapped(text, sys.stderr if err else sys.stdout)
    with suppress(OSError) if err else nullcontext():
        click.echo(text, err=err)


def say_for_now(text: str, columns: int) -> None:
    """Show as much of a text on the terminal's last line as is there, until anything else is said; erase it without."""
    sys.stderr.write(f"\r{printable(text)[: columns - 1]}\033[K\r")  # and whatever else is said overwrites it
    sys.stderr.flush()


def say_notes(notes: Iterable[str]) -> None:
    """Say on stderr what a reader must know, where stdout is for a file or for JSON."""
    for note in notes:
        say(f"pipeplan: {note}", err=True, wrap=True)


@contextmanager
def failure_as_json(as_json: bool) -> Iterator[None]:
    """Print that nothing fits, and what would do, as one object where figures are printed so; it is raised further."""
    try:
        yield
    except InfeasibleError as error:
        if as_json:
            say(json.dumps(error.figures()))
        raise


class Outputs:
    """The files that a command writes when its work is done, by the options that name them.

    All are tried when this is made. What cannot be written in the end goes to a temporary file, or to stdout where
    there is no room for one either; leaving the context raises FileError, which says where it is, so that figures are
    printed before.

    Args:
        paths: option -> its file; None where it was not given.
        as_json: whether figures are printed to stdout as JSON, so that no file can be.
        renews: options whose files, which the command reads, these may take the place of: they are of the same kind.

    Raises:
        UsageError: two of them are one file, or would both print to stdout; or one is a file that the command reads.
        FileError: a file cannot be written; nothing has been done yet.
    """

    def __init__(self, paths: Mapping[str, str | None], *, as_json: bool = False, renews: Collection[str] = ()) -> None:
        self._problems: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        given = {option: path for option, path in paths.items() if path is not None}
        self.on_stdout = "-" in given.values()
        _require_different({**given, "--json": "-"} if as_json else given)
        _require_unread(given, renews)
        for option, path in given.items():
            _api.require_writable(path, option)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._problems:
            return
        problem = FileError("\n".join(self._problems.values()))
        if error is None:
            raise problem
        say(f"pipeplan: {problem}", err=True)  # beside what ended the work otherwise

    def note(self, path: str, problem: str) -> None:
        """What somebody else wrote, and why it is not there, if it is not."""
        if problem:
            self._problems[path] = problem

    def has(self, path: str) -> bool:
        """Whether a file was written without problems."""
        return path not in self._problems

    def say_written(self, what: str, path: str | None) -> None:
        """Say on stderr where a file is, if it was asked for and is there; stdout is seen."""
        if path is not None and path != "-" and self.has(path):
            say(f"{what} written to {path}", err=True)

    def write(self, model: FileModel, path: str) -> None:
        """Write a file, or put it somewhere else if that fails."""
        self.write_text(_api.to_json(model), path)

    def write_plan(self, plan: Plan, path: str) -> None:
        """Write a plan with the command line that made it, so that it can be made again."""
        self.write(plan.written_by(command_line()), path)

    def write_text(self, text: str | bytes, path: str) -> None:
        """The same with the text of a file, or its bytes."""
        try:
            _api.write_text(text, self._kept.get(path, path))
        except FileError as error:
            kept = _api.write_elsewhere(text, path)
            if kept is None and isinstance(text, str):
                _api.write_text(text, "-")
            elif kept is not None:
                self._kept[path] = kept
            where = kept or ("stdout" if isinstance(text, str) else "no other place, either")
            self._problems[path] = f"{error}; what was to be there is in {where}"


def _require_different(paths: Mapping[str, str]) -> None:
    """Refuse files that one option would write over another's. Raises UsageError."""
    taken: dict[str, str] = {}
    for option, path in paths.items():
        place = path if path == "-" else os.path.realpath(path)
        if place in taken and (path == "-" or not os.path.exists(path) or os.path.isfile(path)):
            both = "print to stdout" if path == "-" else f"write {path}"
            raise UsageError(f"{taken[place]} and {option} would both {both}; give another file for one of them")
        taken[place] = option


def _require_unread(paths: Mapping[str, str], renews: Collection[str]) -> None:
    """Refuse to write over what the command reads, but for files that it ``renews``. Raises UsageError."""
    context = click.get_current_context(silent=True)
    if context is None:
        return
    written = {os.path.realpath(path): option for option, path in paths.items() if path != "-"}
    for param in context.command.params:
        name = max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name
        if not isinstance(param.type, click.Path) or not {*param.opts}.isdisjoint({*paths, *renews}):
            continue
        given = context.params.get(param.name or "")
        for path in (given,) if isinstance(given, str) else given or ():
            option = written.get(os.path.realpath(path))
            if option is not None and os.path.isfile(path):
                raise UsageError(f"{name} is {path}, and {option} would write over it; give another file for {option}")
