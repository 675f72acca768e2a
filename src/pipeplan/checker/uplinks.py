"""Uplinks in a cluster's tree: messages over each are counted one by one, apart from the code that prices plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction

from pipeplan.files import Cluster, Plan
from pipeplan.workload.elements import Hop


def rails_between(cluster: Cluster, source: int, target: int) -> int:
    """On how many rails a message is: 1, or 2 where it comes to another place of another node."""
    sizes = [1, *(level.group_size for level in cluster.levels)]
    node = next((sizes[index] for index, level in enumerate(cluster.levels) if level.rails), None)
    return 1 if node is None or source // node == target // node or source % node == target % node else 2


def uplink_factors(plan: Plan, cluster: Cluster | None) -> Callable[[Hop], Fraction]:
    """How many times as long as alone a message between devices is on its link: all that leave a group do so at once.

    What counts is the group that most devices send from over its uplinks to a level, or are sent to.
    """
    if cluster is None or not cluster.is_tree:
        return lambda hop: Fraction(1)
    levels = cluster.levels
    hops = [hop for dependency in plan.dependencies for hop in dependency.hops if hop.occupancy_ns]
    users: list[dict[object, set[int]]] = [defaultdict(set) for _ in levels]
    for pair in {(hop.source_device, hop.target_device) for hop in hops}:
        for source, target in _each_place(plan, *pair):
            for number in range(1, len(levels)):
                before, after = (_uplink(cluster, number, end, source, target) for end in (source, target))
                if before != after:
                    users[number]["leaving", before].add(source)
                    users[number]["entering", after].add(target)
    most = [max(map(len, each.values()), default=0) for each in users]

    def factor(hop: Hop) -> Fraction:
        source, target = hop.source_device, hop.target_device
        outermost = _outermost(cluster, source, target)
        if outermost is None:
            return Fraction(1)
        rate, found = levels[outermost].bandwidth_bytes_per_s, [Fraction(1)]
        for number in range(1, outermost + 1):
            ratio, inside = levels[number].oversubscription, levels[number - 1]
            if ratio is None:
                continue
            devices = inside.group_size // levels[number - 2].group_size if inside.rails else inside.group_size
            carried = devices * levels[number].bandwidth_bytes_per_s / Fraction(ratio)
            found.append(most[number] * rate / carried)
        return max(found)

    return factor


def _each_place(plan: Plan, source: int, target: int) -> Iterator[tuple[int, int]]:
    """The devices at both ends of a message, of each place of the two programs that it is between."""
    if not plan.players:
        return iter([(source, target)])
    return zip(plan.players[source].devices, plan.players[target].devices, strict=True)


def _relayed(cluster: Cluster) -> bool:
    """Whether nodes pass on inside what changes rails: their links are as quick as a rail."""
    rails = next((level for level in cluster.levels if level.rails), None)
    return rails is not None and cluster.levels[0].bandwidth_bytes_per_s >= rails.bandwidth_bytes_per_s


def _uplink(cluster: Cluster, number: int, end: int, source: int, target: int) -> tuple[int, ...]:
    """The uplinks to a level that one end of a message is under: of its group, or of its rail's switch there."""
    inside = cluster.levels[number - 1]
    group = end // inside.group_size
    if not inside.rails or (_relayed(cluster) and source // inside.group_size == target // inside.group_size):
        return (group,)
    node = cluster.levels[number - 2].group_size
    return group, (target if _relayed(cluster) else end) % node


def _outermost(cluster: Cluster, source: int, target: int) -> int | None:
    """The number of the level that a message goes over."""
    sizes = enumerate(level.group_size for level in cluster.levels)
    found = next((number for number, size in sizes if source // size == target // size), None)
    if found is None or not cluster.levels[found].rails or _relayed(cluster):
        return found
    return min(found + (rails_between(cluster, source, target) - 1), len(cluster.levels) - 1)
