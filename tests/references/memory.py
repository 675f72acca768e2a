"""What devices hold, followed start by start and end by end."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.workload.memory import MemoryState, changes_of
from pipeplan.workload.task_graph import TaskGraph


def followed(graph: TaskGraph, starts: Sequence[int]) -> MemoryState:
    """The state after all actions have started at ``starts`` [task], in ns, and ended, with what they exchange."""
    state = MemoryState(graph)
    for _ in changes_of(graph, starts, state):
        pass
    return state
