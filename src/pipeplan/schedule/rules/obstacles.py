"""What keeps an action from starting under rules, and all that an error has to name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import InfeasibleError, PipeplanError, UsageError
from pipeplan.workload.task_graph import TaskGraph

__all__ = ["Obstacle", "stuck_error"]


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
