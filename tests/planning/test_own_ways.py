"""Stages in ways of their own: what closed forms say of them is so, and a search is shorter with them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from builders.profiles import joined
from builders.requests import request_of
from pipeplan.checker import check
from pipeplan.files import Block, CostRow, Profile
from pipeplan.planning.candidates import PlacementCandidate, kept_choice, placed, uniform_layouts
from pipeplan.planning.own_ways import _WaysOfStages, with_own_ways
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan, without
from pipeplan.planning.trials import Trial

pytestmark = pytest.mark.counted

ALL_WIDTHS = {"every width", "recomputed blocks", "stage graphs", "published planners", "stage ways", "one stage"}
LAYERS = 12


def with_large_head(seed: int = 0) -> Profile:
    """Layers that take longer on two devices together than on each of them, and a head of which each has no room."""
    draw = random.Random(seed)

    def block(name: str, ns: int, slower: float, kept: int, held: int) -> Block:
        rows = [
            CostRow(
                microbatch_size=size,
                shards=shards,
                forward_ns=round(size * ns * (slower if shards > 1 else 1.0) / shards),
                backward_ns=round(2 * size * ns * (slower if shards > 1 else 1.0) / shards),
                activation_bytes=size * held // shards,
                workspace_bytes=size * held // shards,
            )
            for shards in (1, 2)
            for size in (1, 2, 4)
        ]
        return Block(id=name, operator="layer", parameter_bytes=kept, costs=tuple(rows))

    layers = [block(f"b{n}", draw.randint(9, 11) * 1000, 1.4, 1000, 40) for n in range(LAYERS)]
    return joined([*layers, block("head", 40_000, 1.02, 40_000, 40)])


def asked(seed: int = 0, **how: Any) -> Request:
    fixed = {"num_parted": 0, "split_backward": False, "recompute": False, "zero": 0, "sizes": (1, 2, 4)}
    limits = {"memory_bytes": 60_000, "time_limit": 0.5, "deterministic": True}
    return request_of(with_large_head(seed), "auto", Batch(64, 2), 4, **(fixed | limits | how))


def uniform(request: Request, strategy: str) -> PlacementCandidate:
    """Two positions of two devices each, which split all blocks."""
    choice = next(
        row.choice
        for row in uniform_layouts(request)
        if (row.choice.strategy, row.choice.positions, row.choice.shards) == (strategy, 2, 2)
        and row.choice.batch.microbatch_size == 2
    )
    found = placed(request, choice)
    assert isinstance(found, PlacementCandidate)
    return found


@pytest.mark.parametrize("strategy", ["one-to-one", "circular"])
@pytest.mark.parametrize("seed", range(3))
def test_closed_forms_of_ways_are_those_of_workloads(strategy: str, seed: int) -> None:
    """Times, and that it fits: blocks in their order on all devices, of which those of layers alone split none."""
    request = asked(seed)
    before = uniform(request, strategy)
    found = with_own_ways(request, before)
    assert found is not None
    stages = found.placement.stages
    assert [block for stage in stages for block in stage.blocks] == [block.id for block in request.profile.blocks]
    assert [stage.devices for stage in stages] == [stage.devices for stage in before.placement.stages]
    assert stages[-1].shards == 2
    assert {stage.shards for stage in stages} == {1, 2}
    trial, alike = Trial.of(request, found), Trial.of(request, before)
    trial.look(usual=found.usual)
    alike.look(usual=before.usual)
    assert trial.value_ns is not None
    assert alike.value_ns is not None
    assert trial.value_ns < alike.value_ns
    (workload,), choice = trial.ways, kept_choice(before)
    assert choice is not None
    own = _WaysOfStages.of(request, replace(choice, usual=found.usual), before.placement.stages, 1.0)
    assert own is not None
    ends, loads = [0], Counter[tuple[int, ...]]()
    for stage, work in zip(stages, workload.work_of_stages, strict=True):
        ends.append(ends[-1] + len(stage.blocks))
        loads[stage.devices] += work
    ways = [next(n for n, way in enumerate(own.ways) if way.split.shards == stage.shards) for stage in stages]
    assert own.busiest(ends, ways) == pytest.approx(max(loads.values()), rel=1e-6)
    assert min(own.levelled()).busiest_ns == own.busiest(ends, ways)


def test_searches_find_shorter_plans_with_ways_of_their_own() -> None:
    """Of stages that have no room otherwise; a plan that is checked."""
    request = asked(scheduler="1f1b")
    own, alike = (search_plan(request, steps=without(off)) for off in (ALL_WIDTHS, ALL_WIDTHS | {"own ways", "moves"}))
    assert own.plan.predicted.iteration_ns < alike.plan.predicted.iteration_ns
    assert {stage.shards for stage in own.plan.stages} == {1, 2}
    assert {stage.shards for stage in alike.plan.stages} != {1, 2}
    assert check(own.plan, request.profile).valid
    assert own.lower_bound_ns <= own.plan.predicted.iteration_ns


@pytest.mark.slow
@pytest.mark.long
def test_ten_different_plans_are_shown() -> None:
    """Also where the first good one refutes most others before there is a plan of them; the answer is the same."""
    request = asked(memory_bytes=10**9, time_limit=3.0)
    found, fewer = (
        search_plan(request, explain=True, steps=without(ALL_WIDTHS | off)) for off in (set(), {"different plans"})
    )
    assert found.explanation is not None
    assert fewer.explanation is not None
    shown = found.explanation.alternatives
    assert len(fewer.explanation.alternatives) < len(shown) == len({each.what for each in shown}) == 10
    assert [each.iteration_ns for each in shown] == sorted(each.iteration_ns for each in shown)
    assert shown[0].iteration_ns == found.plan.predicted.iteration_ns <= fewer.plan.predicted.iteration_ns


def test_stages_share_sequences_as_those_beside_them() -> None:
    """Also where layers alone would be far quicker with pieces; no message changes how sequences are divided."""
    profile = with_large_head()

    def in_pieces(row: CostRow) -> CostRow:
        return row.model_copy(
            update={"context": 2, "forward_ns": row.forward_ns // 8, "backward_ns": row.forward_ns // 4}
        )

    blocks = [each.model_copy(update={"costs": (*each.costs, *map(in_pieces, each.costs))}) for each in profile.blocks]
    request = asked()
    request = request_of(joined(blocks), "auto", request.batch, 4, **{key: getattr(request, key) for key in SAID})
    found = with_own_ways(request, uniform(request, "one-to-one"))
    assert found is not None
    assert {stage.context for stage in found.placement.stages} == {1}
    Trial.of(request, found).look(usual=found.usual)


def test_stages_whose_blocks_are_tied_run_alike() -> None:
    """Here the first and the last, on two positions; and where nothing is gained nothing is changed."""
    profile = with_large_head()
    tied = Profile.model_validate(
        profile.model_dump() | {"tied": [{"name": "table", "blocks": ["b0", "head"], "parameter_bytes": 500}]},
        strict=False,
    )
    request = asked()
    request = request_of(tied, "auto", request.batch, 4, **{key: getattr(request, key) for key in SAID})
    found = with_own_ways(request, uniform(request, "one-to-one"))
    if found is not None:
        assert found.placement.stages[0].shards == found.placement.stages[-1].shards
    roomy = request_of(with_large_head(), "auto", request.batch, 4, **SAID_ALL)
    alike = with_own_ways(roomy, uniform(roomy, "one-to-one"))
    assert alike is None  # all stages run quickest alone, as another layout of the table


SAID = ("num_parted", "split_backward", "recompute", "zero", "sizes", "memory_bytes", "time_limit", "deterministic")
SAID_ALL: dict[str, Any] = {
    "num_parted": 0,
    "split_backward": False,
    "recompute": False,
    "zero": 0,
    "sizes": (1, 2, 4),
    "memory_bytes": 10**9,
    "time_limit": 2.0,
}
