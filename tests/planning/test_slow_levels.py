"""Where groups lie in a tree: what is found against every assignment of groups to devices."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

import pipeplan
from pipeplan.files import (
    Block,
    Cluster,
    CostRow,
    DeviceKind,
    Edge,
    LinkLevel,
    PlacedStage,
    Placement,
    Plan,
    Profile,
    Source,
)
from pipeplan.partition.mapping import device_orders
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.device_orders import DeviceOrders
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, search_plan
from pipeplan.planning.trials import PlanSearch, Trial
from pipeplan.schedule.cpsat.solver import Budget

Group = tuple[int, ...]
EIGHT = (("node", 2, 100, None), ("rack", 4, 10, 1.0), ("spine", 8, 10, None))


def racks(ratio: float) -> Cluster:
    """Two racks of two nodes of two devices."""
    levels = tuple(
        LinkLevel(
            name=name,
            group_size=size,
            latency_ns=0,
            bandwidth_bytes_per_s=rate * 10**9,
            oversubscription=ratio if name == "spine" else its,
        )
        for name, size, rate, its in EIGHT
    )
    kind = DeviceKind(name="device", count=8)
    return Cluster(name="racks", source=Source(method="estimated"), devices=(kind,), levels=levels)


def line(sent: int, parameters: int) -> Profile:
    """Four alike blocks."""
    rows = tuple(CostRow(microbatch_size=m, forward_ns=m * 10**6, backward_ns=2 * m * 10**6) for m in (1, 2))
    blocks = tuple(
        Block(id=f"b{number}", operator="layer", parameter_bytes=parameters, gradient_bytes=parameters, costs=rows)
        for number in range(4)
    )
    edges = tuple(Edge(source=f"b{n}", target=f"b{n + 1}", bytes_per_sample=sent) for n in range(3))
    return Profile(name="line", source=Source(method="estimated"), blocks=blocks, edges=edges)


def pairs(left: frozenset[int]) -> list[tuple[Group, ...]]:
    """Every way to give pairs of devices to as many groups."""
    if not left:
        return [()]
    return [(own, *rest) for own in combinations(sorted(left), 2) for rest in pairs(left - set(own))]


def alike(groups: tuple[Group, ...]) -> object:
    """What is equal where groups stand alike in the tree: devices of a node, nodes of a rack, and racks are unnamed."""
    owner = {device: number for number, own in enumerate(groups) for device in own}
    nodes = [tuple(sorted((owner[d], owner[d + 1]))) for d in range(0, 8, 2)]
    return tuple(sorted(tuple(sorted(nodes[n : n + 2])) for n in (0, 2)))


def placed(groups: tuple[Group, ...]) -> Placement:
    stages = (PlacedStage(blocks=(f"b{n}",), devices=own, replicas=2) for n, own in enumerate(groups))
    return Placement(strategy="one-to-one", num_devices=8, stages=tuple(stages))


@pytest.mark.parametrize(
    ("sent", "parameters"), [(2_000_000, 10_000_000), pytest.param(4_000_000, 20_000_000, marks=pytest.mark.slow)]
)
def test_chosen_groups_avoid_the_slow_level_as_the_best_of_all_assignments_does(sent: int, parameters: int) -> None:
    """Two replicas of four stages with 1F1B: at 1:1 sums cross the spine beside nothing, at 4:1 they stay in racks."""
    asked: dict[str, Any] = {"mini_batch": 16, "microbatch_size": 2, "scheduler": "1f1b", "time_limit": "10s"}

    def found(ratio: float, **others: Any) -> Plan:
        result = pipeplan.search(line(sent, parameters), cluster=racks(ratio), deterministic=True, **asked, **others)
        return result.plan

    def in_both_racks(plan: Plan) -> int:
        return sum(len({device // 4 for device in stage.devices}) > 1 for stage in plan.stages)

    wide, chosen = (found(ratio, placement="one-to-one", replicas=2, pp=4) for ratio in (1.0, 4.0))
    assert (in_both_racks(wide), in_both_racks(chosen)) == (4, 0)
    every = {alike(groups): groups for groups in pairs(frozenset(range(8)))}
    plans = [found(4.0, placement=placed(groups)) for groups in every.values()]
    within, crossing = (
        [each.predicted.iteration_ns for each in plans if (in_both_racks(each) > 0) == crosses]
        for crosses in (False, True)
    )
    best, time = min(within), chosen.predicted.iteration_ns
    assert best <= time < min(crossing), "every assignment with a stage in both racks is slower"
    assert time <= 1.03 * best, "devices are chosen for the links' time, not for that of the schedule"


def racks_of_16(ratio: float) -> Cluster:
    """Two racks of four nodes of four devices."""
    levels = tuple(
        LinkLevel(name=name, group_size=size, latency_ns=0, bandwidth_bytes_per_s=rate * 10**9, oversubscription=its)
        for name, size, rate, its in (("node", 4, 100, None), ("rack", 16, 10, 1.0), ("spine", 32, 10, ratio))
    )
    kind = DeviceKind(name="device", count=32)
    return Cluster(name="racks", source=Source(method="estimated"), devices=(kind,), levels=levels)


def split_line(sent: int, parameters: int) -> Profile:
    """Four alike blocks, which two devices split."""
    rows = tuple(
        CostRow(microbatch_size=1, shards=shards, forward_ns=10**6 // shards, backward_ns=2 * 10**6 // shards)
        for shards in (1, 2)
    )
    blocks = tuple(
        Block(id=f"b{number}", operator="layer", parameter_bytes=parameters, gradient_bytes=parameters, costs=rows)
        for number in range(4)
    )
    edges = tuple(Edge(source=f"b{n}", target=f"b{n + 1}", bytes_per_sample=sent) for n in range(3))
    return Profile(name="line", source=Source(method="estimated"), blocks=blocks, edges=edges)


def beside_each_other(plan: Plan) -> list[int]:
    """[stage] how many devices of it lie in the first rack."""
    return [sum(device < 16 for device in stage.devices) for stage in plan.stages]


@pytest.mark.parametrize(
    ("sent", "parameters", "expected"),
    [(8_000_000, 1_000_000, [8, 8]), (1_000, 100_000_000, [16, 0])],
    ids=["messages stay in racks", "sums stay in racks"],
)
def test_replicas_lie_along_the_tree_as_is_quickest(sent: int, parameters: int, expected: list[int]) -> None:
    """Two positions of eight replicas of two devices on 32: by hand, with 4:1 a rack's uplinks carry four messages.

    Eight replicas of a position in one rack send all messages over them; four in each send all sums.
    """
    asked: dict[str, Any] = {
        "mini_batch": 64,
        "microbatch_size": 8,
        "scheduler": "1f1b",
        "split_backward": False,
        "time_limit": "10s",
        "deterministic": True,
        "zero": 0,
    }
    profile, cluster = split_line(sent, parameters), racks_of_16(4.0)
    plan = pipeplan.search(profile, cluster=cluster, tp=2, pp=2, dp=8, **asked).plan
    assert beside_each_other(plan) == expected
    found = {}
    for placement in [replicas_beside(8), *(replicas_beside(number) for number in (4, 2, 1))]:
        other = pipeplan.search(profile, cluster=cluster, placement=placement, **asked).plan
        found[placement.stages[0].devices] = other.predicted.iteration_ns
    assert plan.predicted.iteration_ns == min(found.values()), "of all orders of replicas and positions"
    assert len(set(found.values())) > 1
    assert pipeplan.check(plan, profile=profile, cluster=cluster).valid


def replicas_beside(number: int) -> Placement:
    """So many replicas of each of two positions side by side, those of both in turn."""
    stages = []
    for position in range(2):
        begins = [((r // number * 2 + position) * number + r % number) * 2 for r in range(8)]
        devices = tuple(device for begin in begins for device in (begin, begin + 1))
        blocks = tuple(f"b{number}" for number in (2 * position, 2 * position + 1))
        stages.append(PlacedStage(blocks=blocks, devices=devices, shards=2, replicas=8))
    return Placement(strategy="one-to-one", num_devices=32, stages=tuple(stages))


def test_orders_are_all_that_keep_to_levels() -> None:
    """Also those that fill several groups of a level, where several fill one of the next: 4 and 8 replicas."""
    cluster = racks_of_16(4.0)
    node, rack, _ = cluster.levels
    found = device_orders(replicas_beside(8), cluster.model_copy(update={"levels": (node,)}))
    assert [each.stages for each in found] == [replicas_beside(number).stages for number in (4, 2, 1)]
    found = device_orders(replicas_beside(8), cluster.model_copy(update={"levels": (node, rack)}))
    assert [each.stages for each in found] == [replicas_beside(number).stages for number in (4, 2, 1)]


def in_first_order(ratio: float) -> tuple[Request, PlacementCandidate]:
    """Eight replicas of each of two positions in a rack of their own, whose messages all cross the spine."""
    batch = Batch(8, 8)
    request = Request(split_line(8_000_000, 1_000_000), 32, batch, sizes=(1,), cluster=racks_of_16(ratio))
    return request, PlacementCandidate(replicas_beside(8), batch, False, "by hand")


def test_below_oversubscribed_uplinks_a_candidate_is_looked_at_in_its_quickest_order() -> None:
    request, candidate = in_first_order(4.0)
    chosen = Trial.where_quick(request, candidate)
    chosen.look()
    assert request.cluster is not None
    times = []
    for placement in [candidate.placement, *device_orders(candidate.placement, request.cluster)]:
        trial = Trial.of(request, replace(candidate, placement=placement))
        trial.look()
        assert trial.value_ns is not None
        assert trial.bound_ns <= trial.value_ns
        times.append(trial.value_ns)
    assert chosen.value_ns == min(times)
    assert max(times) == times[0] > 1.2 * min(times), "what an order is worth"


def test_candidates_keep_their_order_where_no_uplinks_are_oversubscribed_or_they_stay() -> None:
    """There orders differ by little, and bounds of each would take their time for nothing."""
    request, candidate = in_first_order(1.0)
    assert Trial.where_quick(request, candidate).candidate is candidate
    request, candidate = in_first_order(4.0)
    stays = replace(candidate, stay=True)
    assert Trial.where_quick(request, stays).candidate is stays


def test_a_search_chooses_orders_before_it_looks() -> None:
    """Without the step that tries orders of finished plans: candidates are not refuted in an order that is slow."""
    request = Request.of(
        split_line(8_000_000, 1_000_000),
        cluster=racks_of_16(4.0),
        mini_batch=64,
        microbatch_size=8,
        scheduler="1f1b",
        split_backward=False,
        deterministic=True,
        time_limit=0.3,
        zero=0,
        positions=2,
        replicas=8,
        shards=2,
    )
    found = search_plan(request, steps=[step for step in STEPS if not isinstance(step, DeviceOrders)])
    assert beside_each_other(found.plan) == [8, 8]


def test_orders_of_three_finished_plans_are_tried() -> None:
    """Each is timed anew, not the best alone; the fourth is not."""
    request, candidate = in_first_order(4.0)
    search = PlanSearch(request, Budget(math.inf, deterministic=True), None, STEPS)
    for _ in range(4):
        trial = Trial.of(request, candidate)
        trial.look()
        search.trials.append(trial)
    before = [trial.value_ns for trial in search.trials]
    search.finalists = list(search.trials)
    DeviceOrders().run(search)
    after = [trial.value_ns for trial in search.trials]
    assert [new != old for new, old in zip(after, before, strict=True)] == [True, True, True, False]
    assert all(new is not None and old is not None and new <= old for new, old in zip(after, before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_plans_whose_sums_slow_compute_pass_check(chunks: int) -> None:
    """Positions with one stage, or with two, on a cluster whose exchanges slow what is computed beside them."""
    asked: dict[str, Any] = {"mini_batch": 64, "microbatch_size": 8, "time_limit": "10s", "deterministic": True}
    node, net = Cluster.of("nodes", 32, levels=[("node", 4, 0, 100 * 10**9), ("net", 32, 0, 10 * 10**9)]).levels
    levels = node, net.model_copy(update={"node_bandwidth_bytes_per_s": 40 * 10**9})
    cluster = racks_of_16(4.0).model_copy(update={"contention": 0.4, "levels": levels})
    profile = split_line(1_000, 10_000_000)
    strategy = "one-to-one" if chunks == 1 else "circular"
    plan = pipeplan.search(profile, cluster=cluster, placement=strategy, tp=2, pp=2, dp=8, vp=chunks, **asked).plan
    assert len(plan.stages) == 2 * chunks
    (contention,) = {device.contention for device in plan.devices}
    assert contention == pytest.approx(0.4 * 2 * 10 / 100), "two of a node send for each sum"
    assert pipeplan.check(plan, profile=profile, cluster=cluster).valid
