"""Rules against the profile and the cluster of a plan: its costs, dependencies and messages must be theirs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from pipeplan.checker.facts import Findings, deliveries_of, replicas_of, shares_evenly
from pipeplan.costs import block_costs, transfer_time
from pipeplan.costs.communication import all_reduce_time
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, Edge, Plan, Profile, sha256_of
from pipeplan.workload.elements import Dependency, Hop, Operation, Stage, TiedState
from pipeplan.workload.kinds import BACKWARD_ROLES, GRADIENTS, STATE_KINDS, MemoryBytes, Role, is_instruction

_EdgesByPair = dict[tuple[str, str], list[Edge]]


def check_profile(plan: Plan, profile: Profile, cluster: Cluster | None, findings: Findings) -> None:
    """Recompute every stage, operation and dependency from the profile.

    What a stage whose blocks have configurations costs is not the profile's to say, but what it exchanges is.
    Without ``cluster`` the times of messages are compared only for plans made without one.
    """
    _check_fingerprint("profile", sha256_of(profile), plan.provenance.profile_sha256, findings)
    _check_origin(plan, profile, findings)
    if not _has_its_blocks(plan, profile, findings):
        return
    known = _Known.of(profile)
    _check_block_order(plan, known, findings)
    operations: dict[int, list[Operation]] = defaultdict(list)
    for each in plan.operations:
        if not is_instruction(each.kind):
            operations[each.stage].append(each)
    for number, stage in enumerate(plan.stages):
        rows = _rows(number, stage, stage.microbatch_size // stage.replicas, known, findings)
        if rows:
            _check_stage(number, stage, profile, known, findings)
            own = operations[number]
            _check_operations(own, rows, _held_by_others(stage, known), plan.split_overhead_ns, findings)
            for operation in own:
                if operation.part_ns is not None:
                    _check_part(number, stage, operation, known, findings)
    _check_dependencies(plan, profile, cluster, findings)
    _check_tied(plan, profile, findings)
    if _knows_links(plan, cluster):
        _check_syncs(plan, cluster, findings)
        _check_tied_syncs(plan, cluster, findings)


class _Known(NamedTuple):
    """A profile's blocks by their ids, and the edges into each."""

    blocks: dict[str, Block]
    into: dict[str, list[Edge]]

    @staticmethod
    def of(profile: Profile) -> _Known:
        """Of a profile, which is looked through once."""
        into: dict[str, list[Edge]] = defaultdict(list)
        for edge in profile.edges:
            into[edge.target].append(edge)
        return _Known({block.id: block for block in profile.blocks}, dict(into))


def _knows_links(plan: Plan, cluster: Cluster | None) -> bool:
    """Whether times of messages are known: without the plan's cluster they are not."""
    return cluster is not None or not plan.provenance.cluster_sha256


def check_cluster(plan: Plan, cluster: Cluster, peaks: Sequence[int], findings: Findings) -> None:
    """The cluster is the plan's, has its devices, and enough memory on each for ``peaks`` [device] in bytes."""
    _check_fingerprint("cluster", sha256_of(cluster), plan.provenance.cluster_sha256, findings)
    if cluster.num_devices < len(plan.devices):
        text = f"are {len(plan.devices)}, the cluster has {cluster.num_devices}"
        findings.add("cluster", "devices", text)
        return
    for device, (peak, memory) in enumerate(zip(peaks, cluster.memory_bytes, strict=False)):
        if memory is not None and peak > memory:
            text = f"takes {peak} bytes, {peak - memory} more than the {memory} of the cluster's device"
            findings.add("cluster", f"devices[{device}]", text)


def _check_fingerprint(what: str, found: str, stated: str, findings: Findings) -> None:
    if stated not in ("", found):
        text = f"is {stated[:12]}..., but this {what} has {found[:12]}...: the plan was made from another"
        findings.add(what, f"provenance.{what}_sha256", text)


def _check_origin(plan: Plan, profile: Profile, findings: Findings) -> None:
    """What the plan says of the profile's device and samples, which older plans do not, is what the profile says."""
    stated = plan.provenance
    for key, said, found in (
        ("device", stated.device, profile.source.device),
        ("dtype", stated.dtype, profile.source.dtype),
        ("tokens_per_sample", stated.tokens_per_sample, profile.tokens_per_sample),
        ("forward_flops_per_sample", stated.forward_flops_per_sample, profile.forward_flops_per_sample),
    ):
        if said and said != found:
            findings.add("profile", f"provenance.{key}", f"is {said}, in the profile it is {found or 'not known'}")


