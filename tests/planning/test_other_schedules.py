"""The best plan's layout in every other usual schedule: once for each layout, and the best of them is found."""

from __future__ import annotations

import pytest

from builders.profiles import joined
from pipeplan.files import Block, CostRow
from pipeplan.planning import candidates
from pipeplan.planning.candidates import PlacementCandidate, likely_choices, placed
from pipeplan.planning.other_schedules import OtherSchedules
from pipeplan.planning.request import Request
from pipeplan.planning.steps import STEPS
from pipeplan.planning.trials import PlanSearch, Trial
from pipeplan.planning.uniform_space import BoundedChoice
from pipeplan.schedule.cpsat.solver import Budget

_ROWS = tuple(
    CostRow(microbatch_size=1, shards=shards, **{name: ns // shards for name, ns in times.items()})
    for times in ({"forward_ns": 40, "backward_ns": 80, "input_grad_ns": 40, "weight_grad_ns": 40},)
    for shards in (1, 2)
)
_PROFILE = joined([Block(id=f"b{index}", operator="ffn", parameter_bytes=8, costs=_ROWS) for index in range(8)])


def _sizes(row: BoundedChoice) -> tuple[int, int, int | None, int]:
    choice = row.choice
    return choice.shards, choice.replicas, choice.positions, choice.batch.microbatch_size


def _looked_at(request: Request, row: BoundedChoice) -> Trial:
    candidate = placed(request, row.choice)
    assert isinstance(candidate, PlacementCandidate)
    trial = Trial.of(request, candidate)
    trial.look(usual=candidate.usual)
    return trial


def test_the_best_layout_is_looked_at_in_each_schedule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request.of(_PROFILE, devices=4, mini_batch=8)
    monkeypatch.setattr(candidates, "LARGE", 1)
    monkeypatch.setattr(PlanSearch, "is_put_off", lambda *_: True)  # by what other layouts take
    layout = 1, 1, 4, 1
    rows = [row for row in likely_choices(request) if _sizes(row) == layout]
    trials = {row.choice.strategy: _looked_at(request, row) for row in rows}
    values = {strategy: trial.value_ns for strategy, trial in trials.items() if trial.value_ns is not None}
    assert len(set(values.values())) > 2, "schedules differ"
    search = PlanSearch(request, Budget(1.0, deterministic=True), None, STEPS)
    search.trials.append(trials[max(values, key=values.__getitem__)])
    OtherSchedules(share=1.0).run(search)
    assert search.best is not None
    assert search.best.value_ns == min(values.values())
    looked_at = search.looked_at
    assert looked_at > 0
    OtherSchedules(share=1.0).run(search)
    assert search.looked_at == looked_at, "once for each layout"
    other = PlanSearch(request, Budget(1.0, deterministic=True), None, STEPS)
    other.trials.append(trials[max(values, key=values.__getitem__)])
    monkeypatch.setattr(candidates, "LARGE", 10**6)
    OtherSchedules().run(other)
    assert other.looked_at == 0, "of small requests every row has its turn"
