"""A placement's devices chosen among a cluster's, so that what talks much is near."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from pipeplan.costs import build_workload
from pipeplan.errors import PipeplanError
from pipeplan.files import Placement
from pipeplan.partition.mapping import mapped
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.request import Request
from pipeplan.workload.one_microbatch import device_groups

__all__ = ["may_move", "on_cluster"]


def may_move(request: Request, candidate: PlacementCandidate) -> bool:
    """Whether other devices may be nearer: not where the placement was given, or all are equally near.

    Devices that split blocks stay neighbours, as their collectives are priced.
    """
    cluster = request.cluster
    if cluster is None or len(cluster.levels) < 2 or isinstance(request.placement, Placement):
        return False
    return not any(stage.shards > 1 and stage.replicas > 1 for stage in candidate.placement.stages)


def on_cluster(request: Request, candidate: PlacementCandidate) -> PlacementCandidate | None:
    """The candidate with its groups of devices where the cluster's links are least busy.

    Devices with the same stages are a group and stay one. None where that changes nothing.
    """
    cluster = request.cluster
    if cluster is None or not may_move(request, candidate):
        return None
    workload = build_workload(
        request.profile,
        candidate.placement,
        num_microbatches=candidate.batch.num_microbatches,
        microbatch_size=candidate.batch.microbatch_size,
        recompute=candidate.recompute,
        given=candidate.given,
    )
    group_of = device_groups(workload)
    sizes = Counter(group_of)
    traffic: Counter[tuple[int, int]] = Counter()
    for dependency in workload.dependencies:
        for hop in dependency.hops:
            ends = group_of[hop.source_device], group_of[hop.target_device]
            if ends[0] != ends[1]:
                traffic[ends] += hop.bytes * len(workload.messages(dependency, hop))
    sync = [0] * len(sizes)
    for stage in workload.stages:
        if stage.replicas > 1:
            sync[group_of[stage.devices[0]]] += stage.gradient_bytes
    static = [workload.static_bytes(group_of.index(group)) for group in range(len(sizes))]
    try:
        found = mapped(
            [sizes[group] for group in range(len(sizes))],
            traffic,
            cluster.first(request.num_devices),
            sync=sync,
            needs=static,
        )
    except PipeplanError:  # what does not fit is said where it is searched
        return None
    places = [iter(devices) for devices in found]
    device_of = [next(places[group]) for group in group_of]
    if device_of == list(range(len(device_of))):
        return None
    stages = tuple(
        stage.model_copy(update={"devices": tuple(device_of[device] for device in stage.devices)})
        for stage in candidate.placement.stages
    )
    return replace(candidate, placement=candidate.placement.model_copy(update={"stages": stages}))
