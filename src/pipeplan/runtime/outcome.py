"""A run that has ended, beside what its plan predicted."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from pipeplan.model import Plan
from pipeplan.runtime.options import RunOptions, RunResult
from pipeplan.runtime.train_options import TrainOptions

__all__ = ["RunOutcome"]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What was run, how, and what came of it."""

    plan: Plan
    options: RunOptions
    result: RunResult

    @property
    def predicted_ns(self) -> int:
        """Of the iteration, sums of gradients included; older plans say when the last action ends, and no more."""
        return self.plan.predicted.iteration_ns or self.plan.predicted.makespan_ns

    @property
    def warm_ns(self) -> int:
        """The median iteration; of several steps the first, which warms up, is left out."""
        times = [step.iteration_ns for step in self.result.steps]
        return round(statistics.median(times[1:] or times))

    def figures(self) -> dict[str, object]:
        """The object of ``run --json``, in which what is not finite is None; ``iteration_ns`` is of all steps."""
        if isinstance(self.options, TrainOptions):
            return self._trained(self.options)
        return self._emulated()

    def _emulated(self) -> dict[str, object]:
        return {
            "plan": self.plan.name,
            "num_ranks": len(self.plan.devices),
            "blocking": self.options.blocking,
            **self._times(),
            "steps": [{"step": step.step, "iteration_ns": step.iteration_ns} for step in self.result.steps],
            "versions": dict(self.result.versions),
        }

    def _trained(self, options: TrainOptions) -> dict[str, object]:
        plan, result = self.plan, self.result
        return {
            "plan": plan.name,
            "model": options.model,
            "num_ranks": len(plan.devices),
            "device": options.device,
            "dtype": options.dtype,
            "backend": options.transport,
            "num_microbatches": plan.num_microbatches,
            **self._times(),
            "steps": [{name: _finite(value) for name, value in step.as_json().items()} for step in result.steps],
            "peak_memory_bytes": list(result.peak_memory_bytes),
            "predicted_peak_memory_bytes": [memory.peak_bytes for memory in plan.predicted.memory],
            "versions": dict(result.versions),
        }

    def _times(self) -> dict[str, object]:
        return {
            "iteration_ns": round(statistics.median(step.iteration_ns for step in self.result.steps)),
            "predicted_iteration_ns": self.predicted_ns,
        }


def _finite(value: float | None) -> float | None:
    """JSON has no other numbers."""
    return value if value is not None and math.isfinite(value) else None
