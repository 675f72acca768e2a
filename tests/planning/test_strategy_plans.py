"""Points of a cost frontier as plans: their simulated time and memory are the strategy's, and they pass check."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from pipeplan.checker import check
from pipeplan.costs import stage_costs
from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.examples import model as paper_model
from pipeplan.files import Profile, parse, to_json
from pipeplan.files.plan import Plan
from pipeplan.planning.request import Batch, Request, Splitting
from pipeplan.planning.sharding_frontier import plan_of_strategy, split_frontier
from pipeplan.sharding.cost_model import CostModel, CostOptions, cost_model
from pipeplan.sharding.details import split_blocks
from pipeplan.sharding.graph import Strategy
from pipeplan.sharding.tracking import Tracked, track
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.kinds import MemoryBytes
from pipeplan.workload.mesh import Mesh
from support.marks import one_in

CLUSTER = named_cluster("tensoropt", 4)
SAMPLES = 8


@functools.cache
def profile_of(name: str) -> Profile:
    return paper_model(name, device="v100-16gb", microbatch_sizes=[1, 2, 4, 8], shards=(1, 2, 4))


@functools.cache
def tracked(name: str, microbatches: int = 1, in_flight: int = 1, devices: int = 4) -> tuple[CostModel, Tracked]:
    options = CostOptions(blocks=True, microbatches=microbatches, in_flight=in_flight)
    built = cost_model(profile_of(name), CLUSTER, devices, SAMPLES, options=options)
    return built, track(built.graph)


@pytest.mark.parametrize("name", ["gpt2-124m", "candle-uno-8"])
def test_every_point_is_a_plan_with_its_figures(name: str) -> None:
    """To the nanosecond and the byte; workspace, which the frontier leaves out, comes on top."""
    built, found = tracked(name)
    assert len(found.memory_bytes) >= 10
    for point in range(len(found.memory_bytes)):
        strategy = found.strategy(point)
        plan = plan_of_strategy(profile_of(name), built, strategy, cluster=CLUSTER)
        assert plan.predicted.iteration_ns == strategy.time_ns
        for memory in plan.predicted.memory:
            assert memory.peak_bytes - plan.operations[0].workspace_bytes == strategy.memory_bytes
        assert plan.predicted.gap == 0, "all devices always work"
    assert simulate(plan).rates.makespan_ns + plan.stages[0].sync_ns == strategy.time_ns
    check(parse(to_json(plan), Plan), profile_of(name), CLUSTER).require("plan")


def test_points_know_the_step_of_their_plans() -> None:
    """To a nanosecond for each block, as each block's step is rounded up; tables of tied words are stepped once."""
    profile = profile_of("gpt2-124m").model_copy(update={"step_bytes_per_s": 10**11})
    found = split_frontier(Request(profile, 2, Batch(1, SAMPLES), cluster=CLUSTER), Splitting())
    for index, point in enumerate(found.points):
        plan = found.plan(Request(profile, 2, Batch(1, SAMPLES), cluster=CLUSTER), index)
        assert 0 <= point.time_ns - plan.predicted.iteration_ns <= len(profile.blocks) + 1
        assert plan.stages[0].step_ns > 10**6


