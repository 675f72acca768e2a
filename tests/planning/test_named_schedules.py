"""A named schedule, or a rules file, is run as its paper has it, unless slices or a split backward are asked for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.profiles import joined, profile_of
from pipeplan.errors import PipeplanError, UsageError
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import Block, CostRow, Edge, Profile, read_profile
from pipeplan.planning.build_plan import Result
from pipeplan.planning.comparison import OURS, compare
from pipeplan.planning.next_steps import next_steps
from pipeplan.planning.request import Request
from pipeplan.planning.steps import STEPS, EvenCut, search_plan
from pipeplan.planning.trials import PlanSearch
from pipeplan.planning.tuning import tune
from pipeplan.reporting.answer import print_answer
from pipeplan.reporting.terminal import print_simulation
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.rules.language import named_rules, parse_rules, shipped_rules, to_toml
from pipeplan.schedule.rules.sweep import built_in_rules
from pipeplan.simulator.simulation import simulate
from pipeplan.time_limit import Limit
from pipeplan.workload.workload import Workload

pytestmark = pytest.mark.counted

GPT2 = Path(__file__).parents[2] / "profiles" / "gpt2-345m-cpu.json"
OPEN: dict[str, Any] = {"num_parted": None, "split_backward": None}
ONE_LINE = parse_rules('in_flight = "D - d"', "one line")


def found(profile: Profile, scheduler: str = "auto", placement: str = "auto", **others: Any) -> Result:
    options = {"time_limit": 1.0, "deterministic": True, "devices": 4, "num_microbatches": 8, **others}
    return search_plan(Request.of(profile, placement=placement, scheduler=scheduler, **options))


def shaped(name: str) -> Profile:
    """Costs of both ways of running backward; whole ones take longer than their parts, so that auto would split."""
    costs = ShapeCosts(100, None, 100, 100, comm_ns=10, activation_bytes=2000, weight_grad_bytes=1000)
    profile = shape(name, 4, costs=costs)
    blocks = tuple(
        block.model_copy(
            update={"costs": tuple(row.model_copy(update={"backward_ns": row.forward_ns * 3}) for row in block.costs)}
        )
        for block in profile.blocks
    )
    return profile.model_copy(update={"blocks": blocks})


SHAPES = {
    **dict.fromkeys(("interleaved-1f1b", "interleaved-zb", "looped-bfs"), "circular"),
    **dict.fromkeys(("zb-v", "v-half", "v-min", "dualpipe-v", "hanayo"), "zbv"),
    "chimera": "x",
    "1f1b+": "nn",
}


@pytest.mark.parametrize("name", CLASSIC)
def test_a_named_schedule_slices_nothing_and_splits_backward_only_by_its_definition(name: str) -> None:
    profile = shaped(SHAPES.get(name, "v"))
    assert Request.of(profile, scheduler=name).num_parted == 0
    result = found(profile, name, devices=None)
    workload, figures = result.schedule.workload, result.figures()
    by_definition = name.startswith(("zb-", "v-", "dualpipe", "interleaved-zb"))
    assert workload.splits_backward is figures["split_backward"] is by_definition
    assert figures["scheduler"] == name
    assert figures["sliced_microbatches"] == 0
    options = result.plan.provenance.options
    assert (options["backward"], options["sliced_microbatches"]) == ("split" if by_definition else "whole", 0)


@pytest.mark.parametrize("placement", ["one-to-one", "circular", "v-shape"])
def test_one_edge_more_than_a_chain_leaves_the_schedules_of_graphs(placement: str) -> None:
    """Each is a row of compare, and a search of its own; what waves and both ways need is said."""
    chain = shape("v", 8, costs=ShapeCosts(100, None, 100, 100, comm_ns=10))
    first, last = chain.blocks[0].id, chain.blocks[-1].id
    skipped = chain.model_copy(
        update={"placement": None, "edges": (*chain.edges, Edge(source=first, target=last, bytes_per_sample=10))}
    )
    options = {"time_limit": 0.3, "deterministic": True, "num_microbatches": 8}
    compared = compare(Request.of(skipped, devices=4, placement=placement, **options))
    named = {row.schedule for row in compared.rows} - {OURS}
    expected = {
        "one-to-one": {"gpipe", "1f1b", "zb-h1", "zb-h2", "kfkb", "greedy"},
        "circular": {"gpipe", "interleaved-1f1b", "interleaved-zb", "looped-bfs", "greedy"},
        "v-shape": {"gpipe", "greedy"},
    }
    assert named == expected[placement]
    why = {absent.schedule: absent.why for absent in compared.missing}
    parted = "it needs a chain of stages, and forwards of stage 0 go on to stages 1 and "
    chained = {"zb-1p", "zb-2p", "zb-auto", "zb-v", "v-half", "v-min", "dualpipe-v", "hanayo", "chimera"}
    assert {name for name, reason in why.items() if reason.startswith(parted)} == chained, "whatever the placement"
    for name in named:
        result = found(skipped, name, placement)
        assert result.plan.provenance.scheduler == name


def test_one_line_of_rules_is_1f1b_as_its_paper_has_it() -> None:
    profile = read_profile(str(GPT2))
    same = {"placement": "one-to-one", "microbatch_size": 2}
    ours = found(profile, "1f1b", **same)
    whole = found(profile, "1f1b", **same, num_parted=0, split_backward=False)
    assert ours.plan.programs == whole.plan.programs
    assert ours.plan.predicted.makespan_ns == 157_397_446_844  # whole: 8 forwards and backwards of the longest stage
    for rules in (ONE_LINE, named_rules("1f1b")):
        by_rules = found(profile, "rules", **same, rules=rules)
        assert by_rules.plan.predicted.makespan_ns == ours.plan.predicted.makespan_ns
        assert not by_rules.schedule.workload.splits_backward


def test_what_is_asked_for_goes_before_the_definition(capsys: pytest.CaptureFixture[str]) -> None:
    profile = read_profile(str(GPT2))
    open_, kept = (
        found(profile, "1f1b", placement="one-to-one", microbatch_size=2, **asked)
        for asked in (OPEN, {"num_parted": 2})
    )
    assert open_.plan.predicted.makespan_ns < kept.plan.predicted.makespan_ns < 157_397_446_844
    assert (open_.figures()["split_backward"], kept.figures()["split_backward"]) == (True, False)
    assert kept.figures()["sliced_microbatches"] == kept.plan.provenance.options["sliced_microbatches"] == 2
    request = Request.of(profile, devices=4, num_microbatches=8)
    for result, split in ((open_, True), (kept, False)):
        print_simulation(simulate(result.plan), width=120)
        heading = " ".join(capsys.readouterr().out.splitlines()[:2])
        print_answer(request, result, simulate(result.plan))
        plan = " ".join(capsys.readouterr().out.splitlines()[1:3])
        for line in (heading, plan):
            assert ("backward split" in line) is split
            assert "in 2 parts" in " ".join(line.split())


def test_a_plan_has_the_rules_that_made_it() -> None:
    """Those that ship are known by name."""
    profile = shaped("v").model_copy(update={"placement": None})
    made = {
        rules.name: found(profile, "rules", rules=rules, placement="one-to-one", num_microbatches=4).plan.provenance
        for rules in (ONE_LINE, named_rules("1f1b"))
    }
    assert parse_rules("\n".join(made[ONE_LINE.name].rules), "other") == ONE_LINE
    assert made["1f1b"].rules == ()


@pytest.mark.parametrize("asked", [{"scheduler": "1f1b"}, {"scheduler": "rules", "rules": ONE_LINE}])
def test_all_else_is_left_open(asked: dict[str, Any]) -> None:
    """And chosen: in little memory recomputation, and with it two replicas of one stage."""
    profile = shaped("v").model_copy(update={"placement": None})
    named, request = Request.of(profile, devices=2, **asked), Request.of(profile, devices=2)
    assert replace(named, scheduler="auto", rules=None, **OPEN) == request
    (stage,) = search_plan(replace(named, memory_bytes=3_000, time_limit=0.1, deterministic=True)).plan.stages
    assert (stage.replicas, stage.recompute) == (2, True)


@pytest.mark.parametrize(
    ("wanted", "microbatches", "says"),
    [(99, 8, "only 4 micro-batches are sliced: no other has"), (4, 2, "only 2 micro-batches are sliced: there are no")],
)
def test_slices_that_cannot_be_are_said(wanted: int, microbatches: int, says: str) -> None:
    profile = read_profile(str(GPT2))
    same = {"placement": "one-to-one", "microbatch_size": 2, "num_microbatches": microbatches, "num_parted": wanted}
    with pytest.warns(UserWarning, match=says):
        result = found(profile, "1f1b", **same)
    assert result.notes == (f"--slices {wanted}: {result.notes[0].partition(': ')[2]}",)
    assert result.figures()["sliced_microbatches"] == min(4, microbatches)


def test_slices_that_are_asked_for_are_made_without_time_too() -> None:
    """Also a schedule by name on one device after another; a tuning, which has none, says so."""
    profile = read_profile(str(GPT2))
    same: dict[str, Any] = {"placement": "one-to-one", "microbatch_size": 2, "num_microbatches": 4, "devices": 2}
    request = Request.of(profile, **same, scheduler="1f1b", num_parted=2, time_limit=0.0)
    assert search_plan(request).figures()["sliced_microbatches"] == 2
    with pytest.warns(UserWarning, match="--slices 2: no micro-batch is sliced: rules are tuned for whole forwards"):
        tune(Request.of(profile, **same, scheduler="rules", num_parted=2, time_limit=5.0, deterministic=True))


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (None, r"--zero 1 divides nothing: .*; --placement one-to-one looks at no replicas unless --dp says so"),
        (2, r"--zero 1 --zero-group 2 divides nothing: .* looks at no replicas unless --dp says so"),
        (3, r"--zero 1 --zero-group 3 .* groups of 3; choose a --zero-group that divides 4 devices, such as 2"),
    ],
)
def test_that_replicas_divide_nothing_is_said_where_it_was_asked_for(group: int | None, said: str) -> None:
    """There may be none, or none that groups divide; where there are it is what was asked for, and nothing is said."""
    asked: dict[str, Any] = {"zero": 1, "zero_group": group, "microbatch_size": 2}
    with pytest.warns(UserWarning, match=said):
        result = found(read_profile(str(GPT2)), "1f1b", "one-to-one", **asked)
    assert result.notes
    with pytest.warns(UserWarning, match=said):
        tune(
            Request.of(
                read_profile(str(GPT2)),
                devices=4,
                num_microbatches=8,
                placement="one-to-one",
                scheduler="rules",
                time_limit=5.0,
                deterministic=True,
                **asked,
            )
        )
    if group != 3:
        assert not found(read_profile(str(GPT2)), "1f1b", "one-to-one", replicas=2, **asked).notes


def test_what_other_schedules_bring_counts_what_they_may_slice_and_split() -> None:
    """GPT-2 345M: 1F1B leaves 2.8 % above its own bound, and a search finds a plan that is 22 % shorter."""
    profile = read_profile(str(GPT2))
    same: dict[str, Any] = {"placement": "one-to-one", "microbatch_size": 2}
    named, free = found(profile, "1f1b", **same), found(profile, **same)
    request = Request.of(profile, devices=4, num_microbatches=8, scheduler="1f1b", **same)
    steps = {step.what: step for step in next_steps(request, named, simulate(named.plan), None)}
    gain = 1 - free.plan.predicted.iteration_ns / named.plan.predicted.iteration_ns
    assert steps["--scheduler auto"].weight >= gain > 0.2
    assert "--rules" not in steps["--scheduler auto"].brings
    ruled = replace(request, rules=named_rules("1f1b"), scheduler="rules")
    found_by_rules = {step.what: step.brings for step in next_steps(ruled, named, simulate(named.plan), None)}
    assert found_by_rules["--scheduler auto"].startswith("in place of --rules, at most ")


def test_searches_may_slice_and_split() -> None:
    """Of the same request, with whatever is the default."""
    profile = shaped("v")
    for scheduler in ("auto", "repetend", "rules"):
        request = Request.of(profile, scheduler=scheduler)
        assert (request.num_parted, request.split_backward) == (None, None)


def test_without_costs_of_both_parts_a_schedule_that_needs_them_says_so() -> None:
    """And DualPipeV, which does not, runs whole backwards."""
    profile = shape("zbv", 4, costs=ShapeCosts(100, 200, comm_ns=10, activation_bytes=2000))
    with pytest.raises(UsageError, match="input and weight gradients apart"):
        found(profile, "zb-v", devices=None)
    assert found(profile, "dualpipe-v", devices=None).figures()["split_backward"] is False


def test_rules_split_backward_where_they_say_when_weight_gradients_run() -> None:
    assert named_rules("zb-h1").splits_backward
    assert named_rules("interleaved-zb").splits_backward
    assert parse_rules("separate = true", "rules").splits_backward
    assert parse_rules("[[device]]\ndevices = [1]\nweights = { fill = true }", "rules").splits_backward
    assert not any(named_rules(name).splits_backward for name in ("1f1b", "hanayo", "chimera", "1f1b+"))


@pytest.mark.parametrize("name", [name for name in CLASSIC if name in shipped_rules()])
def test_rules_that_ship_run_backward_as_the_schedule_of_their_name(name: str) -> None:
    profile, rules = shaped(SHAPES.get(name, "v")), named_rules(name)
    assert Request.of(profile, scheduler="rules", rules=rules).split_backward is CLASSIC[name].splits


def workload_of(profile: Profile) -> Workload:
    return found(profile, "gpipe", devices=None, split_backward=True).schedule.workload


def test_rules_that_say_late_weights_as_they_are_by_default_are_the_same_rules() -> None:
    """What the auto-tuner writes, so that rules found with a split backward are run with one again."""
    profile = shaped("v")
    silent = [rules for rules in built_in_rules(workload_of(profile)) if not rules.splits_backward]
    assert silent
    for rules in silent[:6]:
        said = parse_rules(to_toml(rules.but(weights_late=0)), "rules")
        split = found(profile, "rules", rules=rules, devices=None, split_backward=True)
        assert found(profile, "rules", rules=said, devices=None).plan.programs == split.plan.programs


@pytest.mark.parametrize("scheduler", ["zb-v", "hanayo"])
def test_a_schedule_that_does_not_apply_says_so_whatever_cannot_be_placed(scheduler: str) -> None:
    """Replicas that a size does not suit, or Piper's planner, were the error, which did not name the schedule."""
    blocks = [CostRow(microbatch_size=1, forward_ns=10, backward_ns=20)] * 11
    branches = profile_of(blocks, [(n, 10) for n in range(10)])
    with pytest.raises(UsageError, match=rf"--scheduler {scheduler} does not apply: it needs .*; choose another"):
        found(branches, scheduler, devices=2)


