"""Room on each device while rules choose, as it was before :class:`pipeplan.workload.memory.MemoryState`."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.workload.kinds import Role
from pipeplan.workload.task_graph import TaskGraph
from references.loops.listing import Effect, still_needed

__all__ = ["Memory", "acquired_bytes"]


@dataclass(frozen=True, slots=True)
class _RouteMemory:
    """The operations of one route on a limited device, weight gradients left out; ``needs`` as in still_needed."""

    device: int
    capacity: int
    operations: list[int]
    needs: list[int]


class Memory:
    """What every device holds, and whether an action may start on all of its devices."""

    def __init__(self, graph: TaskGraph) -> None:
        workload = graph.workload
        self._graph = graph
        self._effects = [
            Effect(each.role, each.acquire_bytes, each.workspace_bytes, each.release_bytes)
            for each in workload.operations
        ]
        self._held = [0] * len(workload.devices)
        self._begins = [self._begin(x, graph.offsets[x]) for x in range(len(self._effects))]
        self._chains: list[list[_RouteMemory]] = [[] for _ in self._effects]  # [operation] one per limited device of it
        for device in range(len(self._held)):
            self._add_chains(device)

    def missing(self, task: int) -> int | None:
        """The first device that has no room for an action; None if all have."""
        x = self._graph.operation_of[task]
        effect = self._effects[x]
        if effect.acquire + effect.workspace == 0 or not self._chains[x]:
            return None
        acquired = acquired_bytes(self._graph, task)
        for chain in self._chains[x]:
            held = self._held[chain.device] + acquired
            if held + effect.workspace > chain.capacity:
                return chain.device
            if held - effect.release + self._oldest_needs(chain, x) > chain.capacity:
                return chain.device
        return None

    def start(self, task: int) -> None:
        """Take what an action takes. What it gives back is free before its devices start anything else."""
        x = self._graph.operation_of[task]
        change = acquired_bytes(self._graph, task) - self._effects[x].release
        for device in self._graph.devices_of(task):
            self._held[device] += change
        self._begins[x] = max(self._begins[x], self._begin(x, task + 1))

    def _add_chains(self, device: int) -> None:
        """Note a device that has a limit for each of its operations."""
        workload = self._graph.workload
        memory = workload.devices[device].memory_bytes
        if memory is None:
            return
        there = [x for x in range(len(self._effects)) if device in workload.resources[x]]
        routes = {x: workload.stages[workload.operations[x].stage].route for x in there}
        for route in sorted(set(routes.values())):
            mine = [x for x in there if routes[x] == route]
            needs = still_needed([self._effects[x] for x in mine])
            others = [x for x in mine if self._effects[x].role is not Role.WEIGHT_GRAD]
            chain = _RouteMemory(device, memory - workload.static_bytes(device), others, needs)
            for x in mine:
                self._chains[x].append(chain)

    def _oldest_needs(self, chain: _RouteMemory, x: int) -> int:
        """Bytes that the oldest samples on a device and route still take after an action of an operation."""
        begins = self._begins
        oldest = min(begins[y] for y in chain.operations)
        done = sum(begins[y] > oldest for y in chain.operations)
        return chain.needs[done + (begins[x] == oldest and x in chain.operations)]

    def _begin(self, x: int, task: int) -> int:
        """The first sample of an operation's action; behind the last action, the end of the mini-batch."""
        graph = self._graph
        if task >= graph.offsets[x + 1]:
            return graph.workload.mini_batch
        return graph.workload.slots[x].samples(task - graph.offsets[x])[0]


def acquired_bytes(graph: TaskGraph, task: int) -> int:
    """What an action takes at its start; of a micro-batch in two parts the second takes what is left of it."""
    item = graph.operation_of[task]
    acquired = graph.workload.operations[item].acquire_bytes
    number = task - graph.offsets[item]
    if number >= 2 * graph.workload.slots[item].num_parted:
        return acquired
    return acquired // 2 if number % 2 else acquired - acquired // 2
