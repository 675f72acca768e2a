"""Orders of a workload by hand. An *order* is, per device, the list of its compute actions as (operation id, number).

An operation's actions are numbered by their samples, which is by micro-batch unless some run in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from pipeplan.workload.action import operation_of
from pipeplan.workload.elements import Dependency, Hop, Stage
from pipeplan.workload.task_graph import TaskGraph
from pipeplan.workload.workload import Workload

Entry = tuple[str, int]
Orders = list[list[Entry]]
Held = tuple[str, range]  # what stands after stage and kind in the text, such as 3 or 0.1, and the samples


def actions_of(workload: Workload, id_: str) -> list[Held]:
    """The actions of an operation in the order of their numbers."""
    stage = workload.stages[operation_of(id_)[0]]
    count = workload.mini_batch // (stage.microbatch_size * workload.num_routes)
    return _held(workload, stage, range(count), num_parted(workload, id_))


def messages_of(workload: Workload, dependency: Dependency, hop: Hop) -> list[Held]:
    """The messages of a hop: one per micro-batch of its source that goes there, two where both ends run it in parts."""
    source = workload.stages[operation_of(dependency.source)[0]]
    parted = min(num_parted(workload, id_) for id_ in (dependency.source, dependency.target))
    count = workload.mini_batch // (source.microbatch_size * workload.num_routes)
    going = [m for m in range(count) if hop.first <= m % hop.every < hop.first + hop.run]
    return _held(workload, source, going, parted)


def _held(workload: Workload, stage: Stage, microbatches: Iterable[int], num_parted: int) -> list[Held]:
    size, found = stage.microbatch_size, []
    for m in microbatches:
        begin = (m * workload.num_routes + stage.route) * size
        if m < num_parted:
            found.append((f"{m}.0", range(begin, begin + size // 2)))
            found.append((f"{m}.1", range(begin + size // 2, begin + size)))
        else:
            found.append((str(m), range(begin, begin + size)))
    return found


def holders_of(workload: Workload, id_: str) -> dict[int, int]:
    """{sample: number of the operation's action that holds it}."""
    return {sample: n for n, (_, samples) in enumerate(actions_of(workload, id_)) for sample in samples}


def is_part(held: Held) -> bool:
    """Whether it is a part of a micro-batch."""
    return "." in held[0]


def num_parted(workload: Workload, id_: str) -> int:
    return workload.stages[operation_of(id_)[0]].num_parted if operation_of(id_)[1] == "F" else 0


def gpipe_orders(workload: Workload) -> Orders:
    """Operation after operation, each for all its micro-batches; valid for every workload."""
    return _by_key(workload, lambda position, first_sample: (position, first_sample))


def serial_orders(workload: Workload) -> Orders:
    """Micro-batch after micro-batch; valid where all stages have one micro-batch size."""
    return _by_key(workload, lambda position, first_sample: (first_sample, position))


def _by_key(workload: Workload, key: Callable[[int, int], tuple[int, int]]) -> Orders:
    found: list[list[tuple[tuple[int, int], Entry]]] = [[] for _ in workload.devices]
    for position, operation in enumerate(workload.operations):
        for number, (_, samples) in enumerate(actions_of(workload, operation.id)):
            for device in workload.stages[operation.stage].devices:
                found[device].append((key(position, samples[0]), (operation.id, number)))
    return [[entry for _, entry in sorted(order)] for order in found]


def random_orders(graph: TaskGraph, choose: Random) -> list[list[int]]:
    """Orders of devices and links that cannot block each other: tasks taken at random, after what they wait for."""
    waiting = list(graph.num_predecessors)
    ready = [task for task, count in enumerate(waiting) if count == 0]
    orders: list[list[int]] = [[] for _ in range(graph.workload.num_resources)]
    while ready:
        task = ready.pop(choose.randrange(len(ready)))
        for device in graph.devices_of(task):
            orders[device].append(task)
        for other, _ in graph.successors[task]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    return orders


def one_f_one_b(workload: Workload) -> Orders:
    """1F1B for a chain with stage s on device s: D-1-s forwards, then forward and backward in turn. W follows I."""
    split = any(operation.kind == "I" for operation in workload.operations)
    number, depth = workload.num_microbatches, len(workload.stages)
    orders: Orders = []
    for s in range(depth):
        ahead = min(depth - 1 - s, number)
        order: list[Entry] = [(f"{s}F", m) for m in range(ahead)]
        for m in range(number):
            if m + ahead < number:
                order.append((f"{s}F", m + ahead))
            order += [(f"{s}I", m), (f"{s}W", m)] if split else [(f"{s}B", m)]
        orders.append([entry for id_, m in order for entry in _entries_of(workload, id_, m)])
    return orders


def _entries_of(workload: Workload, id_: str, microbatch: int) -> list[Entry]:
    """The actions that run a micro-batch, or its parts."""
    names = [name for name, _ in actions_of(workload, id_)]
    return [(id_, number) for number, name in enumerate(names) if name.split(".")[0] == str(microbatch)]


def one_f_one_b_repetend(workload: Workload) -> dict[str, int]:
    """``first`` of the copy that 1F1B repeats: forwards run ahead by the stages still to come."""
    depth = len(workload.stages)
    return {
        operation.id: depth - 1 - operation.stage if operation.kind == "F" else 0 for operation in workload.operations
    }
