"""Which devices of a cluster each stage group runs on, so that links are busy for as short as possible (LinkTime).

Groups are put along the devices in several orders and ways. The two best layouts are then made better by exchanges of
two equally long runs of devices with all that stands on them: single devices, whole groups, whole units such as nodes.
Where none helps any more, a few random ones are made and followed, and kept if that leads to something better (iterated
local search). ``docs/algorithms/mapping.md`` has the reasons, and how good it is.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from pipeplan.errors import UsageError
from pipeplan.files import Cluster, PlacedStage, Placement
from pipeplan.search_constants import KICK_EXCHANGES, MOST_TIMED, NUM_KICKS, NUM_STARTS, SMALL

if TYPE_CHECKING:
    import networkx as nx
from collections.abc import Mapping

from pipeplan.costs.communication import all_reduce_time, transfer_time
from pipeplan.costs.trees import slowest_share
from pipeplan.errors import InfeasibleError
from pipeplan.time_limit import checked, checkpoint


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Sizes and needs of groups, and the memory of each device."""

    groups: tuple[int, ...]
    needs: tuple[int, ...]
    memory: tuple[float, ...]

    @staticmethod
    def of(groups: Sequence[int], needs: Sequence[int], cluster: Cluster) -> GroupMemory:
        """Whoever needs most chooses first: others may take what it leaves, so nobody can choose wrongly."""
        memory = tuple(math.inf if size is None else size for size in cluster.usable_bytes)
        if sum(groups) > len(memory):
            raise InfeasibleError(
                f"{len(groups)} groups take {sum(groups)} devices together, but cluster {cluster.name!r} has "
                f"{len(memory)}; add devices, or take fewer in each group"
            )
        largest, taken = sorted(memory, reverse=True), 0
        for group in sorted(range(len(groups)), key=lambda group: -needs[group]):
            taken += groups[group]
            if largest[taken - 1] < needs[group]:
                raise InfeasibleError(_shortage(group, groups, needs, largest, taken))
        return GroupMemory(tuple(groups), tuple(needs), memory)

    def fits(self, group: int, device: int) -> bool:
        """Whether a device has the memory that a group, or none (-1), needs."""
        return group < 0 or self.needs[group] <= self.memory[device]


def _shortage(group: int, groups: Sequence[int], needs: Sequence[int], largest: Sequence[float], taken: int) -> str:
    enough = sum(size >= needs[group] for size in largest)
    return (
        f"group {group} needs {needs[group]:,} bytes on each of its {groups[group]} devices; groups that need as much "
        f"or more take {taken} devices together, but only {enough} have that much memory, and the next has "
        f"{largest[taken - 1]:,.0f} bytes: {needs[group] - largest[taken - 1]:,.0f} are missing. Split the stage over "
        f"more devices or blocks, recompute activations, or take smaller micro-batches"
    )


Traffic = Mapping[tuple[int, int], int]
"""{(group, group): bytes per iteration that the first sends the second}."""


@dataclass(frozen=True, slots=True, order=True)
class LinkTime:
    """How long links are busy in one iteration: all together, and the busiest. The least in total comes first.

    A link leads from one device to another. What two devices send each other counts as one message of all its bytes,
    latency included; an all-reduce keeps a link of each of its devices busy as long as it takes.
    """

    total_ns: int
    busiest_ns: int

    @staticmethod
    def of(times: Sequence[tuple[int, int]]) -> LinkTime:
        """The time of all links, from the total and busiest times of subsets."""
        return LinkTime(sum([total for total, _ in times]), max([busiest for _, busiest in times], default=0))


def link_time(
    devices: Sequence[Sequence[int]], traffic: Traffic, cluster: Cluster, *, sync: Sequence[int] = ()
) -> LinkTime:
    """How long links are busy if each group is on its ``devices``, ascending; the rest as for :func:`mapped`."""
    links = GroupLinks.of([len(each) for each in devices], traffic, cluster, sync)
    return LinkTime.of([links.time(tie, devices[tie.first], devices[tie.second]) for tie in links.ties])


