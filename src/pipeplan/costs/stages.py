"""From a profile and a placement to a workload: what each stage costs and what it sends to whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeplan.costs.blocks import block_costs
from pipeplan.costs.links import transfer_time
from pipeplan.errors import UsageError
from pipeplan.model import (
    Block,
    Cluster,
    Dependency,
    Device,
    Edge,
    Hop,
    Operation,
    PlacedStage,
    Placement,
    Profile,
    Stage,
    payload_of,
)
from pipeplan.model.workload import Workload

__all__ = ["StageCosts", "build_workload", "can_split", "stage_costs"]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of a stage on each of its devices, for one micro-batch; times in ns, sizes in bytes.

    ``input_grad_ns`` and ``weight_grad_ns`` are None where a block of the stage has no split backward.
    """

    forward_ns: int
    backward_ns: int
    input_grad_ns: int | None
    weight_grad_ns: int | None
    activation_bytes: int
    weight_grad_bytes: int
    workspace_bytes: int
    parameter_bytes: int
    optimizer_bytes: int


def can_split(profile: Profile) -> bool:
    """Whether some block has input and weight gradients apart, so that a plan can split backward there."""
    return any(row.input_grad_ns is not None for block in profile.blocks for row in block.costs)


def stage_costs(
    profile: Profile, blocks: Iterable[str], microbatch_size: int, shards: int = 1, *, recompute: bool = False
) -> StageCosts:
    """Costs of blocks that run one after another on each device of a group.

    Times, activations and parameters add up; a tensor that several of the blocks take and give a gradient for is held
    once. Workspace is the largest, since only one block runs at a time.

    Raises:
        UsageError: a block has no costs for this micro-batch size or shard count.
    """
    by_id = {block.id: block for block in profile.blocks}
    inputs: dict[str, int] = defaultdict(int)
    for edge in profile.edges:
        inputs[edge.target] += _edge_bytes(edge, microbatch_size)
    chosen: list[Block] = [by_id[id_] for id_ in blocks]
    rows = [
        block_costs(block, microbatch_size, shards, recompute=recompute, input_bytes=inputs[block.id])
        for block in chosen
    ]
    split = all(row.input_grad_ns is not None for row in rows)
    return StageCosts(
        forward_ns=sum(row.forward_ns for row in rows),
        backward_ns=sum(
            row.backward_ns if row.backward_ns is not None else (row.input_grad_ns or 0) + (row.weight_grad_ns or 0)
            for row in rows
        ),
        input_grad_ns=sum(row.input_grad_ns or 0 for row in rows) if split else None,
        weight_grad_ns=sum(row.weight_grad_ns or 0 for row in rows) if split else None,
        activation_bytes=max(
            0, sum(row.activation_bytes for row in rows) - _counted_again(profile, chosen, microbatch_size)
        ),
        weight_grad_bytes=sum(row.weight_grad_bytes for row in rows),
        workspace_bytes=max(row.workspace_bytes for row in rows),
        parameter_bytes=sum(-(-block.parameter_bytes // shards) for block in chosen),
        optimizer_bytes=sum(-(-block.optimizer_bytes // shards) for block in chosen),
    )


def _counted_again(profile: Profile, blocks: Sequence[Block], microbatch_size: int) -> int:
    """Bytes of inputs that several of the blocks count as held, beyond the first time."""
    chosen = {block.id for block in blocks}
    shared = [edge for edge in profile.edges if edge.target in chosen and edge.tensor is not None and edge.gradient]
    size = sum(_edge_bytes(edge, microbatch_size) for edge in shared)
    return size - sum(_edge_bytes(edge, microbatch_size) for edge in _distinct(shared))


def _distinct(edges: Iterable[Edge]) -> list[Edge]:
    """One edge for each tensor."""
    found: dict[object, Edge] = {}
    for number, edge in enumerate(edges):
        found.setdefault(number if edge.tensor is None else (edge.source, edge.tensor), edge)
    return list(found.values())


def build_workload(
    profile: Profile,
    placement: Placement,
    *,
    num_microbatches: int,
    microbatch_size: int,
    split_backward: bool = False,
    split_overhead_ns: int = 0,
    recompute: bool = False,
    cluster: Cluster | None = None,
    memory_bytes: Sequence[int | None] | None = None,
) -> Workload:
    """Everything one iteration runs under a placement, with its costs.

    ``memory_bytes`` has one entry per device and goes before the cluster's. With ``split_backward`` every stage
    whose blocks allow it runs I and W instead of B, each ``split_overhead_ns`` longer than the profile says: a split
    backward is two launches.

    Raises:
        UsageError: a missing cost row, or a cluster with fewer devices than the placement.
    """
    if cluster is not None and cluster.num_devices < placement.num_devices:
        raise UsageError(
            f"cluster {cluster.name!r} has {cluster.num_devices} devices, the placement needs {placement.num_devices}; "
            "lower --devices or give a larger --cluster"
        )
    costs = [
        stage_costs(profile, stage.blocks, _per_replica(microbatch_size, stage), stage.shards, recompute=recompute)
        for stage in placement.stages
    ]
    operations = _operations(costs, split_backward, split_overhead_ns)
    memory = memory_bytes or (cluster.memory_bytes if cluster is not None else (None,) * placement.num_devices)
    names = [kind.name for kind in cluster.devices for _ in range(kind.count)] if cluster is not None else []
    return Workload(
        name=profile.name,
        placement=placement.strategy,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        devices=tuple(
            Device(name=names[index] if names else "device", memory_bytes=memory[index])
            for index in range(placement.num_devices)
        ),
        stages=tuple(
            _stage(placed, cost, microbatch_size, recompute)
            for placed, cost in zip(placement.stages, costs, strict=True)
        ),
        operations=operations,
        dependencies=_dependencies(profile, placement, operations, microbatch_size, cluster),
    )


def _per_replica(microbatch_size: int, stage: PlacedStage) -> int:
    """Samples of a micro-batch that each replica of a stage works on."""
    if microbatch_size % stage.replicas:
        raise UsageError(
            f"a stage with {stage.replicas} replicas cannot split micro-batches of {microbatch_size} samples evenly; "
            f"choose a --microbatch-size that is a multiple of {stage.replicas}"
        )
    return microbatch_size // stage.replicas


def _stage(placed: PlacedStage, cost: StageCosts, microbatch_size: int, recompute: bool) -> Stage:
    return Stage(
        blocks=placed.blocks,
        devices=placed.devices,
        shards=placed.shards,
        replicas=placed.replicas,
        microbatch_size=microbatch_size,
        recompute=recompute,
        parameter_bytes=cost.parameter_bytes,
        gradient_bytes=cost.parameter_bytes,
        optimizer_bytes=cost.optimizer_bytes,
    )


def _operations(costs: Sequence[StageCosts], split_backward: bool, split_overhead_ns: int) -> tuple[Operation, ...]:
    """Forwards in stage order, then backwards in reverse, so that dependencies point forward."""
    forwards = [
        Operation(
            kind="F",
            stage=stage,
            duration_ns=max(1, cost.forward_ns),
            acquire_bytes=cost.activation_bytes,
            workspace_bytes=cost.workspace_bytes,
        )
        for stage, cost in enumerate(costs)
    ]
    backwards: list[Operation] = []
    for stage, cost in reversed(list(enumerate(costs))):
        if split_backward and cost.input_grad_ns is not None and cost.weight_grad_ns is not None:
            backwards += _split(
                stage, cost, cost.input_grad_ns + split_overhead_ns, cost.weight_grad_ns + split_overhead_ns
            )
        else:
            backwards.append(
                Operation(
                    kind="B",
                    stage=stage,
                    duration_ns=max(1, cost.backward_ns),
                    release_bytes=cost.activation_bytes,
                    workspace_bytes=cost.workspace_bytes,
                )
            )
    return (*forwards, *backwards)


def _split(stage: int, cost: StageCosts, input_grad_ns: int, weight_grad_ns: int) -> list[Operation]:
    """I and W. What W needs beyond what F held is taken when I starts, since I makes it while it runs."""
    held, deferred = cost.activation_bytes, cost.weight_grad_bytes
    return [
        Operation(
            kind="I",
            stage=stage,
            duration_ns=max(1, input_grad_ns),
            acquire_bytes=max(0, deferred - held),
            release_bytes=max(0, held - deferred),
            workspace_bytes=cost.workspace_bytes,
        ),
        Operation(
            kind="W",
            stage=stage,
            duration_ns=max(1, weight_grad_ns),
            release_bytes=deferred,
            workspace_bytes=cost.workspace_bytes,
        ),
    ]


def _dependencies(
    profile: Profile,
    placement: Placement,
    operations: Sequence[Operation],
    microbatch_size: int,
    cluster: Cluster | None,
) -> tuple[Dependency, ...]:
    """Within a stage F before B or I, I before W; between stages outputs down the edges, gradients up."""
    kinds: dict[int, set[str]] = defaultdict(set)
    for operation in operations:
        kinds[operation.stage].add(operation.kind)
    back = {stage: "I" if "I" in kinds[stage] else "B" for stage in kinds}
    found = [Dependency(source=f"{stage}F", target=f"{stage}{back[stage]}") for stage in sorted(kinds)]
    found += [Dependency(source=f"{stage}I", target=f"{stage}W") for stage in sorted(kinds) if back[stage] == "I"]
    stage_of = {block: index for index, stage in enumerate(placement.stages) for block in stage.blocks}
    crossing: dict[tuple[int, int], list[Edge]] = defaultdict(list)
    for edge in profile.edges:
        if stage_of[edge.source] != stage_of[edge.target]:
            crossing[stage_of[edge.source], stage_of[edge.target]].append(edge)
    for (source, target), edges in sorted(crossing.items()):
        found.append(
            Dependency(
                source=f"{source}F",
                target=f"{target}F",
                hops=_hops(
                    placement.stages[source], placement.stages[target], _distinct(edges), microbatch_size, cluster
                ),
            )
        )
        upward = _distinct(edge for edge in edges if edge.gradient)
        if upward:
            found.append(
                Dependency(
                    source=f"{target}{back[target]}",
                    target=f"{source}{back[source]}",
                    hops=_hops(placement.stages[target], placement.stages[source], upward, microbatch_size, cluster),
                )
            )
    assert all(payload_of(dependency.source[-1]) for dependency in found if dependency.hops)
    return tuple(found)


def _hops(
    source: PlacedStage, target: PlacedStage, edges: Sequence[Edge], microbatch_size: int, cluster: Cluster | None
) -> tuple[Hop, ...]:
    """A message to every target device that does not hold the tensor already; senders take turns."""
    size = sum(_edge_bytes(edge, microbatch_size) for edge in edges)
    priced = sum(_edge_bytes(edge, microbatch_size) for edge in edges if edge.transfer_ns is None)
    fixed = max((edge.transfer_ns for edge in edges if edge.transfer_ns is not None), default=0)
    hops = []
    for index, device in enumerate(target.devices):
        if device in source.devices:
            continue
        sender = source.devices[index % len(source.devices)]
        latency, occupancy = transfer_time(cluster, sender, device, priced)
        if all(edge.transfer_ns is not None for edge in edges):
            latency, occupancy = 0, 0
        hops.append(
            Hop(
                source_device=sender,
                target_device=device,
                bytes=size,
                latency_ns=max(latency, fixed),
                occupancy_ns=occupancy,
            )
        )
    return tuple(hops)


def _edge_bytes(edge: Edge, microbatch_size: int) -> int:
    return edge.bytes_per_sample * (1 if edge.broadcast else microbatch_size)
