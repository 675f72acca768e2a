"""Trees of switches: prices against flows that are counted one by one, and by hand on 32 devices."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from random import Random

import pytest

from pipeplan.costs.clusters import in_tree, named_cluster
from pipeplan.costs.communication import (
    Exchange,
    GroupPrices,
    LinkPath,
    all_reduce_time,
    prices_in,
    send_time,
    time_of_groups,
    transfer_time,
)
from pipeplan.costs.spread import TREES_LEAVE, GroupSpread
from pipeplan.costs.trees import MessageCrowds
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, DeviceKind, LinkLevel, Source
from pipeplan.files.row_messages import Combining
from pipeplan.workload.elements import Dependency, Hop

GB = 10**9


def tree(*levels: tuple[int, int, float | None], devices: int = 0, rails: int | None = None) -> Cluster:
    """Levels without latency: devices in a group, GB/s of a device, and oversubscription."""
    links = tuple(
        LinkLevel(
            name=f"level{number}",
            group_size=size,
            latency_ns=0,
            bandwidth_bytes_per_s=rate * GB,
            oversubscription=ratio,
            rails=number == rails,
        )
        for number, (size, rate, ratio) in enumerate(levels)
    )
    kind = DeviceKind(name="device", count=devices or levels[-1][0])
    return Cluster(name="tree", source=Source(method="estimated"), devices=(kind,), levels=links)


THIRTY_TWO = tree((4, 400, None), (16, 50, 1.0), (32, 50, 4.0))
"""Nodes of 4, racks of 4 nodes, and uplinks of a rack that carry what 4 of its 16 devices can send."""

Flow = tuple[int, int]


def seconds(cluster: Cluster, flows: Mapping[Flow, float], size: float, *, alone: bool = True) -> float:
    """Until each flow has moved its part of ``size`` bytes, all at once: each link by all that is on it.

    A device sends and takes at the rate of one unless not ``alone``, and over the uplinks of all groups that a flow
    leaves.
    """
    on: Counter[tuple[object, ...]] = Counter()
    rates: dict[tuple[object, ...], float] = {}
    for (source, target), part in flows.items():
        for number, level in enumerate(cluster.levels):
            inside = cluster.levels[number - 1]
            if number and source // inside.group_size == target // inside.group_size:
                break
            for own in (("sends", number, source), ("takes", number, target)):
                rates[own] = level.bandwidth_bytes_per_s if alone else float("inf")
                on[own] += part  # type: ignore[assignment]  # parts of a whole
            if level.oversubscription is None:
                continue
            place, below = (number, source // inside.group_size), inside.group_size
            if inside.rails:
                node = cluster.levels[number - 2].group_size
                place, below = (number, source // inside.group_size * node + target % node), below // node
            on[place] += part  # type: ignore[assignment]
            rates[place] = below * level.bandwidth_bytes_per_s / level.oversubscription
    return max((size * count / rates[link] for link, count in on.items()), default=0.0)


def rings(cluster: Cluster, groups: Sequence[Sequence[int]]) -> Counter[Flow]:
    """As many rings in each group as it has devices in a node: in and out of each node by others, on one rail."""
    found: Counter[Flow] = Counter()
    for group in groups:
        nodes = defaultdict[int, list[int]](list)
        for device in group:
            nodes[device // cluster.levels[0].group_size].append(device)
        ways = list(nodes.values())
        channels = len(ways[0]) if len(ways) > 1 else 1
        for channel in range(channels):
            turned = [own[(channel - n) % len(own) :] + own[: (channel - n) % len(own)] for n, own in enumerate(ways)]
            ring = [device for own in turned for device in own]
            for flow in zip(ring, [*ring[1:], ring[0]], strict=True):
                found[flow] += 1 / channels  # type: ignore[assignment]  # parts of a whole
    return found


def all_pairs(groups: Sequence[Sequence[int]]) -> Counter[Flow]:
    return Counter((a, b) for group in groups for a in group for b in group if a != b)


def along(devices: int, stride: int, extent: int) -> list[list[int]]:
    """Groups along a dimension of a mesh of all devices."""
    starts = [d for d in range(devices) if d // stride % extent == 0]
    return [[first + stride * i for i in range(extent)] for first in starts]


def meshes(devices: int) -> Iterator[list[list[int]]]:
    powers = [2**n for n in range(devices.bit_length()) if 2**n <= devices]
    for stride, extent in product(powers, powers):
        if extent > 1 and stride * extent <= devices:
            yield along(devices, stride, extent)


TREES = [
    THIRTY_TWO,
    tree((2, 400, None), (8, 50, 2.0), (16, 50, 3.0), (64, 25, 8.0)),
    tree((4, 300, None), (16, 40, 1.0), (64, 40, 4.0), rails=1),
]
OPERATIONS: tuple[Combining, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("cluster", TREES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_collectives_of_all_devices_are_as_slow_as_the_busiest_link(cluster: Cluster, operation: Combining) -> None:
    size = 3 * GB
    for groups in meshes(cluster.num_devices):
        count = len(groups[0])
        steps = (count - 1) * (2 if operation == "all_reduce" else 1)
        if operation == "all_to_all":
            level = cluster.level_between(groups[0][0], groups[0][-1])
            assert level is not None
            alone = steps * size / count / level.bandwidth_bytes_per_s  # one message after the other
            expected = max(alone, seconds(cluster, all_pairs(groups), size / count, alone=False))
        else:
            expected = steps * seconds(cluster, rings(cluster, groups), size / count)
        assert time_of_groups(cluster, Exchange(operation, size), groups) == pytest.approx(1e9 * expected), groups


def test_by_hand_on_32_devices() -> None:
    """Two racks of 16: with 4:1 their uplinks carry 200 GB/s, a ring or a message of each device a quarter of 50."""
    pairs, within = [[d, d + 16] for d in range(16)], [[d, d + 4] for d in (*range(4), *range(8, 12))]
    sum_of = Exchange("all_reduce", GB)
    assert time_of_groups(THIRTY_TWO, sum_of, within) == pytest.approx(1e9 * 2 * 0.5 / 50)
    assert time_of_groups(THIRTY_TWO, sum_of, pairs) == pytest.approx(1e9 * 2 * 0.5 / 12.5)
    fours = [[d, d + 1, d + 16, d + 17] for d in range(0, 16, 2)]  # 8 rings leave a rack
    assert time_of_groups(THIRTY_TWO, sum_of, fours) == pytest.approx(1e9 * 2 * 3 / 4 / 25)
    nodes = [[*range(8)], [*range(8, 16)], [*range(16, 24)], [*range(24, 32)]]  # two each: four rings of a quarter
    assert time_of_groups(THIRTY_TWO, sum_of, nodes) == pytest.approx(1e9 * 2 * 7 / 8 / 200)
    strided = [[d, d + 2, d + 4, d + 6] for d in (0, 1, 8, 9, 16, 17, 24, 25)]  # two in each node, and two rings
    assert time_of_groups(THIRTY_TWO, sum_of, strided) == pytest.approx(1e9 * 2 * 3 / 4 / 100)
    assert time_of_groups(THIRTY_TWO, sum_of, [range(32)]) == pytest.approx(1e9 * 2 * 31 / 32 / 200), "all uplinks"
    words = Exchange("all_to_all", GB)  # half of what each device has goes to the other rack, at 12.5 GB/s
    assert time_of_groups(THIRTY_TWO, words, [range(32)]) == pytest.approx(1e9 * 0.5 / 12.5)
    assert prices_in(THIRTY_TWO)(words, 32) == pytest.approx(1e9 * 0.5 / 12.5)
    assert prices_in(THIRTY_TWO)(sum_of, 16) == pytest.approx(1e9 * 2 * 15 / 16 / 200)
    assert all_reduce_time(THIRTY_TWO, [0, 16], GB) == pytest.approx(1e9 * 2 * 0.5 / 12.5)
    assert send_time(THIRTY_TWO, pairs_of(pairs), GB) == pytest.approx(1e9 / 12.5)
    assert LinkPath.in_cluster(THIRTY_TWO, 32).levels == ((1, 400e9), (4, 50e9), (16, 12.5e9))


LATE = tuple(
    level.model_copy(update={"latency_ns": latency})
    for level, latency in zip(THIRTY_TWO.levels, (1_000, 10_000, 100_000), strict=True)
)


def test_hops_by_hand_on_32_devices() -> None:
    """Of little, rings take the time of their hops, each over the innermost level it needs; trees have fewer hops."""
    cluster = THIRTY_TWO.model_copy(update={"levels": LATE})
    tiny = 1
    gather = time_of_groups(cluster, Exchange("all_gather", tiny), [range(32)])
    assert gather == pytest.approx(24 * 1_000 + 6 * 10_000 + 1 * 100_000), "8 nodes in 2 racks"
    alone = time_of_groups(cluster, Exchange("all_gather", tiny), [[d, d + 16] for d in range(16)])
    assert alone == pytest.approx(100_000, rel=1e-3)
    inside = time_of_groups(cluster, Exchange("all_reduce", tiny), [range(4)])
    assert inside == pytest.approx(2 * 3 * 1_000, rel=1e-3), "a ring alone"
    trees = time_of_groups(cluster, Exchange("all_reduce", tiny), [range(32)])
    assert trees == pytest.approx(2 * (3 * 1_000 + 2 * 10_000 + 100_000), rel=1e-3), "4 nodes in a rack, 2 racks"
    flat = cluster.model_copy(update={"levels": (LATE[0], LATE[1].model_copy(update={"group_size": 32}))})
    few, much = Exchange("all_reduce", 10**6), Exchange("all_reduce", GB)
    both = 1e9 * few.array_bytes / 200e9, 1e9 * much.array_bytes / 200e9  # all four adapters of a node
    assert time_of_groups(flat, few, [range(32)]) == pytest.approx(2 * (3 * 1_000 + 3 * 10_000 + both[0] / 0.92))
    assert time_of_groups(flat, much, [range(32)]) == pytest.approx(2 * (24_000 + 70_000 + 31 / 32 * both[1]))


def complements(nodes: int) -> list[list[Flow]]:
    """NCCL's two trees over nodes, as (child, parent): parents by the lowest bit, and the same seen from the end."""

    def parent(node: int) -> int:
        bit = node & -node
        up = (node ^ bit) | (bit << 1)
        return node ^ bit if up >= nodes else up

    first = [(node, parent(node)) for node in range(1, nodes)]
    return [first, [(nodes - 1 - child, nodes - 1 - above) for child, above in first]]


