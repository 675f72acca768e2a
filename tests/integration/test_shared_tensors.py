"""A tensor that several blocks take: it goes to a stage once, and a stage holds it once."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from builders import profiles
from builders.requests import request_of
from pipeplan.checker import check
from pipeplan.costs import build_workload, stage_costs
from pipeplan.files import CostRow, Edge, PlacedStage, Placement, Profile
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import search_plan
from support.marks import some_of

SIZE = 2


def profile_of(num_blocks: int, edges: list[Edge], activation: int = 100) -> Profile:
    row = CostRow(microbatch_size=SIZE, forward_ns=10, backward_ns=20, activation_bytes=activation)
    return profiles.profile_of([row] * num_blocks, edges)


def edge(source: int, target: int, tensor: str | None, size: int = 10, **more: bool) -> Edge:
    return Edge(source=f"b{source}", target=f"b{target}", tensor=tensor, bytes_per_sample=size, **more)


def placed(*stages: tuple[int, ...]) -> Placement:
    return Placement(
        strategy="given",
        num_devices=len(stages),
        stages=tuple(
            PlacedStage(blocks=tuple(f"b{index}" for index in blocks), devices=(device,))
            for device, blocks in enumerate(stages)
        ),
    )


FAN = [edge(0, 1, "0"), edge(0, 2, "0"), edge(0, 3, "0"), edge(0, 3, "1", 3), edge(1, 2, None), edge(2, 3, None)]


def hop_bytes(profile: Profile, placement: Placement) -> dict[tuple[str, str], int]:
    workload = build_workload(profile, placement, num_microbatches=2, microbatch_size=SIZE)
    return {(each.source, each.target): hop.bytes for each in workload.dependencies for hop in each.hops}


def test_a_tensor_goes_to_a_stage_once() -> None:
    sent = hop_bytes(profile_of(4, FAN), placed((0,), (1, 2, 3)))
    assert sent == {("0F", "1F"): SIZE * (10 + 3), ("1B", "0B"): SIZE * (10 + 3)}
    sent = hop_bytes(profile_of(4, FAN), placed((0, 1), (2,), (3,)))
    assert sent["0F", "1F"] == SIZE * (10 + 10)
    assert sent["0F", "2F"] == SIZE * (10 + 3)


def test_without_a_name_every_edge_has_its_own() -> None:
    bare = [each.model_copy(update={"tensor": None}) for each in FAN if each.tensor != "1"]
    profile = profile_of(4, bare)
    assert hop_bytes(profile, placed((0,), (1, 2, 3)))["0F", "1F"] == SIZE * 30
    assert stage_costs(profile, ["b1", "b2", "b3"], SIZE).activation_bytes == 300


def test_a_stage_holds_it_once() -> None:
    profile = profile_of(4, FAN)
    assert stage_costs(profile, ["b1"], SIZE).activation_bytes == 100
    assert stage_costs(profile, ["b1", "b2"], SIZE).activation_bytes == 200 - SIZE * 10
    assert stage_costs(profile, ["b0", "b1", "b2", "b3"], SIZE).activation_bytes == 400 - 2 * SIZE * 10


def test_only_what_gets_a_gradient_is_sure_to_be_held() -> None:
    fixed = [edge(0, 1, "0", gradient=False), edge(0, 2, "0", gradient=False)]
    assert stage_costs(profile_of(3, fixed), ["b1", "b2"], SIZE).activation_bytes == 200


def test_broadcast_counts_once_for_all_samples() -> None:
    bias = [edge(0, 1, "0", broadcast=True), edge(0, 2, "0", broadcast=True)]
    assert stage_costs(profile_of(3, bias), ["b1", "b2"], SIZE).activation_bytes == 200 - 10


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([edge(0, 1, "0"), edge(0, 1, "0")], "repeats the edge"),
        ([edge(0, 1, "0"), edge(0, 2, "0", 11)], "different sizes"),
        ([edge(0, 1, "0"), edge(0, 2, "0", broadcast=True)], "different sizes"),
    ],
)
def test_refused(wrong: list[Edge], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        profile_of(3, wrong)


@st.composite
def fans(draw: st.DrawFn) -> tuple[Profile, Placement]:
    """Random graphs whose blocks share tensors, cut into stages of several blocks."""
    count = draw(st.integers(3, 8))
    sizes = {(source, name): draw(st.integers(1, 9)) for source in range(count) for name in "01"}
    gradients = {key: draw(st.booleans()) for key in sizes}
    edges = [
        edge(source, target, name, sizes[source, name], gradient=gradients[source, name])
        for target in range(count)
        for source in range(target)
        for name in "01"
        if draw(st.integers(0, 2)) == 0
    ]
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=2)))
    bounds = [0, *cuts, count]
    stages = [tuple(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    return profile_of(count, edges, draw(st.integers(0, 200))), placed(*stages)


@settings(max_examples=some_of(60), suppress_health_check=list(HealthCheck))
@given(fans())
def test_check_counts_as_the_costs_do(case: tuple[Profile, Placement]) -> None:
    profile, placement = case
    plan = search_plan(
        request_of(profile, placement, Batch(3, SIZE), scheduler="gpipe", time_limit=0.5, deterministic=True)
    ).plan
    report = check(plan, profile)
    assert report.valid, report.problems
