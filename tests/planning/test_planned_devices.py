"""Devices of a cluster for a placement: what talks much is near, and nothing is lost."""

from __future__ import annotations

from builders.requests import request_of
from pipeplan.checker import check
from pipeplan.files import Block, Cluster, CostRow, DeviceKind, Edge, LinkLevel, PlacedStage, Placement, Profile, Source
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan
from pipeplan.planning.trials import on_cluster
from support.paths import ROOT

PROFILES = ROOT / "profiles"
SOURCE = Source(method="estimated")


def cluster(nodes: int, per_node: int) -> Cluster:
    return Cluster(
        name="nodes",
        source=SOURCE,
        devices=(DeviceKind(name="device", count=nodes * per_node),),
        levels=(
            LinkLevel(name="node", group_size=per_node, latency_ns=1, bandwidth_bytes_per_s=10**11),
            LinkLevel(name="all", group_size=nodes * per_node, latency_ns=10, bandwidth_bytes_per_s=10**9),
        ),
    )


def towers() -> Profile:
    """Two towers of two blocks, each pair with heavy traffic, joined by light edges."""
    row = CostRow(microbatch_size=1, forward_ns=100, backward_ns=200)
    blocks = tuple(Block(id=name, operator="x", costs=(row,)) for name in ("a0", "b0", "a1", "b1", "join"))
    edges = (
        Edge(source="a0", target="a1", bytes_per_sample=1000),
        Edge(source="b0", target="b1", bytes_per_sample=1000),
        Edge(source="a1", target="join", bytes_per_sample=1),
        Edge(source="b1", target="join", bytes_per_sample=1),
    )
    return Profile(name="towers", source=SOURCE, blocks=blocks, edges=edges)


def test_heavy_edges_are_put_inside_nodes() -> None:
    profile = towers()
    stages = tuple(
        PlacedStage(blocks=blocks, devices=(device,))
        for device, blocks in enumerate([("a0",), ("b0",), ("a1",), ("b1", "join")])
    )
    placement = Placement(strategy="drawn", num_devices=4, stages=stages)
    candidate = PlacementCandidate(placement, Batch(4, 1), False, "drawn")
    request = Request(profile, 4, Batch(4, 1), sizes=(1,), cluster=cluster(2, 2))
    found = on_cluster(request, candidate)
    assert found is not None
    node = {block: stage.devices[0] // 2 for stage in found.placement.stages for block in stage.blocks}
    assert node["a0"] == node["a1"] != node["b0"] == node["b1"]
    assert [stage.blocks for stage in found.placement.stages] == [stage.blocks for stage in stages]
    assert on_cluster(request, found) is None


def test_the_search_uses_it() -> None:
    joined = towers()  # without the join every stage is a block, and only heavy edges are left
    profile = joined.model_copy(update={"blocks": joined.blocks[:-1], "edges": joined.edges[:2]})
    options = {"time_limit": 1.0, "deterministic": True, "replicas": 1}
    plan = search_plan(
        request_of(profile, "one-to-one", Batch(8, 1), num_devices=4, cluster=cluster(2, 2), **options)
    ).plan
    assert check(plan, profile, cluster(2, 2)).valid
    hops = [hop for dependency in plan.dependencies for hop in dependency.hops]
    assert len(hops) == 4
    assert all(hop.source_device // 2 == hop.target_device // 2 for hop in hops)
