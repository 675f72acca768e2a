"""What collectives cost when all groups of a device mesh run them at once, and share the links between nodes.

The groups along one dimension of a mesh are alike, and every one of them runs the collective at the same time. A link
inside the innermost level is a device's own; those of levels above join nodes, and everything that leaves a node at
once goes through one (TensorOpt section 4.2 measures per partition of the devices what we tell from this).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.costs.collectives import Exchange, price_at
from pipeplan.costs.links import transfer_time
from pipeplan.model import Cluster, LinkLevel

__all__ = ["BusiestPair", "busiest_pair", "crowding", "send_time", "time_of_groups"]


def time_of_groups(cluster: Cluster | None, exchange: Exchange, groups: Sequence[Sequence[int]]) -> float:
    """Time in ns when these groups of equally many devices all run the exchange, each about an array of its own.

    Nothing without a cluster, or for groups of one device.
    """
    if cluster is None or len(groups[0]) < 2 or not exchange.array_bytes:
        return 0.0
    level = _outermost(cluster, [(min(group), max(group)) for group in groups])
    if level is None:
        return 0.0
    carried = round(exchange.array_bytes * crowding(cluster, level, exchange, groups))
    return price_at(cluster, Exchange(exchange.operation, carried), len(groups[0]), level)


def send_time(cluster: Cluster | None, pairs: Sequence[tuple[int, int]], size: int) -> int:
    """Time in ns when every pair's first device sends ``size`` bytes to its second, all at once."""
    busiest = busiest_pair(cluster, pairs)
    return busiest.send_time(cluster, size) if cluster is not None and busiest else 0


@dataclass(frozen=True, slots=True)
class BusiestPair:
    """Of pairs of devices that all send at once: one that takes longest, and how many share its link."""

    source: int
    target: int
    crowd: int

    def send_time(self, cluster: Cluster, size: int) -> int:
        """Time in ns when each sends so many bytes."""
        return sum(transfer_time(cluster, self.source, self.target, size * self.crowd)) if size else 0


def busiest_pair(cluster: Cluster | None, pairs: Sequence[tuple[int, int]]) -> BusiestPair | None:
    """The pair that all are waited for; None where nothing takes time."""
    moved = [pair for pair in pairs if pair[0] != pair[1]]
    if cluster is None or not moved:
        return None
    level = _outermost(cluster, moved)
    if level is None:
        return None
    node = _node_size(cluster, level)
    leaving = Counter(source // node for source, target in moved if source // node != target // node)
    source, target = next(pair for pair in moved if cluster.level_between(*pair) == level)
    return BusiestPair(source, target, max(leaving.values(), default=1) if node > 1 else 1)


def crowding(cluster: Cluster, level: LinkLevel, exchange: Exchange, groups: Sequence[Sequence[int]]) -> float:
    """How many times the traffic of one ring the busiest link between nodes of a level carries.

    A ring that leaves a node crosses its link once in every step; all-to-all sends from each of k devices in the node
    to each of the others, k * (n - k) messages of which a ring over n devices would count n - 1.
    """
    node = _node_size(cluster, level)
    if node == 1:
        return 1.0
    carried: dict[int, float] = {}
    for group in groups:
        inside: dict[int, int] = {}
        for device in group:
            inside[device // node] = inside.get(device // node, 0) + 1
        for place, count in inside.items():
            others = len(group) - count
            crossing = count * others / (len(group) - 1) if exchange.operation == "all_to_all" else float(others > 0)
            carried[place] = carried.get(place, 0.0) + crossing
    return max(carried.values())


def _outermost(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> LinkLevel | None:
    """The outermost level that any of the pairs talks over."""
    used = [level for pair in pairs if (level := cluster.level_between(*pair)) is not None]
    return max(used, key=lambda level: level.group_size, default=None)


def _node_size(cluster: Cluster, level: LinkLevel) -> int:
    """Devices in one group of the level below; 1 for the innermost."""
    return max((each.group_size for each in cluster.levels if each.group_size < level.group_size), default=1)
