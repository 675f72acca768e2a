"""Cuts for servers by what decode steps take and keep: exact, in memory, and said."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest

import pipeplan as face
from pipeplan import Block, Edge, InfeasibleError, Profile, UsageError
from pipeplan.files import CostRow, PhaseRow, Recipe
from pipeplan.planning import serving
from pipeplan.planning.build_plan import CacheCost, TargetCost
from pipeplan.planning.request import Request
from pipeplan.planning.serving import Served
from pipeplan.search_constants import MOST_ENTRIES
from pipeplan.time_limit import Limit, checkpoint

BATCHES, CONTEXTS = (1, 8), (100, 400)


def decoder(seed: int, layers: int, shards: Sequence[int] = (1,)) -> Profile:
    """Layers of attention and feed-forward between an embedding and a head, forwards and decode steps at random."""
    draw = random.Random(seed)

    def block(name: str, operator: str, cached: int = 0) -> Block:
        rows, phases = [], []
        for count in shards:
            forward, step, per_token = (draw.randint(10, 40) * 1000 // count for _ in range(3))
            rows.append(CostRow(microbatch_size=1, shards=count, forward_ns=forward, activation_bytes=10))
            for batch in BATCHES:
                for context in CONTEXTS:
                    core = batch * context * per_token // 1000 if cached else 0
                    phases.append(
                        PhaseRow(
                            phase="decode",
                            microbatch_size=batch,
                            context_tokens=context,
                            shards=count,
                            forward_ns=step + core,
                            core_ns=core,
                            workspace_bytes=draw.randint(1, 30),
                        )
                    )
        weights = draw.randint(100, 400)
        state = {"parameter_bytes": weights, "gradient_bytes": 0, "cache_bytes_per_token": cached, "cache_heads": 4}
        return Block(id=name, operator=operator, costs=tuple(rows), phases=tuple(phases), **state)

    blocks = [block("embedding", "embedding")]
    for number in range(layers):
        blocks += [block(f"layer{number}.attention", "attention", 4 * draw.randint(1, 3))]
        blocks += [block(f"layer{number}.ffn", "ffn")]
    blocks.append(block("head", "head"))
    edges = tuple(Edge(source=a.id, target=b.id, bytes_per_sample=1, gradient=False) for a, b in pairwise(blocks))
    made = Profile.of(f"decoder-{seed}", blocks, edges=edges, mode="inference", recipe=Recipe(name="custom"))
    return Profile.model_validate(made.model_dump(), strict=False)


def cuts(profile: Profile, ranks: int) -> Iterator[list[list[Block]]]:
    """Every way to cut whole layers into stages, embedding and head beside the layers next to them."""
    blocks = list(profile.blocks)
    layers = [blocks[start : start + 2] for start in range(1, len(blocks) - 1, 2)]
    layers[0], layers[-1] = [blocks[0], *layers[0]], [*layers[-1], blocks[-1]]
    for borders in combinations(range(1, len(layers)), ranks - 1):
        ends = [0, *borders, len(layers)]
        yield [[block for layer in layers[a:b] for block in layer] for a, b in pairwise(ends)]


def row_of(block: Block, batch: int = 8, context: int = 400) -> PhaseRow:
    return next(row for row in block.phases if (row.microbatch_size, row.context_tokens) == (batch, context))


def room(stage: Sequence[Block], memory: int) -> int:
    """Tokens of cache."""
    left = (
        memory - sum(block.parameter_bytes for block in stage) - max(row_of(block).workspace_bytes for block in stage)
    )
    return left // sum(block.cache_bytes_per_token for block in stage)


def needed(stage: Sequence[Block]) -> int:
    """Bytes of a stage with a cache for 8 requests of 400 tokens."""
    held = sum(block.parameter_bytes + 3200 * block.cache_bytes_per_token for block in stage)
    return held + max(row_of(block).workspace_bytes for block in stage)


def step_ns(stage: Sequence[Block]) -> int:
    return sum(row_of(block).forward_ns for block in stage)


def served(profile: Profile, **asked: Any) -> face.Result:
    how: dict[str, Any] = {"devices": 3, "for_": "vllm", "time_limit": 0.5, "deterministic": True, "mini_batch": 3}
    return face.search(profile, **(how | asked))


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_has_room_for_more_tokens(seed: int) -> None:
    profile, memory = decoder(seed, 7), 20_000
    found = served(profile, memory=memory)
    best = max(min(room(stage, memory) for stage in each) for each in cuts(profile, 3))
    own = [[profile.by_id[block] for block in stage.blocks] for stage in found.plan.stages]
    assert min(room(stage, memory) for stage in own) == best
    cost = found.cost
    assert isinstance(cost, CacheCost)
    assert (cost.own_tokens, cost.max_requests, cost.blocks) == (best, best // 400, best // 16)
    assert best <= cost.bound_tokens
    assert cost.free_tokens is not None
    assert best <= cost.free_tokens
    quickest = min(
        max(map(step_ns, each)) for each in cuts(profile, 3) if min(room(stage, memory) for stage in each) == best
    )
    assert cost.busiest_ns == max(map(step_ns, own)) == quickest


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_has_a_quicker_step(seed: int) -> None:
    """Of those with room for the requests of a step, where memory is limited."""
    profile = decoder(seed, 7)
    free = served(profile)
    best = min(max(map(step_ns, each)) for each in cuts(profile, 3))
    assert isinstance(free.cost, TargetCost)
    assert (free.cost.measure, free.cost.own_ns) == ("decode step", best)
    needs = sorted(max(needed(stage) for stage in each) for each in cuts(profile, 3))
    memory = needs[len(needs) // 2]
    able = [each for each in cuts(profile, 3) if min(room(stage, memory) for stage in each) >= 3200]
    assert 0 < len(able) < len(needs)
    tight = served(profile, memory=memory, objective="time")
    assert isinstance(tight.cost, TargetCost)
    assert tight.cost.own_ns == min(max(map(step_ns, each)) for each in able) >= best


@pytest.mark.parametrize("signals", [False, True])
def test_after_a_signal_blocks_are_not_cut_anywhere(signals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is known by then, and what it is compared with is left out."""
    limit, began = Limit(), list[int]()

    def cutting(request: Request) -> Served:
        began.append(1)
        checkpoint()
        return serving.served(request)

    def hear(*said: object) -> None:
        if signals:
            limit.interrupt()

    monkeypatch.setattr("pipeplan.planning.targeted.served", cutting)
    found = served(decoder(1, 5), within=limit, progress=hear)
    assert found.interrupted == signals
    assert isinstance(found.cost, TargetCost)
    assert (found.cost.free_ns is None) == signals
    assert len(began) == 2 - signals


