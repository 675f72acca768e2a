"""Which devices of a cluster each stage group stands on, so that links are busy for little time (LinkTime).

Groups are put along the devices in several orders and ways. The two best layouts are then made better by exchanges. An
exchange swaps two equally long runs of devices with all that stands on them: single devices, whole groups, whole units
such as nodes; each group looks around those it talks to. Where no exchange helps any more, a few random ones are made
and followed, and kept if that leads to something better (iterated local search). ``docs/algorithms/mapping.md`` has the
reasons, and how good it is.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pipeplan.errors import UsageError
from pipeplan.model import Cluster
from pipeplan.partition.mapping.layout import Change, Layout, exchanges
from pipeplan.partition.mapping.lines import Devices, lines
from pipeplan.partition.mapping.links import Links, Traffic
from pipeplan.partition.mapping.rooms import Rooms

__all__ = ["Search", "mapped"]

MOST_WORK = 400_000
"""A search ends after timing so many pairs of devices: about a second."""

NUM_STARTS = 2
"""So many layouts of groups along the devices are made better."""

NUM_KICKS = 12
"""So many times random exchanges may lead to nothing better before the search ends."""


def mapped(
    groups: Sequence[int],
    traffic: Traffic,
    cluster: Cluster,
    *,
    sync: Sequence[int] = (),
    needs: Sequence[int] = (),
) -> tuple[Devices, ...]:
    """The devices of each group, ascending, none in two groups, such that :class:`LinkTime` is small.

    ``groups[g]`` is the number of devices of group g; ``traffic[g, h]`` the bytes per iteration that g sends h, split
    evenly over the pairs of devices that share samples (device i of n works on the i-th n-th of them); ``sync[g]`` the
    bytes that are all-reduced inside g; ``needs[g]`` the bytes that each of its devices must hold. The result is never
    worse than the groups one after another on devices 0, 1, 2 ..., where memory allows that, and is this where nothing
    better is found. The same question has the same answer.

    Raises:
        UsageError: the lists do not fit together.
        InfeasibleError: there are too few devices, or too few with enough memory.
    """
    _check(groups, traffic, sync, needs)
    rooms = Rooms.of(groups, needs or [0] * len(groups), cluster)
    return Search(Links.of(groups, traffic, cluster, sync), rooms).best()


def _check(groups: Sequence[int], traffic: Traffic, sync: Sequence[int], needs: Sequence[int]) -> None:
    if any(size < 1 for size in groups):
        raise UsageError(f"group {[size < 1 for size in groups].index(True)} has no devices; give each 1 or more")
    for name, values in (("sync", sync), ("needs", needs)):
        if values and len(values) != len(groups):
            raise UsageError(f"{name} has {len(values)} values for {len(groups)} groups; give one for each, or none")
    for pair in traffic:
        if not all(0 <= group < len(groups) for group in pair):
            raise UsageError(f"traffic {pair} names a group that is not one of the {len(groups)}, numbered from 0")


class Search:
    """A search for a layout that keeps links busy for the least time."""

    def __init__(self, links: Links, rooms: Rooms) -> None:
        self.links, self.rooms = links, rooms
        self.least = sum(tie.least for tie in links.ties)
        self.left = MOST_WORK
        self.random = random.Random(0)

    def best(self) -> tuple[Devices, ...]:
        """The devices of the best layout found."""
        layouts = [Layout(self.links, self.rooms, line) for line in lines(self.links, self.rooms)]
        starts = sorted(layouts, key=lambda layout: (layout.time, layout.devices))[:NUM_STARTS]
        found = [self._followed(self._descended(start.copy(), range(len(start.devices)))) for start in starts]
        return _tidy(min([starts[0], *found], key=lambda layout: layout.time))

    def _ended(self, layout: Layout) -> bool:
        return self.left <= 0 or layout.time.total_ns <= self.least

    def _followed(self, layout: Layout) -> Layout:
        """The layout after random exchanges that led to better ones."""
        failed = 0
        while failed < NUM_KICKS and not self._ended(layout):
            other = layout.copy()
            self._descended(other, other.near(self._kick(other)))
            failed = 0 if other.time < layout.time else failed + 1
            layout = min(other, layout, key=lambda each: each.time)
        return layout

    def _kick(self, layout: Layout) -> set[int]:
        """Make up to three random exchanges; the groups that have moved."""
        moved: set[int] = set()
        for _ in range(self.random.randint(1, 3)):
            count = self.random.choice((1, self.random.choice(self.rooms.groups)))
            one, other = (self.random.randrange(len(layout.owner)) for _ in range(2))
            change = layout.change((one, other, count))
            if change is not None:
                layout.apply(change)
                moved |= change.devices.keys()
        return moved

    def _descended(self, layout: Layout, groups: Iterable[int]) -> Layout:
        """The layout after every exchange that helps, looking at these groups and at all near what changes."""
        waiting = dict.fromkeys(groups)
        while waiting and not self._ended(layout):
            group = next(iter(waiting))
            del waiting[group]
            change = self._best_change(layout, group)
            if change is not None:
                layout.apply(change)
                waiting.update(dict.fromkeys(layout.near(change.devices)))
        return layout

    def _best_change(self, layout: Layout, group: int) -> Change | None:
        """Of the exchanges that a group looks at the best, None where none helps."""
        best, time, seen = None, layout.time, set[tuple[int, int, int]]()
        for exchange in exchanges(layout, group):
            if exchange in seen:
                continue
            seen.add(exchange)
            change = layout.change(exchange)
            self.left -= 1 if change is None else sum(self.links.work[each] for each in change.devices)
            if change is not None and change.total <= time.total_ns and layout.time_after(change) < time:
                best, time = change, layout.time_after(change)
            if self.left <= 0:
                break
        return best


def _tidy(layout: Layout) -> tuple[Devices, ...]:
    """The same in every unit and memory, but there the groups in order on the first devices."""
    alike = defaultdict[tuple[int, float], list[int]](list)
    for device in range(len(layout.owner)):
        alike[layout.place(device)].append(device)
    left = {place: iter(devices) for place, devices in alike.items()}
    return tuple(tuple(sorted(next(left[layout.place(device)]) for device in own)) for own in layout.devices)
