"""``pipeplan``: the group of verbs, and the one place where errors become exit codes.

Verbs load when they are called, so that ``pipeplan --help`` starts in a moment.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import signal
import sys

import click

from pipeplan._version import __version__
from pipeplan.cli.output import keep_command_line, say
from pipeplan.errors import FileError, PipeplanError, UsageError, choose_from

VERBS = {
    "search": ("search_verbs", "Search for the best plan."),
    "compare": ("search_verbs", "Compare pipeplan's schedule with every known one."),
    "frontier": ("frontier_verb", "Show what more memory and more devices bring."),
    "simulate": ("plan_verbs", "Simulate a plan: bubbles, memory, critical path, timeline."),
    "report": ("report_verb", "Write a report on plans as a web page."),
    "run": ("run_verb", "Run a plan on torch.distributed, or emulate it."),
    "profile": ("profile_verb", "Measure or estimate a model block by block."),
    "kernels": ("kernels_verb", "Choose which kernel backend runs each block."),
    "check": ("plan_verbs", "Verify a plan independently of what made it."),
    "export": ("export_verb", "Write a plan in another tool's format."),
    "import": ("import_verb", "Read what another tool runs as a plan."),
    "example": ("example_verb", "Write a ready input: a literature shape or a paper's model."),
}
"""Verb -> the module that has its ``VERB_command``, and one line of help."""

INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group that imports a verb's module when the verb is used."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The verb and what it gets; the whole is kept for the files that the verb writes."""
        keep_command_line(ctx, args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Verbs in the order in which they are used."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, imported now; None if the verb is unknown."""
        if cmd_name not in VERBS:
            return None
        module, _ = VERBS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"pipeplan.cli.{module}"), f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that the first argument names. Raises UsageError where there is none."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UsageError(f"there is no verb {args[0]!r}; {choose_from(args[0], list(VERBS))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs with their help lines, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, "--version", prog_name="pipeplan")
def cli() -> None:
    """Plan, check, simulate and run pipeline-parallel training and inference of large neural networks.

    Exit codes: 0 done, 1 a valid question with no answer, 2 usage or an unreadable file,
    3 time ran out with nothing found.
    """


def main(began: float | None = None) -> None:
    """Run the command line; time limits count from when the process ``began``, by ``time.monotonic``, or from now."""
    try:
        try:
            _open_closed_streams()
            code = _flushed(_exit_code(began))
        finally:  # the command has ended, and torch takes a moment to leave: another Ctrl-C would only show where it is
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:  # before the verb hears it, or another while the first was being answered
        say("pipeplan: interrupted", err=True)
        code = INTERRUPTED
    gc.freeze()  # nor is all that was read looked through for cycles, which takes a third of a second for 10,000 blocks
    exec("")  # Python ends by SIGINT where the last text it ran, as of a dataclass, was interrupted, whoever answered
    sys.exit(code)


def _open_closed_streams() -> None:
    """Lead nowhere what the shell has closed (``>&-``): the next file that is opened would take its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes it
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  (the process keeps it)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names in files have letters that not every terminal has
            stream.reconfigure(errors="backslashreplace")


def _flushed(code: int) -> int:
    """The exit code, once stdout has been written; it is 0 also where its reader left."""
    try:
        sys.stdout.flush()
    except OSError as error:  # and the interpreter is not to try again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            return code or _stdout_failed(error)
    return code


def _exit_code(began: float | None) -> int:
    """Run what the command line asks for; whatever it ends with has been said."""
    try:
        code = cli.main(standalone_mode=False, obj=began)
    except (click.exceptions.Abort, KeyboardInterrupt):  # the latter where click is at work, not the verb
        say("pipeplan: interrupted", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        say(text.getvalue().removesuffix("\n"), err=True, wrap=True)
        return error.exit_code
    except PipeplanError as error:
        say(f"pipeplan: {error}", err=True, wrap=True)
        return error.exit_code
    except (BrokenPipeError, SystemExit):  # the reader of stdout left; click has its own way of saying so
        return 0
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        return _stdout_failed(error)
    return code if isinstance(code, int) else 0


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _stdout_failed(error: OSError) -> int:
    say(f"pipeplan: stdout cannot be written: {error.strerror}; send it to a file that has room", err=True)
    return FileError.exit_code


if __name__ == "__main__":
    main()
