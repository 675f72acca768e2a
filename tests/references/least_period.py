"""The least period of a repetend by exhaustive enumeration, Tessel's own search space (IV-B), with no solver."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from pipeplan.workload.one_microbatch import OneMicrobatch

__all__ = ["least_period_by_enumeration"]

Arc = tuple[int, int, int]  # (x, y, w): y starts at least w after x


def least_period_by_enumeration(problem: OneMicrobatch, max_span: int | None = None) -> int:
    """Least integer T over all indices k and all orders of a repetend on every device; no solver involved.

    With ``max_span`` k are below that: indices of so many micro-batches (Tessel's N_R).

    With k and the orders given, starts exist for T if and only if the difference constraints have no positive
    cycle; every device has a window of its own, as Tessel's compact repetends do.
    """
    assignments: dict[int, list[tuple[int, ...]]] = {}
    orders = _Orders(problem)
    for period in itertools.count(max(*problem.work, *problem.durations)):
        reach = _reach(problem, period) if max_span is None else min(max_span - 1, _reach(problem, period))
        if reach not in assignments:
            assignments[reach] = list(_index_assignments(problem, reach))
        if any(_has_orders(problem, period, indices, orders) for indices in assignments[reach]):
            return period
    raise AssertionError


class _Orders:
    """All orders of a device's operations in a repetend that fit into its memory, for given k."""

    def __init__(self, problem: OneMicrobatch) -> None:
        self._problem = problem
        self._known: dict[tuple[int, tuple[int, ...]], list[tuple[int, ...]]] = {}

    def fitting(self, device: int, indices: tuple[int, ...]) -> list[tuple[int, ...]]:
        operations = self._problem.on_device[device]
        key = device, tuple(indices[x] for x in operations)
        if key not in self._known:
            self._known[key] = [
                order for order in itertools.permutations(operations) if _fits(self._problem, device, order, indices)
            ]
        return self._known[key]


def _reach(problem: OneMicrobatch, period: int) -> int:
    """What k never needs to exceed: the sum, over all operations, of the most that k can grow into one of them."""
    grows = [0] * problem.num_operations
    for source, target, lag in problem.edges:
        grows[target] = max(grows[target], 1 + math.ceil((problem.durations[source] + lag) / period))
    return sum(grows)


def _index_assignments(problem: OneMicrobatch, most: int) -> Iterator[tuple[int, ...]]:
    """All k with k_j >= k_i along dependencies (Property 4.2), the least of them 0.

    What is taken in x and given back in y is there k_y - k_x times at once, which must fit.
    """
    sources = [[s for s, t, _ in problem.edges if t == target] for target in range(problem.num_operations)]
    copies = [
        (hold.source, hold.target, capacity // hold.size)
        for hold in problem.workload.holds
        for capacity in (problem.capacity[device] for device in problem.devices[hold.source])
        if capacity is not None
    ]

    def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == problem.num_operations:
            if min(chosen) == 0:
                yield chosen
            return
        least = max((chosen[source] for source in sources[len(chosen)]), default=0)
        limit = min((chosen[x] + count for x, y, count in copies if y == len(chosen)), default=most)
        for index in range(least, min(limit, most) + 1):
            yield from extend((*chosen, index))

    return extend(())


def _has_orders(problem: OneMicrobatch, period: int, indices: tuple[int, ...], orders: _Orders) -> bool:
    """Whether the devices have orders within memory that leave starts possible; device by device."""
    arcs = [
        (source, target, problem.durations[source] + lag - period * (indices[target] - indices[source]))
        for source, target, lag in problem.edges
    ]
    for operations in problem.on_device:  # whatever the order, all of a device's operations stand in one window
        arcs += [(x, y, problem.durations[x] - period) for x, y in itertools.permutations(operations, 2)]

    def extend(device: int, arcs: list[Arc]) -> bool:
        if not _has_starts(problem.num_operations, arcs):
            return False
        return device == problem.num_devices or any(
            extend(device + 1, arcs + [(x, y, problem.durations[x]) for x, y in itertools.pairwise(order)])
            for order in orders.fitting(device, indices)
        )

    return extend(0, arcs)


def _fits(problem: OneMicrobatch, device: int, order: tuple[int, ...], indices: tuple[int, ...]) -> bool:
    """Run the repetend from the first micro-batch until all its operations take part, and once more."""
    capacity = problem.capacity[device]
    if capacity is None:
        return True
    held = 0
    for repetition in range(max(indices[x] for x in order) + 2) if order else ():
        for x in order:
            if repetition >= indices[x]:
                held += problem.acquire[x]
                if held + problem.workspace[x] > capacity:
                    return False
                held -= problem.release[x]
    return True


def _has_starts(num_operations: int, arcs: list[Arc]) -> bool:
    """Longest paths exist: they stop growing after as many rounds as there are operations."""
    longest = [0] * num_operations
    for _ in range(num_operations + 1):
        changed = False
        for source, target, weight in arcs:
            if longest[source] + weight > longest[target]:
                longest[target] = longest[source] + weight
                changed = True
        if not changed:
            return True
    return False
