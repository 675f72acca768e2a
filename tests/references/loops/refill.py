"""The loop that moves weight gradients into bubbles as it was before the engine."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from pipeplan.workload.kinds import Role
from pipeplan.workload.task_graph import Orders, TaskGraph
from references.loops.room import acquired_bytes

__all__ = ["refill"]

_NEVER = 2**62


def refill(
    graph: TaskGraph,
    orders: Orders,
    stashed: frozenset[int],
    capacity: Sequence[int | None],
    expected: Sequence[int],
    patience: float,
) -> list[list[int]] | None:
    """The devices' orders with ``stashed`` taken out and put into bubbles; None if that comes to no end.

    A stashed W runs while its devices wait for an action, if it ends by the action's start; ``expected`` [task] is
    that start in ns while nobody knows it. W may end later by a share ``patience`` of its duration. ``capacity``
    [device] bytes beside the static ones, None without limit.
    """
    return _Replay(graph, orders, stashed, capacity, expected, patience).run()


class _Replay:
    """Devices run what is left of their orders as soon as they can; while one waits it takes of its pool.

    ``pools`` [device] the stashed W whose I has begun there, per operation, oldest first. ``urgent`` [device] those
    that must run next. ``head`` [device] what it runs next, its pool aside, ``at_head`` [task] on how many devices it
    is that, and ``ready`` [task] ns before which it cannot start. A message runs on its link when it is made, first
    come, first served.
    """

    def __init__(
        self,
        graph: TaskGraph,
        orders: Orders,
        stashed: frozenset[int],
        capacity: Sequence[int | None],
        expected: Sequence[int],
        patience: float,
    ) -> None:
        self._graph, self._stashed, self._capacity = graph, stashed, capacity
        self._expected, self._patience = expected, patience
        self._operation_of, self._durations = graph.operation_of, graph.durations
        self._operations = graph.workload.operations
        self._devices = graph.workload.resources
        self._left = [[task for task in reversed(order) if task not in stashed] for order in orders]
        self._urgent: list[list[int]] = [[] for _ in orders]
        self._pools: list[dict[int, deque[int]]] = [{} for _ in orders]
        self._free = [0] * graph.workload.num_resources
        self._held = [0] * len(orders)
        self._waiting = graph.num_predecessors.copy()
        self._ready = [0] * graph.num_tasks
        self._head: list[int | None] = [None] * len(orders)
        self._at_head = [0] * graph.num_tasks
        self._found: list[list[int]] = [[] for _ in orders]
        self._events: list[tuple[int, int]] = []
        self._limited = any(limit is not None for limit in capacity)
        self._flushing = _flushing(graph, len(orders))

    def run(self) -> list[list[int]] | None:
        """Go through the moments at which something can begin on a device."""
        events, free = self._events, self._free
        for device in range(len(self._found)):
            self._turn_to_next(device, 0)
        while events:
            now, device = heapq.heappop(events)
            if free[device] <= now:
                self._examine(device, now)
        done = not any(self._left) and not any(pool for pools in self._pools for pool in pools.values())
        return self._found if done else None

    def _turn_to_next(self, device: int, now: int) -> None:
        """What a device runs next may have changed; where it is the last of several to come to it, all look."""
        order = self._urgent[device] or self._left[device]
        task, before = order[-1] if order else None, self._head[device]
        if before is not None:
            self._at_head[before] -= 1
        self._head[device] = task
        if task is None:
            heapq.heappush(self._events, (self._free[device], device))
            return
        self._at_head[task] += 1
        self._ready[task] = max(self._ready[task], self._free[device])
        devices = self._devices[self._operation_of[task]]
        if self._at_head[task] == len(devices):
            for other in devices:
                heapq.heappush(self._events, (max(now, self._free[other]), other))
        else:
            heapq.heappush(self._events, (self._free[device], device))

    def _examine(self, device: int, now: int) -> None:
        """A device is free: begin what is next, or else something of its pool."""
        task = self._head[device]
        start = None if task is None else self._start_of(task)
        if task is not None and start is not None and start <= now:
            if not (self._limited and self._make_room(task, now)):
                self._begin(task, now)
            return
        weight = self._choose(device, now)
        if weight is not None:
            self._begin(weight, now)
        elif start is not None:
            heapq.heappush(self._events, (start, device))

    def _start_of(self, task: int) -> int | None:
        """When what some device runs next can begin; None while that is not known."""
        if self._waiting[task] or self._at_head[task] < len(self._devices[self._operation_of[task]]):
            return None
        return self._ready[task]

    def _limit(self, device: int) -> int:
        """Until when a device waits."""
        task = self._head[device]
        return _NEVER if task is None else max(self._start_of(task) or 0, self._expected[task])

    def _choose(self, device: int, now: int) -> int | None:
        """The longest W of the device's pool for which all of its devices wait long enough."""
        best, longest, limit = None, 0, -1
        for item, pool in self._pools[device].items():
            if not pool or self._ready[pool[0]] > now:
                continue
            limit = limit if limit >= 0 else self._limit(device)
            duration = self._durations[pool[0]]
            need = now + duration - int(self._patience * duration)
            if longest < duration and need <= limit and self._all_wait(item, device, now, need):
                best, longest = pool[0], duration
        return best

    def _all_wait(self, item: int, device: int, now: int, until: int) -> bool:
        """Whether all other devices of an operation have nothing to do so long."""
        devices = self._devices[item]
        return len(devices) == 1 or all(
            self._free[other] <= now and until <= self._limit(other) for other in devices if other != device
        )

    def _make_room(self, task: int, now: int) -> bool:
        """Where a device could not hold the action, or not run its pool behind it, W of the pool go first."""
        for device in self._devices[self._operation_of[task]]:
            capacity = self._capacity[device]
            if capacity is not None and not self._urgent[device] and self._too_much(device, task, capacity):
                pools = (pool for pool in self._pools[device].values() if pool)
                weight = max((pool[0] for pool in pools), key=self._release, default=None)
                if weight is not None:
                    for other in self._devices[self._operation_of[weight]]:
                        self._urgent[other].append(weight)
                        self._turn_to_next(other, now)
                    return True
        return False

    def _release(self, task: int) -> int:
        return self._operations[self._operation_of[task]].release_bytes

    def _too_much(self, device: int, task: int, capacity: int) -> bool:
        operation = self._operations[self._operation_of[task]]
        held = self._held[device] + acquired_bytes(self._graph, task)
        after = held - operation.release_bytes + self._flushing[device]
        return max(held + operation.workspace_bytes, after) > capacity

    def _begin(self, task: int, now: int) -> None:
        item = self._operation_of[task]
        end = now + self._durations[task]
        effect = acquired_bytes(self._graph, task) - self._release(task) if self._limited else 0
        stashed = task in self._stashed
        for device in self._devices[item]:
            self._free[device] = end
            self._held[device] += effect
            self._found[device].append(task)
            if stashed:
                self._take(device, item, task)
            else:
                self._left[device].pop()
        self._hand_on(task, end, now)
        for device in self._devices[item]:
            self._turn_to_next(device, now)

    def _take(self, device: int, item: int, task: int) -> None:
        """Take a stashed W out of the pool."""
        self._pools[device][item].popleft()
        if task in self._urgent[device]:
            self._urgent[device].remove(task)

    def _hand_on(self, task: int, end: int, now: int) -> None:
        """What waits for the action, or for its message, has it then."""
        graph, waiting, num_actions = self._graph, self._waiting, self._graph.num_actions
        for other, lag in graph.successors[task]:
            if other < num_actions:
                self._arrive(other, end + lag, now)
                continue
            waiting[other] -= 1
            if not waiting[other]:
                link = graph.devices_of(other)[0]
                self._free[link] = max(self._free[link], end) + self._durations[other]
                for target, latency in graph.successors[other]:
                    self._arrive(target, self._free[link] + latency, now)

    def _arrive(self, task: int, time: int, now: int) -> None:
        self._ready[task] = max(self._ready[task], time)
        self._waiting[task] -= 1
        if self._waiting[task]:
            return
        item = self._operation_of[task]
        if task in self._stashed:
            for device in self._devices[item]:
                self._pools[device].setdefault(item, deque()).append(task)
                heapq.heappush(self._events, (max(time, self._free[device]), device))
        elif self._at_head[task] == len(self._devices[item]):
            for device in self._devices[item]:
                heapq.heappush(self._events, (max(now, self._free[device]), device))


def _flushing(graph: TaskGraph, num_devices: int) -> list[int]:
    """[device] bytes beside what it holds that its W need while they run."""
    needs = [0] * num_devices
    for item, operation in enumerate(graph.workload.operations):
        if operation.role is Role.WEIGHT_GRAD:
            for device in graph.workload.resources[item]:
                needs[device] = max(needs[device], operation.acquire_bytes + operation.workspace_bytes)
    return needs
