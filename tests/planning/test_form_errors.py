"""Rows of the table of layouts whose kind took longer than its closed form says come after others, and none is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from builders.profiles import joined
from pipeplan.files import Block, CostRow
from pipeplan.partition.placement import place
from pipeplan.planning import trials
from pipeplan.planning.build_plan import CandidateCounts
from pipeplan.planning.candidates import BoundedProposal, PlacementCandidate
from pipeplan.planning.form_errors import FormErrors
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, num_left
from pipeplan.planning.trials import PlanSearch, Trial
from pipeplan.planning.uniform_space import BoundedChoice, Choice, UsualParts
from pipeplan.planning.usual import USUAL
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.time_limit import checkpoint

_ROWS = CostRow(microbatch_size=1, forward_ns=40, backward_ns=80, input_grad_ns=40, weight_grad_ns=40)
_PROFILE = joined([Block(id=f"b{index}", operator="ffn", parameter_bytes=8, costs=(_ROWS,)) for index in range(8)])


def _row(name: str, usual_ns: float, usual_bytes: float) -> BoundedChoice:
    usual = next(each for each in USUAL if each.name == name)
    choice = Choice(usual.strategy, 1, Batch(8, 1), False, False, positions=2, usual=usual)
    return BoundedChoice(choice, 1, usual_ns, usual_bytes, 0.0, UsualParts(0.0, 0.0, 0.0, 0.0, 0.0))


def test_where_there_is_no_time_to_count_what_is_left_at_least_so_many_are() -> None:
    now = 0.0
    request = Request(_PROFILE, 2, Batch(8, 1))
    search = PlanSearch(request, Budget(10.0, clock=lambda: now), None, STEPS)

    def proposals() -> Iterator[BoundedProposal]:
        nonlocal now
        for number in range(3):
            now += 10.0 * (number == 2)
            checkpoint()
            yield BoundedProposal(partial(str, number), 1, _row("1f1b", 1.0, 0.0))

    search.open = proposals()
    assert num_left(search) == (2, False)
    search.open = iter([*proposals()])
    assert num_left(search) == (3, True)
    for left, words in (((2, True), "2 placements not tried"), ((2, False), "at least 2 placements not tried")):
        counts = CandidateCounts(5, 1, left[0], at_least=not left[1])
        assert counts.not_tried == words
        assert ("at_least" in counts.figures()) == (not left[1])
    together = CandidateCounts.of_all([CandidateCounts(5, 1, 2), CandidateCounts(1, 0, 1, at_least=True)])
    assert together == CandidateCounts(6, 1, 3, at_least=True)


def test_a_kind_is_as_far_off_as_the_best_of_its_rows() -> None:
    forms = FormErrors()
    assert forms.expected_ns(_row("zb-v", 100.0, 50.0)) == 0.0, "one of each kind is looked at"
    forms.learn(_row("zb-v", 100.0, 50.0), 150)
    forms.learn(_row("zb-v", 200.0, 50.0), 240)
    assert forms.expected_ns(_row("zb-v", 50.0, 70.0)) == pytest.approx(60.0)
    assert forms.expected_ns(_row("v-half", 50.0, 70.0)) == 0.0, "of the same strategy with another schedule"
    forms.learn(_row("zb-v", 50.0, 60.0), None)
    forms.learn(_row("zb-v", 50.0, 65.0), None)
    assert forms.expected_ns(_row("zb-v", 50.0, 59.0)) == pytest.approx(60.0)
    assert forms.expected_ns(_row("zb-v", 50.0, 60.0)) == math.inf
    other = _row("zb-v", 50.0, 60.0)
    longer = replace(other, choice=replace(other.choice, positions=4))
    assert forms.expected_ns(longer) == pytest.approx(60.0), "stages of fewer blocks share memory otherwise"
    forms.learn(_row("1f1b", 50.0, 60.0), None)
    assert forms.expected_ns(_row("1f1b", 50.0, 59.0)) == 50.0


def test_rows_that_should_take_longer_come_last_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request.of(_PROFILE, devices=2, mini_batch=8)
    search = PlanSearch(request, Budget(1.0, deterministic=True), None, STEPS)
    candidate = PlacementCandidate(place(_PROFILE, "one-to-one", 2, microbatch_size=1), Batch(8, 1), False, "by hand")
    trial = Trial.of(request, candidate)
    trial.look()
    assert trial.best is not None
    search.trials.append(trial)
    value = trial.best.iteration_ns
    taken: list[str] = []

    def proposals() -> list[BoundedProposal]:
        rows = {
            "off": _row("zb-v", value, 0.0),
            "near": _row("1f1b", value, 0.0),
            "far": _row("v-half", 3 * value, 0.0),
        }
        return [BoundedProposal(partial(taken.append, name), 1, row) for name, row in rows.items()]

    def all_taken() -> list[str]:
        search.open, search.all_seen = iter(proposals()), False
        taken.clear()
        while not search.all_seen:
            search.take()
        return list(taken)

    search.row = _row("zb-v", 100.0, 0.0)
    usual = next(each for each in USUAL if each.name == "zb-v")
    monkeypatch.setattr(trials, "is_large", lambda request: True)
    trial.best = replace(trial.best, scheduler="gpipe")  # looked at as what is usual does not fit
    search.learn(trial)
    assert search.forms is not None
    assert search.forms.expected_ns(search.row) == math.inf
    search.forms = FormErrors()
    search.forms.learn(_row("v-half", 100.0, 0.0), 100)
    trial.best = replace(trial.best, scheduler=usual.name)
    search.learn(trial)
    search.open, search.all_seen = iter(proposals()), False
    while not search.put_off:
        search.take()
    assert num_left(search) == (3, True), "those that are put off were not tried either"
    search.put_off.clear()
    assert all_taken() == ["near", "off", "far"], "what is put off comes last, in its order"
    search.forms = None
    assert all_taken() == ["off", "near", "far"]
    monkeypatch.setattr(trials, "is_large", lambda request: False)
    search.forms = FormErrors()
    search.learn(trial)
    assert all_taken() == ["off", "near", "far"], "of small requests all are looked at"


def test_what_takes_long_to_look_at_waits_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little above the best is enough, by how far off the longest run of its kind was, or else by its closed form."""
    request = Request.of(_PROFILE, devices=2, mini_batch=8)
    search = PlanSearch(request, Budget(1.0, deterministic=True), None, STEPS)
    placement = place(_PROFILE, "one-to-one", 2, microbatch_size=1)
    trial = Trial.of(request, PlacementCandidate(placement, Batch(8, 1), False, "by hand"))
    trial.look()
    assert trial.best is not None
    search.trials.append(trial)
    value, forms = trial.best.iteration_ns, search.forms
    assert forms is not None
    monkeypatch.setattr(trials, "is_large", lambda request: True)
    row = _row("zb-v", 1.02 * value, 0.0)
    assert not search.is_put_off(row), "a look takes a moment"
    monkeypatch.setattr(trials, "LONG_LOOK", 0)
    assert search.is_put_off(row)
    assert not search.is_put_off(_row("zb-v", 0.99 * value, 0.0))
    longer = replace(row, choice=replace(row.choice, batch=Batch(64, 1)))
    forms.learn(longer, round(0.9 * longer.usual_ns))
    forms.learn(row, round(1.1 * row.usual_ns))
    assert not search.is_put_off(row), "the longer run was shorter than it should be"
    assert search.is_put_off(_row("zb-v", 1.12 * value, 0.0))
