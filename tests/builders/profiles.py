"""Profiles of a few blocks, and placements with a stage for each of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from pipeplan.files import Block, CostRow, Edge, PlacedStage, Placement, Profile, Source

SOURCE = Source(method="literature", reference="made up for tests")


def profile_of(
    costs: Sequence[CostRow | Sequence[CostRow]],
    pairs: Iterable[tuple[int, int] | Edge] | None = None,
    *,
    parameters: Sequence[int] | None = None,
    **edge: Any,
) -> Profile:
    """Blocks b0, b1, ... with these rows; a chain unless ``pairs`` of numbers are given. Edges are all as ``edge``."""
    blocks = [
        Block(
            id=f"b{index}",
            operator="layer",
            parameter_bytes=parameters[index] if parameters else 0,
            costs=(rows,) if isinstance(rows, CostRow) else tuple(rows),
        )
        for index, rows in enumerate(costs)
    ]
    return joined(blocks, pairs, **edge)


def joined(blocks: Sequence[Block], pairs: Iterable[tuple[int, int] | Edge] | None = None, **edge: Any) -> Profile:
    """The profile of these blocks, joined by ``pairs`` of their numbers or by edges: a chain unless any are given."""
    if pairs is None:
        pairs = zip(range(len(blocks) - 1), range(1, len(blocks)), strict=True)
    edges = tuple(
        pair if isinstance(pair, Edge) else Edge(source=blocks[pair[0]].id, target=blocks[pair[1]].id, **edge)
        for pair in pairs
    )
    return Profile(name="test", source=SOURCE, blocks=tuple(blocks), edges=edges)


def stage_per_block(profile: Profile, devices: Sequence[int | Sequence[int]] | None = None) -> Placement:
    """A stage for each block, block i on device i, or on ``devices[i]``, of which there may be several."""
    groups = [(on,) if isinstance(on, int) else tuple(on) for on in devices or range(len(profile.blocks))]
    return Placement(
        strategy="by-hand",
        num_devices=1 + max(device for group in groups for device in group),
        stages=tuple(
            PlacedStage(blocks=(block.id,), devices=group, shards=len(group))
            for block, group in zip(profile.blocks, groups, strict=True)
        ),
    )


def uneven_chain(
    seed: int,
    blocks: int,
    shards: Sequence[int],
    contexts: Sequence[int] = (1,),
    experts: Sequence[tuple[int, int]] = ((1, 1),),
) -> Profile:
    """Blocks of very different work, so that equal widths do not suit them, with costs for these numbers of shards.

    And of parts of sequences; every other one has experts, where these are shared: by so many devices, of which so many
    split each.
    """
    random_ = random.Random(seed)
    found = []
    for index in range(blocks):
        forward, backward, held = (random_.randint(2, 60) for _ in range(3))
        own = experts if index % 2 == 0 else ((1, 1),)
        rows = tuple(
            CostRow(
                microbatch_size=size,
                shards=count,
                context=context,
                expert=expert,
                expert_shards=split,
                forward_ns=1 + forward * size // (count * context * expert) + random_.randint(0, 4),
                backward_ns=1 + backward * size // (count * context * expert) + random_.randint(0, 4),
                activation_bytes=held * size // (count * context),
            )
            for size in (1, 2)
            for count in shards
            for context in contexts
            for expert, split in own
        )
        kept: dict[str, Any] = {"parameter_bytes": random_.randint(0, 20)}
        if len(own) > 1:
            kept = {"parameters": 20, "expert_parameters": 16, "parameter_bytes": 20}
        found.append(Block(id=f"b{index}", operator="layer", costs=rows, **kept))
    return joined(found)
