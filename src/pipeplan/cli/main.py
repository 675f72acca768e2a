"""``pipeplan``: the group of verbs, and the one place where errors become exit codes.

Verbs load when they are called, so that ``pipeplan --help`` starts in a moment.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

import click

from pipeplan._version import __version__
from pipeplan.errors import PipeplanError

VERBS = {
    "search": ("search_verbs", "Search for the best plan."),
    "compare": ("search_verbs", "Compare pipeplan's schedule with every known one."),
    "frontier": ("frontier_verb", "Show what more memory and more devices bring."),
    "simulate": ("plan_verbs", "Simulate a plan: bubbles, memory, critical path, timeline."),
    "run": ("run_verb", "Run a plan on torch.distributed, or emulate it."),
    "profile": ("profile_verb", "Measure or estimate a model block by block."),
    "check": ("plan_verbs", "Verify a plan independently of what made it."),
    "example": ("example_verb", "Write a ready input: a literature shape or a paper's model."),
}
"""Verb -> the module that has its ``VERB_command``, and one line of help."""

INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group that imports a verb's module when the verb is used."""

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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs with their help lines, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, "--version", prog_name="pipeplan")
def cli() -> None:
    """Plan, check, simulate and run pipeline-parallel training of large neural networks.

    Exit codes: 0 done, 1 a valid question with no answer, 2 usage or an unreadable file,
    3 time ran out with nothing found.
    """


def main(began: float | None = None) -> None:
    """Run the command line; time limits count from when the process ``began``, by ``time.monotonic``, or from now."""
    try:
        code = cli.main(standalone_mode=False, obj=time.monotonic() if began is None else began)
        sys.stdout.flush()
    except click.exceptions.Abort:
        click.echo("pipeplan: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except PipeplanError as error:
        click.echo(f"pipeplan: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of stdout left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
