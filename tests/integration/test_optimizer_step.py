"""The optimizer's step: bytes it moves by recipe, how fast by a profile, and what it takes in plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeplan.checker import check
from pipeplan.costs import build_workload, step_bytes
from pipeplan.costs.devices import device_preset
from pipeplan.costs.recipes import bytes_per_parameter, state_of, step_ns
from pipeplan.costs.uniform.state import bytes_of
from pipeplan.files import Block, Cluster, PlacedStage, Placement, Profile, Recipe, TiedParameter
from pipeplan.planning.comparison import compare
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan
from pipeplan.runtime.profiling import optimizer_step
from pipeplan.runtime.profiling.build_profile import block_graph_of
from pipeplan.runtime.profiling.optimizer_step import estimated_rate, measured_rate
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.elements import Stage
from runtime_support.models import chain as trained_chain

RATE = 10**9
"""A byte each nanosecond."""


@pytest.mark.parametrize(
    ("name", "moved"), [("fp32", 28), ("bf16", 14), ("bf16-mixed", 30), ("bf16-autocast", 28), ("fp16-mixed", 28)]
)
def test_bytes_that_a_step_moves_of_a_parameter(name: str, moved: int) -> None:
    """Gradients in; moments and what is changed in and out; of a master copy what computes out."""
    recipe = Recipe(name=name)
    assert step_bytes(bytes_per_parameter(recipe) * 10, recipe) == 10 * moved


@pytest.mark.parametrize(("bytes_per_s", "expected"), [(None, 0), (10**9, 28), (3 * 10**9, 10), (10**12, 1)])
def test_a_step_takes_as_long_as_its_bytes_and_no_less(bytes_per_s: int | None, expected: int) -> None:
    """28 bytes: 9.3 ns are 10, and no step is free where a rate is known."""
    assert step_ns(bytes_per_parameter(Recipe(name="fp32")), Recipe(name="fp32"), bytes_per_s) == expected


def test_frozen_parameters_are_not_stepped_and_sharded_state_is_stepped_in_part() -> None:
    recipe = Recipe(name="bf16-mixed")
    block = Block.of("b", "1us", "2us", trained=100, frozen=900)
    assert step_bytes(state_of(block, recipe), recipe) == 3000
    each = bytes_per_parameter(recipe)
    divided = {kind: size * 100 // (4 if kind.name in ("master", "optimizer") else 1) for kind, size in each.items()}
    assert step_bytes(type(each)(divided), recipe) == 25 * 30
    assert bytes_of(recipe.name).step == 30, "the closed forms count as plans do"


def profile(**changes: Any) -> Profile:
    """Three blocks of 100 parameters; the first and the last share 40 of theirs."""
    blocks = [Block.of(f"b{n}", "1us", "2us", trained=100) for n in range(3)]
    made = Profile.of("stepped", blocks, recipe="fp32")
    tied = (TiedParameter(name="table", blocks=("b0", "b2"), parameters=40),)
    return made.model_copy(update={"tied": tied, "step_bytes_per_s": RATE} | changes)


def stages_on(devices: list[int], **changes: Any) -> tuple[Stage, ...]:
    placed = tuple(PlacedStage(blocks=(f"b{n}",), devices=(device,)) for n, device in enumerate(devices))
    placement = Placement(strategy="given", num_devices=1 + max(devices), stages=placed)
    return build_workload(profile(**changes), placement, num_microbatches=4, microbatch_size=1).stages


def test_a_stage_steps_what_it_keeps_and_what_is_tied_once_on_a_device() -> None:
    assert [each.step_ns for each in stages_on([0, 1, 2])] == [2800, 2800, 2800]
    assert [each.step_ns for each in stages_on([0, 1, 0])] == [2800, 2800, 2800 - 40 * 28]
    assert [each.step_ns for each in stages_on([0, 1, 2], step_bytes_per_s=None)] == [0, 0, 0]


def test_plans_have_the_step_and_check_recomputes_it() -> None:
    given, batch = profile(), Batch(num_microbatches=4, microbatch_size=1)
    found = search_plan(Request(given, 2, batch, "one-to-one", time_limit=1.0, deterministic=True))
    plan = found.plan
    assert check(plan, given).problems == ()
    assert sum(stage.step_ns for stage in plan.stages) in (3 * 2800, 3 * 2800 - 40 * 28)
    simulation = simulate(plan)
    assert plan.predicted.iteration_ns == simulation.iteration_ns
    assert simulation.figures()["exposed_step_ns"] == simulation.iteration_ns - plan.predicted.makespan_ns > 0
    assert found.placement_lower_bound_ns <= plan.predicted.iteration_ns
    assert found.status == "optimal" or found.gap > 0
    wrong = replace(plan.stages[0], step_ns=plan.stages[0].step_ns + 1)
    problems = check(plan.model_copy(update={"stages": (wrong, *plan.stages[1:])}), given).problems
    assert "stages[0].step_ns" in {problem.place for problem in problems}


def test_an_estimate_steps_at_the_bandwidth_that_so_many_bytes_reach() -> None:
    a100, recipe = device_preset("a100-80gb"), Recipe(name="fp32")
    moved = 28 * (5 * 74 + 8)
    found = estimated_rate(block_graph_of(trained_chain(), torch.float32), recipe, torch.float32, a100)
    assert found == round(1e9 * moved / a100.kernel_ns(0, moved, matrix=False)) <= a100.bandwidth_bytes_per_s


@pytest.mark.parametrize(("precision", "moved"), [("fp32", 28), ("bf16-mixed", 30), (None, 14)])
def test_a_profile_measures_it(monkeypatch: pytest.MonkeyPatch, precision: str | None, moved: int) -> None:
    """Of one block of each kind (74, 74 and 8), in the recipe's formats: here each step is said to take 1 us."""
    steps = []

    def told(work: Callable[[], None], device: torch.device) -> tuple[None, int]:
        work()
        steps.append(device)
        return None, 1000

    monkeypatch.setattr(optimizer_step, "timed", told)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    graph, recipe = block_graph_of(trained_chain(), dtype), Recipe(name=precision) if precision else Recipe()
    found = measured_rate(graph, recipe, dtype, torch.device("cpu"), repeats=2, warmup=1)
    assert (len(steps), found) == (3, 10**6 * moved * 156)


def test_every_verb_says_what_of_an_iteration_is_exposed() -> None:
    """Of sums, step and gather, level 1 on two replicas: as simulated, and as the checker recomputes it."""
    links = Cluster.of("links", 2, levels=[("all", 2, "1us", "1GB")])
    request = Request(
        profile(), 2, Batch(2, 2), "one-to-one", replicas=2, zero=1, cluster=links, time_limit=1.0, deterministic=True
    )
    found = search_plan(request)
    expected = simulate(found.plan).rates.tail.figures()
    assert all(expected.values())
    keys = expected.keys()
    assert {key: found.figures()[key] for key in keys} == expected
    report = check(found.plan, profile(), links)
    assert {key: report.figures()[key] for key in keys} == expected
    rows: Any = compare(request).figures()["rows"]
    assert {key: rows[0][key] for key in keys} == expected
    for row in rows[1:]:
        assert row["iteration_ns"] - row["makespan_ns"] == sum(row[key] for key in keys)
