"""The list of what a search tries: printed as in the docs, and switched off one by one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders.profiles import profile_of
from builders.requests import request_of
from builders.shapes import shape_workload
from pipeplan.examples import ShapeCosts, model, shape
from pipeplan.files import CostRow, PlacedStage, Placement
from pipeplan.partition.placement import place
from pipeplan.planning import steps as planning_steps
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, KeepAll, search_plan, table, without
from pipeplan.planning.trials import PlanSearch, Trial, preferred
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.modulo import modulo_schedule
from pipeplan.schedule.pattern import compose
from pipeplan.schedule.search import FewerBytes, search_schedule, timed
from pipeplan.schedule.state import ScheduleStep, named
from pipeplan.schedule.steps import BuiltInRules, FirstSchedule, QuickClassics
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.memory import fits
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph

PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "search.md"
GB = 10**9
OPTIONAL = sorted({step.name for step in STEPS if not step.needed})


def test_the_docs_have_the_table() -> None:
    assert f"\n{table()}\n" in PAGE.read_text(encoding="utf-8"), f"write this table into {PAGE}:\n{table()}"


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_steps_are_frozen_and_say_when(step: object) -> None:
    with pytest.raises(FrozenInstanceError):
        step.share = 0.5  # type: ignore[attr-defined]  # that it fails is the point
    name, when, share = step.row  # type: ignore[attr-defined]  # every step has it
    assert name
    assert share
    assert not set("{}") & set(when)
    assert all(field.default is not None for field in fields(step))  # type: ignore[arg-type]  # a dataclass


@pytest.mark.parametrize("name", OPTIONAL)
def test_each_step_can_be_switched_off(name: str) -> None:
    steps = without({name})
    assert name not in {step.name for step in steps}
    workload = shape_workload("v", num_microbatches=4)
    found = search_schedule(
        workload, Budget(0.2, deterministic=True), steps=[step for step in steps if isinstance(step, ScheduleStep)]
    )
    assert found.makespan_ns >= found.bound_ns
    profile = shape("v", 4)
    request = request_of(profile, profile.placement, Batch(4, 1), time_limit=0.1, deterministic=True)
    assert search_plan(request, steps=steps).plan.predicted.makespan_ns >= found.bound_ns


def test_without_any_optional_step_there_is_the_first_schedule() -> None:
    workload = shape_workload("v", num_microbatches=4)
    steps = [step for step in without(OPTIONAL) if isinstance(step, ScheduleStep)]
    assert [type(step) for step in steps] == [FirstSchedule]
    assert search_schedule(workload, Budget(1, deterministic=True), steps=steps).scheduler == "sequential"


def test_what_cannot_be_switched_off_is_refused() -> None:
    for name in ("first schedule", "look at candidates", "windws"):
        with pytest.raises(ValueError, match=name):
            without({name})
    assert named(without({"built-in rules"}), BuiltInRules) is None


def test_what_is_as_short_in_less_memory_is_found_by_its_period() -> None:
    """A plain modulo schedule of shape m holds 6 GB on 4 devices; 5 do, and 4.9 are proved too little."""
    workload = shape_workload("m", 4, 16)
    problem = OneMicrobatch.of(workload)
    pattern = modulo_schedule(problem, max(problem.work))
    assert pattern is not None
    plain = timed(problem, task_graph(workload), compose(problem, pattern), "repetend")
    assert plain is not None
    found = FewerBytes(most_tasks=0).lowered(replace(plain, pattern=pattern), Budget(8, deterministic=True))
    assert found is not None
    assert (plain.most_bytes, found.most_bytes) == (6 * GB, 5 * GB)
    assert (found.makespan_ns, found.repeats) == (plain.makespan_ns, True)
    assert found.pattern is not None
    assert found.pattern.period == pattern.period
    assert fits(found.graph, found.orders)


def test_the_best_plan_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is proved, and only once, at the end; a schedule that is asked for by name stays as it is."""
    asked: list[int] = []
    monkeypatch.setattr(FewerBytes, "lowered", lambda _, known, budget: asked.append(known.makespan_ns))
    profile = shape("v", 2)
    for scheduler, times in (("auto", 1), ("gpipe", 1)):
        request = request_of(
            profile, profile.placement, Batch(4, 1), time_limit=1, deterministic=True, scheduler=scheduler
        )
        assert search_plan(request).plan.predicted.gap == 0
        assert len(asked) == times


