"""Gradient separation by brute force: every place of every weight gradient, for small schedules.

F, I and B keep their order on each device; each W runs anywhere behind its I, those of one operation in the order
in which they are given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from builders.chains import chain_workload
from builders.orders import random_orders
from pipeplan.errors import InvalidPlanError
from pipeplan.workload.elements import Device
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import fits, peak_memory
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload

Orders = Sequence[Sequence[int]]


def kind(graph: TaskGraph, task: int) -> str:
    return graph.workload.operations[graph.operation_of[task]].kind


def length(graph: TaskGraph, orders: Orders) -> int:
    """The makespan in ns when every action starts as soon as it can."""
    starts = earliest_starts(graph, with_links(graph, orders))
    return max(map(sum, zip(starts, graph.durations, strict=True)))


def best_of_all(graph: TaskGraph, orders: Orders) -> int:
    """The shortest makespan over all places of W whose orders fit into memory."""
    found = math.inf
    for tried in itertools.product(*(list(_placings(graph, list(order))) for order in orders)):
        if fits(graph, tried):
            try:
                found = min(found, length(graph, tried))
            except InvalidPlanError:  # stages of several devices in different places
                continue
    assert found < math.inf
    return int(found)


def num_placings(graph: TaskGraph, orders: Orders) -> int:
    """How many combinations brute force tries."""
    return math.prod(sum(1 for _ in _placings(graph, list(order))) for order in orders)


def _placings(graph: TaskGraph, order: list[int]) -> Iterator[list[int]]:
    """The orders of one device that differ from ``order`` in the places of W alone."""
    others = [task for task in order if kind(graph, task) != "W"]
    queues = [
        [task for task in order if graph.operation_of[task] == item]
        for item in dict.fromkeys(graph.operation_of[task] for task in order if kind(graph, task) == "W")
    ]
    count = graph.workload.num_microbatches
    yield from _merged([], others, queues, count)


def _merged(done: list[int], others: list[int], queues: list[list[int]], count: int) -> Iterator[list[int]]:
    if not others and not any(queues):
        yield list(done)
        return
    if others:
        yield from _merged([*done, others[0]], others[1:], queues, count)
    for index, queue in enumerate(queues):
        if queue and queue[0] - count in done:  # I stands right before W among a stage's operations
            shorter = [*queues[:index], queue[1:], *queues[index + 1 :]]
            yield from _merged([*done, queue[0]], others, shorter, count)


def weights_at_once(graph: TaskGraph, orders: Orders) -> list[list[int]]:
    """Each W right behind its I."""
    count = graph.workload.num_microbatches
    return [
        [x for task in order if kind(graph, task) != "W" for x in _with_weight(graph, task, count)] for order in orders
    ]


def _with_weight(graph: TaskGraph, task: int, count: int) -> list[int]:
    return [task, task + count] if kind(graph, task) == "I" else [task]


def random_case(seed: int, *, memory: bool = False) -> tuple[TaskGraph, list[list[int]]]:
    """A small workload with costs at random, and orders of it with each W at once."""
    choose = Random(seed)
    devices = choose.choice([[(0,), (1,)], [(0,), (1,), (2,)], [(0,), (1,), (1,), (0,)], [(0, 1), (0,), (1,)]])
    num_devices = 1 + max(device for group in devices for device in group)
    count = choose.choice([2, 3]) if len(devices) < 4 else 2
    chain = chain_workload(
        num_devices,
        count,
        split=(1, 1),
        devices=devices,
        lag=choose.choice([0, 0, 1]),
        activation_bytes=2,
        weight_grad_bytes=choose.choice([0, 1, 2, 3]),
    )
    operations = tuple(replace(operation, duration_ns=choose.randint(1, 4)) for operation in chain.operations)
    graph = task_graph(replace(chain, operations=operations))
    orders = weights_at_once(graph, random_orders(graph, choose))
    return (with_room(graph, orders, choose.choice([0, 1, 2])) if memory else graph), orders


def with_room(graph: TaskGraph, orders: Orders, more: int) -> TaskGraph:
    """The same with so many bytes of memory more than the orders need, on each device."""
    peaks = [memory.peak_bytes + more for memory in peak_memory(graph, orders)]
    workload: Workload = replace(graph.workload, devices=tuple(Device(memory_bytes=peak) for peak in peaks))
    return task_graph(workload)
