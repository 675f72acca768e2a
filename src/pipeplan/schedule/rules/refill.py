"""A replay of orders in time in which some weight gradients leave their places and run where their devices wait."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from pipeplan.workload.engine import Engine
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import MemoryState
from pipeplan.workload.task_graph import Orders, TaskGraph

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
    replay = _Replay(graph, orders, stashed, capacity, expected, patience)
    replay.run()
    return replay.device_orders if replay.is_complete else None


class _Replay(Engine):
    """Devices run what is left of their orders as soon as they can; while one waits it takes of its pool.

    ``pools`` [device] the stashed W whose I has begun there, per operation, oldest first. ``urgent`` [device] those
    that must run next. ``head`` [device] what it runs next, its pool aside, ``at_head`` [task] on how many devices it
    is that; none of them starts it before ``ready_at``.
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
        super().__init__(graph)
        self._stashed, self._capacity = stashed, capacity
        self._expected, self._patience = expected, patience
        self._operations = graph.workload.operations
        self._left = [[task for task in reversed(order) if task not in stashed] for order in orders]
        self._urgent: list[list[int]] = [[] for _ in orders]
        self._pools: list[dict[int, deque[int]]] = [{} for _ in orders]
        self._head: list[int | None] = [None] * len(orders)
        self._at_head = [0] * graph.num_tasks
        self._memory = MemoryState(graph, capacity)
        self._limited = any(limit is not None for limit in capacity)
        self._flushing = _flushing(graph, len(orders))
        for device in range(len(orders)):
            self._turn_to_next(device)

    @property
    def is_complete(self) -> bool:
        """Whether everything has run."""
        return not any(self._left) and not any(pool for pools in self._pools for pool in pools.values())

    def _turn_to_next(self, device: int) -> None:
        """What a device runs next may have changed; where it is the last of several to come to it, all look."""
        order = self._urgent[device] or self._left[device]
        task, before = order[-1] if order else None, self._head[device]
        if before is not None:
            self._at_head[before] -= 1
        self._head[device] = task
        if task is None:
            return
        self._at_head[task] += 1
        self.ready_at[task] = max(self.ready_at[task], self.free[device])
        devices = self._resources[self._operation_of[task]]
        if len(devices) > 1 and self._at_head[task] == len(devices):
            for other in devices:
                heapq.heappush(self.events, (max(self.now, self.free[other]), other))

    def choose(self, device: int) -> int | None:
        """What is next, or else something of its pool."""
        task, now = self._head[device], self.now
        start = None if task is None else self._start_of(task)
        if task is not None and start is not None and start <= now:
            return None if self._limited and self._make_room(task) else task
        weight = self._fill(device)
        if weight is None and start is not None:
            heapq.heappush(self.events, (start, device))
        return weight

    def _start_of(self, task: int) -> int | None:
        """When what some device runs next can begin; None while that is not known."""
        if self.waiting[task] or self._at_head[task] < len(self._resources[self._operation_of[task]]):
            return None
        return self.ready_at[task]

    def _limit(self, device: int) -> int:
        """Until when a device waits."""
        task = self._head[device]
        return _NEVER if task is None else max(self._start_of(task) or 0, self._expected[task])

    def _fill(self, device: int) -> int | None:
        """The longest W of the device's pool for which all of its devices wait long enough."""
        best, longest, limit, now = None, 0, -1, self.now
        for item, pool in self._pools[device].items():
            if not pool or self.ready_at[pool[0]] > now:
                continue
            limit = limit if limit >= 0 else self._limit(device)
            duration = self.durations[pool[0]]
            need = now + duration - int(self._patience * duration)
            if longest < duration and need <= limit and self._all_wait(item, device, need):
                best, longest = pool[0], duration
        return best

    def _all_wait(self, item: int, device: int, until: int) -> bool:
        """Whether all other devices of an operation have nothing to do so long."""
        devices = self._resources[item]
        return len(devices) == 1 or all(
            self.free[other] <= self.now and until <= self._limit(other) for other in devices if other != device
        )

    def _make_room(self, task: int) -> bool:
        """Where a device could not hold the action, or not run its pool behind it, W of the pool go first."""
        for device in self._resources[self._operation_of[task]]:
            capacity = self._capacity[device]
            if capacity is not None and not self._urgent[device] and self._too_much(device, task, capacity):
                pools = (pool for pool in self._pools[device].values() if pool)
                weight = max((pool[0] for pool in pools), key=self._release, default=None)
                if weight is not None:
                    for other in self._resources[self._operation_of[weight]]:
                        self._urgent[other].append(weight)
                        self._turn_to_next(other)
                        heapq.heappush(self.events, (max(self.now, self.free[other]), other))
                    return True
        return False

    def _release(self, task: int) -> int:
        return self._operations[self._operation_of[task]].release_bytes

    def _too_much(self, device: int, task: int, capacity: int) -> bool:
        running, after = self._memory.levels(device, task)
        return max(running, after + self._flushing[device]) > capacity

    def start(self, task: int) -> None:
        item = self._operation_of[task]
        devices, stashed = self._resources[item], task in self._stashed
        for device in devices:
            if stashed:
                self._take(device, item, task)
            else:
                self._left[device].pop()
        if self._limited:
            self._memory.run(task)
        super().start(task)
        for device in devices:
            self._turn_to_next(device)

    def _take(self, device: int, item: int, task: int) -> None:
        """Take a stashed W out of the pool."""
        self._pools[device][item].popleft()
        if task in self._urgent[device]:
            self._urgent[device].remove(task)

    def arrived(self, task: int) -> None:
        """A stashed W comes into the pools; of another action it is now known when it can start."""
        item = self._operation_of[task]
        devices = self._resources[item]
        if task in self._stashed:
            for device in devices:
                self._pools[device].setdefault(item, deque()).append(task)
                heapq.heappush(self.events, (max(self.ready_at[task], self.free[device]), device))
        elif self._at_head[task] == len(devices):
            for device in devices:
                heapq.heappush(self.events, (max(self.now, self.free[device]), device))


def _flushing(graph: TaskGraph, num_devices: int) -> list[int]:
    """[device] bytes beside what it holds that its W need while they run."""
    needs = [0] * num_devices
    for item, operation in enumerate(graph.workload.operations):
        if operation.role is Role.WEIGHT_GRAD:
            for device in graph.workload.resources[item]:
                needs[device] = max(needs[device], operation.acquire_bytes + operation.workspace_bytes)
    return needs