def test_shorter_texts_and_smaller_batches_are_asked_for() -> None:
    profile = decoder(1, 5)
    one = served(profile, batch=1, context=100, objective="time").cost
    between = served(profile, batch=4, context=250, objective="time").cost
    most = served(profile, objective="time").cost
    assert isinstance(one, TargetCost)
    assert isinstance(between, TargetCost)
    assert isinstance(most, TargetCost)
    assert one.own_ns < between.own_ns < most.own_ns
    cache = served(profile, memory=20_000, context=100).cost
    assert isinstance(cache, CacheCost)
    assert cache.max_requests == cache.own_tokens // 100


def test_tokens_are_also_written_short() -> None:
    profile = decoder(1, 5)
    with pytest.raises(UsageError, match="contexts of 100, 400, not of 1024"):
        served(profile, context="1k")
    with pytest.raises(UsageError, match="context"):
        served(profile, context="1x")


def test_devices_that_split_layers_have_more_room() -> None:
    profile = decoder(2, 4, shards=(1, 2))
    apart, split = (served(profile, devices=4, tp=tp, memory=8_000).cost for tp in (1, 2))
    either = served(profile, devices=4, memory=8_000).cost
    assert isinstance(apart, CacheCost)
    assert isinstance(split, CacheCost)
    assert isinstance(either, CacheCost)
    assert either.own_tokens == max(apart.own_tokens, split.own_tokens)


def test_the_answer_says_what_decided() -> None:
    found = served(decoder(3, 5), memory=20_000)
    assert any("for vLLM the cache of every stage has room for" in note for note in found.notes)
    assert any("blocks of 16)" in note for note in found.notes)
    assert found.figures()["for"]["measure"] == "cache"
    assert any("the busiest stage's decode step takes" in note for note in served(decoder(3, 5)).notes)


def test_of_more_micro_batches_than_can_be_written_the_plan_has_some() -> None:
    """The first stage runs ahead of slower ones without end, so that nothing repeats; cuts are of any number."""
    profile = decoder(5, 30)
    long = served(profile, devices=24, mini_batch=4_000)
    short = served(profile, devices=24, mini_batch=4)
    assert 4 < long.plan.num_microbatches < 4_000
    assert sum(map(len, long.plan.programs)) <= MOST_ENTRIES
    assert [stage.blocks for stage in long.plan.stages] == [stage.blocks for stage in short.plan.stages]
    assert any(f"has {long.plan.num_microbatches} of 4,000 micro-batches" in note for note in long.notes)
    assert not any("micro-batches, as many as" in note for note in short.notes)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"objective": "cache"}, "memory is unlimited, and so is the cache; give memory or a cluster"),
    ({"context": 500}, "decode rows for contexts of 100, 400, not of 500"),
    ({"batch": 9}, "decode rows for batches of 1, 8, not of 9"),
    ({"for_": None, "objective": "time"}, "objective is for servers"),
    ({"for_": "torchtitan", "batch": 2}, "batch is for servers"),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED)
def test_what_cannot_be_asked_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        served(decoder(1, 4), **asked)


def test_a_cache_that_cannot_fit_is_said() -> None:
    with pytest.raises(
        InfeasibleError, match=r"with a cache for one request of 400 tokens; there is room for at most 0"
    ):
        served(decoder(1, 4), memory=3_000)
    with pytest.raises(
        InfeasibleError, match=r"a cache for 8 requests of 400 tokens; there is room for at most [1-7] "
    ):
        served(decoder(1, 4), memory=15_000, objective="time")


def test_profiles_without_decode_steps_are_cut_by_forwards() -> None:
    profile = face.read_profile("profiles/gpt2-124m-cpu.json")
    with pytest.raises(UsageError, match="says nothing of decode steps and their cache; profile the model with"):
        served(profile, objective="cache", memory="20GB")
    found = served(profile, objective="time", tp=1)
    assert isinstance(found.cost, TargetCost)
    assert found.cost.measure == "busiest stage"
    assert any("says nothing of what inference keeps in a cache" in note for note in found.notes)
