"""The master stage of 1F1B on a chain of stages (AutoPipe, III-B): the one whose pace the iteration has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from pipeplan.simulator.metrics import Waited
from pipeplan.workload.columns import IntArray
from pipeplan.workload.kinds import Role
from pipeplan.workload.task_graph import Orders, TaskGraph
from pipeplan.workload.workload import Workload


def master_stage(graph: TaskGraph, orders: Orders, starts: Sequence[int], waited: Waited | None = None) -> int | None:
    """The stage with most steps of the critical path among those it runs in turn, one forward and one backward.

    Of several such paths the one nearest to the last stage counts, and of equal stages the last, as in the paper. None
    where stages are no chain, each on devices of its own, or run something else than 1F1B; or where no step of the path
    is in that phase. ``starts`` [task] are the earliest for these orders. What tasks ``waited`` for may be known.
    """
    workload = graph.workload
    wanted = _orders_of_1f1b(graph, workload)
    if wanted is None:
        return None
    for actions in map(list, graph.on_devices(orders)):
        if actions and actions != wanted[workload.operations[graph.operation_of[actions[0]]].stage]:
            return None
    depths, count = workload.stage_depths, workload.num_microbatches
    path = _path(graph, waited or Waited.of(graph, orders, starts))
    items, operations = graph.items[path], workload.operations
    stages = np.array([operation.stage for operation in operations])[items]
    forward = np.array([operation.role is Role.FORWARD for operation in operations])[items]
    numbers, later = path - np.array(graph.offsets)[items], len(depths) - 1 - np.array(depths)[stages]
    passed = np.bincount(stages[np.where(forward, later <= numbers, numbers < count - later)], minlength=len(depths))
    return max(np.flatnonzero(passed).tolist(), key=lambda stage: (passed[stage], depths[stage]), default=None)


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
        steady = zip(range(forward + ahead, forward + count), range(backward, backward + count), strict=False)
        left = range(backward + count - ahead, backward + count)
        found.append([*range(forward, forward + ahead), *chain.from_iterable(steady), *left])
    return found


def _path(graph: TaskGraph, waited: Waited) -> IntArray:
    """The actions of the critical path from its end on; of things that end at once the one at the latest stage."""
    workload, actions = graph.workload, graph.num_actions
    last = np.flatnonzero(waited.ends[:actions] == waited.ends[:actions].max())
    task = int(last[np.argmin(waited.starts[last])])
    depths = [workload.stage_depths[operation.stage] for operation in workload.operations]
    depth = np.array([*depths, *[-1] * len(workload.transfers)])[graph.items]
    lines, inputs, pairs = waited.tight_lines, waited.tight_inputs, graph.pairs
    others = np.concatenate((waited.before[lines], pairs.sources[inputs]))
    tasks = np.concatenate((waited.behind[lines], pairs.targets[inputs]))
    order = np.lexsort((-np.arange(len(others)), depth[others]))  # what is entered last stays
    latest = np.full(len(depth), -1)
    latest[tasks[order]] = others[order]
    latest[waited.starts == 0] = -1
    known, path = latest.tolist(), list[int]()
    while task >= 0:
        path.append(task)
        task = known[task]
    found = np.array(path, np.int64)
    return found[found < actions]
