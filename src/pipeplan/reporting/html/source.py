"""What a report is about: up to four plans, each with what was measured of it, and a frontier."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeplan.files import Plan
from pipeplan.files.trace import MeasuredTrace
from pipeplan.planning.frontier import FrontierResult
from pipeplan.simulator.simulation import Simulation
from pipeplan.simulator.waits import Waits, waits_of


@dataclass(frozen=True)
class ShownPlan:
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
class ReportSource:
    """What a report is made of; ``command`` is the one that makes it."""

    plans: tuple[ShownPlan, ...]
    frontier: FrontierResult | None = None
    command: str = ""

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
