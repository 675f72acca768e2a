"""Orders by name and by number, and when their actions start."""

from __future__ import annotations

from collections.abc import Sequence

from builders.chains import chain_workload
from builders.orders import Entry, Orders
from pipeplan.workload.elements import Repetend
from pipeplan.workload.steady_state.repetend import find_repetend
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload


def numbered(graph: TaskGraph, orders: Orders) -> list[list[int]]:
    position = {operation.id: index for index, operation in enumerate(graph.workload.operations)}
    return [[graph.offsets[position[id_]] + m for id_, m in order] for order in orders]


def named(graph: TaskGraph, orders: Sequence[Sequence[int]]) -> Orders:
    return [[entry_of(graph, task) for task in order] for order in orders]


def entry_of(graph: TaskGraph, task: int) -> Entry:
    index = graph.operation_of[task]
    return graph.workload.operations[index].id, task - graph.offsets[index]


def timed(workload: Workload, orders: Orders) -> tuple[TaskGraph, list[list[int]], list[int]]:
    graph = task_graph(workload)
    tasks = numbered(graph, orders)
    return graph, tasks, earliest_starts(graph, tasks)


def found_in(workload: Workload, orders: Orders, max_unroll: int | None = None) -> Repetend | None:
    return find_repetend(*timed(workload, orders), max_unroll)


def interleaved(num_devices: int, chunks: int, num_microbatches: int, lag: int = 0) -> tuple[Workload, Orders]:
    """Megatron's interleaved 1F1B on a circular placement; forward 1, backward 2."""
    workload = chain_workload(
        num_devices,
        num_microbatches,
        forward=1,
        backward=2,
        lag=lag,
        devices=[(s % num_devices,) for s in range(num_devices * chunks)],
    )
    group, total = num_devices * chunks, num_microbatches * chunks
    orders = []
    for d in range(num_devices):
        forwards, backwards = [], []
        for k in range(total):
            block, rest = divmod(k, group)
            chunk, m = rest // num_devices, block * num_devices + rest % num_devices
            forwards.append((f"{chunk * num_devices + d}F", m))
            backwards.append((f"{(chunks - 1 - chunk) * num_devices + d}B", m))
        ahead = min(total, (num_devices - d - 1) * 2 + (chunks - 1) * num_devices)
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[total - ahead :])
    return workload, orders
