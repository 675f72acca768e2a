"""Devices for groups: against every assignment of small problems, and what holds for all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.costs.communication import all_reduce_time, transfer_time
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Cluster, DeviceKind, LinkLevel, MeasuredCurve, Source
from pipeplan.partition.mapping import (
    GroupLinks,
    GroupMemory,
    LayoutSearch,
    LinkTime,
    link_time,
    mapped,
    neighbours,
    num_neighbours,
)
from support.marks import some_of

Devices = tuple[int, ...]
Memory = tuple[tuple[int, int | None], ...]  # (devices, bytes of each)

MEGABYTE = 1_000_000
NODES = LinkLevel(name="node", group_size=4, latency_ns=1_000, bandwidth_bytes_per_s=10**11)
NETWORK = LinkLevel(name="network", group_size=8, latency_ns=10_000, bandwidth_bytes_per_s=10**10)
RACKS = ((8, 2_000, 300 * 10**9), (64, 5_000, 50 * 10**9), (1_024, 10_000, 10 * 10**9))  # size, latency, bytes per s


@dataclass(frozen=True)
class Question:
    groups: tuple[int, ...]
    traffic: dict[tuple[int, int], int]
    cluster: Cluster
    sync: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()

    def answer(self) -> tuple[Devices, ...]:
        return mapped(self.groups, self.traffic, self.cluster, sync=self.sync, needs=self.needs)

    def told(self, devices: Sequence[Devices]) -> LinkTime:
        return link_time(devices, self.traffic, self.cluster, sync=self.sync)

    def in_order(self) -> tuple[Devices, ...]:
        numbers = iter(range(self.cluster.num_devices))
        return tuple(tuple(next(numbers) for _ in range(count)) for count in self.groups)

    def fits(self, devices: Sequence[Devices]) -> bool:
        memory = [math.inf if size is None else size for size in self.cluster.memory_bytes]
        needs = self.needs or [0] * len(devices)
        return all(memory[device] >= need for own, need in zip(devices, needs, strict=True) for device in own)


def cluster_of(levels: Sequence[LinkLevel], memory: Memory, measured: Sequence[MeasuredCurve] = ()) -> Cluster:
    kinds = tuple(DeviceKind(name=f"kind{i}", count=count, memory_bytes=size) for i, (count, size) in enumerate(memory))
    source = Source(method="estimated")
    return Cluster(name="here", source=source, devices=kinds, levels=tuple(levels), measured=tuple(measured))


def large(groups: Sequence[int], traffic: dict[tuple[int, int], int], sync: int) -> Question:
    levels = [
        LinkLevel(name=f"level{size}", group_size=size, latency_ns=latency, bandwidth_bytes_per_s=rate)
        for size, latency, rate in RACKS
    ]
    return Question(tuple(groups), traffic, cluster_of(levels, ((1_024, None),)), (sync,) * len(groups))


# Random questions ----------------------------------------------------------------------------------------------


def random_question(seed: int, *, most_devices: int = 8) -> Question:
    """Chains, trees and graphs of groups, in order or shuffled, on up to three levels and kinds of device."""
    draw = Random(seed)
    num_devices = draw.randint(4, most_devices)
    groups: list[int] = []
    while sum(groups) < num_devices and not (len(groups) > 1 and draw.random() < 0.08):
        groups.append(min(draw.choice((1, 1, 1, 2, 2, 3, 4)), num_devices - sum(groups)))
    numbers = list(range(len(groups)))
    if draw.random() < 0.5:
        draw.shuffle(numbers)
    traffic: dict[tuple[int, int], int] = {}
    for g, h in random_edges(len(groups), draw):
        pair = numbers[g], numbers[h]
        traffic[pair] = draw.choice((1, 2, 3, 5, 8, 20)) * draw.choice((MEGABYTE, MEGABYTE // 10))
        if draw.random() < 0.7:
            traffic[pair[::-1]] = traffic[pair]
    sync = tuple(draw.choice((0, MEGABYTE, 10 * MEGABYTE)) if count > 1 else 0 for count in groups)
    cluster, needs = random_cluster(num_devices, draw), tuple(draw.choice((0, 0, 0, 30)) for _ in groups)
    return Question(tuple(groups), traffic, cluster, sync, needs)


def random_edges(num_groups: int, draw: Random) -> list[tuple[int, int]]:
    kind = draw.choice(("chain", "tree", "some", "most"))
    if kind == "chain":
        return list(pairwise(range(num_groups)))
    if kind == "tree":
        return [(draw.randrange(group), group) for group in range(1, num_groups)]
    return [pair for pair in combinations(range(num_groups), 2) if draw.random() < (0.4 if kind == "some" else 0.9)]


def random_cluster(num_devices: int, draw: Random) -> Cluster:
    sizes = [size for size in draw.choice(((2,), (3,), (4,), (1, 4), (2, 4), (2, 4, 8), (4, 8))) if size < num_devices]
    unit = sizes[-1] if sizes else 1
    sizes.append(max(2, -(-num_devices // unit)) * unit)
    rate, levels = 10**12, []
    for size in sizes:
        latency = draw.choice((0, 1_000, 5_000))
        levels.append(LinkLevel(name=f"l{size}", group_size=size, latency_ns=latency, bandwidth_bytes_per_s=rate))
        rate //= draw.choice((2, 4, 10))
    points = ((1_000, 2_000), (MEGABYTE, draw.randint(2_000, 90_000)), (10 * MEGABYTE, 10**6))
    curves = [MeasuredCurve(operation="send", level=levels[-1].name, points=points)] if draw.random() < 0.2 else []
    small = draw.choice((0, 0, draw.randint(1, num_devices - 1)))
    memory = ((num_devices - small, None), (small, draw.choice((25, 50)))) if small else ((num_devices, 50),)
    return cluster_of(levels, memory, curves)


# Every assignment ----------------------------------------------------------------------------------------------


class Reference:
    """Time of links device by device, and the least over every assignment."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.known: dict[tuple[int, int, int], int] = {}

    def send(self, source: int, target: int, size: int) -> int:
        key = source, target, size
        if key not in self.known:
            self.known[key] = sum(transfer_time(self.question.cluster, source, target, size))
        return self.known[key]

    def time(self, devices: Sequence[Devices]) -> LinkTime:
        links: list[int] = []
        for (g, h), size in self.question.traffic.items():
            pairs = sharing(devices[g], devices[h])
            links += [self.send(source, target, math.ceil(size / len(pairs))) for source, target in pairs]
        for own, size in zip(devices, self.question.sync, strict=True):
            links += [sum_time(self.question.cluster, own, size)] * len(own)
        return LinkTime(sum(links), max(links, default=0))

    def least(self) -> LinkTime | None:
        return min(map(self.time, self.assignments((), range(self.question.cluster.num_devices))), default=None)

    def assignments(self, before: tuple[Devices, ...], free: Sequence[int]) -> Iterator[tuple[Devices, ...]]:
        """All that differ in the innermost units or in the memory of what groups have."""
        if len(before) == len(self.question.groups):
            yield before
            return
        inner, memory = self.question.cluster.levels[0].group_size, self.question.cluster.memory_bytes
        need, seen = self.question.needs[len(before)], set()
        usable = [device for device in free if need <= (math.inf if memory[device] is None else memory[device])]
        for own in combinations(usable, self.question.groups[len(before)]):
            alike = tuple((device // inner, memory[device]) for device in own)
            if alike not in seen:
                seen.add(alike)
                yield from self.assignments((*before, own), [device for device in free if device not in own])


def sum_time(cluster: Cluster, own: Devices, size: int) -> int:
    """As where one device alone is away from the others, as far as any is: mapping knows no more of a group."""
    level = cluster.level_between(min(own), max(own))
    last = 0 if level is None else level.group_size - 1
    return all_reduce_time(cluster, [*range(len(own) - 1), last], size) if len(own) > 1 else 0


def sharing(first: Devices, second: Devices) -> list[tuple[int, int]]:
    """Pairs whose samples overlap, of len(first) * len(second) samples."""
    a, b = len(first), len(second)
    return [
        (first[i], second[j])
        for i in range(a)
        for j in range(b)
        if set(range(i * b, (i + 1) * b)) & set(range(j * a, (j + 1) * a))
    ]


def test_is_nearly_always_as_good_as_every_assignment() -> None:
    losses, solved, improved, count = [], 0, 0, 60
    for seed in range(count):
        question = random_question(seed)
        least = Reference(question).least()
        if least is None:
            with pytest.raises(InfeasibleError):
                question.answer()
            continue
        found = question.told(question.answer())
        assert found >= least
        solved, improved = solved + 1, improved + (least < question.told(question.in_order()))
        if found > least:
            losses.append(found.total_ns / least.total_ns - 1)
    assert solved > 0.8 * count
    assert improved > solved / 3  # the questions are not trivial
    assert len(losses) <= 1
    assert max(losses, default=0) <= 0.25


@settings(max_examples=some_of(10))
@given(st.integers(1_000, 10**9), st.integers(8, 24))
def test_what_holds_for_all(seed: int, most_devices: int) -> None:
    question = random_question(seed, most_devices=most_devices)
    try:
        devices = question.answer()
    except InfeasibleError:
        return
    taken = [device for own in devices for device in own]
    assert tuple(map(len, devices)) == question.groups
    assert all(list(own) == sorted(own) for own in devices)
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(range(question.cluster.num_devices))
    assert question.fits(devices)
    assert question.told(devices) == Reference(question).time(devices)
    if question.fits(question.in_order()):
        assert devices == question.in_order() or question.told(devices) < question.told(question.in_order())
    assert question.answer() == devices


# Known answers -------------------------------------------------------------------------------------------------


def test_a_shuffled_chain_is_cut_where_little_is_sent() -> None:
    traffic = {(0, 3): 9, (3, 6): 9, (6, 1): 9, (1, 4): 1, (4, 7): 9, (7, 2): 9, (2, 5): 9}
    question = Question((1,) * 8, {pair: size * MEGABYTE for pair, size in traffic.items()}, two_nodes())
    nodes = [{group for group, (device,) in enumerate(question.answer()) if device // 4 == node} for node in (0, 1)]
    assert sorted(map(sorted, nodes)) == [[0, 1, 3, 6], [2, 4, 5, 7]]


@pytest.mark.parametrize(("sync", "together"), [(0, False), (100 * MEGABYTE, True)])
def test_replicas_stay_in_a_node_where_summing_gradients_costs_more_than_sending(sync: int, together: bool) -> None:
    """Two stages of four replicas: either their replicas are neighbours, or one stage's with the other's."""
    question = Question((4, 4), {(0, 1): 10 * MEGABYTE, (1, 0): 10 * MEGABYTE}, two_nodes(), (sync, sync))
    first, _ = question.answer()
    assert (len({device // 4 for device in first}) == 1) == together


def test_groups_are_not_cut_by_a_node_where_devices_can_be_left_out() -> None:
    question = Question((3, 3), {(0, 1): MEGABYTE}, two_nodes(), (10 * MEGABYTE,) * 2)
    assert question.answer() == ((0, 1, 2), (4, 5, 6))


def test_a_group_larger_than_a_node_takes_whole_nodes_of_a_rack() -> None:
    levels = [NODES, NETWORK, NETWORK.model_copy(update={"name": "far", "group_size": 16, "latency_ns": 50_000})]
    question = Question((2, 8, 2), {(0, 2): MEGABYTE}, cluster_of(levels, ((16, None),)), (0, 10 * MEGABYTE, 0))
    devices = question.answer()
    assert {device // 8 for device in devices[1]} == {1 - devices[0][0] // 8}
    assert len({device // 4 for device in devices[0] + devices[2]}) == 1


def test_of_equal_totals_the_one_with_the_idler_busiest_link_is_taken() -> None:
    """The group between sends as much to both others; over the four pairs with one of them no link carries much."""
    levels = [
        level.model_copy(update={"latency_ns": 0, "group_size": size}) for level, size in ((NODES, 5), (NETWORK, 10))
    ]
    traffic = {(0, 1): 8 * MEGABYTE, (1, 2): 8 * MEGABYTE}
    question = Question((1, 1, 4), traffic, cluster_of(levels, ((10, None),)), (0, 0, 2 * MEGABYTE))
    devices = question.answer()
    assert question.told(devices) == LinkTime(80_000 + 800_000 + 4 * 30_000, 200_000)
    assert devices[0][0] // 5 == devices[1][0] // 5


def test_where_links_cost_the_same_everywhere_the_order_is_kept() -> None:
    level = NODES.model_copy(update={"group_size": 8})
    for levels in ((level,), ()):
        question = Question((2, 1, 4), {(0, 1): 5, (1, 2): 7}, cluster_of(levels, ((8, None),)), (9, 0, 9))
        assert question.answer() == question.in_order()


def test_no_traffic_and_no_groups() -> None:
    assert mapped((), {}, two_nodes()) == ()
    assert mapped((2, 3), {}, two_nodes()) == ((0, 1), (2, 3, 4))
    assert mapped((2, 3), {(0, 0): 5, (0, 1): 0}, two_nodes()) == ((0, 1), (2, 3, 4))


# Memory --------------------------------------------------------------------------------------------------------


def test_groups_stand_on_devices_that_have_their_memory() -> None:
    cluster = cluster_of((NODES, NETWORK), ((4, 40), (4, 80)))
    devices = mapped((2, 2, 2), {(0, 1): MEGABYTE, (1, 2): MEGABYTE}, cluster, needs=(80, 30, 80))
    assert {device // 4 for device in devices[0] + devices[2]} == {1}


def test_memory_that_is_missing_is_told() -> None:
    cluster = cluster_of((NODES, NETWORK), ((4, 40), (4, 80)))
    with pytest.raises(InfeasibleError, match=r"group 1 needs 75 bytes on each of its 3 devices.* only 4 .*: 35 are"):
        mapped((2, 3, 2), {}, cluster, needs=(80, 75, 30))


def test_devices_that_are_missing_are_told() -> None:
    with pytest.raises(InfeasibleError, match="3 groups take 9 devices together, but cluster 'here' has 8"):
        mapped((3, 3, 3), {}, two_nodes())


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (((1, 0), {}, (), ()), "group 1 has no devices"),
        (((1, 1), {(0, 2): 5}, (), ()), r"traffic \(0, 2\) names a group"),
        (((1, 1), {}, (1,), ()), "sync has 1 values for 2 groups"),
        (((1, 1), {}, (), (1, 2, 3)), "needs has 3 values for 2 groups"),
    ],
)
def test_lists_that_do_not_fit_together(question: tuple[Any, ...], message: str) -> None:
    groups, traffic, sync, needs = question
    with pytest.raises(UsageError, match=message):
        mapped(groups, traffic, two_nodes(), sync=sync, needs=needs)


# Large clusters ------------------------------------------------------------------------------------------------


def test_a_long_chain_is_found_again_after_shuffling() -> None:
    numbers = list(range(256))
    Random(0).shuffle(numbers)
    chain = dict.fromkeys(pairwise(range(256)), 10 * MEGABYTE)
    shuffled = {(numbers[g], numbers[h]): size for (g, h), size in chain.items()}
    planted = large((4,) * 256, chain, 100 * MEGABYTE)
    question = replace(planted, traffic=shuffled)
    assert question.told(question.answer()).total_ns <= 1.02 * planted.told(planted.in_order()).total_ns


def test_large_groups_that_sum_nothing_are_dealt_to_the_nodes_in_turn() -> None:
    """Both stages are on all nodes anyway: then devices that share samples are in one."""
    question = large((512, 512), {(0, 1): 1_000 * MEGABYTE, (1, 0): 1_000 * MEGABYTE}, 0)
    first, second = question.answer()
    assert all(one // 8 == other // 8 for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("groups", [(146,) * 7, (4,) * 200, (1,) * 600 + (300,)])
def test_a_search_ends_when_its_work_is_done(groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan.partition.mapping.MOST_TIMED", 20_000)
    draw = Random(0)
    traffic = {(draw.randrange(len(groups)), draw.randrange(len(groups))): MEGABYTE for _ in groups}
    question = large(groups, traffic, MEGABYTE)
    links = GroupLinks.of(question.groups, question.traffic, question.cluster, question.sync)
    search = LayoutSearch(links, GroupMemory.of(question.groups, [0] * len(groups), question.cluster))
    devices = search.best()
    assert search.left > -sum(links.work)
    assert question.told(devices) <= question.told(question.in_order())


def two_nodes() -> Cluster:
    return cluster_of((NODES, NETWORK), ((8, None),))


@pytest.mark.parametrize("sizes", [(), (20,), (4, 20), (5, 10, 20)], ids=str)
def test_groups_of_neighbours_are_counted(sizes: tuple[int, ...]) -> None:
    """Also where nodes or the last of them have devices left over, and where groups are larger than all levels."""
    kind = DeviceKind(name="device", count=20)
    levels = tuple(NODES.model_copy(update={"name": str(size), "group_size": size}) for size in sizes)
    cluster = Cluster(name="some", source=Source(method="estimated"), devices=(kind,), levels=levels)
    for known, count, size in product((None, cluster), range(1, 21), range(1, 21)):
        assert num_neighbours(known, count, size) == len(neighbours(known, count, size))
