"""Decoders whose decode rows are drawn, with rows for shards, and an attention core that grows with the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pipeplan import Block, Edge, Profile
from pipeplan.files import CostRow, PhaseRow, Recipe, Source

HEADS, HEAD_BYTES = 4, 16


def with_pieces(profile: Profile, count: int) -> Profile:
    """The same, with rows of steps that share caches among so many devices: 7 ns longer, and 8 by queries alone."""

    def rows(block: Block) -> tuple[PhaseRow, ...]:
        plain = [each for each in block.phases if each.shards == 1 and block.cache_bytes_per_token]
        return tuple(
            each.model_copy(
                update={
                    "dcp": count,
                    "by_queries": by_queries,
                    "forward_ns": each.forward_ns + 7 + by_queries,
                    "core_ns": 0,
                }
            )
            for each in plain
            for by_queries in (False, True)
        )

    blocks = (block.model_copy(update={"phases": (*block.phases, *rows(block))}) for block in profile.blocks)
    return profile.model_copy(update={"blocks": tuple(blocks)})


def with_experts(profile: Profile, count: int) -> Profile:
    """The same, where most of every feed-forward is experts, with rows of those on so many devices: half as long."""

    def spread(block: Block) -> Block:
        if block.operator != "ffn":
            return block
        rows = tuple(
            each.model_copy(update={"expert": count, "forward_ns": each.forward_ns // 2})
            for each in block.phases
            if each.shards == 1
        )
        return block.model_copy(
            update={"parameters": 100, "expert_parameters": 90, "phases": (*block.phases, *rows)},
        )

    return profile.model_copy(update={"blocks": tuple(map(spread, profile.blocks))})


def drawn_decoder(
    seed: int,
    layers: int = 1,
    *,
    shards: Sequence[int] = (1, 2, 4),
    batches: Sequence[int] = (1, 3, 8),
    contexts: Sequence[int] = (10, 100, 400),
    core_ns: float = 1.0,
    device: str = "",
) -> Profile:
    """Attention and feed-forward between an embedding and a head; a request's cached token costs ``core_ns`` and more.

    A token's hidden state has 64 bytes, of which one of 4 heads has 16. ``device`` is a preset by whose links stages
    exchange; without one they are free.
    """
    draw = random.Random(seed)

    def block(name: str, operator: str, cached: bool = False) -> Block:
        rows, phases = [], []
        base, each, per_token = draw.randint(4_000, 40_000), draw.randint(10, 900), core_ns * draw.uniform(1, 4)
        works = {(count, batch): draw.randint(1, 300) for count in shards for batch in batches}
        for count in shards:
            parts = count if draw.random() < 0.8 else max(1, count // 2)  # some split badly
            rows.append(CostRow(microbatch_size=1, shards=count, forward_ns=base // parts, activation_bytes=64))
            for batch in batches:
                for context in contexts:
                    core = round(batch * context * per_token / parts) if cached else 0
                    phases.append(
                        PhaseRow(
                            phase="decode",
                            microbatch_size=batch,
                            context_tokens=context,
                            shards=count,
                            forward_ns=(base + each * batch) // parts + 2_000 * (count > 1) + core,
                            core_ns=core,
                            activation_bytes=64 * batch,
                            workspace_bytes=works[count, batch],
                        )
                    )
        told: dict[str, Any] = {"parameter_bytes": draw.randint(1_000, 9_000), "gradient_bytes": 0}
        if cached:
            told |= {"cache_bytes_per_token": 2 * HEADS * HEAD_BYTES, "cache_heads": HEADS}
            told |= {"query_bytes_per_token": HEADS * HEAD_BYTES, "mixture_bytes_per_token": HEADS * HEAD_BYTES}
            told["dimensions"] = {"heads": HEADS, "hidden": HEADS * HEAD_BYTES // 2}
        return Block(id=name, operator=operator, costs=tuple(rows), phases=tuple(phases), **told)

    blocks = [block("embedding", "embedding")]
    for number in range(layers):
        blocks += [block(f"layer{number}.attention", "attention", True), block(f"layer{number}.ffn", "ffn")]
    blocks.append(block("head", "head"))
    edges = [Edge(source=a.id, target=b.id, bytes_per_sample=640, gradient=False) for a, b in pairwise(blocks)]
    source = Source(method="estimated", device=device, dtype="bfloat16")
    how: dict[str, Any] = {"blocks": tuple(blocks), "edges": tuple(edges), "recipe": Recipe(name="custom")}
    return Profile(name=f"decoder-{seed}", mode="inference", source=source, tokens_per_sample=10, **how)


def with_prompts(profile: Profile) -> Profile:
    """Prefill rows of 1 request: 2 ns for each token and block, and an attention core of its square."""

    def rows(block: Block) -> tuple[PhaseRow, ...]:
        square = 1 if block.cache_bytes_per_token else 0
        return tuple(
            PhaseRow(
                phase="prefill",
                microbatch_size=1,
                context_tokens=tokens,
                forward_ns=500 + 2 * tokens + square * tokens * tokens // 100,
                core_ns=square * tokens * tokens // 100,
                workspace_bytes=tokens,
            )
            for tokens in (10, 100, 300, 400)
        )

    blocks = (block.model_copy(update={"phases": (*block.phases, *rows(block))}) for block in profile.blocks)
    return profile.model_copy(update={"blocks": tuple(blocks)})
