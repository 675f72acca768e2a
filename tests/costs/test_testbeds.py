"""The papers' testbeds: valid at every size, with the papers' numbers, and good to search on."""

from __future__ import annotations

import pytest

from builders.requests import request_of
from pipeplan._api import make_cluster
from pipeplan.costs.clusters import CLUSTERS, TESTBEDS
from pipeplan.costs.clusters import named_cluster as cluster_of
from pipeplan.costs.communication import (
    LINK_CEILING,
    Exchange,
    contention_among,
    send_time,
    time_of_groups,
    transfer_time,
)
from pipeplan.costs.devices import PRESETS, device_preset
from pipeplan.costs.uniform.choices import choices
from pipeplan.costs.uniform.shares import catalog_shares, faster_than_reached, reaching, shares_for
from pipeplan.errors import UsageError
from pipeplan.examples import model
from pipeplan.files import Cluster, parse, to_json
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import search_plan

PAPERS = {
    "tessel": (32, 8, 32, "V100"),
    "graphpipe": (32, 4, 16, "V100"),
    "flexpipe": (64, 8, 80, "A800"),
    "autopipe": (16, 4, 24, "3090"),
    "tensoropt": (16, 8, 16, "V100"),
}
"""Devices, devices per node, GB of each and their kind, as the papers state them."""


def test_every_testbed_is_listed() -> None:
    assert sorted(TESTBEDS) == sorted(PAPERS)


@pytest.mark.parametrize("name", TESTBEDS)
def test_has_the_papers_numbers_and_says_what_is_assumed(name: str) -> None:
    cluster = cluster_of(name)
    num_devices, per_node, gigabytes, kind = PAPERS[name]
    assert (cluster.num_devices, cluster.levels[0].group_size) == (num_devices, per_node)
    assert cluster.memory_bytes == (gigabytes * 10**9,) * num_devices
    assert kind in cluster.devices[0].name
    assert cluster.source.method == "literature"
    assert "section" in cluster.source.reference
    assert "assumed" in cluster.source.notes
    assert "nominal" in cluster.source.notes


@pytest.mark.parametrize("name", [name for name in CLUSTERS if name not in TESTBEDS])
def test_a_makers_cluster_has_an_adapter_for_each_device(name: str) -> None:
    cluster = cluster_of(name, 144)
    preset = next(each for each in map(device_preset, PRESETS) if each.title == cluster.devices[0].name)
    inside, outside = cluster.levels
    assert cluster.memory_bytes == (preset.memory_bytes,) * 144
    assert inside.bandwidth_bytes_per_s == preset.link_bytes_per_s
    assert inside.group_size == (72 if name == "cluster-gb200" else 8)
    assert outside.bandwidth_bytes_per_s == {"cluster-a100": 25, "cluster-h100": 50}.get(name, 50) * 10**9
    size, exchange, per = 10**9, Exchange("all_reduce", 10**9), inside.group_size
    pairs = [(device, device + per) for device in range(per)]
    assert send_time(cluster, pairs, size) == send_time(cluster, pairs[:1], size)
    assert time_of_groups(cluster, exchange, pairs) == time_of_groups(cluster, exchange, pairs[:1])


@pytest.mark.parametrize("name", [name for name in CLUSTERS if name not in TESTBEDS])
def test_a_makers_cluster_is_written_as_published_runs_reach_it(name: str) -> None:
    """By the shares that the closed forms of published runs have, or by data sheets where that is asked for."""
    cluster, nominal = make_cluster(name, 144), make_cluster(name, 144, nominal=True)
    assert nominal == cluster_of(name, 144)
    preset = next(each for each in map(device_preset, PRESETS) if each.title == cluster.devices[0].name)
    shares = shares_for(preset.name, catalog_shares())
    for level, rated in zip(cluster.levels, nominal.levels, strict=True):
        assert level.bandwidth_bytes_per_s == round(shares.bandwidth * rated.bandwidth_bytes_per_s)
        whole, share = level.node_bandwidth_bytes_per_s, rated.node_bandwidth_bytes_per_s
        assert whole == (None if share is None else round(shares.bandwidth * share))
    assert (cluster.contention, nominal.contention) == (choices().contention, 0.0)
    assert f"{shares.bandwidth:.1%} of their nominal rates" in cluster.source.notes
    assert (faster_than_reached(nominal), faster_than_reached(cluster)) == (True, False)
    reached = reaching(preset, shares)  # what estimates time messages inside a stage with
    assert LINK_CEILING * reached.link_bytes_per_s == pytest.approx(cluster.levels[0].bandwidth_bytes_per_s, rel=1e-6)
    assert parse(to_json(cluster), Cluster) == cluster
    assert make_cluster("testbed-tessel", 4) == cluster_of("tessel", 4)


