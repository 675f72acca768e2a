"""Bounds over everything that a request leaves open: never above any plan, and what a search says beside them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.profiles import profile_of, stage_per_block
from builders.requests import request_of
from pipeplan.errors import SearchTimeoutError, UsageError
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import CostRow, Profile
from pipeplan.planning.bounds import request_bound, rows_bound
from pipeplan.planning.candidates import BoundedProposal, PlacementCandidate, candidates
from pipeplan.planning.comparison import compare
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, SearchCandidates, search_plan
from pipeplan.planning.trials import PlanSearch, Trial
from pipeplan.schedule.cpsat.solver import Budget
from references.every_placement import every_placement
from support.marks import one_in, some_of

QUICK: dict[str, Any] = {"time_limit": 0.05, "deterministic": True}


@st.composite
def chains(draw: st.DrawFn) -> Profile:
    """Two to four blocks in a row, with costs for 1, 2 and 4 samples that need not grow in proportion."""
    split = draw(st.booleans())

    def row(size: int) -> CostRow:
        forward, backward, weight = (draw(st.integers(1, 9)) * size + draw(st.integers(0, 3)) for _ in range(3))
        if split:
            return CostRow(microbatch_size=size, forward_ns=forward, input_grad_ns=backward, weight_grad_ns=weight)
        return CostRow(microbatch_size=size, forward_ns=forward, backward_ns=backward)

    return profile_of([tuple(row(size) for size in (1, 2, 4)) for _ in range(draw(st.integers(2, 4)))])


@settings(max_examples=some_of(5), suppress_health_check=list(HealthCheck))
@given(chains(), st.integers(1, 3), st.sampled_from([1, 8]), st.sampled_from(["auto", "one-to-one", "circular"]))
def test_no_plan_is_quicker(profile: Profile, num_devices: int, samples: int, wanted: str) -> None:
    """Every cut, with every number of replicas and every size, against the bound over all of them.

    Of many samples what all compute counts, of a single one how long it takes through all blocks and back.
    """
    left_open = request_of(profile, "auto", Batch(samples, 1), num_devices=num_devices, sizes=(1, 2, 4))
    bound = request_bound(left_open)
    assert rows_bound(left_open) <= bound
    sizes = [(samples // size, size) for size in (1, 2, 4) if samples % size == 0]
    for placement, (count, size) in itertools.product(every_placement(profile, num_devices), sizes):
        try:
            found = search_plan(request_of(profile, placement, Batch(count, size), **QUICK))
        except UsageError:  # replicas that do not share a micro-batch
            continue
        assert bound <= found.plan.predicted.iteration_ns
    asked = request_of(profile, wanted, Batch(samples, 1), num_devices=num_devices, sizes=(1, 2, 4), **QUICK)
    try:
        best = search_plan(asked)
    except UsageError:
        return
    assert best.lower_bound_ns <= best.placement_lower_bound_ns <= best.plan.predicted.iteration_ns
    assert (best.status == "optimal") == (best.lower_bound_ns == best.plan.predicted.iteration_ns)


def test_of_what_is_split_only_input_gradients_are_waited_for() -> None:
    """One sample on four devices: forwards, input gradients and one weight gradient; all were counted."""
    row = CostRow(microbatch_size=1, forward_ns=10, input_grad_ns=10, weight_grad_ns=10)
    for wanted in ("auto", "one-to-one"):
        request = request_of(profile_of([row] * 4), wanted, Batch(1, 1), num_devices=4, **QUICK)
        assert request_bound(request) == search_plan(request).plan.predicted.iteration_ns == 90


def test_what_needs_no_gradient_waits_for_none() -> None:
    """One sample on three devices, on which each backward follows its forward: only forwards wait for others."""
    row = CostRow(microbatch_size=1, forward_ns=10, backward_ns=20)
    for wanted in ("auto", "one-to-one"):
        request = request_of(profile_of([row] * 3, gradient=False), wanted, Batch(1, 1), num_devices=3, **QUICK)
        assert request_bound(request) == search_plan(request).plan.predicted.iteration_ns == 50


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(chains(), st.integers(2, 3))
def test_one_stage_per_device_waits_for_the_others(profile: Profile, num_devices: int) -> None:
    """The bound of a strategy: every cut of one stage per device, with whole forwards and backwards."""
    fixed: dict[str, Any] = {"num_parted": 0, "split_backward": False, "replicas": 1, "recompute": False}
    request = request_of(profile, "one-to-one", Batch(4, 2), num_devices=num_devices, **fixed)
    bound = request_bound(request)
    for placement in every_placement(profile, num_devices):
        if len(placement.stages) == num_devices:
            found = search_plan(request_of(profile, placement, Batch(4, 2), **fixed, **QUICK))
            assert bound <= found.plan.predicted.iteration_ns


@pytest.mark.parametrize("name", ["v", "m", "zbv"])
@pytest.mark.parametrize("memory", [None, 3 * 10**9])
def test_where_all_is_given_there_is_one_bound(name: str, memory: int | None) -> None:
    """The plan file, the report of ``simulate`` and the search say the same, forwards in parts included."""
    profile = shape(name, 4)
    assert profile.placement is not None
    found = search_plan(
        request_of(profile, profile.placement, Batch(8, 1), memory_bytes=memory, recompute=False, **QUICK)
    )
    assert found.lower_bound_ns == found.placement_lower_bound_ns == found.plan.predicted.lower_bound_ns
    assert found.gap == found.placement_gap == found.plan.predicted.gap
    assert (found.candidates.looked_at, found.candidates.left) == (1, 0)


@pytest.mark.parametrize("wanted", ["auto", "one-to-one"])
def test_the_bound_over_everything_is_known_where_time_was_up_with_the_first_plan(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 1 ns, which the report set beside the plan as a gap of 10^11 %."""
    rows = tuple(CostRow(microbatch_size=size, forward_ns=10 * size, backward_ns=20 * size) for size in (1, 2))
    request = request_of(profile_of([rows] * 4), wanted, Batch(8, 1), num_devices=2)
    looked = Trial.look

    def look(trial: Trial, **how: Any) -> None:
        looked(trial, **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "look", look)
    found = search_plan(request)
    assert found.interrupted
    assert found.lower_bound_ns == request_bound(request) > 1


