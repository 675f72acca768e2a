"""The list of what a search tries: printed as in the docs, and switched off one by one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from builders.requests import request_of
from builders.shapes import shape_workload
from pipeplan.examples import shape
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import STEPS, search_plan, table, without
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import search_schedule
from pipeplan.schedule.state import ScheduleStep, named
from pipeplan.schedule.steps import BuiltInRules, FirstSchedule

PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "search.md"
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
