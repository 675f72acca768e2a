"""``pipeplan simulate``: replay a plan and show its bubbles, memory, critical path and timeline."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from pipeplan import _api
from pipeplan.errors import UsageError

if TYPE_CHECKING:
    from pipeplan._api import Simulation

__all__ = ["command"]


@click.command("simulate", short_help="Simulate a plan: bubbles, memory, critical path, timeline.")
@click.argument("plan_path", metavar="PLAN")
@click.option(
    "--microbatches",
    type=click.IntRange(1, 1_000_000),
    help="Repeat the plan's repetend up to this number of micro-batches.  [default: the plan's]",
)
@click.option("--profile", "profile_path", metavar="FILE", help="Take times and sizes from this profile.")
@click.option("--cluster", "cluster_path", metavar="FILE", help="Take devices and links from this cluster.")
@click.option(
    "--measured",
    "measured_path",
    metavar="TRACE",
    help="Compare with what a run of PLAN measured, as run --trace wrote it.",
)
@click.option("--svg", "svg_path", metavar="FILE", help="Write the timeline as SVG; - for stdout.")
@click.option("--trace", "trace_path", metavar="FILE", help="Write the timeline for Perfetto; - for stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object instead of tables.")
def command(
    plan_path: str,
    microbatches: int | None,
    profile_path: str | None,
    cluster_path: str | None,
    measured_path: str | None,
    svg_path: str | None,
    trace_path: str | None,
    as_json: bool,
) -> None:
    """Replay PLAN: when every action runs if each starts as soon as it can.

    Prints the makespan, the three bubble rates, busy, idle and memory of each device, a timeline and the critical
    path; with --measured what actions, devices and the iteration were predicted to take, and what they took. PLAN may
    be - for stdin.
    """
    inputs = {"PLAN": plan_path, "--profile": profile_path, "--cluster": cluster_path, "--measured": measured_path}
    _require_one_of_each("read from stdin", inputs)
    _require_one_of_each(
        "print to stdout", {"--json": "-" if as_json else None, "--svg": svg_path, "--trace": trace_path}
    )
    simulation = _api.simulate(
        _api.read_plan(plan_path),
        microbatches,
        _api.read_profile(profile_path) if profile_path is not None else None,
        _api.read_cluster(cluster_path) if cluster_path is not None else None,
    )
    if svg_path is not None:
        from pipeplan.reporting.timeline import timeline_svg

        _api.write_text(timeline_svg(simulation), svg_path)
    if trace_path is not None:
        from pipeplan.reporting.trace import trace_text

        _api.write_text(trace_text(simulation), trace_path)
    _warn(simulation)
    if "-" not in (svg_path, trace_path):
        _print(simulation, as_json, measured_path)


def _require_one_of_each(what: str, paths: dict[str, str | None]) -> None:
    """At most one of some options may be ``-``."""
    chosen = [name for name, path in paths.items() if path == "-"]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} would both {what}; give a file for one of them")


def _warn(simulation: Simulation) -> None:
    """Say on stderr what does not fit together."""
    if simulation.overflow is not None:
        click.echo(f"pipeplan: too little memory: {simulation.overflow}; search a plan for it with --memory", err=True)
    stated = simulation.plan.predicted.makespan_ns
    if simulation.as_planned and stated != simulation.rates.makespan_ns:
        click.echo(
            f"pipeplan: the plan states a makespan of {stated} ns, its programs take "
            f"{simulation.rates.makespan_ns} ns; pipeplan check tells what is wrong with it",
            err=True,
        )


def _print(simulation: Simulation, as_json: bool, measured_path: str | None) -> None:
    if measured_path is not None:
        _print_compared(simulation, as_json, measured_path)
    elif as_json:
        click.echo(json.dumps(simulation.figures()))
    else:
        from pipeplan.reporting.terminal import print_simulation

        print_simulation(simulation, sys.stdout)


def _print_compared(simulation: Simulation, as_json: bool, path: str) -> None:
    comparison = _api.compare_measured(simulation, path)
    if as_json:
        click.echo(json.dumps({**simulation.figures(), "measured": comparison.figures()}))
    else:
        from pipeplan.reporting.tables import print_measured

        print_measured(simulation, comparison, sys.stdout)