@pytest.mark.parametrize(("nodes", "rack"), [(8, 4), (16, 4), (64, 8), (128, 32)])
def test_trees_send_at_most_three_halves_of_what_rings_do_over_uplinks(nodes: int, rack: int) -> None:
    """Each has half of the array, up and down; a ring sends twice the array over each rack's uplinks."""
    leaving: Counter[int] = Counter()
    for child, above in (edge for tree in complements(nodes) for edge in tree):
        if child // rack != above // rack:
            leaving.update((child // rack, above // rack))  # sums go up, and what they give comes down
    assert max(leaving.values()) / 2 <= TREES_LEAVE * 2
    assert nodes == 2 * rack or max(leaving.values()) / 2 == TREES_LEAVE * 2, "and some rack does"


def pairs_of(groups: Sequence[Sequence[int]]) -> list[Flow]:
    return [(first, last) for first, last in groups]


def waits(*each: Sequence[Flow]) -> list[Dependency]:
    """A dependency with messages between these devices, of a millisecond on their link."""
    hops = [[Hop(source_device=a, target_device=b, bytes=1, occupancy_ns=10**6) for a, b in flows] for flows in each]
    return [Dependency(source=f"{n}F", target=f"{n + 1}F", hops=tuple(own)) for n, own in enumerate(hops)]


def test_messages_share_the_uplinks_with_all_that_leave_a_rack() -> None:
    """By hand: 8 devices of a rack send to the other, 8 others of it receive from there; then 16 send."""
    level = THIRTY_TWO.levels[-1]
    forth, back = [(d, d + 16) for d in range(8)], [(d + 24, d + 8) for d in range(8)]
    for flows, crowd in (
        ([forth[:4]], 1),  # as many as the uplinks carry
        ([forth], 2),
        ([forth, back], 2),  # each way has links of its own
        ([forth, [(d + 8, d + 24) for d in range(8)]], 4),
        ([forth, [(d, d + 16 ^ 1) for d in range(8)]], 2),  # a device sends one after the other
        ([forth, [(d, d + 20) for d in range(8)]], 3),  # but 12 take something
        ([[(d, d + 4) for d in range(12)]], 1),  # within the rack
    ):
        crowds = MessageCrowds(THIRTY_TWO, waits(*flows))
        assert crowds.of(level) == crowd, flows
        assert crowds.of(THIRTY_TWO.levels[1]) == 1
    shared = MessageCrowds(THIRTY_TWO, waits(forth)).shared
    near, far = waits([(0, 4), (0, 16)])[0].hops
    assert [shared(hop).occupancy_ns for hop in (near, far)] == [10**6, 2 * 10**6]


@pytest.mark.parametrize("cluster", TREES)
def test_messages_of_random_devices_are_as_slow_as_the_busiest_uplink(cluster: Cluster) -> None:
    draw, every, level = Random(3), range(cluster.num_devices), cluster.levels[-1]
    for _ in range(40):
        senders = draw.sample(every, draw.randint(2, cluster.num_devices))
        flows = [(a, b) for a, b in zip(senders, draw.sample(every, len(senders)), strict=True) if a != b]
        crowd = MessageCrowds(cluster, waits(flows)).of(level)
        ways = [flows] if any(each.rails for each in cluster.levels) else [flows, [(b, a) for a, b in flows]]
        busiest = max(seconds(cluster, Counter(way), 1.0, alone=False) for way in ways)
        if len(ways) == 2:  # what comes down has as many links as what goes up
            assert float(crowd) == pytest.approx(max(1.0, busiest * level.bandwidth_bytes_per_s))
        else:
            assert float(crowd) >= max(1.0, busiest * level.bandwidth_bytes_per_s) * (1 - 1e-9)


def with_nodes(cluster: Cluster, **links: int) -> Cluster:
    """The same with other links inside nodes."""
    return cluster.model_copy(update={"levels": (cluster.levels[0].model_copy(update=links), *cluster.levels[1:])})


def test_rails() -> None:
    """Two units of two nodes of 4: a message to another place goes through its node, and on that place's rail."""
    cluster = tree((4, 300, None), (8, 40, 1.0), (16, 40, 2.0), rails=1)
    late = with_nodes(cluster, latency_ns=7)
    slow = with_nodes(cluster, latency_ns=7, bandwidth_bytes_per_s=10 * GB)
    assert transfer_time(late, 0, 4, GB) == (0, 25_000_000), "the same rail"
    assert transfer_time(late, 0, 5, GB) == (7, 25_000_000), "by the node's own links first"
    assert transfer_time(slow, 0, 5, GB) == (0, 25_000_000), "by the spine, as these are slower"
    two = MessageCrowds(cluster, waits([(0, 8), (4, 12)])), MessageCrowds(cluster, waits([(0, 8), (5, 13)]))
    assert [each.of(cluster.levels[-1]) for each in two] == [2, 1], "two on one switch with one uplink, or on two"
    onto = MessageCrowds(cluster, waits([(0, 8), (5, 12)]))
    assert onto.of(cluster.levels[-1]) == 2, "both leave on the rail of their target"
    across = MessageCrowds(slow, waits([(0, 5), (4, 1)]))
    assert across.of(slow.levels[-1]) == 2, "they cross the spine although both are in one unit"


def test_what_files_of_trees_may_not_say() -> None:
    with pytest.raises(ValueError, match=r"levels\[0\] \('level0'\) has oversubscription, but no level is inside it"):
        tree((4, 400, 2.0), (16, 50, 1.0))
    with pytest.raises(ValueError, match="group_size 24 is not a larger multiple of 16"):
        tree((4, 400, None), (16, 50, 1.0), (24, 50, 4.0))
    content = tree((4, 400, None), (16, 50, 1.0), (32, 50, 1.0), rails=1).model_dump()
    content["levels"][2]["rails"] = True
    with pytest.raises(ValueError, match="'level1' and 'level2' both have rails"):
        Cluster.model_validate(content)
    content["levels"][1].update({"rails": False, "node_bandwidth_bytes_per_s": 5})
    with pytest.raises(ValueError, match=r"both oversubscription 1 and node_bandwidth_bytes_per_s 5"):
        Cluster.model_validate(content)
    domains = [{"name": "node", "group_size": 4}, {"name": "power", "group_size": 10}]
    content = THIRTY_TWO.model_dump() | {"failure_domains": tuple(domains)}
    with pytest.raises(ValueError, match=r"failure_domains\[1\] \('power'\) has group_size 10, .* whole domains of 4"):
        Cluster.model_validate(content)
    assert [each.name for each in THIRTY_TWO.domains] == ["node"], "what no file says"


def test_trees_of_the_catalog() -> None:
    nodes = named_cluster("cluster-h100", 128)
    found = in_tree(nodes, [2, 4], [1, 4], power=3)
    assert [(each.name, each.group_size, each.oversubscription) for each in found.levels] == [
        ("nvlink", 8, None),
        ("rack", 16, None),
        ("pod", 32, 1.0),
        ("spine", 128, 4.0),
    ]
    assert [(each.name, each.group_size) for each in found.failure_domains] == [
        ("node", 8),
        ("rack", 16),
        ("power", 24),
    ]
    rails = in_tree(nodes, [4], rails=True)
    assert [each.rails for each in rails.levels] == [False, True, False]
    assert [each.name for each in rails.domains] == ["node"]
    for racks, ratios, text in (
        ([], [4.0], "--oversubscription is of switches above nodes; say with --rack how many nodes each has"),
        ([3, 4], [], "--rack 3,4: 4 nodes under a switch are no multiple of the 3 under each below it"),
        ([1], [], "--rack 1: 1 nodes under a switch are no multiple of a node"),
        ([2, 4], [4.0], "--oversubscription has 1 ratios, and --rack 2 tiers"),
        ([16], [], "--rack 16 has 128 devices under one switch, and the cluster has 128"),
    ):
        with pytest.raises(UsageError, match=re.escape(text)):
            in_tree(nodes, racks, ratios)
    with pytest.raises(UsageError, match="has 1 levels of links, and racks need two"):
        in_tree(named_cluster("cluster-h100", 8), [2])


@pytest.mark.parametrize("seed", range(4))
def test_groups_that_stand_alike_are_priced_once_and_as_each_alone(seed: int) -> None:
    """Whatever place of the outermost level they begin in; which :func:`price_of_groups` remembers."""
    draw = Random(seed)
    cluster = (tree((4, 400, None), (16, 50, 2.0), (64, 50, 4.0), rails=1), tree((4, 400, None), (64, 50, None)))[
        seed % 2
    ]
    unit = cluster.levels[-2].group_size
    for _ in range(6):
        size = draw.choice([2, 4, 8])
        own = draw.sample(range(unit), k=min(unit, 2 * size))
        own = own if len(own) == 2 * size else [*range(2 * size)]
        groups = [own[:size], own[size:]]
        for operation, places in product(("all_reduce", "all_gather", "all_to_all"), (0, 1, 3)):
            there = [[device + places * unit for device in group] for group in groups]
            if max(map(max, there)) >= cluster.num_devices:
                continue
            spread = GroupSpread.of(cluster, there)
            assert spread is not None
            exchange = Exchange(operation, 10**6)
            assert time_of_groups(cluster, exchange, there) == GroupPrices(cluster, spread)(exchange)
