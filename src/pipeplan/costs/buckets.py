"""Buckets: which gradients of a stage are summed together while its last action still makes those of other blocks.

A bucket has whole blocks, from the last to the first as backward reaches them, until it has the usual 25 MiB of
PyTorch's DistributedDataParallel (Li et al., VLDB 2020, section 3.2.3); smaller ones cost latency, larger ones wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from pipeplan.costs.shared import SharedState
from pipeplan.costs.zero import Experts, Zero, cuts
from pipeplan.files.cluster import Overlap
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Bucket, Operation, Stage, TiedState
from pipeplan.workload.kinds import GRADIENT_ROLES, GRADIENTS, Role

BUCKET_BYTES = 25 * 2**20
"""Of gradients, from which on a bucket takes no further block: torch's ``bucket_cap_mb``."""


def with_buckets(
    shared: SharedState,
    stages: Sequence[Stage],
    tied: Sequence[TiedState],
    operations: Sequence[Operation],
    given: Collection[int],
    overlap: Overlap,
) -> list[Stage]:
    """Stages with their buckets, of two or more, but for the times of sums; without any where nothing overlaps.

    Not of stages whose costs are ``given``: what each of their blocks takes is not known. Nor where gradients are
    divided, and reduced block by block as it is (levels 2 and 3), unless all overlaps, and none is reduced by actions
    of programs.
    """
    if overlap == "none":
        return [*stages]
    with_others = {id_ for stage in stages for id_ in stage.blocks} if len({s.route for s in stages}) > 1 else set()
    found, known = [*stages], dict[object, tuple[Bucket, ...]]()
    for operation in checked(operations, 64):
        stage = stages[operation.stage]
        if stage.zero > 1 and (overlap != "all" or stage.reduce_every is not None):
            continue
        copied = stage.copies > 1 or len(stage.devices) > stage.expert > 1
        summed = copied or not with_others.isdisjoint(stage.blocks)
        if operation.role in GRADIENT_ROLES and summed and len(stage.blocks) > 1 and operation.stage not in given:
            apart = {each.name for each in tied if operation.stage in each.stages}
            like = operation.stage if shared.profile.tied else _likeness(shared, stage, operation)
            if like not in known:
                known[like] = _buckets(shared, stage, apart, operation)
            if known[like]:
                found[operation.stage] = replace(stage, buckets=known[like])
    return found


def _likeness(shared: SharedState, stage: Stage, operation: Operation) -> object:
    """Equal for stages with the same buckets, where none shares anything."""
    blocks = tuple(map(shared.profile.alike.__getitem__, stage.blocks))
    run = stage.again, stage.speed, stage.kinds, stage.microbatch_size // stage.replicas
    split = stage.shards, stage.context, Zero.of(stage), Experts.of(stage)
    return blocks, run, split, operation.role, operation.duration_ns


def gathered_beside(stages: Sequence[Stage], operations: Sequence[Operation], contention: float) -> list[Stage]:
    """Stages that gather what a step has updated beside their next first forward: with what that does not hide.

    By ``contention`` the forward is slower meanwhile.
    """
    forwards = {each.stage: each.duration_ns for each in operations if each.role is Role.FORWARD}

    def exposed(gather_ns: int, forward_ns: int) -> int:
        hidden = min(gather_ns, forward_ns)
        return gather_ns - hidden + round(contention * hidden)

    return [replace(stage, gather_ns=exposed(stage.gather_ns, forwards[n])) for n, stage in enumerate(stages)]


def _buckets(shared: SharedState, stage: Stage, apart: Collection[str], operation: Operation) -> tuple[Bucket, ...]:
    """Those of a stage whose ``operation`` adds to gradients.

    Blocks' gradients become ready from the last block to the first, in proportion to their times. Of what is tied and
    not summed ``apart``, the first block has it, as its gradient is ready last.
    """
    sizes, whole = _gradient_bytes(shared, stage, apart), shared.whole_gradients(stage)
    if sum(sizes) <= BUCKET_BYTES:
        return ()
    samples = stage.microbatch_size // stage.replicas
    rows = [shared.row(id_, samples, stage, again) for id_, again in zip(stage.blocks, stage.again, strict=True)]
    deferred = operation.role is Role.WEIGHT_GRAD
    before = [0, *accumulate((row.weight_grad_ns or 0) if deferred else row.whole_backward_ns for row in rows)]
    found, blocks, size = list[Bucket](), 0, 0
    for index in range(len(sizes) - 1, -1, -1):
        blocks, size = blocks + 1, size + sizes[index]
        if not index or (size >= BUCKET_BYTES and any(sizes[:index])):
            ahead = operation.duration_ns * before[index] // max(1, before[-1])
            own = sum(whole[index : index + blocks])
            found.append(Bucket(blocks=blocks, bytes=size, whole_bytes=min(own, size), ahead_ns=ahead))
            blocks, size = 0, 0
    return tuple(found) if len(found) > 1 else ()


def _gradient_bytes(shared: SharedState, stage: Stage, apart: Collection[str]) -> list[int]:
    """[block] bytes of gradients that a device sums with it."""
    recipe, zero, experts = shared.profile.recipe, Zero.of(stage), Experts.of(stage)
    cut = cuts(recipe, zero, stage.shards)
    found = [shared.kept_on(id_, stage.shards, zero, experts)[GRADIENTS] for id_ in stage.blocks]
    for each in shared.profile.tied:
        places = [index for index, id_ in enumerate(stage.blocks) if id_ in each.blocks]
        for index in places[each.name not in apart :]:
            found[index] -= (shared.kept_tied[each.name] // cut)[GRADIENTS]
    return found