@dataclass(frozen=True, slots=True)
class Tie:
    """What one group and another, or itself, keep links busy with, by the level that their pairs of devices talk on."""

    first: int
    second: int
    pairs: tuple[tuple[int, int], ...]
    totals: tuple[int, ...]
    busiest: tuple[int, ...]

    @property
    def least(self) -> int:
        """Time in ns where all pairs talk on the quickest level."""
        return len(self.pairs) * min(self.totals)

    @property
    def most(self) -> int:
        """Time in ns where all pairs talk on the slowest level."""
        return len(self.pairs) * max(self.totals)


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """All ties; those around each group, and the pairs of devices in them; devices in one unit of each level."""

    ties: tuple[Tie, ...]
    around: tuple[tuple[int, ...], ...]
    work: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(groups: Sequence[int], traffic: Traffic, cluster: Cluster, sync: Sequence[int]) -> GroupLinks:
        """What groups of these sizes keep busy; ties of groups that are alike are priced once."""
        couples = sorted({(min(pair), max(pair)) for pair, size in traffic.items() if size and pair[0] != pair[1]})
        known = dict[tuple[int, ...], Tie]()
        ties = list[Tie]()
        for g, h in couples:
            talk = groups[g], groups[h], traffic.get((g, h), 0), traffic.get((h, g), 0)
            if talk not in known:
                known[talk] = _talk(g, h, groups, traffic, cluster)
            ties.append(replace(known[talk], first=g, second=h))
        for g, size in enumerate(sync):
            if not size or groups[g] == 1:
                continue
            if (groups[g], size) not in known:
                known[groups[g], size] = _sum(g, groups[g], size, cluster)
            ties.append(replace(known[groups[g], size], first=g, second=g))
        around: list[list[int]] = [[] for _ in groups]
        for index, tie in enumerate(ties):
            for group in {tie.first, tie.second}:
                around[group].append(index)
        work = tuple(sum(len(ties[index].pairs) for index in indices) for indices in around)
        sizes = tuple(level.group_size for level in cluster.levels)
        return GroupLinks(tuple(ties), tuple(map(tuple, around)), work, sizes)

    def level(self, source: int, target: int) -> int:
        """The number of the level on which two devices communicate; also 0 where there are no levels."""
        for number, size in enumerate(self.sizes):
            if source // size == target // size:
                return number
        return 0

    def time(self, tie: Tie, first: Sequence[int], second: Sequence[int]) -> tuple[int, int]:
        """Time in ns of all links of a tie, and of its busiest, with its groups on these devices."""
        levels = [self.level(first[i], second[j]) for i, j in tie.pairs]
        return sum([tie.totals[level] for level in levels]), max([tie.busiest[level] for level in levels])


