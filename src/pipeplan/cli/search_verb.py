"""``pipeplan search``: search a schedule for a profile and write the plan."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from pipeplan.cli.planning import Status, interrupt_on_sigterm, planning_options, read_asked

if TYPE_CHECKING:
    from pipeplan.cli.planning import Asked
    from pipeplan.planner import Result
    from pipeplan.planner.tuning import Tuning
    from pipeplan.schedule.search import Progress

__all__ = ["command"]


@click.command("search", short_help="Search the best plan for a profile and write it.")
@planning_options
@click.option(
    "--scheduler",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="auto, repetend, rules, or a classic schedule.",
)
@click.option(
    "--rules",
    "rules_path",
    metavar="FILE|NAME",
    help="Rules of the scheduler: a TOML file, or some that ship.  [default: all built-in ones]",
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes of a tuning.  [default: one per core]")
@click.option("--cache", metavar="FILE", help="What a tuning finds is kept here, and not looked for again.")
@click.option("--rules-output", metavar="FILE", help="Where to write a tuning's best rules, to give to --rules.")
@click.option("-o", "--output", metavar="FILE", help="Where to write the plan; - for stdout.")
@click.option(
    "--placement-output", metavar="FILE", help="Where to write the stages alone, to edit and give to --placement."
)
def command(
    scheduler: str,
    rules_path: str | None,
    workers: int | None,
    cache: str | None,
    rules_output: str | None,
    output: str | None,
    placement_output: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Search the best plan for PROFILE: stages, replicas, micro-batch sizes, schedule; or what flags leave open.

    The search soon has a valid plan and improves it until it is proved optimal, the time limit passes, or Ctrl-C;
    the best plan is written in every case. With --scheduler rules and no --rules it is a tuning: all built-in rules on
    a grid of depths, replicas, sizes and placements, ranked.
    """
    from pipeplan.errors import UsageError
    from pipeplan.model import write_file, write_text
    from pipeplan.planner import search_plan
    from pipeplan.schedule.rules.files import read_rules, to_toml

    if output == "-" and as_json:
        raise UsageError("-o - and --json would both print to stdout; write the plan to a file")
    if rules_path is not None and scheduler not in ("auto", "rules"):
        raise UsageError(f"--rules is for --scheduler rules, not for {scheduler}; leave one of them out")
    rules = None if rules_path is None else read_rules(rules_path)
    asked = read_asked(flags, scheduler if rules is None else "rules", rules)
    interrupt_on_sigterm()
    tuning: Tuning | None = None
    with Status() as progress:
        if asked.options.scheduler == "rules" and rules is None:
            tuning = _tuned(asked, progress, workers, cache)
        elif any(given is not None for given in (workers, cache, rules_output)):
            raise UsageError(
                "--workers, --cache and --rules-output are for --scheduler rules without --rules; leave them out"
            )
        result = (
            tuning.result
            if tuning is not None
            else search_plan(
                asked.profile,
                asked.placement,
                asked.batch,
                asked.options,
                num_devices=asked.num_devices,
                chunks=asked.chunks,
                cluster=asked.cluster,
                memory_bytes=asked.memory_bytes,
                sizes=asked.sizes,
                progress=progress,
            )
        )
    if output is not None:
        write_file(result.plan, output)
    if rules_output is not None and tuning is not None:
        write_text(to_toml(tuning.rules), rules_output)
    if placement_output is not None:
        write_file(result.plan.placed, placement_output)
    _print(result, tuning, output, as_json)


def _tuned(asked: Asked, progress: Progress | None, workers: int | None, cache: str | None) -> Tuning:
    from pipeplan.planner import Request
    from pipeplan.planner.tuning import tune

    request = Request(
        asked.profile,
        asked.placement,
        asked.num_devices,
        asked.chunks,
        asked.batch,
        asked.sizes,
        asked.options,
        asked.cluster,
        asked.memory_bytes,
        progress,
    )
    return tune(request, workers=workers or os.cpu_count() or 1, cache=cache)


def _print(result: Result, tuning: Tuning | None, output: str | None, as_json: bool) -> None:
    if result.interrupted:
        click.echo("pipeplan: interrupted; this is the best plan so far", err=True)
    if as_json:
        click.echo(json.dumps((tuning or result).summary()))
        return
    from pipeplan.report.stages import print_stages
    from pipeplan.report.terminal import print_simulation
    from pipeplan.report.tuning import print_ranking
    from pipeplan.simulate.simulation import simulate

    if output == "-":
        return
    if tuning is not None:
        print_ranking(tuning.rows, file=sys.stdout)
        click.echo(f"{tuning.said}\n")
    print_simulation(simulate(result.plan), file=sys.stdout)
    print_stages(result.plan, file=sys.stdout)
    if output is not None:
        click.echo(f"plan written to {output}", err=True)
