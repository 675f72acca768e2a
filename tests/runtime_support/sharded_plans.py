"""Plans whose replicas divide state, with the bytes of what training keeps."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import torch

from builders.orders import random_orders
from builders.sharded import assembled, pairs
from pipeplan.costs import build_workload
from pipeplan.costs.zero import IN_ACTIONS, Exchanged, Exchanging, Experts, Zero
from pipeplan.files import Cluster, PlacedStage, Placement, Plan, Profile, Recipe
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.profiling.build_profile import block_graph_of
from pipeplan.simulator.recost import recosted
from pipeplan.workload.action import StateAction
from pipeplan.workload.elements import Recompute
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import REDUCE_GRAD, UNSHARD
from pipeplan.workload.task_graph import task_graph
from runtime_support.plans import profile_of

FLOAT32 = Recipe(name="fp32")


@functools.cache
def profile_by(model: str, recipe: Recipe) -> Profile:
    """Made-up times, and the bytes of parameters by a recipe."""
    return sized_profile(load_model(model), recipe)


def sized_profile(model: Model, recipe: Recipe = FLOAT32) -> Profile:
    """The same of a model that has been made."""
    sized = block_graph_of(model, torch.float32)
    known = {block.spec.id: block.counts(shards=2) for block in sized.blocks}
    made = profile_of(model)
    blocks = [block.model_copy(update=known[block.id]) for block in made.blocks]
    ways = [{"expert": size, "expert_shards": parts} for size in (2, 4) for parts in (1, 2)]
    blocks = [
        block.model_copy(
            update={"costs": (*block.costs, *(row.model_copy(update=way) for row in block.costs for way in ways))}
        )
        if block.expert_parameters
        else block
        for block in blocks
    ]
    return made.model_copy(update={"recipe": recipe, "blocks": tuple(blocks), "tied": sized.tied})


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


def planned_bytes(plan: Plan, profile: Profile) -> list[float]:
    """[device] what it sends of gradients and parameters in an iteration: as that takes longer over slower links.

    Exchanges inside of actions that have nothing beside them, of a stage's first block, stand once more after these.
    """
    count = len(plan.devices)
    found = [0.0] * count
    for rate, sign in ((10**3, 1e-6), (10**15, -1e-6)):  # a byte takes 1e6 ns, or none
        links = Cluster.of("links", count, levels=[("node", count, 0, rate)])
        workload = recosted(plan, profile, links)
        for number, stage in enumerate(workload.stages):
            spent = stage.sync_ns + stage.gather_ns
            if max(stage.zero, Experts.of(stage).zero.level) >= IN_ACTIONS and not stage.block_groups:
                first = profile.by_id[stage.blocks[0]], profile.recipe, Zero.of(stage), stage.shards, Experts.of(stage)
                spent -= sum(Exchanging.of(stage, links).times(Exchanged.of(*first)))
                own = [each.duration_ns for each in workload.operations if each.stage == number]
                spent += sum(own) * plan.num_microbatches
            for device in stage.devices:
                for each in filter(None, map(StateAction.read, plan.programs[device])):
                    if each.stage == number:
                        group = stage.block_groups[each.group or 0]
                        spent_in = {UNSHARD: group.unshard_ns, REDUCE_GRAD: group.reduce_ns}
                        found[device] += sign * spent_in.get(each.kind, 0)
                found[device] += sign * spent
        for tied in workload.tied:
            for device in tied.all_devices:
                found[device] += sign * tied.sync_ns
    return found


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
