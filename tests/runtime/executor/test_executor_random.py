"""Random models under random plans give the losses and gradients of an unsplit run.

Stages have micro-batch sizes, replicas, shards, routes and parts of their own, on devices that may be shared, and may
wait inside for what only later blocks take; some outputs are one for all samples. All ranks run in
this process; messages match first in, first out.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.orders import gpipe_orders
from pipeplan.checker import check
from pipeplan.files import PlacedStage, Plan
from pipeplan.runtime.models.spec import Model
from runtime_support.models import loss_block, mix_block, shift_block, vectors
from runtime_support.plans import TRAINING, Unsplit, greedy_orders, placed_plan
from runtime_support.threads import run_in_threads
from support.marks import some_of

MINI_BATCH = 8
TOLERANCE = 1e-12
SEED = 5


def model_of(sources: list[list[int]], shifted: set[int]) -> Model:
    """Blocks that mix the outputs of others, [block] those of ``sources``, or samples; then a loss of all ends.

    Those of ``shifted`` take a row that is the same for all samples, too.
    """
    ends = sorted(set(range(len(sources))) - {source for taken in sources for source in taken})
    blocks = [shift_block("shift")] if shifted else []
    for index, taken in enumerate(sources):
        named = [f"b{source}" for source in taken]
        blocks.append(mix_block(f"b{index}", (*named, "shift") if named and index in shifted else tuple(named)))
    blocks.append(mix_block("join", (*(f"b{end}" for end in ends), *(("shift",) if shifted else ()))))
    blocks.append(loss_block("end", "join"))
    return Model("random", tuple(blocks), vectors, lambda batch: batch["targets"].numel())


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Two to five blocks, each of which takes the outputs of up to two before it."""
    count = draw(st.integers(2, 5))
    sources = [
        sorted(draw(st.sets(st.integers(0, index - 1), min_size=min(index, draw(st.integers(0, 1))), max_size=2)))
        if index
        else []
        for index in range(count)
    ]
    return model_of(sources, draw(st.sets(st.integers(0, count - 1), max_size=2)))


@st.composite
def cuts(draw: st.DrawFn, model: Model) -> list[tuple[str, ...]]:
    """The blocks in order, cut somewhere."""
    ids = [block.id for block in model.blocks]
    bounds = sorted(draw(st.sets(st.integers(1, len(ids) - 1), max_size=4)))
    return [tuple(ids[a:b]) for a, b in zip([0, *bounds], [*bounds, len(ids)], strict=True)]


@st.composite
def placed(draw: st.DrawFn, blocks: tuple[str, ...], route: int, sizes: list[int], parts: bool) -> PlacedStage:
    """A stage with one or two replicas, each of one to four devices, on some of four devices."""
    size = draw(st.sampled_from(sizes))
    replicas = draw(st.sampled_from([1, 2])) if size > 1 else 1
    shards = draw(st.sampled_from([1, 1, 2] if replicas > 1 else [1, 1, 2, 3, 4]))
    halves = parts and size % (2 * replicas) == 0
    return PlacedStage(
        blocks=blocks,
        devices=tuple(draw(st.permutations(range(4)))[: replicas * shards]),
        shards=shards,
        replicas=replicas,
        microbatch_size=size,
        recompute=draw(st.booleans()),
        route=route,
        num_parted=draw(st.integers(0, 2)) if halves else 0,
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[Model, Plan]:
    """Of one size with parts or on two routes, or of any sizes."""
    model = draw(models())
    form = draw(st.sampled_from(["parts", "sizes", "routes"]))
    sizes = [1, 2, 4] if form == "sizes" else [draw(st.sampled_from([2, 4]))]
    num_routes = 2 if form == "routes" else 1
    stages = [
        draw(placed(blocks, route, sizes, form == "parts"))
        for route in range(num_routes)
        for blocks in draw(cuts(model))
    ]
    plan = placed_plan(
        model,
        stages,
        num_microbatches=MINI_BATCH // sizes[0],
        microbatch_size=sizes[0],
        num_routes=num_routes,
        split=draw(st.booleans()),
        late=form != "parts" and draw(st.booleans()),
        orders=draw(st.sampled_from([greedy_orders, gpipe_orders])),
    )
    return model, plan


@settings(max_examples=some_of(20))
@given(plans())
def test_any_plan_gives_the_gradients_of_an_unsplit_run(case: tuple[Model, Plan]) -> None:
    model, plan = case
    check(plan).require("plan")
    outcome = run_in_threads(plan, model, SEED)
    unsplit = Unsplit(model, replace(TRAINING, seed=SEED, clip_norm=math.inf))
    assert outcome.loss == pytest.approx(unsplit.step(0, plan.mini_batch), abs=TOLERANCE)
    whole = unsplit.parameters()
    assert set(outcome.gradients) == set(whole)
    for name, gradient in outcome.gradients.items():
        expected = whole[name].grad
        assert gradient is not None
        assert expected is not None
        assert float((gradient - expected).abs().max()) < TOLERANCE, name
