"""Spare devices: who takes over, that the same plan goes on there, and what is lost, failure by failure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import pipeplan
from pipeplan.checker import check
from pipeplan.costs.clusters import in_tree, named_cluster
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, DeviceKind, Edge, FailureDomain, LinkLevel, Plan, Profile, Source
from pipeplan.files.folded import unfolded
from pipeplan.simulator.failures import _elsewhere, failures, renumbered
from pipeplan.simulator.simulation import simulate
from pipeplan.simulator.spares import Spares

pytestmark = pytest.mark.counted

DOMAINS = (("node", 2), ("rack", 4), ("power", 6))


def nodes(count: int, *, ratio: float | None = None, memory: int = 10**9) -> Cluster:
    """Nodes of two devices; with a ratio in racks of two, whose uplinks it is of."""
    sizes: list[tuple[str, int, int, float | None]] = [("node", 2, 100, None), ("net", 2 * count, 10, None)]
    if ratio is not None:
        sizes = [("node", 2, 100, None), ("rack", 4, 10, 1.0), ("spine", 2 * count, 10, ratio)]
    levels = tuple(
        LinkLevel(name=name, group_size=size, latency_ns=0, bandwidth_bytes_per_s=rate * 10**9, oversubscription=its)
        for name, size, rate, its in sizes
    )
    domains = tuple(FailureDomain(name=name, group_size=size) for name, size in DOMAINS)
    kind = DeviceKind(name="device", count=count, memory_bytes=memory)
    source = Source(method="estimated")
    return Cluster(name="racks", source=source, devices=(kind,), levels=levels, failure_domains=domains)


def line(blocks: int = 5, sent: int = 10**6) -> Profile:
    rows = tuple(CostRow(microbatch_size=m, forward_ns=m * 10**6, backward_ns=2 * m * 10**6) for m in (1, 2))
    found = tuple(
        Block(id=f"b{number}", operator="layer", parameter_bytes=10**7, gradient_bytes=10**7, costs=rows)
        for number in range(blocks)
    )
    edges = tuple(Edge(source=f"b{n}", target=f"b{n + 1}", bytes_per_sample=sent) for n in range(blocks - 1))
    return Profile(name="line", source=Source(method="estimated"), blocks=found, edges=edges)


def searched(cluster: Cluster | None, spares: int, **asked: Any) -> pipeplan.Result:
    how: dict[str, Any] = {"mini_batch": 24, "time_limit": 2, "deterministic": True, "scheduler": "1f1b"}
    return pipeplan.search(line(), cluster=cluster, spares=spares, **(how | asked))


@pytest.fixture(scope="module")
def found() -> pipeplan.Result:
    return searched(nodes(10), 2, replicas=2)


MORE_IDLE = {"predicted.bubble_rate", "predicted.bubble_rate_steady"}
"""What a plan says of all devices: it has more of them once some of their numbers are higher."""


def moved(plan: Plan, cluster: Cluster, failed: int, spare: int, size: int = 2) -> Plan:
    """The plan with one node's devices instead of another's."""
    where = list(range(cluster.num_devices))
    for one, other in zip(
        range(size * failed, size * (failed + 1)), range(size * spare, size * (spare + 1)), strict=True
    ):
        where[one], where[other] = other, one
    return renumbered(plan, cluster, where)


def test_whichever_node_fails_the_same_plan_goes_on(found: pipeplan.Result) -> None:
    """Nodes are alike here: all that is checked of a plan holds with a spare node in the place of another."""
    cluster, plan = nodes(10), unfolded(found.plan)
    assert plan.num_devices == 8
    assert check(plan, line(), cluster).valid
    for node in range(4):
        other = moved(plan, cluster, node, 4)
        assert {d for stage in other.stages for d in stage.devices} == set(range(10)) - {2 * node, 2 * node + 1}
        report = check(other, line(), cluster)
        assert {problem.place for problem in report.problems} <= MORE_IDLE, report.problems
        assert simulate(other).iteration_ns == plan.predicted.iteration_ns


def test_what_failures_leave_of_it(found: pipeplan.Result) -> None:
    assert found.spares is not None
    node, rack, power = found.spares.failures
    assert (node.covered, node.failed, node.by) == (True, (0, 1), (8, 9))
    assert node.iteration_ns == found.plan.predicted.iteration_ns
    assert (rack.covered, rack.in_use, rack.missing) == (False, 4, 2)
    assert (power.covered, power.in_use, power.missing) == (False, 6, 4)
    for failure in (node, rack, power):
        domains = range(-(-8 // failure.devices))
        copies = [[(d,) for d in stage.devices] for stage in found.plan.stages]  # nothing is divided: each has a copy
        kept = all(
            any(device // failure.devices != domain for (device,) in own) for own in copies for domain in domains
        )
        assert failure.kept == kept
    said = found.spares.said
    assert re.fullmatch(
        r"2 of 10 devices are spare: .* an iteration on the others, .* found for all: .*half of the limit\)", said[0]
    )
    assert said[1].startswith(
        "a failed node (2 devices) is covered: with devices 8-9 for 0-1 the same plan goes on in "
    )
    assert said[2].startswith("a failed rack (4 devices) takes 4 of the plan's, and 2 more would have to be spare")
    assert set(said) <= set(found.notes)


def test_each_part_of_a_sequence_has_all_parameters_unless_they_are_divided(found: pipeplan.Result) -> None:
    """Four devices on two nodes share a sequence: without ZeRO a failed node leaves two copies, with it half of one."""
    stage = replace(unfolded(found.plan).stages[0], devices=(0, 1, 2, 3), replicas=1, context=4)
    for zero, group, kept in ((0, None, True), (1, None, False), (1, 2, True)):
        divided = replace(stage, zero=zero, zero_group=group)
        assert _elsewhere(divided, [divided], 2) == kept
    assert not _elsewhere(replace(stage, shards=4, context=1), [replace(stage, shards=4, context=1)], 2)


def test_the_loss_is_that_of_two_searches(found: pipeplan.Result) -> None:
    spares = found.spares
    assert spares is not None
    assert spares.whole_ns is not None
    alone = pipeplan.search(
        line(),
        cluster=nodes(10),
        mini_batch=24,
        time_limit=1,
        deterministic=True,
        scheduler="1f1b",
        replicas=2,
        devices=8,
    )
    assert alone.plan.predicted.iteration_ns == found.plan.predicted.iteration_ns == spares.time_ns
    assert spares.loss == pytest.approx(1 - spares.whole_ns / spares.time_ns)
    figures: Any = found.figures()["spares"]
    assert (figures["devices"], figures["of"], figures["planned_for"], figures["seconds_each"]) == (2, 10, 8, 1.0)
    assert figures["failures"][0]["taken_over_by"] == [8, 9]


def test_what_a_search_finds_less_for_all_devices_is_no_gain() -> None:
    """The plan for fewer runs on all as well, with some idle."""
    short = Spares(devices=2, whole=10, time_ns=100, whole_ns=125, seconds=0.1)
    assert short.loss == 0
    assert short.said == (
        "2 of 10 devices are spare: 100ns an iteration on the others, 125ns found for all: nothing is lost"
        " (each searched for 0.1 s, half of the limit)",
    )
    assert replace(short, whole_ns=75).loss == 0.25
    assert "25.0% of the throughput is lost" in replace(short, whole_ns=75).said[0]


def test_spares_that_fail_too_take_over_nothing() -> None:
    """Two nodes in one rack: with it the spare one is gone."""
    spares = searched(nodes(4), 2, time_limit=0.2, deterministic=True).spares
    assert spares is not None
    node, rack, *_ = spares.failures
    assert (node.covered, node.by) == (True, (2, 3))
    assert (rack.covered, rack.in_use, rack.missing) == (False, 2, 2)


def test_in_a_tree_it_takes_longer_on_another_rack() -> None:
    """Racks of two nodes; the spare node is alone in the last, so that a pair of stages comes apart."""
    cluster = nodes(10, ratio=4.0)
    profile = line(4, 2 * 10**6)
    asked: dict[str, Any] = {
        "mini_batch": 16,
        "microbatch_size": 2,
        "time_limit": 2,
        "scheduler": "1f1b",
        "replicas": 2,
    }
    result = pipeplan.search(profile, cluster=cluster, spares=2, placement="one-to-one", deterministic=True, **asked)
    assert result.spares is not None
    failure = result.spares.failures[0]
    assert failure.covered
    assert failure.iteration_ns is not None
    other = moved(result.plan, cluster, failure.failed[0] // 2, failure.by[0] // 2)
    assert failure.iteration_ns == simulate(other, profile=profile, cluster=cluster).iteration_ns
    assert failure.iteration_ns > result.plan.predicted.iteration_ns


def test_spares_of_another_kind_or_less_memory_take_over_nothing(found: pipeplan.Result) -> None:
    small = DeviceKind(name="device", count=2, memory_bytes=10**8)
    other = DeviceKind(name="other", count=2, memory_bytes=10**9)
    for kind in (small, other):
        kinds = (DeviceKind(name="device", count=8, memory_bytes=10**9), kind)
        cluster = nodes(10).model_copy(update={"devices": kinds})
        assert [each.covered for each in failures(found.plan, cluster)] == [False, False, False]


@pytest.mark.parametrize(
    ("spares", "others", "text"),
    [
        (10, {}, "spares=10 leaves none of the 10 devices of cluster 'racks' to plan for; give fewer"),
        (3, {}, r"spares=3 are no whole nodes: in cluster 'racks' 2 devices fail together \(node\), .* give 2 or 4"),
        (2, {"devices": 8}, "devices and spares both say how many of the 10 devices"),
        (2, {"cluster": None, "devices": 8}, "spares is of a cluster, whose file says what fails together"),
        (2, {"scheduler": "rules"}, "spares is for searches, not for auto-tuned rules"),
    ],
)
def test_spares_that_cannot_be(spares: int, others: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        searched(others.get("cluster", nodes(10)), spares, **{k: v for k, v in others.items() if k != "cluster"})


@pytest.mark.slow
def test_compare_and_frontier_say_it_too() -> None:
    cluster = nodes(6)
    compared = pipeplan.compare(line(2), cluster=cluster, spares=2, mini_batch=8, time_limit=0.2, deterministic=True)
    assert compared.num_devices == 4
    assert compared.spares is not None
    best = min(row.iteration_ns for row in compared.rows if row.fits)
    assert compared.spares.time_ns == best
    points = pipeplan.frontier(
        line(2), cluster=cluster, spares=2, mini_batch=8, plans=True, time_limit=0.4, deterministic=True
    )
    assert points.spares is not None
    assert max(point.num_devices for point in points.points) <= 4
    assert points.spares.time_ns == min(point.time_ns for point in points.points)
    assert points.spares.failures[0].covered


@pytest.mark.slow
def test_eight_spares_of_512_cover_a_node() -> None:
    """The plan for 504 devices, what it loses, and that with each of some nodes failed it still fits and checks.

    The mini-batch is one that 504 and 512 both divide: what is lost is the devices' share. A device has room for all
    72 blocks, and not for a byte more.
    """
    cluster = in_tree(named_cluster("cluster-h100", 512), [4], [4.0])

    kind = cluster.devices[0].model_copy(update={"memory_bytes": cluster.reserve_bytes[0] + 72 * 2 * 10**7})
    snug = cluster.model_copy(update={"devices": (kind,)})
    asked: dict[str, Any] = {"mini_batch": 32_256, "time_limit": 16, "deterministic": True, "scheduler": "1f1b"}
    result = pipeplan.search(line(72), cluster=snug, spares=8, **asked)
    plan, spares = unfolded(result.plan), result.spares
    assert spares is not None
    assert spares.loss is not None
    assert spares.whole_ns is not None
    assert spares.loss == pytest.approx(1 - spares.whole_ns / spares.time_ns) == pytest.approx(8 / 512, rel=0.01)
    assert (plan.num_devices, spares.failures[0].covered, spares.failures[0].by) == (504, True, tuple(range(504, 512)))
    assert check(result.plan, line(72), snug).valid
    for node in (0, 31, 62):
        other = moved(plan, snug, node, 63, size=8)
        assert {d for stage in other.stages for d in stage.devices} == {*range(512)} - {*range(8 * node, 8 * node + 8)}
        assert {problem.place for problem in check(other, line(72), snug).problems} <= MORE_IDLE
        narrow = tuple(replace(device, memory_bytes=(device.memory_bytes or 0) - 1) for device in other.devices)
        assert "memory" in {problem.rule for problem in check(other.model_copy(update={"devices": narrow})).problems}
