"""Groups on devices, and what exchanges of devices change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

from pipeplan.partition.mapping.lines import Devices
from pipeplan.partition.mapping.links import Links, LinkTime
from pipeplan.partition.mapping.rooms import Rooms

__all__ = ["Change", "Layout", "exchanges"]

Exchange = tuple[int, int, int]
"""First device of a run, first device of another one, and how many devices each has."""

SMALL = 16
"""Up to so many devices all places are looked at, not only those near groups that one talks to."""


@dataclass(frozen=True, slots=True)
class Change:
    """What an exchange leads to: the devices of some groups, the times of their ties, and the total time."""

    devices: dict[int, Devices]
    times: dict[int, tuple[int, int]]
    total: int


class Layout:
    """Groups on devices, and how long each tie keeps links busy."""

    def __init__(self, links: Links, rooms: Rooms, devices: Sequence[Devices]) -> None:
        self.links, self.rooms = links, rooms
        self.devices = list(devices)
        self.owner = [-1] * len(rooms.memory)
        self._own(range(len(devices)))
        self.times = [links.time(tie, devices[tie.first], devices[tie.second]) for tie in links.ties]
        self._add_up()

    def copy(self) -> Layout:
        """Another one, to be changed by itself."""
        other = copy(self)
        other.devices, other.owner, other.times = self.devices[:], self.owner[:], self.times[:]
        return other

    def change(self, exchange: Exchange) -> Change | None:
        """What an exchange leads to. None where runs overlap or end too late, memory is missing, or nothing changes."""
        moved = self._moved(*exchange)
        if not moved:
            return None
        devices = {
            group: tuple(sorted([to.get(device, device) for device in self.devices[group]]))
            for group, to in moved.items()
        }
        times = {}
        for index in {index for group in devices for index in self.links.around[group]}:
            tie = self.links.ties[index]
            first, second = (devices.get(group) or self.devices[group] for group in (tie.first, tie.second))
            times[index] = self.links.time(tie, first, second)
        total = self.time.total_ns + sum(time[0] - self.times[index][0] for index, time in times.items())
        return Change(devices, times, total)

    def _moved(self, one: int, other: int, count: int) -> dict[int, dict[int, int]] | None:
        """{group: {device: the one instead}} of an exchange."""
        if abs(one - other) < count or max(one, other) + count > len(self.owner):
            return None
        moved: dict[int, dict[int, int]] = defaultdict(dict)
        for source, target in ((one, other), (other, one)):
            for step in range(count):
                group = self.owner[source + step]
                if not self.rooms.fits(group, target + step):
                    return None
                if group >= 0 and group != self.owner[target + step]:
                    moved[group][source + step] = target + step
        return moved

    def time_after(self, change: Change) -> LinkTime:
        """Exact where the change is better than the layout, else no better than it."""
        if change.total == self.time.total_ns and not self.peaks <= change.times.keys():
            return self.time  # what is busiest stays
        busiest = max(busiest for _, busiest in map(change.times.get, range(len(self.times)), self.times))
        return LinkTime(change.total, busiest)

    def apply(self, change: Change) -> None:
        """Make a change."""
        for group in change.devices:
            for device in self.devices[group]:
                self.owner[device] = -1
        for group, devices in change.devices.items():
            self.devices[group] = devices
        self._own(change.devices)
        for index, time in change.times.items():
            self.times[index] = time
        self._add_up()

    def _add_up(self) -> None:
        self.time = LinkTime.of(self.times)
        self.peaks = {index for index, (_, busiest) in enumerate(self.times) if busiest == self.time.busiest_ns}

    def _own(self, groups: Iterable[int]) -> None:
        for group in groups:
            for device in self.devices[group]:
                self.owner[device] = group

    def place(self, device: int) -> tuple[int, float]:
        """Innermost unit and memory of a device: where they are equal, it makes no difference which device it is."""
        inner = self.links.sizes[0] if self.links.sizes else len(self.owner)
        return device // inner, self.rooms.memory[device]

    def unlike(self, devices: Iterable[int]) -> Iterable[int]:
        """One device of each place and group among these."""
        return {(self.place(device), self.owner[device]): device for device in devices}.values()

    def wanted(self, group: int) -> set[int]:
        """The devices of those that a group talks to on a slower level than it could, with its own."""
        late = (i for i in self.links.around[group] if self.times[i][0] > self.links.ties[i].least)
        ties = [self.links.ties[index] for index in late]
        return {device for tie in ties for each in (tie.first, tie.second) for device in self.devices[each]}

    def near(self, groups: Iterable[int]) -> list[int]:
        """Groups and those that they talk to."""
        ties = (self.links.ties[index] for group in groups for index in self.links.around[group])
        return sorted({*groups, *(group for tie in ties for group in (tie.first, tie.second))})


def exchanges(layout: Layout, group: int) -> Iterator[Exchange]:
    """Exchanges that may bring a group nearer to those it talks to on too slow a level."""
    own, near = layout.devices[group], layout.wanted(group)
    small = len(layout.owner) <= SMALL
    for inner, size in pairwise((1, *layout.links.sizes)):
        units = {device // size for device in near}
        if inner > 1 and not small:
            units -= {device // size for device in own}
        for unit in sorted(units):
            spots = range(unit * size, min((unit + 1) * size, len(layout.owner)))
            if inner == 1 or small:
                yield from ((one, other, 1) for one in layout.unlike(own) for other in layout.unlike(spots))
            if len(own) > 1 and own[-1] - own[0] < len(own):
                yield from ((own[0], other, len(own)) for other in spots[:: 1 if small else len(own)])
            if inner > 1:
                firsts = sorted({device // inner * inner for device in own})
                yield from ((one, other, inner) for one in firsts for other in spots[::inner])
