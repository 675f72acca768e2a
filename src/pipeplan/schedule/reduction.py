"""A workload reduced to what a search has to look at: fewer devices, micro-batches that are all alike.

Devices that run the same stages do the same at the same time: each such *group* is one device to a search. Its memory
is the least of its devices', and of the messages between two groups only the slowest counts.

A *round* is the least number of samples, whole micro-batches of the plan, after which all stages begin one together.
What a stage runs in a round becomes as many stages as it has micro-batches there, on the same devices, so that rounds
are to a search what micro-batches of one size are. Parameters are held by the first of them. Messages take their time
but no link.

Nothing is taken away that a schedule could use, so what is proved about the reduced workload holds for the workload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipeplan.errors import UsageError
from pipeplan.workload.elements import Dependency, Device, Hop, Stage
from pipeplan.workload.kinds import MemoryBytes
from pipeplan.workload.samples import Slots
from pipeplan.workload.task_graph import Orders
from pipeplan.workload.workload import Workload

__all__ = ["Reduction", "device_groups"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A workload and what it was reduced to.

    ``groups`` [device of the workload] is the device of ``reduced`` that stands for it. ``copies`` [operation of the
    workload] is how many micro-batches it has in a round, ``firsts`` [operation] the number of the first of them among
    the operations of ``reduced``.
    """

    workload: Workload
    reduced: Workload
    groups: tuple[int, ...]
    copies: tuple[int, ...]
    firsts: tuple[int, ...]

    @classmethod
    def of(cls, workload: Workload) -> Reduction | None:
        """Reduce a workload; None where that changes nothing.

        Raises:
            UsageError: it has forwards in parts, which is what becomes of a schedule, not what one is searched for.
        """
        if any(stage.num_parted for stage in workload.stages):
            raise UsageError("a schedule is searched for whole micro-batches; leave out num_parted of the stages")
        groups = device_groups(workload)
        num_groups = len(set(groups))
        folded = workload if num_groups == len(groups) else _folded(workload, groups)
        ones = (1,) * len(workload.operations)
        if workload.is_uniform:
            firsts = tuple(range(len(ones) + 1))
            return None if folded is workload else cls(workload, folded, groups, ones, firsts)
        round_size = math.lcm(workload.microbatch_size, *(slots.stride for slots in workload.slots))
        copies = tuple(round_size // slots.stride for slots in workload.slots[: len(ones)])
        expanded = _in_rounds(folded, round_size)
        return cls(workload, expanded, groups, copies, tuple(accumulate(copies, initial=0)))

    @property
    def microbatches_per_round(self) -> int:
        """How many of the workload's own micro-batches one of the reduced workload's is."""
        return self.reduced.microbatch_size // self.workload.microbatch_size

    def to_reduced(self, orders: Orders) -> list[list[int]]:
        """Orders of the workload's devices as those of the reduced workload's."""
        where = self._tasks()
        members = [self.groups.index(group) for group in range(len(self.reduced.devices))]
        return [[where[task] for task in orders[device]] for device in members]

    def from_reduced(self, orders: Orders) -> list[list[int]]:
        """Orders of the reduced workload's devices as those of the workload's."""
        back = {reduced: task for task, reduced in enumerate(self._tasks())}
        return [[back[task] for task in orders[group]] for group in self.groups]

    def _tasks(self) -> list[int]:
        """[task of the workload] the task of the reduced workload that it is."""
        count = self.reduced.num_microbatches
        return [
            (first + m % copies) * count + m // copies
            for first, copies in zip(self.firsts, self.copies, strict=False)
            for m in range(count * copies)
        ]


def device_groups(workload: Workload) -> tuple[int, ...]:
    """[device] the number of its group: devices with the same stages have the same."""
    own: list[list[int]] = [[] for _ in workload.devices]
    for index, stage in enumerate(workload.stages):
        for device in stage.devices:
            own[device].append(index)
    numbers: dict[tuple[int, ...], int] = {}
    return tuple(numbers.setdefault(tuple(stages), len(numbers)) for stages in own)


def _folded(workload: Workload, groups: Sequence[int]) -> Workload:
    """One device for each group."""
    memory: list[list[int]] = [[] for _ in set(groups)]
    for group, device in zip(groups, workload.devices, strict=True):
        memory[group] += [] if device.memory_bytes is None else [device.memory_bytes]
    return replace(
        workload,
        devices=tuple(Device(memory_bytes=min(limits, default=None)) for limits in memory),
        stages=tuple(
            replace(stage, devices=tuple(sorted({groups[device] for device in stage.devices})))
            for stage in workload.stages
        ),
        dependencies=tuple(_folded_dependency(dependency, groups) for dependency in workload.dependencies),
    )


def _folded_dependency(dependency: Dependency, groups: Sequence[int]) -> Dependency:
    """Between two groups the slowest message; inside one it takes no link."""
    slowest: dict[tuple[int, int], Hop] = {}
    for hop in dependency.hops:
        ends = groups[hop.source_device], groups[hop.target_device]
        if ends not in slowest or slowest[ends].duration_ns < hop.duration_ns:
            slowest[ends] = hop
    hops = tuple(
        replace(_over_free_link(hop) if ends[0] == ends[1] else hop, source_device=ends[0], target_device=ends[1])
        for ends, hop in slowest.items()
    )
    return replace(dependency, hops=hops)


def _in_rounds(workload: Workload, round_size: int) -> Workload:
    """As many stages for each as it has micro-batches in a round."""
    per_stage = [round_size // (stage.microbatch_size * workload.num_routes) for stage in workload.stages]
    firsts = [0, *accumulate(per_stage)]
    return replace(
        workload,
        num_microbatches=workload.mini_batch // round_size,
        microbatch_size=round_size,
        num_routes=1,
        stages=tuple(
            _copy(stage, round_size, index)
            for stage, count in zip(workload.stages, per_stage, strict=True)
            for index in range(count)
        ),
        operations=tuple(
            replace(operation, stage=firsts[operation.stage] + index)
            for operation in workload.operations
            for index in range(per_stage[operation.stage])
        ),
        dependencies=_dependencies(workload, round_size, firsts),
    )


def _copy(stage: Stage, round_size: int, index: int) -> Stage:
    """A stage for one of its micro-batches in a round; the first has its parameters."""
    copy = replace(stage, microbatch_size=round_size, route=0)
    if index == 0:
        return copy
    return replace(copy.with_state(MemoryBytes()), sync_ns=0)


def _dependencies(workload: Workload, round_size: int, stage_firsts: Sequence[int]) -> tuple[Dependency, ...]:
    """Between micro-batches of a round that share samples."""
    position = {operation.id: index for index, operation in enumerate(workload.operations)}
    found: list[Dependency] = []
    for dependency in workload.dependencies:
        source, target = position[dependency.source], position[dependency.target]
        own, others = (_in_round(workload.slots[end], round_size) for end in (source, target))
        hops = tuple(_over_free_link(hop) for hop in dependency.hops)
        found += [
            Dependency(
                source=_id(workload, source, stage_firsts, index),
                target=_id(workload, target, stage_firsts, other),
                hops=hops,
            )
            for index in range(len(own))
            for other in others.sharing(own.samples(index))
        ]
    return tuple(found)


def _in_round(slots: Slots, round_size: int) -> Slots:
    return replace(slots, count=round_size // slots.stride)


def _id(workload: Workload, operation: int, stage_firsts: Sequence[int], index: int) -> str:
    found = workload.operations[operation]
    return f"{stage_firsts[found.stage] + index}{found.kind}"


def _over_free_link(hop: Hop) -> Hop:
    """The message without the link: of its micro-batches none has to wait for another."""
    return replace(hop, latency_ns=hop.duration_ns, occupancy_ns=0, every=1, run=1, first=0)
