"""Placements and workloads of all kinds, drawn: groups, replicas, routes, sizes, parts, slow links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from builders.chains import hops
from pipeplan.costs import build_workload
from pipeplan.files import Block, Cluster, CostRow, DeviceKind, Edge, LinkLevel, PlacedStage, Placement, Profile, Source
from pipeplan.workload.elements import Dependency, Device, Operation, Stage
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Placed:
    """What a workload of several routes, sizes, replicas or parts is made from, and the workload."""

    profile: Profile
    cluster: Cluster | None
    workload: Workload


@st.composite
def placed(draw: st.DrawFn, *, links: bool = False, parts: bool | None = None) -> Placed:
    """Any forward edges between up to four blocks, on up to four devices; one of routes, parts or unequal sizes.

    With ``links`` on a cluster of nodes of two devices, whose links are slow enough to be busy. ``parts`` requires or
    refuses leading forwards in parts.
    """
    blocks = tuple(_drawn_block(draw, index) for index in range(draw(st.integers(1, 4))))
    num_routes = 1 if parts else draw(st.sampled_from([1, 1, 2]))
    num_devices = draw(st.integers(2, 4))
    in_parts = num_routes == 1 and (parts or (parts is None and draw(st.booleans())))
    sizes = [4] if in_parts else [draw(st.sampled_from([2, 4]))] if num_routes > 1 else [1, 2, 4]
    stages = tuple(
        _drawn_stage(draw, block.id, route, num_devices, sizes, in_parts)
        for route in range(num_routes)
        for block in blocks
    )
    edges = tuple(
        Edge(
            source=f"block{a}",
            target=f"block{b}",
            bytes_per_sample=draw(st.sampled_from([0, 10, 30])),
            transfer_ns=draw(st.sampled_from([None, 3])),
            gradient=draw(st.integers(0, 3)) > 0,
        )
        for b in range(len(blocks))
        for a in range(b)
        if a == b - 1 or draw(st.booleans())
    )
    profile = Profile(name="drawn", source=Source(method="literature"), blocks=blocks, edges=edges)
    placement = Placement(strategy="drawn", num_devices=num_devices, num_routes=num_routes, stages=stages)
    cluster = _drawn_cluster(draw) if links else None
    workload = build_workload(
        profile,
        placement,
        num_microbatches=4,
        microbatch_size=4,
        split_backward=draw(st.booleans()),
        cluster=cluster,
    )
    return Placed(profile, cluster, workload)


@st.composite
def placed_chains(draw: st.DrawFn) -> Placed:
    """Stages one behind the other on a device each, fewer in parts from stage to stage, over links that may be busy."""
    depth = draw(st.integers(2, 4))
    blocks = tuple(_drawn_block(draw, index) for index in range(depth))
    edges = tuple(
        Edge(source=f"block{a}", target=f"block{b}", bytes_per_sample=draw(st.sampled_from([5, 20])))
        for b in range(depth)
        for a in range(b)
        if a == b - 1 or draw(st.booleans())
    )
    stages = tuple(
        PlacedStage(blocks=(block.id,), devices=(s,), num_parted=draw(st.integers(0, depth - 1 - s)))
        for s, block in enumerate(blocks)
    )
    profile = Profile(name="drawn", source=Source(method="literature"), blocks=blocks, edges=edges)
    placement = Placement(strategy="one-to-one", num_devices=depth, stages=stages)
    cluster = _drawn_cluster(draw)
    number = draw(st.integers(depth + 1, 9))
    workload = build_workload(profile, placement, num_microbatches=number, microbatch_size=2, cluster=cluster)
    return Placed(profile, cluster, workload)


@st.composite
def stage_graphs(draw: st.DrawFn, *, chunks: int = 1, sizes: bool = False) -> Placed:
    """Any forward edges between stages on the devices in turn, ``chunks`` on each; with links or free.

    With ``sizes`` micro-batches have sizes of their own. Chains, skip connections, branches that meet and parts of the
    graph that nothing joins are all among them.
    """
    num_devices = draw(st.integers(1 if chunks == 1 else 2, 4 if chunks == 1 else 3))
    count = num_devices * chunks
    split = draw(st.booleans())
    blocks = tuple(_drawn_block(draw, index, split) for index in range(count))
    often = draw(st.sampled_from([1, 2, 4]))  # how many edges there are
    edges = tuple(
        Edge(source=f"block{a}", target=f"block{b}", bytes_per_sample=draw(st.sampled_from([0, 10, 30])))
        for b in range(count)
        for a in range(b)
        if draw(st.integers(0, often)) == 0
    )
    stages = tuple(
        PlacedStage(
            blocks=(block.id,),
            devices=(index % num_devices,),
            microbatch_size=draw(st.sampled_from([1, 2, 4])) if sizes else 4,
        )
        for index, block in enumerate(blocks)
    )
    profile = Profile(name="drawn", source=Source(method="literature"), blocks=blocks, edges=edges)
    placement = Placement(strategy="drawn", num_devices=num_devices, stages=stages)
    cluster = _drawn_cluster(draw) if draw(st.booleans()) else None
    workload = build_workload(
        profile,
        placement,
        num_microbatches=draw(st.integers(1, 9)),
        microbatch_size=4,
        split_backward=split,
        cluster=cluster,
    )
    return Placed(profile, cluster, workload)


def _drawn_block(draw: st.DrawFn, index: int, split: bool | None = None) -> Block:
    """Costs that are not proportional to the samples; ``split`` None also draws whether it has I and W apart."""
    number = st.integers(1, 9)
    forward, extra, split = draw(number), draw(st.integers(0, 2)), draw(st.booleans()) if split is None else split
    rows = tuple(
        CostRow(
            microbatch_size=size,
            shards=shards,
            forward_ns=forward * size + extra,
            backward_ns=2 * forward * size,
            input_grad_ns=forward * size if split else None,
            weight_grad_ns=forward * size if split else None,
            activation_bytes=3 * size + extra,
            weight_grad_bytes=2 * size if split else 0,
            workspace_bytes=extra,
        )
        for size in (1, 2, 4)
        for shards in (1, 2)
    )
    return Block(id=f"block{index}", operator="block", parameter_bytes=100 * draw(number), costs=rows)


def _drawn_stage(
    draw: st.DrawFn, block: str, route: int, num_devices: int, sizes: Sequence[int], in_parts: bool
) -> PlacedStage:
    number, size = draw(st.sampled_from([1, 2])), draw(st.sampled_from(sizes))
    replicas = draw(st.sampled_from([1, number])) if size % number == 0 else 1
    return PlacedStage(
        blocks=(block,),
        devices=tuple(draw(st.permutations(range(num_devices)))[:number]),
        shards=number // replicas,
        replicas=replicas,
        microbatch_size=size,
        recompute=draw(st.sampled_from([None, False, True])),
        route=route,
        num_parted=draw(st.integers(0, 3)) if in_parts else 0,
    )


def _drawn_cluster(draw: st.DrawFn) -> Cluster:
    rate = draw(st.sampled_from([1, 5])) * 10**9
    outer = LinkLevel(name="network", group_size=4, latency_ns=3, bandwidth_bytes_per_s=rate)
    return Cluster(
        name="nodes",
        source=Source(method="estimated"),
        devices=(DeviceKind(name="device", count=4),),
        levels=(LinkLevel(name="node", group_size=2, latency_ns=1, bandwidth_bytes_per_s=10 * 10**9), outer),
    )


@st.composite
def workloads(draw: st.DrawFn, unequal: bool = True) -> Workload:
    """Up to four stages on up to three devices (some on several), any forward edges, lags, memory effects."""
    num_devices, num_stages = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_microbatches = draw(st.sampled_from([2, 4]))
    groups = [
        tuple(sorted(draw(st.sets(st.integers(0, num_devices - 1), min_size=1, max_size=2)))) for _ in range(num_stages)
    ]
    sizes = [draw(st.sampled_from([1, 2])) if unequal else 1 for _ in groups]
    time, size = st.integers(1, 5), st.integers(0, 9)
    operations, dependencies, back = [], [], {}
    for s in range(num_stages):
        held, workspace = draw(size), draw(size)
        forward = Operation(kind="F", stage=s, duration_ns=draw(time), acquire_bytes=held, workspace_bytes=workspace)
        operations.append(forward)
    for s in reversed(range(num_stages)):
        held = operations[s].acquire_bytes
        kept = draw(st.integers(0, held)) if draw(st.booleans()) else None
        back[s] = "B" if kept is None else "I"
        operations.append(
            Operation(
                kind="B" if kept is None else "I",
                stage=s,
                duration_ns=draw(time),
                release_bytes=held - (kept or 0),
                workspace_bytes=draw(size),
            )
        )
        dependencies.append(Dependency(source=f"{s}F", target=f"{s}{back[s]}"))
        if kept is not None:
            operations.append(Operation(kind="W", stage=s, duration_ns=draw(time), release_bytes=kept))
            dependencies.append(Dependency(source=f"{s}I", target=f"{s}W"))
    for a in range(num_stages):
        for b in range(a + 1, num_stages):
            if b == a + 1 or draw(st.booleans()):
                lag = draw(st.integers(0, 4))
                down, up = hops(groups[a], groups[b], lag), hops(groups[b], groups[a], lag)
                dependencies.append(Dependency(source=f"{a}F", target=f"{b}F", hops=down))
                dependencies.append(Dependency(source=f"{b}{back[b]}", target=f"{a}{back[a]}", hops=up))
    return Workload(
        name="random",
        placement="random",
        num_microbatches=num_microbatches,
        microbatch_size=1,
        devices=tuple(Device() for _ in range(num_devices)),
        stages=tuple(
            Stage(
                blocks=(f"block{s}",),
                devices=group,
                shards=len(group),
                microbatch_size=sizes[s],
                parameter_bytes=draw(size),
                optimizer_bytes=draw(size),
            )
            for s, group in enumerate(groups)
        ),
        operations=tuple(operations),
        dependencies=tuple(dependencies),
    )