def test_recomputation_that_is_left_open_counts() -> None:
    """It is tried only where nothing fits without, but may be quicker: then nothing is proved over all."""
    profile = shape("v", 4, costs=ShapeCosts(1_000_000, 3_000_000))
    assert profile.placement is not None
    asked: dict[str, Any] = {"memory_bytes": 2 * 10**9, **QUICK}
    found = search_plan(request_of(profile, profile.placement, Batch(8, 1), **asked))
    assert found.candidates.left == 0
    assert found.lower_bound_ns < found.placement_lower_bound_ns
    assert found.status == "feasible"


@pytest.mark.parametrize("placement", ["auto", "one-to-one"])
def test_a_limit_that_is_no_limit_does_not_raise_the_bound(placement: str) -> None:
    """With one, blocks may be recomputed, and need not be: only where that is asked for does every plan take longer."""
    profile = profile_of([CostRow(microbatch_size=1, forward_ns=100, backward_ns=200, activation_bytes=10)] * 4)
    free = Request.of(profile, devices=2, mini_batch=8, placement=placement)
    bound = request_bound(free)
    assert request_bound(replace(free, memory_bytes=10**12)) == bound
    assert request_bound(replace(free, memory_bytes=10**12, recompute=True)) > bound


@pytest.mark.parametrize("scheduler", ["1f1b", "zb-h2"])
@one_in(2, "memory", [3 * 10**9, 4 * 10**9])
def test_a_schedule_that_does_not_fit_refutes_no_other(scheduler: str, memory: int) -> None:
    """A named one runs with recomputation then; others fit without, and the bound is for them, too."""
    profile = shape("v", 4, costs=ShapeCosts(1000, input_grad_ns=1200, weight_grad_ns=700))
    asked = {"memory_bytes": memory, "time_limit": 1.0, "deterministic": True}
    named, best = (
        search_plan(request_of(profile, profile.placement, Batch(8, 1), scheduler=each, **asked))
        for each in (scheduler, "auto")
    )
    assert named.lower_bound_ns <= best.plan.predicted.iteration_ns


def test_a_fallback_that_is_tried_is_no_longer_open() -> None:
    """Only recomputing fits, two micro-batches of it: what memory says about that is proved over everything."""
    rows = (
        CostRow(microbatch_size=1, forward_ns=10, backward_ns=30, activation_bytes=100),
        CostRow(microbatch_size=1, recompute=True, forward_ns=10, backward_ns=40, activation_bytes=20),
    )
    profile = profile_of([rows] * 4)
    placement = stage_per_block(profile, [0, 1, 2, 3])
    found = search_plan(request_of(profile, placement, Batch(8, 1), memory_bytes=40, **QUICK))
    assert any(stage.recompute for stage in found.plan.stages)
    assert found.lower_bound_ns == found.placement_lower_bound_ns


def test_a_placement_can_be_proved_where_the_whole_is_not() -> None:
    """Two unlike blocks on two devices: every placement has idle devices or copies, and the bound has neither."""
    rows = [CostRow(microbatch_size=1, forward_ns=each, backward_ns=each) for each in (10, 30)]
    found = search_plan(request_of(profile_of(rows), "one-to-one", Batch(4, 1), num_devices=2, replicas=1, **QUICK))
    assert found.placement_gap == 0
    assert found.gap > 0
    assert found.status == "feasible"
    figures = found.figures()
    assert figures["candidates"] == {"looked_at": 1, "refuted": 0, "left": 0}
    assert figures["placement_lower_bound_ns"] == figures["iteration_ns"]
    assert figures["lower_bound_ns"] == 160


