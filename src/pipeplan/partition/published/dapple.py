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

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipeplan.errors import InfeasibleError
from pipeplan.partition.published.costs import FOREVER, Question
from pipeplan.partition.published.stages import PublishedPlan, PublishedStage

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
class _Part:
    """A stage: blocks begin .. end-1 and an option."""

    begin: int
    end: int
    option: int


@dataclass(slots=True)
class _Search:
    """What every range of blocks costs: [begin][end - begin - 1, option]."""

    question: Question
    loads: list[list[list[Load]]]
    most_later: list[list[list[int]]]

    @classmethod
    def of(cls, question: Question) -> _Search:
        count = len(question.names)
        loads, most_later = [], []
        for begin in range(count):
            members = np.tri(count, count, 0, dtype=np.bool_)[begin:] & (np.arange(count) >= begin)
            chosen = members.astype(np.int64)
            each = (chosen @ question.forwards, chosen @ question.backwards, question.waits(members))
            loads.append(
                [
                    [(int(f), int(b), int(w)) for f, b, w in zip(*row, strict=True)]
                    for row in zip(*(table.tolist() for table in each), strict=True)
                ]
            )
            most_later.append(question.price(members).most_later.tolist())
        return cls(question, loads, most_later)

    def load(self, part: _Part) -> Load:
        return self.loads[part.begin][part.end - part.begin - 1][part.option]

    def fits(self, part: _Part, later: int) -> bool:
        return self.most_later[part.begin][part.end - part.begin - 1][part.option] >= later

    def value(self, parts: tuple[_Part, ...]) -> int:
        return latency(tuple(self.load(part) for part in parts), self.question.num_microbatches)

    def whole(self, end: int, devices: int, suffix: tuple[_Part, ...], *, must_fit: bool) -> tuple[int, int]:
        """(latency, option) of the best first stage of all blocks before ``end`` on at most ``devices``."""
        return min(
            (
                (self.value((_Part(0, end, index), *suffix)), index)
                for index, option in enumerate(self.question.options)
                if option.replicas <= devices and (not must_fit or self.fits(_Part(0, end, index), len(suffix)))
            ),
            default=(FOREVER, 0),
        )


def dapple(question: Question) -> PublishedPlan:
    """Cut stages off the end, one after another, each time judged with all blocks before as one stage.

    As published: per (first block of what is cut off, devices it takes) only the best is kept, so the result is not
    always the least latency of all plans; for at most two stages it is.

    Raises:
        InfeasibleError: no plan that was looked at fits into memory.
    """
    search, count, devices = _Search.of(question), len(question.names), question.num_devices
    kept: dict[tuple[int, int], tuple[int, tuple[_Part, ...]]] = {(count, 0): (0, ())}
    best: tuple[int, tuple[_Part, ...]] = (FOREVER, ())
    for end in range(count, 0, -1):
        for used in range(devices):
            if (end, used) not in kept:
                continue
            suffix = kept[end, used][1]
            value, option = search.whole(end, devices - used, suffix, must_fit=True)
            if value < best[0]:
                best = (value, (_Part(0, end, option), *suffix))
            _extend(search, kept, end, used, suffix)
    if best[0] >= FOREVER:
        raise InfeasibleError(
            f"no plan that DAPPLE's planner looks at fits {devices} devices of {question.memory_bytes} bytes; raise "
            "--memory or --devices, or lower --microbatch-size"
        )
    stages = tuple(PublishedStage(question.names[p.begin : p.end], question.options[p.option]) for p in best[1])
    return PublishedPlan(stages, best[0])


def _extend(
    search: _Search,
    kept: dict[tuple[int, int], tuple[int, tuple[_Part, ...]]],
    end: int,
    used: int,
    suffix: tuple[_Part, ...],
) -> None:
    """Cut one more stage off before ``end``, in every way that leaves a block and a device for the first."""
    question = search.question
    for begin in range(1, end):
        for index, option in enumerate(question.options):
            state, part = (begin, used + option.replicas), _Part(begin, end, index)
            if state[1] >= question.num_devices or not search.fits(part, len(suffix)):
                continue
            value, _ = search.whole(begin, question.num_devices - state[1], (part, *suffix), must_fit=False)
            if state not in kept or value < kept[state][0]:
                kept[state] = (value, (part, *suffix))
