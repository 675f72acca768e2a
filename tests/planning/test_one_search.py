"""Searches find what frontiers of plans find: no point is shorter than the plan of a search."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pipeplan.checker import check
from pipeplan.errors import InfeasibleError
from pipeplan.examples import model
from pipeplan.files import Block, Profile
from pipeplan.planning.plan_frontier import plan_frontier
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan, without

NO_END = 3600.0  # seconds: these are tried to the end, so that no machine is too slow


def drawn(rng: random.Random, layers: int) -> Profile:
    """The first blocks of GPT-2 and its head, each block quicker or slower than it is."""
    profile = model("gpt2-124m", shards=(1, 2))
    *ids, last = profile.topological_order()
    kept, (end,) = ids[:layers], (edge for edge in profile.edges if edge.target == last)

    def changed(block: Block) -> Block:
        factor = rng.choice([0.5, 1, 2, 3])
        costs = tuple(
            row.model_copy(
                update={
                    "forward_ns": int(row.forward_ns * factor * rng.uniform(0.9, 1.1)),
                    "backward_ns": int(row.backward_ns * factor * rng.uniform(0.9, 1.1)),
                    "input_grad_ns": None,
                    "weight_grad_ns": None,
                }
            )
            for row in block.costs
        )
        return block.model_copy(update={"costs": costs})

    return profile.model_copy(
        update={
            "blocks": tuple(changed(block) for block in profile.blocks if block.id in {*kept, last}),
            "edges": (
                *(edge for edge in profile.edges if {edge.source, edge.target} <= set(kept)),
                end.model_copy(update={"source": kept[-1]}),
            ),
        }
    )


def compare(seed: int, layers: int) -> None:
    """The plan of a search is as short as the shortest point that a frontier finds to its end, and valid."""
    rng = random.Random(seed)
    profile = drawn(rng, rng.randint(2, layers))
    memory = rng.choice([None, 10**9, 2 * 10**9])
    request = Request(profile, 2, Batch(4, 1), sizes=(1, 2), memory_bytes=memory, device_counts=(2,), time_limit=NO_END)
    try:
        points = plan_frontier(request).points
    except InfeasibleError:
        return
    found = search_plan(replace(request, time_limit=1.0, deterministic=True))
    best = min(points, key=lambda point: point.iteration_ns)
    assert found.plan.predicted.iteration_ns <= best.iteration_ns, best.plan.provenance.options["stages"]
    assert found.lower_bound_ns <= best.iteration_ns
    assert check(found.plan, profile).valid


@pytest.mark.parametrize("seed", range(2))
def test_no_point_of_a_frontier_is_shorter(seed: int) -> None:
    compare(seed, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_no_point_of_larger_frontiers_is_shorter(seed: int) -> None:
    compare(seed, 5)


def test_one_stage_has_each_block_split_in_a_way_of_its_own() -> None:
    """Where ways that are alike for all blocks of a stage take longer."""
    profile = drawn(random.Random(0), 3)
    request = Request(profile, 2, Batch(4, 1), sizes=(1, 2), time_limit=1.0, deterministic=True)
    others = {"stage ways", "split blocks", "one stage"}
    own = search_plan(request, steps=without(others - {"one stage"})).plan
    assert own.provenance.options["stages"] == "one stage, split"
    assert own.stages[0].configurations
    assert own.predicted.iteration_ns < search_plan(request, steps=without(others)).plan.predicted.iteration_ns
