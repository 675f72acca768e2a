"""Ranks of several stages give each other as many bytes as their plan says: GPT-2, and transformers' decoders."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import pytest

import pipeplan
from pipeplan.checker import check
from pipeplan.files import PlacedStage, Plan, Profile
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from runtime_support.exchanged_bytes import (
    BETWEEN_STAGES,
    LEAVING,
    GivenBytes,
    planned_between,
    planned_leaving,
    planned_of,
)
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


Sizes = dict[str, Any]
"""What a placed stage says of its devices."""


def two_stages(name: str, profile: Profile, first: Sizes, second: Sizes) -> Plan:
    """Each stage's devices are neighbours, in the second in another order than that of their numbers."""
    ids = [block.id for block in model_of(name).blocks]
    cut, (count, more) = len(ids) // 2, (num_devices(each) for each in (first, second))
    places = (ids[:cut], range(count), first), (ids[cut:], range(count + more - 1, count - 1, -1), second)
    stages = [
        PlacedStage(blocks=tuple(own), devices=tuple(on), microbatch_size=MICROBATCH, **sizes)
        for own, on, sizes in places
    ]
    run = {"num_microbatches": NUM_MICROBATCHES, "microbatch_size": MICROBATCH}
    return placed_plan(model_of(name), stages, **run, profile=profile)


def num_devices(sizes: Sizes) -> int:
    return math.prod(sizes.get(what, 1) for what in ("shards", "context", "replicas"))


SHARDS, CONTEXT, RING = {"shards": 2}, {"context": 2}, {"context": 2, "context_exchange": "ring"}
IN_TWO = {"replicas": 2}
CASES: list[tuple[str, Sizes]] = [
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
    name: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages between each two ranks as its hops have them, all else of each block, phase and kind of collective.

    Shards of both stages divide sequences, so that messages are slices. The plan is for float32, and runs in float64.
    """
    plan, given = run_of(name, sizes, sizes, monkeypatch)
    crossing = [each for each in plan.dependencies if each.source_stage != each.target_stage]
    assert {each.slices for each in crossing} == {sizes.get("shards", 1)}
    assert len(given.between) == 2 * num_devices(sizes), "each has one across"
    assert not any(LEAVING in given.of_rank[rank] for rank in range(plan.num_devices))


WHOLE: Sizes = {}
UNLIKE: list[tuple[str, Sizes, Sizes]] = [
    ("gpt2-tiny", SHARDS, WHOLE),
    ("gpt2-tiny", WHOLE, SHARDS),
    ("gpt2-tiny", SHARDS | IN_TWO, WHOLE),
    ("gpt2-tiny", WHOLE, SHARDS | IN_TWO),
    ("gpt2-tiny", IN_TWO, SHARDS),
    ("gpt2-tiny", {"replicas": 4}, SHARDS | IN_TWO),
    ("gpt2-tiny", IN_TWO, WHOLE),
    ("llama", SHARDS, IN_TWO),
    ("llama", SHARDS | CONTEXT, CONTEXT | IN_TWO),
    ("llama", SHARDS | CONTEXT, CONTEXT),
]
FIRST = UNLIKE[2], UNLIKE[4]


@slow_but("name, first, second", UNLIKE, lambda _: False, lambda case: case not in FIRST, ids=str)
def test_bytes_that_ranks_of_unlike_stages_move_are_the_plans(
    name: str, first: Sizes, second: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards gather what leaves them for a stage that does not divide sequences, as the plan has it priced."""
    plan, given = run_of(name, first, second, monkeypatch)
    gathering = [stage for stage in plan.stages if stage.shards > 1]
    assert {rank for rank, moved in given.of_rank.items() if LEAVING in moved} == {
        rank for stage in gathering for rank in stage.devices
    }


def run_of(name: str, first: Sizes, second: Sizes, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, GivenBytes]:
    """What ranks gave each other in one mini-batch of two such stages, which is what the plan says."""
    shards, context = (max(each.get(what, 1) for each in (first, second)) for what in ("shards", "context"))
    profile = profile_of(name, shards, context)
    plan = two_stages(name, profile, first, second)
    check(plan, profile).require("plan")
    given = GivenBytes(monkeypatch, plan.stages)
    run_in_threads(plan, model_of(name), 3)
    assert given.between == planned_between(plan)
    for number, stage in enumerate(plan.stages):
        own = planned_of(profile, stage) + planned_leaving(plan, profile, number)
        planned = Counter({each: size * NUM_MICROBATCHES for each, size in own.items()})
        assert bool(planned) == (stage.shards * stage.context > 1)
        for rank in stage.devices:
            moved = given.of_rank[rank]
            sent = moved.pop(BETWEEN_STAGES, 0)
            assert sent == sum(size for (source, _), size in given.between.items() if source == rank)
            assert moved == planned
    return plan, given
