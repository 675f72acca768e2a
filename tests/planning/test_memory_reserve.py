"""What plans leave alone of each device's memory: whose word counts, that plans keep to it, and that it is said."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from builders.chains import chain_profile
from pipeplan.checker import check
from pipeplan.cli.main import cli
from pipeplan.costs.clusters import CLUSTERS, TESTBEDS, named_cluster
from pipeplan.costs.devices import PRESETS, device_preset
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Cluster, Plan, parse, to_json, write_file
from pipeplan.planning.comparison import compare
from pipeplan.planning.frontier import frontier_request, search_frontier
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.reporting.tables import print_comparison
from pipeplan.reporting.terminal import print_simulation
from pipeplan.simulator.simulation import simulate

PROFILE = chain_profile(2, activation_bytes=100, parameter_bytes=10)
"""Two stages: each keeps 40 bytes of state, and 100 of every micro-batch in flight."""

CLUSTER = Cluster.of("reserving", 2, memory=1000, memory_reserve=800)
"""Room for one micro-batch in flight on each device."""


def asked(**words: Any) -> Request:
    return Request.of(PROFILE, devices=2, num_microbatches=8, time_limit=1.0, deterministic=True, **words)


def peak(plan: Plan) -> int:
    return max(memory.peak_bytes for memory in plan.predicted.memory)


@pytest.mark.parametrize(
    ("words", "memory", "reserve"),
    [
        ({}, None, 0),
        ({"cluster": CLUSTER}, 200, 800),
        ({"cluster": CLUSTER, "reserve_bytes": 100}, 900, 100),
        ({"cluster": CLUSTER, "reserve_bytes": 0}, 1000, 0),
        ({"cluster": CLUSTER, "memory_bytes": 600}, 600, 0),
        ({"cluster": CLUSTER, "memory_bytes": 600, "reserve_bytes": 50}, 550, 50),
        ({"memory_bytes": 600}, 600, 0),
        ({"memory_bytes": 600, "reserve_bytes": 50}, 550, 50),
    ],
)
def test_a_flag_goes_before_the_cluster_and_memory_alone_has_no_reserve(
    words: dict[str, Any], memory: int | None, reserve: int
) -> None:
    request = asked(**words)
    assert (request.memory, request.reserve) == ([memory] * 2, [reserve] * 2)
    within = request.within(150)
    assert (within.memory, within.reserve) == ([150] * 2, [reserve] * 2)


@pytest.mark.parametrize("words", [{"cluster": CLUSTER}, {"memory_bytes": 900, "reserve_bytes": 700}])
def test_a_plan_leaves_the_reserve_alone(words: dict[str, Any]) -> None:
    plan = search_plan(asked(**words)).plan
    free = search_plan(asked(memory_bytes=1000)).plan
    assert peak(plan) <= 200 < peak(free)
    assert {device.usable_bytes for device in plan.devices} == {200}
    assert parse(to_json(plan), Plan) == plan
    assert "reserve_bytes" in to_json(plan)
    assert "reserve_bytes" not in to_json(free)


def test_check_and_simulate_refuse_what_takes_the_reserve() -> None:
    free = search_plan(asked(memory_bytes=1000)).plan
    devices = tuple(replace(device, reserve_bytes=800) for device in free.devices)
    report = check(free.model_copy(update={"devices": devices}))
    assert not report.valid
    assert "more than its 200 beside its reserve of 800" in str(report.problems)
    over = [str(each) for each in check(free, cluster=CLUSTER).problems]
    assert any("more than the 200 of the cluster's device beside its reserve of 800" in each for each in over)
    simulation = simulate(free, cluster=CLUSTER)
    assert simulation.overflow is not None
    assert simulation.overflow.limit_bytes == 200
    changed = free.model_copy(update={"devices": (replace(devices[0], reserve_bytes=1001), devices[1])})
    with pytest.raises(ValueError, match=r"devices\[0\] reserves 1001 of 1000 bytes"):
        Plan.model_validate_json(changed.model_dump_json())


def test_a_frontier_and_its_plans_keep_to_it() -> None:
    words: dict[str, Any] = {
        "devices": [2],
        "cluster": CLUSTER,
        "mini_batch": 8,
        "time_limit": 1.0,
        "deterministic": True,
    }
    found = search_frontier(frontier_request(PROFILE, **words))
    assert max(point.memory_bytes for point in found.points) <= 200
    assert "memory does not include the reserve of 800B on each device" in found.notes
    assert {device.reserve_bytes for device in found.plan().devices} == {800}


def test_what_does_not_fit_says_what_memory_has_to_hold() -> None:
    """What is said to be enough is: with the reserve that is asked for, or without the cluster's."""
    for words, enough in (
        ({"memory_bytes": 900, "reserve_bytes": 800}, 800 + 140),
        ({"cluster": Cluster.of("small", 2, memory=900, memory_reserve=800)}, 140),
    ):
        with pytest.raises(
            InfeasibleError, match=r"--memory to 14[01]B.*; sizes do not include the reserve of 800B"
        ) as error:
            search_plan(asked(**words))
        assert ("add that to --memory" in str(error.value)) == ("reserve_bytes" in words)
        assert peak(search_plan(asked(**words | {"memory_bytes": enough})).plan) == 140


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"reserve_bytes": 10}, "--memory-reserve 10B: memory is not limited; give --memory, or a --cluster"),
        ({"memory_bytes": 10, "reserve_bytes": 10}, "--memory-reserve 10B leaves nothing of devices of 10B; lower it"),
    ],
)
def test_a_reserve_of_nothing_is_refused(words: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        asked(**words)


def test_a_cluster_cannot_reserve_all() -> None:
    with pytest.raises(ValueError, match="memory_reserve_bytes 5 leaves nothing of a device with memory_bytes 5"):
        Cluster.of("full", 1, memory=5, memory_reserve=5)
    with pytest.raises(ValueError, match="memory_reserve_bytes 5 leaves nothing of a device with no memory_bytes"):
        Cluster.of("none", 1, memory_reserve=5)


def test_presets_reserve_a_part_and_makers_clusters_as_much() -> None:
    for preset in map(device_preset, PRESETS):
        assert preset.reserve_source
        assert 0 <= preset.reserve_bytes < preset.memory_bytes / 4
        assert (preset.reserve_bytes == 0) == (preset.name == "cpu")
    for name in CLUSTERS:
        cluster = named_cluster(name, 16)
        titles = {each.title: each.reserve_bytes for each in map(device_preset, PRESETS)}
        expected = 0 if name in TESTBEDS else titles[cluster.devices[0].name]
        assert cluster.reserve_bytes == (expected,) * 16


def test_every_table_of_memory_has_it(tmp_path: Path) -> None:
    file = io.StringIO()
    print_simulation(simulate(search_plan(asked(cluster=CLUSTER)).plan), file)
    assert "reserve" in file.getvalue()
    file = io.StringIO()
    print_simulation(simulate(search_plan(asked(memory_bytes=1000)).plan), file)
    assert "reserve" not in file.getvalue()
    comparison = compare(asked(cluster=CLUSTER))
    print_comparison(comparison, file)
    assert "memory 200B and 800B in reserve" in file.getvalue()
    assert comparison.figures()["reserve_bytes"] == [800, 800]
    write_file(PROFILE, str(tmp_path / "profile.json"))
    write_file(CLUSTER, str(tmp_path / "cluster.json"))
    words = [
        "--cluster",
        str(tmp_path / "cluster.json"),
        "--microbatches",
        "8",
        "--deterministic",
        "--time-limit",
        "1s",
    ]
    words += ["-o", str(tmp_path / "plan.json")]
    done = CliRunner().invoke(cli, ["search", str(tmp_path / "profile.json"), *words])
    assert done.exception is None, done.output
    assert "1kB less 800B in reserve (" in done.output
    done = CliRunner().invoke(cli, ["simulate", str(tmp_path / "plan.json"), "--json"])
    device = json.loads(done.output)["devices"][0]
    assert (device["memory_limit_bytes"], device["memory_reserve_bytes"]) == (200, 800)
