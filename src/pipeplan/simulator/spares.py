"""What spare devices of a cluster cost and cover, in figures and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.simulator.failures import DomainFailure
from pipeplan.units import format_ns


@dataclass(frozen=True, slots=True)
class Spares:
    """So many ``devices`` are spare of ``whole`` ones: what the plan for the others takes, and one for all.

    Each was searched for ``seconds`` at most. ``whole_ns`` is what was found for all, None where nothing was, and
    ``why`` says why. ``failures`` are of the domains of the cluster, smallest first.
    """

    devices: int
    whole: int
    time_ns: int
    whole_ns: int | None
    seconds: float
    failures: tuple[DomainFailure, ...] = ()
    why: str = ""

    @property
    def loss(self) -> float | None:
        """What part of the throughput of all devices the spare ones cost.

        At least 0: the plan for the others runs on all of them, too, with so many idle. So where a search found less
        for all than for fewer, because their number divides the mini-batch worse or its time was short, all have that.
        """
        return None if self.whole_ns is None else max(0.0, 1 - self.whole_ns / self.time_ns)

    def figures(self) -> dict[str, object]:
        """The object ``spares`` of ``search --json``, and of the others'."""
        return {
            "devices": self.devices,
            "of": self.whole,
            "planned_for": self.whole - self.devices,
            "iteration_ns": self.time_ns,
            "whole_iteration_ns": self.whole_ns,
            "loss": self.loss,
            "seconds_each": self.seconds,
            "failures": [each.figures() for each in self.failures],
        }

    @property
    def said(self) -> tuple[str, ...]:
        """The same for people, in a few lines."""
        return (self._loss_said(), *(self._failure_said(each) for each in self.failures))

    def _loss_said(self) -> str:
        planned = (
            f"{self.devices} of {self.whole} devices are spare: {format_ns(self.time_ns)} an iteration on the others"
        )
        if self.loss is None:
            return f"{planned}; what all would take is not known: {self.why}"
        lost = f"{self.loss:.1%} of the throughput is lost" if self.loss else "nothing is lost"
        each = f"each searched for {self.seconds:.3g} s, half of the limit"
        return f"{planned}, {format_ns(self.whole_ns or 0)} found for all: {lost} ({each})"

    def _failure_said(self, failure: DomainFailure) -> str:
        name = f"a failed {failure.domain}" + (f" ({failure.devices} devices)" if failure.devices > 1 else "")
        kept = "" if failure.kept else "; a stage's state is on no other device: read it from the last checkpoint"
        if not failure.covered:
            return (
                f"{name} takes {failure.in_use} of the plan's, and {failure.missing} more would have to be spare{kept}"
            )
        if not failure.failed:
            return f"{name} takes none of the plan's"
        ends = _numbers(failure.by), _numbers(failure.failed)
        goes_on = ""
        if failure.iteration_ns is not None:
            goes_on = f" in {format_ns(failure.iteration_ns)}"
        return f"{name} is covered: with devices {ends[0]} for {ends[1]} the same plan goes on{goes_on}{kept}"


def _numbers(devices: Sequence[int]) -> str:
    """Numbers with runs of them as ``504-511``."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][-1] + 1:
            runs[-1][1:] = [device]
        else:
            runs.append([device])
    return ", ".join("-".join(map(str, run)) for run in runs)