def test_what_a_look_has_proved_is_searched_for_a_plan_that_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shape k GPipe is as short as anything can be, with all micro-batches in flight."""
    monkeypatch.setattr(planning_steps, "FEW_ENTRIES", 0)
    profile = shape("k", 8, costs=ShapeCosts(1000, 3000, activation_bytes=GB))
    request = request_of(profile, profile.placement, Batch(16, 1), time_limit=1, deterministic=True)
    found = search_plan(request)
    assert found.gap == 0
    figures = found.figures()
    assert figures["repeats"]
    assert figures["period_ns"] == figures["period_lower_bound_ns"]
    assert max(memory.peak_bytes for memory in found.plan.predicted.memory) < 16 * GB


def test_of_equal_iterations_the_plan_with_less_memory_that_repeats_and_is_simple_is_preferred() -> None:
    """Each is better than all that follow by one thing alone."""
    best: dict[str, Any] = {"iteration_ns": 10, "most_bytes": 5, "repeats": True, "scheduler": "1f1b"}
    simple, several, circular = (
        SimpleNamespace(stages=range(count), placement=placement)
        for count, placement in ((2, "one-to-one"), (4, "one-to-one"), (2, "circular"))
    )
    changes: list[dict[str, Any]] = [
        {"workload": circular},
        {"scheduler": "repetend"},
        {"workload": several},
        {"repeats": False},
        {"most_bytes": 6},
        {"iteration_ns": 11},
    ]
    found: list[Any] = [SimpleNamespace(**{"workload": simple, **best, **change}) for change in ({}, *changes)]
    for one, other in combinations(found, 2):
        assert preferred(one, other)
        assert not preferred(other, one)


def test_without_a_pattern_all_actions_are_ordered_in_less_memory() -> None:
    """GPipe of a chain is as short as 1F1B, which holds what is least: a micro-batch for each stage to come."""
    workload = shape_workload("v", 2, 6)
    budget = Budget(5, deterministic=True)
    gpipe = search_schedule(workload, budget, scheduler="gpipe")
    one_f_one_b = search_schedule(workload, budget, scheduler="1f1b")
    assert gpipe.makespan_ns == one_f_one_b.makespan_ns
    found = FewerBytes().lowered(gpipe, Budget(5, deterministic=True))
    assert found is not None
    assert fits(found.graph, found.orders)
    assert (found.makespan_ns, found.most_bytes) == (gpipe.makespan_ns, one_f_one_b.most_bytes)
    assert FewerBytes().lowered(one_f_one_b, Budget(5, deterministic=True)) is None


def test_stages_ease_their_recomputation_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage is as long as all of its operations, not as the last of them."""
    long, short = (
        CostRow(
            microbatch_size=1,
            forward_ns=forward,
            backward_ns=60,
            input_grad_ns=30,
            weight_grad_ns=weight,
            activation_bytes=100,
        )
        for forward, weight in ((50, 10), (10, 30))
    )
    profile = profile_of([short, short, long, long, short, short])
    pairs = [tuple(block.id for block in profile.blocks[first : first + 2]) for first in (0, 2, 4)]
    stages = tuple(PlacedStage(blocks=pair, devices=(device,)) for device, pair in enumerate(pairs))
    placement = Placement(strategy="by-hand", num_devices=3, stages=stages)
    asked: list[int] = []

    def refuse(request: Request, trial: Trial, placement: Placement, mark: str) -> None:
        asked.extend(index for index, stage in enumerate(placement.stages) if stage.recompute is False)

    monkeypatch.setattr("pipeplan.planning.steps._retimed", refuse)
    request = request_of(
        profile, placement, Batch(4, 1), memory_bytes=150, split_backward=True, time_limit=0.1, deterministic=True
    )
    plan = search_plan(request).plan
    assert all(stage.recompute for stage in plan.stages)
    assert asked == [1, 0, 2]


@pytest.mark.parametrize("count", [42, 43, 47, 63])
def test_a_shorter_run_is_never_shorter_than_two_microbatches_per_device(count: int) -> None:
    """Even where one micro-batch has more actions than the run is to have; the whole run is still reached."""
    workload = shape_workload("v", num_devices=4, num_microbatches=count)
    steps = [ShorterRun(most=100, tasks=1), FirstSchedule(), QuickClassics()]
    found = search_schedule(workload, Budget(0.1, deterministic=True), steps=steps)
    assert fits(found.graph, found.orders)
    assert found.loop is not None
    assert found.graph.workload.num_microbatches + found.loop.skipped == count
    assert search_schedule(workload, Budget(0.1, deterministic=True)).makespan_ns == found.makespan_ns


@pytest.mark.parametrize("count", [100_000, 300_001])
def test_what_is_searched_does_not_grow_with_the_number_of_microbatches(count: int) -> None:
    """Of actions that are scheduled, and written, there are as few; what is proved is of all."""
    workload = shape_workload("v", num_devices=4, num_microbatches=count)
    found = search_schedule(workload, Budget(1, deterministic=True))
    assert found.optimal
    assert found.makespan_ns == weak_iteration_bound(workload)
    assert found.graph.num_tasks < 200


@pytest.mark.parametrize("strategy", ["one-to-one", "v-shape"])
def test_the_best_that_recomputes_is_cut_once_more_without(strategy: str) -> None:
    """Where that fits it is shorter; its sizes are the same, and it is tried once."""
    profile = model("gpt2-124m", shards=(1, 2), microbatch_sizes=[1])
    request = request_of(profile, strategy, Batch(8, 1), 4, memory_bytes=20 * GB, shards=2, replicas=1, positions=2)
    placement = place(profile, strategy, 4, microbatch_size=1, memory_bytes=request.memory, wide=[(0, 1), (2, 3)])
    stages = tuple(stage.model_copy(update={"recompute": True}) for stage in placement.stages)
    candidate = PlacementCandidate(placement.model_copy(update={"stages": stages}), request.batch, False, "by hand")
    search = PlanSearch(request, Budget(1, deterministic=True), None, STEPS)
    trial = Trial.of(request, candidate)
    trial.look()
    search.trials.append(trial)
    for _ in range(2):
        KeepAll().run(search)
    assert len(search.trials) == 2
    best = search.best
    assert best is not None
    assert best.best is not None
    assert best.value_ns < trial.value_ns
    assert not any(stage.recomputes for stage in best.best.workload.stages)
    assert [each.devices for each in best.candidate.placement.stages] == [each.devices for each in stages]
    assert {(each.shards, each.replicas) for each in best.candidate.placement.stages} == {(2, 1)}