@pytest.mark.parametrize("recompute", [False, True])
def test_all_blocks_in_the_usual_way_cost_what_their_rows_say(recompute: bool) -> None:
    """Split backward included."""
    profile = profile_of("gpt2-124m").model_copy(update={"tied": ()})  # what is tied counts with every block here
    built = cost_model(profile, None, 2, SAMPLES, options=CostOptions(blocks=True, recompute=recompute))
    chosen = {node.name: node.configurations.index("shards2") for node in built.graph.nodes}
    times = [int(node.costs.time_ns[chosen[node.name]]) for node in built.graph.nodes]
    strategy = Strategy(0, sum(times), chosen, dict.fromkeys(chosen, 0), (0,) * len(built.graph.edges))
    own = split_blocks(built, strategy).costs
    order = profile.topological_order()
    rows = stage_costs(profile, order, SAMPLES, 2, recompute=(recompute,) * len(order))  # the ends of a model, too
    assert own == replace(rows, state=MemoryBytes()), "what it keeps is the stage's to say"
    plan = plan_of_strategy(profile, built, strategy)
    assert plan.stages[0].state == rows.state


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_several_micro_batches_share_the_sum_of_gradients(in_flight: int) -> None:
    """As many activations are held as the frontier was told; ns are lost where a sum does not divide."""
    built, found = tracked("candle-uno-8", 3, in_flight)
    strategy = found.strategy(len(found.memory_bytes) // 2)
    plan = plan_of_strategy(profile_of("candle-uno-8"), built, strategy, cluster=CLUSTER)
    assert 0 <= 3 * strategy.time_ns - plan.predicted.iteration_ns <= 3 * len(plan.stages[0].blocks)
    assert plan.predicted.memory[0].peak_bytes - plan.operations[0].workspace_bytes == strategy.memory_bytes


def test_meshes_of_a_strategy_are_those_that_run() -> None:
    """Blocks by their rows, linear layers by rows and columns, embeddings by their width, too."""
    for name, expected in (
        ("gpt2-124m", {"samples", "shards", "copies", "hidden"}),
        ("candle-uno-8", {"samples", "shards", "copies", "rows", "columns"}),
    ):
        built, _ = tracked(name)
        names = {each.name for chosen in built.configurations.values() for each in chosen}
        assert {axis for text in names for axis, _ in Mesh.parse(text).axes} == expected
        assert all(Mesh.parse(text).size == 4 for text in names)


def test_one_device_has_no_mesh() -> None:
    built, found = tracked("candle-uno-8", devices=1)
    assert len(found.memory_bytes) == 1
    plan = plan_of_strategy(profile_of("candle-uno-8"), built, found.strategy(0))
    assert plan.stages[0].configurations == ()


def test_a_layer_by_rows_sums_and_by_columns_gives_slices() -> None:
    built, _ = tracked("candle-uno-8")
    ways = {each.name: each for each in built.configurations["branch0.layer1"]}
    assert ways["rows4"].output.free
    assert ways["columns4"].output.features is not None
    assert ways["rows4"].inputs[0].features == ways["columns4"].output.features
    assert ways["rows4"].forward_ns > ways["columns4"].forward_ns, "the sum takes time"
    assert ways["columns4"].gradient_bytes == ways["rows2-columns2"].gradient_bytes


def test_operators_inside_of_blocks_are_not_for_plans() -> None:
    built = cost_model(profile_of("candle-uno-8"), CLUSTER, 4, SAMPLES)
    found = track(built.graph)
    with pytest.raises(UsageError, match=r"an operator of block .* and plans run whole blocks"):
        split_blocks(built, found.strategy(0))


def test_a_plan_that_does_not_fit_is_refused() -> None:
    built, found = tracked("candle-uno-8")
    strategy = found.strategy(0)
    with pytest.raises(InvalidPlanError, match="bytes"):
        plan_of_strategy(profile_of("candle-uno-8"), built, strategy, memory_bytes=strategy.memory_bytes)


@one_in(2, "devices", [2, 4])
def test_points_are_exact_in_peak_memory(devices: int) -> None:
    """For every limit of workspace the strategies within it: what the largest of them takes is no sum."""
    found = split_frontier(
        Request(profile_of("candle-uno-8"), devices, Batch(1, SAMPLES), cluster=CLUSTER), Splitting()
    )
    built = found.model
    sizes = {name: np.array([each.workspace_bytes for each in ways]) for name, ways in built.configurations.items()}
    levels = sorted({int(size) for each in sizes.values() for size in each})
    least = max(int(each.min()) for each in sizes.values())
    points = []
    for level in levels[levels.index(least) :]:
        within = track(built.graph.restricted({name: np.flatnonzero(each <= level) for name, each in sizes.items()}))
        points += [(level + memory, time) for memory, time in zip(within.memory_bytes, within.time_ns, strict=True)]
    best = sorted(one for one in points if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in points))
    assert [(point.memory_bytes, point.time_ns) for point in found.points] == sorted(set(best))
    assert found.exact
    for point in found.points:
        plan = plan_of_strategy(profile_of("candle-uno-8"), built, point.strategy, cluster=CLUSTER.first(devices))
        assert plan.predicted.memory[0].peak_bytes == point.memory_bytes
        assert plan.predicted.memory[0].workspace_bytes == point.workspace_bytes
        assert plan.predicted.iteration_ns == point.time_ns


def test_ways_of_free_moves_lead_where_they_should() -> None:
    """Without a cluster nothing that devices exchange takes time, and moves may go round in circles."""
    found = split_frontier(Request(profile_of("gpt2-124m"), 4, Batch(1, SAMPLES)), Splitting())
    for point in found.points:
        assert plan_of_strategy(profile_of("gpt2-124m"), found.model, point.strategy).predicted.iteration_ns > 0
