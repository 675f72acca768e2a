"""What a stage costs whose blocks kernel backends run: rows of its segments, and what changes of backend take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeplan.costs.blocks import StageCost, block_costs, running_on
from pipeplan.costs.forwards import held_by_units
from pipeplan.costs.held_once import counted_again
from pipeplan.costs.speeds import at_speed
from pipeplan.errors import UsageError
from pipeplan.files import CostRow, Profile
from pipeplan.files.profile import EAGER
from pipeplan.workload.elements import Segment, Stage


def with_segments(profile: Profile, stage: Stage, plain: StageCost) -> StageCost:
    """The costs of a stage whose segments kernel backends run, from those that it has in eager torch.

    Forward and backward of its segments add up, and so do activations: what several of them take is held once. A change
    of backend is in forward. Where another backend than eager torch runs a segment, backward is whole. Workspace is the
    largest.

    Raises:
        UsageError: the profile has no row of a segment for this size.
    """
    size = stage.microbatch_size // stage.replicas
    units = [*units_of(stage.segments)]
    rows = [_row(profile, unit, size, stage.speed) for unit in units]
    change = at_speed(num_changes(profile, stage.segments) * change_ns(profile), stage.speed)
    compiled = any(segment.backend != EAGER for segment in stage.segments)
    split = not compiled and all(row.input_grad_ns is not None for row in rows)
    cost = replace(
        plain,
        forward_ns=sum(row.forward_ns for row in rows) + change,
        backward_ns=sum(row.whole_backward_ns for row in rows),
        input_grad_ns=sum(row.input_grad_ns or 0 for row in rows) if split else None,
        weight_grad_ns=sum(row.weight_grad_ns or 0 for row in rows) if split else None,
        activation_bytes=max(0, sum(row.activation_bytes for row in rows) - _too_often(profile, units, size)),
        weight_grad_bytes=sum(row.weight_grad_bytes for row in rows),
        workspace_bytes=max(row.workspace_bytes for row in rows),
    )
    if not profile.is_inference:
        return cost
    held = held_by_units(profile, [unit.blocks for unit in units], rows)
    return replace(cost, activation_bytes=held.given, workspace_bytes=held.inner)


def units_of(segments: Iterable[Segment]) -> Iterable[Segment]:
    """What has a row of its own: segments that a backend runs at once, and each block that eager torch runs."""
    for segment in segments:
        if segment.backend != EAGER:
            yield segment
            continue
        for block in segment.blocks:
            yield Segment(blocks=(block,), backend=EAGER)


def change_ns(profile: Profile) -> int:
    """What one change of backend takes."""
    return 0 if profile.kernels is None else profile.kernels.change_ns


def num_changes(profile: Profile, segments: Sequence[Segment]) -> int:
    """For every result of a stage's blocks, how many other backends of the stage take it."""
    backend = {block: segment.backend for segment in segments for block in segment.blocks}
    found = 0
    for block, own in backend.items():
        taking = {backend[edge.target] for edge in profile.edges_from.get(block, ()) if edge.target in backend}
        found += len(taking - {own})
    return found


def require_plain(profile: Profile, number: int, stage: Stage) -> None:
    """Refuse segments of what backends were not measured with. Raises UsageError."""
    said = {
        "a profile of its own for some kind of device": bool(stage.kinds),
        "launch_overhead_ns": profile.launch_overhead_ns > 0,
        f"the recipe {profile.recipe.name}, by which parameters are cast when they are used": any(
            running_on(profile.by_id[id_], profile.recipe, 1) for id_ in stage.blocks
        ),
        "several devices for each block, recomputation, or a configuration": stage.shards > 1
        or stage.context > 1
        or stage.expert > 1
        or stage.recomputes
        or bool(stage.configurations),
    }
    if beside := next((what for what, there in said.items() if there), None):
        raise UsageError(
            f"stages[{number}] has segments that kernel backends run, and {beside}, with which they were not measured; "
            "leave out one of them"
        )


def _row(profile: Profile, unit: Segment, size: int, speed: float) -> CostRow:
    if unit.backend == EAGER:
        return block_costs(profile.by_id[unit.blocks[0]], size, recipe=profile.recipe, speed=speed)
    row = None if profile.kernels is None else profile.kernels.row(unit.blocks, size, unit.backend)
    if row is None:
        raise UsageError(no_row(unit, size))
    if speed == 1:
        return row
    times = {key: ns for key in ("forward_ns", "backward_ns") if (ns := getattr(row, key)) is not None}
    return row.model_copy(update={key: at_speed(ns, speed) for key, ns in times.items()})


def no_row(unit: Segment, size: int) -> str:
    """What the profile lacks, and how to get it."""
    named = unit.blocks[0] if len(unit.blocks) == 1 else f"{unit.blocks[0]} to {unit.blocks[-1]}"
    return (
        f"the profile has no row of {named} by backend {unit.backend!r} at micro-batch size {size}; profile with "
        f"--backends {unit.backend}, or choose another --kernels"
    )


def _too_often(profile: Profile, units: Sequence[Segment], size: int) -> int:
    """Bytes by which what the units count as held is more than they hold together."""
    blocks = [block for unit in units for block in unit.blocks]
    numbered = ((number, unit) for number, unit in enumerate(units) if unit.backend != EAGER)
    fused = {block: number for number, unit in numbered for block in unit.blocks}
    return counted_again(profile, blocks, [False] * len(blocks), size, fused=fused)
