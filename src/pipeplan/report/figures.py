"""The figures of a simulation as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby

from pipeplan.simulate.simulation import Simulation

__all__ = ["figures", "odd_stages", "path_times", "runs_by_device"]


def figures(simulation: Simulation) -> dict[str, object]:
    """What ``simulate --json`` prints. What only a search knows is null.

    ``devices`` has one entry per device; ``critical_path`` says how its time divides and lists its actions.
    """
    plan, rates, repetend = simulation.plan, simulation.rates, simulation.repetend
    return {
        "status": "optimal" if simulation.gap == 0 else "feasible",
        "name": plan.name,
        "placement": plan.placement,
        "scheduler": plan.provenance.scheduler,
        "num_devices": len(plan.devices),
        "num_microbatches": simulation.workload.num_microbatches,
        "microbatch_size": simulation.workload.microbatch_size,
        "makespan_ns": rates.makespan_ns,
        "iteration_ns": simulation.iteration_ns,
        "lower_bound_ns": simulation.lower_bound_ns,
        "gap": simulation.gap,
        "period_ns": simulation.period_ns,
        "period_lower_bound_ns": simulation.period_lower_bound_ns,
        "unroll": None if repetend is None else repetend.unroll,
        "span": None if repetend is None else repetend.span,
        "bubble_rate": rates.bubble_rate,
        "bubble_rate_span": rates.bubble_rate_span,
        "bubble_rate_steady": simulation.bubble_rate_steady,
        "peak_memory_bytes": [memory.peak_bytes for memory in simulation.memory],
        "fits": simulation.overflow is None,
        "search_seconds": None,
        "repetend_seconds": None,
        "devices": [_device(simulation, device) for device in range(len(plan.devices))],
        "critical_path": _path(simulation),
    }


def path_times(simulation: Simulation) -> tuple[dict[int, int], int]:
    """Time of the critical path in ns: on each device (an action of several counts on its first), in transfers."""
    on_device: dict[int, int] = {}
    graph, transfers = simulation.graph, 0
    for step in simulation.critical_path:
        transfers += step.lag_ns
        if step.task < graph.num_actions:
            device = graph.devices_of(step.task)[0]
            on_device[device] = on_device.get(device, 0) + graph.durations[step.task]
        else:
            transfers += graph.durations[step.task]
    return on_device, transfers


def _device(simulation: Simulation, device: int) -> dict[str, object]:
    rates = simulation.rates
    return {
        "busy_ns": rates.busy_ns[device],
        "idle_ns": rates.idle_ns[device],
        "span_ns": rates.span_ns[device],
        "in_flight": simulation.in_flight[device],
        "num_actions": len(simulation.orders[device]),
        "memory_limit_bytes": simulation.workload.devices[device].memory_bytes,
        **asdict(simulation.memory[device]),
    }


def _path(simulation: Simulation) -> dict[str, object]:
    on_device, transfers = path_times(simulation)
    graph = simulation.graph
    return {
        "transfer_ns": transfers,
        "device_ns": {str(device): time for device, time in sorted(on_device.items())},
        "actions": [graph.label(step.task) for step in simulation.critical_path],
    }


def runs_by_device(simulation: Simulation) -> list[tuple[int, list[str]]]:
    """The critical path as runs of actions on one device: (device, action texts).

    Messages that stand on it, having waited for their link or not, are runs of their link's number behind the devices.
    """
    graph = simulation.graph
    steps = simulation.critical_path
    return [
        (device, [graph.label(step.task) for step in run])
        for device, run in groupby(steps, key=lambda step: graph.devices_of(step.task)[0])
    ]


def odd_stages(simulation: Simulation, device: int) -> list[int]:
    """Every second of the device's stages that run blocks; those of instructions have none, and are never drawn so."""
    stages = enumerate(simulation.workload.stages)
    return [index for index, stage in stages if device in stage.devices and stage.blocks][1::2]
