"""DAPPLE's planner (Fan et al. 2021): contiguous stages whose pipeline latency with early backwards is least.

The latency of a plan for M micro-batches is counted along its *pivot* stage Q, the one that bounds its steady phase:
the way of the first micro-batch down to it, M - 1 times its forward and backward, and the way of the last one back up,
until the last stage's gradients are summed:

    sum of F of stages 0 .. Q + (M - 1)(F_Q + B_Q) + max over s of (all-reduce of s + sum of B of stages s .. Q)

where for stages after the pivot the sum is negative: they end before it, by B of the stages between. The published
planner also chooses places for devices in machines and counts sending as stages of its own; here devices are all
alike, and sending is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipeplan.costs import UNLIMITED
from pipeplan.partition.baselines.bottleneck import StageTable, for_each_size
from pipeplan.partition.problem import Partition, PartitionProblem, Way

__all__ = ["Load", "dapple", "latency"]

Load = tuple[int, int, int]
"""Of a stage: forward and backward of a micro-batch, and the gradients' all-reduce, in ns."""


def latency(stages: tuple[Load, ...], num_microbatches: int) -> int:
    """DAPPLE's pipeline latency of stages, in ns."""
    pivot = pivot_of(stages, num_microbatches)
    forward, backward, _ = stages[pivot]
    backs = list(accumulate((stage[1] for stage in stages), initial=0))
    warmup = sum(stage[0] for stage in stages[: pivot + 1])
    ending = max(wait + backs[pivot + 1] - backs[index] for index, (_, _, wait) in enumerate(stages))
    return warmup + (num_microbatches - 1) * (forward + backward) + ending


def pivot_of(stages: tuple[Load, ...], num_microbatches: int) -> int:
    """The stage whose steady phase bounds the pipeline.

    From the last stage towards the first, a stage takes over if its steady phase is longer than that of the pivot
    with what lies between them.
    """
    pivot, between = len(stages) - 1, 0
    for index in range(len(stages) - 2, -1, -1):
        forward, backward, _ = stages[index]
        steady = (num_microbatches - 1) * (stages[pivot][0] + stages[pivot][1])
        if (num_microbatches - 1) * (forward + backward) > steady + between:
            pivot, between = index, 0
        else:
            between += forward + backward
    return pivot


@dataclass(frozen=True, slots=True)
class _DappleStage:
    """A stage: blocks begin .. end-1 and a way, by number."""

    begin: int
    end: int
    way: int


Suffix = tuple[_DappleStage, ...]


@dataclass(frozen=True, slots=True)
class _DappleSearch:
    """Plans for one micro-batch size; ``loads`` and ``room`` [begin][end][way] of every range of blocks.

    ``kept`` is, by (first block of what was cut off, devices it takes), the best of it with its latency.
    """

    num_blocks: int
    num_devices: int
    num_microbatches: int
    ways: tuple[Way, ...]
    loads: list[list[list[Load]]]
    room: list[list[list[int]]]
    kept: dict[tuple[int, int], tuple[int, Suffix]]

    @classmethod
    def of(cls, problem: PartitionProblem, ways: Sequence[Way], order: Sequence[str]) -> _DappleSearch:
        sums, rows, count = problem.chain(order), [way.row for way in ways], len(order)
        stages = StageTable.of_chain(problem, ways, order)
        forward = (sums.forward[:, stages.ends] - sums.forward[:, stages.begins])[rows]
        each = (forward, sums.time(stages.begins, stages.ends)[rows] - forward, stages.waits, stages.room)
        table = np.zeros((count + 1, count + 1, len(ways), len(each)), dtype=np.int64)
        table[stages.begins, stages.ends] = np.stack(each).T
        loads = [[[(f, b, w) for f, b, w, _ in of] for of in row] for row in table.tolist()]
        number = problem.mini_batch // ways[0].microbatch_size
        kept: dict[tuple[int, int], tuple[int, Suffix]] = {(count, 0): (0, ())}
        return cls(count, problem.num_devices, number, tuple(ways), loads, table[..., 3].tolist(), kept)

    def best(self) -> tuple[int, Suffix]:
        """The least latency of the plans looked at that fit, and its stages."""
        best: tuple[int, Suffix] = (UNLIMITED, ())
        for end in range(self.num_blocks, 0, -1):
            for used in range(self.num_devices):
                if (end, used) in self.kept:
                    suffix = self.kept[end, used][1]
                    value, way = self._whole(end, self.num_devices - used, suffix, must_fit=True)
                    best = min(best, (value, (_DappleStage(0, end, way), *suffix)), key=lambda plan: plan[0])
                    self._extend(end, used, suffix)
        return best

    def _extend(self, end: int, used: int, suffix: Suffix) -> None:
        """Cut one more stage off before ``end``, in every way that leaves a block and a device for the first."""
        for begin in range(1, end):
            for index, way in enumerate(self.ways):
                state, part = (begin, used + way.replicas), _DappleStage(begin, end, index)
                if state[1] >= self.num_devices or not self._fits(part, len(suffix)):
                    continue
                value, _ = self._whole(begin, self.num_devices - state[1], (part, *suffix), must_fit=False)
                if state not in self.kept or value < self.kept[state][0]:
                    self.kept[state] = (value, (part, *suffix))

    def _whole(self, end: int, devices: int, suffix: Suffix, *, must_fit: bool) -> tuple[int, int]:
        """(latency, way) of the best first stage of all blocks before ``end`` on at most ``devices``."""
        later = tuple(self.loads[part.begin][part.end][part.way] for part in suffix)
        return min(
            (
                (latency((self.loads[0][end][index], *later), self.num_microbatches), index)
                for index, way in enumerate(self.ways)
                if way.replicas <= devices and (not must_fit or self._fits(_DappleStage(0, end, index), len(suffix)))
            ),
            default=(UNLIMITED, 0),
        )

    def _fits(self, part: _DappleStage, later: int) -> bool:
        return self.room[part.begin][part.end][part.way] >= min(self.num_microbatches, later + 1)


def dapple(problem: PartitionProblem) -> Iterator[Partition]:
    """Cut stages off the end, one after another, each time judged with all blocks before as one stage; for each size.

    As published: per (first block of what is cut off, devices it takes) only the best is kept, so the result is not
    always the least latency of all plans; for at most two stages it is.

    Raises:
        InfeasibleError: no plan that was looked at fits into memory.
    """
    order = problem.order

    def planned(ways: Sequence[Way]) -> Partition | None:
        value, parts = _DappleSearch.of(problem, ways, order).best()
        if value >= UNLIMITED:
            return None
        stages = [(order[part.begin : part.end], ways[part.way]) for part in parts]
        return Partition(problem.placed(stages), value)

    return for_each_size(problem, planned, "no plan that DAPPLE's planner looks at fits")
