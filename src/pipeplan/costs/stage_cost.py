"""What a stage costs each of its devices."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNLIMITED", "StageCost"]

UNLIMITED = 1 << 60
"""More micro-batches than there can be, and more ns."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of a stage on each of its devices, for one micro-batch; times in ns, sizes in bytes.

    ``input_grad_ns`` and ``weight_grad_ns`` are None where a block of the stage has no split backward. ``sync_ns`` is
    summing gradients among the devices of a replica, once per iteration. Two stages that become one have the sum of
    their costs, but for the workspace: only one block runs at a time.
    """

    forward_ns: int
    backward_ns: int
    input_grad_ns: int | None = None
    weight_grad_ns: int | None = None
    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    workspace_bytes: int = 0
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    sync_ns: int = 0

    @property
    def compute_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_ns

    @property
    def static_bytes(self) -> int:
        """What is held all the time: parameters, gradients of the same size, and the optimizer's state."""
        return 2 * self.parameter_bytes + self.optimizer_bytes

    def memory_bytes(self, in_flight: int) -> int:
        """Bytes with so many micro-batches in flight."""
        return self.static_bytes + in_flight * self.activation_bytes + self.workspace_bytes

    def room(self, limit: int) -> int:
        """Micro-batches of which so many bytes hold the activations; -1 if they do not even hold the rest."""
        left = limit - self.static_bytes - self.workspace_bytes
        return -1 if left < 0 else left // self.activation_bytes if self.activation_bytes else UNLIMITED

    def __add__(self, other: StageCost) -> StageCost:
        return StageCost(
            self.forward_ns + other.forward_ns,
            self.backward_ns + other.backward_ns,
            _both(self.input_grad_ns, other.input_grad_ns),
            _both(self.weight_grad_ns, other.weight_grad_ns),
            self.activation_bytes + other.activation_bytes,
            self.weight_grad_bytes + other.weight_grad_bytes,
            max(self.workspace_bytes, other.workspace_bytes),
            self.parameter_bytes + other.parameter_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
            self.sync_ns + other.sync_ns,
        )


def _both(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
