"""DAPPLE's planner (Fan et al. 2021) stage by stage and plan by plan, as the paper has it: slow and plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, product

Load = tuple[int, int, int]
"""Forward, backward and all-reduce of a stage, in ns."""

Stage = tuple[int, int, int]
"""First block, end, and number of a way to run it."""


def plain_latency(stages: Sequence[Load], num_microbatches: int) -> int:
    """The pipeline latency along the pivot, which is looked for from the last stage on."""
    pivot, between = len(stages) - 1, 0
    for index in range(len(stages) - 2, -1, -1):
        both, steady = sum(stages[index][:2]), (num_microbatches - 1) * sum(stages[pivot][:2])
        takes_over = (num_microbatches - 1) * both > steady + between
        pivot, between = (index, 0) if takes_over else (pivot, between + both)
    backs = list(accumulate((stage[1] for stage in stages), initial=0))
    warmup = sum(stage[0] for stage in stages[: pivot + 1])
    ending = max(wait + backs[pivot + 1] - backs[index] for index, (_, _, wait) in enumerate(stages))
    return warmup + (num_microbatches - 1) * sum(stages[pivot][:2]) + ending


def plain_plan(
    num_blocks: int,
    num_devices: int,
    num_microbatches: int,
    replicas: Sequence[int],
    load: Callable[[int, int, int], Load],
    fits: Callable[[int, int, int, int], bool],
) -> tuple[int, list[Stage]] | None:
    """The least latency of the plans that are looked at, and its stages; None where none of them fits.

    ``replicas`` [way]; ``load`` is of (begin, end, way), ``fits`` of these and the stages after it.
    """

    def whole(end: int, devices: int, later: Sequence[Stage], *, must_fit: bool) -> tuple[int, int] | None:
        after = [load(*stage) for stage in later]
        values = [
            (plain_latency([load(0, end, way), *after], num_microbatches), way)
            for way, count in enumerate(replicas)
            if count <= devices and (not must_fit or fits(0, end, way, len(later)))
        ]
        return min(values, default=None)

    kept: dict[tuple[int, int], tuple[int, list[Stage]]] = {(num_blocks, 0): (0, [])}
    plans = []
    for end, used in product(range(num_blocks, 0, -1), range(num_devices)):
        if (end, used) not in kept:
            continue
        later = kept[end, used][1]
        if (first := whole(end, num_devices - used, later, must_fit=True)) is not None:
            plans.append((first[0], [(0, end, first[1]), *later]))
        for begin, (way, count) in product(range(1, end), enumerate(replicas)):
            longer, left = [(begin, end, way), *later], num_devices - used - count
            if left <= 0 or not fits(begin, end, way, len(later)):
                continue
            value = whole(begin, left, longer, must_fit=False)
            state = begin, used + count
            if value is not None and (state not in kept or value[0] < kept[state][0]):
                kept[state] = value[0], longer
    return min(plans, key=lambda plan: plan[0], default=None)
