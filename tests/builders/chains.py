"""Chains of stages: one builder each of a workload, a profile and a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from builders.orders import gpipe_orders, one_f_one_b, one_f_one_b_repetend
from builders.plans import plan_of
from builders.profiles import joined, stage_per_block
from pipeplan.files import Block, CostRow, Plan, Profile, Provenance
from pipeplan.workload.elements import Dependency, Device, Hop, Operation, Stage
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCosts:
    """What every stage of a chain takes; ``split`` gives the times of I and W instead of B."""

    forward: int = 10
    backward: int = 20
    split: tuple[int, int] | None = None
    lag: int = 0
    activation_bytes: int = 1000
    weight_grad_bytes: int = 0
    workspace_bytes: int = 0
    parameter_bytes: int = 0


def chain_workload(
    num_devices: int = 4,
    num_microbatches: int = 8,
    *,
    memory_bytes: int | None = None,
    devices: Sequence[Sequence[int]] | None = None,
    sizes: Sequence[int] | None = None,
    **costs: Any,
) -> Workload:
    """A chain of stages, by default one per device; ``costs`` are fields of :class:`ChainCosts`.

    ``devices`` [stage] places the stages elsewhere (``num_devices`` stays the number of devices) and ``sizes``
    [stage] gives their micro-batch sizes, for a mini-batch of ``num_microbatches`` samples.
    """
    each = ChainCosts(**costs)
    groups = [tuple(group) for group in devices] if devices else [(device,) for device in range(num_devices)]
    stages = tuple(
        Stage(
            blocks=(f"block{s}",),
            devices=group,
            shards=len(group),
            microbatch_size=sizes[s] if sizes else 1,
            parameter_bytes=each.parameter_bytes,
            gradient_bytes=each.parameter_bytes,
            optimizer_bytes=2 * each.parameter_bytes,
        )
        for s, group in enumerate(groups)
    )
    operations = [
        Operation(
            kind="F",
            stage=s,
            duration_ns=each.forward,
            acquire_bytes=each.activation_bytes,
            workspace_bytes=each.workspace_bytes,
        )
        for s in range(len(stages))
    ]
    back = "I" if each.split else "B"
    for s in reversed(range(len(stages))):
        operations += _backward(s, each)
    dependencies = [Dependency(source=f"{s}F", target=f"{s}{back}") for s in range(len(stages))]
    if each.split:
        dependencies += [Dependency(source=f"{s}I", target=f"{s}W") for s in range(len(stages))]
    for s, (group, following) in enumerate(zip(groups, groups[1:], strict=False)):
        down, up = hops(group, following, each.lag), hops(following, group, each.lag)
        dependencies.append(Dependency(source=f"{s}F", target=f"{s + 1}F", hops=down))
        dependencies.append(Dependency(source=f"{s + 1}{back}", target=f"{s}{back}", hops=up))
    return Workload(
        name="chain",
        placement="one-to-one",
        num_microbatches=num_microbatches,
        microbatch_size=1,
        devices=tuple(Device(memory_bytes=memory_bytes) for _ in range(num_devices)),
        stages=stages,
        operations=tuple(operations),
        dependencies=tuple(dependencies),
    )


def _backward(stage: int, costs: ChainCosts) -> list[Operation]:
    held, deferred, workspace = costs.activation_bytes, costs.weight_grad_bytes, costs.workspace_bytes
    if costs.split is None:
        return [
            Operation(kind="B", stage=stage, duration_ns=costs.backward, release_bytes=held, workspace_bytes=workspace)
        ]
    return [
        Operation(
            kind="I",
            stage=stage,
            duration_ns=costs.split[0],
            acquire_bytes=max(0, deferred - held),
            release_bytes=max(0, held - deferred),
            workspace_bytes=workspace,
        ),
        Operation(kind="W", stage=stage, duration_ns=costs.split[1], release_bytes=deferred, workspace_bytes=workspace),
    ]


def hops(source: Sequence[int], target: Sequence[int], lag: int = 0, size: int = 64) -> tuple[Hop, ...]:
    """A message to every target device outside the source's group; senders take turns."""
    return tuple(
        Hop(source_device=source[index % len(source)], target_device=device, bytes=size, latency_ns=lag)
        for index, device in enumerate(target)
        if device not in source
    )


