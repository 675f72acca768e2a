"""What each of several processes keeps for backward, counted by the tensors that autograd saves, is what its plan says.

As ``test_held_bytes.py`` has it of one process, where devices split blocks, share sequences and state, and run several
stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch

from pipeplan.checker import check
from pipeplan.files import PlacedStage, Plan, Profile
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.profiling.measure import profile_model
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Recompute
from runtime_support.plans import TRAINING, Case, Reports, reports_of
from runtime_support.sharded_plans import halves, one_stage, sharded_plan
from support.marks import asked_for, slow_but

GPT, MMT = "gpt2-tiny", "mmt-tiny"
LLAMA = (
    "LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, "
    "intermediate_size=64, vocab_size=64, max_position_embeddings=16)"
)

HOW: list[tuple[str, bool, Recompute]] = [
    ("", False, False),
    (" split", True, False),
    (" recomputed", False, True),
    (" selective", True, "selective"),
]
BY_ACTIONS: dict[int, dict[str, Any]] = {2: {"reduce_every": 2}, 3: {"reduce_every": 3, "unshard_every": 2}}


@functools.cache
def measured(model: str) -> Profile:
    """Measured here, whole and of half of a block, of whole sequences and of halves of them."""
    loaded = load_model(model)
    context = (1, 2) if loaded.in_context else (1,)
    how = {"repeats": 1, "warmup": 0, "dtype": torch.float32, "recompute": True}
    return profile_model(loaded, [1, 2], shards=(1, 2), context=context, **how)


def in_pairs(model: str, **how: int) -> list[PlacedStage]:
    """A pipeline of two stages on two devices each, which are no replicas."""
    return [stage.model_copy(update={"replicas": 1, "zero": 0, **how}) for stage in halves(model, 0)]


def on_four(model: str) -> list[PlacedStage]:
    """All blocks on four devices, of which two have each half of every sequence."""
    (stage,) = one_stage(model, 0)
    return [stage.model_copy(update={"replicas": 1, "zero": 0, "shards": 2, "context": 2})]


def in_quarters(model: str, devices: tuple[int, ...]) -> list[PlacedStage]:
    """A pipeline of whole blocks with a stage on each of the devices."""
    ids = [block.id for block in load_model(model).blocks]
    bounds = [round(number * len(ids) / len(devices)) for number in range(len(devices) + 1)]
    return [
        PlacedStage(blocks=tuple(ids[begin:end]), devices=(device,))
        for begin, end, device in zip(bounds, bounds[1:], devices, strict=False)
    ]


Asked = tuple[str, Callable[[str], list[PlacedStage]], bool, Recompute]
"""Model, its stages, whether backward is split, and what is computed again."""


def _asked() -> dict[str, Asked]:
    found: dict[str, Asked] = {
        "pipeline": (GPT, partial(in_quarters, devices=(0, 1, 2, 3)), True, False),
        "two stages a device": (GPT, partial(in_quarters, devices=(0, 1, 2, 3, 3, 2, 1, 0)), False, False),
    }
    for how, split, recompute in HOW:
        for name, model in (("", GPT), ("llama ", LLAMA)):
            found[f"{name}shards{how}"] = model, partial(in_pairs, shards=2), split, recompute
            found[f"{name}context{how}"] = model, partial(in_pairs, context=2), split, recompute
            found[f"{name}shards and context{how}"] = model, on_four, split, recompute
        found[f"branches shards{how}"] = MMT, partial(in_pairs, shards=2), split, recompute
        if recompute:  # what is divided is as it is without
            continue
        for level in (1, 2, 3):
            found[f"zero {level}{how}"] = LLAMA, partial(halves, level=level), split, recompute
            found[f"zero {level} shards{how}"] = LLAMA, partial(one_stage, level=level, shards=2), split, recompute
        for level, every in BY_ACTIONS.items():
            found[f"zero {level} by actions{how}"] = LLAMA, partial(halves, level=level, **every), split, recompute
    return found


@functools.cache
def case(name: str) -> Case:
    """A plan, and how it trains, in the number format in which its profile was measured."""
    model, stages, split, recompute = _asked()[name]
    plan = sharded_plan(model, stages(model), split=split, recompute=recompute, profile=measured(model), size=2)
    return plan, replace(TRAINING, model=model, dtype="float32", num_steps=1)


NAMES = list(_asked())
QUICK = ("shards split", "context")
SLOW = (
    "llama shards and context split",
    "zero 3 by actions split",
)
"""Each way once or twice; what is long has the others, a second of two cores each."""


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    """[case][rank] what 4 real processes report, started once for all cases."""
    asked = asked_for(request, dict.fromkeys(NAMES))
    return reports_of({name: case(name) for name in asked}, "runtime_support.held_rank:count")


def planned(plan: Plan, rank: int) -> Iterator[tuple[str, int]]:
    """What a rank holds by the plan after each of its computing actions."""
    effect = {(each.stage, each.kind): each.acquire_bytes - each.release_bytes for each in plan.operations}
    exchanges = "_", "SHARD"  # messages, and what becomes of state
    texts = [text for text in plan.programs[rank] if not any(each in text for each in exchanges)]
    yield from zip(texts, accumulate(effect[each.stage, each.kind] for each in map(Action.parse, texts)), strict=True)


@slow_but("name", NAMES, QUICK.__contains__, lambda name: name not in SLOW)
def test_ranks_keep_what_the_plan_says(name: str, reports: Reports) -> None:
    """To the byte after each action of a step, but where attention cores are computed again: within 1 %."""
    plan, _ = case(name)
    check(plan).require(name)
    near = 0.01 if "selective" in name else 0
    assert sorted(reports[name]) == [0, 1, 2, 3]
    for rank, report in reports[name].items():
        said = list(planned(plan, rank))
        assert [text for text, _ in report["held"]] == [text for text, _ in said]
        for (text, held), (_, own) in zip(report["held"], said, strict=True):
            assert held == pytest.approx(own, rel=near), f"rank {rank} after {text}"
