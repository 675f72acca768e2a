"""A report as it is asked for: read, put together, and shown in three forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.display import Displayed
from pipeplan.errors import UsageError
from pipeplan.files import Plan, sha256_of
from pipeplan.files.folded import unfolded
from pipeplan.files.run_logs import RunLog, read_run
from pipeplan.files.trace import MeasuredTrace
from pipeplan.planning.frontier import FrontierResult
from pipeplan.reporting.drawing.svg import timelines_svg
from pipeplan.reporting.html.markdown import markdown
from pipeplan.reporting.html.page import page
from pipeplan.reporting.html.source import ReportSource, ShownPlan
from pipeplan.simulator.measured import compared, compared_with_log
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.units import format_ns

MOST_PLANS = 4

_MOST_WRITTEN_OUT = 4_000
"""Actions up to which a plan with a loop is written out: below that all of it can be seen at once."""


@dataclass(frozen=True, repr=False)
class PlanReport(ReportSource, Displayed):
    """A report: ``.html`` is the page, ``.markdown`` its first screen for a comment, ``.svg`` its picture."""

    def __repr__(self) -> str:
        times = ", ".join(f"{each.name} {format_ns(each.simulation.iteration_ns)}" for each in self.plans)
        return f"<PlanReport {times}>"

    @property
    def html(self) -> str:
        """The text of the page."""
        return page(self)

    @property
    def markdown(self) -> str:
        """The text of the first screen, with a small picture."""
        return markdown(self)

    @property
    def svg(self) -> str:
        """The text of an SVG file with all plans on one time scale."""
        return timelines_svg({each.name: each.simulation for each in self.plans})


def report_of(
    plans: Sequence[Plan], measured: Sequence[str] = (), frontier: FrontierResult | None = None, command: str = ""
) -> PlanReport:
    """A report on plans, the paths of what a run measured of one of them, and a frontier.

    Raises:
        FileError: what was measured cannot be read.
        InvalidPlanError: a plan's programs cannot run.
        UsageError: there are no plans, or more than four; what was measured is of none of them.
    """
    if not 1 <= len(plans) <= MOST_PLANS:
        raise UsageError(f"a report is on 1 to {MOST_PLANS} plans, not on {len(plans)}")
    plans = [unfolded(plan) if measured else plan for plan in plans]
    shown = [ShownPlan("ABCD"[number], _simulated(plan)) for number, plan in enumerate(plans)]
    if measured:
        number, run = _run(plans, measured)
        shown[number] = _with_run(shown[number], plans[number], run)
    return PlanReport(tuple(shown), frontier, command)


def _simulated(plan: Plan) -> Simulation:
    """A plan's simulation, written out where it has a loop and is not long."""
    if plan.loop is not None and plan.num_microbatches * len(plan.operations) <= _MOST_WRITTEN_OUT:
        plan = plan.unrolled()
    return simulate(plan)


def _run(plans: Sequence[Plan], paths: Sequence[str]) -> tuple[int, MeasuredTrace | RunLog]:
    """What was measured, and the number of the plan that it is of. Raises UsageError."""
    run = read_run(paths, max(plan.num_devices for plan in plans))
    if isinstance(run, RunLog):
        if len(plans) > 1:
            raise UsageError("--measured: a log does not say which plan ran; give the one plan that did")
        return 0, run
    prints = [sha256_of(plan) for plan in plans]
    if run.plan_sha256 not in prints:
        names = ", ".join(f"{plan.name!r} with {sha256[:12]}..." for plan, sha256 in zip(plans, prints, strict=True))
        raise UsageError(
            f"--measured: the trace is of {run.plan!r} with sha256 {run.plan_sha256[:12]}..., not of {names}; give the "
            "plan that ran"
        )
    number = prints.index(run.plan_sha256)
    count = len(plans[number].devices)
    return number, replace(run, steps=tuple(step[:count] for step in run.steps))


def _with_run(shown: ShownPlan, plan: Plan, run: MeasuredTrace | RunLog) -> ShownPlan:
    simulation = shown.simulation
    if isinstance(run, RunLog):
        return replace(shown, simulation=replace(simulation, measured=compared_with_log(simulation, run)))
    measured = compared(simulate(plan), run)
    return replace(shown, simulation=replace(simulation, measured=measured), trace=run)
