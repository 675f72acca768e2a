"""The workload of a decoding loop: groups of requests take their steps in turn, and each token comes back as input.

Micro-batch m is a step of group ``m % groups``. Along the stages go the hidden states of one token of each of its
requests; from the last stage the tokens go back to the first one, where they let the same group's next step begin. What
a stage's step takes is given, as it depends on how its devices share the cache; all else is the profile's.

A prompt that joins may be taken in beside the steps, whole or in chunks (Sarathi-Serve's chunked prefill): then every
stage runs an instruction ``PREFILL`` beside each of its steps, on a stage without blocks that stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.costs.blocks import StageCost
from pipeplan.costs.decoding import bytes_between, phase_costs
from pipeplan.costs.messages import beside, returned
from pipeplan.costs.stages import build_workload
from pipeplan.costs.trees import with_shared_uplinks
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, Placement, Profile
from pipeplan.files.plan import Decode
from pipeplan.workload.elements import Dependency, Operation, Stage
from pipeplan.workload.kinds import PREFILL
from pipeplan.workload.workload import Workload

TOKEN_BYTES = 8
"""Of a token's number, as it goes back to the first stage."""


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """What a chunk of a prompt takes on a stage: ns, and on each device bytes that it gives on and works in."""

    chunk_ns: int
    given_bytes: int = 0
    workspace_bytes: int = 0


def chunk_costs(
    profile: Profile, stages: Sequence[Sequence[tuple[str, int]]], prompt_tokens: int, chunk_tokens: int
) -> list[ChunkCost]:
    """What the last chunk of a prompt takes on each of the ``stages``: its blocks, each with how many devices split it.

    No chunk takes more: it reads the weights as a prompt of its own length does, and its tokens attend to all before
    them, which is the attention of the prompt without that of what came before. The whole prompt is one chunk of its
    own length.

    Raises:
        UsageError: the profile has no prefill rows of these lengths, or the chunk is longer than the prompt.
    """
    if not 1 <= chunk_tokens <= prompt_tokens:
        raise UsageError(f"--prefill {chunk_tokens} is not of prompts of {prompt_tokens} tokens; choose 1 to that many")
    before, found, blocks = prompt_tokens - chunk_tokens, [], profile.by_id
    leaving = {edge.source: 0 for edge in profile.edges}
    for edge in profile.edges:
        leaving[edge.source] = max(leaving[edge.source], bytes_between(profile, edge, chunk_tokens))
    for stage in stages:
        times, work = 0, 0
        for block, shards in ((blocks[name], shards) for name, shards in stage):
            alone, whole = (
                phase_costs(block, "prefill", 1, tokens, shards=shards) for tokens in (chunk_tokens, prompt_tokens)
            )
            times += alone.forward_ns
            work = max(work, whole.workspace_bytes)
            if before and whole.core_ns:
                # of what comes before at least: attention grows with the square of the tokens, or less
                less = whole.core_ns * before**2 // prompt_tokens**2
                times += max(0, whole.core_ns - less - alone.core_ns)
        found.append(ChunkCost(times, leaving.get(stage[-1][0], 0), work))
    return found


def decode_workload(
    profile: Profile,
    placement: Placement,
    given: Sequence[StageCost],
    cache_bytes: Sequence[int],
    decode: Decode,
    *,
    steps: int,
    prefill: Sequence[ChunkCost] = (),
    cluster: Cluster | None = None,
    memory_bytes: Sequence[int | None] | None = None,
    reserve_bytes: Sequence[int] | None = None,
) -> Workload:
    """So many steps of every group of requests.

    ``given`` [stage] is a step of the largest group, ``cache_bytes`` [stage] what each of its devices has of all
    requests' keys and values at the last step, ``prefill`` [stage] what goes with every step where prompts join.

    Raises:
        UsageError: the profile is not of inference or has no tokens per sample, or its stages have not one first and
            one last.
    """
    if not profile.is_inference:
        raise UsageError(f"{profile.where} is of training; profile the model with --inference --context 1k,32k")
    edges = tuple(
        each.model_copy(update={"bytes_per_sample": bytes_between(profile, each, 1)}) for each in profile.edges
    )
    workload = build_workload(
        profile.model_copy(update={"edges": edges}),
        placement,
        num_microbatches=steps * decode.groups,
        microbatch_size=max(decode.sizes),
        cluster=cluster,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        given=dict(enumerate(given)),
    )
    stages = [stage.with_cache(size) for stage, size in zip(workload.stages, cache_bytes, strict=True)]
    first, last = _ends(workload)
    hops = returned(stages[last], stages[first], TOKEN_BYTES, cluster)
    back = Dependency(source=f"{last}F", target=f"{first}F", later=decode.groups, hops=hops)
    workload = replace(workload, stages=tuple(stages), dependencies=(*workload.dependencies, back))
    return _with_prefill(workload, decode, prefill, (first, last), cluster) if prefill else workload


def _ends(workload: Workload) -> tuple[int, int]:
    """The stage that takes tokens, and the one that makes them. Raises UsageError."""
    stages = set(range(len(workload.stages)))
    first = stages - {target for _, target in workload.stage_edges}
    last = stages - {source for source, _ in workload.stage_edges}
    if len(first) != 1 or len(last) != 1:
        raise UsageError(
            f"a decoding loop goes from one stage that makes a token to one that takes it; {len(first)} of these "
            f"stages take nothing of others, and {len(last)} give nothing to others"
        )
    return first.pop(), last.pop()


def _with_prefill(
    workload: Workload,
    decode: Decode,
    prefill: Sequence[ChunkCost],
    ends: tuple[int, int],
    cluster: Cluster | None,
) -> Workload:
    """The same with a chunk of a prompt beside every step; its last stage gives the first token to the next one."""
    count, tokens = len(workload.stages), decode.prefill_tokens
    empty = [
        Stage(blocks=(), devices=each.devices, shards=each.shards, microbatch_size=each.microbatch_size)
        for each in workload.stages
    ]
    chunks = tuple(
        Operation(
            kind=PREFILL,
            stage=count + number,
            duration_ns=max(1, cost.chunk_ns),
            acquire_bytes=cost.given_bytes,
            workspace_bytes=cost.workspace_bytes,
            attributes={"stage": number, "tokens": tokens},
        )
        for number, cost in enumerate(prefill)
    )
    chunk_messages = [
        Dependency(
            source=f"{count + each.source_stage}{PREFILL}",
            target=f"{count + each.target_stage}{PREFILL}",
            hops=beside(each.hops, workload.microbatch_size, tokens, cluster),
        )
        for each in workload.dependencies
        if not each.later
    ]
    found = [*with_shared_uplinks(chunk_messages, cluster)]
    first, last = ends
    hops = returned(empty[last], workload.stages[first], TOKEN_BYTES, cluster)
    found.append(Dependency(source=f"{count + last}{PREFILL}", target=f"{first}F", later=decode.groups, hops=hops))
    return replace(
        workload,
        stages=(*workload.stages, *empty),
        operations=(*workload.operations, *chunks),
        dependencies=(*workload.dependencies, *found),
    )
