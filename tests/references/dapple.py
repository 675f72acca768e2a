"""DAPPLE's planner (Fan et al. 2021) stage by stage and plan by plan, as the paper has it: slow and plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product

Load = tuple[int, int, int]
"""Forward, backward and all-reduce of a stage, in ns."""

Stage = tuple[int, int, int, tuple[int, ...]]
"""First block, end, number of a way to run it, and its devices."""


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


def policies(machines: Sequence[Sequence[int]], taken: frozenset[int], need: int) -> Iterator[tuple[int, ...]]:
    """Devices by fresh first, append first and scatter first, as far as these have enough."""
    free = [[device for device in machine if device not in taken] for machine in machines]
    fresh = [own for own, machine in zip(free, machines, strict=True) if len(own) == len(machine)]
    used = [own for own, machine in zip(free, machines, strict=True) if len(own) < len(machine)]
    for able in (fresh, used):
        if sum(map(len, able)) >= need:
            yield tuple(device for machine in able for device in machine)[:need]
    spread = used if sum(map(len, used)) >= need else free
    in_turns = [(turn, place) for place, own in enumerate(spread) for turn in range(len(own))]
    yield tuple(sorted(spread[place][turn] for turn, place in sorted(in_turns)[:need]))


def plain_plan(
    num_blocks: int,
    machines: Sequence[Sequence[int]],
    num_microbatches: int,
    replicas: Sequence[int],
    loads: Callable[[Sequence[Stage]], list[Load]],
    fits: Callable[[Stage, int], bool],
) -> tuple[int, list[Stage]] | None:
    """The least latency of the plans that are looked at, and its stages; None where none of them fits.

    ``replicas`` [way]; ``loads`` are of stages with those of sending between them, which divide what there is evenly
    over their devices; ``fits`` says whether a stage does with so many stages after it.
    """
    everything = [device for machine in machines for device in machine]

    def completed(stages: Sequence[Stage], *, whole: bool = False) -> Iterator[tuple[int, list[Stage]]]:
        """With what is left as the last stage, on as many devices as it can have replicas, or on all of them."""
        taken = {device for stage in stages for device in stage[3]}
        left = tuple(device for device in everything if device not in taken)
        most = max((count for count in replicas if count <= len(left)), default=0)
        begin = stages[-1][1] if stages else 0
        for way, count in enumerate(replicas):
            if count == most:
                plan = [*stages, (begin, num_blocks, way, left if whole else left[:most])]
                yield plain_latency(loads(plan), num_microbatches), plan

    def state(stages: Sequence[Stage]) -> object:
        taken = {device for stage in stages for device in stage[3]}
        return stages[-1][1], sorted((len(machine), len(taken & set(machine))) for machine in machines)

    kept: list[tuple[int, list[Stage]]] = [(0, [])]
    plans = []
    for begin in range(num_blocks):
        for _, stages in [each for each in kept if (each[1][-1][1] if each[1] else 0) == begin]:
            plans += [
                (value, plan)
                for value, plan in completed(stages)
                if all(fits(stage, len(plan) - 1 - place) for place, stage in enumerate(plan))
            ]
            taken = frozenset(device for stage in stages for device in stage[3])
            for (way, count), end in product(enumerate(replicas), range(begin + 1, num_blocks)):
                if count >= len(everything) - len(taken):
                    continue
                for devices in dict.fromkeys(policies(machines, taken, count)):
                    longer = [*stages, (begin, end, way, devices)]
                    if not all(fits(stage, len(longer) - place) for place, stage in enumerate(longer)):
                        continue
                    value = min(value for value, _ in completed(longer, whole=True))
                    same = next((each for each in kept if each[1] and state(each[1]) == state(longer)), None)
                    if same is None:
                        kept.append((value, longer))
                    elif value < same[0]:
                        kept[kept.index(same)] = value, longer
    return min(plans, key=lambda plan: plan[0], default=None)
