"""Device groups on a cluster's devices: which have the memory, and how long links are busy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeplan.costs.communication import all_reduce_time, transfer_time
from pipeplan.errors import InfeasibleError
from pipeplan.files import Cluster


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Sizes and needs of groups, and the memory of each device."""

    groups: tuple[int, ...]
    needs: tuple[int, ...]
    memory: tuple[float, ...]

    @staticmethod
    def of(groups: Sequence[int], needs: Sequence[int], cluster: Cluster) -> GroupMemory:
        """Whoever needs most chooses first: others may take what it leaves, so nobody can choose wrongly."""
        memory = tuple(math.inf if size is None else size for size in cluster.memory_bytes)
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
        """Of all links, from the total and busiest times of some each."""
        return LinkTime(sum([total for total, _ in times]), max([busiest for _, busiest in times], default=0))


def link_time(
    devices: Sequence[Sequence[int]], traffic: Traffic, cluster: Cluster, *, sync: Sequence[int] = ()
) -> LinkTime:
    """How long links are busy when each group stands on its ``devices``, ascending; the rest as for :func:`mapped`."""
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
        """What groups of these sizes keep busy."""
        couples = sorted({(min(pair), max(pair)) for pair, size in traffic.items() if size and pair[0] != pair[1]})
        ties = [_talk(g, h, groups, traffic, cluster) for g, h in couples]
        ties += [_sum(g, groups[g], size, cluster) for g, size in enumerate(sync) if size and groups[g] > 1]
        around: list[list[int]] = [[] for _ in groups]
        for index, tie in enumerate(ties):
            for group in {tie.first, tie.second}:
                around[group].append(index)
        work = tuple(sum(len(ties[index].pairs) for index in indices) for indices in around)
        sizes = tuple(level.group_size for level in cluster.levels)
        return GroupLinks(tuple(ties), tuple(map(tuple, around)), work, sizes)

    def level(self, source: int, target: int) -> int:
        """The number of the level on which two devices talk; 0 as well where there are no levels."""
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
    times = [[sum(transfer_time(cluster, 0, last, size)) if size else 0 for size in sizes] for last in _ends(cluster)]
    return Tie(g, h, pairs, tuple(map(sum, times)), tuple(map(max, times)))


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
