"""``pipeplan check`` and ``pipeplan simulate``: is a plan right, and how does it run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pipeplan import _api
from pipeplan.cli.output import Outputs, say
from pipeplan.cli.shared import FILE, PROFILE_FOR, checked_against
from pipeplan.errors import UsageError
from pipeplan.units import format_bytes, format_ns

if TYPE_CHECKING:
    from pipeplan._api import Cluster, Plan, Profile, Report


@click.command("check")
@click.argument("plan_path", type=FILE, metavar="PLAN")
@click.option(
    "--profile",
    "profile_path",
    type=FILE,
    metavar="FILE",
    help="Also check costs and dependencies against the profile.",
)
@click.option(
    "--cluster",
    "cluster_path",
    type=FILE,
    metavar="FILE",
    help="Also check memory and transfer times against the cluster.",
)
@PROFILE_FOR
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: valid, problems, figures.")
@click.pass_context
def check_command(ctx: click.Context, /, plan_path: str, as_json: bool, **given: Any) -> None:
    """Recompute everything PLAN says: actions, dependencies, messages, times, memory, figures.

    Exits with 0 if all is right, 1 if a rule is broken (the first problems are shown, each with its place), 2 if
    a file cannot be read. Transfer times are checked only with --profile, and those of a plan made for a cluster
    only with --cluster as well.
    """
    plan = _api.read_plan(plan_path)
    profile, cluster = checked_against(given, plan=plan)
    report = _api.check(plan, profile, cluster)
    if as_json:
        say(json.dumps(report.figures(), indent=2, ensure_ascii=False))
        ctx.exit(0 if report.valid else 1)
    report.require(plan_path)
    say(_verdict(plan_path, plan, report, profile, cluster), wrap=True)
    for remark in report.remarks:
        say(f"remark: {remark}", wrap=True)


def _verdict(path: str, plan: Plan, report: Report, profile: Profile | None, cluster: Cluster | None) -> str:
    """The verdict in one line."""
    figures = report.recomputed
    parts = [
        f"{figures.num_actions} actions and {figures.num_transfers} transfers on {figures.num_devices} devices",
        f"makespan {format_ns(figures.makespan_ns)}, bubble rate {figures.bubble_rate:.1%}",
        f"peak memory {format_bytes(max(figures.peak_memory_bytes))}",
    ]
    if figures.iteration_ns > figures.makespan_ns:
        after = (
            (figures.exposed_reduction_ns, "summing gradients"),
            (figures.exposed_step_ns, "in the optimizer's step"),
            (figures.exposed_gather_ns, "gathering parameters"),
        )
        spent = ", ".join(f"{format_ns(ns)} {what}" for ns, what in after if ns)
        parts.insert(2, f"iteration {format_ns(figures.iteration_ns)}: after the last action {spent}")
    if plan.repetend is not None:
        parts.append(f"repetend {format_ns(plan.repetend.repetend_ns)} for {plan.repetend.unroll}")
    sources = [source.name for source in (profile, cluster) if source is not None]
    against = f" (also against {' and '.join(sources)})" if sources else ""
    return f"{path}: valid; {'; '.join(parts)}{against}"


if TYPE_CHECKING:
    from pipeplan._api import Simulation


@click.command("simulate")
@click.argument("plan_path", type=FILE, metavar="PLAN")
@click.option(
    "--microbatches",
    type=click.IntRange(1, 1_000_000),
    help="Repeat the plan's pattern up to this many micro-batches.  [default: the plan's]",
)
@click.option("--profile", "profile_path", type=FILE, metavar="FILE", help="Use the times and sizes in this profile.")
@click.option("--cluster", "cluster_path", type=FILE, metavar="FILE", help="Use the devices and links of this cluster.")
@PROFILE_FOR
@click.option(
    "--measured",
    "measured_paths",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Compare with a run: the trace that run --trace wrote, a log of torchtitan, Megatron-LM, NeMo or "
    "DeepSpeed, or torch.profiler traces (repeat it for each rank).",
)
@click.option("--svg", "svg_path", type=FILE, metavar="FILE", help="Write the timeline as SVG; - for stdout.")
@click.option(
    "--trace",
    "trace_path",
    type=FILE,
    metavar="FILE",
    help="Write the timeline for Perfetto, and what --measured has beside it; - for stdout.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object instead of tables.")
def simulate_command(
    plan_path: str,
    microbatches: int | None,
    measured_paths: tuple[str, ...],
    svg_path: str | None,
    trace_path: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Replay PLAN: when every action runs if each starts as soon as it can.

    Prints the makespan, throughput, the three bubble rates, busy, idle and memory of each device, a timeline, the
    critical path, the stages and the bottleneck; with --measured, the predicted and measured times of actions, devices
    and the iteration. PLAN may be - for stdin.
    """
    inputs = [("PLAN", plan_path), *((f"--{kind}", given[f"{kind}_path"]) for kind in ("profile", "cluster"))]
    _require_one_stdin([*inputs, *(("--measured", path) for path in measured_paths)])
    with Outputs({"--svg": svg_path, "--trace": trace_path}, as_json=as_json) as outputs:
        plan = _api.read_plan(plan_path)
        against = checked_against(given, plan=plan)
        simulation, run = _api.simulate(plan, microbatches, *against), None
        if measured_paths:
            simulation, run = _api.measured_run(simulation, measured_paths, *against)
        if svg_path is not None:
            from pipeplan.reporting.drawing.svg import timeline_svg

            outputs.write_text(timeline_svg(simulation), svg_path)
        if trace_path is not None:
            from pipeplan.reporting.beside import trace_beside
            from pipeplan.reporting.timeline import trace_text

            text = trace_text(simulation) if run is None else trace_beside(simulation, run)
            outputs.write_text(text, trace_path)
        _warn(simulation)
        if not outputs.on_stdout:
            _print(simulation, as_json)


def _require_one_stdin(paths: Sequence[tuple[str, str | None]]) -> None:
    """Require that at most one of some files is ``-``."""
    chosen = [name for name, path in paths if path == "-"]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} would both read from stdin; give a file for one of them")


def _warn(simulation: Simulation) -> None:
    """Warn on stderr of contradictions, and of times that nobody measured or estimated."""
    unprofiled = simulation.plan.provenance.options.get("unprofiled")
    if unprofiled and simulation.as_planned:
        say(f"pipeplan: its times are in proportion to the nearest size of the profile: {unprofiled}", err=True)
    if simulation.overflow is not None:
        say(f"pipeplan: too little memory: {simulation.overflow}; search for a plan with --memory", err=True)
    stated = simulation.plan.predicted.makespan_ns
    if simulation.as_planned and stated != simulation.rates.makespan_ns:
        say(
            f"pipeplan: the plan states a makespan of {stated} ns, its programs take "
            f"{simulation.rates.makespan_ns} ns; run pipeplan check to see what is wrong with it",
            err=True,
        )


def _print(simulation: Simulation, as_json: bool) -> None:
    if as_json:
        say(json.dumps(simulation.figures()))
    elif simulation.measured is not None:
        from pipeplan.reporting.tables import print_measured

        print_measured(simulation, simulation.measured, sys.stdout)
    else:
        from pipeplan.reporting.terminal import print_simulation, print_stages

        print_simulation(simulation, sys.stdout)
        print_stages(simulation.workload, sys.stdout)
