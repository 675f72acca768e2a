"""What occupies networks once an iteration, after the actions: sums of gradients, and gathering of parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeplan.graphs import connected_parts
from pipeplan.workload.elements import Stage, TiedState


@dataclass(frozen=True, slots=True)
class NetworkJob:
    """Something that occupies the networks of ``devices`` together, once an iteration, on behalf of ``stages``.

    It may begin ``ahead_ns`` [place in stages] before the last actions of these end that add to gradients. A sum is of
    all that the stages have, of their ``bucket`` with this number, or of the entry ``tied`` of what stages share.
    """

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    duration_ns: int
    ahead_ns: tuple[int, ...]
    bucket: int | None = None
    tied: int | None = None

    def ready(self, last_ns: Sequence[int]) -> int:
        """Ns from which on it may run, where the last actions of stages that add to gradients end at ``last_ns``."""
        return max(last_ns[stage] - ahead for stage, ahead in zip(self.stages, self.ahead_ns, strict=True))


def gradient_sums(stages: Sequence[Stage], tied: Sequence[TiedState]) -> tuple[NetworkJob, ...]:
    """The sums of gradients that take time: those of stages, by the first of them, then those of what is tied.

    Stages with some block in common are summed together, for as long as the one that takes longest says: in buckets
    where all of them have the same blocks in the same buckets. What is tied waits for every stage with the blocks and
    devices of those that are named: a round's micro-batches are such stages.
    """
    if not (any(stage.sync_ns for stage in stages) or any(each.sync_ns for each in tied)):
        return ()
    return tuple(each for each in every_sum(stages, tied) if each.duration_ns)


def every_sum(stages: Sequence[Stage], tied: Sequence[TiedState]) -> list[NetworkJob]:
    """The same with those that take no time, as where links are free, or where there is nothing to sum."""
    first_with: dict[str, int] = {}
    pairs = [(first_with.setdefault(block, n), n) for n, stage in enumerate(stages) for block in stage.blocks]
    together = sorted(sorted(part) for part in connected_parts(range(len(stages)), pairs))
    sums = [job for part in together for job in _sums_of(part, stages)]
    alike: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = defaultdict(list)
    for number, stage in enumerate(stages if tied else ()):
        alike[stage.blocks, stage.devices].append(number)
    for index, each in enumerate(tied):
        numbers = tuple(sorted({own for n in each.stages for own in alike[stages[n].blocks, stages[n].devices]}))
        devices = tuple(sorted(each.all_devices))
        sums.append(NetworkJob(numbers, devices, each.sync_ns, (0,) * len(numbers), tied=index))
    return sums


def _sums_of(part: Sequence[int], stages: Sequence[Stage]) -> list[NetworkJob]:
    """Those of stages that are summed together."""
    devices = tuple(sorted({device for number in part for device in stages[number].devices}))
    cuts = {(stages[n].blocks, tuple(each.blocks for each in stages[n].buckets)) for n in part}
    if len(cuts) > 1 or not stages[part[0]].buckets:
        return [NetworkJob(tuple(part), devices, max(stages[n].sync_ns for n in part), (0,) * len(part))]
    return [
        NetworkJob(
            tuple(part), devices, max(own.sync_ns for own in those), tuple(own.ahead_ns for own in those), number
        )
        for number, those in enumerate(zip(*(stages[n].buckets for n in part), strict=True))
    ]


def steps_of(stages: Iterable[Stage], num_devices: int) -> tuple[int, ...]:
    """[device] ns of the optimizer's steps of all its stages."""
    found = [0] * num_devices
    for stage in stages:
        for device in stage.devices if stage.step_ns else ():
            found[device] += stage.step_ns
    return tuple(found)


def gathers_of(stages: Iterable[Stage]) -> tuple[NetworkJob, ...]:
    """The gatherings of stages' parameters that take time."""
    return tuple(
        NetworkJob((n,), stage.devices, stage.gather_ns, (0,)) for n, stage in enumerate(stages) if stage.gather_ns
    )
