"""What is said after a search: flags that bring something, and how much."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from builders.chains import chain_profile
from builders.sharded import chain_of, pairs
from pipeplan.examples import model
from pipeplan.files import Plan, Profile
from pipeplan.partition.placement import place
from pipeplan.planning.alternatives import tied_with
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.next_steps import next_steps
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, search_plan
from pipeplan.planning.trials import PlanSearch, Trial
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.simulator.simulation import simulate
from support.marks import one_in

QUICK: dict[str, Any] = {"time_limit": 0.3, "deterministic": True}


def _peak(plan: Plan) -> int:
    return max(each.peak_bytes for each in simulate(plan).memory)


def _said(request: Request) -> dict[str, str]:
    result = search_plan(request)
    return {step.what: step.brings for step in next_steps(request, result, simulate(result.plan), None)}


@one_in(3, "memory", [None, 1300, 1100])
def test_replicas_divide_state_without_being_asked(memory: int | None) -> None:
    """Without links the optimizer's (ZeRO 1), with the flag or not, as quick as if messages of the others were free."""
    request = Request.of(chain_of([20, 20, 20]), devices=2, mini_batch=8, memory_bytes=memory, **QUICK)
    default, auto, whole = (search_plan(replace(request, zero=level)) for level in (None, "auto", 0))
    (stage,) = default.plan.stages
    assert (stage.replicas, stage.zero) == (2, 1)
    assert auto.plan.stages == default.plan.stages
    assert default.plan.predicted.iteration_ns <= whole.plan.predicted.iteration_ns
    assert _peak(default.plan) < _peak(whole.plan) or memory
    assert any("ZeRO 1" in note for note in default.notes)
    assert not any("ZeRO" in note for note in whole.notes)
    said = _said(request) | _said(Request.of(chain_of([20, 20, 20]), cluster=pairs(2), memory_bytes=1300, **QUICK))
    assert not any("--zero" in what for what in said)


def test_other_levels_come_where_nothing_fits() -> None:
    """Two copies of eight blocks with 4 MB of state each: ZeRO 1 keeps 24 MB of them, and there is less room."""
    chain = chain_profile(8, placed=False, parameter_bytes=10**6, forward=10**6, backward=2 * 10**6)
    request = Request.of(chain, devices=2, replicas=2, mini_batch=2, memory_bytes=23 * 10**6, **QUICK)
    for level in (None, "auto"):
        found = search_plan(replace(request, zero=level))
        assert min(stage.zero for stage in found.plan.stages) > 1
        assert _peak(found.plan) <= 23 * 10**6
        assert not any("ZeRO" in note for note in found.notes)


@pytest.mark.slow
def test_estimates_without_split_blocks_are_said_to_be() -> None:
    def of(device: str, method: str) -> Profile:
        profile = chain_of([20, 20])
        source = profile.source.model_copy(update={"device": device, "method": method})
        return profile.model_copy(update={"source": source})

    flag = "pipeplan profile ... --shards 1,2,4,8"
    accelerator = Request.of(of("H100-SXM5-80GB", "estimated"), cluster=pairs(2), mini_batch=4, **QUICK)
    assert flag in _said(accelerator)
    assert flag not in _said(replace(accelerator, shards=1))
    assert flag not in _said(Request.of(of("H100-SXM5-80GB", "measured"), cluster=pairs(2), mini_batch=4, **QUICK))
    assert flag not in _said(Request.of(of("a shape", "estimated"), cluster=pairs(2), mini_batch=4, **QUICK))


def test_a_step_that_replicas_could_share_out_is_said_with_what_that_saves() -> None:
    """Two copies of two blocks: each with half of the optimizer's state."""
    chain = chain_profile(2, placed=False, parameter_bytes=10**6, forward=10**6, backward=2 * 10**6)
    request = Request.of(
        chain.model_copy(update={"step_bytes_per_s": 10**10}),
        cluster=pairs(2),
        mini_batch=2,
        replicas=2,
        placement="one-to-one",
        **QUICK,
    )
    assert _said(request)["--zero auto"].endswith("the fullest device keeps 6MB instead of 8MB of state")
    default, shared = (search_plan(replace(request, zero=level)).plan for level in (None, 1))
    assert [plan.stages[0].state.total for plan in (default, shared)] == [8 * 10**6, 6 * 10**6]
    assert shared.stages[0].step_ns < default.stages[0].step_ns


def test_a_simpler_plan_that_estimates_cannot_tell_from_the_best_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer stages, at most 1 % longer, with what asks for it and what it leaves; measured times mean what they say."""
    profile, batch = model("gpt2-124m", shards=(1, 2), microbatch_sizes=[1]), Batch(8, 1)
    request = Request(profile, 4, batch, "auto", memory_bytes=20 * 10**9, time_limit=0.3, deterministic=True)
    result, search = search_plan(request), PlanSearch(request, Budget(1, deterministic=True), None, STEPS)
    for strategy in ("v-shape", "one-to-one"):
        placement = place(profile, strategy, 4, microbatch_size=1, wide=[(0, 1), (2, 3)])
        search.trials.append(Trial.of(request, PlacementCandidate(placement, batch, False, "by hand")))
        search.trials[-1].look()
    many, few = search.trials
    assert few.best is not None
    times = {id(many): few.best.iteration_ns - 1, id(few): few.best.iteration_ns}
    monkeypatch.setattr(Trial, "value_ns", property(lambda trial: times[id(trial)]))
    tie = tied_with(search, many)
    assert tie is not None
    assert (tie.flags, tie.num_stages) == ("--pp 2 --dp 1 --tp 2", 2)
    assert 0 < tie.longer < 1e-6
    assert tie.left_bytes == 20 * 10**9 - few.best.fullest[0]
    assert tied_with(search, few) is None
    times[id(many)] = round(0.98 * few.best.iteration_ns)
    assert tied_with(search, many) is None, "it is 2 % longer"
    times[id(many)] = few.best.iteration_ns
    measured = profile.model_copy(update={"source": profile.source.model_copy(update={"method": "measured"})})
    assert tied_with(replace(search, request=replace(request, profile=measured)), many) is None
    steps = next_steps(request, replace(result, tie=replace(tie, longer=0.004)), simulate(result.plan), None)
    said = {step.what: step.brings for step in steps}["--pp 2 --dp 1 --tp 2"]
    assert re.fullmatch(r"0\.4% longer, a tie: 2 stages, not \d+, [\d.]+GB left", said)
