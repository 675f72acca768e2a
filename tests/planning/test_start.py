"""A plan to start from: what is found is never longer, and it is refused where it is not what is asked for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipeplan as face
from builders.chains import chain_profile
from pipeplan import Plan, UsageError
from pipeplan.files import parse, read_plan, read_profile, to_json
from pipeplan.planning.bounds import request_bound
from pipeplan.planning.request import Request
from pipeplan.planning.start import _tried
from pipeplan.planning.steps import STEPS, search_plan
from pipeplan.units import format_ns
from support.commands import pipeplan
from support.marks import slow_but
from support.paths import ROOT

pytestmark = pytest.mark.counted

PROFILE = ROOT / "profiles/gpt2-345m-cpu.json"


def imported(source: str, **flags: Any) -> Plan:
    return face.import_plan(source, "megatron", PROFILE, microbatch_size=1, microbatches=8, **flags).plan


@slow_but("seed", range(6), lambda seed: seed < 1)
def test_what_is_found_is_never_longer(seed: int) -> None:
    """Nothing else is looked at but that plan, and then it is what is found; with all steps it is no longer."""
    rng = random.Random(seed)
    profile = chain_profile(6, split=(1, 2)).model_copy(update={"placement": None})
    scheduler = rng.choice(["gpipe", "1f1b", "zb-h1"])
    start = face.search(profile, devices=3, microbatches=6, scheduler=scheduler, placement="one-to-one").plan
    request = Request.of(profile, devices=3, num_microbatches=6, start=start, deterministic=True, time_limit=0.5)
    alone = search_plan(request, steps=[step for step in STEPS if step.name in ("start plan", "look at candidates")])
    assert alone.plan.predicted.iteration_ns <= start.predicted.iteration_ns
    found = search_plan(request)
    assert found.plan.predicted.iteration_ns <= start.predicted.iteration_ns
    assert found.lower_bound_ns <= found.plan.predicted.iteration_ns
    assert any("the plan of --start" in note for note in found.notes)


def test_the_plan_itself_comes_back_where_there_is_no_time() -> None:
    """Its stages, order and times, from the first step; devices and mini-batch are its own."""
    start = imported("Et*6|t*6|t*6|t*6L")
    result = face.search(PROFILE, start=start, placement=start.placed, deterministic=True, time_limit=0.01)
    assert result.plan.mini_batch == start.mini_batch
    assert result.plan.predicted.iteration_ns <= start.predicted.iteration_ns
    assert [stage.blocks for stage in result.plan.stages] == [stage.blocks for stage in start.stages]


def slowed(row: face.CostRow) -> face.CostRow:
    return row.model_copy(update={"forward_ns": 3 * row.forward_ns})


def test_times_are_the_profile_s_and_not_the_plan_s() -> None:
    profile = chain_profile(4).model_copy(update={"placement": None})
    start = face.search(profile, devices=2, microbatches=4).plan
    slower = profile.model_copy(
        update={
            "blocks": tuple(
                block.model_copy(update={"costs": tuple(map(slowed, block.costs))}) for block in profile.blocks
            )
        }
    )
    found = face.search(slower, start=start, time_limit=1, deterministic=True)
    assert found.plan.predicted.iteration_ns > start.predicted.iteration_ns
    assert face.check(found.plan, profile=slower).valid


@pytest.mark.slow
@pytest.mark.long
def test_one_that_does_not_fit_is_said() -> None:
    start = imported("Et*6|t*6|t*6|t*6L")
    most = max(memory.peak_bytes for memory in start.predicted.memory)
    found = face.search(PROFILE, start=start, memory=most - 1, time_limit=2, deterministic=True)
    assert any("more than there is: the search does not start from it" in note for note in found.notes)
    assert max(memory.peak_bytes for memory in found.plan.predicted.memory) < most


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"devices": 8}, "devices=8 is asked for, and the plan has 4"),
        ({"mini_batch": 16}, "mini_batch=16 is asked for, and the plan has 8"),
        ({"scheduler": "1f1b"}, "scheduler='?1f1b'? is asked for"),
        ({"placement": "v-shape"}, "placement='?v-shape'? is asked for"),
        ({"microbatch_size": 2}, "microbatch_size=2 is asked for, and the plan has 1"),
        ({"tp": 2}, "--tp|tp"),
        ({"replicas": 2}, "replicas"),
        ({"pp": 2}, "pp=2 is asked for, and the plan has 4"),
        ({"zero": 1}, "zero"),
    ],
)
def test_what_is_asked_for_otherwise_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        face.search(PROFILE, start=imported("Et*6|t*6|t*6|t*6L"), time_limit=1, deterministic=True, **flags)


def test_stages_of_a_profile_are_its_plans_own() -> None:
    """What a profile's placement leaves open may be anything; other stages are refused."""
    profile = chain_profile(3)
    assert profile.placement is not None
    how: dict[str, Any] = {"deterministic": True, "time_limit": 0.5}
    start = face.search(profile, microbatches=6, **how).plan
    found = face.search(profile, start=start, **how).plan
    assert found.predicted.iteration_ns <= start.predicted.iteration_ns
    stages = profile.placement.stages
    turned = tuple(
        stage.model_copy(update={"devices": other.devices}) for stage, other in zip(stages, stages[::-1], strict=True)
    )
    placement = profile.placement.model_copy(update={"stages": turned})
    with pytest.raises(UsageError, match="other stages than the plan's are asked for"):
        face.search(profile, start=start, placement=placement, **how)