def test_candidates_are_counted_and_time_that_ended_the_search_is_said() -> None:
    """On two devices and alike blocks: a copy of the whole on each is quickest, which refutes the other cuts."""
    rows = tuple(CostRow(microbatch_size=size, forward_ns=10 * size, backward_ns=20 * size) for size in (1, 2))
    request = request_of(profile_of([rows] * 3), "auto", Batch(4, 2), num_devices=2, sizes=(1, 2), **QUICK)
    number = sum(1 for _ in candidates(request, STEPS, 2))
    done = search_plan(replace(request, time_limit=0.5, deterministic=True))
    assert (done.candidates.left, done.timed_out) == (0, False)
    assert 0 < done.candidates.refuted < done.candidates.looked_at <= number
    hurried = search_plan(replace(request, time_limit=0.0, deterministic=False))
    assert hurried.timed_out
    assert 0 < hurried.candidates.left <= number


def test_what_a_search_of_schedules_says_is_not_the_whole_search_s() -> None:
    """It may be of a worse placement, and knows a better bound of that alone."""
    heard: list[tuple[int, int]] = []
    profile = profile_of([CostRow(microbatch_size=1, forward_ns=10, backward_ns=20)] * 4)
    placement = stage_per_block(profile, [0, 1, 2, 3])
    request = request_of(profile, placement, Batch(8, 1), **QUICK)
    trial = Trial.of(request, PlacementCandidate(placement, request.batch, False, "given"))
    trial.look()
    search = PlanSearch(
        request, Budget(1, deterministic=True), lambda what, best, bound, seconds: heard.append((best, bound)), STEPS
    )
    search.trials.append(trial)
    search.others[None] = 7
    said = search.listen(trial)
    assert said is not None
    best = trial.value_ns or 0
    for makespan_ns in (3 * best, best - 1):
        said("windows", makespan_ns, makespan_ns, 0.1)
    assert heard == [(best, 7), (best - 1, 7)]


def test_what_was_given_up_stays_in_the_bound_over_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that was not tried, or ran out of time, may be better than all that is known."""
    profile = profile_of([CostRow(microbatch_size=1, forward_ns=10, backward_ns=20)] * 4)
    placement = stage_per_block(profile, [0, 1, 2, 3])
    request = request_of(profile, "auto", Batch(8, 1), num_devices=4, **QUICK)
    candidate = PlacementCandidate(placement, request.batch, False, "given")

    def late(*_: object, **__: object) -> None:
        raise SearchTimeoutError("no time")

    monkeypatch.setattr(Trial, "search", late)
    search, trial = PlanSearch(request, Budget(1, deterministic=True), None, STEPS), Trial.of(request, candidate)
    search.trials.append(trial)
    SearchCandidates().search(search, trial, 1.0)
    assert trial not in search.trials
    assert search.others == {candidate.key: trial.bound_ns}
    assert search.bound_ns == trial.bound_ns > 1
    fallback = PlanSearch(request, Budget(1, deterministic=True), None, STEPS)
    fallback._leave(candidate)
    assert fallback.bound_ns == trial.bound_ns
    for first, second in ((3, 5), (5, 3)):
        search.others = {("first",): first, ("second",): second}
        assert search.bound_ns == 3


def test_nothing_is_refuted_that_may_be_as_quick() -> None:
    profile = profile_of([CostRow(microbatch_size=1, forward_ns=10, backward_ns=20)] * 4)
    placement = stage_per_block(profile, [0, 1, 2, 3])
    request = request_of(profile, placement, Batch(8, 1), **QUICK)
    search, trial = (
        PlanSearch(request, Budget(1, deterministic=True), None, STEPS),
        Trial.of(request, PlacementCandidate(placement, request.batch, False, "given")),
    )
    trial.look()
    search.trials.append(trial)
    value = trial.value_ns or 0
    assert not search.refutes(BoundedProposal(lambda: None, value))
    assert search.refutes(BoundedProposal(lambda: None, value + 1))
    trial.bounds = [value - 1]
    assert not trial.hopeless(trial)
    trial.bounds = [value]
    assert trial.hopeless(trial)
    assert not trial.worse(trial)
    assert search.bound_ns == value
    trial.late_bound = value - 2  # of actions that begin before all their inputs are there
    assert search.bound_ns == value - 2


def test_the_status_line_is_of_the_whole_search() -> None:
    """The best never gets worse, nor the bound weaker, whatever is searched at the moment; so in a comparison."""
    rows = [CostRow(microbatch_size=1, forward_ns=each, backward_ns=2 * each) for each in (5, 9, 4, 7, 3)]
    request = request_of(profile_of(rows), "auto", Batch(8, 1), num_devices=2, **QUICK)
    heard: list[tuple[int, int]] = []
    found = search_plan(request, progress=lambda what, best, bound, seconds: heard.append((best, bound)))
    assert heard == sorted(heard, key=lambda each: -each[0])
    assert heard[-1][0] == found.plan.predicted.iteration_ns
    assert all(bound <= found.lower_bound_ns for _, bound in heard)
    compared: list[int] = []
    rows_of = compare(request, progress=lambda what, best, bound, seconds: compared.append(best))
    assert compared == sorted(compared, reverse=True)
    assert compared[-1] >= min(row.makespan_ns for row in rows_of.rows)
