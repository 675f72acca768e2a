"""``pipeplan check``: verify a plan independently of what made it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from pipeplan import _api
from pipeplan.units import format_bytes, format_ns

if TYPE_CHECKING:
    from pipeplan._api import Cluster, Plan, Profile, Report

__all__ = ["command"]


@click.command("check", short_help="Verify a plan independently of what made it.")
@click.argument("plan_path", metavar="PLAN")
@click.option("--profile", "profile_path", metavar="FILE", help="Check costs and dependencies against the profile too.")
@click.option(
    "--cluster", "cluster_path", metavar="FILE", help="Check memory and transfer times against the cluster too."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: valid, problems, figures.")
@click.pass_context
def command(
    ctx: click.Context, plan_path: str, profile_path: str | None, cluster_path: str | None, as_json: bool
) -> None:
    """Recompute everything PLAN says: actions, dependencies, messages, times, memory, figures.

    Exits with 0 if all is right, 1 if a rule is broken (the first problems are shown, each with its place), 2 if
    a file cannot be read. Transfer times are compared only with the profile given, and for a plan made for a
    cluster only with the cluster given too.
    """
    plan = _api.read_plan(plan_path)
    profile = _api.read_profile(profile_path) if profile_path is not None else None
    cluster = _api.read_cluster(cluster_path) if cluster_path is not None else None
    report = _api.check(plan, profile, cluster)
    if as_json:
        click.echo(json.dumps(report.figures(), indent=2, ensure_ascii=False))
        ctx.exit(0 if report.valid else 1)
    report.require(plan_path)
    click.echo(_line(plan_path, plan, report, profile, cluster))


def _line(path: str, plan: Plan, report: Report, profile: Profile | None, cluster: Cluster | None) -> str:
    """What was verified, in one line."""
    figures = report.recomputed
    parts = [
        f"{figures.num_actions} actions and {figures.num_transfers} transfers on {figures.num_devices} devices",
        f"makespan {format_ns(figures.makespan_ns)}, bubble rate {figures.bubble_rate:.1%}",
        f"peak memory {format_bytes(max(figures.peak_memory_bytes))}",
    ]
    if plan.repetend is not None:
        parts.append(f"repetend {format_ns(plan.repetend.repetend_ns)} for {plan.repetend.unroll}")
    sources = [source.name for source in (profile, cluster) if source is not None]
    against = f" (also against {' and '.join(sources)})" if sources else ""
    return f"{path}: valid; {'; '.join(parts)}{against}"
