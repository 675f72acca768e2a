"""``pipeplan compare``: every known schedule for a profile in one table, beside the search."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from pipeplan.cli.planning import Asked, Status, interrupt_on_sigterm, planning_options, read_asked

__all__ = ["command"]


@click.command("compare", short_help="Compare every known schedule, ours beside them.")
@planning_options
def command(as_json: bool, **flags: Any) -> None:
    """Time every classic schedule that applies to PROFILE, and search one beside them; best first.

    Without --placement and without one in the profile, all strategies are compared. Schedules
    that do not fit into memory are timed, too, and stand last.
    """
    from pipeplan.comparison import compare
    from pipeplan.report.comparison import print_comparison

    asked = read_asked(flags)
    interrupt_on_sigterm()
    with Status() as progress:
        found = compare(
            asked.profile,
            _placements(asked, flags["placement"]),
            asked.batch,
            asked.options,
            num_devices=asked.num_devices,
            chunks=asked.chunks,
            cluster=asked.cluster,
            memory_bytes=asked.memory_bytes,
            progress=progress,
        )
    if found.interrupted:
        click.echo("pipeplan: interrupted; these are the best plans so far", err=True)
    if as_json:
        click.echo(json.dumps(found.summary()))
    else:
        print_comparison(found, file=sys.stdout)


def _placements(asked: Asked, wanted: str) -> list[Any]:
    """The placement that was asked for or that the profile has; else all strategies."""
    from pipeplan.partition import STRATEGIES

    if wanted != "auto" or asked.profile.placement is not None:
        return [asked.placement]
    return list(STRATEGIES)
