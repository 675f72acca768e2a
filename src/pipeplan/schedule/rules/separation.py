"""Gradient separation: moving weight gradients out of the way of what others wait for (FlexPipe 5.2, Fig. 10).

Rules choose whole backwards. A backward in two parts hands the input gradient (I) on; nobody waits for the weight
gradient (W). Where W follows its I at once, it stands in the way of what comes after it, and other devices wait for
that. To *stash* a W is to take it out of its place; it runs later, in a bubble of its devices, or when their memory
demands it, or at the end.

Which are stashed is found by backtracking, as the paper has it: from every bubble back along what the blocked action
waited for, stashing each W that stood in the way, again and again until none does. Stashing all of them is tried
beside it, W then going into bubbles that are a little too short for them, too, and the shortest result is kept: it is
never longer than what was given. Each try is one replay in time, near-linear in the actions.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from pipeplan.errors import InvalidPlanError
from pipeplan.search_constants import SEPARATION_PASSES, SEPARATION_PATIENCES
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Dependency, Operation
from pipeplan.workload.engine import Engine, with_links
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import MemoryState, capacities, memory_levels
from pipeplan.workload.task_graph import NEVER, Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload


def separate(graph: TaskGraph, orders: Orders, *, tries: int | None = None) -> list[list[int]]:
    """The orders of the devices with weight gradients moved into bubbles; never longer than ``orders``.

    With ``tries`` only that many ways are tried.

    Everything but W keeps its place among its like. No device holds more than its memory, or, where that is more, than
    under ``orders``. Without weight gradients of their own the orders come back as they are.

    Raises:
        InvalidPlanError: the orders and the dependencies wait for each other.
    """
    return separated(graph, orders, tries=tries).orders[: len(graph.workload.devices)]


def separated(graph: TaskGraph, orders: Orders, *, tries: int | None = None) -> Timed:
    """The same with the orders of links, starts and the makespan."""
    given = Timed.of(graph, with_links(graph, graph.on_devices(orders)))
    weights = _weights(graph)
    return _best(_Case.of(graph, given, weights), tries) if weights else given


def _weights(graph: TaskGraph) -> frozenset[int]:
    """The weight gradients that nothing waits for."""
    roles = enumerate(operation.role for operation in graph.workload.operations)
    items = [item for item, role in roles if role is Role.WEIGHT_GRAD]
    tasks = (task for item in items for task in range(*graph.offsets[item : item + 2]))
    return frozenset(task for task in tasks if not graph.successors[task])


@dataclass(frozen=True, slots=True)
class Timed:
    """Orders of devices and links, starts [task] and the iteration in ns."""

    orders: list[list[int]]
    starts: list[int]
    iteration: int

    @classmethod
    def of(cls, graph: TaskGraph, orders: list[list[int]]) -> Timed:
        """Every action starts as soon as it can."""
        starts = earliest_starts(graph, orders)
        return cls(orders, starts, graph.iteration(starts))


@dataclass(frozen=True, slots=True)
class _Case:
    """What is to be separated.

    ``unhindered`` [task] are the starts if no W stood in any way; none is earlier. No iteration is below ``target``:
    a device begins no sooner than unhindered and then has all its work. ``capacity`` [device] bytes beside the static
    ones, None without limit.
    """

    graph: TaskGraph
    given: Timed
    weights: frozenset[int]
    capacity: tuple[int | None, ...]
    unhindered: list[int]
    target: int

    @classmethod
    def of(cls, graph: TaskGraph, given: Timed, weights: frozenset[int]) -> _Case:
        durations = graph.durations
        kept = [[task for task in order if task not in weights] for order in given.orders]
        unhindered = earliest_starts(graph, kept)
        devices = given.orders[: len(graph.workload.devices)]
        work = (sum(map(durations.__getitem__, order)) + unhindered[order[0]] for order in devices if order)
        ends = map(sum, zip(unhindered, durations, strict=True))
        return cls(graph, given, weights, _capacity(graph, given.orders), unhindered, max(*work, *ends))

    def tried(self, stashed: frozenset[int], patience: float) -> Timed | None:
        """What comes of it if these are stashed; None where it cannot be carried out."""
        devices = self.given.orders[: len(self.graph.workload.devices)]
        orders = refill(self.graph, devices, stashed, self.capacity, self.unhindered, patience)
        if orders is None:
            return None
        try:
            found = Timed.of(self.graph, with_links(self.graph, orders))
        except InvalidPlanError:
            return None
        return found if self._fits(found) else None

    def _fits(self, found: Timed) -> bool:
        """Whether all devices stay within what they may hold."""
        return all(
            limit is None or max(memory_levels(self.graph, order), default=0) <= limit
            for limit, order in zip(self.capacity, found.orders, strict=False)
        )


def _capacity(graph: TaskGraph, orders: Orders) -> tuple[int | None, ...]:
    """[device] bytes beside the static ones that it may hold: what it has left, or held before if that is more."""
    return tuple(
        None if limit is None else max(limit, *memory_levels(graph, order), 0)
        for limit, order in zip(capacities(graph.workload), orders, strict=False)
    )


def _best(case: _Case, most: int | None) -> Timed:
    """The shortest of all tries, or of the first ``tries``; among equals the first."""
    best = case.given
    for found in islice(checked(_tries(case), 1), most):
        if found.iteration < best.iteration:
            best = found
        if best.iteration <= case.target:
            break
    return best


def _tries(case: _Case) -> Iterator[Timed]:
    """Everything stashed, which is often enough; then what backtracking says."""
    yield from filter(None, (case.tried(case.weights, patience) for patience in SEPARATION_PATIENCES))
    yield from _backtracked(case)


def _backtracked(case: _Case) -> Iterator[Timed]:
    """Stash what blocked the bubbles of the last result, while there is more; bubbles that are too short stay."""
    found: Timed | None = case.given
    stashed: frozenset[int] = frozenset()
    sources = _sources(case.graph)
    for _ in range(SEPARATION_PASSES):
        more = frozenset() if found is None else stashed | _blocking(case, sources, found)
        if len(more) <= len(stashed):
            return
        stashed, found = more, case.tried(more, 0.0)
        if found is not None:
            yield found


def _sources(graph: TaskGraph) -> list[list[tuple[int, int]]]:
    """[task] what it waits for: pairs (task, lag in ns)."""
    sources: list[list[tuple[int, int]]] = [[] for _ in graph.durations]
    for task, successors in checked(enumerate(graph.successors), 1024):
        for other, lag in successors:
            sources[other].append((task, lag))
    return sources


def _blocking(case: _Case, sources: list[list[tuple[int, int]]], found: Timed) -> frozenset[int]:
    """The W on the paths by which actions after a bubble were held up: what ended just when the next could start."""
    starts = found.starts
    ends = list(map(sum, zip(starts, case.graph.durations, strict=True)))
    neighbours = [pair for order in found.orders for pair in zip(order, order[1:], strict=False)]
    behind_bubbles = [task for before, task in neighbours if ends[before] < starts[task]]
    held_by: dict[int, list[int]] = defaultdict(list)
    for before, task in neighbours:
        if ends[before] == starts[task]:
            held_by[task].append(before)
    paths, seen = [task for task in behind_bubbles if task not in case.weights], set()
    while paths:
        task = paths.pop()
        if task not in seen:
            seen.add(task)
            arrived = [source for source, lag in sources[task] if ends[source] + lag == starts[task]]
            paths += arrived or held_by[task]
    return case.weights & seen


@dataclass(frozen=True, slots=True)
class Joined:
    """A graph whose backwards are whole, for one in which some or all of them have two parts.

    ``parts`` [operation of ``graph``] are the operations of the given one that it stands for: itself, or I and W.
    """

    given: TaskGraph
    graph: TaskGraph
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, given: TaskGraph) -> Joined:
        """Join I and W of every stage."""
        operations = given.workload.operations
        weights = {
            operation.stage: number for number, operation in enumerate(operations) if operation.role is Role.WEIGHT_GRAD
        }
        parts = tuple(
            (number, weights[operation.stage]) if operation.role is Role.INPUT_GRAD else (number,)
            for number, operation in enumerate(operations)
            if operation.role is not Role.WEIGHT_GRAD
        )
        return cls(given, task_graph(_joined(given.workload, parts)), parts)

    def apart(self, orders: Orders) -> list[list[int]]:
        """The same orders in the given graph, each W right after its I."""
        return [[part for task in order for part in self._parts_of(task)] for order in orders]

    def _parts_of(self, task: int) -> list[int]:
        operation = self.graph.operation_of[task]
        number = task - self.graph.offsets[operation]
        return [self.given.offsets[part] + number for part in self.parts[operation]]


def _joined(workload: Workload, parts: tuple[tuple[int, ...], ...]) -> Workload:
    operations = [[workload.operations[part] for part in group] for group in parts]
    names = {part.id: _whole(group).id for group in operations for part in group}
    edges: dict[tuple[str, str], Dependency] = {}
    for dependency in workload.dependencies:
        ends = names[dependency.source], names[dependency.target]
        if ends[0] != ends[1]:
            edges.setdefault(ends, replace(dependency, source=ends[0], target=ends[1]))
    return replace(workload, operations=tuple(map(_whole, operations)), dependencies=tuple(edges.values()))


def _whole(parts: list[Operation]) -> Operation:
    """I and W one after the other; what W works with is on top of what I has given back."""
    first, last = parts[0], parts[-1]
    if first is last:
        return first
    return replace(
        first,
        kind="B",
        duration_ns=first.duration_ns + last.duration_ns,
        release_bytes=first.release_bytes + last.release_bytes,
        workspace_bytes=max(first.workspace_bytes, last.workspace_bytes - first.release_bytes),
    )


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
    replay = _Refill(graph, orders, stashed, capacity, expected, patience)
    replay.run()
    return replay.device_orders if replay.is_complete else None


class _Refill(Engine):
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
        return NEVER if task is None else max(self._start_of(task) or 0, self._expected[task])

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
        """Where a device could not hold the action, or not run its pool after it, W of the pool go first."""
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
