"""Kinds of devices with profiles of their own: what a search finds on them, what it says, and what it refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import pipeplan
from builders.kinds import MINI_BATCH, TIMES, asked_of_kinds, changed, cluster_of_kinds, drawn
from builders.profiles import uneven_chain
from builders.requests import request_of
from pipeplan.checker import check
from pipeplan.cli.main import cli
from pipeplan.costs import build_workload
from pipeplan.costs import kinds as costs_of_kinds
from pipeplan.costs.kinds import for_kinds, levelled, on_kinds
from pipeplan.costs.launches import with_launches
from pipeplan.costs.throughput import Yardstick
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, PlacedStage, Placement, Plan, Profile, Source, to_json
from pipeplan.planning.request import Batch, Request, input_notes
from pipeplan.planning.steps import search_plan
from pipeplan.simulator.recost import recosted, relinked
from references.unlike_devices import Kind
from support.layouts import FIXED, require_best, require_rows_below_plans
from support.marks import one_in, slow_but


def slowed(profile: Profile, factor: int) -> Profile:
    """Every time so many times as long."""
    return changed(profile, lambda row: {key: ns * factor for key in TIMES if (ns := getattr(row, key)) is not None})


def compare(seed: int, most_blocks: int, most_devices: int) -> None:
    """The iteration found is that of the best layout, no bound is above it, and ``check`` accepts the plan."""
    request, best = asked_of_kinds(seed, most_blocks, most_devices, own_profiles=True)
    if best is not None:
        check(require_best(request, best), request.profile, request.cluster).require()


@slow_but("seed", range(10), lambda seed: seed < 4, lambda seed: seed >= 6)
def test_search_finds_the_best_of_all_layouts(seed: int) -> None:
    compare(seed, 4, 3)


@slow_but("seed", range(100, 116), lambda _: False, lambda seed: seed >= 103)
def test_search_finds_the_best_of_more_layouts(seed: int) -> None:
    compare(seed, 5, 4)


@one_in(2, "seed", range(200, 208))
def test_no_row_of_the_table_is_bounded_above_its_plans(seed: int) -> None:
    """Of every uniform layout, cut for the levelled profile and run by the profiles of its devices."""
    request, _ = asked_of_kinds(seed, 4, 3, own_profiles=True)
    require_rows_below_plans(request)


@slow_but("factor, speed", [(2, "0.5"), (4, "0.25")], lambda each: each[0] == 2)
def test_a_profile_that_is_the_first_times_a_factor_is_a_speed(factor: int, speed: str) -> None:
    """The same stages at the same times, and the same bound."""
    profile = uneven_chain(7, 4, (1, 2))
    found = []
    for kinds, others in (
        ([Kind(2, "1", 250), Kind(2, speed, 100)], {}),
        ([Kind(2, "1", 250), Kind(2, "1", 100)], {"kind1": slowed(profile, factor)}),
    ):
        cluster = cluster_of_kinds(*kinds)
        joint = for_kinds(profile, others, cluster)
        result = search_plan(request_of(joint, "auto", Batch(MINI_BATCH, 1), 4, cluster=cluster, **FIXED))
        stages = [(stage.blocks, stage.devices, stage.shards, stage.recompute) for stage in result.plan.stages]
        times = [operation.duration_ns for operation in result.plan.operations]
        found.append((stages, times, result.plan.starts_ns, result.lower_bound_ns))
    assert found[0] == found[1]


def test_cuts_suit_the_profiles() -> None:
    """Where one kind is slow in the first half of the model only, the other has that."""
    row = CostRow(microbatch_size=1, forward_ns=1000, backward_ns=2000, activation_bytes=1)
    profile = Profile.of("halves", [Block(id=f"b{index}", operator="layer", costs=(row,)) for index in range(8)])
    slow = {f"b{index}" for index in range(4)}
    other = profile.model_copy(
        update={"blocks": tuple(b if b.id not in slow else slowed(profile, 9).by_id[b.id] for b in profile.blocks)}
    )
    for name in ("kind0", "kind1"):
        cluster = cluster_of_kinds(Kind(1, "1", None), Kind(1, "1", None))
        joint = for_kinds(profile, {name: other}, cluster)
        plan = search_plan(request_of(joint, "auto", Batch(64, 1), 2, cluster=cluster, **FIXED)).plan
        assert {stage.kinds: len(stage.blocks) for stage in plan.stages} == {("kind0",): 4, ("kind1",): 4}
        first = plan.stages[0]
        assert set(first.blocks) == slow
        assert first.kinds != (name,)


@pytest.mark.slow
def test_frontiers_of_plans_take_profiles_of_kinds(tmp_path: Path) -> None:
    """The same in Python; on the first device alone, which is of one kind, too. A frontier of one stage has none."""
    profile = uneven_chain(3, 3, (1, 2))
    other, cluster = drawn(profile, 3, sizes=False), cluster_of_kinds(Kind(1, "1", None), Kind(1, "1", None))
    path = {name: str(tmp_path / f"{name}.json") for name in ("p", "q", "c")}
    for name, file in (("p", profile), ("q", other), ("c", cluster)):
        Path(path[name]).write_text(to_json(file))
    flags = ["frontier", path["p"], "--cluster", path["c"], "--profile-for", f"kind1={path['q']}", "--json"]
    asked = ["--devices", "1,2", "--mini-batch", "2", "--time-limit", "100ms", "--deterministic", "--plans"]
    done = CliRunner().invoke(cli, [*flags, *asked])
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    points = json.loads(done.stdout)["points"]
    assert {each["num_devices"] for each in points} == {1, 2}
    how: dict[str, Any] = {"mini_batch": 2, "time_limit": 0.1, "deterministic": True}
    found = pipeplan.frontier(profile, cluster=cluster, profile_for={"kind1": other}, devices=[1, 2], plans=True, **how)
    assert [each.time_ns for each in found.points] == [each["time_ns"] for each in points]
    for number, each in enumerate(found.points, 1):
        plan = found.plan(number)
        assert plan.num_devices == each.num_devices
        assert pipeplan.check(plan, profile=profile, profile_for={"kind1": other}, cluster=cluster).valid
    best = pipeplan.search(profile, cluster=cluster, profile_for={"kind1": other}, **how)
    assert min(each.time_ns for each in found.points) <= best.plan.predicted.iteration_ns
    alone = CliRunner().invoke(cli, flags)
    assert isinstance(alone.exception, UsageError)
    assert "--profile-for is for pipelines, not for a single stage; add --plans" in str(alone.exception)


@pytest.fixture(scope="module")
def mixed() -> tuple[Request, Plan]:
    """A plan on two kinds of devices with profiles of their own, and what was asked."""
    profile, cluster = uneven_chain(3, 4, (1, 2)), cluster_of_kinds(Kind(1, "1", None), Kind(1, "1", None))
    joint = for_kinds(profile, {"kind1": drawn(profile, 3, sizes=True)}, cluster)
    request = request_of(joint, "auto", Batch(6, 1), 2, cluster=cluster, **FIXED)
    return request, search_plan(request).plan


def test_a_stage_on_several_kinds_takes_what_the_slowest_does() -> None:
    """Block by block and row by row, of times and of sizes."""
    profile = uneven_chain(1, 3, (1, 2))
    other = drawn(profile, 1, sizes=True)
    cluster = cluster_of_kinds(Kind(1, "1", None), Kind(1, "1", None))
    joint = for_kinds(profile, {"kind1": other}, cluster)
    ids = tuple(block.id for block in profile.blocks)
    stage = PlacedStage(blocks=ids, devices=(0, 1), shards=1, replicas=2)
    placement = Placement(strategy="by-hand", num_devices=2, stages=(stage,))
    workload = build_workload(joint, placement, num_microbatches=2, microbatch_size=2, cluster=cluster)
    rows = [
        [next(row for row in block.costs if row.key[:2] == (1, 1)) for block in own]
        for own in zip(profile.blocks, other.blocks, strict=True)
    ]
    assert workload.stages[0].kinds == ("kind0", "kind1")
    forward, backward = workload.operations
    assert forward.duration_ns == sum(max(row.forward_ns for row in own) for own in rows)
    assert backward.duration_ns == sum(max(row.whole_backward_ns for row in own) for own in rows)
    assert forward.workspace_bytes == max(row.workspace_bytes for own in rows for row in own)
    assert any(len({row.forward_ns for row in own}) > 1 for own in rows)


def test_plans_are_checked_and_timed_again(mixed: tuple[Request, Plan]) -> None:
    """By the checker's own arithmetic; other kinds, other profiles and one of them alone are not theirs."""
    request, plan = mixed
    joint, cluster = request.profile, request.cluster
    assert cluster is not None
    assert {stage.kinds for stage in plan.stages} == {("kind0",), ("kind1",)}
    assert set(plan.provenance.profiles) == {"kind1"}
    check(plan, joint, cluster).require()
    for again in (recosted(plan, joint, cluster), recosted(plan, joint, None)):
        assert [each.duration_ns for each in again.operations] == [each.duration_ns for each in plan.operations]
        assert [each.kinds for each in again.stages] == [each.kinds for each in plan.stages]
    assert relinked(plan, cluster).operations == plan.operations
    alone = joint.with_kinds({})
    assert "--profile-for kind1=FILE" in str(check(plan, alone, cluster).problems[0])
    with pytest.raises(UsageError, match="--profile-for kind1=FILE"):
        recosted(plan, alone, cluster)
    other = joint.with_kinds({"kind1": slowed(joint.of_kinds["kind1"], 2)})
    assert "provenance.profiles.kind1.sha256" in str(check(plan, other, cluster).problems[0])
    assert len(check(plan, other, cluster).problems) > 1
    turned = tuple(replace(stage, kinds=("kind0",)) for stage in plan.stages)
    lies = plan.model_copy(update={"stages": turned})
    assert {"cluster", "profile"} <= {each.rule for each in check(lies, joint, cluster).problems}
    with pytest.raises(UsageError, match=r"is on devices called kind\d, in cluster 'unlike' they are kind\d"):
        relinked(plan, cluster_of_kinds(Kind(2, "1", None)))


