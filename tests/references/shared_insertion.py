"""1F1B+ (Tessel, HPCA'24, VI-A) with nothing of the rules: shared operations are inserted into 1F1B of the chain.

Every device follows 1F1B. A shared operation is called for as soon as the neighbour before it in the micro-batch has
run, or, without one, as soon as the neighbour after it is next on its device; every device then joins in when it has
finished what it is running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeplan.workload.one_microbatch import OneMicrobatch


def alternating(operations: Sequence[int], warmup: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """``warmup`` forwards, then backward and forward in turn; I and W stay together."""
    forward, *backward = operations
    yield from ((forward, m) for m in range(warmup))
    for m in range(microbatches):
        yield from ((x, m) for x in backward)
        if warmup + m < microbatches:
            yield forward, warmup + m


class SharedInsertion:
    """Runs 1F1B of the single-device stages in time, and calls all devices together for the shared operations."""

    def __init__(self, problem: OneMicrobatch) -> None:
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
        self._orders: list[list[int]] = [[] for _ in self._free]
        self._affected = [set(devices) for devices in problem.devices]  # [operation] whose next action it may allow
        for source, target, _ in problem.edges:
            self._affected[source].update(problem.devices[target])
        self._chain_actions = [self._chain_action(device) for device in range(problem.num_devices)]

    def run(self) -> list[list[int]]:
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
