"""Which samples of a mini-batch an action works on, and which of them each device of a stage holds.

Samples are numbered from 0. With ``num_routes`` routes, micro-batches go along them in turn: micro-batch m of a stage
on route r holds samples ``(m * num_routes + r) * size`` and on. The first ``num_parted`` forwards of a stage run in two
parts, the second half of the samples after the first.

Two actions of stages that are joined by a dependency depend on each other if they share a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

Range = tuple[int, int]
"""First sample, and the one after the last."""


def size_in_words(size: int, per_replica: tuple[int, int] | None = None) -> str:
    """Samples of a micro-batch, over all replicas and, with the least and most of them, in each.

    As ``16 samples``, ``16 samples, 4 per replica`` or ``16 samples, 4 to 8 per replica``.
    """
    words = f"{size} sample{'' if size == 1 else 's'}"
    if per_replica is None:
        return words
    least, most = per_replica
    return f"{words}, {least if least == most else f'{least} to {most}'} per replica"


@dataclass(frozen=True, slots=True)
class Slots:
    """The actions of one operation, or the messages of one hop, by the samples they hold.

    ``size`` samples per micro-batch, ``stride`` from one micro-batch's first sample to the next one's, the first at
    ``offset``, ``count`` micro-batches, of which the first ``num_parted`` are two actions each. Of every ``every``
    micro-batches only those from ``first`` on are meant, ``run`` in a row.
    """

    size: int
    stride: int
    offset: int
    count: int
    num_parted: int = 0
    every: int = 1
    run: int = 1
    first: int = 0

    @property
    def plain(self) -> bool:
        """Whether actions are micro-batches: all of them, and whole."""
        return self.run == self.every and not self.num_parted

    def __len__(self) -> int:
        return self._before(self.count) + self.num_parted

    def name(self, number: int) -> tuple[int, int | None]:
        """Micro-batch and part (0 or 1) of an action; no part where it runs the whole micro-batch."""
        if self.run == self.every and not self.num_parted:
            return number, None
        if number < 2 * self.num_parted:
            return number // 2, number % 2
        groups, place = divmod(number - self.num_parted, self.run)
        return self.first + groups * self.every + place, None

    def number(self, microbatch: int, part: int | None = None) -> int | None:
        """The action that runs a micro-batch, or a part of it: the inverse of :meth:`name`. None if there is none."""
        parted = microbatch < self.num_parted
        number = 2 * microbatch + (part or 0) if parted else self._before(microbatch) + self.num_parted
        return number if number < len(self) and self.name(number) == (microbatch, part) else None

    def text(self, number: int) -> str:
        """What follows stage and kind in the action's text: ``3``, or ``0.1`` for a part."""
        microbatch, part = self.name(number)
        return str(microbatch) if part is None else f"{microbatch}.{part}"

    def samples(self, number: int) -> Range:
        """The samples of an action."""
        if self.run == self.every and not self.num_parted:
            begin = self.offset + number * self.stride
            return begin, begin + self.size
        microbatch, part = self.name(number)
        begin = self.offset + microbatch * self.stride
        middle, end = begin + self.size // 2, begin + self.size
        return ((begin, end), (begin, middle), (middle, end))[0 if part is None else 1 + part]

    def sharing(self, samples: Range) -> range:
        """The actions that hold any of these samples."""
        first = max(0, (samples[0] - self.offset - self.size) // self.stride + 1)
        after = min(self.count, max(first, -(-(samples[1] - self.offset) // self.stride)))
        if self.run == self.every and not self.num_parted:
            return range(first, after)
        if first < self.num_parted:
            return self._sharing_parts(samples, first, after)
        return range(self._before(first) + self.num_parted, self._before(after) + self.num_parted)

    def _sharing_parts(self, samples: Range, first: int, after: int) -> range:
        """The same where some of the micro-batches from ``first`` on run in parts."""
        candidates = range(2 * first, after + min(after, self.num_parted))
        found = [n for n in candidates if self.samples(n)[0] < samples[1] and samples[0] < self.samples(n)[1]]
        return range(found[0], found[-1] + 1) if found else range(0)

    def _before(self, microbatch: int) -> int:
        """How many of the micro-batches before this one are meant."""
        if self.run == self.every:
            return max(0, microbatch)
        groups, rest = divmod(max(0, microbatch - self.first), self.every)
        return groups * self.run + min(rest, self.run)


@lru_cache(maxsize=64)
def texts_of(slots: Slots) -> tuple[str, ...]:
    """[action] what follows stage and kind in its text."""
    if slots.run == slots.every and not slots.num_parted:
        return tuple(map(str, range(slots.count)))
    return tuple(map(slots.text, range(len(slots))))


class Group(Protocol):
    """A stage's device group, as a placement or a plan has it."""

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices, replica after replica."""

    @property
    def shards(self) -> int:
        """Devices that split each block."""

    @property
    def replicas(self) -> int:
        """Groups that split the samples."""

    @property
    def context(self) -> int:
        """Parts of each sequence, each of which has ``shards`` neighbouring devices of a replica."""


def replica_samples(samples: Range, replicas: int, replica: int) -> Range:
    """A replica's share of an action's samples: neighbours, equally many each.

    Devices ``replica * width`` to ``(replica + 1) * width - 1`` of a stage are its replica number ``replica``; its
    width is ``shards * context``.
    """
    each = (samples[1] - samples[0]) // replicas
    return samples[0] + replica * each, samples[0] + (replica + 1) * each


def carried(
    source: Group, source_samples: Range, target: Group, target_samples: Range, *, in_slices: bool = False
) -> Iterator[tuple[int, int, Range]]:
    """(source device, target device, samples): what has to be sent for one action of the target of one of the source.

    A target device is sent what its replica works on and its own copy of the source, if it has one, did not make. Of
    source devices that hold the same, shard after shard sends in turn. Where sequences are shared, a device is sent
    its own part, by those that have the same; both stages share them alike.
    """
    copy_of = {device: index // source.shards for index, device in enumerate(source.devices)}
    first, each = source_samples[0], (source_samples[1] - source_samples[0]) // source.replicas
    for index, device in enumerate(target.devices):
        user, part = divmod(index // target.shards, target.context)
        needed = replica_samples(target_samples, target.replicas, user)
        own = copy_of.get(device)
        after = min(source.replicas, -(-(needed[1] - first) // each))
        for replica in range(max(0, (needed[0] - first) // each), after):
            begin, end = replica_samples(source_samples, source.replicas, replica)
            begin, end = max(begin, needed[0]), min(end, needed[1])
            maker = replica * source.context + part
            if maker != own and begin < end:
                shard = index % target.shards
                shard = shard * source.shards // target.shards if in_slices else shard % source.shards
                sender = source.devices[maker * source.shards + shard]
                yield sender, device, (begin, end)
