"""Plans for thousands of devices: folded, small, and as little work to look at as for hundreds, counted in calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest

import pipeplan
from pipeplan.checker import check
from pipeplan.files import Cluster, Plan, Profile, to_json
from pipeplan.files.folded import unfolded
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.folding import of_devices

FEW, MANY = 512, 4096


@pytest.fixture(scope="module")
def profile() -> Profile:
    return pipeplan.example("gpt2-1.3b", device="h100-80gb", microbatch=(1, 2), shards=(1, 2, 4))


def nodes(devices: int) -> Cluster:
    return pipeplan.example_cluster("cluster-h100", devices=devices)


def calls(work: Callable[[], object]) -> int:
    """How many Python functions it calls."""
    count = 0

    def hear(_frame: FrameType, event: str, _of: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(hear)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("devices", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_a_plan_that_leaves_nodes_in_reserve_is_folded(profile: Profile, devices: int) -> None:
    """What is left divides the mini-batch badly: as many replicas as there are nodes and one more, and some idle."""
    cluster = nodes(devices)
    asked = {"mini_batch": 4 * devices, "spares": 8, "time_limit": 1, "deterministic": True}
    plan = pipeplan.search(profile, cluster=cluster, **asked).plan
    idle = plan.workload.idle_devices
    assert plan.num_devices == devices - 8
    assert 0 < len(idle) != plan.players_each
    assert len(plan.programs) <= 64 < plan.players_each * len(plan.programs)
    assert len(to_json(plan)) < 100_000
    assert check(plan, profile, cluster).valid
    assert check(unfolded(plan), profile, cluster).valid


@pytest.mark.slow
def test_a_first_plan_for_thousands_is_folded_and_small(profile: Profile) -> None:
    """With everything open, in as much time as one plan takes."""
    cluster = nodes(MANY)
    found = pipeplan.search(profile, cluster=cluster, mini_batch=2 * MANY, time_limit=0.25, deterministic=True)
    plan, bound = found.plan, found.lower_bound_ns
    assert (plan.num_devices, len(plan.programs) * plan.players_each) == (MANY, MANY)
    assert len(plan.programs) <= 64
    assert len(to_json(plan)) < 100_000
    assert check(plan, profile, cluster).valid
    assert simulate(plan, profile=profile, cluster=cluster).iteration_ns == plan.predicted.iteration_ns >= bound


@pytest.mark.slow
def test_looking_at_a_plan_takes_hardly_more_for_more_replicas(profile: Profile) -> None:
    """Of each device it is looked up how groups lie: a few calls, where a program of its own takes hundreds."""

    def planned(devices: int) -> tuple[Plan, Cluster]:
        cluster = nodes(devices)
        sizes = {"tp": 2, "dp": devices // 8, "pp": 4}
        found = pipeplan.search(
            profile,
            cluster=cluster,
            mini_batch=devices,
            time_limit=1,
            deterministic=True,
            scheduler="1f1b",
            **sizes,
        )
        assert len(found.plan.programs) == 8
        return found.plan, cluster

    (few, near), (many, far) = map(planned, (FEW, MANY))
    devices = unfolded(few)
    assert len(devices.programs) == FEW
    assert check(devices, profile, near).valid
    whole, parts = (simulate(each, profile=profile, cluster=near) for each in (devices, few))
    assert whole.iteration_ns == parts.iteration_ns
    held = [each.peak_bytes for each in parts.memory]
    assert [each.peak_bytes for each in whole.memory] == of_devices(few.players, held)
    assert len(to_json(many)) == pytest.approx(len(to_json(few)), rel=0.05)
    both = (few, near), (many, far)
    checks = [calls(partial(check, plan, profile, cluster)) for plan, cluster in both]
    simulations = [calls(partial(simulate, plan, profile=profile, cluster=cluster)) for plan, cluster in both]
    assert checks[1] - checks[0] < 20 * (MANY - FEW)
    assert simulations[1] - simulations[0] < 10 * (MANY - FEW)
