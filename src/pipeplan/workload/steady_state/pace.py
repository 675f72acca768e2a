"""Runs in phases, all forwards before all backwards, whose stages keep the pace of the slowest one.

A stage that is quicker than one after it runs ahead of it without end, and then nothing repeats. Where the first stages
of a phase begin a micro-batch only when the slowest of all stages is through with another, all run at its pace from the
first micro-batch on. The phase of a chain ends no later for that: its last micro-batch is through after its way through
all stages, and after the slowest has run all others. And less waits to be taken in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.search_constants import LOOPED_MORE, PACE_RAMP
from pipeplan.workload.kinds import Role
from pipeplan.workload.steady_state.loop import LoopedOrders, counts_of, looped
from pipeplan.workload.task_graph import Orders, TaskGraph, task_graph
from pipeplan.workload.workload import Workload


def at_own_pace(workload: Workload, before: Workload) -> Workload:
    """The same with paces of its own costs, as much slower than its slowest stages as they were ``before``."""
    phases = _phases(before)
    paces = []
    for own, part in zip(_parts(before, phases), _parts(workload, _phases(workload)), strict=True):
        known = max(before.operations[first].pace_ns or before.operations[first].duration_ns for first in own.firsts)
        paces.append(-(-part.pace_ns * max(known, own.pace_ns) // own.pace_ns))
    return _at_pace(workload, _parts(workload, _phases(workload)), paces)


def _parts(workload: Workload, phases: Sequence[int]) -> list[_PacedPhase]:
    return [_PacedPhase.of(workload, phases, number) for number in range(max(phases) + 1)]


def _at_pace(workload: Workload, parts: Sequence[_PacedPhase], paces_ns: Sequence[int]) -> Workload:
    """The workload in whose phases no first stage is quicker than at a pace."""
    operations = [*workload.operations]
    for part, pace in zip(parts, paces_ns, strict=True):
        for first in part.firsts:
            own = operations[first]
            operations[first] = replace(own, pace_ns=pace if pace > own.duration_ns else None)
    return replace(workload, operations=tuple(operations))


def _phases(workload: Workload) -> tuple[int, ...]:
    """[item] 0 of forwards and what they send, else 1."""
    own = [int(operation.role is not Role.FORWARD) for operation in workload.operations]
    return (*own, *(own[transfer.source] for transfer in workload.transfers))


def phases_of(graph: TaskGraph, orders: Orders) -> tuple[int, ...] | None:
    """[item] 0 of forwards and what they send, else 1, where no device runs a forward after anything else.

    None of others, of devices with several stages, whose phases are not two, and where micro-batches are not all alike.
    """
    workload = graph.workload
    devices = [device for stage in workload.stages for device in stage.devices]
    if len({*devices}) < len(devices) or not workload.is_uniform or counts_of(workload, 1) is None:
        return None
    phases = _phases(workload)
    for order in graph.on_devices(orders):
        numbers = [phases[graph.operation_of[task]] for task in order]
        if numbers != sorted(numbers):
            return None
    return phases


def paced_run(workload: Workload, phases: Sequence[int], most_written: int) -> LoopedOrders | None:
    """All micro-batches of a workload in phases, of which some are written, and a round of one of them repeats.

    ``phases`` [item] as :func:`phases_of` has them. So many micro-batches are written as are under way in a full
    pipeline, and a few. Where their entries would be more than ``most_written`` it is as many as these, at a slower
    pace. None where all of them are few.
    """
    parts = _parts(workload, phases)
    count = PACE_RAMP + max(-(-part.latency_ns // part.pace_ns) for part in parts)
    count = min(count, most_written // workload.entries)
    if count <= PACE_RAMP + 1 or count >= workload.num_microbatches:
        return None
    paces = [max(part.pace_ns, -(-part.latency_ns // (count - PACE_RAMP))) for part in parts]
    graph = task_graph(_at_pace(workload.with_microbatches(count), parts, paces))
    orders = [list[int]() for _ in workload.devices]
    for part in parts:
        here = [list[int]() for _ in orders]
        for x in part.operations:
            for device in workload.holders[x]:
                here[device].append(graph.offsets[x])
        for order, firsts in zip(orders, here, strict=True):
            order += [first + m for m in range(count) for first in firsts]
    rounds = phases[: len(workload.operations)]
    return looped(graph, orders, [1] * len(rounds), 1, workload.num_microbatches, LOOPED_MORE * graph.num_tasks, rounds)


@dataclass(frozen=True, slots=True)
class _PacedPhase:
    """Its ``operations``, those that come ``firsts`` in it, ns of its slowest device or link, and of a way through."""

    operations: list[int]
    firsts: list[int]
    pace_ns: int
    latency_ns: int

    @classmethod
    def of(cls, workload: Workload, phases: Sequence[int], number: int) -> _PacedPhase:
        """The phase of a number in ``phases`` [item]."""
        own = [item for item, phase in enumerate(phases) if phase == number]
        after = {target for source, target, _ in workload.edges if phases[source] == phases[target]}
        busy = [0] * workload.num_resources
        for item in own:
            for resource in workload.resources[item]:
                busy[resource] += workload.durations[item]
        ends = max(workload.heads[item] + workload.durations[item] for item in own)
        operations = [item for item in own if item < len(workload.operations)]
        firsts = [item for item in operations if item not in after]
        return cls(operations, firsts, max(busy), ends - min(workload.heads[item] for item in own))
