"""``pipeplan frontier`` from the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeplan import _api
from pipeplan.checker import check
from pipeplan.cli.main import cli
from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import FileError, InfeasibleError, UsageError
from pipeplan.examples import model, shape
from pipeplan.files import CostRow, Profile, read_plan, read_profile, sha256_of, write_file
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.simulator.simulation import simulate
from pipeplan.units import format_bytes, parse_bytes

pytestmark = pytest.mark.counted

TO_THE_END = ("--plans", "--deterministic", "--time-limit", "300ms")
"""Searches end soon, and all else is tried."""


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
    write_file(Profile(name="short", source=whole.source, recipe=whole.recipe, blocks=blocks, edges=edges), str(path))
    return path


def test_splits_have_a_turning_point_and_a_plan_that_is_right(profile_path: Path, tmp_path: Path) -> None:
    plan_path, svg_path = tmp_path / "plan.json", tmp_path / "frontier.svg"
    asked = ("--devices", 2, "--mini-batch", 2)  # of which no device has more than was profiled
    result = run(profile_path, *asked, "--json", "-o", plan_path, "--svg", svg_path)
    summary = json.loads(result.stdout)
    points = summary["points"]
    assert summary["exact"]
    assert [point["memory_bytes"] for point in points] == sorted(point["memory_bytes"] for point in points)
    assert [point["time_ns"] for point in points] == sorted((p["time_ns"] for p in points), reverse=True)
    chosen = [point for point in points if point["turning_point"]]
    assert [points[summary["chosen"] - 1]] == [point for point in points if point["chosen"]] == chosen
    plan = read_plan(str(plan_path))
    assert [simulate(plan).iteration_ns] == [point["time_ns"] for point in chosen]
    assert check(plan).valid
    drawn = svg_path.read_text()
    assert drawn.count("<circle") == len(points)
    assert drawn.count(">knee and chosen: ") == len(chosen) == 1
    assert "2 devices</text>" in drawn
    assert drawn.count('text-anchor="middle"') == 6  # five ticks and what they are


def test_memory_is_what_the_plan_needs(profile_path: Path, tmp_path: Path) -> None:
    """Workspace counts: a limit just above what a point is said to need lets that point through, and no other."""
    points = json.loads(run(profile_path, "--devices", 2, "--json").stdout)["points"]
    plan_path, limit = tmp_path / "plan.json", points[-1]["memory_bytes"] - 1
    asked = ("--devices", 2, "--mode", "min-time", "--memory", f"{limit}B", "-o", plan_path)
    (chosen,) = [each for each in json.loads(run(profile_path, *asked, "--json").stdout)["points"] if each["chosen"]]
    peak = max(simulate(read_plan(str(plan_path))).memory, key=lambda each: each.peak_bytes)
    assert (peak.peak_bytes, peak.workspace_bytes) == (chosen["memory_bytes"], chosen["workspace_bytes"])
    assert peak.workspace_bytes > 0
    assert chosen["memory_bytes"] <= limit


def test_modes_choose(profile_path: Path) -> None:
    every = json.loads(run(profile_path, "--devices", "1,2,4", "--json").stdout)["points"]
    quickest = {count: min(p["time_ns"] for p in every if p["num_devices"] == count) for count in (1, 2, 4)}
    compared = json.loads(run(profile_path, "--devices", "1,2,4", "--mode", "profile", "--json").stdout)["points"]
    assert {point["num_devices"]: point["time_ns"] for point in compared} == quickest
    least = min(point["memory_bytes"] for point in every if point["num_devices"] == 2)
    found = json.loads(
        run(profile_path, "--devices", 4, "--mode", "min-devices", "--memory", f"{least}B", "--json").stdout
    )
    one = format_bytes(min(point["memory_bytes"] for point in every if point["num_devices"] == 1))
    assert f"1 device: not enough, each would need at least {one}" in found["notes"]
    assert not [note for note in found["notes"] if "not enough" in note and not note.startswith("1 device:")]
    fewest = found["points"]
    assert {point["num_devices"] for point in fewest} == {2}
    assert all(point["memory_bytes"] <= least for point in fewest)
    limited = json.loads(
        run(profile_path, "--devices", 4, "--mode", "min-time", "--memory", f"{least}B", "--json").stdout
    )
    (chosen,) = [point for point in limited["points"] if point["chosen"]]
    assert chosen["time_ns"] == min(p["time_ns"] for p in every if p["num_devices"] == 4 and p["memory_bytes"] <= least)


def test_plans_are_written_and_prices_shown(profile_path: Path, tmp_path: Path) -> None:
    cluster = named_cluster("tensoropt", 2)
    priced = cluster.model_copy(
        update={"devices": tuple(kind.model_copy(update={"price_per_hour": 2.5}) for kind in cluster.devices)}
    )
    cluster_path, plan_path = tmp_path / "cluster.json", tmp_path / "plan.json"
    write_file(priced, str(cluster_path))
    asked = (*TO_THE_END, "--cluster", cluster_path, "--mini-batch", 4, "--mode", "min-time", "-o", plan_path)
    points = json.loads(run(profile_path, *asked, "--json").stdout)["points"]
    (chosen,) = [point for point in points if point["chosen"]]
    assert simulate(read_plan(str(plan_path))).iteration_ns == chosen["time_ns"]
    assert all(point["price_per_hour"] == 2.5 * point["num_devices"] for point in points)
    shown = run(profile_path, "--cluster", cluster_path, "--mode", "profile").output
    assert "1000 iter." in shown
    assert " |" not in shown  # a point for each of two numbers of devices, which a table says better
    shown = run(profile_path, "--cluster", cluster_path).output
    plot = [line for line in shown.splitlines() if " |" in line]
    assert len(plot) == 16
    assert max(map(len, plot)) <= 100


def test_sizes_fix_how_plans_share_out_devices(profile_path: Path) -> None:
    """As in a search: without --devices there are as many as all sizes make; else those that can be shared out so."""
    sizes = (*TO_THE_END, "--mini-batch", 4, "--tp", 2, "--cp", 1, "--json")
    found = json.loads(run(profile_path, *sizes, "--pp", 1, "--dp", 2).stdout)["points"]
    assert found
    assert all(point["num_devices"] == 4 for point in found)
    assert all(set(point["configurations"].values()) == {"2xshards2"} for point in found)
    turns = json.loads(run(profile_path, *sizes, "--devices", 4, "--pp", 2, "--vp", 2, "--recompute", "none").stdout)
    assert turns["points"]
    assert {point["what"].split()[0] for point in turns["points"]} <= {"4", "8"}  # one route, or one in each direction
    assert not [point for point in turns["points"] if "recomputed" in point["what"]]
    with pytest.raises(UsageError, match="--pp 3 x --tp 2 x --cp 1 does not divide 4 devices"):
        raise run(profile_path, *sizes, "--devices", "4,12", "--pp", 3, fails=UsageError).exception or AssertionError
    refused = run(profile_path, "--devices", 4, "--tp", 2, fails=UsageError).exception
    assert "--tp is for pipelines, not for a single stage; add --plans" in str(refused)


@pytest.mark.slow
def test_frontiers_of_plans_have_what_searches_have(profile_path: Path) -> None:
    """Their quickest point is no longer than the best uniform layout by a known schedule, with turns."""
    profile = read_profile(str(profile_path))
    asked = (*TO_THE_END, "--devices", 2, "--mini-batch", 8, "--mode", "profile", "--json")
    (quickest,) = json.loads(run(profile_path, *asked).stdout)["points"]
    for request in (
        Request.of(profile, devices=2, mini_batch=8, placement="circular", scheduler="interleaved-1f1b"),
        Request.of(profile, devices=2, mini_batch=8, scheduler="1f1b"),
    ):
        assert quickest["time_ns"] <= simulate(search_plan(request).plan).iteration_ns


def test_a_device_that_changes_nothing_is_noted(profile_path: Path) -> None:
    asked = (profile_path, "--devices", 2, "--device", "a100-40gb", "--json")
    assert any("--device a100-40gb changes nothing" in note for note in json.loads(run(*asked).stdout)["notes"])
    assert "changes nothing" not in run(*asked, "--split-level", "operator").stdout


def test_notes_come_with_an_answer_and_not_with_a_refusal(profile_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    write_file(shape("v", 2), str(path))
    assert run(path, "--devices", "1,2", "--json", fails=UsageError).stderr == ""
    assert "pipeplan: links are free" in run(profile_path, "--devices", 2, "--json").stderr


@pytest.mark.parametrize("kind", [(), ("--plans", "--time-limit", "200ms")])
def test_plans_on_fewer_devices_are_for_the_cluster_that_was_given(
    profile_path: Path, tmp_path: Path, kind: tuple[str, ...]
) -> None:
    cluster = named_cluster("tensoropt", 4)
    cluster_path, plan_path = tmp_path / "cluster.json", tmp_path / "plan.json"
    write_file(cluster, str(cluster_path))
    asked = (*kind, "--cluster", cluster_path, "--devices", 2, "--mini-batch", 4)
    run(profile_path, *asked, "-o", plan_path)
    plan = read_plan(str(plan_path))
    assert len(plan.devices) == 2
    assert plan.provenance.cluster_sha256 == sha256_of(cluster)
    assert check(plan, read_profile(str(profile_path)), cluster).valid


def test_stages_that_are_split_by_block_say_how(profile_path: Path) -> None:
    asked = (*TO_THE_END, "--devices", 2, "--mini-batch", 2, "--json")
    points = json.loads(run(profile_path, *asked).stdout)["points"]
    said = [
        (point["what"], point["configurations"])
        for point in points
        if point["what"].startswith("1 stage on (2 devices, blocks split: ")
    ]
    assert said
    for what, configurations in said:
        ways = [each.removeprefix("1x") for each in configurations.values()]
        for count, axis, reach in re.findall(r"(\d+) by (\w+) over (\d+)(?=[,)])", what):
            assert ways.count(f"{axis}{reach}") == int(count)


def test_what_cannot_be_is_said(profile_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan.planning.too_large.TOO_LARGE_SECONDS", 0.2)  # what else would do is not tried here
    with_little = run(profile_path, "--devices", 2, "--memory", "1MB", fails=InfeasibleError)
    assert all(said in str(with_little.exception) for said in ("on 2 devices", "4 samples", "raise --memory to 645MB"))
    assert isinstance(with_little.exception, InfeasibleError)
    assert [(each["num_devices"], each["memory_bytes"]) for each in with_little.exception.would_do] == [
        (2, 645 * 10**6)
    ]
    assert "--devices" in str(run(profile_path, fails=UsageError).exception)
    every = json.loads(run(profile_path, "--devices", "1,2,4", "--mini-batch", 4, "--json").stdout)["points"]
    least = [min(each["memory_bytes"] for each in every if each["num_devices"] == count) for count in (1, 2, 4)]
    asked = ("--devices", 4, "--mode", "min-devices", "--mini-batch", 4, "--memory", "1MB")
    told = str(run(profile_path, *asked, fails=InfeasibleError).exception)
    one, two, four = map(format_bytes, least)
    assert f"each needs at least {one} on 1 device, {two} on 2 devices, {four} on 4 devices;" in told
    missing = re.search(r"nothing fits into 1MB per device, (\S+) too little: with 4 samples", told)
    assert missing is not None
    assert 0 <= 10**6 + parse_bytes(missing[1]) - min(least) <= min(least) / 100
    asked = (profile_path, "--devices", 2, "--split-level", "operator")
    refused = run(*asked, "-o", tmp_path / "p.json", fails=UsageError)
    assert "--split-level" in str(refused.exception)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--plans", "--split-level", "operator"), ("--split-level", "--plans")),
        (("--plans", "--data-parallel-loading"), ("--data-parallel-loading", "--plans")),
        (("--plans", "--device", "a100-40gb"), ("--device", "--plans")),
        (("--mode", "min-devices"), ("--memory",)),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    profile_path: Path, flags: tuple[str, ...], said: tuple[str, ...]
) -> None:
    refused = run(profile_path, "--devices", 2, *flags, fails=UsageError)
    assert all(each in str(refused.exception) for each in said)


def test_what_is_taken_for_granted_is_said(profile_path: Path, tmp_path: Path) -> None:
    """Free links, devices that differ, prices that are missing, work that is done by several alike."""
    uneven = run(profile_path, "--devices", 3, "--mini-batch", 4, "--json")
    summary = json.loads(uneven.stdout)
    assert "links are free" in summary["notes"][0]
    assert "links are free" in uneven.stderr
    assert any("4 samples cannot be split evenly" in note for note in summary["notes"])
    assert 0.6 < summary["points"][-1]["repeated"] <= 2 / 3  # all but the embedding, whose width has a third
    cluster = named_cluster("tensoropt", 2)
    (kind,) = cluster.devices
    kinds = (
        kind.model_copy(update={"count": 1, "price_per_hour": 2.5}),
        kind.model_copy(update={"count": 1, "name": "other"}),
    )
    path = tmp_path / "mixed.json"
    write_file(cluster.model_copy(update={"devices": kinds}), str(path))
    notes = json.loads(run(profile_path, "--cluster", path, "--json").stdout)["notes"]
    assert any("devices differ" in note for note in notes)
    assert any("price_per_hour for other" in note for note in notes)


@pytest.mark.parametrize(
    ("key", "what", "flag"), [("context", "2 context", "--cp"), ("expert", "2 replicas, experts over 2", "--ep")]
)
def test_layouts_whose_devices_share_stand_beside_strategies(
    key: str, what: str, flag: str, profile_path: Path, tmp_path: Path
) -> None:
    """Sequences, or experts: by rows that take a third of the time. As quick as a search's, and as its plan."""
    profile = read_profile(str(profile_path))
    quick = {"forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns"}
    blocks = []
    for each in profile.blocks:
        known = [{name: getattr(row, name) // 3 for name in quick if getattr(row, name)} for row in each.costs]
        for own in known:
            own["backward_ns"] = own["input_grad_ns"] + own["weight_grad_ns"]  # as it is of configurations
        shared = tuple(row.model_copy(update={key: 2} | own) for row, own in zip(each.costs, known, strict=True))
        experts = each.parameters // 2 if key == "expert" else 0
        blocks.append(each.model_copy(update={"costs": (*each.costs, *shared), "expert_parameters": experts}))
    path, plan_path = tmp_path / "shared.json", tmp_path / "plan.json"
    write_file(profile.model_copy(update={"blocks": tuple(blocks)}), str(path))
    asked = "--devices", 2, "--mini-batch", 4
    found = json.loads(run(path, *asked, "--json").stdout)
    *_, last = found["points"]
    assert f"1 stage on {what}" in last["what"]
    ways = {"context": "1xcontext2xshards1", "expert": "2xshards1 with experts over 2"}
    assert set(last["configurations"].values()) == {ways[key]}
    assert any("layouts whose devices share sequences or experts" in note for note in found["notes"])
    run(path, *asked, "--point", last["number"], "-o", plan_path)
    plan = read_plan(str(plan_path))
    assert getattr(plan.stages[0], key) == 2
    assert (plan.predicted.iteration_ns, max(each.peak_bytes for each in plan.predicted.memory)) == (
        last["time_ns"],
        last["memory_bytes"],
    )
    sizes = ("--pp", 1, flag, 2, "--zero", 0, "--recompute", "none", "--deterministic", "-o", plan_path)
    assert CliRunner().invoke(cli, ["search", *map(str, (path, *asked, *sizes))]).exit_code == 0
    assert read_plan(str(plan_path)).predicted.iteration_ns == last["time_ns"]
    restricted = json.loads(run(path, *asked, "--only", "optcnn", "--json").stdout)
    assert set(restricted["points"][-1]["configurations"].values()) == {
        {"context": "places2", "expert": "experts2"}[key]
    }
    plain = json.loads(run(profile_path, *asked, "--json").stdout)["notes"]
    assert not any("share" in note for note in plain)


def test_devices_are_those_asked_for(profile_path: Path) -> None:
    asked = (profile_path, "--devices", 4, "--mode", "profile", "--mini-batch", 4, "--json")
    assert {point["num_devices"] for point in json.loads(run(*asked).stdout)["points"]} == {4}


def test_profiles_that_cannot_be_split_say_what_would_help(profile_path: Path, tmp_path: Path) -> None:
    nameless = shape("k", 4)
    path = tmp_path / "k.json"
    write_file(nameless, str(path))
    refused = run(path, "--devices", 2, fails=UsageError)
    assert "does not say which device" in str(refused.exception)
    whole = read_profile(str(profile_path))
    rows = [
        block.model_copy(update={"costs": tuple(row for row in block.costs if row.shards == 1)})
        for block in whole.blocks
    ]
    write_file(whole.model_copy(update={"blocks": tuple(rows)}), str(path))
    assert "4 of 5 blocks can be split by samples only" in run(path, "--devices", 2, "--json").stdout
    assert "by samples only" not in run(path, "--devices", 2, "--split-level", "operator", "--json").stdout
    assert "by samples only" not in run(profile_path, "--devices", 2, "--json").stdout
    refused = run(path, "--devices", 2, "--memory", "1MB", fails=InfeasibleError)
    assert "profile with --shards 1,2,4, if the model's blocks can be split" in str(refused.exception)
    assert "--split-level operator" in str(refused.exception)


@pytest.mark.parametrize(("heads", "counts"), [(28, "1,2,4,"), (25, None), (0, "1,2,4,8,")])
def test_shards_are_advised_where_heads_allow_them(
    profile_path: Path, tmp_path: Path, heads: int, counts: str | None
) -> None:
    whole, path = read_profile(str(profile_path)), tmp_path / "heads.json"
    blocks = [
        block.model_copy(
            update={
                "costs": tuple(row for row in block.costs if row.shards == 1),
                "dimensions": {"heads": heads} if heads else {},
            }
        )
        for block in whole.blocks
    ]
    write_file(whole.model_copy(update={"blocks": tuple(blocks)}), str(path))
    text = str(run(path, "--devices", 2, "--memory", "1MB", fails=InfeasibleError).exception)
    assert ("--shards" in text) == (counts is not None)
    assert counts is None or f"profile with --shards {counts}" in text
    assert "--split-level operator" in text


def test_any_point_can_be_written(profile_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = (profile_path, "--devices", 2, "--mini-batch", 2)
    points = json.loads(run(*asked, "--json").stdout)["points"]
    result = run(*asked, "--point", 2, "-o", path)
    assert f"point 2 of {len(points)}" in result.stderr
    assert str(path) in result.stderr
    assert "exact" in result.stdout
    plan = read_plan(str(path))
    assert simulate(plan).iteration_ns == points[1]["time_ns"]
    (stage,) = plan.stages
    assert points[1]["configurations"] == dict(zip(stage.blocks, stage.configurations, strict=True))
    refused = run(*asked, "--point", len(points) + 1, fails=UsageError)
    assert f"1 to {len(points)}" in str(refused.exception)


@pytest.mark.parametrize("kind", [(), ("--plans", "--time-limit", "300ms")])
def test_all_points_are_written_by_their_numbers(profile_path: Path, tmp_path: Path, kind: tuple[str, ...]) -> None:
    """Of the points that the same run prints: a search with a time limit may find others the next time."""
    folder = tmp_path / "new" / "points"
    asked = (profile_path, *kind, "--devices", "1,2", "--mini-batch", 2, "--mode", "profile", "--output-all", folder)
    points = json.loads(run(*asked, "--json").stdout)["points"]
    assert {path.name for path in folder.iterdir()} == {f"point-{point['number']}.json" for point in points}
    for point in points:
        plan = read_plan(str(folder / f"point-{point['number']}.json"))
        assert (simulate(plan).iteration_ns, len(plan.devices)) == (point["time_ns"], point["num_devices"])
    assert "of another run" in str(run(*asked, fails=FileError).exception)


def test_what_cannot_be_written_is_said_and_the_rest_is_written(profile_path: Path, tmp_path: Path) -> None:
    asked = (profile_path, "--devices", "1,2", "--mini-batch", 4, "--mode", "profile", "--output-all")
    assert "cannot be made" in str(run(*asked, profile_path / "below", fails=FileError).exception)
    unprofiled = run(*asked, tmp_path, fails=UsageError)  # four samples on one device: the profile has one and two
    assert "1 of 2 points cannot be written as plans, as point 1: " in str(unprofiled.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["point-2.json"]


def test_one_point_has_no_turning_point(profile_path: Path) -> None:
    summary = json.loads(run(profile_path, "--devices", 1, "--json").stdout)
    assert not any(point["turning_point"] for point in summary["points"])


def test_a_frontier_that_a_signal_ended_says_so(profile_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = _api.frontier
    for stopped in (False, True):
        monkeypatch.setattr(_api, "frontier", lambda *given, s=stopped, **how: replace(own(*given, **how), stopped=s))
        said = run(profile_path, "--devices", 1, "--json").stderr
        assert ("pipeplan: interrupted; these are the best points so far" in said) == stopped


@pytest.mark.counted(1e-5)  # what has to be there takes many questions
def test_when_time_runs_out_the_rest_is_proved_roughly(profile_path: Path) -> None:
    summary = json.loads(run(profile_path, "--devices", 2, "--time-limit", "1ns", "--json").stdout)
    assert summary["interrupted"]
    assert summary["points"]
    assert any("ended early" in note for note in summary["notes"])


def test_the_turning_point_is_that_of_all_points_whatever_memory_allows(profile_path: Path) -> None:
    asked = (profile_path, "--devices", 2, "--json")
    points = json.loads(run(*asked).stdout)["points"]
    (turning,) = [point for point in points if point["turning_point"]]
    for limit, left in ((turning["memory_bytes"], 1), (turning["memory_bytes"] - 1, 0)):
        fitting = json.loads(run(*asked, "--memory", f"{limit}B").stdout)["points"]
        assert sum(point["turning_point"] for point in fitting) == left
        assert fitting[-1]["chosen"]


def test_near_points_are_as_near_in_peak_memory_as_they_say(
    profile_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workspace counts where there was time for it; where there was none, that is said beside what was proved."""
    asked = (profile_path, "--devices", 2, "--mini-batch", 2, "--json")
    every = json.loads(run(*asked).stdout)["points"]
    monkeypatch.setattr("pipeplan.planning.frontier.SETTLING_SECONDS", 3600.0)
    near = json.loads(run(*asked, "--tolerance", 0.1).stdout)
    assert 1 <= near["factor"] <= 1.1
    assert near["factor_without"] == []
    for point in every:
        assert any(
            other["memory_bytes"] <= near["factor"] * point["memory_bytes"]
            and other["time_ns"] <= near["factor"] * point["time_ns"]
            for other in near["points"]
        )
    monkeypatch.setattr("pipeplan.planning.frontier.SETTLING_SECONDS", 0.0)
    result = run(*asked, "--tolerance", 0.1)
    hasty = json.loads(result.stdout)
    assert (hasty["exact"], hasty["factor_without"]) == (False, ["workspace"])
    assert 1 <= hasty["factor"] <= 1.1
    assert "workspace apart" in run(*asked[:-1], "--tolerance", 0.1).stdout


def test_grains_that_cannot_be_compared_are_noted(profile_path: Path, tmp_path: Path) -> None:
    """A block's gradients are summed at once, those of its operators one by one."""
    path = tmp_path / "cluster.json"
    write_file(named_cluster("tensoropt", 2), str(path))
    asked = (profile_path, "--cluster", path, "--mini-batch", 2, "--tolerance", 0.1, "--json")
    assert "operators here, for each of 5 blocks there" in run(*asked, "--split-level", "operator").stdout
    assert "not comparable" not in run(*asked).stdout


@pytest.fixture(scope="module")
def mmt_sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same model, profiled for up to so many samples."""
    found = {}
    for most in (4, 16):
        found[most] = tmp_path_factory.mktemp("sizes") / f"{most}.json"
        sizes = [size for size in (1, 2, 4, 8, 16) if size <= most]
        write_file(model("mmt", microbatch_sizes=sizes), str(found[most]))
    return found


def test_nothing_is_exact_where_costs_were_never_profiled(mmt_sizes: dict[int, Path], tmp_path: Path) -> None:
    """The time is between what is said beside it, which is true of the same strategy with that size profiled."""
    asked = ("--devices", 4, "--mini-batch", 64)
    result, known = run(mmt_sizes[4], *asked), json.loads(run(mmt_sizes[16], *asked, "--json").stdout)
    assert "exact" not in result.stdout
    assert "found, not proved" in result.stdout
    assert "16 samples on a device, profiled with 1 to 4" in " ".join(result.stdout.split())
    summary = json.loads(run(mmt_sizes[4], *asked, "--json").stdout)
    assert (summary["exact"], summary["factor"]) == (False, None)
    (there,) = [point for point in known["points"] if set(point["configurations"].values()) == {"samples4"}]
    (point,) = [point for point in summary["points"] if set(point["configurations"].values()) == {"samples4"}]
    low, high = point["bounds_ns"]
    assert low < there["time_ns"] <= high == point["time_ns"]
    assert there["unprofiled"] == ""
    assert there["bounds_ns"] is None
    plan = tmp_path / "plan.json"
    for path, warned in ((mmt_sizes[4], True), (mmt_sizes[16], False)):
        run(path, *asked, "-o", plan)
        told = CliRunner().invoke(cli, ["simulate", str(plan)], catch_exceptions=False)
        assert ("nearest size of the profile: 16 samples on a device, profiled with 1 to 4" in told.stderr) is warned


def test_fewer_samples_than_were_profiled_take_at_most_as_long_as_those(
    mmt_sizes: dict[int, Path], tmp_path: Path
) -> None:
    write_file(model("mmt", microbatch_sizes=[4, 8]), str(tmp_path / "large.json"))
    asked = ("--devices", 4, "--mini-batch", 8, "--json")
    (there,) = json.loads(run(mmt_sizes[4], *asked).stdout)["points"]
    (point,) = json.loads(run(tmp_path / "large.json", *asked).stdout)["points"]
    assert point["configurations"] == there["configurations"]
    low, high = point["bounds_ns"]
    assert low == point["time_ns"] < there["time_ns"] < high


def test_what_is_exact_is_so_at_profiled_sizes(mmt_sizes: dict[int, Path]) -> None:
    result = run(mmt_sizes[4], "--devices", 4, "--mini-batch", 16)
    assert "exact at profiled sizes" in result.stdout
    summary = json.loads(run(mmt_sizes[4], "--devices", 4, "--mini-batch", 16, "--json").stdout)
    assert (summary["exact"], summary["profiled_only"]) == (True, True)
    assert not any(point["unprofiled"] for point in summary["points"])


@pytest.mark.slow
def test_operators_are_not_exact_beyond_profiled_sizes_either(mmt_sizes: dict[int, Path]) -> None:
    asked = ("--devices", 2, "--mini-batch", 64, "--split-level", "operator", "--tolerance", "0.5")
    result = run(mmt_sizes[4], *asked)
    assert "exact" not in result.stdout
    assert "proved within" not in result.stdout
    text = " ".join(result.stdout.split())
    assert re.search(r"[\d.]+ms \([\d.]+ms to [\d.]+ms\)", text)
    known = json.loads(run(mmt_sizes[16], *asked[:2], "--mini-batch", 32, *asked[4:], "--json").stdout)["points"]
    found = json.loads(run(mmt_sizes[4], *asked[:2], "--mini-batch", 32, *asked[4:], "--json").stdout)["points"]
    same = [
        (point, there)
        for point in found
        for there in known
        if point["unprofiled"] and point["configurations"] == there["configurations"]
    ]
    assert same
    for point, there in same:
        low, high = point["bounds_ns"]
        assert low <= there["time_ns"] <= high
        assert low <= point["time_ns"] <= high


def test_there_is_no_upper_end_where_the_profile_shows_that_time_grows_faster(
    mmt_sizes: dict[int, Path], tmp_path: Path
) -> None:
    """Four samples take three times as long as two: sixteen may take any time, but no less than four."""
    profile = read_profile(str(mmt_sizes[4]))

    def steep(row: CostRow) -> CostRow:
        times = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns")
        longer = {name: None if (ns := getattr(row, name)) is None else 3 * ns for name in times}
        return row.model_copy(update=longer) if row.microbatch_size == 4 else row

    blocks = tuple(block.model_copy(update={"costs": tuple(map(steep, block.costs))}) for block in profile.blocks)
    write_file(profile.model_copy(update={"blocks": blocks}), str(tmp_path / "steep.json"))
    asked = ("--devices", 4, "--mini-batch", 64)
    text = " ".join(run(tmp_path / "steep.json", *asked).stdout.split())
    assert re.search(r"ms \(at least [\d.]+m?s\)", text)
    assert "no upper end where the profile's own times grow faster than in proportion" in text
    points = json.loads(run(tmp_path / "steep.json", *asked, "--json").stdout)["points"]
    ends = [point["bounds_ns"] for point in points if point["unprofiled"]]
    assert ends
    assert all(low > 0 and high is None for low, high in ends)
