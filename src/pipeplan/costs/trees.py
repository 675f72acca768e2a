"""What devices share above their nodes: uplinks of switches in a tree, and switches of rails.

A level with oversubscription r says that the uplinks of a group of the level inside carry 1/r of what all its devices
could send at once. In a level with rails the devices in the same place of each node share a switch, so that what leaves
for further levels does so by place; a message between different places goes through the node's own links first, as
NCCL's PXN does, where these are as quick, and else over the level above.

Who sends at once: in a collective every device of a group, whether it is of this stage or of another, is taken to do
what those do that the collective is among. Of messages between stages, every device that sends some over a group's
uplinks in the iteration is taken to do so at once, one at a time. The group where most leave or enter counts for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pipeplan.files import Cluster, LinkLevel
from pipeplan.workload.elements import Dependency, Hop, Players
from pipeplan.workload.folding import Fold

Devices = NDArray[np.int64]


def crosses_rails(cluster: Cluster, source: int, target: int) -> bool:
    """Whether two devices talk over a level with rails, or one above it, from different places of their nodes."""
    index = _rails(cluster)
    if index is None:
        return False
    node = cluster.levels[index - 1].group_size
    return source // node != target // node and source % node != target % node


def way_between(cluster: Cluster, source: int, target: int) -> tuple[LinkLevel | None, LinkLevel | None]:
    """The level that a message goes over, and that of a node's own links where it goes through these, too."""
    level = cluster.level_between(source, target)
    if level is None or not crosses_rails(cluster, source, target):
        return level, None
    index = cluster.levels.index(level)
    if _through_nodes(cluster):
        return level, cluster.levels[0]
    return cluster.levels[min(index + level.rails, len(cluster.levels) - 1)], None


def linked_alike(fold: Fold, pairs: Iterable[tuple[int, int]], cluster: Cluster) -> bool:
    """Whether messages between two programs take the same way for the players in each place."""
    pairs = set(pairs)
    if not fold.alike(pairs, [level.group_size for level in cluster.levels]):
        return False
    ends = [[fold.players[each].devices for each in pair] for pair in pairs] if cluster.is_tree else []
    return all(len({crosses_rails(cluster, *both) for both in zip(*each, strict=True)}) == 1 for each in ends)


def uplink_load(cluster: Cluster, number: int, devices: Devices, *, all_to_all: bool, channels: int) -> float:
    """What uplinks to a level carry of collectives, in rings of the level's bandwidth.

    All groups, [group, device], run one at once that needs the level. A ring leaves a group of devices once, however
    many of its own are there; all-to-all sends from each there to each elsewhere. Of so many ``channels`` of one ring
    each is on a rail of its own.
    """
    each, inside = cluster.levels[number], cluster.levels[number - 1]
    places = _places(cluster, number, devices, devices)
    if all_to_all and _through_nodes(cluster):  # what goes elsewhere has changed to any rail before
        places = devices // inside.group_size
    return _leaving(places, all_to_all=all_to_all) * (each.oversubscription or 1) / (channels if inside.rails else 1)


def _leaving(places: Devices, *, all_to_all: bool) -> float:
    """For each device of groups that are in several places, [group, device], what leaves a place, in rings."""
    size = places.shape[1]
    apart = np.arange(len(places))[:, None] * (places.max() + 1) + places  # one number each, which sorts quickly
    _, counts = np.unique(apart, return_counts=True)
    counts = counts[counts < size]
    if not len(counts):
        return 0.0
    if all_to_all:
        return float((counts * (size - counts)).sum() / ((size - 1) * counts.sum()))
    return float(len(counts) / counts.sum())


def slowest_share(cluster: Cluster, level: LinkLevel) -> float:
    """How many times longer than alone a level's link is busy where every device sends over all uplinks below."""
    shares = [(each.oversubscription or 1) * _ratio(level, each) for _, each in _shared(cluster, level)]
    return max(1.0, *shares) if shares else 1.0


def with_shared_uplinks(
    dependencies: Sequence[Dependency], cluster: Cluster | None, players: Sequence[Players] = ()
) -> tuple[Dependency, ...]:
    """Messages priced alone, with the time in which they are on their links as long as all others leave of these.

    ``players`` are those of the programs that messages are between.
    """
    if cluster is None or not cluster.is_tree:
        return tuple(dependencies)
    crowds = MessageCrowds(cluster, dependencies, players)
    return tuple(
        replace(dependency, hops=tuple(map(crowds.shared, dependency.hops))) if dependency.hops else dependency
        for dependency in dependencies
    )


