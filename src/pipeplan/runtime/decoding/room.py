"""How much cache a run makes room for, where that may be more than its plan counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipeplan.files import Plan
from pipeplan.runtime.decoding.layouts import BlockLayout, Placed
from pipeplan.runtime.decoding.pieces import room_for
from pipeplan.runtime.models.spec import CausalDecoder, Model
from pipeplan.units import format_bytes


def cache_room(
    placed: Sequence[Placed], sizes: Sequence[int], longest: int, chunk: int, decoder: CausalDecoder, dtype: torch.dtype
) -> Mapping[int, int]:
    """{rank: bytes} for what is kept of all heads, or of latents, of texts of ``longest`` words, before any is read.

    Args:
        placed: all stages.
        sizes: slots of each group.
        longest: the most words of a text.
        chunk: the most that enter at once.
        decoder: what writes.
        dtype: of what is kept.

    Raises:
        UsageError: no block attends to anything.
    """
    from pipeplan.runtime.profiling.inference import cached_of

    attended, found = cached_of(decoder, dtype), dict[int, int]()
    for stage in placed:
        for number, id_ in enumerate(stage.blocks):
            layout = BlockLayout.of(stage, number)
            words = room_for(longest, decoder.windows(id_), chunk, layout.pieces.size)
            for device, rank in enumerate(stage.devices):
                slots = sum(len(layout.cached(device, size)) for size in sizes)
                shards = len(layout.shards(device))
                numbers = sum(
                    max(1, each.key_heads // shards) * (each.key_size + (0 if decoder.latent else each.value_size))
                    for each in attended.get(id_, ())
                )
                found[rank] = found.get(rank, 0) + slots * words * numbers * dtype.itemsize
    return found


def room_remarks(plan: Plan, model: Model, longest: int, chunk: int, dtype: torch.dtype) -> tuple[str, ...]:
    """What is to be known before a run whose caches take more than the plan counts: beside a window they hold the words
    of a prompt that enter at once."""
    assert plan.decode is not None
    decoder = model.decoder
    if decoder is None or all(decoder.windows(each.id) is None for each in model.blocks):
        return ()
    rooms = cache_room(plan.stages, plan.decode.sizes, longest, chunk, decoder, dtype)
    rank = max(rooms, key=lambda each: rooms[each] - plan.cache_bytes[each])
    planned = plan.cache_bytes[rank]
    if rooms[rank] <= planned:
        return ()
    return (
        f"caches take {format_bytes(rooms[rank])} ({rooms[rank]} bytes) on rank {rank}, and the plan counts "
        f"{format_bytes(planned)} ({planned} bytes) there: beside a window runs keep the words of a prompt that enter "
        "at once; give shorter prompts if memory is short",
    )
