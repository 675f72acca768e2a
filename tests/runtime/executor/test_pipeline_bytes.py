"""Ranks of several stages give each other as many bytes as their plan says: GPT-2, and transformers' decoders."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest

import pipeplan
from pipeplan.checker import check
from pipeplan.files import PlacedStage, Plan, Profile
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from runtime_support.exchanged_bytes import BETWEEN_STAGES, GivenBytes, planned_between, planned_of
from runtime_support.hugging_face import SEED, SEQUENCE, text
from runtime_support.plans import placed_plan
from runtime_support.threads import run_in_threads
from support.marks import slow_but

MICROBATCH, NUM_MICROBATCHES = 4, 3


@functools.cache
def model_of(name: str) -> Model:
    return load_model(name) if name.endswith("tiny") else load_model(text(name), sequence=SEQUENCE, seed=SEED)


def profile_of(name: str, shards: int, context: int) -> Profile:
    """Estimated of the same model, in float32."""
    how: dict[str, Any] = {"device": "h100-80gb", "dtype": "float32", "microbatch": (1, 2, 4)}
    how |= {"shards": (1, shards), "context": context}
    if name.endswith("tiny"):
        return pipeplan.estimate(name, **how)
    return pipeplan.estimate(text(name), sequence=SEQUENCE, **how)


def two_stages(name: str, profile: Profile, *, replicas: int = 1, **sizes: Any) -> Plan:
    """Each stage's devices are neighbours, in the second in another order than that of their numbers."""
    ids = [block.id for block in model_of(name).blocks]
    cut, count = len(ids) // 2, replicas * sizes.get("shards", 1) * sizes.get("context", 1)
    second = tuple(range(2 * count - 1, count - 1, -1))
    stages = [
        PlacedStage(blocks=tuple(own), devices=on, replicas=replicas, microbatch_size=MICROBATCH, **sizes)
        for own, on in ((ids[:cut], tuple(range(count))), (ids[cut:], second))
    ]
    run = {"num_microbatches": NUM_MICROBATCHES, "microbatch_size": MICROBATCH}
    return placed_plan(model_of(name), stages, **run, profile=profile)


SHARDS, CONTEXT, RING = {"shards": 2}, {"context": 2}, {"context": 2, "context_exchange": "ring"}
IN_TWO = {"replicas": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2-tiny", SHARDS),
    ("gpt2-tiny", SHARDS | IN_TWO),
    ("gpt2-tiny", SHARDS | CONTEXT),
    ("llama", SHARDS),
    ("llama", SHARDS | IN_TWO),
    ("llama", CONTEXT),
    ("llama", RING),
    ("llama", SHARDS | CONTEXT),
    ("llama", SHARDS | RING),
    ("mistral", CONTEXT),
    ("mistral", RING),
    ("mixtral", SHARDS),
    ("mixtral", CONTEXT),
    ("mixtral", RING),
]
MAIN = (("gpt2-tiny", SHARDS | IN_TWO), ("llama", SHARDS), ("llama", CONTEXT), ("llama", RING))


@slow_but("name, sizes", CASES, lambda _: False, lambda case: case not in MAIN, ids=str)
def test_bytes_that_ranks_of_stages_move_are_the_plans(
    name: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages between each two ranks as its hops have them, all else of each block, phase and kind of collective.

    Shards of both stages divide sequences, so that messages are slices. The plan is for float32, and runs in float64.
    """
    shards, context = sizes.get("shards", 1), sizes.get("context", 1)
    profile = profile_of(name, shards, context)
    plan = two_stages(name, profile, **sizes)
    check(plan, profile).require("plan")
    crossing = [each for each in plan.dependencies if each.source_stage != each.target_stage]
    assert {each.slices for each in crossing} == {shards}
    given = GivenBytes(monkeypatch, plan.stages)
    run_in_threads(plan, model_of(name), 3)
    assert given.between == planned_between(plan)
    assert len(given.between) == 2 * shards * context * sizes.get("replicas", 1), "each has one across"
    for stage in plan.stages:
        planned = Counter({each: size * NUM_MICROBATCHES for each, size in planned_of(profile, stage).items()})
        assert planned
        for rank in stage.devices:
            moved = given.of_rank[rank]
            sent = moved.pop(BETWEEN_STAGES)
            assert sent == sum(size for (source, _), size in given.between.items() if source == rank)
            assert moved == planned