def test_what_was_used_is_said(mixed: tuple[Request, Plan]) -> None:
    """Of which kind which file, before the search; and whose numbers they are, in the plan."""
    request, plan = mixed
    assert any("1 kind0 by" in note and "1 kind1 by" in note for note in input_notes(request))
    text = plan.model_dump_json()
    assert '"kinds":["kind1"]' in text
    assert '"profiles":{"kind1":{"sha256":' in text


def test_the_share_of_the_peak_is_of_the_devices_there_are(mixed: tuple[Request, Plan]) -> None:
    """An H100 has about three times an A100's; where one is not known, neither is the share."""
    request, _ = mixed
    flops = {"tokens_per_sample": 1, "forward_flops_per_sample": 10**12}
    base = request.profile.model_copy(
        update={**flops, "source": Source(method="estimated", device="h100-80gb", dtype="bfloat16")}
    )

    def share(device: str) -> float | None:
        source = Source(method="estimated", device=device, dtype="bfloat16")
        own = base.model_copy(update={"source": source})
        made = search_plan(replace(request, profile=base.with_kinds({"kind1": own}))).plan
        rates = Yardstick.of_plan(made).throughput(6, 10**9, sum(made.device_speeds))
        return rates.model_flops_utilisation

    alike, half, unknown = share("h100-80gb"), share("a100-80gb"), share("my-own")
    assert alike is not None
    assert half is not None
    assert half / alike == pytest.approx(2 * 989.4 / (989.4 + 312))
    assert unknown is None