def _talk(g: int, h: int, groups: Sequence[int], traffic: Traffic, cluster: Cluster) -> Tie:
    """What g and h send each other, per pair of devices."""
    pairs = _sharing(groups[g], groups[h])
    sizes = [-(-traffic.get(way, 0) // len(pairs)) for way in ((g, h), (h, g))]
    times = [[_message_ns(cluster, last, size) if size else 0 for size in sizes] for last in _ends(cluster)]
    return Tie(g, h, pairs, tuple(map(sum, times)), tuple(map(max, times)))


def _message_ns(cluster: Cluster, last: int, size: int) -> int:
    """A message between devices that far apart; in a tree as where every device sends over the uplinks between."""
    latency, occupancy = transfer_time(cluster, 0, last, size)
    level = cluster.level_between(0, last)
    return latency + (occupancy if level is None else math.ceil(occupancy * slowest_share(cluster, level)))


def _sum(g: int, devices: int, size: int, cluster: Cluster) -> Tie:
    """An all-reduce inside g: its first and last device decide on which level, and each device keeps a link busy."""
    times = [all_reduce_time(cluster, [*range(devices - 1), last], size) for last in _ends(cluster)]
    return Tie(g, g, ((0, devices - 1),), tuple(devices * time for time in times), tuple(times))


def _sharing(first: int, second: int) -> tuple[tuple[int, int], ...]:
    """Pairs of devices of two groups of these sizes that work on some of the same samples."""
    return tuple((i, j) for i in range(first) for j in range(i * second // first, -(-(i + 1) * second // first)))


def _ends(cluster: Cluster) -> list[int]:
    """For each level the last device that device 0 talks to on it; device 0 itself where there are no levels."""
    return [level.group_size - 1 for level in cluster.levels] or [0]


Devices = tuple[int, ...]


def neighbours(cluster: Cluster | None, num_devices: int, size: int) -> list[Devices]:
    """Groups of ``size`` devices, as many as there are, each inside the smallest unit of a cluster that can hold it.

    Devices that are left over in a unit are in none: groups of 3 in nodes of 8 leave two of each node idle.
    """
    return list(_neighbours(_unit_for(cluster, num_devices, size), num_devices, size))


@lru_cache(maxsize=32)
def _neighbours(unit: int, num_devices: int, size: int) -> tuple[Devices, ...]:
    """The same in units of so many devices."""
    return tuple(
        tuple(range(first, first + size))
        for begin in range(0, num_devices, unit)
        for first in range(begin, min(begin + unit, num_devices) - size + 1, size)
    )


def num_neighbours(cluster: Cluster | None, num_devices: int, size: int) -> int:
    """How many these are."""
    unit = _unit_for(cluster, num_devices, size)
    return num_devices // unit * (unit // size) + num_devices % unit // size


def _unit_for(cluster: Cluster | None, num_devices: int, size: int) -> int:
    sizes = [level.group_size for level in cluster.levels] if cluster is not None else []
    return next((each for each in sizes if each >= size), num_devices)


Way = Callable[[Sequence[int], Sequence[int]], list[Devices]]
"""(sizes of groups, free devices) -> the devices of each group, both in order."""


def lines(links: GroupLinks, space: GroupMemory) -> set[tuple[Devices, ...]]:
    """Groups along the devices in several orders and ways, and simply one after another where they have memory so."""
    plain, followed = list(range(len(space.groups))), _followed(links, len(space.groups))
    orders = [plain, followed, _gathered(links, space)]
    orders += [_halved(order, _graph(links), space, links.sizes) for order in (plain, followed)]
    ways: list[Way] = [_close, partial(_whole, links.sizes), _dealt]
    found = {_line(order, space, way) for order in orders for way in ways}
    naive = tuple(_close(space.groups, range(len(space.memory))))
    return found | {naive} if all(space.fits(g, device) for g, own in enumerate(naive) for device in own) else found


def _followed(links: GroupLinks, num_groups: int) -> list[int]:
    """Depth first from the first group, along the busiest edges."""
    order: dict[int, None] = {}
    for start in range(num_groups):
        stack = [start]
        while stack:
            group = stack.pop()
            if group not in order:
                order[group] = None
                ties = sorted((links.ties[index] for index in links.around[group]), key=lambda tie: tie.most)
                stack += [tie.first + tie.second - group for tie in ties]
    return list(order)


def _gathered(links: GroupLinks, space: GroupMemory) -> list[int]:
    """Groups joined over the ties that gain most, while what is joined fits a unit; innermost units first."""
    part = {group: [group] for group in range(len(space.groups))}
    ties = sorted(links.ties, key=lambda tie: tie.least - tie.most)
    for size in links.sizes:
        for tie in checked(ties):
            one, other = part[tie.first], part[tie.second]
            if one is not other and sum(space.groups[group] for group in one + other) <= size:
                one.extend(other)
                part.update((group, one) for group in other)
    return [group for head, members in part.items() if head == members[0] for group in members]


def _graph(links: GroupLinks) -> nx.Graph:
    """Groups, and what each two gain if they talk on the quickest level instead of the slowest."""
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(range(len(links.around)))
    couples = (tie for tie in links.ties if tie.first != tie.second)
    graph.add_weighted_edges_from((tie.first, tie.second, tie.most - tie.least) for tie in couples)
    return graph


def _halved(order: Sequence[int], graph: nx.Graph, space: GroupMemory, sizes: Sequence[int]) -> list[int]:
    """Groups cut in two where little is lost, and each part again: Kernighan and Lin (1970), from the order's middle.

    The middle is between whole units of the outermost level that has several of them.
    """
    from networkx.algorithms.community import kernighan_lin_bisection

    checkpoint()
    if len(order) < 3:
        return list(order)
    counts = list(accumulate(space.groups[group] for group in order))
    unit = max((size for size in sizes if size < counts[-1]), default=1)
    before = max(1, counts[-1] // (2 * unit)) * unit
    middle = min(bisect_left(counts, before) + 1, len(order) - 1)
    halves = set(order[:middle]), set(order[middle:])
    one, _ = kernighan_lin_bisection(graph.subgraph(order), halves, seed=0)
    parts = [group for group in order if group in one], [group for group in order if group not in one]
    return [group for part in parts for group in _halved(part, graph, space, sizes)]


def _line(order: Sequence[int], space: GroupMemory, way: Way) -> tuple[Devices, ...]:
    """Groups in order on the devices in order; those that fewest devices have memory for go first."""
    found: list[Devices] = [()] * len(space.groups)
    taken: set[int] = set()
    for members in _by_choice(order, space):
        free = [d for d in range(len(space.memory)) if d not in taken and space.fits(members[0], d)]
        for group, own in zip(members, way([space.groups[group] for group in members], free), strict=True):
            found[group] = own
            taken.update(own)
    return tuple(found)


def _by_choice(order: Sequence[int], space: GroupMemory) -> list[list[int]]:
    """Groups by the devices with enough memory for them, fewest first, so that none takes what another must have."""
    memory, members = sorted(space.memory), defaultdict[int, list[int]](list)
    for group in order:
        members[bisect_left(memory, space.needs[group])].append(group)
    return [members[count] for count in sorted(members, reverse=True)]


def _close(counts: Sequence[int], free: Sequence[int]) -> list[Devices]:
    """One after another."""
    return [tuple(free[end - count : end]) for count, end in zip(counts, accumulate(counts), strict=True)]


def _dealt(counts: Sequence[int], free: Sequence[int]) -> list[Devices]:
    """In turn, so that devices with the same samples are neighbours."""
    turns = sorted(((2 * i + 1) / count, group) for group, count in enumerate(counts) for i in range(count))
    found: list[list[int]] = [[] for _ in counts]
    for (_, group), device in zip(turns, free, strict=False):
        found[group].append(device)
    return [tuple(own) for own in found]


def _whole(sizes: Sequence[int], counts: Sequence[int], free: Sequence[int]) -> list[Devices]:
    """One after another, with devices left out, as far as there are enough, where a group is in fewer units then."""
    found: list[Devices] = []
    spare, place = len(free) - sum(counts), 0
    for count in counts:
        begin = _begin(free, place, count, spare, sizes)
        spare, place = spare - (begin - place), begin + count
        found.append(tuple(free[begin:place]))
    return found


def _begin(free: Sequence[int], place: int, count: int, spare: int, sizes: Sequence[int]) -> int:
    """Where ``count`` devices are in the fewest units, outer units first, with at most ``spare`` left out before."""

    def units(begin: int) -> tuple[int, ...]:
        return (*(free[begin + count - 1] // size - free[begin] // size for size in reversed(sizes)), begin)

    nexts = (bisect_left(free, (free[place] // size + 1) * size, place) for size in sizes)
    return min((place, *(begin for begin in nexts if begin <= place + spare)), key=units)


Exchange = tuple[int, int, int]
"""First device of a run, first device of another one, and how many devices each has."""


@dataclass(frozen=True, slots=True)
class Change:
    """What an exchange leads to: the devices of some groups, the times of their ties, and the total time."""

    devices: dict[int, Devices]
    times: dict[int, tuple[int, int]]
    total: int


class GroupLayout:
    """Groups on devices, and how long each tie keeps links busy."""

    def __init__(self, links: GroupLinks, space: GroupMemory, devices: Sequence[Devices]) -> None:
        self.links, self.space = links, space
        self.devices = list(devices)
        self.owner = [-1] * len(space.memory)
        self._own(range(len(devices)))
        self.times = [links.time(tie, devices[tie.first], devices[tie.second]) for tie in links.ties]
        self._add_up()

    def copy(self) -> GroupLayout:
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
                if not self.space.fits(group, target + step):
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
        return device // inner, self.space.memory[device]

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


def exchanges(layout: GroupLayout, group: int) -> Iterator[Exchange]:
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
    worse than the groups one after another, where memory allows that; the same question has the same answer.

    Raises:
        UsageError: the lists do not fit together.
        InfeasibleError: there are too few devices, or too few with enough memory.
    """
    _check(groups, traffic, sync, needs)
    space = GroupMemory.of(groups, needs or [0] * len(groups), cluster)
    return LayoutSearch(GroupLinks.of(groups, traffic, cluster, sync), space).best()


def _check(groups: Sequence[int], traffic: Traffic, sync: Sequence[int], needs: Sequence[int]) -> None:
    if any(size < 1 for size in groups):
        raise UsageError(f"group {[size < 1 for size in groups].index(True)} has no devices; give each 1 or more")
    for name, values in (("sync", sync), ("needs", needs)):
        if values and len(values) != len(groups):
            raise UsageError(f"{name} has {len(values)} values for {len(groups)} groups; give one for each, or none")
    for pair in traffic:
        if not all(0 <= group < len(groups) for group in pair):
            raise UsageError(f"traffic {pair} names a group that is not one of the {len(groups)}, numbered from 0")


class LayoutSearch:
    """A search for a layout that keeps links busy for the least time."""

    def __init__(self, links: GroupLinks, space: GroupMemory) -> None:
        self.links, self.space = links, space
        self.least = sum(tie.least for tie in links.ties)
        self.left = MOST_TIMED
        self.random = random.Random(0)

    def best(self) -> tuple[Devices, ...]:
        """The devices of the best layout found."""
        layouts = [GroupLayout(self.links, self.space, line) for line in lines(self.links, self.space)]
        starts = sorted(layouts, key=lambda layout: (layout.time, layout.devices))[:NUM_STARTS]
        found = [self._followed(self._descended(start.copy(), range(len(start.devices)))) for start in starts]
        return _tidy(min([starts[0], *found], key=lambda layout: layout.time))

    def _ended(self, layout: GroupLayout) -> bool:
        return self.left <= 0 or layout.time.total_ns <= self.least

    def _followed(self, layout: GroupLayout) -> GroupLayout:
        """The layout after random exchanges that led to better ones."""
        failed = 0
        while failed < NUM_KICKS and not self._ended(layout):
            checkpoint()
            other = layout.copy()
            self._descended(other, other.near(self._kick(other)))
            failed = 0 if other.time < layout.time else failed + 1
            layout = min(other, layout, key=lambda each: each.time)
        return layout

    def _kick(self, layout: GroupLayout) -> set[int]:
        """Make up to three random exchanges; the groups that have moved."""
        moved: set[int] = set()
        for _ in range(self.random.randint(1, KICK_EXCHANGES)):
            count = self.random.choice((1, self.random.choice(self.space.groups)))
            one, other = (self.random.randrange(len(layout.owner)) for _ in range(2))
            change = layout.change((one, other, count))
            if change is not None:
                layout.apply(change)
                moved |= change.devices.keys()
        return moved

    def _descended(self, layout: GroupLayout, groups: Iterable[int]) -> GroupLayout:
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

    def _best_change(self, layout: GroupLayout, group: int) -> Change | None:
        """The best of the exchanges that a group considers; None if none helps."""
        best, time, seen = None, layout.time, set[tuple[int, int, int]]()
        for exchange in checked(exchanges(layout, group), 16):
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


def _tidy(layout: GroupLayout) -> tuple[Devices, ...]:
    """The same in every unit and memory, but there the groups in order on the first devices."""
    alike = defaultdict[tuple[int, float], list[int]](list)
    for device in range(len(layout.owner)):
        alike[layout.place(device)].append(device)
    left = {place: iter(devices) for place, devices in alike.items()}
    return tuple(tuple(sorted(next(left[layout.place(device)]) for device in own)) for own in layout.devices)


def device_orders(placement: Placement, cluster: Cluster) -> Iterator[Placement]:
    """The placement with other numbers of replicas side by side, those that keep to the cluster's levels.

    None where positions are not alike.
    """
    positions = dict.fromkeys(stage.devices for stage in placement.stages)
    widths = {(stage.shards * stage.context, stage.replicas) for stage in placement.stages}
    every = sorted(device for devices in positions for device in devices)
    if len(widths) > 1 or len(positions) < 2 or len(set(every)) < len(every):
        return
    ((width, replicas),) = widths
    together = math.lcm(width, *(stage.expert for stage in placement.stages))
    if replicas == 1:
        return
    for beside in _numbers_beside(width, replicas, len(positions), cluster):
        if width * beside % together == 0:
            begins = {
                own: [((r // beside * len(positions) + place) * beside + r % beside) * width for r in range(replicas)]
                for place, own in enumerate(positions)
            }
            devices = {own: tuple(d for each in at for d in every[each : each + width]) for own, at in begins.items()}
            stages = tuple(_moved(stage, devices[stage.devices]) for stage in placement.stages)
            if any(stage.devices != own.devices for stage, own in zip(placement.stages, stages, strict=True)):
                yield placement.model_copy(update={"stages": stages})


def _moved(stage: PlacedStage, devices: tuple[int, ...]) -> PlacedStage:
    return stage.model_copy(update={"devices": devices})


def _numbers_beside(width: int, replicas: int, positions: int, cluster: Cluster) -> list[int]:
    """How many replicas of a position may lie side by side, most first.

    What lies together crosses a level's border as a whole or not at all, and so do all positions together, unless these
    are all there are.
    """
    sizes = [level.group_size for level in cluster.levels]

    def fits(beside: int) -> bool:
        runs = beside * width, beside * width * positions
        return beside == replicas or all(size % run == 0 or run % size == 0 for size in sizes for run in runs)

    divisors = [beside for beside in range(1, replicas + 1) if replicas % beside == 0]
    return [beside for beside in reversed(divisors) if fits(beside)]
