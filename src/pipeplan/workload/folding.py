"""Folding: devices that run alike programs are one, and every program says who plays it.

A folded workload has programs for devices. Each is played by equally many, an empty one by any number: the player in
place i of one exchanges messages only with those in place i of others, and whatever one player does all do. A stage's
devices are then those in place 0 of its programs, in the order of these, after them those in place 1, and so on. So a
stage with replicas has a program for each device of some of its replicas (:func:`of_place`); or all stages are split
alike, and each device of a stage runs the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import gcd
from typing import TypeVar

import numpy as np

from pipeplan.workload.elements import Hop, Players, Stage, TiedState

Device = int
Pair = tuple[int, int]


def stage_problem(stage: Stage, count: int, *, alike: bool) -> str | None:
    """Why a stage's programs cannot have ``count`` players each; ``alike``: all stages are split as this one is.

    ``stage`` has programs for devices.
    """
    size, width = len(stage.devices) * count, stage.shards * stage.context
    if stage.replicas % count == 0 and len(stage.devices) == width * stage.replicas // count:
        return None
    if alike and len(stage.devices) == 1 and size == width * stage.replicas:
        return None
    return (
        f"its {len(stage.devices)} programs are played by {count} devices each, which are no whole replicas of "
        f"{width} devices, nor are all stages split alike"
    )


def split_alike(stages: Sequence[Stage]) -> bool:
    """Whether all stages are split into equally many parts, and stand on equally many devices or programs."""
    return len({_split(stage) for stage in stages}) == 1


def _split(stage: Stage) -> Hashable:
    return len(stage.devices), stage.shards, stage.context, stage.replicas, stage.microbatch_size


def of_place(stage: Stage, count: int) -> Stage:
    """What the devices in one place of a stage's programs are for each other: a stage with fewer replicas.

    Where these are parts of one replica, each device alone.
    """
    if stage.replicas % count == 0 and len(stage.devices) == stage.shards * stage.context * stage.replicas // count:
        return replace(stage, replicas=stage.replicas // count, microbatch_size=stage.microbatch_size // count)
    return replace(stage, shards=1, context=1, replicas=1, microbatch_size=stage.microbatch_size // stage.replicas)


def ways_to_fold(stages: Sequence[Stage]) -> Iterator[int]:
    """How many players each program may have, most first, where stages stand on devices."""
    if any(stage.configurations or not stage.blocks for stage in stages):
        return
    replicas = gcd(*(stage.replicas for stage in stages))
    same = len({stage.microbatch_size for stage in stages}) == 1
    if split_alike(stages):
        yield len(stages[0].devices)
    counts = (count for count in range(replicas, 1, -1) if replicas % count == 0) if same else ()
    yield from (count for count in counts if not split_alike(stages) or count < len(stages[0].devices))


class Fold:
    """Which program each device plays, and in which place, where each that a stage is on has ``count`` players."""

    def __init__(self, players: Sequence[Players], count: int) -> None:
        self.players, self.count = tuple(players), count
        self.programs, self.places = dict[Device, int](), dict[Device, int]()
        for number, own in enumerate(players):
            for place, device in enumerate(own.devices):
                self.programs[device], self.places[device] = number, place

    @staticmethod
    def of(stages: Sequence[Stage], count: int, num_devices: int) -> Fold | None:
        """Fold stages on devices so; None where the same devices stand unlike in two, or in no regular steps.

        Devices without a stage play empty programs, as many each as stand in regular steps.
        """
        return _fold_of(tuple(dict.fromkeys(stage.devices for stage in stages)), count, num_devices)

    def stage(self, stage: Stage) -> Stage:
        """A stage on programs."""
        return replace(stage, devices=self.group(stage.devices))

    def group(self, devices: Sequence[Device]) -> tuple[int, ...]:
        """The programs of those of some devices that are in place 0, in their order."""
        return tuple(self.programs[device] for device in devices if self.places[device] == 0)

    def tied(self, entry: TiedState) -> TiedState | None:
        """What stages share, on programs; None where it is not all players of some that have it."""
        groups = tuple(map(self.group, entry.devices))
        if any(self.devices(own) != found for own, found in zip(groups, entry.devices, strict=True)):
            return None
        return replace(entry, devices=groups)

    def devices(self, programs: Sequence[int]) -> tuple[Device, ...]:
        """All players of some programs, place by place."""
        return devices_of(self.players, programs)

    def alike(self, pairs: Iterable[Pair], group_sizes: Sequence[int]) -> bool:
        """Whether both players of each place are in one group or not, as all others of two programs are.

        Group sizes are those of levels of links.
        """
        pairs = list(set(pairs))
        if not pairs:
            return True
        devices = {program: self.players[program].devices for program in {*chain.from_iterable(pairs)}}
        sources, targets = (np.array([devices[program] for program in ends]) for ends in zip(*pairs, strict=True))
        for size in group_sizes:
            together = sources // size == targets // size
            if (together.any(axis=1) != together.all(axis=1)).any():
                return False
        return True

    def in_place_0(self, stage: Stage) -> Stage:
        """What the devices in place 0 of a stage's programs are for each other, on devices."""
        devices = tuple(self.players[program].first for program in stage.devices)
        return replace(of_place(stage, self.count), devices=devices)

    def hop(self, hop: Hop) -> Hop:
        """A message between devices as one between their programs."""
        ends = self.programs[hop.source_device], self.programs[hop.target_device]
        return replace(hop, source_device=ends[0], target_device=ends[1])


