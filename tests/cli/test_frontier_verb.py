"""``pipeplan frontier`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeplan.check import check
from pipeplan.cli.main import cli
from pipeplan.costs.testbeds import cluster_of_paper
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.examples import model
from pipeplan.model import Profile, read_plan, write_file
from pipeplan.simulate.simulation import simulate


def run(*arguments: object, fails: type[Exception] | None = None) -> Result:
    result = CliRunner().invoke(cli, [str(each) for each in ("frontier", *arguments)])
    if fails is None:
        assert result.exception is None, result.output
    else:
        assert isinstance(result.exception, fails)
    return result


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = model("gpt2-124m", microbatch_sizes=(1, 2), shards=(1, 2))
    blocks = whole.blocks[:5]
    kept = {block.id for block in blocks}
    edges = tuple(edge for edge in whole.edges if {edge.source, edge.target} <= kept)
    path = tmp_path_factory.mktemp("frontier") / "profile.json"
    write_file(Profile(name="short", source=whole.source, blocks=blocks, edges=edges), str(path))
    return path


def test_splits_have_a_turning_point_and_a_plan_that_is_right(profile_path: Path, tmp_path: Path) -> None:
    plan_path, svg_path = tmp_path / "plan.json", tmp_path / "frontier.svg"
    result = run(profile_path, "--devices", 2, "--json", "-o", plan_path, "--svg", svg_path)
    summary = json.loads(result.output)
    points = summary["points"]
    assert summary["exact"]
    assert [point["memory_bytes"] for point in points] == sorted(point["memory_bytes"] for point in points)
    assert [point["time_ns"] for point in points] == sorted((p["time_ns"] for p in points), reverse=True)
    chosen = [point for point in points if point["turning_point"]]
    plan = read_plan(str(plan_path))
    assert [simulate(plan).iteration_ns] == [point["time_ns"] for point in chosen]
    assert check(plan).valid
    assert svg_path.read_text().count("<circle") == len(points)


def test_modes_choose(profile_path: Path) -> None:
    every = json.loads(run(profile_path, "--devices", "1,2,4", "--json").output)["points"]
    quickest = {count: min(p["time_ns"] for p in every if p["num_devices"] == count) for count in (1, 2, 4)}
    compared = json.loads(run(profile_path, "--devices", "1,2,4", "--mode", "profile", "--json").output)["points"]
    assert {point["num_devices"]: point["time_ns"] for point in compared} == quickest
    least = min(point["memory_bytes"] for point in every if point["num_devices"] == 2)
    fewest = json.loads(run(profile_path, "--devices", 4, "--mode", "min-devices", "--memory", least, "--json").output)[
        "points"
    ]
    assert {point["num_devices"] for point in fewest} == {2}
    assert all(point["memory_bytes"] <= least for point in fewest)
    limited = json.loads(run(profile_path, "--devices", 4, "--mode", "min-time", "--memory", least, "--json").output)
    (chosen,) = [point for point in limited["points"] if point["chosen"]]
    assert chosen["time_ns"] == min(p["time_ns"] for p in every if p["num_devices"] == 4 and p["memory_bytes"] <= least)


def test_plans_are_written_and_prices_shown(profile_path: Path, tmp_path: Path) -> None:
    cluster = cluster_of_paper("tensoropt", 2)
    priced = cluster.model_copy(
        update={"devices": tuple(kind.model_copy(update={"price_per_hour": 2.5}) for kind in cluster.devices)}
    )
    cluster_path, plan_path = tmp_path / "cluster.json", tmp_path / "plan.json"
    write_file(priced, str(cluster_path))
    asked = ("--plans", "--cluster", cluster_path, "--mini-batch", 4, "--mode", "min-time", "-o", plan_path)
    points = json.loads(run(profile_path, *asked, "--json").output)["points"]
    (chosen,) = [point for point in points if point["chosen"]]
    assert simulate(read_plan(str(plan_path))).iteration_ns == chosen["time_ns"]
    assert all(point["price_per_hour"] == 2.5 * point["num_devices"] for point in points)
    assert "per hour" in run(profile_path, "--cluster", cluster_path, "--mode", "profile").output


def test_what_cannot_be_is_said(profile_path: Path, tmp_path: Path) -> None:
    with_little = run(profile_path, "--devices", 2, "--memory", "1MB", fails=InfeasibleError)
    assert "at least" in str(with_little.exception)
    assert "--devices" in str(run(profile_path, fails=UsageError).exception)
    refused = run(profile_path, "--devices", 2, "--grain", "operator", "-o", tmp_path / "p.json", fails=UsageError)
    assert "--grain" in str(refused.exception)