class MessageCrowds:
    """How many of an iteration's messages that occupy links share each level's uplinks."""

    def __init__(self, cluster: Cluster, dependencies: Iterable[Dependency], players: Sequence[Players] = ()) -> None:
        hops = (hop for dependency in dependencies for hop in dependency.hops if hop.occupancy_ns)
        pairs = sorted({(hop.source_device, hop.target_device) for hop in hops})
        self.cluster, self.players = cluster, players
        self.busiest = dict[int, int]()
        if not pairs:
            return
        ends = [self._devices(programs) for programs in zip(*pairs, strict=True)]
        self.busiest = {index: _busiest(cluster, index, *ends) for index, _ in _shared(cluster, cluster.levels[-1])}

    def _devices(self, programs: Sequence[int]) -> Devices:
        """All that play these, one program's after the other."""
        if not self.players:
            return np.array(programs, dtype=np.int64)
        return np.array([*chain.from_iterable(self.players[each].devices for each in programs)], dtype=np.int64)

    def of(self, level: LinkLevel) -> Fraction:
        """How many times as long as alone a message is on its link; at least 1."""
        cluster, found = self.cluster, Fraction(1)
        for index, each in _shared(cluster, level):
            sent = Fraction(each.oversubscription or 1) * self.busiest.get(index, 0) / _place_size(cluster, index)
            rate = Fraction(level.bandwidth_bytes_per_s, each.bandwidth_bytes_per_s)
            found = max(found, sent * rate)
        return found

    def shared(self, hop: Hop) -> Hop:
        """A message that has its time alone, with what it takes beside all others."""
        first = [self.players[each].first if self.players else each for each in (hop.source_device, hop.target_device)]
        level, _ = way_between(self.cluster, *first)
        if level is None or not hop.occupancy_ns:
            return hop
        crowd = self.of(level)
        return replace(hop, occupancy_ns=-(-hop.occupancy_ns * crowd.numerator // crowd.denominator))


def _busiest(cluster: Cluster, index: int, sources: Devices, targets: Devices) -> int:
    """Devices of the busiest place that send over its uplinks to a level, or that what comes over them is for."""
    by = targets if _through_nodes(cluster) else sources  # the rail that a message leaves on
    before, after = _places(cluster, index, sources, by), _places(cluster, index, targets, targets)
    inside = cluster.levels[index - 1].group_size
    leave = sources // inside != targets // inside
    if cluster.levels[index - 1].rails and not _through_nodes(cluster):  # from one switch to another of its group
        leave = before != after
    found = 0
    for places, devices in ((before, sources), (after, targets)):
        apart = int(devices.max()) + 1
        each = np.unique(places[leave] * apart + devices[leave])
        found = max(found, int(np.unique(each // apart, return_counts=True)[1].max(initial=0)))
    return found


def _shared(cluster: Cluster, level: LinkLevel) -> list[tuple[int, LinkLevel]]:
    """The number of each level up to this one that says how oversubscribed it is, and itself."""
    upto = cluster.levels[: cluster.levels.index(level) + 1]
    return [(index, each) for index, each in enumerate(upto) if each.oversubscription is not None]


def _places(cluster: Cluster, index: int, devices: Devices, rail_of: Devices) -> Devices:
    """The group of each device whose uplinks to a level it shares; above rails the switch of a place in its nodes."""
    inside = cluster.levels[index - 1]
    groups = devices // inside.group_size
    if not inside.rails:
        return groups
    node = cluster.levels[index - 2].group_size
    return groups * node + rail_of % node


def _place_size(cluster: Cluster, index: int) -> int:
    """Devices that share uplinks to a level."""
    inside = cluster.levels[index - 1]
    return inside.group_size // (cluster.levels[index - 2].group_size if inside.rails else 1)


def _rails(cluster: Cluster) -> int | None:
    """The number of the level with rails."""
    return next((index for index, level in enumerate(cluster.levels) if level.rails), None)


def _through_nodes(cluster: Cluster) -> bool:
    """Whether what changes rails does so inside a node: its links are no slower than the rails."""
    index = _rails(cluster)
    return index is not None and cluster.levels[0].bandwidth_bytes_per_s >= cluster.levels[index].bandwidth_bytes_per_s


def _ratio(level: LinkLevel, each: LinkLevel) -> float:
    return level.bandwidth_bytes_per_s / each.bandwidth_bytes_per_s
