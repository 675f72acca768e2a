"""Models with several plans each, under which one training goes on or is repeated; all train in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from pipeplan.files import PlacedStage, Plan
from pipeplan.runtime.models.load import load_model
from runtime_support.known import load_once
from runtime_support.plans import PLACEMENTS, model_plan, placed_plan, split_stage

OPERATORS = "gpt2-tiny-operators"
TINY, ALL, EXPERTS = "gpt2-tiny", (0, 1, 2, 3), "gpt2-experts-tiny"
CONFIGURATION = (
    "Qwen2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, "
    "intermediate_size=32, vocab_size=31, max_position_embeddings=8, tie_word_embeddings=True)"
)
MIXTURE = (
    "MixtralConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, "
    "intermediate_size=16, num_local_experts=4, vocab_size=32, max_position_embeddings=8)"
)
CHAIN, UNTIED, BRANCHES, WORDED = (
    f"runtime_support.models:{name}" for name in ("chain", "untied_chain", "branches", "worded")
)


def chain_of(*groups: tuple[int, ...]) -> Plan:
    """The chain's stages on these devices, each of a group a replica; mini-batches of 12 samples."""
    cuts = [("b0", "b1"), ("b2",), ("b3",), ("b4", "end")]
    stages = [
        PlacedStage(blocks=blocks, devices=devices, replicas=len(devices), microbatch_size=4)
        for blocks, devices in zip(cuts, groups, strict=True)
    ]
    return placed_plan(load_model(CHAIN), stages, num_microbatches=3, microbatch_size=4)


def untied_on(zero: int, replicas: int, group: int | None = None) -> Plan:
    """A chain in two stages, or on all devices in one, whose replicas divide what they keep."""
    groups = ("b0 b1", "b2 b3 b4 end") if replicas == 2 else ("b0 b1 b2 b3 b4 end",)
    stages = [
        split_stage(
            blocks, ALL[replicas * number : replicas * (number + 1)], 1, microbatch_size=4, zero=zero, zero_group=group
        )
        for number, blocks in enumerate(groups)
    ]
    return placed_plan(load_model(UNTIED), stages, num_microbatches=3, microbatch_size=4)


def worded_on(*groups: tuple[str, tuple[int, ...], int], zero: int = 0) -> Plan:
    """Blocks of the model of words, on devices of which so many split each block; replicas divide what they keep."""
    stages = [split_stage(*group, microbatch_size=2, zero=zero) for group in groups]
    return placed_plan(load_model(WORDED), stages, num_microbatches=4, microbatch_size=2)


def configuration_on(*groups: tuple[int, ...], shards: int, context: int = 1, zero: int = 0) -> Plan:
    """Stages of a Hugging Face model on these devices, of which so many split each block, or share sequences."""
    model = load_once(CONFIGURATION)
    ids = [block.id for block in model.blocks]
    bounds = [round(number * len(ids) / len(groups)) for number in range(len(groups) + 1)]
    stages = [
        split_stage(" ".join(ids[begin:end]), devices, shards, context=context, microbatch_size=2, zero=zero)
        for (begin, end), devices in zip(itertools.pairwise(bounds), groups, strict=True)
    ]
    return placed_plan(model, stages, num_microbatches=4, microbatch_size=2)


def experts_on(
    *groups: tuple[int, ...],
    expert: int,
    shards: int = 1,
    context: int = 1,
    zero: int = 0,
    of: str = EXPERTS,
) -> Plan:
    """A model with experts, which so many devices share in each stage, and in ``context`` parts each sequence."""
    model = load_once(of)
    ids = [block.id for block in model.blocks]
    bounds = [round(number * len(ids) / len(groups)) for number in range(len(groups) + 1)]
    stages = [
        split_stage(
            " ".join(ids[begin:end]), devices, shards, context=context, microbatch_size=4, zero=zero, expert=expert
        )
        for (begin, end), devices in zip(itertools.pairwise(bounds), groups, strict=True)
    ]
    return placed_plan(model, stages, num_microbatches=2, microbatch_size=4)


def operators_as(*turns: str) -> Plan:
    """A model by operator on four devices: its blocks split as their kinds can, in turn."""
    model = load_model(OPERATORS)
    ways = {"product": turns, "embedding": ("hidden2-shards2", "samples2-copies2"), "norm": ("features4", "places4")}
    found = [ways.get(block.operator, ("samples4", "copies4")) for block in model.blocks]
    stage = PlacedStage(
        blocks=tuple(block.id for block in model.blocks),
        devices=(1, 3, 0, 2),
        shards=4,
        configurations=tuple(each[number % len(each)] for number, each in enumerate(found)),
    )
    return placed_plan(model, [stage], num_microbatches=3, microbatch_size=4)


