"""The classic schedules, each a few lines on a common base. They do not look at memory.

A schedule here is an order per device: task numbers ``operation * N + micro-batch``, as in
:mod:`pipeplan.simulate.timing`. Most are written as a rule that gives every action a sort key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeplan.schedule.problem import Problem
from pipeplan.simulate.timing import TaskGraph

__all__ = ["CLASSIC", "Classic"]


@dataclass(frozen=True, slots=True)
class Classic:
    """A classic schedule: where it applies, and its orders.

    ``applies`` returns None, or why the schedule has no meaning for a problem's placement.
    """

    applies: Callable[[Problem], str | None]
    orders: Callable[[Problem, TaskGraph], list[list[int]]]


def gpipe(problem: Problem, graph: TaskGraph) -> list[list[int]]:
    """All forwards, then all backwards (GPipe, NeurIPS'19, section 2.3); any placement."""
    forwards = _of_kind(problem, "F")
    return _sorted(
        problem, lambda operation, m: (operation not in forwards, m if operation in forwards else 0, operation, m)
    )


def one_forward_one_backward(problem: Problem, graph: TaskGraph) -> list[list[int]]:
    """1F1B (PipeDream, SOSP'19, section 3.2; DAPPLE, PPoPP'21): D - d forwards on device d, then one of each.

    Where backward is split, W follows its I at once.
    """
    return [
        _one_each(problem, _chain_stage(problem, device), problem.num_devices - device)
        for device in range(problem.num_devices)
    ]


def one_forward_one_backward_plus(problem: Problem, graph: TaskGraph) -> list[list[int]]:
    """1F1B+ (Tessel, HPCA'24, VI-A): 1F1B of the chain, with the operations of all devices beside their neighbours.

    Every device follows 1F1B. A shared operation is called for as soon as the neighbour before it in the micro-batch
    has run, or, without one, as soon as the neighbour after it is next on its device; every device then joins in
    when it has finished what it is running.
    """
    return _SharedInsertion(problem).run()


class _SharedInsertion:
    """Runs 1F1B of the single-device stages in time, and calls all devices together for the shared operations."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._count = problem, problem.num_microbatches
        self._shared = [x for x, devices in enumerate(problem.devices) if len(devices) > 1]
        chain = [operations for operations in problem.stage_operations if len(problem.devices[operations[0]]) == 1]
        self._waiting = [
            list(_alternating(operations, min(len(chain) - place, self._count), self._count))[::-1]
            for place, operations in enumerate(chain)
        ]
        self._sources = _sources(problem)
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


def chimera_direct(problem: Problem, graph: TaskGraph) -> list[list[int]]:
    """Chimera with direct concatenation (SC'21, III-A and III-C): units of D micro-batches, D/2 each way.

    In a unit each direction runs 1F1B in equal slots, every second one a micro-batch: the n-th runs forward on the
    d-th device of its way in slot d + 2n and backward in slot 2D - 1 - d + 2n. For even D the two ways never meet.
    A unit begins 2D slots after the last one, so that its first forwards take the bubbles that one ends with.
    """
    num_devices, count = problem.num_devices, problem.num_microbatches
    slots: dict[tuple[int, int], int] = {}
    for direction in _directions(problem):
        for place, stage in enumerate(direction):
            forward, *backward = problem.stage_operations[stage]
            for m in range(count):
                unit, n = divmod(m, num_devices // 2)
                begin = 2 * num_devices * unit + 2 * n
                slots[forward, m] = begin + place
                slots.update({(x, m): begin + 2 * num_devices - 1 - place for x in backward})
    return _sorted(problem, lambda x, m: (slots[x, m], x))


def _alternating(operations: Sequence[int], warmup: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """``warmup`` forwards, then backward and forward in turn; I and W stay together."""
    forward, *backward = operations
    yield from ((forward, m) for m in range(warmup))
    for m in range(microbatches):
        yield from ((x, m) for x in backward)
        if warmup + m < microbatches:
            yield forward, warmup + m


def _one_each(problem: Problem, stage: int, warmup: int) -> list[int]:
    count = problem.num_microbatches
    return [x * count + m for x, m in _alternating(problem.stage_operations[stage], min(warmup, count), count)]


def _sources(problem: Problem) -> list[list[tuple[int, int]]]:
    """[operation] what it waits for: pairs (operation, lag in ns)."""
    found: list[list[tuple[int, int]]] = [[] for _ in problem.durations]
    for source, target, lag in problem.edges:
        found[target].append((source, lag))
    return found


def _of_kind(problem: Problem, kind: str) -> set[int]:
    return {x for x, operation in enumerate(problem.workload.operations) if operation.kind == kind}


def _sorted(problem: Problem, key: Callable[[int, int], tuple[int, ...]]) -> list[list[int]]:
    """Every device's actions by key(operation, micro-batch)."""
    count = problem.num_microbatches
    return [
        [x * count + m for x, m in sorted(((x, m) for x in operations for m in range(count)), key=lambda xm: key(*xm))]
        for operations in problem.on_device
    ]


def _chain_stage(problem: Problem, device: int) -> int:
    return problem.workload.operations[problem.on_device[device][0]].stage


def _directions(problem: Problem) -> list[list[int]]:
    """The chains of a bidirectional placement, each as its stages in order."""
    stages = problem.workload.stages
    following = {
        problem.workload.operations[s].stage: problem.workload.operations[t].stage
        for s, t, _ in problem.edges
        if s in _of_kind(problem, "F") and t in _of_kind(problem, "F")
    }
    chains = []
    for first in sorted(set(range(len(stages))) - set(following.values())):
        chain = [first]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        chains.append(chain)
    return chains


def _any_placement(problem: Problem) -> str | None:
    return None


def _needs_chain(problem: Problem) -> str | None:
    """1F1B: a chain of stages, one on each device, in the order of the devices."""
    if any(stage.devices != (index,) for index, stage in enumerate(problem.workload.stages)):
        return "it needs stage d on device d alone"
    return None if _directions(problem) == [list(range(problem.num_devices))] else "it needs a chain of stages"


def _needs_shared(problem: Problem) -> str | None:
    """1F1B+: a chain with one stage on each device, and stages on all devices between them."""
    everywhere = tuple(range(problem.num_devices))
    chain = [stage.devices for stage in problem.workload.stages if stage.devices != everywhere]
    if problem.num_devices == 1 or len(chain) == len(problem.workload.stages):
        return "it needs a stage on all devices"
    if chain != [(device,) for device in everywhere]:
        return "beside the stages on all devices it needs one on each device, in order"
    if len(_directions(problem)) != 1:
        return "it needs a chain of stages"
    return None


def _needs_two_ways(problem: Problem) -> str | None:
    """Chimera: two chains over the same devices in opposite directions."""
    down = [(device,) for device in range(problem.num_devices)]
    chains = [[problem.workload.stages[stage].devices for stage in chain] for chain in _directions(problem)]
    if chains != [down, down[::-1]]:
        return "it needs two chains over the same devices in opposite directions"
    return None if problem.num_devices % 2 == 0 else "it needs an even number of devices"


CLASSIC: dict[str, Classic] = {
    "1f1b": Classic(_needs_chain, one_forward_one_backward),
    "1f1b+": Classic(_needs_shared, one_forward_one_backward_plus),
    "chimera": Classic(_needs_two_ways, chimera_direct),
    "gpipe": Classic(_any_placement, gpipe),
}
"""Every classic schedule by the name ``--scheduler`` takes."""
