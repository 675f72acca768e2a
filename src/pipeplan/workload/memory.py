"""What devices hold when they run their orders, whatever the times (design section 5).

A device runs one action at a time, so memory follows from its order alone: activations are taken at the start
of an action, given back at its end, and workspace is held while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.units import format_bytes
from pipeplan.workload.elements import DeviceMemory
from pipeplan.workload.kinds import ACTIVATIONS, WORKSPACE, MemoryBytes
from pipeplan.workload.task_graph import Orders, TaskGraph
from pipeplan.workload.workload import Workload

__all__ = ["Overflow", "acquired_bytes", "fits", "memory_levels", "overflow", "peak_memory"]


@dataclass(frozen=True, slots=True)
class Overflow:
    """A device that needs more memory than it has: its peak, and the action at which it is first reached."""

    device: int
    action: str
    peak_bytes: int
    limit_bytes: int

    @property
    def over_bytes(self) -> int:
        """How much is missing."""
        return self.peak_bytes - self.limit_bytes

    def __str__(self) -> str:
        at = f" at {self.action}" if self.action else ""
        return (
            f"device {self.device} needs {format_bytes(self.peak_bytes)}{at}, "
            f"{format_bytes(self.over_bytes)} more than its {format_bytes(self.limit_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class _Peak:
    """Beyond parameters, gradients and optimizer: bytes held at the first moment of the peak, and by which task."""

    activation_bytes: int
    workspace_bytes: int
    task: int | None

    @property
    def total(self) -> int:
        return self.activation_bytes + self.workspace_bytes


def peak_memory(graph: TaskGraph, orders: Orders) -> tuple[DeviceMemory, ...]:
    """The five parts of each device's memory at the first moment of its peak.

    Activations are what is held then, with what the running action took at its start; a device without actions
    holds its parameters, gradients and optimizer state.
    """
    return tuple(
        _device_memory(graph.workload, device, _peak(graph, order))
        for device, order in enumerate(graph.on_devices(orders))
    )


def memory_levels(graph: TaskGraph, order: Sequence[int]) -> list[int]:
    """Bytes beyond the static ones that a device holds while each action of its order runs [action]."""
    operations = graph.workload.operations
    held, levels = 0, []
    for task in order:
        operation = operations[graph.operation_of[task]]
        acquired = acquired_bytes(graph, task)
        levels.append(held + acquired + operation.workspace_bytes)
        held += acquired - operation.release_bytes
    return levels


def acquired_bytes(graph: TaskGraph, task: int) -> int:
    """What an action takes at its start; of a micro-batch in two parts the second takes what is left of it."""
    item = graph.operation_of[task]
    acquired = graph.workload.operations[item].acquire_bytes
    number = task - graph.offsets[item]
    if number >= 2 * graph.workload.slots[item].num_parted:
        return acquired
    return acquired // 2 if number % 2 else acquired - acquired // 2


def fits(graph: TaskGraph, orders: Orders) -> bool:
    """Whether every device stays within its memory."""
    return overflow(graph, orders) is None


def overflow(graph: TaskGraph, orders: Orders) -> Overflow | None:
    """The device that exceeds its memory by most, or None if all stay within; ties go to the first."""
    worst: Overflow | None = None
    for index, (device, order) in enumerate(zip(graph.workload.devices, graph.on_devices(orders), strict=True)):
        if device.memory_bytes is None:
            continue
        peak = _peak(graph, order)
        needed = graph.workload.static_bytes(index) + peak.total
        if needed - device.memory_bytes > (worst.over_bytes if worst is not None else 0):
            action = graph.label(peak.task) if peak.task is not None else ""
            worst = Overflow(index, action, needed, device.memory_bytes)
    return worst


def _peak(graph: TaskGraph, order: Sequence[int]) -> _Peak:
    levels = memory_levels(graph, order)
    highest = max(levels, default=0)
    if highest == 0:
        return _Peak(0, 0, None)
    task = order[levels.index(highest)]
    workspace = graph.workload.operations[graph.operation_of[task]].workspace_bytes
    return _Peak(highest - workspace, workspace, task)


def _device_memory(workload: Workload, device: int, peak: _Peak) -> DeviceMemory:
    taken = MemoryBytes({ACTIVATIONS: peak.activation_bytes, WORKSPACE: peak.workspace_bytes})
    return DeviceMemory.of(workload.states[device] + taken)
