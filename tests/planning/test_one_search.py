"""Searches and frontiers of plans find the same: the shortest point takes as long as the plan of a search."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeplan.checker import check
from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.examples import model, shape
from pipeplan.files import Block, Profile
from pipeplan.planning.frontier import frontier_request
from pipeplan.planning.plan_frontier import plan_frontier
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan, without
from support.marks import slow_but

FLAGS: list[dict[str, Any]] = [
    {},
    {"shards": 2},
    {"positions": 2},
    {"replicas": 2},
    {"chunks": 2},
    {"recompute": True},
    {"zero": 1, "replicas": 4},
    {"zero": "auto", "memory_bytes": 7 * 10**8},
]
"""Beside the number of devices and the mini-batch."""


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


def compare(request: Request) -> None:
    """A search and a frontier of one request end alike: with plans as long, which are valid, or with none."""
    try:
        found = search_plan(request)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            plan_frontier(request)
        return
    best = min(plan_frontier(request).points, key=lambda point: point.iteration_ns)
    assert found.plan.predicted.iteration_ns == best.iteration_ns, best.plan.provenance.options["stages"]
    assert found.lower_bound_ns <= best.iteration_ns
    assert check(found.plan, request.block_profile).valid
    assert check(best.plan, request.block_profile).valid


def of_seed(seed: int, layers: int) -> Request:
    rng = random.Random(seed)
    profile = drawn(rng, rng.randint(2, layers))
    memory = rng.choice([None, 3 * 10**8, 10**9, 2 * 10**9])
    devices = rng.choice([1, 2, 3, 4])
    return Request(
        profile,
        devices,
        Batch(4, 1),
        sizes=(1, 2),
        memory_bytes=memory,
        device_counts=(devices,),
        **TO_THE_END,
    )


TO_THE_END: dict[str, Any] = {"time_limit": 1.0, "deterministic": True}


@pytest.mark.parametrize("seed", range(3))
def test_a_frontier_s_shortest_point_is_the_plan_of_a_search(seed: int) -> None:
    compare(of_seed(seed, 3))


@slow_but("seed", range(100, 124), lambda _: False, lambda seed: seed != 101)
def test_larger_frontiers_shortest_points_are_the_plans_of_searches(seed: int) -> None:
    compare(of_seed(seed, 5))


@slow_but("flags", FLAGS, lambda flags: flags == FLAGS[1])
def test_both_verbs_understand_flags_alike(flags: dict[str, Any]) -> None:
    """Costs of launches, levels of sharing and sizes that are said, for one: a frontier left out the first."""
    profile = drawn(random.Random(5), 3).model_copy(update={"launch_overhead_ns": 200_000})
    asked = frontier_request(profile, devices=(4,), mini_batch=8, **flags, **TO_THE_END)
    same = Request.of(profile, devices=4, mini_batch=8, **flags, **TO_THE_END)
    best = min(plan_frontier(asked).points, key=lambda point: point.iteration_ns)
    assert best.iteration_ns == search_plan(same).plan.predicted.iteration_ns


def test_positions_alone_leave_the_replicas_open() -> None:
    """Of six devices two positions have three replicas at most, which cannot share four samples: two can, or one."""
    profile = drawn(random.Random(5), 3)

    def best_ns(devices: int, **said: Any) -> int:
        asked = {"mini_batch": 4, "positions": 2, "shards": 1, **said, **TO_THE_END}
        points = plan_frontier(frontier_request(profile, devices=(devices,), **asked)).points
        found = search_plan(Request.of(profile, devices=devices, **asked)).plan.predicted.iteration_ns
        assert found == min(point.iteration_ns for point in points)
        return found

    assert best_ns(6) == min(best_ns(4, replicas=2), best_ns(2, replicas=1))


def test_one_stage_of_a_frontier_runs_what_is_profiled() -> None:
    """Six samples at once on a device are none of the four that there are rows for at most, and would be shorter."""
    how: dict[str, Any] = {"recompute": False, "time_limit": 0.1, "deterministic": True}
    compare(Request(drawn(random.Random(1), 1), 3, Batch(1, 6), device_counts=(3,), **how))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "gigabytes"), [("gpt2-345m", 16, 1), pytest.param("gpt2-1.3b", 32, 2, marks=pytest.mark.long)]
)
def test_a_model_has_a_plan_on_devices_of_little_memory(name: str, devices: int, gigabytes: int) -> None:
    """GPT-2 345M on 16 of which six together have just room for its state, and 1.3B on 32, where eleven have."""
    profile = model(name, device="v100-16gb", shards=(1, 2, 4))
    room = gigabytes * 10**9
    how: dict[str, Any] = {"memory_bytes": room, "mini_batch": devices, "time_limit": 0.05, "deterministic": True}
    cluster = named_cluster("graphpipe", devices)
    plan = search_plan(Request.of(profile, cluster=cluster, **how)).plan
    assert check(plan, profile).valid
    assert max(memory.peak_bytes for memory in plan.predicted.memory) <= room


@pytest.mark.parametrize("placement", ["auto", "all", "one-to-one"])
def test_frontiers_place_stages_as_searches_do(placement: str) -> None:
    """Alone by the profile's own placement unless all are asked for, which is one of them then, or a strategy is."""
    profile = shape("m", 4)
    assert profile.placement is not None
    how: dict[str, Any] = {"placement": placement, "mini_batch": 8, **TO_THE_END}
    found = search_plan(Request.of(profile, devices=4, **how))
    points = plan_frontier(frontier_request(profile, **how)).points  # on the devices that the placement is for
    assert min(point.iteration_ns for point in points) == found.plan.predicted.iteration_ns
    assert found.lower_bound_ns <= found.plan.predicted.iteration_ns
    assert len({point.memory_bytes for point in points}) > 1
    stages = [(stage.blocks, stage.devices) for stage in profile.placement.stages]
    assert ([(stage.blocks, stage.devices) for stage in found.plan.stages] == stages) == (placement != "all")


def test_frontiers_of_a_placement_are_on_its_devices() -> None:
    """As searches are: others contradict it."""
    profile = shape("m", 4)
    assert frontier_request(profile, mini_batch=8).device_counts == (4,)
    with pytest.raises(UsageError, match=r"--devices 2 contradicts the profile's placement, .*give --placement all"):
        frontier_request(profile, devices=(2, 4), mini_batch=8)
    assert frontier_request(profile, devices=(2, 4), mini_batch=8, placement="all").device_counts == (2, 4)
    for request in (frontier_request, Request.of):  # also beside spare ones, of which nobody said a number to plan for
        with pytest.raises(UsageError, match="--devices 7 contradicts the profile's placement"):
            request(profile, cluster=named_cluster("cluster-h100", 8), spares=1, mini_batch=8)


def test_one_stage_has_each_block_split_in_a_way_of_its_own() -> None:
    """Where ways that are alike for all blocks of a stage take longer."""
    profile = drawn(random.Random(0), 3)
    request = Request(profile, 2, Batch(4, 1), sizes=(1, 2), time_limit=1.0, deterministic=True)
    others = {"stage ways", "split blocks", "one stage"}
    own = search_plan(request, steps=without(others - {"one stage"})).plan
    assert own.provenance.options["stages"] == "one stage, split"
    assert own.stages[0].configurations
    assert own.predicted.iteration_ns < search_plan(request, steps=without(others)).plan.predicted.iteration_ns
