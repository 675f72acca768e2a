"""What it costs to move bytes: between two devices, within a group, and in all groups of a mesh at once.

The groups along one dimension of a mesh are alike, and every one of them runs the collective at the same time. A link
inside the innermost level is a device's own; those of levels above join nodes, and everything that leaves a node at
once shares what the node has, one link unless the level says more (TensorOpt section 4.2 measures per partition of the
devices what we derive from this).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, Generic, TypeVar

import numpy as np

from pipeplan.costs.devices import DevicePreset
from pipeplan.costs.spread import TREE_RATE, GroupSpread, loads_of
from pipeplan.costs.trees import slowest_share, way_between
from pipeplan.files import Cluster, LinkLevel, MeasuredCurve
from pipeplan.files.row_messages import Combining
from pipeplan.workload.elements import Stage

Thing = TypeVar("Thing")

Points = Sequence[tuple[int, int]]
"""Pairs of bytes and ns, bytes ascending."""


def transfer_time(cluster: Cluster | None, source: int, target: int, size: int) -> tuple[int, int]:
    """Latency and link occupancy in ns of sending ``size`` bytes from one device to another.

    A measured curve of the level goes first (log-interpolated, made monotone; beyond its ends the rate of its
    last point holds); otherwise latency plus size over bandwidth. Without a cluster links cost nothing. What others
    send meanwhile is left out; in a tree :func:`pipeplan.costs.trees.with_shared_uplinks` adds it.
    """
    level, through = way_between(cluster, source, target) if cluster is not None and source != target else (None, None)
    if cluster is None or level is None:
        return 0, 0
    more = 0 if through is None else through.latency_ns
    for curve in cluster.measured:
        if curve.operation == "send" and curve.level == level.name:
            time = time_on_curve(curve.points, size)
            latency = min(level.latency_ns, time)  # together they take what was measured
            return latency + more, time - latency
    return level.latency_ns + more, math.ceil(size * 1e9 / level.bandwidth_bytes_per_s)


def time_on_curve(points: Points, size: int) -> int:
    """Time in ns at ``size`` bytes on measured points, interpolated in the logarithms of both.

    It never falls with size: a point that is quicker than a smaller one takes that one's time. Below the first
    point its time holds, beyond the last one its rate.
    """
    monotone: list[tuple[int, int]] = []
    for bytes_, ns in points:
        monotone.append((bytes_, max(ns, monotone[-1][1] if monotone else 0)))
    if size <= monotone[0][0]:
        return monotone[0][1]
    for (low, low_ns), (high, high_ns) in zip(monotone, monotone[1:], strict=False):
        if size == high:
            return high_ns
        if size < high:
            share = math.log(size / max(low, 1)) / math.log(high / max(low, 1))
            return round(low_ns * math.pow(high_ns / low_ns, share))
    last, last_ns = monotone[-1]
    return round(last_ns * size / max(last, 1))


def latency_and_bandwidth(points: Points) -> tuple[int, int]:
    """The latency in ns and the bytes per second whose times are nearest to those measured.

    Nearest by the squares of relative errors, since times differ by orders of magnitude; no latency below 0.
    """
    ones, sizes = [1 / ns for _, ns in points], [size / ns for size, ns in points]  # what a and b count relative to ns
    aa, bb, ab = _dot(ones, ones), _dot(sizes, sizes), _dot(ones, sizes)
    determinant = aa * bb - ab * ab
    latency = (sum(ones) * bb - sum(sizes) * ab) / determinant if determinant > 1e-9 * aa * bb else 0.0
    latency = min(max(latency, 0.0), min(ns for _, ns in points))
    per_byte = (sum(sizes) - latency * ab) / bb if bb else 0.0
    return round(latency), min(max(1, round(1e9 / per_byte)), 10**15) if per_byte > 1e-6 else 10**15


def time_on_line(points: Points, size: int) -> int:
    """Time in ns at ``size`` bytes by latency and bandwidth fitted to measured points."""
    latency, bandwidth = latency_and_bandwidth(points)
    return latency + math.ceil(size * 1e9 / bandwidth)


def leave_one_out_error(points: Points, predict: Callable[[Points, int], int] = time_on_curve) -> float | None:
    """How well the curve predicts times it has not seen: the median of ``|predicted / measured - 1|``.

    Each point but the first and the last is left out once, and predicted from the others. None below three points.
    """
    errors = [
        abs(predict([*points[:index], *points[index + 1 :]], size) / ns - 1)
        for index, (size, ns) in enumerate(points[1:-1], start=1)
    ]
    return statistics.median(errors) if errors else None


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@dataclass(frozen=True, slots=True)
class LinkResult:
    """A cluster with measured curves."""

    cluster: Cluster

    def figures(self) -> dict[str, Any]:
        """The object of ``profile --communication --json``: how well each curve predicts what it has not seen."""
        return {"cluster": self.cluster.name, "curves": [_curve_figures(curve) for curve in self.cluster.measured]}


def _curve_figures(curve: MeasuredCurve) -> dict[str, Any]:
    return {
        "operation": curve.operation,
        "level": curve.level,
        "num_devices": curve.num_devices,
        "num_points": len(curve.points),
        "smallest_bytes": curve.points[0][0],
        "largest_bytes": curve.points[-1][0],
        "leave_one_out_error": leave_one_out_error(curve.points),
    }


LINK_CEILING = 0.85
"""Share of a link's bandwidth that large messages reach. Assumed."""

