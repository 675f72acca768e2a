"""The event loop of all list schedulers: whoever is free is asked what to start, and what it starts wakes others.

Here: when devices are free, when what an action waits for has arrived, links that carry first come, first served; and
the plainest chooser, which runs given orders. Not here: the others, which choose among ready actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from heapq import heappop, heappush

from pipeplan.time_limit import checkpoint
from pipeplan.workload.task_graph import Orders, TaskGraph, stuck_error


class Engine(ABC):
    """One run of a task graph in time; a subclass is a chooser.

    ``now`` in ns. ``waiting`` [task] what it still waits for; once that is 0, its sources have begun, and it may start
    from ``ready_at`` [task] ns on. ``free`` [device, link] ns at which it can run something else; ``orders``
    [device, link] what it has run. ``events`` is a heap of (ns, device): when a device, or its network, is to be asked.

    With ``unit_steps`` every action takes 1 instead of its duration, and messages nothing. With ``links_choose`` links
    are asked as devices are; otherwise they carry their messages first come, first served.
    """

    def __init__(self, graph: TaskGraph, *, unit_steps: bool = False, links_choose: bool = False) -> None:
        workload = graph.workload
        self.graph = graph
        self.now = 0
        self.waiting = graph.num_predecessors.copy()
        self.ready_at = [0] * graph.num_tasks
        self.free = [0] * workload.num_resources
        self.orders: list[list[int]] = [[] for _ in self.free]
        links = range(len(workload.devices), len(workload.devices) + len(workload.links))
        self.events = [(0, each) for each in range(len(self.free)) if links_choose or each not in links]
        self.durations = graph.durations
        self._resources, self._operation_of, self._successors = workload.resources, graph.operation_of, graph.successors
        self._num_chosen = graph.num_tasks if links_choose else graph.num_actions
        self._lag_factor = 0 if unit_steps else 1
        if unit_steps:
            self.durations = [1] * graph.num_actions + [0] * (graph.num_tasks - graph.num_actions)

    @property
    def device_orders(self) -> list[list[int]]:
        """[device] what it has run; links are left out."""
        return self.orders[: len(self.graph.workload.devices)]

    @abstractmethod
    def choose(self, device: int) -> int | None:
        """The task a free device starts now, all of whose devices must be free; None to wait for the next event."""

    def arrived(self, task: int) -> None:
        """All sources of an action have begun: its devices are asked once it is ready, if they are free then."""
        ready = self.ready_at[task]
        for device in self._resources[self._operation_of[task]]:
            if self.free[device] <= ready:
                heappush(self.events, (ready, device))

    def run(self) -> None:
        """Ask devices, event by event, until there are none."""
        events, free, asked = self.events, self.free, 0
        while events:
            asked += 1
            if not asked % 1024:
                checkpoint()
            self.now, device = heappop(events)
            if free[device] <= self.now:
                task = self.choose(device)
                if task is not None:
                    self.start(task)

    def start(self, task: int) -> None:
        """An action starts now, on all of its devices."""
        end, events = self.now + self.durations[task], self.events
        for device in self._resources[self._operation_of[task]]:
            self.free[device] = end
            self.orders[device].append(task)
            heappush(events, (end, device))
        self._hand_on(task, end)

    def _hand_on(self, task: int, end: int) -> None:
        """What waits for a task, which ends at ``end``, waits for one thing less."""
        waiting, ready_at, factor = self.waiting, self.ready_at, self._lag_factor
        for other, lag in self._successors[task]:
            time = end + lag * factor
            if lag < 0:  # nothing starts before it is known that it may
                time = max(time, self.now)
            if ready_at[other] < time:
                ready_at[other] = time
            waiting[other] -= 1
            if not waiting[other]:
                if other < self._num_chosen:
                    self.arrived(other)
                else:
                    self._carry(other)

    def _carry(self, message: int) -> None:
        """A message takes its link when all of it is made, or when the link is free."""
        (link,) = self._resources[self._operation_of[message]]
        end = self.free[link] = max(self.free[link], self.ready_at[message]) + self.durations[message]
        self.orders[link].append(message)
        self._hand_on(message, end)


def with_links(graph: TaskGraph, orders: Orders) -> list[list[int]]:
    """Orders of the devices, completed by those of the links: each carries its messages first come, first served.

    Orders that have them keep them.

    Raises:
        InvalidPlanError: the orders and the dependencies wait for each other.
    """
    if len(orders) == graph.workload.num_resources:
        return [*map(list, orders)]
    replay = _Replay(graph, orders)
    replay.run()
    if not replay.is_complete:
        done = {task for order in replay.orders for task in order}
        raise stuck_error(graph, orders, [task for task in range(graph.num_tasks) if task not in done])
    return replay.orders


_NONE = -1


class _Replay(Engine):
    """Devices run their orders as soon as they can; networks, which have none, what comes first."""

    def __init__(self, graph: TaskGraph, orders: Orders) -> None:
        super().__init__(graph)
        self._left = [[_NONE, *reversed(order)] for order in orders]
        self._left += [[_NONE] for _ in range(len(orders), len(self.free))]
        self._num_ordered = len(orders)
        for item, resources in enumerate(self._resources[: len(graph.workload.operations)]):
            if resources[0] >= self._num_ordered:
                for task in range(graph.offsets[item], graph.offsets[item + 1]):
                    if not self.waiting[task]:
                        self._queue(task)

    @property
    def is_complete(self) -> bool:
        """Whether everything has run."""
        return all(left == [_NONE] for left in self._left)

    def choose(self, device: int) -> int | None:
        task = self._left[device][-1]
        if task == _NONE or self.waiting[task]:
            return None
        if self.ready_at[task] > self.now:
            heappush(self.events, (self.ready_at[task], device))
            return None
        devices = self._resources[self._operation_of[task]]
        return task if len(devices) == 1 or self._all_wait_for(task, devices) else None

    def _all_wait_for(self, task: int, devices: Sequence[int]) -> bool:
        return all(self.free[device] <= self.now and self._left[device][-1] == task for device in devices)

    def _queue(self, task: int) -> None:
        for network in self._resources[self._operation_of[task]]:
            self._left[network].insert(1, task)

    def arrived(self, task: int) -> None:
        ready, resources = self.ready_at[task], self._resources[self._operation_of[task]]
        if resources[0] >= self._num_ordered:
            self._queue(task)
        for device in resources:
            if self.free[device] <= ready and self._left[device][-1] == task:
                heappush(self.events, (ready, device))

    def start(self, task: int) -> None:
        for device in self._resources[self._operation_of[task]]:
            self._left[device].pop()
        super().start(task)
