"""What keeps an action from starting under rules: memory, and all that an error has to name.

Room on each device while rules choose: no forward starts that its device could not finish its oldest samples beside.

The rule is that of list scheduling (:mod:`pipeplan.schedule.list_scheduling`), for stages of any number of devices and
for micro-batches of any size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import InfeasibleError, PipeplanError, UsageError
from pipeplan.schedule.list_scheduling import Effect, still_needed
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import acquired_bytes
from pipeplan.workload.task_graph import TaskGraph

__all__ = ["Memory", "Obstacle", "stuck_error"]


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


_NAMED = 5
"""So many stuck actions are named with what each waits for."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps a ready action from starting: a key of the rules, the stage or device it is about, and its limit."""

    key: str
    number: int
    limit: int = 0
    name: str = ""

    def __str__(self) -> str:
        match self.key:
            case "in_flight":
                return f"stage {self.number} has its {self.limit} micro-batches in flight (in_flight)"
            case "in_flight_device":
                return f"device {self.number} has its {self.limit} micro-batches in flight (in_flight_device)"
            case "every":
                return f"stage {self.number} starts one in {self.limit} steps (every)"
            case "shared_first":
                return f"stage {self.number} goes no further ahead than what stands behind it asks for (shared_first)"
            case "memory":
                return f"device {self.number} has no room for it beside its oldest micro-batch (fit_memory)"
            case _:
                return f"the check {self.name} refuses it"


_REMEDIES = {
    "in_flight": "raise in_flight",
    "in_flight_device": "raise in_flight_device",
    "every": "lower every",
    "shared_first": "leave out shared_first",
    "memory": "raise --memory, or lower in_flight",
    "check": "let the check allow one of them",
}


def stuck_error(
    graph: TaskGraph,
    waiting: Sequence[int],
    begun: Sequence[int | None],
    obstacle: Callable[[int], Obstacle | None],
) -> PipeplanError:
    """The error that names the stuck actions, what each waits for, and what to change."""
    stuck = [task for task in range(graph.num_actions) if begun[task] is None]
    unmet = _unmet(graph, waiting, begun)
    obstacles = {task: found for task in stuck if waiting[task] == 0 and (found := obstacle(task)) is not None}
    lines = list(_lines(graph, stuck, unmet, obstacles))
    head = f"stuck with {len(stuck)} of {graph.num_actions} actions left"
    if (circle := _circle(graph, unmet)) is not None:
        return UsageError(f"{head}: {circle} wait for each other in a circle; take one of these dependencies out")
    never = [task for task in stuck if waiting[task] > 0 and not unmet[task]]
    if never:
        names = ", ".join(graph.label(task) for task in never[:_NAMED])
        return UsageError(
            f"{head}: {names} can never become ready: all that could come before has run, and it still waits; "
            "let its readiness rule ask for no more than there is"
        )
    remedies = dict.fromkeys(_REMEDIES[found.key] for found in obstacles.values())
    return InfeasibleError("\n  ".join([f"{head}; {' or '.join(remedies) or 'change the rules'}:", *lines]))


def _lines(
    graph: TaskGraph, stuck: Sequence[int], unmet: Mapping[int, list[int]], obstacles: Mapping[int, Obstacle]
) -> Iterator[str]:
    """What the first stuck actions wait for, one of each operation, those that are ready first."""
    first = {graph.operation_of[task]: task for task in sorted(stuck, key=lambda task: (task in obstacles, -task))}
    for task in sorted(first.values(), key=lambda task: (task not in obstacles, task))[:_NAMED]:
        if task in obstacles:
            yield f"{graph.label(task)} is ready, but {obstacles[task]}"
        else:
            sources = ", ".join(graph.label(source) for source in unmet[task][:_NAMED])
            yield f"{graph.label(task)} waits for {sources or 'its turn'}"


def _unmet(graph: TaskGraph, waiting: Sequence[int], begun: Sequence[int | None]) -> defaultdict[int, list[int]]:
    """{task: the tasks it waits for that have not run}"""
    unmet: defaultdict[int, list[int]] = defaultdict(list)
    for source in range(graph.num_tasks):
        done = begun[source] is not None if source < graph.num_actions else waiting[source] == 0
        if not done:
            for target, _ in graph.successors[source]:
                unmet[target].append(source)
    return unmet


def _circle(graph: TaskGraph, unmet: Mapping[int, list[int]]) -> str | None:
    """Actions that wait for each other, each for the next; None if none do."""
    import networkx as nx  # which takes time, and is for errors alone

    waits: nx.DiGraph[int] = nx.DiGraph((task, source) for task, sources in unmet.items() for source in sources)
    try:
        edges = nx.find_cycle(waits)
    except nx.NetworkXNoCycle:
        return None
    names = [graph.label(edge[0]) for edge in edges]
    shown = names if len(names) <= 2 * _NAMED else [*names[:_NAMED], "...", *names[-_NAMED:]]
    return " -> ".join([*shown, names[0]])