LAUNCH_NS = 5_000
"""Before a collective moves anything. Assumed."""

STEP_NS = 2_000
"""One step of a ring takes this long however little it carries. Assumed."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective among the devices of a group, about an array of ``array_bytes`` (gathered: the whole array)."""

    operation: Combining
    array_bytes: int


Prices = Callable[[Exchange, int], float]
"""Time in ns of an exchange among a number of devices."""


def ring_ns(exchange: Exchange, devices: int, bytes_per_s: float, step_ns: float) -> float:
    """Each device sends a share of the array per step, in as many steps as there are others; twice for all-reduce."""
    steps = (devices - 1) * (2 if exchange.operation == "all_reduce" else 1)
    return steps * (step_ns + 1e9 * exchange.array_bytes / devices / bytes_per_s)


def beside_products(messages_ns: Any, products_ns: Any, devices: Any) -> Any:
    """What compute waits for messages among ``devices`` that share products which overlap them; numbers, or arrays.

    Both are cut into as many pieces as there are devices: the first piece of a message has nothing to hide behind, and
    neither has what is longer than the products.
    """
    return np.minimum(messages_ns, messages_ns / devices + np.maximum(0, messages_ns - products_ns))


def prices_of(device: DevicePreset) -> Prices:
    """Rings over a device's own links at their ceiling, and a launch."""
    rate = LINK_CEILING * device.link_bytes_per_s
    return lambda exchange, devices: LAUNCH_NS + ring_ns(exchange, devices, rate, STEP_NS)


def prices_in(cluster: Cluster) -> Prices:
    """Measured times among the first devices of a cluster where it has them, else as NCCL would run it."""
    prices = cache(lambda devices: price_of_groups(cluster, [range(devices)]))
    return lambda exchange, devices: prices(devices)(exchange)


def all_reduce_time(cluster: Cluster | None, devices: Sequence[int], size: int) -> int:
    """Time in ns to sum ``size`` bytes over these devices; nothing without a cluster, or on one device."""
    return _time_of(cluster, Exchange("all_reduce", size), devices)


def all_reduce_in_shards(cluster: Cluster | None, devices: Sequence[int], shards: int, size: int) -> int:
    """Time in ns for devices that hold shards, dealt round-robin, to sum ``size`` bytes with their counterparts.

    All shards are summed at once, over links that their groups may share.
    """
    groups = [devices[shard::shards] for shard in range(shards)]
    return round(time_of_groups(cluster, Exchange("all_reduce", size), groups))


def all_gather_time(cluster: Cluster | None, devices: Sequence[int], size: int) -> int:
    """Time in ns until each of these devices has all of ``size`` bytes; nothing without a cluster, or on one device."""
    return _time_of(cluster, Exchange("all_gather", size), devices)


def _time_of(cluster: Cluster | None, exchange: Exchange, devices: Sequence[int]) -> int:
    if cluster is None or len(devices) < 2 or not exchange.array_bytes:
        return 0
    return round(time_of_groups(cluster, exchange, [devices]))


