"""A replay of orders in time in which some weight gradients leave their places and run where their devices wait."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from pipeplan.simulate.memory import acquired_bytes
from pipeplan.simulate.timing import Orders, TaskGraph

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
    that must run next. A message runs on its link when it is made, first come, first served.
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
        self._devices = graph.workload.resources
        self._left = [[task for task in reversed(order) if task not in stashed] for order in orders]
        self._urgent: list[list[int]] = [[] for _ in orders]
        self._pools: list[dict[int, deque[int]]] = [{} for _ in orders]
        self._free = [0] * graph.workload.num_resources
        self._held = [0] * len(orders)
        self._waiting = graph.num_predecessors.copy()
        self._arrival = [0] * graph.num_tasks
        self._found: list[list[int]] = [[] for _ in orders]
        self._events = [(0, device) for device in range(len(orders))]
        self._flushing = _flushing(graph, len(orders))

    def run(self) -> list[list[int]] | None:
        """Go through the moments at which something can begin on a device."""
        events = self._events
        while events:
            now, device = heapq.heappop(events)
            if self._free[device] <= now:
                self._examine(device, now)
        done = not any(self._left) and not any(pool for pools in self._pools for pool in pools.values())
        return self._found if done else None

    def _head(self, device: int) -> int | None:
        """What the device runs next, W from its pool aside."""
        if self._urgent[device]:
            return self._urgent[device][-1]
        return self._left[device][-1] if self._left[device] else None

    def _examine(self, device: int, now: int) -> None:
        """A device is free: begin what is next, or else something of its pool."""
        task = self._head(device)
        start = self._start_of(task)
        if task is not None and start is not None and start <= now:
            if not self._make_room(task, now):
                self._begin(task, now)
            return
        weight = self._choose(device, now)
        if weight is not None:
            self._begin(weight, now)
        elif start is not None:
            heapq.heappush(self._events, (start, device))

    def _start_of(self, task: int | None) -> int | None:
        """When a device's next action can begin; None while that is not known."""
        if task is None or self._waiting[task]:
            return None
        devices = self._devices[self._graph.operation_of[task]]
        if len(devices) == 1:
            return max(self._arrival[task], self._free[devices[0]])
        if any(self._head(device) != task for device in devices):
            return None
        return max(self._arrival[task], *(self._free[device] for device in devices))

    def _limit(self, device: int) -> int:
        """Until when a device waits."""
        task = self._head(device)
        if task is None:
            return _NEVER
        return max(self._start_of(task) or 0, self._expected[task])

    def _choose(self, device: int, now: int) -> int | None:
        """The longest W of the device's pool for which all of its devices wait long enough."""
        best, longest = None, 0
        limit = self._limit(device) if self._pools[device] else 0
        for item, pool in self._pools[device].items():
            duration = self._graph.workload.durations[item]
            if duration <= longest or not pool or self._arrival[pool[0]] > now:
                continue
            need = now + duration - int(self._patience * duration)
            others = (other for other in self._devices[item] if other != device)
            if need <= limit and all(self._free[other] <= now and need <= self._limit(other) for other in others):
                best, longest = pool[0], duration
        return best

    def _make_room(self, task: int, now: int) -> bool:
        """Where a device could not hold the action, or not run its pool behind it, W of the pool go first."""
        for device in self._devices[self._graph.operation_of[task]]:
            if self._capacity[device] is not None and self._too_much(device, task):
                pools = (pool for pool in self._pools[device].values() if pool)
                weight = max((pool[0] for pool in pools), key=self._release, default=None)
                if weight is not None:
                    self._hurry(weight, now)
                    return True
        return False

    def _release(self, task: int) -> int:
        return self._graph.workload.operations[self._graph.operation_of[task]].release_bytes

    def _too_much(self, device: int, task: int) -> bool:
        if self._urgent[device]:
            return False
        capacity = self._capacity[device]
        assert capacity is not None
        operation = self._graph.workload.operations[self._graph.operation_of[task]]
        held = self._held[device] + acquired_bytes(self._graph, task)
        after = held - operation.release_bytes + self._flushing[device]
        return held + operation.workspace_bytes > capacity or after > capacity

    def _hurry(self, weight: int, now: int) -> None:
        """The devices of a W run it next."""
        for device in self._devices[self._graph.operation_of[weight]]:
            self._urgent[device].append(weight)
            heapq.heappush(self._events, (max(now, self._free[device]), device))

    def _begin(self, task: int, now: int) -> None:
        graph = self._graph
        item = graph.operation_of[task]
        end = now + graph.durations[task]
        operation = graph.workload.operations[item]
        effect = acquired_bytes(graph, task) - operation.release_bytes
        for device in self._devices[item]:
            self._free[device] = end
            self._held[device] += effect
            self._found[device].append(task)
            self._take(device, item, task)
            heapq.heappush(self._events, (end, device))
        self._hand_on(task, end, now)
        self._announce(item, now)

    def _take(self, device: int, item: int, task: int) -> None:
        """Take the action from where it stood."""
        if task in self._stashed:
            self._pools[device][item].popleft()
            if task in self._urgent[device]:
                self._urgent[device].remove(task)
        else:
            self._left[device].pop()

    def _announce(self, item: int, now: int) -> None:
        """What several devices run next together may have got its start: those that wait look again."""
        for device in self._devices[item]:
            head = self._head(device)
            if head is not None and len(others := self._devices[self._graph.operation_of[head]]) > 1:
                start = self._start_of(head)
                if start is not None:
                    for other in others:
                        heapq.heappush(self._events, (max(now, self._free[other]), other))

    def _hand_on(self, task: int, end: int, now: int) -> None:
        """What waits for the action, or for its message, has it then."""
        graph = self._graph
        for other, lag in graph.successors[task]:
            if other < graph.num_actions:
                self._arrive(other, end + lag, now)
                continue
            self._waiting[other] -= 1
            if not self._waiting[other]:
                link = graph.devices_of(other)[0]
                self._free[link] = max(self._free[link], end) + graph.durations[other]
                for target, latency in graph.successors[other]:
                    self._arrive(target, self._free[link] + latency, now)

    def _arrive(self, task: int, time: int, now: int) -> None:
        self._arrival[task] = max(self._arrival[task], time)
        self._waiting[task] -= 1
        if self._waiting[task]:
            return
        item = self._graph.operation_of[task]
        for device in self._devices[item]:
            if task in self._stashed:
                self._pools[device].setdefault(item, deque()).append(task)
            moment = time if task in self._stashed else now
            heapq.heappush(self._events, (max(moment, self._free[device]), device))


def _flushing(graph: TaskGraph, num_devices: int) -> list[int]:
    """[device] bytes beside what it holds that its W need while they run."""
    needs = [0] * num_devices
    for item, operation in enumerate(graph.workload.operations):
        if operation.kind == "W":
            for device in graph.workload.resources[item]:
                needs[device] = max(needs[device], operation.acquire_bytes + operation.workspace_bytes)
    return needs
