"""How groups of devices that run a collective are spread over a cluster's levels, and how much each link then carries.

NCCL runs a collective over many nodes in several rings at once, each with an equal part of the array. All go through
the nodes in the same order, in and out of each by other devices, so that a group with eight devices in each node sends
over eight adapters: its rate is what links inside nodes carry, or these adapters, or its share of what the node has, or
of a switch's uplinks (``src/graph`` of NCCL 2.19 to 2.27). Hops inside a node have the latency of its links.

An all-reduce may also go up and down two binary trees over the nodes, complements of each other, of which each has
half of the array (Sanders, Speck, Träff 2009): as many hops as the tree is deep, but at a rate of 0.92 of the links,
and with twice the array where a ring sends 2 (n - 1) / n of it. The quicker of both is taken, as by NCCL's
``tuning.cc``, which also has the hops that are counted here.

Out of one node both send the array twice. Over the uplinks of a group of nodes that follow each other, such as a rack,
trees send it three times, up and down together, where groups are alike powers of two: a group's first node has its
parent elsewhere, and some of its children, and every second group's middle node its parent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs.trees import uplink_load
from pipeplan.files import Cluster, LinkLevel

TREE_RATE = 0.92
"""Of the links that trees reach: NCCL's own factor for an all-reduce."""

TREES_LEAVE = 1.5
"""How many times as much as rings trees send over the uplinks of a group of nodes."""


@dataclass(frozen=True, eq=False, slots=True)
class GroupSpread:
    """``groups`` [group, device] that all run a collective at once, and the outermost ``level`` that any needs.

    ``places`` are in how many groups of each level inside it the devices of one are, of single devices first, and
    ``channels`` how many rings a group has at once: as many devices as it has in each of its nodes.
    """

    groups: NDArray[np.int64]
    levels: tuple[LinkLevel, ...]
    places: tuple[int, ...]
    channels: int

    @classmethod
    def of(cls, cluster: Cluster, groups: Sequence[Sequence[int]]) -> GroupSpread | None:
        """That of groups of equally many devices, or some of fewer; None where links cost nothing."""
        if not cluster.levels:
            return None
        count = max(map(len, groups))
        whole = [sorted([*group, *[group[-1]] * (count - len(group))]) for group in groups]
        sizes = [level.group_size for level in cluster.levels]
        used = next(
            number for number, size in enumerate(sizes) if all(own[0] // size == own[-1] // size for own in whole)
        )
        places = tuple(max(len({device // size for device in own}) for own in whole) for size in (1, *sizes[:used]))
        channels = 1 if used == 0 else min(min(inside.values()) for inside in _in_nodes(whole, sizes[0]))
        return cls(np.array(whole, dtype=np.int64), cluster.levels[: used + 1], places, channels)

    @property
    def level(self) -> LinkLevel:
        """The outermost."""
        return self.levels[-1]

    @property
    def devices(self) -> int:
        """Of one group."""
        return int(self.groups.shape[1])

    @property
    def outer(self) -> tuple[LinkLevel, ...]:
        """All levels but that inside nodes; none where no group leaves its node."""
        return self.levels[1:]

    @property
    def ring_latency_ns(self) -> int:
        """Of all hops of a ring but the one back: each over the innermost level that holds both places."""
        hops = zip(self.places, (*self.places[1:], 1), strict=True)
        return sum((a - b) * level.latency_ns for (a, b), level in zip(hops, self.levels, strict=True))

    @property
    def tree_latency_ns(self) -> int:
        """From the leaf that is farthest away to the root: along the devices of a node, and then from node to node."""
        nodes = self.places[1]
        found = (-(-self.devices // nodes) - 1) * self.levels[0].latency_ns
        for below, above, level in zip(self.places[1:], (*self.places[2:], 1), self.outer, strict=True):
            found += ceil(log2(below / above)) * level.latency_ns
        return found


class LinkLoads(NamedTuple):
    """How much a link of the outermost level carries, in rings that are alone on links of its bandwidth.

    ``of_measured`` counts in what was measured, which had all that a group has alone.
    """

    ring: float
    trees: float
    of_measured: float


def loads_of(cluster: Cluster, spread: GroupSpread, *, all_to_all: bool) -> LinkLoads:
    """What all groups together send over the busiest link, or each over a device's own.

    A ring that leaves a node crosses its link once in every step; all-to-all sends from each of k devices in the node
    to each of the others, k * (n - k) messages of which a ring over n devices would count n - 1. What leaves for a
    level passes those below, and the slowest counts.
    """
    channels = 1 if all_to_all else spread.channels
    shared = uplinks = of_trees = 0.0
    for number, each in enumerate(spread.levels):
        ratio = spread.level.bandwidth_bytes_per_s / each.bandwidth_bytes_per_s
        if number == 0:
            shared = ratio if spread.channels > 1 or not spread.outer else 0.0
        elif each.oversubscription is None:
            leaving = _leaving_nodes(spread, spread.levels[number - 1].group_size, all_to_all=all_to_all)
            whole = each.node_bandwidth_bytes_per_s or each.bandwidth_bytes_per_s
            shared = max(shared, ratio * leaving * each.bandwidth_bytes_per_s / whole)
        else:
            load = uplink_load(cluster, number, spread.groups, all_to_all=all_to_all, channels=channels)
            uplinks = max(uplinks, ratio * load)
            of_trees = max(of_trees, ratio * load * (TREES_LEAVE if number > 1 else 1))
    # a node's one link has less than a ring where most of what is exchanged stays in the node
    own = 0.0 if all_to_all and spread.outer and spread.level.node_bandwidth_bytes_per_s is None else 1.0
    own = 1.0 if cluster.is_tree else own
    ring = max(own / channels, shared, uplinks)
    return LinkLoads(ring, max(own / channels, shared, of_trees), max(own, ring))


def _leaving_nodes(spread: GroupSpread, node: int, *, all_to_all: bool) -> float:
    """What leaves the busiest node, in rings."""
    count, leaving = spread.devices, defaultdict[int, float](float)
    for own in _in_nodes(spread.groups.tolist(), node):
        for place, inside in own.items():
            leaving[place] += inside * (count - inside) / (count - 1) if all_to_all else float(inside < count)
    return max(leaving.values())


def _in_nodes(groups: Iterable[Sequence[int]], node: int) -> Iterator[Counter[int]]:
    """[group] how many of its devices are in each node of so many: for the few of most groups arrays take longer."""
    return (Counter([device // node for device in group]) for group in groups)
