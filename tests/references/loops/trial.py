"""The loop of greedy trials as it was before the engine, but that a message waits for all of its parts."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from pipeplan.schedule.stage_graph import Rule, Stages
from pipeplan.workload.kinds import Role
from pipeplan.workload.task_graph import NEVER

__all__ = ["TrialRun"]

_END, _TRY = 0, 1
_RANKS = {Role.FORWARD: 2, Role.WEIGHT_GRAD: 3}


class TrialRun:
    """All devices in time. Whatever of its actions can run first by the rules, a device runs as soon as it is free.

    ``orders`` of the devices; ``makespan`` in ns, very large where it would be over ``limit`` or where the rules leave
    too few samples for a stage with larger micro-batches; ``most_held`` [stage] samples.
    """

    def __init__(self, stages: Stages, rules: list[Rule], limit: int = NEVER) -> None:
        graph = stages.graph
        self.rules = rules
        self.orders: list[list[int]] = [[] for _ in graph.workload.devices]
        self.makespan = 0
        self.most_held = [0] * stages.count
        self._stages, self._graph, self._limit = stages, graph, limit
        self._held = [0] * stages.count
        self._next = graph.offsets[:-1]
        self._waiting = graph.num_predecessors.copy()
        self._arrival = [0] * graph.num_tasks
        self._free = [0] * graph.workload.num_resources
        self._ranked = [sorted(operations, key=self._rank) for operations in stages.on_device]
        self._events = [(0, _TRY, device) for device in range(len(self.orders))]
        self._run()

    def _rank(self, operation: int) -> tuple[int, int, int]:
        """Sort key of what goes first: backwards, forwards, weight gradients; then by depth."""
        stage, rank = self._stages.stage_of[operation], _RANKS.get(self._stages.roles[operation], 1)
        if rank == _RANKS[Role.FORWARD] and self.rules[stage].forward_first:
            rank = 0
        return rank, -self._stages.graph.workload.stage_depths[stage], operation

    def _run(self) -> None:
        done = worked = 0
        while self._events and self.makespan <= self._limit:
            now, what, number = heapq.heappop(self._events)
            if what == _END:
                self._end(number, now)
                done += 1
                worked += len(self._graph.workload.resources[self._graph.operation_of[number]])
            elif self._free[number] <= now:
                self._choose(number, now)
        self._stages.num_starts += worked
        if done < self._graph.num_actions:
            self.makespan = NEVER

    def _choose(self, device: int, now: int) -> None:
        """Start the first of a device's actions that can run; if its other devices are busy, wait for them."""
        for operation in self._ranked[device]:
            task = self._next[operation]
            if task < self._graph.offsets[operation + 1] and self._can_run(task, operation, now):
                devices = self._graph.workload.resources[operation]
                if all(self._free[other] <= now for other in devices):
                    self._start(task, operation, devices, now)
                return

    def _can_run(self, task: int, operation: int, now: int) -> bool:
        if self._waiting[task] or self._arrival[task] > now:
            return False
        stage, taken = self._stages.stage_of[operation], self._stages.taken[task]
        return not taken or self._held[stage] + taken <= self.rules[stage].samples

    def _start(self, task: int, operation: int, devices: Iterable[int], now: int) -> None:
        end = now + self._graph.durations[task]
        self.makespan = max(self.makespan, now + self._stages.needs[task])
        stage = self._stages.stage_of[operation]
        self._next[operation] = task + 1
        self._held[stage] += self._stages.taken[task]
        self.most_held[stage] = max(self.most_held[stage], self._held[stage])
        for device in devices:
            self._free[device] = end
            self.orders[device].append(task)
        heapq.heappush(self._events, (end, _END, task))

    def _end(self, task: int, now: int) -> None:
        operation = self._graph.operation_of[task]
        self._held[self._stages.stage_of[operation]] -= self._stages.given[task]
        for device in self._graph.workload.resources[operation]:
            heapq.heappush(self._events, (now, _TRY, device))
        for other, lag in self._graph.successors[task]:
            if other < self._graph.num_actions:
                self._arrive(other, now + lag)
            else:
                self._carry(other, now)

    def _arrive(self, task: int, time: int) -> None:
        """One of the things an action waits for is there at ``time``."""
        self._arrival[task] = max(self._arrival[task], time)
        self._waiting[task] -= 1
        if self._waiting[task] == 0:
            for device in self._graph.workload.resources[self._graph.operation_of[task]]:
                if self._free[device] <= self._arrival[task]:
                    heapq.heappush(self._events, (self._arrival[task], _TRY, device))

    def _carry(self, message: int, made: int) -> None:
        """A message takes its link when all of it is made, or when the link is free."""
        self._waiting[message] -= 1
        if self._waiting[message]:
            return
        (link,) = self._graph.devices_of(message)
        self._free[link] = max(self._free[link], made) + self._graph.durations[message]
        for other, lag in self._graph.successors[message]:
            self._arrive(other, self._free[link] + lag)
