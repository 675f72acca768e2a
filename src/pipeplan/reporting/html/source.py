"""What a report is about: up to four plans, each with what was measured of it, and a frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan.display import Displayed
from pipeplan.errors import UsageError
from pipeplan.files import Plan, sha256_of
from pipeplan.files.run_logs import RunLog, read_run
from pipeplan.files.trace import MeasuredTrace
from pipeplan.planning.frontier import FrontierResult
from pipeplan.simulator.measured import compared, compared_with_log
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.simulator.waits import Waits, waits_of
from pipeplan.units import format_ns

MOST_PLANS = 4

_MOST_WRITTEN_OUT = 4_000
"""Actions up to which a plan with a loop is written out: below that all of it can be seen at once."""


@dataclass(frozen=True)
class Shown:
    """A plan of a report, under a letter: its simulation, with what a run measured, if there is that."""

    letter: str
    simulation: Simulation
    trace: MeasuredTrace | None = None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.simulation.plan

    @property
    def name(self) -> str:
        """The plan's name after its letter."""
        return f"{self.letter}: {self.plan.name}"

    @cached_property
    def waits(self) -> tuple[Waits, ...]:
        """[device] what it waits for."""
        return waits_of(self.simulation)

    @cached_property
    def step(self) -> int | None:
        """The measured step that took the median time, of those that count."""
        measured = self.simulation.measured
        if self.trace is None or measured is None:
            return None
        times = measured.iterations_ns
        middle = sorted(range(len(times)), key=lambda step: times[step])[(len(times) - 1) // 2]
        return middle + measured.num_left_out


@dataclass(frozen=True)
class PlanReport(Displayed):
    """A report: ``.html`` is the page, ``.markdown`` its first screen for a comment, ``.svg`` its picture."""

    plans: tuple[Shown, ...]
    frontier: FrontierResult | None = None
    command: str = ""

    def __repr__(self) -> str:
        times = ", ".join(f"{each.name} {format_ns(each.simulation.iteration_ns)}" for each in self.plans)
        return f"<PlanReport {times}>"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know: plans that do not fit, and those that state other times than their programs take."""
        found = []
        for each in self.plans:
            simulation, stated = each.simulation, each.plan.predicted.makespan_ns
            if simulation.overflow is not None:
                found.append(f"{each.name}: too little memory: {simulation.overflow}")
            if stated != simulation.rates.makespan_ns:
                took = f"its programs take {simulation.rates.makespan_ns} ns"
                found.append(f"{each.name} states a makespan of {stated} ns, {took}; pipeplan check says what is wrong")
        return tuple(found)

    @property
    def html(self) -> str:
        """The text of the page."""
        from pipeplan.reporting.html.page import page

        return page(self)

    @property
    def markdown(self) -> str:
        """The text of the first screen, with a small picture."""
        from pipeplan.reporting.html.markdown import markdown

        return markdown(self)

    @property
    def svg(self) -> str:
        """The text of an SVG file with all plans on one time scale."""
        from pipeplan.reporting.drawing.svg import timelines_svg

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
    shown = [Shown("ABCD"[number], _simulated(plan)) for number, plan in enumerate(plans)]
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
    run = read_run(paths, max(len(plan.devices) for plan in plans))
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


def _with_run(shown: Shown, plan: Plan, run: MeasuredTrace | RunLog) -> Shown:
    simulation = shown.simulation
    if isinstance(run, RunLog):
        return replace(shown, simulation=replace(simulation, measured=compared_with_log(simulation, run)))
    measured = compared(simulate(plan), run)
    return replace(shown, simulation=replace(simulation, measured=measured), trace=run)
