"""Devices of different speed and memory: a search finds what an enumeration of all layouts on them finds."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from builders.kinds import MINI_BATCH, asked_of_kinds, cluster_of_kinds
from builders.profiles import joined, uneven_chain
from builders.requests import request_of
from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.costs.throughput import Yardstick
from pipeplan.errors import FileError, UsageError
from pipeplan.examples import model
from pipeplan.files import Block, Cluster, CostRow, PlacedStage, Placement, Plan, Profile, parse
from pipeplan.planning.frontier import frontier_request, search_frontier
from pipeplan.planning.plan_frontier import plan_frontier
from pipeplan.planning.request import Batch, Request, Splitting
from pipeplan.planning.steps import search_plan
from pipeplan.simulator.recost import recosted, relinked
from references.unlike_devices import Kind
from support.layouts import FIXED, require_best, require_rows_below_plans
from support.marks import one_in, slow_but


def compare(seed: int, most_blocks: int, most_devices: int) -> None:
    """The iteration found is that of the best layout, and no bound is above it."""
    request, best = asked_of_kinds(seed, most_blocks, most_devices, own_profiles=False)
    if best is not None:
        require_best(request, best)


@slow_but("seed", range(16), lambda seed: seed < 6, lambda seed: seed >= 8)
def test_search_finds_the_best_of_all_layouts(seed: int) -> None:
    compare(seed, 4, 3)


@slow_but("seed", range(100, 116), lambda _: False, lambda seed: seed >= 103)
def test_search_finds_the_best_of_more_layouts(seed: int) -> None:
    compare(seed, 5, 4)


@one_in(2, "seed", range(204, 210), first=1)
def test_no_row_of_the_table_is_bounded_above_its_plans(seed: int) -> None:
    """Of every uniform layout, cut by its own rule and run with each known schedule; also of its bound by work."""
    request, _ = asked_of_kinds(seed, 4, 3, own_profiles=False)
    require_rows_below_plans(request)


def test_kinds_that_are_all_as_fast_as_the_profile_change_nothing() -> None:
    """Byte for byte, but for the cluster's fingerprint and the names of its devices."""
    profile = uneven_chain(7, 4, (1, 2))
    plans = []
    for kinds in ([Kind(4, "1", 250)], [Kind(1, "1", 250), Kind(3, "1.0", 250)]):
        request = request_of(profile, "auto", Batch(MINI_BATCH, 1), 4, cluster=cluster_of_kinds(*kinds), **FIXED)
        plan = search_plan(request).plan
        devices = tuple(replace(device, name="device") for device in plan.devices)
        made = plan.provenance.model_copy(update={"cluster_sha256": ""})
        plans.append(plan.model_copy(update={"devices": devices, "provenance": made}).model_dump_json())
    assert plans[0] == plans[1]
    assert "speed" not in plans[0]


def test_cuts_suit_the_devices() -> None:
    """Of equal layers the half as fast devices have half as many, in either order of the file."""
    row = CostRow(microbatch_size=1, forward_ns=1000, backward_ns=2000, activation_bytes=1)
    profile = joined([Block(id=f"b{index}", operator="layer", costs=(row,)) for index in range(24)])
    for kinds in ([Kind(2, "1", None), Kind(2, "0.5", None)], [Kind(2, "0.5", None), Kind(2, "1", None)]):
        asks = FIXED | {"sizes": ()}
        request = request_of(profile, "one-to-one", Batch(64, 1), 4, cluster=cluster_of_kinds(*kinds), **asks)
        plan = search_plan(request).plan
        assert sorted(len(stage.blocks) for stage in plan.stages) == [4, 4, 8, 8]
        assert {stage.speed: len(stage.blocks) for stage in plan.stages} == {1.0: 8, 0.5: 4}


@pytest.fixture(scope="module")
def mixed() -> tuple[Profile, Cluster, Plan]:
    """A plan on two kinds of devices, with what it was made from."""
    profile, cluster = uneven_chain(3, 4, (1, 2)), cluster_of_kinds(Kind(1, "0.3", None), Kind(1, "1", None))
    return profile, cluster, search_plan(request_of(profile, "auto", Batch(6, 1), 2, cluster=cluster, **FIXED)).plan


