"""Workload: everything there is to run in one iteration, before anybody says when.

A plan is a workload with a schedule. Planners take a workload, simulation replays one in a given order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.model.plan import Dependency, Device, Operation, Plan, Stage

__all__ = ["Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Stages on devices, their operations and dependencies, and how many micro-batches flow through.

    The fields are those of :class:`~pipeplan.model.plan.Plan` with the same names. ``operations`` are ordered
    so that dependencies point forward.
    """

    name: str
    placement: str
    num_microbatches: int
    microbatch_size: int
    devices: tuple[Device, ...]
    stages: tuple[Stage, ...]
    operations: tuple[Operation, ...]
    dependencies: tuple[Dependency, ...]

    @classmethod
    def of(cls, plan: Plan) -> Workload:
        """The workload of a plan."""
        return cls(
            plan.name,
            plan.placement,
            plan.num_microbatches,
            plan.microbatch_size,
            plan.devices,
            plan.stages,
            plan.operations,
            plan.dependencies,
        )

    def with_microbatches(self, num_microbatches: int) -> Workload:
        """The same for another number of micro-batches."""
        return replace(self, num_microbatches=num_microbatches)

    def num_instances(self, operation: Operation) -> int:
        """How many actions an operation has: one per micro-batch of its stage."""
        return self.num_microbatches * self.microbatch_size // self.stages[operation.stage].microbatch_size

    def static_bytes(self, device: int) -> int:
        """Parameters, gradients and optimizer state that a device keeps throughout."""
        return sum(
            stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes
            for stage in self.stages
            if device in stage.devices
        )
