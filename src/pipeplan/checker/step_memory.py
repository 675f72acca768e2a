"""What requests cache on the devices of a stage, counted again from the profile's blocks, and how many have room.

Each block's devices stand on a mesh of its own: of those that share requests, the one that has most counts; of those
with pieces of the same caches, each has the longest piece of all that they share; and of heads each has its own, or one
where there are fewer.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.checker.step_times import Ways
from pipeplan.files import Block, Plan, Profile
from pipeplan.files.plan import Decode
from pipeplan.workload.elements import Stage


def ways_of(stage: Stage) -> list[Ways]:
    """[block] how a stage's devices share it."""
    if stage.configurations:
        return [Ways.of(text) for text in stage.configurations]
    return [Ways.plain(stage.replicas, stage.shards)] * len(stage.blocks)


def sizes_of(decode: Decode, batch: int) -> list[int]:
    """[group] requests of so many, as equally many as can be."""
    return [batch * (n + 1) // decode.groups - batch * n // decode.groups for n in range(decode.groups)]


def cached_on_each(stage: Stage, decode: Decode, profile: Profile, batch: int) -> int:
    """Bytes on the device that has most, of all groups at the last step, with so many requests."""
    sizes, blocks = sizes_of(decode, batch), profile.by_id
    return sum(
        _of_request(blocks[name], way, decode.context_tokens) * sum(-(-size // way.sharers) for size in sizes)
        for name, way in zip(stage.blocks, ways_of(stage), strict=True)
    )


def _of_request(block: Block, way: Ways, context: int) -> int:
    """Bytes of one request's cache, or of the piece of it, on a device."""
    if not block.cache_bytes_per_token:
        return 0
    kept = min(context, block.cache_window_tokens or context)
    token = block.cache_bytes_per_token * max(1, block.cache_heads // way.shards) // block.cache_heads
    return -(-kept // way.pieces) * token


def has_room(plan: Plan, decode: Decode, profile: Profile, batch: int) -> bool:
    """Whether every device has memory for so many requests, where a step's work grows with its largest group."""
    largest, asked = max(sizes_of(decode, batch)), max(sizes_of(decode, decode.batch))
    kept, work = [0] * len(plan.devices), [0] * len(plan.devices)
    for number, stage in enumerate(plan.stages):
        if not stage.blocks:
            continue
        step = plan.operation(f"{number}F")
        grows = step.workspace_bytes + decode.groups * step.acquire_bytes
        for device in stage.devices:
            kept[device] += stage.state.total + cached_on_each(stage, decode, profile, batch)
            work[device] = max(work[device], -(-grows * largest // asked))
    limits: Sequence[int | None] = [device.usable_bytes for device in plan.devices]
    return all(limit is None or one + other <= limit for limit, one, other in zip(limits, kept, work, strict=True))


def said_ways(plan: Plan, profile: Profile) -> set[str] | None:
    """What a plan may call the way in which its caches are shared; None where its stages do not say it."""
    found, blocks = dict[str, None](), profile.by_id
    for stage in plan.stages:
        cached = [number for number, name in enumerate(stage.blocks) if blocks[name].cache_bytes_per_token]
        if not cached or len(stage.devices) == 1:
            continue
        if not stage.configurations:
            return None
        for number in cached:
            found.setdefault(Ways.of(stage.configurations[number]).name)
    if found:
        return {"+".join(found)}
    return {"pp", "dp"} if any(each.cache_bytes_per_token for each in profile.blocks) else None