def test_plans_on_them_are_checked_and_timed_again(mixed: tuple[Profile, Cluster, Plan]) -> None:
    """By the checker's own arithmetic; other speeds, or other times, are not theirs."""
    profile, cluster, plan = mixed
    assert any(stage.speed != 1 for stage in plan.stages)
    check(plan, profile, cluster).require()
    for again in (recosted(plan, profile, cluster), recosted(plan, profile, None)):
        assert [each.duration_ns for each in again.operations] == [each.duration_ns for each in plan.operations]
    number = next(at for at, stage in enumerate(plan.stages) if stage.speed != 1)
    stages = [replace(stage, speed=1.0) if at == number else stage for at, stage in enumerate(plan.stages)]
    found = check(plan.model_copy(update={"stages": tuple(stages)}), profile, cluster).problems
    assert {"cluster", "profile"} <= {each.rule for each in found}
    assert f"stages[{number}].speed: is 1, the slowest of its devices in the cluster has 0.3 [cluster]" in map(
        str, found
    )


def test_other_speeds_need_the_profile(mixed: tuple[Profile, Cluster, Plan]) -> None:
    """What actions take there, only rows say; a plan for its own cluster is linked anew without."""
    _, cluster, plan = mixed
    assert relinked(plan, cluster).operations == plan.operations
    other = cluster_of_kinds(Kind(2, "1", None))
    with pytest.raises(
        UsageError, match=r"is on devices of speed 0.3, in cluster 'unlike' they have 1.*--profile, too"
    ):
        relinked(plan, other)


def test_the_slowest_replica_counts() -> None:
    """And of blocks that are split, the slowest part."""
    profile = uneven_chain(1, 2, (1, 2))
    stage = PlacedStage(blocks=("b0", "b1"), devices=(0, 1), shards=1, replicas=2)
    placement = Placement(strategy="by-hand", num_devices=2, stages=(stage,))
    how: dict[str, Any] = {"num_microbatches": 2, "microbatch_size": 2}
    for speed in ("0.3", "0.99", "1"):
        cluster = cluster_of_kinds(Kind(1, "1", None), Kind(1, speed, None))
        workload = build_workload(profile, placement, cluster=cluster, **how)
        rows = [next(row for row in block.costs if row.key[:2] == (1, 1)) for block in profile.blocks]
        expected = sum(-(-row.forward_ns // Fraction(speed)) for row in rows)
        assert workload.operations[0].duration_ns == expected


@pytest.mark.slow
def test_frontiers_are_for_devices_as_fast_as_the_profile() -> None:
    """Where they are of one stage, which has no device's own time; plans do."""
    chain, cluster = uneven_chain(1, 2, (1, 2)), cluster_of_kinds(Kind(1, "1", None), Kind(1, "0.5", None))
    with pytest.raises(UsageError, match=r"those called 'kind1' have speed 0.5; add --plans"):
        frontier_request(chain, cluster=cluster, mini_batch=4, splitting=Splitting())
    how: dict[str, Any] = {"cluster": cluster, "mini_batch": 4, "deterministic": True, "time_limit": 0.3}
    asked = frontier_request(chain, devices=(2,), **how)
    found = search_plan(Request.of(chain, devices=2, **how)).plan.predicted.iteration_ns
    points = search_frontier(asked).points
    assert min(point.time_ns for point in points) == found
    assert all(check(point.plan, chain, cluster).valid for point in plan_frontier(asked).points)


@pytest.mark.slow
def test_shares_of_peaks_of_points_count_slow_devices_as_what_they_are() -> None:
    profile = model("gpt2-124m", device="v100-16gb", microbatch_sizes=(1,))
    cluster = cluster_of_kinds(Kind(1, "1", 10**11), Kind(1, "0.45", 10**11))
    how: dict[str, Any] = {"recompute": False, "zero": 0, "time_limit": 0.2, "deterministic": True}
    found = search_frontier(frontier_request(profile, devices=[1, 2], cluster=cluster, mini_batch=4, **how))
    measured = [found.throughput(point) for point in found.points]
    for point, shown in zip(found.points, measured, strict=True):
        plan = found.plan(1 + found.points.index(point))
        assert shown == Yardstick.of_plan(plan).throughput(4, point.time_ns, sum(plan.device_speeds))
    assert any(point.num_devices == 2 for point in found.points)
    assert all(shown.model_flops_utilisation for shown in measured)


@pytest.mark.parametrize("speed", ["0", "-1", "0.0001", "1e6", "NaN", '"fast"', "null"])
def test_speeds_are_numbers_that_can_be(speed: str) -> None:
    """Anything else is refused, with its place."""
    text = cluster_of_kinds(Kind(1, "2.5", None)).model_dump_json().replace("2.5", speed)
    with pytest.raises(FileError, match=r"devices\[0\]\.speed"):
        parse(text, Cluster, "c.json")
