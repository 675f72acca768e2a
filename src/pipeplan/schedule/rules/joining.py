"""Backward as one action again: what rules choose among before gradients are separated (FlexPipe's BwdPass)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.model import Dependency, Operation
from pipeplan.model.workload import Workload
from pipeplan.simulate.timing import Orders, TaskGraph, task_graph

__all__ = ["Joined"]


@dataclass(frozen=True, slots=True)
class Joined:
    """A graph whose backwards are whole, for one in which some or all of them have two parts.

    ``parts`` [operation of ``graph``] are the operations of the given one that it stands for: itself, or I and W.
    """

    given: TaskGraph
    graph: TaskGraph
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, given: TaskGraph) -> Joined:
        """Join I and W of every stage."""
        operations = given.workload.operations
        weights = {operation.stage: number for number, operation in enumerate(operations) if operation.kind == "W"}
        parts = tuple(
            (number, weights[operation.stage]) if operation.kind == "I" else (number,)
            for number, operation in enumerate(operations)
            if operation.kind != "W"
        )
        return cls(given, task_graph(_joined(given.workload, parts)), parts)

    def apart(self, orders: Orders) -> list[list[int]]:
        """The same orders in the given graph, each W right behind its I."""
        return [[part for task in order for part in self._parts_of(task)] for order in orders]

    def _parts_of(self, task: int) -> list[int]:
        operation = self.graph.operation_of[task]
        number = task - self.graph.offsets[operation]
        return [self.given.offsets[part] + number for part in self.parts[operation]]


def _joined(workload: Workload, parts: tuple[tuple[int, ...], ...]) -> Workload:
    operations = [[workload.operations[part] for part in group] for group in parts]
    names = {part.id: _whole(group).id for group in operations for part in group}
    edges: dict[tuple[str, str], Dependency] = {}
    for dependency in workload.dependencies:
        ends = names[dependency.source], names[dependency.target]
        if ends[0] != ends[1]:
            edges.setdefault(ends, replace(dependency, source=ends[0], target=ends[1]))
    return replace(workload, operations=tuple(map(_whole, operations)), dependencies=tuple(edges.values()))


def _whole(parts: list[Operation]) -> Operation:
    """I and W one behind the other; what W works with is on top of what I has given back."""
    first, last = parts[0], parts[-1]
    if first is last:
        return first
    return replace(
        first,
        kind="B",
        duration_ns=first.duration_ns + last.duration_ns,
        release_bytes=first.release_bytes + last.release_bytes,
        workspace_bytes=max(first.workspace_bytes, last.workspace_bytes - first.release_bytes),
    )
