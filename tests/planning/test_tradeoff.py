"""The frontier over whole plans: every point a plan that is right, and no point better than another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from builders.chains import chain_profile
from pipeplan.checker import check
from pipeplan.errors import InfeasibleError
from pipeplan.examples import model, shape
from pipeplan.files import PlacedStage, Placement, Profile
from pipeplan.partition.per_block_sharding import GroupSplits
from pipeplan.planning.block_splits import split_stages
from pipeplan.planning.bounds import request_bound
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.frontier import _plan_notes
from pipeplan.planning.plan_frontier import PlanFrontier, chains, plan_frontier
from pipeplan.planning.request import Batch, Request, Splitting
from pipeplan.planning.sharding_frontier import split_frontier
from pipeplan.planning.trials import Trial
from pipeplan.simulator.simulation import simulate
from support.marks import slow_but

DEVICES = (1, 2, 4)
TO_THE_END = {"time_limit": 0.1, "deterministic": True}  # of searches alone: all else is tried whatever it takes


def request_of(profile: Profile, devices: tuple[int, ...], batch: Batch, **others: Any) -> Request:
    return Request(profile, devices[-1], batch, device_counts=devices, **(TO_THE_END | others))


SHORT = "gpt2-124m with three layers"


def short() -> Profile:
    """GPT-2 with three of its twelve layers."""
    profile = model("gpt2-124m", shards=(1, 2))
    *ids, last = profile.topological_order()
    kept, (end,) = ids[:7], (edge for edge in profile.edges if edge.target == last)
    edges = [edge for edge in profile.edges if {edge.source, edge.target} <= set(kept)]
    return profile.model_copy(
        update={
            "blocks": tuple(block for block in profile.blocks if block.id in {*kept, last}),
            "edges": (*edges, end.model_copy(update={"source": kept[-1]})),
        }
    )


@cache
def frontier_of(name: str, memory_bytes: int | None = None) -> tuple[Request, PlanFrontier]:
    profile = short() if name == SHORT else model(name, shards=(1, 2))
    sizes = profile.microbatch_sizes[1:2]
    devices = DEVICES if name == SHORT else DEVICES[:2]
    request = request_of(profile, devices, Batch(4, sizes[0]), sizes=sizes, memory_bytes=memory_bytes)
    return request, plan_frontier(request)


@slow_but("name", [SHORT, "tensoropt-transformer", "mmt-2"], SHORT.__eq__, lambda name: name != SHORT)
def test_every_point_is_a_plan_that_is_what_it_says(name: str) -> None:
    request, found = frontier_of(name)
    assert len(found.points) >= 8  # with one size and few devices; asked as by default, it is far more than ten
    for point in found.points[:: max(1, len(found.points) // 20)]:  # each was checked when it was made
        assert check(point.plan, request.profile).valid
        simulated = simulate(point.plan)
        assert max(memory.peak_bytes for memory in simulated.memory) == point.memory_bytes
        assert simulated.iteration_ns == point.iteration_ns
        assert len(point.plan.devices) == point.num_devices
    figures = [(point.num_devices, point.memory_bytes, point.iteration_ns) for point in found.points]
    for one in figures:
        assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in figures)
    assert {point.num_devices for point in found.points} == set(request.device_counts)
    assert any(stage.shards > 1 for point in found.points for stage in point.plan.stages)


def test_one_stage_is_among_the_plans() -> None:
    """Whole plans are never worse than one stage on all devices, in ways that were profiled."""
    request, frontier = frontier_of(SHORT)
    splits = split_frontier(request, Splitting(profiled=True))
    for point in splits.points:
        assert any(
            found.memory_bytes <= point.memory_bytes and found.iteration_ns <= point.time_ns
            for found in frontier.points
        )
    assert not frontier.interrupted
    assert not frontier.rough


@pytest.mark.slow
def test_the_bound_is_said_with_what_is_tried() -> None:
    """Of all numbers of devices, in searches and after them: no point is below, and it is the searches' own at last."""
    profile, heard = chain_profile(4, placed=False), list[tuple[str, int, int]]()
    request = request_of(profile, (2, 4), Batch(2, 1))
    found = plan_frontier(request, progress=lambda what, best, bound, _: heard.append((what, best, bound)))
    best = min(point.iteration_ns for point in found.points)
    told = [(what, bound) for what, known, bound in heard if known]
    assert all(0 < bound <= best for _, bound in told)
    assert any("partition" in what for what, _ in told)
    assert any("on 4 devices" in what and "partition" not in what for what, _ in told)
    assert told[-1][1] == min(request_bound(asked) for asked in request.by_devices)


def test_without_time_there_is_something() -> None:
    request, _ = frontier_of(SHORT)
    hurried = plan_frontier(replace(request, time_limit=1e-9, deterministic=False, device_counts=(4,)))
    assert hurried.interrupted
    assert hurried.rough == (4,)
    assert hurried.points
    assert all(check(point.plan, request.profile).valid for point in hurried.points)


def test_time_is_up_on_other_threads_too() -> None:
    request, _ = frontier_of(SHORT)
    with ThreadPoolExecutor(1) as others:
        hurried = others.submit(
            plan_frontier, replace(request, time_limit=1e-9, deterministic=False, device_counts=(4,))
        ).result()
    assert hurried.interrupted
    assert hurried.rough == (4,)
    assert hurried.points


