"""Lower bounds that a replay can state by itself: work and dependencies alone, without memory or search."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.workload.workload import Workload

__all__ = ["makespan_bound"]


def makespan_bound(workload: Workload) -> int:
    """Least makespan in ns of any order: a micro-batch's longest way, and per device or link head + work + tail.

    A device begins no earlier than the first of its operations can be reached, works all its micro-batches, and
    after its last action at least the shortest way out of its operations remains. A link does the same with messages.
    """
    durations = [min(whole, part or whole) for whole, part in zip(workload.durations, _parts(workload), strict=True)]
    heads, tails = _heads_and_tails(workload, durations)
    best = max(map(sum, zip(heads, durations, tails, strict=True)))
    for resource in range(workload.num_resources):
        here = [item for item, resources in enumerate(workload.resources) if resource in resources]
        if here:
            work = sum(map(workload.work_of, here))
            best = max(best, min(heads[item] for item in here) + work + min(tails[item] for item in here))
    return best


def _parts(workload: Workload) -> list[int]:
    """[item] ns of a part of a micro-batch, 0 where none runs in parts."""
    return [
        part if slots.num_parted else 0 for slots, part in zip(workload.slots, workload.part_durations, strict=True)
    ]


def _heads_and_tails(workload: Workload, durations: Sequence[int]) -> tuple[list[int], list[int]]:
    """Longest way in ns to the start, and from the end, of each item of one micro-batch [item].

    Where a dependency counts, it is on the way to its target if no action of that needs nothing, and on the way from
    its source if all actions of that are needed.
    """
    heads, tails = [0] * len(durations), [0] * len(durations)
    edges = sorted(workload.edges, key=lambda edge: workload.rank(edge[0]))
    for source, target, lag in edges:
        if min(workload.needs.get((source, target), (1,))) == 0:
            continue
        lag = workload.part_lags.get((source, target), lag)
        heads[target] = max(heads[target], heads[source] + durations[source] + lag)
    for source, target, lag in reversed(edges):
        all_needed = len(workload.slots[source])
        if max(workload.needs.get((source, target), (all_needed,))) < all_needed:
            continue
        lag = workload.part_lags.get((source, target), lag)
        tails[source] = max(tails[source], lag + durations[target] + tails[target])
    return heads, tails
