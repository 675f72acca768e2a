"""What follows the last actions of an iteration, by going over networks one moment at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.workload import Workload
from references.best_makespan import best_makespan

Job = tuple[int, int, frozenset[int]]
"""Ns at which it is ready, ns that it takes, its devices."""


def iteration_by_hand(workload: Workload, last_ends: Mapping[str, int], *, any_order: bool = False) -> int:
    """Ns of an iteration whose operations' last actions end then; with the best order of sums if ``any_order``.

    Then all of them may also be summed at once, and not in buckets.
    """
    devices = range(len(workload.devices))
    acted = [
        max((last_ends[each.id] for each in workload.operations if d in workload.stages[each.stage].devices), default=0)
        for d in devices
    ]
    jobs = _sums(workload, last_ends)
    by_readiness = sorted(range(len(jobs)), key=lambda n: (jobs[n][0], n))
    orders = permutations(range(len(jobs))) if any_order else [workload.sum_order or by_readiness]
    ended = min(_ended(workload, acted, [jobs[n] for n in order]) for order in orders)
    if not any_order or not any(stage.buckets for stage in workload.stages):
        return ended
    whole = replace(workload, stages=tuple(replace(stage, buckets=()) for stage in workload.stages))
    return min(ended, iteration_by_hand(whole, last_ends, any_order=True))


def best_iteration(problem: OneMicrobatch) -> int:
    """The least iteration in ns of every schedule of a tiny problem, whatever the order of its sums."""
    ids = [each.id for each in problem.workload.operations]

    def ended(ends: Sequence[int]) -> int:
        return iteration_by_hand(problem.workload, dict(zip(ids, ends, strict=False)), any_order=True)

    found = best_makespan(problem, value=ended)
    assert found is not None
    return found


def _sums(workload: Workload, last_ends: Mapping[str, int]) -> list[Job]:
    grads = {
        n: max((last_ends[id_] for id_ in (f"{n}B", f"{n}W") if id_ in last_ends), default=0)
        for n in range(len(workload.stages))
    }
    found: list[tuple[set[int], int, set[int]]] = []
    for n, stage in enumerate(workload.stages):
        joined = {n}, stage.sync_ns, set(stage.devices)
        for other in [
            each for each in found if any(set(workload.stages[m].blocks) & set(stage.blocks) for m in each[0])
        ]:
            found.remove(other)
            joined = other[0] | joined[0], max(other[1], joined[1]), other[2] | joined[2]
        found.append(joined)
    jobs: list[Job] = []
    for stages, ns, devices in sorted(found, key=lambda each: min(each[0])):
        buckets = [workload.stages[n].buckets for n in sorted(stages)]
        alike = len({(workload.stages[n].blocks, len(workload.stages[n].buckets)) for n in stages}) == 1
        if alike and buckets[0]:
            for those in zip(*buckets, strict=True):
                ready = max(grads[n] - each.ahead_ns for n, each in zip(sorted(stages), those, strict=True))
                jobs.append((ready, max(each.sync_ns for each in those), frozenset(devices)))
        else:
            jobs.append((max(grads[n] for n in stages), ns, frozenset(devices)))
    jobs += [(max(grads[n] for n in each.stages), each.sync_ns, each.all_devices) for each in workload.tied]
    return [job for job in jobs if job[1]]


def _ended(workload: Workload, acted: Sequence[int], sums: Sequence[Job]) -> int:
    free = _run(sums, [0] * len(acted))
    acted = [
        end + round(own.contention * sum(end > ns for ns in _summing(sums, device, len(acted))))
        for device, (end, own) in enumerate(zip(acted, workload.devices, strict=True))
    ]
    steps = [sum(stage.step_ns for stage in workload.stages if d in stage.devices) for d in range(len(acted))]
    stepped = [max(end, over) + step for end, over, step in zip(acted, free, steps, strict=True)]
    gathers = [
        (max(stepped[d] for d in stage.devices), stage.gather_ns, frozenset(stage.devices))
        for stage in workload.stages
        if stage.gather_ns
    ]
    return max(*stepped, *_run(sorted(gathers, key=lambda each: each[0]), free))


def _summing(sums: Sequence[Job], device: int, count: int) -> list[int]:
    """The ns in which a device's network sums, one by one."""
    found: list[int] = []
    for number, (_, takes, devices) in enumerate(sums):
        if device in devices:
            end = _run(sums[: number + 1], [0] * count)[device]
            found += range(end - takes, end)
    return found


def _run(jobs: Sequence[Job], free: Sequence[int]) -> list[int]:
    """[device] when its network has ended the jobs, each of which waits for those before it on its devices."""
    free = [*free]
    for ready, takes, devices in jobs:
        end = max([ready, *(free[d] for d in devices)]) + takes
        for d in devices:
            free[d] = end
    return free