def test_levelled_rows_are_below_every_kind(mixed: tuple[Request, Plan]) -> None:
    """At its speed; and launches are in all of them."""
    request, _ = mixed
    assert request.cluster is not None
    profile = with_launches(request.profile, 7)
    joint, cluster = levelled(profile, request.cluster, 2)
    for name, speed in zip(cluster.names, cluster.speeds, strict=True):
        own = profile.of_kinds.get(name, profile)
        for block in joint.blocks:
            for row in block.costs:
                (other,) = (each for each in own.by_id[block.id].costs if each.key == row.key)
                assert row.forward_ns <= other.forward_ns * speed
                assert row.activation_bytes <= other.activation_bytes
    assert on_kinds(profile, ("kind1",)).blocks[0].costs[0].forward_ns == (
        request.profile.of_kinds["kind1"].blocks[0].costs[0].forward_ns + 7
    )


def _without_a_row(profile: Profile) -> Profile:
    first, *others = profile.blocks
    return profile.model_copy(update={"blocks": (first.model_copy(update={"costs": first.costs[:-1]}), *others)})


@pytest.mark.parametrize(
    ("name", "other", "text"),
    [
        ("kind7", lambda p: p, r"cluster 'unlike' has devices called 'kind0', 'kind1'; give one"),
        ("kind1", lambda p: uneven_chain(3, 3, (1, 2)), r"not of the model of .*: it has 3 blocks, there 4 blocks"),
        ("kind1", _without_a_row, r"block 'b0' has no costs in .* for \d samples, \d shards"),
        ("kind1", lambda p: p.model_copy(update={"edges": p.edges[1:]}), r"edges are others"),
        (
            "kind1",
            lambda p: p.model_copy(
                update={"blocks": (p.blocks[0].model_copy(update={"parameter_bytes": 77}), *p.blocks[1:])}
            ),
            r"block 'b0' has parameter_bytes 77, there",
        ),
    ],
)
def test_profiles_of_other_models_are_refused(name: str, other: Callable[[Profile], Profile], text: str) -> None:
    profile = uneven_chain(3, 4, (1, 2))
    with pytest.raises(UsageError, match=text):
        for_kinds(profile, {name: other(profile)}, cluster_of_kinds(Kind(1, "1", None), Kind(1, "1", None)))


