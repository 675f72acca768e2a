"""The master stage of 1F1B on a chain of stages (AutoPipe, III-B): the one whose pace the iteration has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pipeplan.simulator.metrics import Inputs, tasks_before
from pipeplan.workload.kinds import Role
from pipeplan.workload.task_graph import Orders, TaskGraph
from pipeplan.workload.workload import Workload


def master_stage(graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> int | None:
    """The stage with most steps of the critical path among those it runs in turn, one forward and one backward.

    Of several such paths the one nearest to the last stage counts, and of equal stages the last, as in the paper. None
    where stages are no chain, each on devices of its own, or run something else than 1F1B; or where no step of the path
    is in that phase. ``starts`` [task] are the earliest for these orders.
    """
    workload = graph.workload
    wanted = _orders_of_1f1b(graph, workload)
    if wanted is None:
        return None
    for order in graph.on_devices(orders):
        actions = [task for task in order if task < graph.num_actions]
        if actions and actions != wanted[workload.operations[graph.operation_of[actions[0]]].stage]:
            return None
    depths, count = workload.stage_depths, workload.num_microbatches
    passed: Counter[int] = Counter()
    for task in _path(graph, orders, starts):
        operation = workload.operations[graph.operation_of[task]]
        number, later = task - graph.offsets[graph.operation_of[task]], len(depths) - 1 - depths[operation.stage]
        if later <= number if operation.role is Role.FORWARD else number < count - later:
            passed[operation.stage] += 1
    return max(passed, key=lambda stage: (passed[stage], depths[stage]), default=None)


def _orders_of_1f1b(graph: TaskGraph, workload: Workload) -> list[list[int]] | None:
    """[stage] its actions in 1F1B's order; None where stages are no chain of one forward and one backward each."""
    devices = [device for stage in workload.stages for device in stage.devices]
    roles = {(operation.stage, operation.role): item for item, operation in enumerate(workload.operations)}
    depths, count = workload.stage_depths, workload.num_microbatches
    if (
        len(set(devices)) < len(devices)
        or sorted(depths) != list(range(len(workload.stages)))
        or set(roles) != {(s, role) for s in range(len(depths)) for role in (Role.FORWARD, Role.BACKWARD)}
        or not workload.is_uniform
        or workload.has_parts
        or workload.exchanges
        or any(stage.num_parted for stage in workload.stages)
    ):
        return None
    found = []
    for stage, depth in enumerate(depths):
        ahead = min(len(depths) - 1 - depth, count)
        forward, backward = (graph.offsets[roles[stage, role]] for role in (Role.FORWARD, Role.BACKWARD))
        order = [forward + number for number in range(ahead)]
        for number in range(count):
            order += [forward + ahead + number] * (ahead + number < count) + [backward + number]
        found.append(order)
    return found


def _path(graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> Iterator[int]:
    """The actions of the critical path from its end on; of things that end at once the one at the latest stage."""
    workload, inputs = graph.workload, Inputs(graph.workload)
    ends = [start + duration for start, duration in zip(starts, graph.durations, strict=True)]
    task = max(range(graph.num_actions), key=lambda each: (ends[each], -starts[each]))

    def depth(other: int) -> int:
        item = graph.operation_of[other]
        return workload.stage_depths[workload.operations[item].stage] if other < graph.num_actions else -1

    while True:
        if task < graph.num_actions:
            yield task
        waited = [other for other in tasks_before(graph, orders, starts, task) if ends[other] == starts[task]]
        waited += [other for other, lag in inputs.of(graph, task) if ends[other] + lag == starts[task]]
        if not waited or starts[task] == 0:
            return
        task = max(waited, key=depth)
