"""Lower bounds that a replay can state by itself: work and dependencies alone, without memory or search."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.model.workload import Workload

__all__ = ["makespan_bound"]


def makespan_bound(workload: Workload) -> int:
    """Least makespan in ns of any order: a micro-batch's longest way, and per device head + work + tail.

    A device begins no earlier than the first of its operations can be reached, works all its micro-batches, and
    after its last action at least the shortest way out of its operations remains.
    """
    durations = [operation.duration_ns for operation in workload.operations]
    heads, tails = _heads_and_tails(workload, durations)
    best = max(map(sum, zip(heads, durations, tails, strict=True)))
    for device in range(len(workload.devices)):
        here = [o for o, op in enumerate(workload.operations) if device in workload.stages[op.stage].devices]
        if here:
            work = sum(durations[o] * workload.num_instances(workload.operations[o]) for o in here)
            best = max(best, min(heads[o] for o in here) + work + min(tails[o] for o in here))
    return best


def _heads_and_tails(workload: Workload, durations: Sequence[int]) -> tuple[list[int], list[int]]:
    """Longest way in ns to the start, and from the end, of each operation of one micro-batch [operation]."""
    position = {operation.id: index for index, operation in enumerate(workload.operations)}
    edges = [(position[d.source], position[d.target], d.lag_ns) for d in workload.dependencies]
    heads, tails = [0] * len(durations), [0] * len(durations)
    for source, target, lag in sorted(edges, key=lambda edge: edge[1]):  # dependencies point forward
        heads[target] = max(heads[target], heads[source] + durations[source] + lag)
    for source, target, lag in sorted(edges, key=lambda edge: -edge[0]):
        tails[source] = max(tails[source], lag + durations[target] + tails[target])
    return heads, tails
