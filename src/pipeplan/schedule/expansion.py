"""Micro-batches of different sizes and routes as rounds that are all alike.

A *round* is the least number of samples after which all stages begin a micro-batch together again. What a stage runs
in a round becomes as many stages as it has micro-batches there, on the same devices, so that rounds are to a search
what micro-batches of one size are. Parameters are held by the first of them. Messages take their time but no link:
with that, what is proved about the rounds holds for the workload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipeplan.errors import UsageError
from pipeplan.model.plan import Dependency, Hop, Stage
from pipeplan.model.samples import Slots
from pipeplan.model.workload import Workload
from pipeplan.simulate.timing import Orders

__all__ = ["Expansion"]


@dataclass(frozen=True, slots=True)
class Expansion:
    """A workload and the same in rounds.

    ``copies`` [operation of the workload] is how many micro-batches it has in a round, ``firsts`` [operation] the
    number of the first of them among the operations of ``rounds``.
    """

    workload: Workload
    rounds: Workload
    copies: tuple[int, ...]
    firsts: tuple[int, ...]

    @classmethod
    def of(cls, workload: Workload) -> Expansion:
        """Write a workload in rounds.

        Raises:
            UsageError: it has forwards in parts, which is what becomes of a schedule, not what one is searched for.
        """
        if any(stage.num_parted for stage in workload.stages):
            raise UsageError("a schedule is searched for whole micro-batches; leave out num_parted of the stages")
        round_size = math.lcm(*(slots.stride for slots in workload.slots))
        per_stage = [round_size // (stage.microbatch_size * workload.num_routes) for stage in workload.stages]
        copies = tuple(per_stage[operation.stage] for operation in workload.operations)
        stage_firsts = [0, *accumulate(per_stage)]
        expanded = replace(
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
                operation.model_copy(update={"stage": stage_firsts[operation.stage] + index})
                for operation, count in zip(workload.operations, copies, strict=True)
                for index in range(count)
            ),
            dependencies=_dependencies(workload, round_size, stage_firsts),
        )
        return cls(workload, expanded, copies, tuple(accumulate(copies, initial=0)))

    @property
    def microbatches_per_round(self) -> int:
        """How many of the workload's own micro-batches a round has."""
        return self.rounds.microbatch_size // self.workload.microbatch_size

    def to_rounds(self, orders: Orders) -> list[list[int]]:
        """Orders of the workload's devices as those of the rounds."""
        where = self._tasks()
        return [[where[task] for task in order] for order in orders[: len(self.workload.devices)]]

    def from_rounds(self, orders: Orders) -> list[list[int]]:
        """Orders of the rounds as those of the workload's devices."""
        back = {rounds: task for task, rounds in enumerate(self._tasks())}
        return [[back[task] for task in order] for order in orders[: len(self.workload.devices)]]

    def _tasks(self) -> list[int]:
        """[task of the workload] the task of the rounds that it is."""
        count = self.rounds.num_microbatches
        return [
            (first + m % copies) * count + m // copies
            for first, copies in zip(self.firsts, self.copies, strict=False)
            for m in range(count * copies)
        ]


def _copy(stage: Stage, round_size: int, index: int) -> Stage:
    """A stage for one of its micro-batches in a round; the first has its parameters."""
    kept = {} if index == 0 else {"parameter_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0, "sync_ns": 0}
    return stage.model_copy(update={"microbatch_size": round_size, "route": 0, **kept})


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
    update = {"latency_ns": hop.duration_ns, "occupancy_ns": 0, "every": 1, "run": 1, "first": 0}
    return hop.model_copy(update=update)
