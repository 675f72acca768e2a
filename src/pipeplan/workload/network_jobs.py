"""What occupies networks once an iteration, after the actions: sums of gradients, and gathering of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeplan.graphs import connected_parts
from pipeplan.workload.elements import Stage, TiedState


@dataclass(frozen=True, slots=True)
class NetworkJob:
    """Something that occupies the networks of ``devices`` together, once an iteration, on behalf of ``stages``."""

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    duration_ns: int


def gradient_sums(stages: Sequence[Stage], tied: Sequence[TiedState]) -> tuple[NetworkJob, ...]:
    """The sums of gradients that take time: those of stages, by the first of them, then those of what is tied.

    Stages with some block in common are summed together, for as long as the one that takes longest says.
    """
    if not (any(stage.sync_ns for stage in stages) or any(each.sync_ns for each in tied)):
        return ()
    first_with: dict[str, int] = {}
    pairs = [(first_with.setdefault(block, n), n) for n, stage in enumerate(stages) for block in stage.blocks]
    together = sorted(sorted(part) for part in connected_parts(range(len(stages)), pairs))
    sums = [
        NetworkJob(
            tuple(part),
            tuple(sorted({device for number in part for device in stages[number].devices})),
            max(stages[number].sync_ns for number in part),
        )
        for part in together
    ]
    sums += [
        NetworkJob(tuple(sorted(set(each.stages))), tuple(sorted(each.all_devices)), each.sync_ns) for each in tied
    ]
    return tuple(each for each in sums if each.duration_ns)


def steps_of(stages: Iterable[Stage], num_devices: int) -> tuple[int, ...]:
    """[device] ns of the optimizer's steps of all its stages."""
    found = [0] * num_devices
    for stage in stages:
        for device in stage.devices if stage.step_ns else ():
            found[device] += stage.step_ns
    return tuple(found)


def gathers_of(stages: Iterable[Stage]) -> tuple[NetworkJob, ...]:
    """The gatherings of stages' parameters that take time."""
    return tuple(NetworkJob((n,), stage.devices, stage.gather_ns) for n, stage in enumerate(stages) if stage.gather_ns)
