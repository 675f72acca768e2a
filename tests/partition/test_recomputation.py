"""The quickest choice of what a stage computes again, and chains cut by it, against every choice there is."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, product

import pytest

from pipeplan.checker import check
from pipeplan.costs import build_workload, stage_costs
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Block, CostRow, PlacedStage, Placement, Profile
from pipeplan.partition.pipedream import pipedream
from pipeplan.partition.problem import PartitionProblem, Pricing
from pipeplan.partition.recomputation import ChoosingBlocks, recomputing
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.simulator.recost import recosted
from pipeplan.workload.elements import Again, again_of
from support.marks import one_in

LEVELS: tuple[Again, ...] = (False, "selective", True)


def drawn(draw: random.Random, num_kinds: int, num_blocks: int) -> Profile:
    """A chain of blocks of some kinds, with attention cores in some of them."""
    rows = []
    for _ in range(num_kinds):
        held = draw.randrange(20, 100)
        core = {"selective_ns": draw.randrange(1, 30), "selective_activation_bytes": draw.randrange(5, held)}
        rows.append(
            CostRow(
                microbatch_size=1,
                forward_ns=draw.randrange(5, 40),
                backward_ns=draw.randrange(10, 80),
                activation_bytes=held,
                workspace_bytes=draw.randrange(60),
                **(core if draw.random() < 0.7 else {}),
            )
        )
    order = [draw.randrange(num_kinds) for _ in range(num_blocks)]
    blocks = [
        Block(id=f"b{n}", operator="layer", parameter_bytes=5 * kind, costs=(rows[kind],))
        for n, kind in enumerate(order)
    ]
    return Profile.of("drawn", blocks, bytes_per_sample=4)


def least_by_trying(profile: Profile, blocks: list[str], in_flight: int, limit: int) -> int | None:
    """Forward and backward of the quickest choice that fits, of all."""
    fitting = []
    for again in product(LEVELS, repeat=len(blocks)):
        cost = stage_costs(profile, blocks, 1, recompute=again)
        if cost.memory_bytes(in_flight) <= limit:
            fitting.append(cost.compute_ns)
    return min(fitting, default=None)


@one_in(2, "seed", range(6))
def test_a_stages_choice_is_the_quickest_that_fits(seed: int) -> None:
    draw = random.Random(seed)
    profile = drawn(draw, 1 + seed % 4, 5)
    blocks = [block.id for block in profile.blocks]
    choosing = ChoosingBlocks.of(
        [[(again, stage_costs(profile, [id_], 1, recompute=again)) for again in LEVELS] for id_ in blocks]
    )
    static = stage_costs(profile, blocks, 1).static_bytes
    most = stage_costs(profile, blocks, 1).memory_bytes(3)
    for limit in range(static, most + 20, max(1, (most - static) // 8)):
        found = choosing.chosen(0, len(blocks), static, 3, limit)
        least = least_by_trying(profile, blocks, 3, limit)
        assert (found is None) == (least is None)
        if found is not None:
            cost = stage_costs(profile, blocks, 1, recompute=found)
            assert cost.memory_bytes(3) <= limit
            assert cost.compute_ns == least


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_is_cut_with_what_its_stages_compute_again(seed: int) -> None:
    draw = random.Random(seed)
    profile = drawn(draw, 2, 5)
    blocks, devices, count = [block.id for block in profile.blocks], 3, 4
    whole = stage_costs(profile, blocks, 1).memory_bytes(1)
    limit = draw.randrange(whole // 3, whole)
    problem = PartitionProblem.of(profile, devices, count, microbatch_sizes=[1], memory_bytes=limit, recompute=LEVELS)
    best = None
    for stages in range(1, devices + 1):
        for cuts in combinations(range(1, len(blocks)), stages - 1):
            ranges = list(zip((0, *cuts), (*cuts, len(blocks)), strict=True))
            times = [
                least_by_trying(profile, blocks[begin:end], min(count, stages - place), limit)
                for place, (begin, end) in enumerate(ranges)
            ]
            if None not in times:
                slowest = count * max(time for time in times if time is not None)
                best = slowest if best is None else min(best, slowest)
    if best is None:
        with pytest.raises(InfeasibleError):
            next(recomputing(problem))
        return
    found = next(recomputing(problem))
    assert found.value_ns == best
    stages_found = found.placement.stages
    for place, stage in enumerate(stages_found):
        cost = stage_costs(profile, stage.blocks, 1, recompute=stage.recompute or False)
        assert cost.memory_bytes(min(count, len(stages_found) - place)) <= limit
        assert count * cost.compute_ns <= best
    assert best <= next(pipedream(problem)).value_ns if _fits_alike(problem) else True


def _fits_alike(problem: PartitionProblem) -> bool:
    try:
        next(pipedream(problem))
    except InfeasibleError:
        return False
    return True


def test_many_alike_blocks_are_one_kind() -> None:
    """A hundred alike blocks: as many of them compute again as must, and no more."""
    row = CostRow(microbatch_size=1, forward_ns=10, backward_ns=20, activation_bytes=50)
    profile = Profile.of("alike", [Block(id=f"b{n}", operator="layer", costs=(row,)) for n in range(100)])
    ways = [(again, stage_costs(profile, ["b1"], 1, recompute=again)) for again in (False, True)]
    choosing = ChoosingBlocks.of([ways] * 100)
    assert len(choosing.knapsacks.kinds) == 1
    found = choosing.chosen(0, 100, 0, 2, 2 * 50 * 60 + 50)
    assert sum(map(bool, again_of(found or False, 100))) == 40


def test_ends_of_a_model_keep_what_they_made() -> None:
    profile = drawn(random.Random(3), 1, 4)
    limit = stage_costs(profile, ["b0", "b1", "b2", "b3"], 1).memory_bytes(1) * 2 // 3
    problem = PartitionProblem.of(profile, 1, 1, microbatch_sizes=[1], memory_bytes=limit, recompute=LEVELS)
    (stage,) = next(recomputing(problem, {"b0"})).placement.stages
    again = again_of(stage.recompute or False, 4)
    assert not again[0]
    assert any(again[1:])


def test_a_search_recomputes_some_blocks_of_a_stage_where_all_take_longer() -> None:
    """Also of a placement that is given, whose stages recomputed all or nothing before."""
    row = CostRow(microbatch_size=1, forward_ns=10_000, backward_ns=20_000, activation_bytes=100)
    blocks = [Block(id=f"b{n}", operator="layer", costs=(row,)) for n in range(8)]
    profile = Profile.of("alike", blocks, bytes_per_sample=10)
    for placement, scheduler in (("auto", "auto"), ("one-to-one", "1f1b")):
        asked = Request.of(
            profile,
            devices=1,
            num_microbatches=4,
            placement=placement,
            memory_bytes=650,
            scheduler=scheduler,
            time_limit=1.0,
            deterministic=True,
        )
        plan = search_plan(asked).plan
        assert [stage.again.count(True) for stage in plan.stages] == [3]
        alike = search_plan(replace(asked, recompute=True)).plan
        assert plan.predicted.iteration_ns < alike.predicted.iteration_ns
        check(plan, profile).require("the plan")
        wrong = tuple(replace(stage, recompute=True) for stage in plan.stages)
        assert not check(plan.model_copy(update={"stages": wrong}), profile).valid


def test_attention_cores_of_a_profile_that_knows_none_are_refused() -> None:
    profile = Profile.of("bare", [Block.of("a", "1ms", "2ms")])
    with pytest.raises(UsageError, match=r"--recompute selective: no block of profile 'bare' .* --recompute auto"):
        Request.of(profile, devices=1, num_microbatches=1, recompute="selective")


def test_all_attention_cores_are_recomputed_where_asked() -> None:
    profile = drawn(random.Random(1), 2, 4)
    asked = Request.of(
        profile, devices=2, num_microbatches=2, recompute="selective", time_limit=0.5, deterministic=True
    )
    plan = search_plan(asked).plan
    assert {stage.recompute for stage in plan.stages} == {"selective"}
    check(plan, profile).require("the plan")


def test_all_blocks_but_a_models_ends_are_recomputed_where_asked() -> None:
    """Of one stage and of a head alone; a plan that recomputes its head keeps its meaning under other costs."""
    row = CostRow(microbatch_size=1, forward_ns=1000, backward_ns=2000, activation_bytes=100)
    kinds = ["embedding", "layer", "layer", "head"]
    profile = Profile.of("ended", [Block(id=f"b{n}", operator=kind, costs=(row,)) for n, kind in enumerate(kinds)])
    asked = Request.of(profile, devices=1, num_microbatches=2, recompute=True, time_limit=0.5, deterministic=True)
    result = search_plan(asked)
    plan = result.plan
    assert [stage.again for stage in plan.stages] == [(False, True, True, False)]
    assert plan.predicted.iteration_ns == 2 * (4 * 3000 + 2 * 1000) == result.lower_bound_ns
    assert [cost.compute_ns for cost in Pricing(1, True).costs(profile, ["b0", "b1", "b3"])] == [3000, 4000, 3000]
    placed = Placement(strategy="one-to-one", num_devices=1, stages=(PlacedStage(blocks=("b0",), devices=(0,)),))
    only = profile.model_copy(update={"blocks": profile.blocks[:1], "edges": ()})
    alone = build_workload(only, placed, num_microbatches=1, microbatch_size=1, recompute=True)
    assert alone.stages[0].recompute is False
    older = plan.model_copy(update={"stages": (replace(plan.stages[0], recompute=True),)})
    backward = recosted(older, profile, None).operations[-1]
    assert backward.duration_ns == 4 * 3000