def contention_among(cluster: Cluster | None, groups: Sequence[Sequence[int]]) -> float:
    """By what part of its speed a device computes less while all these groups exchange, each among its devices.

    What slows it is bytes through its memory: rings that carry fewer than the innermost links slow it by that much
    less.
    """
    if cluster is None or not cluster.contention:
        return 0.0
    least = 1.0
    for size in {len(group) for group in groups} - {0, 1}:
        spread = GroupSpread.of(cluster, [group for group in groups if len(group) == size])
        if spread is not None and spread.outer:
            rate = spread.level.bandwidth_bytes_per_s / loads_of(cluster, spread, all_to_all=False).ring
            least = min(least, rate / cluster.levels[0].bandwidth_bytes_per_s)
    return cluster.contention * least


def contention_of_sums(cluster: Cluster | None, stages: Iterable[Stage]) -> float:
    """The same where the copies of each stage sum their gradients, the least of any stage.

    Stages that stand alike in the cluster are looked at once.
    """
    if cluster is None or not cluster.contention:
        return 0.0
    unit = alike_every(cluster)
    ways = dict[tuple[int, tuple[int, ...]], tuple[int, ...]]()
    for devices, shards in dict.fromkeys((tuple(stage.devices), stage.shards) for stage in stages):
        begin = devices[0] // unit * unit
        ways.setdefault((shards, tuple(device - begin for device in devices)), devices)
    groups = ([devices[shard::shards] for shard in range(shards)] for (shards, _), devices in ways.items())
    return min((contention_among(cluster, own) for own in groups), default=cluster.contention)


def time_of_groups(cluster: Cluster | None, exchange: Exchange, groups: Sequence[Sequence[int]]) -> float:
    """Time in ns when these groups of equally many devices all run the exchange, each about an array of its own.

    Nothing without a cluster, or for groups of one device.
    """
    return price_of_groups(cluster, groups)(exchange) if exchange.array_bytes else 0.0


def price_of_groups(cluster: Cluster | None, groups: Sequence[Sequence[int]]) -> Callable[[Exchange], float]:
    """:func:`time_of_groups` of any exchange: which links these groups share is looked up once.

    So it is for all that stand alike in the places of the outermost level, as positions of a pipeline do.
    """
    if cluster is None or len(groups[0]) < 2:
        return lambda _: 0.0
    unit = alike_every(cluster)
    begin = min(map(min, groups)) // unit * unit
    return _prices(Same(cluster), tuple(tuple([device - begin for device in group]) for group in groups))


def alike_every(cluster: Cluster) -> int:
    """After how many devices others stand alike in the places of the outermost level."""
    return cluster.levels[-2].group_size if len(cluster.levels) > 1 else 1


@dataclass(frozen=True, slots=True, eq=False)
class Same(Generic[Thing]):
    """A thing to remember others by: itself, and none that is equal, as comparing takes long."""

    thing: Thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing


@lru_cache(maxsize=256)
def _prices(same: Same[Cluster], groups: tuple[tuple[int, ...], ...]) -> Callable[[Exchange], float]:
    spread = GroupSpread.of(same.thing, groups)
    return (lambda _: 0.0) if spread is None else GroupPrices(same.thing, spread)


def hops_around(cluster: Cluster | None, groups: Sequence[Sequence[int]], array_bytes: int) -> float:
    """Time in ns of all hops by which devices of these groups get the pieces of an array, one by one, from the next.

    Each piece is one message, so that a single link leaves a node, and every step waits for the slowest. Nothing
    without a cluster, or for groups of one device.
    """
    spread = None if cluster is None or len(groups[0]) < 2 else GroupSpread.of(cluster, groups)
    if cluster is None or spread is None:
        return 0.0
    load = loads_of(cluster, replace(spread, channels=1), all_to_all=False).ring
    piece = 1e9 * array_bytes / spread.devices * load / spread.level.bandwidth_bytes_per_s
    return (spread.devices - 1) * (spread.level.latency_ns + piece)