def test_a_plan_of_another_profile_is_refused() -> None:
    with pytest.raises(UsageError, match="the plan does not place profile 'gpt2-124m'"):
        face.search(
            ROOT / "profiles/gpt2-124m-cpu.json", start=ROOT / "plans/tessel-v.json", time_limit=1, deterministic=True
        )


def test_what_cannot_be_timed_anew_is_refused() -> None:
    sliced = ROOT / "plans/tessel-mt5-1.8b-v100-32gb.json"
    with pytest.raises(UsageError, match="runs forwards in parts"):
        face.search(
            ROOT / "profiles/tessel-mt5-1.8b-v100-32gb.json",
            start=sliced,
            placement="auto",
            time_limit=1,
            deterministic=True,
        )


def test_the_verb_says_what_it_gained(tmp_path: Path) -> None:
    today, better = tmp_path / "today.json", tmp_path / "better.json"
    flags = ("--profile", PROFILE, "--microbatch-size", "1", "--microbatches", "8")
    assert pipeplan("import", "Et*6|t*6|t*6|t*6L", "--from", "megatron", *flags, "-o", today).returncode == 0
    done = pipeplan("search", PROFILE, "--start", today, "--time-limit", "2s", "--json", "-o", better)
    assert done.returncode == 0, done.stderr
    start = json.loads(today.read_text())["predicted"]["iteration_ns"]
    assert json.loads(done.stdout)["iteration_ns"] <= start
    assert "shorter than the plan of --start, which takes" in done.stderr
    assert pipeplan("check", better, "--profile", PROFILE).returncode == 0


@pytest.mark.parametrize(
    ("form", "source", "heading"),
    [
        ("megatron", "Et*6|t*6|t*6|t*6L", "as Megatron-LM runs it"),
        ("layers", "6,6,6,6", "1f1b on the stages of the layer list"),
    ],
)
def test_what_another_tool_runs_says_what_improves_it(
    form: str, source: str, heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was left open, so it is not optimal: its bound is that of a search that starts from it.

    No flag is named that an import has not.
    """
    today, sizes = str(tmp_path / "today.json"), ("--microbatches", "8", "--microbatch-size", "1")
    flags = ("--from", form, "--profile", str(PROFILE), *sizes)
    monkeypatch.setenv("COLUMNS", "300")
    said = pipeplan("import", source, *flags, "-o", today).stdout
    assert said.startswith(f"gpt2-345m: {heading}, for 4 devices\n")
    hint = "a plan that is never slower; --for TOOL keeps it to what one runs"
    assert f"\nnext    pipeplan search {PROFILE} --start {today}: {hint}\n" in said
    assert {*re.findall(r"^ {8}(--[a-z-]+)", said, re.MULTILINE)} <= {"--memory", "--microbatches"}
    kept = pipeplan("import", source, *flags).stdout
    assert "\nnext    -o plan.json: writes the plan, for pipeplan search --start to improve" in kept
    (bound,) = re.findall(r"^bound +(\S+) for any plan on these devices \([0-9.]+% away\) *$", said, re.MULTILINE)
    opened = Request.of(read_profile(str(PROFILE)), start=read_plan(today))
    assert bound == format_ns(request_bound(opened))


def test_a_folded_plan_is_timed_by_its_own_orders_however_it_was_folded() -> None:
    """As plans were folded whose idle devices were programs of as many players as the others."""
    profile = face.example("gpt2-345m", device="h100-80gb", microbatch=(1, 2))
    cluster = face.example_cluster("cluster-h100", devices=128)
    asked: dict[str, Any] = {"cluster": cluster, "mini_batch": 128, "deterministic": True}
    found = face.search(profile, pp=2, dp=32, devices=128, time_limit=0.2, scheduler="1f1b", **asked).plan
    number = next(number for number, own in enumerate(found.players) if own.count == 64)
    idle = found.players[number]
    halves = [replace(idle, first=idle.first + begin, counts=(32,)) for begin in (0, 32)]

    def twice(values: Sequence[Any]) -> tuple[Any, ...]:
        return (*values[: number + 1], *values[number:])

    players = (*found.players[:number], *halves, *found.players[number + 1 :])
    memory = found.predicted.model_copy(update={"memory": twice(found.predicted.memory)})
    changes = {"players": players, "predicted": memory, "devices": twice(found.devices)}
    odd = parse(to_json(found.model_copy(update=changes | {"programs": twice(found.programs)})), Plan)
    request = Request.of(profile, devices=128, start=odd, **asked)
    trial, schedule = _tried(request, odd, STEPS)
    assert schedule is not None
    assert schedule.iteration_ns == found.predicted.iteration_ns
    assert trial.ways[0].players == schedule.workload.players
