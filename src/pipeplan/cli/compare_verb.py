"""``pipeplan compare``: every known schedule for a profile in one table, beside the search."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from pipeplan import _api
from pipeplan.cli.options import planning_options, read_request
from pipeplan.cli.status import Status, interrupt_on_sigterm

__all__ = ["command"]


@click.command("compare", short_help="Compare every known schedule, ours beside them.")
@planning_options
def command(as_json: bool, **flags: Any) -> None:
    """Time every classic schedule that applies to PROFILE, and search one beside them; best first.

    Without --placement and without one in the profile, all strategies are compared. Schedules
    that do not fit into memory are timed, too, and stand last.
    """
    from pipeplan.reporting.tables import print_comparison

    request = read_request(flags)
    interrupt_on_sigterm()
    with Status() as progress:
        found = _api.compare(request, progress=progress)
    if found.interrupted:
        click.echo("pipeplan: interrupted; these are the best plans so far", err=True)
    if as_json:
        click.echo(json.dumps(found.figures()))
    else:
        print_comparison(found, file=sys.stdout)