def _has_its_blocks(plan: Plan, profile: Profile, findings: Findings) -> bool:
    """Whether the plan's stages and the profile have the same blocks."""
    known = {block.id for block in profile.blocks}
    planned = {block for stage in plan.stages for block in stage.blocks}
    for number, stage in enumerate(plan.stages):
        for index, block in enumerate(stage.blocks):
            if block not in known:
                findings.add("profile", f"stages[{number}].blocks[{index}]", f"{block!r} is not in the profile")
    for block in sorted(known - planned):
        findings.add("profile", "stages", f"block {block!r} of the profile is in none")
    by_route: dict[int, set[str]] = defaultdict(set)
    for stage in plan.stages:
        by_route[stage.route].update(stage.blocks)
    return all(blocks == known for blocks in by_route.values())


def _check_block_order(plan: Plan, known: _Known, findings: Findings) -> None:
    """In a stage a block comes after those whose outputs it takes."""
    for number, stage in enumerate(plan.stages):
        place_of = {block: index for index, block in enumerate(stage.blocks)}
        for block, target in place_of.items():
            for edge in known.into.get(block, ()):
                if place_of.get(edge.source, -1) > target:
                    text = f"{block!r} runs before {edge.source!r}, which it needs"
                    findings.add("profile", f"stages[{number}].blocks[{target}]", text)


def _rows(number: int, stage: Stage, samples: int, known: _Known, findings: Findings) -> list[CostRow]:
    """Costs of the stage's blocks on each device for ``samples`` samples there.

    Empty, with a problem noted, if the profile lacks some; and where it cannot have them.
    """
    if stage.configurations or not shares_evenly(stage):  # the latter is refused whatever the profile
        return []
    try:
        return [
            block_costs(
                _of_configuration(known.blocks[id_], stage.configuration),
                samples,
                stage.shards,
                recompute=stage.recompute,
                input_bytes=sum(_tensor_bytes(edge, samples) for edge in known.into.get(id_, ())),
            )
            for id_ in stage.blocks
        ]
    except UsageError as error:
        findings.add("profile", f"stages[{number}]", str(error))
        return []


def _of_configuration(block: Block, configuration: str | None) -> Block:
    """The block with only the rows of a named configuration, as if they had no name."""
    if configuration is None:
        return block
    rows = [row.model_copy(update={"configuration": None}) for row in block.costs if row.configuration == configuration]
    return block.model_copy(update={"costs": tuple(rows)})


def _check_stage(number: int, stage: Stage, profile: Profile, known: _Known, findings: Findings) -> None:
    """Each shard holds its part of what training keeps of every block, rounded up; what is tied in it, once."""
    own = set(stage.blocks)
    expected = sum((known.blocks[block].state.share(stage.shards) for block in own), MemoryBytes())
    for tied in profile.tied:
        for _ in sorted(own & set(tied.blocks))[1:]:
            expected -= tied.state // stage.shards
    _compare(f"stages[{number}]", stage, expected.keyed(STATE_KINDS), findings)