class GroupPrices:
    """What exchanges take in groups of devices that are spread over a cluster in some way.

    Measured times of the outermost level that they need, interpolated over sizes and numbers of devices, else what NCCL
    would take: rings, or for an all-reduce a pair of trees over the nodes where that is quicker.
    """

    def __init__(self, cluster: Cluster, spread: GroupSpread) -> None:
        self._cluster, self._spread = cluster, spread
        self._loads = cache(partial(loads_of, cluster, spread))

    def __call__(self, exchange: Exchange) -> float:
        """Time in ns."""
        if not exchange.array_bytes:
            return 0.0
        load, spread = self._loads(all_to_all=exchange.operation == "all_to_all"), self._spread
        shared = round(exchange.array_bytes * load.of_measured)
        measured = measured_time(self._cluster, Exchange(exchange.operation, shared), spread.devices, spread.level)
        if measured is not None:
            return measured
        return min(self._ring(exchange, load.ring), self._trees(exchange, load.trees))

    def _ring(self, exchange: Exchange, load: float) -> float:
        """Each device sends a share of the array per step; hops inside nodes are as quick as links there."""
        spread, passes = self._spread, 2 if exchange.operation == "all_reduce" else 1
        size, steps = round(exchange.array_bytes * load), spread.devices - 1
        hops = steps * spread.level.latency_ns if exchange.operation == "all_to_all" else spread.ring_latency_ns
        return passes * (hops + steps * 1e9 * size / spread.devices / spread.level.bandwidth_bytes_per_s)

    def _trees(self, exchange: Exchange, load: float) -> float:
        """Up and down two trees over the nodes, of which each has half of the array: fewer hops, and more bytes."""
        spread = self._spread
        if exchange.operation != "all_reduce" or not spread.outer:
            return math.inf
        rate = TREE_RATE * spread.level.bandwidth_bytes_per_s
        return 2 * (spread.tree_latency_ns + 1e9 * exchange.array_bytes * load / rate)


def measured_time(cluster: Cluster, exchange: Exchange, devices: int, level: LinkLevel) -> float | None:
    """Measured time of the level, interpolated over sizes and numbers of devices.

    Between two measured numbers of devices the time is interpolated in the logarithms of both; None outside of them,
    and where only one other was measured.
    """
    measured = sorted(
        (curve.num_devices, time_on_curve(curve.points, exchange.array_bytes))
        for curve in cluster.measured
        if (curve.operation, curve.level) == (exchange.operation, level.name)
    )
    for count, time in measured:
        if count == devices:
            return time
    for (fewer, low), (more, high) in zip(measured, measured[1:], strict=False):
        if fewer < devices < more:
            share = math.log(devices / fewer) / math.log(more / fewer)
            return low * math.pow(high / low, share)
    return None