def test_memory_is_not_blamed_where_it_is_not_what_is_short() -> None:
    """Before a refusal of sizes, or of a schedule that does not apply, it was said that no even cut fits."""
    blocks = [CostRow(microbatch_size=1, forward_ns=10, backward_ns=20, activation_bytes=100)] * 11
    branches = profile_of(blocks, [(n, 10) for n in range(10)])
    heard: list[str] = []

    def ask(**asked: Any) -> list[str]:
        heard.clear()
        with pytest.raises(PipeplanError):
            search_plan(
                Request.of(branches, devices=2, mini_batch=8, time_limit=5.0, **asked),
                progress=lambda what, *_: heard.append(what),
                within=Limit(5.0, clock=lambda: 0.0),
            )
        return heard

    assert not ask(scheduler="zb-v")
    assert not ask(scheduler="zb-v", memory_bytes=10_000)
    assert not ask(microbatch_size=8)
    assert not ask(microbatch_size=8, memory_bytes=10_000)
    assert ask(memory_bytes=10) == ["no even cut with GPipe or 1F1B was found that fits: the search goes on"]


def test_no_even_cut_is_blamed_where_there_was_none_to_try() -> None:
    """Where blocks may be split the table may have no row of 1F1B: then a lean layout of it is the first plan."""
    rows = tuple(
        CostRow(microbatch_size=1, shards=shards, forward_ns=40, backward_ns=80, input_grad_ns=40, weight_grad_ns=40)
        for shards in (1, 2, 4)
    )
    chain = joined([Block(id=f"b{index}", operator="ffn", parameter_bytes=8, costs=rows) for index in range(4)])
    asked = Request.of(chain, devices=8, positions=2, mini_batch=8, memory_bytes=10**9, time_limit=5.0)
    heard: list[str] = []
    search = PlanSearch(asked, Budget(math.inf), lambda what, *_: heard.append(what), STEPS)
    EvenCut(seconds=math.inf).run(search)
    assert search.best is not None
    assert not any("no even cut" in what for what in heard)
