"""Gradient separation: rules choose whole backwards, then weight gradients move out of the way.

Gradient separation: weight gradients out of the way of what others wait for (FlexPipe 5.2, Fig. 10).

A backward in two parts hands the input gradient (I) on; nobody waits for the weight gradient (W). Where W follows its
I at once, it stands in the way of what comes behind it, and other devices wait for that. To *stash* a W is to take it
out of its place; it runs later, in a bubble of its devices, or when their memory demands it, or at the end.

Which are stashed is found by backtracking, as the paper has it: from every bubble back along what the blocked action
waited for, stashing each W that stood in the way, again and again until none does. Stashing all of them is tried
beside it, W then going into bubbles that are a little too short for them, too, and the shortest result is kept: it is
never longer than what was given. Each try is one replay in time, near-linear in the actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from pipeplan.errors import InvalidPlanError
from pipeplan.schedule.rules.refill import refill
from pipeplan.workload.elements import Dependency, Operation
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import capacities, memory_levels
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload

__all__ = ["Joined", "Timed", "separate", "separated"]


def separate(graph: TaskGraph, orders: Orders, *, tries: int | None = None) -> list[list[int]]:
    """The orders of the devices with weight gradients moved into bubbles; never longer than ``orders``.

    With ``tries`` not all ways are tried, but so many.

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
    """Orders of devices and links, starts [task] and the makespan in ns."""

    orders: list[list[int]]
    starts: list[int]
    makespan: int

    @classmethod
    def of(cls, graph: TaskGraph, orders: list[list[int]]) -> Timed:
        """Every action starts as soon as it can."""
        starts = earliest_starts(graph, orders)
        return cls(orders, starts, max(map(sum, zip(starts, graph.durations, strict=True)), default=0))


@dataclass(frozen=True, slots=True)
class _Case:
    """What is to be separated.

    ``unhindered`` [task] are the starts if no W stood in any way; none is earlier. No makespan is below ``target``:
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
    """The shortest of all tries, or of the first so many; among equals the first."""
    best = case.given
    for found in islice(_tries(case), most):
        if found.makespan < best.makespan:
            best = found
        if best.makespan <= case.target:
            break
    return best


def _tries(case: _Case) -> Iterator[Timed]:
    """Everything stashed, which is often enough; then what backtracking says."""
    yield from filter(None, (case.tried(case.weights, patience) for patience in _PATIENCES))
    yield from _backtracked(case)


_PATIENCES = (1.0, 0.5)
"""How late W may end where all are stashed, in shares of their durations: 0 and the rest bring nothing more."""


def _backtracked(case: _Case) -> Iterator[Timed]:
    """Stash what blocked the bubbles of the last result, as long as there is more; bubbles that are too short stay."""
    found: Timed | None = case.given
    stashed: frozenset[int] = frozenset()
    sources = _sources(case.graph)
    for _ in range(_PASSES):
        more = frozenset() if found is None else stashed | _blocking(case, sources, found)
        if len(more) <= len(stashed):
            return
        stashed, found = more, case.tried(more, 0.0)
        if found is not None:
            yield found


_PASSES = 4
"""Bubbles are backtracked so many times at most."""


def _sources(graph: TaskGraph) -> list[list[tuple[int, int]]]:
    """[task] what it waits for: pairs (task, lag in ns)."""
    sources: list[list[tuple[int, int]]] = [[] for _ in graph.durations]
    for task, successors in enumerate(graph.successors):
        for other, lag in successors:
            sources[other].append((task, lag))
    return sources


def _blocking(case: _Case, sources: list[list[tuple[int, int]]], found: Timed) -> frozenset[int]:
    """The W on the paths by which actions behind a bubble were held up: what ended just when the next could start."""
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
        """The same orders in the given graph, each W right behind its I."""
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
    """I and W one behind the other; what W works with is on top of what I has given back."""
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
