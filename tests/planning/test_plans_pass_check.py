"""Every plan the planner makes passes the independent check, whatever the graph, and simulates as it says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from builders.requests import request_of
from pipeplan.checker import check
from pipeplan.errors import InfeasibleError, InvalidPlanError
from pipeplan.examples import SHAPES, ShapeCosts, shape
from pipeplan.files import Block, CostRow, Edge, PlacedStage, Placement, Plan, Profile, Source, parse, to_json
from pipeplan.planning import build_plan
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import search_plan
from pipeplan.simulator.simulation import simulate
from support.marks import slow_but

numbers = st.integers(1, 9)


@st.composite
def placed_profiles(draw: st.DrawFn) -> Profile:
    """A random directed acyclic graph of stages, each on one or several of up to three devices."""
    num_devices = draw(st.integers(1, 3))
    num_stages = draw(st.integers(1, 5))
    groups = [tuple(sorted(draw(st.sets(st.integers(0, num_devices - 1), min_size=1)))) for _ in range(num_stages)]
    blocks = []
    for index, group in enumerate(groups):
        row: dict[str, int] = {
            "microbatch_size": 1,
            "shards": len(group),
            "forward_ns": draw(numbers),
            "backward_ns": draw(numbers),
            "activation_bytes": draw(st.integers(0, 5)),
            "workspace_bytes": draw(st.integers(0, 2)),
        }
        if draw(st.booleans()):
            row |= {"input_grad_ns": draw(numbers), "weight_grad_ns": draw(numbers)}
            row |= {"weight_grad_bytes": draw(st.integers(0, 5))}
        blocks.append(
            Block(id=f"b{index}", operator="x", parameter_bytes=draw(numbers), costs=(CostRow.model_validate(row),))
        )
    edges = tuple(
        Edge(
            source=f"b{source}",
            target=f"b{target}",
            bytes_per_sample=draw(st.integers(0, 3)),
            transfer_ns=draw(st.none() | st.integers(0, 3)),
            gradient=draw(st.booleans()),
        )
        for target in range(num_stages)
        for source in range(target)
        if draw(st.booleans())
    )
    placement = Placement(
        strategy="random",
        num_devices=num_devices,
        stages=tuple(
            PlacedStage(blocks=(f"b{index}",), devices=group, shards=len(group)) for index, group in enumerate(groups)
        ),
    )
    return Profile(
        name="random",
        source=Source(method="literature"),
        blocks=tuple(blocks),
        edges=edges,
        placement=placement,
    )


def require_good(plan: Plan, profile: Profile) -> None:
    report = check(plan, profile)
    assert report.valid, report.problems
    simulation = simulate(plan)
    assert simulation.rates.makespan_ns == plan.predicted.makespan_ns
    assert simulation.rates.bubble_rate == pytest.approx(plan.predicted.bubble_rate)
    assert parse(to_json(plan), Plan) == plan


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    placed_profiles(),
    st.integers(1, 8),
    st.none() | st.integers(15, 60),
    st.sampled_from(["auto", "repetend", "gpipe"]),
    st.booleans() | st.none(),
)
def test_random_graphs(
    profile: Profile, num_microbatches: int, memory: int | None, scheduler: str, split: bool | None
) -> None:
    assert profile.placement is not None
    if split and not any(row.input_grad_ns is not None for block in profile.blocks for row in block.costs):
        split = None
    options = {
        "scheduler": scheduler,
        "split_backward": split,
        "recompute": False,
        "time_limit": 0.3,
        "deterministic": True,
    }
    try:
        result = search_plan(
            request_of(profile, profile.placement, Batch(num_microbatches, 1), memory_bytes=memory, **options)
        )
    except InfeasibleError:
        assume(False)
    require_good(result.plan, profile)


@pytest.mark.parametrize("name", list(SHAPES))
@slow_but("split", [False, True], True.__eq__)
def test_shapes(name: str, split: bool) -> None:
    costs = ShapeCosts(3, None, 2, 2, comm_ns=1, activation_bytes=4, weight_grad_bytes=2) if split else ShapeCosts(3, 5)
    profile = shape(name, 4, costs=costs)
    assert profile.placement is not None
    options = {"split_backward": split, "time_limit": 0.5, "deterministic": True}
    require_good(search_plan(request_of(profile, profile.placement, Batch(12, 1), **options)).plan, profile)


def test_what_a_search_made_wrong_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What assembles plans is wrong here, and nobody but the check at the end looks at them."""
    assemble = build_plan.assemble

    def wrong(*given: Any, **how: Any) -> Plan:
        plan = assemble(*given, **how)
        return plan.model_copy(update={"programs": (plan.programs[0][:-1], *plan.programs[1:])})

    monkeypatch.setattr(build_plan, "assemble", wrong)
    profile = shape("v", 2)
    asked = request_of(profile, profile.placement, Batch(2, 1), scheduler="1f1b", time_limit=1, deterministic=True)
    with pytest.raises(InvalidPlanError, match="the plan that was found"):
        search_plan(asked)
