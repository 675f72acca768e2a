"""The planners that TensorOpt compares with, by our costs: special cases, so never below our frontier."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pipeplan.costs import state_of
from pipeplan.costs.clusters import named_cluster
from pipeplan.examples.models import model
from pipeplan.sharding.baselines import BaselinePoint, data_parallel, fastest, one_mesh_for_all, split_everything
from pipeplan.sharding.cost_model import CostModel, CostOptions, cost_model
from pipeplan.sharding.tracking import Tracked, track


@pytest.fixture(scope="module", params=["tensoropt-rnn", "tensoropt-vgg16"])
def split(request: pytest.FixtureRequest) -> tuple[CostModel, Tracked]:
    profile = model(request.param, device="v100-16gb")
    built = cost_model(profile, named_cluster("tensoropt", 4), 4, 64)
    return built, track(built.graph)


def lies_on_or_above(point: BaselinePoint, frontier: Tracked) -> bool:
    """Whether some strategy of the frontier is at most the point in both."""
    return bool(((frontier.memory_bytes <= point.memory_bytes) & (frontier.time_ns <= point.time_ns)).any())


def test_no_published_planner_beats_the_frontier(split: tuple[CostModel, Tracked]) -> None:
    built, frontier = split
    assert frontier.exact
    meshes = one_mesh_for_all(built)
    assert meshes
    for point in (data_parallel(built), fastest(built), split_everything(built), *meshes):
        assert lies_on_or_above(point, frontier)


def test_the_fastest_is_the_end_of_the_frontier(split: tuple[CostModel, Tracked]) -> None:
    built, frontier = split
    assert fastest(built).time_ns == frontier.time_ns[-1]


def test_one_mesh_includes_data_parallelism_and_needs_more_memory(split: tuple[CostModel, Tracked]) -> None:
    built, frontier = split
    meshes, samples = one_mesh_for_all(built), data_parallel(built)
    assert any(each.memory_bytes <= samples.memory_bytes and each.time_ns <= samples.time_ns for each in meshes)
    assert meshes[0].memory_bytes >= frontier.memory_bytes[0]
    assert all(
        fewer.memory_bytes < more.memory_bytes and fewer.time_ns > more.time_ns for fewer, more in pairwise(meshes)
    )


def test_data_parallelism_holds_all_parameters_on_every_device() -> None:
    profile = model("tensoropt-rnn", device="v100-16gb")
    built = cost_model(profile, named_cluster("tensoropt", 4), 4, 64, options=CostOptions())
    states = sum(state_of(block, profile.recipe).total for block in profile.blocks)
    assert data_parallel(built).memory_bytes >= states
    assert split_everything(built).memory_bytes <= states // 4 * 1.1