def test_speeds_beside_profiles_are_refused() -> None:
    """Which of both would be meant nobody knows."""
    profile = uneven_chain(3, 4, (1, 2))
    with pytest.raises(UsageError, match=r"called 'kind0' have speed 0.5 .* leave out its speed and give its"):
        for_kinds(profile, {"kind1": profile}, cluster_of_kinds(Kind(1, "0.5", None), Kind(1, "1", None)))


def test_the_command_line_and_python(tmp_path: Path) -> None:
    """search, check and simulate take it; the same plan from both."""
    profile = uneven_chain(3, 4, (1, 2))
    other, cluster = drawn(profile, 3, sizes=False), cluster_of_kinds(Kind(1, "1", None), Kind(1, "1", None))
    path = {name: str(tmp_path / f"{name}.json") for name in ("p", "q", "c", "plan")}
    for name, file in (("p", profile), ("q", other), ("c", cluster)):
        Path(path[name]).write_text(to_json(file))

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, list(arguments))
        return result.exit_code, f"{result.output}{result.exception or ''}"

    how = "--cluster", path["c"], "--profile-for", f"kind1={path['q']}"
    asked_for = "--mini-batch", "6", "--time-limit", "100ms", "--deterministic"
    code, said = run("search", path["p"], *how, *asked_for, "-o", path["plan"])
    assert code == 0, said
    plan = pipeplan.read_plan(path["plan"])
    assert {stage.kinds for stage in plan.stages} == {("kind0",), ("kind1",)}
    again = pipeplan.search(
        path["p"], cluster=path["c"], profile_for={"kind1": path["q"]}, mini_batch=6, time_limit=0.1, deterministic=True
    )
    assert again.plan.stages == plan.stages
    assert run("check", path["plan"], "--profile", path["p"], *how)[0] == 0
    assert run("simulate", path["plan"], "--profile", path["p"], *how)[0] == 0
    assert pipeplan.check(plan, profile=path["p"], profile_for={"kind1": other}).valid
    assert not pipeplan.check(plan, profile=path["p"]).valid
    for arguments, text in (
        (("search", path["p"], *how[:2], "--profile-for", "kind1", *asked_for), "write KIND=FILE"),
        (("search", path["p"], *how[2:], "--devices", "2", *asked_for), "give --cluster, too"),
        (("search", path["p"], *how, *how[2:], *asked_for), "kind1 is there twice"),
        (("check", path["plan"], *how[2:]), "--profile-for is beside --profile"),
    ):
        code, said = run(*arguments)
        assert code != 0
        assert text in said


@pytest.mark.parametrize("seed", range(30))
def test_speeds_are_the_ratio_of_a_block_by_which_work_takes_longest(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By exact sums over all blocks, the first of equals."""
    draw = random.Random(seed)
    names, count = [f"kind {number}" for number in range(draw.choice([2, 3]))], draw.randint(1, 12)
    times: dict[str, Any] = {name: [draw.choice([0, 5, draw.randint(1, 99)]) for _ in range(count)] for name in names}
    numbers = {name: draw.randint(1, 4) for name in names}
    monkeypatch.setattr(costs_of_kinds, "_times_of", lambda own: own)
    each = [*zip(*times.values(), strict=True)]
    tried = [own for own in [*each, tuple(map(sum, times.values()))] if all(own)]
    ratios = [[Fraction(repr(own[0] / ns)) for ns in own] for own in tried or [(1,) * len(names)]]

    def longest(speeds: Any) -> Fraction:
        work = sum((min(speed * ns for speed, ns in zip(speeds, own, strict=True)) for own in each), Fraction(0))
        return work / sum((speed * number for speed, number in zip(speeds, numbers.values(), strict=True)), Fraction(0))

    assert costs_of_kinds._speeds(times, numbers) == dict(zip(names, map(float, max(ratios, key=longest)), strict=True))


def test_speeds_of_many_unlike_blocks_take_few_exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ratio against each block, in fractions, took minutes for ten thousand."""
    draw, products = random.Random(1), [0]

    def mul(one: Any, other: Any) -> Any:
        products[0] += 1
        return one * other

    times: dict[str, Any] = {name: [draw.randint(1, 10**6) for _ in range(1_500)] for name in ("one", "other")}
    monkeypatch.setattr(costs_of_kinds, "_times_of", lambda own: own)
    monkeypatch.setattr(costs_of_kinds, "mul", mul)
    costs_of_kinds._speeds(times, {"one": 2, "other": 3})
    assert products[0] <= 20 * 1_500
