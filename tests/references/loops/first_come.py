"""Links first come, first served, by the engine; :func:`pipeplan.workload.task_graph.with_links` has a faster loop."""

from __future__ import annotations

from pipeplan.workload.engine import Engine
from pipeplan.workload.task_graph import Orders, TaskGraph

__all__ = ["Replay"]


class Replay(Engine):
    """Devices run their orders; ``orders`` of the links come of it."""

    def __init__(self, graph: TaskGraph, orders: Orders) -> None:
        super().__init__(graph)
        self._left = [list(reversed(order)) for order in orders]

    def choose(self, device: int) -> int | None:
        left = self._left[device]
        if not left or self.waiting[left[-1]] or self.ready_at[left[-1]] > self.now:
            return None
        task = left[-1]
        for other in self.graph.devices_of(task):
            if self.free[other] > self.now or self._left[other][-1] != task:
                return None
        return task

    def start(self, task: int) -> None:
        for device in self.graph.devices_of(task):
            self._left[device].pop()
        super().start(task)