def shared_workload(num_devices: int = 4, num_microbatches: int = 6, *, lag: int = 0) -> Workload:
    """A stage on all devices before and after a chain with one stage per device: operations of several devices."""
    everywhere = list(range(num_devices))
    groups = [everywhere, *([device] for device in everywhere), everywhere]
    return chain_workload(num_devices, num_microbatches, devices=groups, lag=lag)


def chain_plan(
    num_devices: int = 4,
    num_microbatches: int = 8,
    *,
    schedule: str = "1f1b",
    repetend: bool = False,
    unroll: int = 1,
    full_names: bool = False,
    provenance: Provenance | None = None,
    **costs: Any,
) -> Plan:
    """A valid plan of a chain with one stage per device; ``schedule`` is ``1f1b`` or ``gpipe``.

    ``repetend`` (1F1B with enough micro-batches) states the part that repeats, with ``unroll`` of each operation.
    ``costs`` are those of :func:`chain_workload`.
    """
    workload = chain_workload(num_devices, num_microbatches, **costs)
    orders = one_f_one_b(workload) if schedule == "1f1b" else gpipe_orders(workload)
    first = one_f_one_b_repetend(workload) if repetend else None
    return plan_of(workload, orders, first=first, unroll=unroll, full_names=full_names, provenance=provenance)


def chain_profile(num_blocks: int = 4, *, placed: bool = True, **costs: Any) -> Profile:
    """The profile of which :func:`chain_plan`, with the same numbers, is a plan."""
    each = ChainCosts(**costs)
    row = CostRow(
        microbatch_size=1,
        forward_ns=each.forward,
        backward_ns=None if each.split else each.backward,
        input_grad_ns=each.split[0] if each.split else None,
        weight_grad_ns=each.split[1] if each.split else None,
        activation_bytes=each.activation_bytes,
        weight_grad_bytes=each.weight_grad_bytes,
        workspace_bytes=each.workspace_bytes,
    )
    blocks = tuple(
        Block(
            id=f"block{index}",
            operator="block",
            parameter_bytes=each.parameter_bytes,
            optimizer_bytes=2 * each.parameter_bytes,
            costs=(row,),
        )
        for index in range(num_blocks)
    )
    profile = joined(blocks, bytes_per_sample=64, transfer_ns=each.lag)
    placement = stage_per_block(profile).model_copy(update={"strategy": "one-to-one"})
    return profile.model_copy(update={"name": "chain", "placement": placement if placed else None})


def with_devices_memory(workload: Workload, memory_bytes: int | None) -> Workload:
    """The same workload on devices with this memory."""
    return replace(workload, devices=tuple(Device(memory_bytes=memory_bytes) for _ in workload.devices))


def split_chain(
    num_blocks: int,
    *,
    shards: Sequence[int] = (1, 2, 4),
    context: Sequence[int] = (1,),
    forward_ns: int = 4000,
    activation_bytes: int = 4 * 10**8,
) -> Profile:
    """Blocks alike of 100 MB of parameters, which so many devices can split and share sequences of; without placement.

    A backward takes two forwards; times and bytes are of a sample on one device.
    """
    chain = chain_profile(num_blocks, placed=False, parameter_bytes=100_000_000)
    rows = [
        CostRow(
            microbatch_size=1,
            shards=each,
            context=parts,
            forward_ns=forward_ns // (each * parts),
            backward_ns=2 * forward_ns // (each * parts),
            activation_bytes=activation_bytes // (each * parts),
        )
        for each in shards
        for parts in context
    ]
    blocks = tuple(block.model_copy(update={"costs": tuple(rows)}) for block in chain.blocks)
    return chain.model_copy(update={"blocks": blocks})
