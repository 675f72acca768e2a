"""Workloads of the literature's shapes, on the placements that they come with."""

from __future__ import annotations

from typing import Any

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.workload import Workload

GB = 10**9


def shape_workload(
    name: str,
    num_devices: int = 4,
    num_microbatches: int = 8,
    *,
    costs: ShapeCosts | None = None,
    split: bool = False,
    memory: int | None = None,
    **more: Any,
) -> Workload:
    """A shape with these costs; ``split`` runs I and W apart, ``memory`` is what each device has, in bytes."""
    profile = shape(name, num_devices, costs=costs, **more)
    assert profile.placement is not None
    return build_workload(
        profile,
        profile.placement,
        num_microbatches=num_microbatches,
        microbatch_size=1,
        split_backward=split,
        memory_bytes=[memory] * num_devices,
    )


def zero_bubble(name: str, num_devices: int, num_microbatches: int, memory: float) -> OneMicrobatch:
    """Forward, input and weight gradient 100 each per device, communication 10, ``memory`` in multiples of p."""
    costs = ShapeCosts(100, None, 100, 100, comm_ns=10, activation_bytes=2 * GB, weight_grad_bytes=GB)
    room = int(memory * 2 * num_devices * GB)
    return OneMicrobatch.of(shape_workload(name, num_devices, num_microbatches, costs=costs, split=True, memory=room))


def unit_problem(
    name: str, num_devices: int = 4, num_microbatches: int = 8, memory: int | None = None
) -> OneMicrobatch:
    """Forward 1, backward 3, shared 1 and 1, each forward of a chain holding one byte."""
    costs = ShapeCosts(1, 3, shared_forward_ns=1, shared_backward_ns=1, activation_bytes=1)
    return OneMicrobatch.of(shape_workload(name, num_devices, num_microbatches, costs=costs, memory=memory))
