"""Plans whose replicas divide state, with the bytes of what training keeps."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import torch

from builders.orders import random_orders
from builders.sharded import assembled, pairs
from pipeplan.costs import build_workload
from pipeplan.files import PlacedStage, Placement, Plan, Profile, Recipe
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.profiling.build_profile import block_graph_of
from pipeplan.workload.elements import Recompute
from pipeplan.workload.engine import with_links
from pipeplan.workload.task_graph import task_graph
from runtime_support.plans import profile_of

FLOAT32 = Recipe(name="fp32")


@functools.cache
def profile_by(model: str, recipe: Recipe) -> Profile:
    """Made-up times, and the bytes of parameters by a recipe."""
    loaded = load_model(model)
    sized = block_graph_of(loaded, torch.float32)
    known = {block.spec.id: block.counts(shards=2) for block in sized.blocks}
    made = profile_of(loaded)
    blocks = tuple(block.model_copy(update=known[block.id]) for block in made.blocks)
    return made.model_copy(update={"recipe": recipe, "blocks": blocks, "tied": sized.tied})


def sharded_plan(
    model: str,
    stages: list[PlacedStage],
    recipe: Recipe = FLOAT32,
    *,
    split: bool = False,
    recompute: Recompute = False,
    profile: Profile | None = None,
    size: int = 4,
) -> Plan:
    """Actions in an order taken at random, so that replicas' blocks are gathered and reduced in between.

    Without a ``profile`` costs are made up, but for state by the ``recipe``.
    """
    profile = profile or profile_by(model, recipe)
    count = 1 + max(device for stage in stages for device in stage.devices)
    workload = build_workload(
        profile,
        Placement(strategy="by hand", num_devices=count, stages=tuple(stages)),
        num_microbatches=5,
        microbatch_size=size,
        split_backward=split,
        recompute=recompute,
        cluster=pairs(count),
    )
    graph = task_graph(workload)
    orders = with_links(graph, random_orders(graph, Random(1))[:count])
    return assembled(graph, orders, profile)


def halves(model: str, level: int, **more: Any) -> list[PlacedStage]:
    """A pipeline of two stages with two replicas each."""
    ids = [block.id for block in load_model(model).blocks]
    return [
        PlacedStage(blocks=tuple(own), devices=on, replicas=2, zero=level, **more)
        for own, on in ((ids[: len(ids) // 2], (0, 1)), (ids[len(ids) // 2 :], (2, 3)))
    ]


def one_stage(model: str, level: int, devices: tuple[int, ...] = (2, 0, 1, 3), **more: Any) -> list[PlacedStage]:
    """Replicas of all of a model."""
    blocks = tuple(block.id for block in load_model(model).blocks)
    replicas = len(devices) // more.get("shards", 1)
    return [PlacedStage(blocks=blocks, devices=devices, replicas=replicas, zero=level, **more)]
