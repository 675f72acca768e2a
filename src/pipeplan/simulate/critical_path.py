"""The critical path: the chain of actions, each of which started when the one before let it, that set the makespan."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Literal

from pipeplan.model.workload import Workload
from pipeplan.simulate.timing import Orders, TaskGraph

__all__ = ["CriticalStep", "Reason", "critical_path"]

Reason = Literal["start", "device", "link", "dependency", "transfer"]


@dataclass(frozen=True, slots=True)
class CriticalStep:
    """An action of the path and what it waited for: the iteration's start, or the action before it on the path.

    ``device``: that action was on the same device until then. ``dependency``: it made the input. ``transfer``: it
    made the input, which was on the way for ``lag_ns``. A message that may have to wait for its link is a step of
    its own; ``link``: the message before it was on the link until then. ``slack_ns`` is by how much the action could be
    later without making the iteration longer: 0 on the critical path.
    """

    task: int
    reason: Reason
    lag_ns: int = 0
    slack_ns: int = 0


def critical_path(graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> list[CriticalStep]:
    """From time 0 to the last end, found backwards from the last end (the first such task).

    ``starts`` [task] are the earliest for these orders, so that every action begins at 0 or right when something
    ends or arrives. Where several things let it, the device (or link) goes before inputs.
    """
    durations = graph.durations
    inputs = _Inputs(graph.workload)
    ends = [*map(add, starts, durations)]
    task = ends.index(max(ends))
    steps: list[CriticalStep] = []
    while starts[task] > 0:
        before = _before(graph, orders, starts, task)
        step, task = _step(graph, starts, task, before, inputs.of(graph, task))
        steps.append(step)
    steps.append(CriticalStep(task, "start"))
    return steps[::-1]


def _step(
    graph: TaskGraph, starts: Sequence[int], task: int, before: Sequence[int], inputs: Sequence[tuple[int, int]]
) -> tuple[CriticalStep, int]:
    """The step of a task that started after 0, and the task it waited for."""
    for other in before:
        if starts[other] + graph.durations[other] == starts[task]:
            return CriticalStep(task, "device" if task < graph.num_actions else "link"), other
    for other, lag in inputs:
        if starts[other] + graph.durations[other] + lag == starts[task]:
            return CriticalStep(task, "transfer" if lag else "dependency", lag), other
    raise AssertionError(f"{graph.label(task)} starts at {starts[task]} and nothing let it start then")


def _before(graph: TaskGraph, orders: Orders, starts: Sequence[int], task: int) -> list[int]:
    """The tasks right before a task, one for each of its devices where there is one; orders are in time."""
    places = (
        (orders[device], bisect_left(orders[device], starts[task], key=starts.__getitem__))
        for device in graph.devices_of(task)
    )
    return [order[place - 1] for order, place in places if place]


class _Inputs:
    """Looks up the tasks whose results a task needs, with their lags."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._slots, self._part_lags = workload, workload.slots, workload.part_lags
        self._sources: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for source, target, lag in workload.edges:
            self._sources[target].append((source, lag))

    def of(self, graph: TaskGraph, task: int) -> list[tuple[int, int]]:
        """Pairs (task, lag in ns)."""
        target = graph.operation_of[task]
        slots, number = self._slots[target], task - graph.offsets[target]
        found: list[tuple[int, int]] = []
        for source, lag in self._sources[target]:
            parts = 2 * min(slots.num_parted, self._slots[source].num_parted)
            lag = self._part_lags.get((source, target), lag) if number < parts else lag
            found.extend((graph.offsets[source] + m, lag) for m in self._workload.inputs_of(source, target, number))
        return found