def test_what_promises_least_time_comes_first() -> None:
    request, _ = frontier_of(SHORT)
    request = replace(request, sizes=(1, 2), batch=Batch(8, 1))
    splits = GroupSplits(request.profile, None)
    found = list(chains(request, splits, quickest=True))
    same = list(chains(request, splits))
    assert {asked.promised_ns for asked in found} <= {asked.promised_ns for asked in same}
    assert found[0].promised_ns == min(asked.promised_ns for asked in same) < same[0].promised_ns


def test_uniform_frontiers_have_the_same_sizes_for_every_stage() -> None:
    """What a trainer takes as settings: of the same profile other plans split their stages each in its own way."""
    request, every = frontier_of(SHORT)
    found = plan_frontier(replace(request, uniform=True))

    def ways(frontier: PlanFrontier) -> list[int]:
        stages = [point.plan.stages for point in frontier.points]
        return [
            len({(each.shards, each.context, len(each.devices), each.configurations) for each in all_})
            for all_ in stages
        ]

    assert {point.num_devices for point in found.points} == set(DEVICES)
    assert set(ways(found)) == {1}
    assert max(ways(every)) > 1


def test_stages_of_plans_run_profiled_sizes_alone() -> None:
    """As in search: 16 samples on 4 devices are 4 each, or more where some of them do the same."""
    for most, names in ((4, {"samples4"}), (2, None)):
        sizes = [size for size in (1, 2, 4) if size <= most]
        (*_, found) = GroupSplits(model("mmt", microbatch_sizes=sizes), None).of(4, 16, 1, (False,)) or [None]
        ways = found and [way for block in found.order for way in found.models.whole.configurations[block]]
        assert (ways and {way.name for way in ways}) == names


@pytest.mark.slow
@pytest.mark.long
def test_memory_is_a_limit_for_all_points() -> None:
    _, free = frontier_of(SHORT)
    limit = sorted(point.memory_bytes for point in free.points)[len(free.points) // 2]
    _, found = frontier_of(SHORT, limit)
    assert all(point.memory_bytes <= limit for point in found.points)


def test_each_number_of_devices_on_which_nothing_fits_has_its_own_reason() -> None:
    failures = {count: InfeasibleError(f"{count} of {size} would do") for count, size in ((1, "8.8GB"), (2, "4.5GB"))}
    notes = list(_plan_notes(PlanFrontier((), 3, 1.0, False, failures=failures)))
    assert notes[:2] == ["1 device: 1 of 8.8GB would do", "2 devices: 2 of 4.5GB would do"]


@pytest.mark.slow
@pytest.mark.long  # test_refusals has the same of smaller requests
def test_what_fits_nowhere_is_said_with_what_would_do() -> None:
    """And what is said does."""
    request, _ = frontier_of(SHORT)
    request = replace(request, memory_bytes=1000, device_counts=(1, 2))
    with pytest.raises(InfeasibleError, match=r"for 1, 2 devices of 1kB: .* would do") as told:
        plan_frontier(request)
    enough = [each for each in told.value.would_do if int(each["num_devices"]) <= 2]
    assert {int(each["num_devices"]) for each in enough} == {1, 2}
    for each in enough:
        count, memory = int(each["num_devices"]), int(each["memory_bytes"])
        assert plan_frontier(replace(request, memory_bytes=memory, num_devices=count, device_counts=(count,))).points


def test_stages_take_points_of_their_own_frontiers() -> None:
    request, _ = frontier_of(SHORT)
    stage = PlacedStage(blocks=request.profile.topological_order(), devices=(0, 1), shards=2)
    placement = Placement(strategy="stage graph", num_devices=2, stages=(stage,))
    asked = replace(request, num_devices=2)
    whole = PlacementCandidate(placement, request.batch, False, "test")
    splits = GroupSplits(asked.profile, None)
    free = split_stages(splits, whole, None)
    assert free is not None
    quick = Trial.of(asked, free)
    uniform = Trial.of(asked, whole)
    assert free.placement.stages[0].configurations
    assert min(quick.bounds) <= min(uniform.bounds)  # all blocks in one way are among its frontier's points
    assert split_stages(splits, whole, 1000) is None


def test_blocks_that_run_on_several_devices_alone_have_plans() -> None:
    """Profiles that know no single device have no stages that split samples; chains with shards are left."""
    profile = model("gpt2-124m", microbatch_sizes=(1,), shards=(2,))
    found = plan_frontier(request_of(profile, (2,), Batch(2, 1)))
    assert all(stage.shards == 2 for point in found.points for stage in point.plan.stages)


@slow_but("name", ["m", "nn", "k", "x"], lambda name: name != "x")
def test_profiles_with_a_placement_have_plans_on_it(name: str) -> None:
    """What the placement leaves is how many micro-batches are in flight."""
    profile = shape(name, 4)
    found = plan_frontier(request_of(profile, (2, 4), Batch(8, 1)))
    assert len(found.points) > 1
    assert {point.num_devices for point in found.points} | set(found.failures) == {2, 4}
    for point in found.points:
        assert check(point.plan, profile).valid
        simulated = simulate(point.plan)
        assert max(memory.peak_bytes for memory in simulated.memory) == point.memory_bytes
        assert simulated.iteration_ns == point.iteration_ns


def test_blocks_without_common_shards_are_those_of_one_stage() -> None:
    """No chain has rows for all of them: the search's plans are all there is."""
    profile = shape("m", 4).model_copy(update={"placement": None})
    found = plan_frontier(request_of(profile, (4,), Batch(8, 1)))
    assert found.points
    assert all(check(point.plan, profile).valid for point in found.points)