@dataclass(frozen=True, slots=True)
class LinkPath:
    """Links that a device's words take, innermost first: how many devices are in a group of places of each.

    ``levels`` are pairs of the devices in one of the places that a link goes between, and of its bytes per second for
    each device, where all of these send at once.
    """

    levels: tuple[tuple[int, float], ...]
    latency_ns: float = 0.0

    @classmethod
    def in_cluster(cls, cluster: Cluster, devices: int) -> LinkPath:
        """Of the first devices of a cluster, with what all devices of a node share: by default one device's rate."""
        return cls.of_group(cluster, range(devices))

    @classmethod
    def of_group(cls, cluster: Cluster, group: Sequence[int]) -> LinkPath:
        """Of these devices of a cluster, of which its places have equally many; the rest of a node does the same."""
        found, place, own, latency = list[tuple[int, float]](), 1, 1, 0
        for level in cluster.levels:
            if own >= len(group):
                break
            rate = float(level.bandwidth_bytes_per_s)
            if level.oversubscription is not None:
                found.append((own, rate / level.oversubscription))
            else:
                found.append((own, min(rate, (level.node_bandwidth_bytes_per_s or rate) / place)))
            place, latency = level.group_size, level.latency_ns
            own = -(-len(group) // len({device // place for device in group}))
        return cls(tuple(found), latency)


def dispatch_ns(sent_bytes: float, experts_each: int, devices: int, links: LinkPath, apart: int = 1) -> float:
    """Ns in which each device sends each of its words to those of ``devices`` that have one of its experts.

    A word goes once to each node where it has any, and there once to each device; of devices of which each so many
    neighbours ``apart`` have the same experts, to one of them. Which experts words go to is taken as even and
    independent; ``sent_bytes`` are a device's words, each counted once.
    """
    return _busiest_ns(lambda place: sent_bytes * places_reached(devices / place, experts_each), devices, links, apart)


def counts_ns(devices: int, links: LinkPath, apart: int = 1) -> float:
    """Ns in which each of ``devices`` tells each it will send words to how many, by :func:`dispatch_ns`'s links.

    Those ``apart`` that have the same experts then tell each other how many have come to them.
    """
    each = COUNTS_BYTES * devices / apart  # of all, as who has how much to do is known to all
    there = _busiest_ns(lambda place: each * (devices - place) / apart, devices, links, apart)
    return there + _busiest_ns(lambda place: each * (apart - place), apart, links, 1)


COUNTS_BYTES = 16
"""What one device says of another: how many words come to it, and how many products with experts they are."""


def _busiest_ns(sent: Callable[[int], float], devices: int, links: LinkPath, apart: int) -> float:
    """Ns of the slowest link, by the bytes that a device sends out of a group of so many with its own among them."""
    ends = [*(place for place, _ in links.levels[1:]), devices]  # of the groups that a link is inside of
    times = [
        1e9 * sent(max(place, apart)) / rate
        for (place, rate), end in zip(links.levels, ends, strict=False)
        if min(end, devices) > max(place, apart)
    ]
    return max(times) + links.latency_ns if times else 0.0


def places_reached(places: Any, experts_each: Any) -> Any:
    """For one number, or arrays: how many places other than its own a token's experts are in, on average."""
    return places_taken(places, experts_each) * (1 - 1 / places)


def places_taken(places: Any, experts_each: Any) -> Any:
    """The same, its own among them."""
    return places * (1 - (1 - 1 / places) ** experts_each)


def send_time(cluster: Cluster | None, pairs: Sequence[tuple[int, int]], size: int) -> int:
    """Time in ns when every pair's first device sends ``size`` bytes to its second, all at once."""
    busiest = busiest_pair(cluster, pairs)
    return busiest.send_time(cluster, size) if cluster is not None and busiest else 0


@dataclass(frozen=True, slots=True)
class BusiestPair:
    """The slowest of pairs of devices that all send at once, and how many share a link like its."""

    source: int
    target: int
    crowd: float

    def send_time(self, cluster: Cluster, size: int) -> int:
        """Time in ns when each pair sends ``size`` bytes."""
        return sum(transfer_time(cluster, self.source, self.target, round(size * self.crowd))) if size else 0


def busiest_pair(cluster: Cluster | None, pairs: Sequence[tuple[int, int]]) -> BusiestPair | None:
    """The slowest pair; None if nothing takes time."""
    moved = [pair for pair in pairs if pair[0] != pair[1]]
    if cluster is None or not moved:
        return None
    level = _outermost(cluster, moved)
    if level is None:
        return None
    node = _node_size(cluster, level)
    leaving = Counter(source // node for source, target in moved if source // node != target // node)
    source, target = next(pair for pair in moved if cluster.level_between(*pair) == level)
    crowd = _crowd(level, max(leaving.values(), default=1)) if node > 1 and level.oversubscription is None else 1
    return BusiestPair(source, target, max(crowd, slowest_share(cluster, level)))


def _crowd(level: LinkLevel, leaving: float) -> float:
    """How many of those that leave a node at once share a link of the level's bandwidth, by what the node has."""
    if level.node_bandwidth_bytes_per_s is None:
        return leaving  # less than one where an all-to-all sends less than a ring
    return max(1.0, leaving * level.bandwidth_bytes_per_s / level.node_bandwidth_bytes_per_s)


def _outermost(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> LinkLevel | None:
    """The outermost level that any of the pairs talks over."""
    used = [level for pair in pairs if (level := cluster.level_between(*pair)) is not None]
    return max(used, key=lambda level: level.group_size, default=None)


def _node_size(cluster: Cluster, level: LinkLevel) -> int:
    """Devices in one group of the level below; 1 for the innermost."""
    return max((each.group_size for each in cluster.levels if each.group_size < level.group_size), default=1)
