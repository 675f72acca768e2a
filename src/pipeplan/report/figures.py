"""What several renderers of a simulation show alike."""

from __future__ import annotations

from itertools import groupby

from pipeplan.simulate.simulation import Simulation

__all__ = ["odd_stages", "runs_by_device"]


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
