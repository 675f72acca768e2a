"""Room on each device while rules choose: no forward starts that its device could not finish its oldest samples beside.

The rule is that of list scheduling (:mod:`pipeplan.schedule.listing`), for stages of any number of devices and for
micro-batches of any size.
"""

from __future__ import annotations

from pipeplan.schedule.room import Effect, still_needed
from pipeplan.simulate.memory import acquired_bytes
from pipeplan.simulate.timing import TaskGraph

__all__ = ["Memory"]


class Memory:
    """What every device holds, and whether an action may start on all of its devices."""

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        workload = graph.workload
        self._capacity = [
            None if device.memory_bytes is None else device.memory_bytes - workload.static_bytes(index)
            for index, device in enumerate(workload.devices)
        ]
        self._held = [0] * len(self._capacity)
        self._next = list(graph.offsets)  # [operation] its first action that has not started
        routes = [workload.stages[operation.stage].route for operation in workload.operations]
        self._chains: list[dict[int, list[int]]] = [{} for _ in self._capacity]
        self._needs: list[dict[int, list[int]]] = [{} for _ in self._capacity]
        for device in range(len(self._capacity)):
            there = [x for x, devices in enumerate(workload.resources[: len(routes)]) if device in devices]
            for route in {routes[x] for x in there}:
                chain = [x for x in there if routes[x] == route]
                effects = [self._effect(x) for x in chain]
                self._needs[device][route] = still_needed(effects)
                self._chains[device][route] = [x for x in chain if workload.operations[x].kind != "W"]

    def _effect(self, x: int) -> Effect:
        operation = self._graph.workload.operations[x]
        return Effect(operation.kind, operation.acquire_bytes, operation.workspace_bytes, operation.release_bytes)

    def missing(self, task: int) -> int | None:
        """The first device that has no room for an action; None if all have."""
        graph = self._graph
        operation = graph.workload.operations[graph.operation_of[task]]
        if operation.acquire_bytes + operation.workspace_bytes == 0:
            return None
        return next((device for device in graph.devices_of(task) if not self._has_room(device, task)), None)

    def start(self, task: int) -> None:
        """Take what an action takes. What it gives back is free before its devices start anything else."""
        x = self._graph.operation_of[task]
        change = acquired_bytes(self._graph, task) - self._graph.workload.operations[x].release_bytes
        for device in self._graph.devices_of(task):
            self._held[device] += change
        self._next[x] = max(self._next[x], task + 1)

    def _has_room(self, device: int, task: int) -> bool:
        capacity = self._capacity[device]
        if capacity is None:
            return True
        x = self._graph.operation_of[task]
        operation = self._graph.workload.operations[x]
        acquired = acquired_bytes(self._graph, task)
        if self._held[device] + acquired + operation.workspace_bytes > capacity:
            return False
        held = self._held[device] + acquired - operation.release_bytes
        return held + self._oldest_needs(device, x) <= capacity

    def _oldest_needs(self, device: int, x: int) -> int:
        """Bytes that the oldest samples on a device and route still take after an action."""
        workload = self._graph.workload
        route = workload.stages[workload.operations[x].stage].route
        begins = {y: self._begin(y, self._next[y]) for y in self._chains[device][route]}
        oldest = min(begins.values(), default=0)
        done = sum(begin > oldest for begin in begins.values()) + (begins.get(x) == oldest)
        return self._needs[device][route][done]

    def _begin(self, x: int, task: int) -> int:
        """The first sample of an operation's action; behind the last action, the end of the mini-batch."""
        graph = self._graph
        if task >= graph.offsets[x + 1]:
            return graph.workload.mini_batch
        return graph.workload.slots[x].samples(task - graph.offsets[x])[0]
