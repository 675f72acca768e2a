"""What a search gives: a plan, what is proved about it, and how it was found."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pipeplan.files import Plan
from pipeplan.planning.numbers import number
from pipeplan.schedule.state import Schedule
from pipeplan.workload.one_microbatch import OneMicrobatch

__all__ = ["Result"]


@dataclass(frozen=True, slots=True)
class Result:
    """A plan and how it was found; ``seconds`` is the whole search, ``partition_seconds`` choosing the stages.

    ``status`` is ``optimal`` if the makespan equals the lower bound, else ``feasible``.
    """

    plan: Plan
    schedule: Schedule
    seconds: float
    partition_seconds: float | None
    interrupted: bool

    @property
    def status(self) -> str:
        """``optimal`` or ``feasible``."""
        return "optimal" if self.schedule.optimal else "feasible"

    def figures(self) -> dict[str, object]:
        """The figures of ``search --json``.

        Period, unroll and span are those of the best repetend the search knows: the pattern it proved, or the plan's
        own where that is quicker or no pattern was searched.
        """
        predicted, repetend, pattern = self.plan.predicted, self.plan.repetend, self.schedule.pattern
        period, period_bound_ns = predicted.period_ns, predicted.period_lower_bound_ns
        unroll, span = (repetend.unroll, repetend.span) if repetend is not None else (None, None)
        steady = predicted.bubble_rate_steady
        problem = None if pattern is None else OneMicrobatch.of(self.schedule.workload)
        per_round = 1 if problem is None else problem.microbatches_per_round
        if pattern is not None and problem is not None and (period is None or pattern.period / per_round <= period):
            period, period_bound_ns = (
                number(each / per_round) for each in (pattern.period, self.schedule.period_bound_ns)
            )
            unroll, span = pattern.unroll * per_round, pattern.span * per_round
            workload = self.schedule.workload
            work = [workload.work_of(x) * len(devices) for x, devices in enumerate(workload.resources)]
            busy = Fraction(sum(work[: len(workload.operations)]), problem.num_microbatches)
            steady = float(1 - busy / (pattern.period * len(self.plan.devices)))
        return {
            "name": self.plan.name,
            "status": self.status,
            "scheduler": self.plan.provenance.scheduler,
            "makespan_ns": predicted.makespan_ns,
            "iteration_ns": predicted.iteration_ns,
            "lower_bound_ns": predicted.lower_bound_ns,
            "gap": predicted.gap,
            "period_ns": period,
            "period_lower_bound_ns": period_bound_ns,
            "unroll": unroll,
            "span": span,
            "bubble_rate": predicted.bubble_rate,
            "bubble_rate_span": predicted.bubble_rate_span,
            "bubble_rate_steady": steady,
            "peak_memory_bytes": [memory.peak_bytes for memory in predicted.memory],
            "num_microbatches": self.plan.num_microbatches,
            "microbatch_size": self.plan.microbatch_size,
            "num_devices": len(self.plan.devices),
            "placement": self.plan.placement,
            "repeats": repetend is not None,
            "interrupted": self.interrupted,
            "search_seconds": self.seconds,
            "repetend_seconds": self.schedule.repetend_seconds,
            "partition_seconds": self.partition_seconds,
        }