@lru_cache(maxsize=32)
def _fold_of(stages: tuple[tuple[Device, ...], ...], count: int, num_devices: int) -> Fold | None:
    """``stages`` are their devices."""
    players, playing = list[Players | None](), set[Device]()
    for devices in stages:
        if not playing.isdisjoint(devices):
            return None
        playing.update(devices)
        each = len(devices) // count
        players += [Players.of(devices[program::each]) for program in range(each)]
    known = [each for each in players if each is not None]
    if len(known) < len(players):
        return None
    idle = _regular([device for device in range(num_devices) if device not in playing])
    return Fold(sorted([*known, *idle], key=lambda own: own.first), count)


def _regular(devices: Sequence[Device]) -> Iterator[Players]:
    """Ascending devices, as those that stand in regular steps: runs of neighbours, equally long and far apart."""
    runs = list[list[Device]]()
    for device in devices:
        if runs and runs[-1][-1] == device - 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    for length in {len(run) for run in runs}:
        begins = [run[0] for run in runs if len(run) == length]
        while begins:
            step = begins[1] - begins[0] if len(begins) > 1 else 0
            alike = next((n for n in range(1, len(begins)) if begins[n] - begins[n - 1] != step), len(begins))
            found = Players.of([begin + place for begin in begins[:alike] for place in range(length)])
            assert found is not None, "they stand in regular steps"
            yield found
            del begins[:alike]


def num_playing(players: Sequence[Players]) -> int:
    """Devices of all programs."""
    return sum(own.count for own in players)


def each_played(players: Sequence[Players], stages: Sequence[Stage]) -> int:
    """How many devices play each program that a stage is on; 1 where every device has its own."""
    return players[stages[0].devices[0]].count if players else 1


def devices_of(players: Sequence[Players], programs: Sequence[int]) -> tuple[Device, ...]:
    """All players of some programs, place by place: a stage's devices."""
    return tuple(chain.from_iterable(zip(*(players[each].devices for each in programs), strict=True)))


Said = TypeVar("Said")


def of_devices(players: Sequence[Players], said: Sequence[Said]) -> list[Said]:
    """[device] what is ``said`` [program]; without players each device has its own."""
    if not players:
        return [*said]
    found = [said[0]] * num_playing(players)
    for own, value in zip(players, said, strict=True):
        for run in own.runs:
            found[run.start : run.stop : run.step] = [value] * len(run)
    return found


def on_devices(hops: Iterable[Hop], players: Sequence[Players]) -> tuple[Hop, ...]:
    """Messages between programs as those of all their players."""
    between = [(hop, players[hop.source_device].devices, players[hop.target_device].devices) for hop in hops]
    return tuple(
        replace(hop, source_device=sources[place], target_device=targets[place])
        for place in range(len(between[0][1]) if between else 0)
        for hop, sources, targets in between
    )
