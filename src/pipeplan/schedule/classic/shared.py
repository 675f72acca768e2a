"""Classic schedules of placements that are no plain chain: stages on all devices, and two chains both ways."""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.schedule.classic.base import Orders, alternating, chains
from pipeplan.schedule.problem import Problem
from pipeplan.simulate.timing import TaskGraph

__all__ = ["needs_shared", "needs_two_ways", "one_forward_one_backward_plus"]


def one_forward_one_backward_plus(problem: Problem, graph: TaskGraph) -> Orders:
    """1F1B+ (Tessel, HPCA'24, VI-A): 1F1B of the chain, with the operations of all devices beside their neighbours.

    Every device follows 1F1B. A shared operation is called for as soon as the neighbour before it in the micro-batch
    has run, or, without one, as soon as the neighbour after it is next on its device; every device then joins in
    when it has finished what it is running.
    """
    return _SharedInsertion(problem.without_links).run()


class _SharedInsertion:
    """Runs 1F1B of the single-device stages in time, and calls all devices together for the shared operations."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._count = problem, problem.num_microbatches
        self._shared = [x for x, devices in enumerate(problem.devices) if len(devices) > 1]
        chain = [operations for operations in problem.stage_operations if len(problem.devices[operations[0]]) == 1]
        self._waiting = [
            list(alternating(operations, min(len(chain) - place, self._count), self._count))[::-1]
            for place, operations in enumerate(chain)
        ]
        self._sources = problem.incoming
        self._neighbours_after = {
            x: [target for source, target, _ in problem.edges if source == x and target not in self._shared]
            for x in self._shared
        }
        self._next = dict.fromkeys(self._shared, 0)
        self._end: dict[tuple[int, int], int] = {}
        self._free = [0] * problem.num_devices
        self._orders: Orders = [[] for _ in self._free]
        self._affected = [set(devices) for devices in problem.devices]  # [operation] whose next action it may allow
        for source, target, _ in problem.edges:
            self._affected[source].update(problem.devices[target])
        self._chain_actions = [self._chain_action(device) for device in range(problem.num_devices)]

    def run(self) -> Orders:
        """Every device's order."""
        for _ in range(self._problem.num_operations * self._count):
            possible = [action for action in self._chain_actions if action is not None]
            _, _, x, m = min([*possible, *self._shared_actions()])
            if x in self._next:
                self._next[x] += 1
            else:
                self._waiting[self._problem.devices[x][0]].pop()
            self._place(x, m)
            for device in self._affected[x]:
                self._chain_actions[device] = self._chain_action(device)
        return self._orders

    def _chain_action(self, device: int) -> tuple[int, int, int, int] | None:
        """(time, rank, operation, micro-batch) of the next action of a device, if it can run."""
        waiting = self._waiting[device]
        if not waiting or (arrival := self._arrival(*waiting[-1])) is None:
            return None
        return max(arrival, self._free[device]), 1, *waiting[-1]

    def _shared_actions(self) -> Iterator[tuple[int, int, int, int]]:
        """(time it is called for, rank, operation, micro-batch) of each shared operation that can run."""
        for x in reversed(self._shared):
            m = self._next[x]
            if m == self._count or (arrival := self._arrival(x, m)) is None:
                continue
            if self._sources[x]:
                yield arrival, 0, x, m
            else:
                callers = [self._problem.devices[y][0] for y in self._neighbours_after[x] if self._is_next(y, m)]
                if callers:
                    yield min(self._free[device] for device in callers), 0, x, m

    def _is_next(self, x: int, m: int) -> bool:
        waiting = self._waiting[self._problem.devices[x][0]]
        return bool(waiting) and waiting[-1] == (x, m)

    def _arrival(self, x: int, m: int) -> int | None:
        """When everything the action needs is there; None if something has not run."""
        if any((source, m) not in self._end for source, _ in self._sources[x]):
            return None
        return max((self._end[source, m] + lag for source, lag in self._sources[x]), default=0)

    def _place(self, x: int, m: int) -> None:
        devices = self._problem.devices[x]
        begin = max(self._arrival(x, m) or 0, *(self._free[device] for device in devices))
        self._end[x, m] = begin + self._problem.durations[x]
        for device in devices:
            self._free[device] = self._end[x, m]
            self._orders[device].append(x * self._count + m)


def needs_shared(problem: Problem) -> str | None:
    """1F1B+: a chain with one stage on each device, and stages on all devices between them."""
    everywhere = tuple(range(problem.num_devices))
    chain = [stage.devices for stage in problem.workload.stages if stage.devices != everywhere]
    if problem.num_devices == 1 or len(chain) == len(problem.workload.stages):
        return "it needs a stage on all devices"
    if chain != [(device,) for device in everywhere]:
        return "beside the stages on all devices it needs one on each device, in order"
    if len(chains(problem)) != 1:
        return "it needs a chain of stages"
    return None


def needs_two_ways(problem: Problem) -> str | None:
    """Chimera: two chains over the same devices in opposite directions."""
    down = [(device,) for device in range(problem.num_devices)]
    ways = [[problem.workload.stages[stage].devices for stage in chain] for chain in chains(problem)]
    if ways != [down, down[::-1]]:
        return "it needs two chains over the same devices in opposite directions"
    return None if problem.num_devices % 2 == 0 else "it needs an even number of devices"