def test_links_that_carry_less_slow_compute_by_less() -> None:
    """Between nodes at a ninth of NVLink's rate: a ninth of the cluster's contention, if any of the groups is there."""
    cluster = cluster_of("cluster-h100", 16).model_copy(update={"contention": 0.45})
    assert contention_among(cluster, [range(8), range(8, 16)]) == pytest.approx(0.45)
    assert contention_among(cluster, [(0, 8), (1, 9)]) == pytest.approx(0.05)
    assert contention_among(cluster, [(0, 1), (7, 8)]) == pytest.approx(0.05)
    assert contention_among(cluster, [(0, 1, 2, 8, 9, 10)]) == pytest.approx(0.15), "three adapters of a node"
    one = cluster.model_copy(
        update={"levels": tuple(e.model_copy(update={"node_bandwidth_bytes_per_s": None}) for e in cluster.levels)}
    )
    assert contention_among(one, [(0, 1, 2, 8, 9, 10)]) == pytest.approx(0.05), "one link for all of a node"
    assert contention_among(cluster, [range(16), (7, 8)]) == pytest.approx(0.05)
    assert contention_among(cluster, [(3,)]) == contention_among(cluster, []) == 0.45
    assert contention_among(cluster_of("cluster-h100"), [(0, 8)]) == 0.0


@pytest.mark.parametrize(("gigabytes", "times"), [(None, 8), (400, 1), (100, 4), (25, 16)])
def test_what_a_node_has_is_shared_by_its_devices(gigabytes: int | None, times: int) -> None:
    """Eight devices of 50 GB/s each, whose node has so much for all of them; by default what one has."""
    whole = cluster_of("cluster-h100", 16)
    limit = None if gigabytes is None else gigabytes * 10**9
    inside, outside = whole.levels
    outside = outside.model_copy(update={"node_bandwidth_bytes_per_s": limit, "latency_ns": 0})
    cluster = whole.model_copy(update={"levels": (inside, outside)})
    pairs = [(device, device + 8) for device in range(8)]
    alone = 10**9 / 50e9 * 1e9
    assert send_time(cluster, pairs, 10**9) == pytest.approx(times * alone)
    assert time_of_groups(cluster, Exchange("all_reduce", 10**9), pairs) == pytest.approx(times * alone)
    assert send_time(cluster, pairs[:1], 10**9) == pytest.approx(max(1, times / 8) * alone)
    assert parse(to_json(cluster), Cluster) == cluster


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 6, 8, 12, 16, 64, 100])
@pytest.mark.parametrize("name", CLUSTERS)
def test_any_number_of_devices_keeps_the_links(name: str, num_devices: int) -> None:
    paper, cluster = cluster_of(name), cluster_of(name, num_devices)
    assert parse(to_json(cluster), Cluster) == cluster
    assert cluster.num_devices == num_devices
    both = min(num_devices, paper.num_devices)
    for target in range(1, both):
        assert transfer_time(cluster, 0, target, 10**6) == transfer_time(paper, 0, target, 10**6)
    if num_devices > paper.levels[0].group_size:
        near, far = (sum(transfer_time(cluster, 0, target, 10**8)) for target in (1, num_devices - 1))
        assert far > near


def test_refuses_what_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"no testbed 'dgx'; choose from autopipe, cluster-a100, .*tessel"):
        cluster_of("dgx")
    with pytest.raises(UsageError, match="0 devices are not a cluster"):
        cluster_of("tessel", 0)


@pytest.mark.parametrize("name", TESTBEDS)
def test_a_search_runs_on_it(name: str) -> None:
    profile = model("gpt2-124m", microbatch_sizes=(1,))
    cluster = cluster_of(name, 4)
    options = {"scheduler": "1f1b", "time_limit": 1, "deterministic": True}
    plan = search_plan(request_of(profile, "one-to-one", Batch(8, 1), num_devices=4, cluster=cluster, **options)).plan
    hops = [hop for dependency in plan.dependencies for hop in dependency.hops]
    assert hops
    assert all(
        (hop.latency_ns, hop.occupancy_ns) == transfer_time(cluster, hop.source_device, hop.target_device, hop.bytes)
        for hop in hops
    )
