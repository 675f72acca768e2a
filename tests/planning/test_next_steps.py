"""What is said after a search: flags that bring something, and how much."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from builders.chains import chain_profile
from builders.sharded import chain_of, pairs
from pipeplan.examples import model
from pipeplan.files import Profile
from pipeplan.partition.placement import place
from pipeplan.planning.alternatives import tied_with
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.next_steps import next_steps
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, search_plan
from pipeplan.planning.trials import PlanSearch, Trial
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.simulator.simulation import simulate

QUICK: dict[str, Any] = {"time_limit": 0.3, "deterministic": True}


def _said(request: Request) -> dict[str, str]:
    result = search_plan(request)
    return {step.what: step.brings for step in next_steps(request, result, simulate(result.plan), None)}


def test_replicas_that_divide_all_state_are_named_where_they_are_quicker() -> None:
    """Three blocks cannot be cut evenly for two devices, and both have room for all of them where ZeRO 3 divides.

    Where links are free the default leaves that out; where they are known it finds it, and names nothing.
    """
    how: dict[str, Any] = {"mini_batch": 8, "memory_bytes": 1300, **QUICK}
    request = Request.of(chain_of([20, 20, 20]), devices=2, **how)
    said = _said(request)["--zero auto"]
    default, shared = (search_plan(each).plan for each in (request, replace(request, zero="auto")))
    assert max(stage.zero for stage in default.stages) < max(stage.zero for stage in shared.stages)
    gain = 1 - shared.predicted.iteration_ns / default.predicted.iteration_ns
    assert gain > 0
    assert said.startswith("up to about ")
    assert said.endswith("% shorter iterations; ZeRO 2 and 3 (FSDP) are tried as well")
    assert "--zero auto" not in _said(replace(request, zero=1)), "it was asked for something"
    assert "--zero auto" not in _said(Request.of(chain_of([20, 20, 20]), cluster=pairs(2), **how))


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
    """Two copies of two blocks: with half of the optimizer's state each, their step takes half as long."""
    chain = chain_profile(2, placed=False, parameter_bytes=10**6, forward=10**6, backward=2 * 10**6)
    request = Request.of(
        chain.model_copy(update={"step_bytes_per_s": 10**10}), devices=2, mini_batch=2, replicas=2, **QUICK
    )
    gain = re.match(r"about ([\d.]+)% shorter iterations, and the fullest device keeps ", _said(request)["--zero auto"])
    assert gain is not None
    default, shared = (search_plan(each).plan.predicted for each in (request, replace(request, zero=1)))
    assert float(gain[1]) / 100 == pytest.approx(1 - shared.whole_ns / default.whole_ns, abs=0.0006)


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