PAIRS: dict[str, Callable[[], tuple[str, list[Plan]]]] = {
    "four devices, then two, then one": lambda: (
        TINY,
        [
            model_plan(load_model(TINY), PLACEMENTS["v-shape"], split=True),
            model_plan(load_model(TINY), [0, 1], num_microbatches=3, microbatch_size=4),
            model_plan(load_model(TINY), [0], num_microbatches=6),
        ],
    ),
    "replicas come and go": lambda: (CHAIN, [chain_of((0,), (1,), (2,), (3,)), chain_of((0, 1), (2,), (3, 0), (1,))]),
    "and the other way round": lambda: (CHAIN, [chain_of((3, 2, 1, 0), (2, 1), (3,), (1, 0)), chain_of(*[(1,)] * 4)]),
    "split over four, over two twice, then whole": lambda: (
        WORDED,
        [
            worded_on(("words", ALL, 4), ("shift b0", (0,), 1), ("b1 b2", (1, 3), 2), ("b3 head", (3,), 1)),
            worded_on(("shift words b0", (0, 1, 2, 3), 2), ("b1 b2 b3 head", (3, 2, 1, 0), 2)),
            worded_on(("shift words b0 b1", (1,), 1), ("b2 b3 head", (0,), 1)),
        ],
    ),
    "whole, then split over three": lambda: (
        WORDED,
        [
            worded_on(("shift words b0 b1", (1,), 1), ("b2 b3 head", (0,), 1)),
            worded_on(("shift words b0", (0,), 1), ("b1", (2, 1), 2), ("b2 b3", (3,), 1), ("head", (3, 1, 0), 3)),
        ],
    ),
    "tiles, then other tiles, then stages": lambda: (
        OPERATORS,
        [
            operators_as("rows2-columns2", "columns4", "rows4"),
            operators_as("columns2-places2", "copies2-rows2", "samples4"),
            model_plan(load_model(OPERATORS), [0, 1], num_microbatches=3, microbatch_size=4),
        ],
    ),
    "parameters divided, then optimizers, then whole": lambda: (
        UNTIED,
        [untied_on(3, 2), untied_on(1, 4, group=2), untied_on(0, 1)],
    ),
    "whole, then gradients divided, then parameters": lambda: (
        UNTIED,
        [untied_on(0, 1), untied_on(2, 4), untied_on(3, 2)],
    ),
    "shares divided, then stages, then whole": lambda: (
        WORDED,
        [
            worded_on(("shift words b0 b1 b2 b3 head", (2, 1, 0, 3), 2), zero=1),
            worded_on(("shift words b0 b1", (1, 2), 1), ("b2 b3 head", (0, 3), 1), zero=1),
            worded_on(("shift words b0 b1 b2 b3 head", (1,), 1)),
        ],
    ),
    "whole, then shares in stages, then shares with optimizers divided, then with all": lambda: (
        WORDED,
        [
            worded_on(("shift words b0 b1 b2 b3 head", (1,), 1)),
            worded_on(("shift words b0", (1, 3), 2), ("b1 b2 b3 head", (0, 2), 2)),
            worded_on(("shift words b0 b1 b2 b3 head", (2, 1, 0, 3), 2), zero=1),
            worded_on(("shift words b0 b1 b2 b3 head", (0, 1, 2, 3), 2), zero=3),
        ],
    ),
    "a configuration's shares in stages, then divided, then sequences shared, then whole": lambda: (
        CONFIGURATION,
        [
            configuration_on((1, 0), (3, 2), shards=2),
            configuration_on((0, 2, 3, 1), shards=2, zero=1),
            configuration_on((2, 0, 1, 3), shards=1, context=2, zero=1),
            configuration_on((1,), (0,), shards=1),
        ],
    ),
    "experts over four, then sequences too, then whole": lambda: (
        EXPERTS,
        [
            experts_on((2, 0, 1, 3), expert=4, shards=2),
            experts_on((0, 2, 3, 1), expert=2, context=2, zero=1),
            experts_on((1,), (0,), expert=1),
        ],
    ),
    "a configuration's experts and sequences over two, then whole": lambda: (
        MIXTURE,
        [experts_on((2, 0, 1, 3), expert=2, context=2, of=MIXTURE), experts_on((1,), expert=1, of=MIXTURE)],
    ),
    "whole, then experts over two": lambda: (
        EXPERTS,
        [experts_on((1,), expert=1), experts_on((1, 0), (3, 2), expert=2)],
    ),
    "branches": lambda: (
        BRANCHES,
        [model_plan(load_model(BRANCHES), [0, 1, 2, 3]), model_plan(load_model(BRANCHES), [2, 0], split=True)],
    ),
}


@functools.cache
def pair(name: str) -> tuple[str, list[Plan]]:
    """A model, and the plans under which one training goes on; made when they are asked for, not when collected."""
    return PAIRS[name]()
