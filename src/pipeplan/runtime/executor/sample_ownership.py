"""Which samples of the mini-batch each rank works on for each stage, and so has, and sends."""

from __future__ import annotations

import itertools

from pipeplan.files import Plan
from pipeplan.runtime.executor.message_graph import Message, hops_of
from pipeplan.workload.elements import Stage, slots_of
from pipeplan.workload.samples import replica_samples

__all__ = ["Numbers", "SampleOwnership"]

Numbers = tuple[int, ...]
"""Samples of the mini-batch by number, ascending: row i of a tensor is that of the i-th."""


class SampleOwnership:
    """Which samples each rank of a plan works on, has, and sends."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._hops = plan, hops_of(plan)
        self._num_parted = max(stage.num_parted for stage in plan.stages)
        self._all: dict[tuple[int, int], frozenset[int]] = {}
        self._held: dict[tuple[Message, int], frozenset[int]] = {}

    def forwards(self, stage: int, rank: int, microbatch: int, part: int | None = None) -> tuple[Numbers, ...]:
        """A rank's samples of a micro-batch, or of a part of it: those of each of the forwards that ran it."""
        parted = part is None and microbatch < self._plan.stages[stage].num_parted
        parts = (0, 1) if parted else (part,)
        return tuple(self.of(stage, rank, microbatch, each) for each in parts)

    def of(self, stage: int, rank: int, microbatch: int, part: int | None) -> Numbers:
        """The samples of an action that a rank works on, or of a whole micro-batch that may have run in parts."""
        group = self._plan.stages[stage]
        begin, end = self._samples(group, microbatch, part)
        replica = group.devices.index(rank) // group.shards
        if part is None and microbatch < self._num_parted:
            order = _half_by_half(begin, end)
            begin, end = replica_samples((0, len(order)), group.replicas, replica)
            return tuple(sorted(order[begin:end]))
        return tuple(range(*replica_samples((begin, end), group.replicas, replica)))

    def held(self, message: Message, rank: int) -> frozenset[int]:
        """Samples of a message's source that a rank has: made there, or sent there."""
        if (message, rank) not in self._held:
            makers = {source for carried, source, target in self._hops if (carried, target) == (message, rank)}
            makers |= {rank} & set(self._plan.stages[message.source].devices)
            self._held[message, rank] = frozenset().union(*(self._all_of(message.source, maker) for maker in makers))
        return self._held[message, rank]

    def sent(self, message: Message, ranks: tuple[int, int], microbatch: int, part: int | None) -> Numbers:
        """What a source rank has made of its stage's micro-batch or part, and the target rank works on."""
        needed = self._all_of(message.target, ranks[1])
        return tuple(sample for sample in self.of(message.source, ranks[0], microbatch, part) if sample in needed)

    def _all_of(self, stage: int, rank: int) -> frozenset[int]:
        """All samples of the mini-batch that a rank works on for a stage."""
        if (stage, rank) not in self._all:
            count = len(slots_of(self._plan.stages[stage], "B", self._plan.mini_batch, self._plan.num_routes))
            found = (sample for m in range(count) for sample in self.of(stage, rank, m, None))
            self._all[stage, rank] = frozenset(found)
        return self._all[stage, rank]

    def _samples(self, stage: Stage, microbatch: int, part: int | None) -> tuple[int, int]:
        slots = slots_of(stage, "B" if part is None else "F", self._plan.mini_batch, self._plan.num_routes)
        number = slots.number(microbatch, part)
        assert number is not None, "check accepts only actions that exist"
        return slots.samples(number)


def _half_by_half(begin: int, end: int) -> Numbers:
    """Samples of a micro-batch that some stage runs in parts, so ordered that neighbours are from both halves.

    Replicas share a whole micro-batch in this order: each then has its share of either half, in every stage.
    """
    middle = (begin + end) // 2
    return tuple(itertools.chain.from_iterable(zip(range(begin, middle), range(middle, end), strict=True)))
