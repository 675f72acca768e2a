"""Orders in which leading forwards run in two parts (AutoPipe III-C), and the same with whole micro-batches.

A repetend is one of whole micro-batches, after all parts, so what is said and done about repetition goes by way of
the whole orders and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeplan.workload.elements import Repetend
from pipeplan.workload.engine import with_links
from pipeplan.workload.steady_state.loop import LoopCut
from pipeplan.workload.steady_state.rate import CutOrders, steady_state
from pipeplan.workload.steady_state.repetend import find_repetend
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload


def num_sliced(workload: Workload) -> int:
    """How many micro-batches have a forward that runs in parts."""
    return max(stage.num_parted for stage in workload.stages)


def parts_words(workload: Workload) -> str:
    """Which forwards run in parts, to be said after micro-batches: ``, the first 3 in 2 parts``; none are nothing."""
    count = num_sliced(workload)
    return f", the first{f' {count}' if count > 1 else ''} in 2 parts" if count else ""


def without_parts(workload: Workload) -> Workload:
    """The same with whole micro-batches."""
    if not any(stage.num_parted for stage in workload.stages) and all(x.part_ns is None for x in workload.operations):
        return workload
    return replace(
        workload,
        stages=tuple(replace(stage, num_parted=0) for stage in workload.stages),
        operations=tuple(replace(operation, part_ns=None) for operation in workload.operations),
    )


def with_parts(workload: Workload, parted: Workload) -> Workload:
    """A workload of whole micro-batches with the parts of another one like it."""
    return replace(workload, stages=parted.stages, operations=parted.operations)


def whole(graph: TaskGraph, orders: Orders) -> tuple[TaskGraph, list[list[int]]]:
    """The graph and the orders with whole micro-batches in place of their first parts; links are first come.

    A workload without parts stays as it is.
    """
    if not num_sliced(graph.workload):
        return graph, [list(order) for order in orders]
    replaced = task_graph(without_parts(graph.workload))
    found = []
    for order in graph.on_devices(orders):
        named = [(graph.operation_of[task], *_name(graph, task)) for task in order]
        found.append([replaced.offsets[item] + microbatch for item, microbatch, part in named if part != 1])
    return replaced, with_links(replaced, found)


def in_parts(orders: Orders, graph: TaskGraph) -> list[list[int]]:
    """Orders with whole micro-batches as tasks of a graph with parts, one part after the other; links first come."""
    replaced = task_graph(without_parts(graph.workload))
    found = []
    for order in graph.on_devices(orders):
        tasks: list[int] = []
        for task in order:
            item = replaced.operation_of[task]
            tasks += _tasks(graph, item, task - replaced.offsets[item])
        found.append(tasks)
    return with_links(graph, found)


def parts_before(workload: Workload, device: int) -> int:
    """By how many actions a device's order with parts is longer than that with whole micro-batches."""
    return sum(stage.num_parted for stage in workload.stages if device in stage.devices)


def parts_are_before(graph: TaskGraph, orders: Orders, repetend: Repetend) -> bool:
    """Whether every part runs before the repetend of its device, which is found in the whole orders."""
    counts = [
        repetend.first[operation.id] + slots.num_parted
        for operation, slots in zip(graph.workload.operations, graph.workload.slots, strict=False)  # messages are last
    ]
    after: list[int] = []
    for order in graph.on_devices(orders):
        after += order[sum(counts[item] for item in {graph.operation_of[task] for task in order}) :]
    return all(_name(graph, task)[1] is None for task in after)


def repetend_of(graph: TaskGraph, orders: Orders, *, repeated: bool = False) -> Repetend | None:
    """The repetend of a schedule, where micro-batches are all alike after those that run in parts.

    With ``repeated`` it is one that the orders themselves repeat.

    None where actions exchange state: what repeats is then the actions and their exchanges, in a loop or not at all.
    """
    if graph.workload.exchanges:
        return None
    replaced, whole_orders = whole(graph, orders)
    if not replaced.workload.is_uniform:
        return None
    found = find_repetend(replaced, whole_orders, earliest_starts(replaced, whole_orders), repeated=repeated)
    return found if found is not None and parts_are_before(graph, orders, found) else None


def repetend_at(workload: Workload, orders: Orders, begins: Sequence[int], unroll: int) -> Repetend | None:
    """The repetend of micro-batches ``begins`` [operation] and the next, so many in all; None if it takes turns.

    Raises:
        InvalidPlanError: the orders do not contain such a copy.
    """
    first = dict(zip((operation.id for operation in workload.operations), begins, strict=True))
    cut = CutOrders.of(workload, orders, first, unroll)
    steady = steady_state(workload, cut.copies, cut.begins, unroll)
    if steady is None or steady[0] > 1:
        return None
    return Repetend(unroll=unroll, repetend_ns=steady[1], first=first)


def repetend_of_loop(workload: Workload, loop: LoopCut) -> Repetend | None:
    """The only round of a loop, which repeats, as a repetend; None where micro-batches are not all alike."""
    if len(loop.moments) > 1 or workload.exchanges or not without_parts(workload).is_uniform:
        return None
    each = zip(workload.operations, loop.begins, workload.slots, strict=False)  # messages are last
    first = {operation.id: begin - slots.num_parted for operation, begin, slots in each}
    return Repetend(unroll=loop.microbatches, repetend_ns=loop.round_ns, first=first)


def _name(graph: TaskGraph, task: int) -> tuple[int, int | None]:
    item = graph.operation_of[task]
    return graph.workload.slots[item].name(task - graph.offsets[item])


def _tasks(graph: TaskGraph, item: int, microbatch: int) -> Sequence[int]:
    """The actions that run a micro-batch of an operation."""
    slots, offset = graph.workload.slots[item], graph.offsets[item]
    if microbatch < slots.num_parted:
        return (offset + 2 * microbatch, offset + 2 * microbatch + 1)
    return (offset + microbatch + slots.num_parted,)
