"""What training keeps of parameters, where a test has only bytes."""

from __future__ import annotations

from pipeplan.workload.kinds import GRADIENTS, OPTIMIZER, PARAMETERS, MemoryBytes


def training_state(parameter_bytes: int, optimizer_bytes: int = 0) -> MemoryBytes:
    """Gradients as large as parameters, and the optimizer's state."""
    return MemoryBytes({PARAMETERS: parameter_bytes, GRADIENTS: parameter_bytes, OPTIMIZER: optimizer_bytes})
