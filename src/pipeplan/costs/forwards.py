"""What a stage of forwards alone holds: what it gives to others, and what lives inside while it runs.

A block's row says in ``activation_bytes`` what the block gives. Of a stage's blocks, what others of it take is there
until the last of these has run; what leaves the stage is held until the last stage that takes it has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeplan.costs.messages import distinct, edge_bytes
from pipeplan.costs.recipes import INFERENCE_RECIPES, computing_dtype, state_recipe
from pipeplan.files import Block, CostRow, Profile, Recipe
from pipeplan.files.profile import INFERENCE
from pipeplan.files.recipe import CUSTOM
from pipeplan.workload.kinds import PARAMETERS, STATE_KINDS


class HeldByForward(NamedTuple):
    """Bytes on each device: what a forward gives, and the most that it has beside that while it runs."""

    given: int
    inner: int


def held_by_forward(profile: Profile, blocks: Sequence[str], rows: Sequence[CostRow]) -> HeldByForward:
    """Of blocks that run in this order with these costs; what nobody takes is given, too: the model's results."""
    return held_by_units(profile, [(block,) for block in blocks], rows)


def held_by_units(profile: Profile, units: Sequence[Sequence[str]], rows: Sequence[CostRow]) -> HeldByForward:
    """The same of groups of blocks that each run at once, with a row each."""
    place_of = {block: place for place, unit in enumerate(units) for block in unit}
    inner, given = [row.workspace_bytes for row in rows], 0
    for place, (unit, row) in enumerate(zip(units, rows, strict=True)):
        leaving = (edge for block in unit for edge in profile.edges_from.get(block, ()) if edge.target not in unit)
        takers = [place_of.get(edge.target) for edge in leaving]
        inside = [each for each in takers if each is not None]
        if len(inside) < len(takers) or not takers:
            given += row.activation_bytes
            continue
        for other in range(place, max(inside) + 1):
            inner[other] += row.activation_bytes
    return HeldByForward(given, max(inner))


def as_inference(profile: Profile) -> Profile:
    """What of a profile of training runs forwards alone, in the number format that it computes in.

    A block gives its outputs, each tensor once. What training would keep of it is taken for the most that is there
    while it runs, though some of that is freed sooner. Bytes that blocks state of gradients and optimizers are left
    out.
    """
    dtype = computing_dtype(profile.recipe)
    recipe = next((name for name in INFERENCE_RECIPES if state_recipe(name).dtype == dtype), CUSTOM)
    nothing: dict[str, Any] = {kind.key: 0 for kind in STATE_KINDS if kind is not PARAMETERS and recipe == CUSTOM}

    def row(block: Block, of: CostRow) -> CostRow:
        made = distinct(profile.edges_from.get(block.id, ()))
        return CostRow(
            microbatch_size=of.microbatch_size,
            shards=of.shards,
            forward_ns=of.forward_ns,
            activation_bytes=sum(edge_bytes(edge, of.microbatch_size) for edge in made),
            workspace_bytes=of.activation_bytes,
        )

    def rows(block: Block) -> tuple[CostRow, ...]:
        plain = (each for each in block.costs if not each.recompute and each.context == each.expert == 1)
        return tuple({(each.microbatch_size, each.shards): row(block, each) for each in plain}.values())

    blocks = (block.model_copy(update={**nothing, "costs": rows(block)}) for block in profile.blocks)
    alone: dict[str, Any] = {"gradient": False, "saved": None, "saved_by_source": "no"}
    edges = (edge.model_copy(update=alone) for edge in profile.edges)
    changed: dict[str, Any] = {"mode": INFERENCE, "recipe": Recipe(name=recipe), "step_bytes_per_s": None}
    changed |= {"blocks": tuple(blocks), "edges": tuple(edges)}
    changed["tied"] = tuple(each.model_copy(update=nothing) for each in profile.tied)
    return profile.model_copy(update=changed).without_kernels()