def _check_part(number: int, stage: Stage, forward: Operation, known: _Known, findings: Findings) -> None:
    """One of two parts of a micro-batch takes what the profile says of half the samples."""
    rows = _rows(number, stage, stage.microbatch_size // stage.replicas // 2, known, findings)
    if rows:
        expected = {"part_ns": max(1, sum(row.forward_ns for row in rows))}
        _compare(f"operations[{forward.id}]", forward, expected, findings)


def _check_tied(plan: Plan, profile: Profile, findings: Findings) -> None:
    """What several stages have of a tied parameter stands in the plan: once for all stages that can share a copy.

    Those are stages whose common devices have the same shard of it in all of them.
    """
    stated = {each.name: [other for other in plan.tied if other.name == each.name] for each in plan.tied}
    for tied in profile.tied:
        found = stated.pop(tied.name, [])
        users = [
            number
            for number, stage in enumerate(plan.stages)
            if set(stage.blocks) & set(tied.blocks) and not stage.configurations
        ]
        expected = _sharing(plan, users) if len(users) > 1 and tied.state.total else []
        if [list(each.stages) for each in found] != expected:
            text = (
                f"{tied.name!r} is shared by stages {[list(each.stages) for each in found]}, by the profile {expected}"
            )
            findings.add("profile", "tied", text)
            continue
        for each in found:
            state = (tied.state // plan.stages[each.stages[0]].shards).keyed(STATE_KINDS)
            _compare(f"tied[{plan.tied.index(each)}]", each, state, findings)
    for name in stated:
        findings.add("profile", "tied", f"{name!r} is not tied in the profile")


def _sharing(plan: Plan, users: Sequence[int]) -> list[list[int]]:
    """Stages, each with the first ones of as many shards among which no device has another shard of it."""
    found: list[list[int]] = []
    for number in users:
        stage = plan.stages[number]
        for together in found:
            others = [plan.stages[other] for other in together]
            if all(_same_shards(stage, other) for other in others):
                together.append(number)
                break
        else:
            found.append([number])
    return found


def _same_shards(stage: Stage, other: Stage) -> bool:
    """Whether both stages have as many shards, and every device of both has the same one in both."""
    common = set(stage.devices) & set(other.devices)
    places = [[each.devices.index(device) % each.shards for device in sorted(common)] for each in (stage, other)]
    return stage.shards == other.shards and places[0] == places[1]


def _check_tied_syncs(plan: Plan, cluster: Cluster | None, findings: Findings) -> None:
    """Gradients of what is tied are summed over all its copies, shard by shard; whole, where it is split unlike."""
    for number, each in enumerate(plan.tied):
        parts = [(plan.stages[n], other) for other in plan.tied if other.name == each.name for n in other.stages]
        unlike = len({stage.shards for stage, _ in parts}) > 1
        groups: dict[int, set[int]] = defaultdict(set)
        for stage, _ in parts:
            for index, device in enumerate(stage.devices):
                groups[0 if unlike else index % stage.shards].add(device)
        size = max(other.state[GRADIENTS] * (stage.shards if unlike else 1) for stage, other in parts)
        slowest = max(all_reduce_time(cluster, sorted(group), size) for group in groups.values())
        _compare(f"tied[{number}]", each, {"sync_ns": slowest}, findings)


def _check_syncs(plan: Plan, cluster: Cluster | None, findings: Findings) -> None:
    """Gradients are summed over all devices that hold a part of the same blocks, shard by shard; what is tied apart.

    Inside a stage whose blocks have configurations they are summed otherwise, too.
    """
    apart = [sum(each.state[GRADIENTS] for each in plan.tied if n in each.stages) for n in range(len(plan.stages))]
    devices_of: dict[str, set[int]] = defaultdict(set)
    for stage in plan.stages:
        for block in stage.blocks:
            devices_of[block].update(stage.devices)
    for number, stage in enumerate(plan.stages):
        if stage.configurations:
            continue
        devices = sorted(set().union(*(devices_of[block] for block in stage.blocks)))
        own = stage.state[GRADIENTS] - apart[number]
        expected = {"sync_ns": all_reduce_time(cluster, devices[:: stage.shards], own)}
        _compare(f"stages[{number}]", stage, expected, findings)


def _check_operations(
    operations: Sequence[Operation], rows: Sequence[CostRow], again: int, split_overhead_ns: int, findings: Findings
) -> None:
    """Durations add up over the blocks; activations are taken by F (and I), and given back by B, or by I and W.

    ``again`` bytes are of tensors that more than one block counts.
    """
    held = max(0, sum(row.activation_bytes for row in rows) - again)
    deferred = sum(row.weight_grad_bytes for row in rows)
    effects = {
        Role.FORWARD: (held, 0),
        Role.BACKWARD: (0, held),
        Role.INPUT_GRAD: (max(0, deferred - held), max(0, held - deferred)),
        Role.WEIGHT_GRAD: (0, deferred),
    }
    for operation in operations:
        durations = [_duration(row, operation.role) for row in rows]
        place = f"operations[{operation.id}]"
        if any(duration is None for duration in durations):
            findings.add("profile", place, "the profile has no input_grad_ns and weight_grad_ns for some block")
            continue
        acquire, release = effects[operation.role]
        overhead = split_overhead_ns if operation.role in (Role.INPUT_GRAD, Role.WEIGHT_GRAD) else 0
        expected = {
            "duration_ns": max(1, sum(duration or 0 for duration in durations) + overhead),
            "acquire_bytes": acquire,
            "release_bytes": release,
            "workspace_bytes": max(row.workspace_bytes for row in rows),
        }
        _compare(place, operation, expected, findings)


def _duration(row: CostRow, role: Role) -> int | None:
    """Time of one block, None where the row does not have it; a full backward is also I and W after each other."""
    whole = (row.input_grad_ns or 0) + (row.weight_grad_ns or 0) if row.backward_ns is None else row.backward_ns
    times = {
        Role.FORWARD: row.forward_ns,
        Role.BACKWARD: whole,
        Role.INPUT_GRAD: row.input_grad_ns,
        Role.WEIGHT_GRAD: row.weight_grad_ns,
    }
    return times[role]


def _check_dependencies(plan: Plan, profile: Profile, cluster: Cluster | None, findings: Findings) -> None:
    """Dependencies between stages are the profile's edges: outputs along them, gradients against them."""
    expected = _expected(plan, profile)
    stated = {(dependency.source, dependency.target) for dependency in plan.dependencies}
    for source, target in sorted(set(expected) - stated):
        if _led_by_instructions(plan, source, target):
            continue
        edge = expected[source, target][0]
        text = f"{source} -> {target} is missing: the profile has an edge {edge.source!r} -> {edge.target!r}"
        findings.add("profile", "dependencies", text)
    for number, dependency in enumerate(plan.dependencies):
        pair = dependency.source, dependency.target
        if pair in expected:
            _check_hops(plan, number, dependency, expected[pair], cluster, findings)
        elif dependency.source_stage != dependency.target_stage and not dependency.has_instruction:
            text = f"{pair[0]} -> {pair[1]} comes from no edge of the profile"
            findings.add("profile", f"dependencies[{number}]", text)


def _led_by_instructions(plan: Plan, source: str, target: str) -> bool:
    """Whether a way of dependencies leads from one operation to another, with only instructions in between."""
    reached, left = {source}, [source]
    while left:
        at = left.pop()
        for dependency in plan.dependencies:
            goes_on = dependency.source == at and dependency.target not in reached
            if goes_on and (dependency.target == target or is_instruction(dependency.target_kind)):
                reached.add(dependency.target)
                left.append(dependency.target)
    return target in reached


def _expected(plan: Plan, profile: Profile) -> _EdgesByPair:
    """Dependencies between stages, each with the edges it comes from."""
    stage_of = {(stage.route, block): n for n, stage in enumerate(plan.stages) for block in stage.blocks}
    forward = {operation.stage: operation.id for operation in plan.operations if operation.role is Role.FORWARD}
    back = {operation.stage: operation.id for operation in plan.operations if operation.role in BACKWARD_ROLES}
    found: _EdgesByPair = defaultdict(list)
    sent: set[tuple[object, ...]] = set()  # a tensor goes to a stage once
    for route, edge in itertools.product(sorted({route for route, _ in stage_of}), profile.edges):
        source, target = stage_of[route, edge.source], stage_of[route, edge.target]
        ways = [(forward, source, target), *([(back, target, source)] if edge.gradient else [])]
        for ids, sender, receiver in ways if source != target else ():
            if not {sender, receiver} <= ids.keys():  # which is refused elsewhere
                continue
            pair = ids[sender], ids[receiver]
            if edge.tensor is None or (pair, edge.source, edge.tensor) not in sent:
                found[pair].append(edge)
                sent.add((pair, edge.source, edge.tensor))
    return dict(found)


def _held_by_others(stage: Stage, known: _Known) -> int:
    """Bytes of tensors that blocks of the stage take after another block of it took them."""
    samples = stage.microbatch_size // stage.replicas
    taken: set[tuple[str, str]] = set()
    again = 0
    for edge in itertools.chain.from_iterable(known.into.get(block, ()) for block in stage.blocks):
        if edge.gradient and edge.tensor is not None:
            again += _tensor_bytes(edge, samples) if (edge.source, edge.tensor) in taken else 0
            taken.add((edge.source, edge.tensor))
    return again


def _check_hops(
    plan: Plan,
    number: int,
    dependency: Dependency,
    edges: Sequence[Edge],
    cluster: Cluster | None,
    findings: Findings,
) -> None:
    """Bytes of the samples it carries at most; a fixed time goes before the cluster's and occupies no link."""
    source, target = plan.stage_of(dependency.source), plan.stage_of(dependency.target)
    if not (source.route == target.route and shares_evenly(source) and shares_evenly(target)):
        return
    carried, makers = deliveries_of(source, target), replicas_of(source)
    for index, hop in enumerate(dependency.hops):
        place = f"dependencies[{number}].hops[{index}]"
        samples = max(carried.get((hop.target_device, makers[hop.source_device]), {}).values(), default=0)
        expected = {"bytes": sum(_tensor_bytes(edge, samples) for edge in edges)}
        if _knows_links(plan, cluster):
            expected |= _times(hop, edges, samples, cluster)
        _compare(place, hop, expected, findings)


def _times(hop: Hop, edges: Sequence[Edge], samples: int, cluster: Cluster | None) -> dict[str, int]:
    priced = [edge for edge in edges if edge.transfer_ns is None]
    fixed = max((edge.transfer_ns for edge in edges if edge.transfer_ns is not None), default=0)
    latency, occupancy = 0, 0
    if priced:
        size = sum(_tensor_bytes(edge, samples) for edge in priced)
        latency, occupancy = transfer_time(cluster, hop.source_device, hop.target_device, size)
    return {"latency_ns": max(latency, fixed), "occupancy_ns": occupancy}


def _tensor_bytes(edge: Edge, samples: int) -> int:
    return edge.bytes_per_sample if edge.broadcast else edge.bytes_per_sample * samples


def _compare(
    place: str, stated: Stage | TiedState | Operation | Hop, expected: dict[str, int], findings: Findings
) -> None:
    for name, value in expected.items():
        if getattr(stated, name) != value:
            findings.add("profile", f"{place}.{name}", f"is {getattr(stated, name)}, the profile gives {value}")
