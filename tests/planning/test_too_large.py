"""One stage into which nothing fits: said before anything is priced, with what would do."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import InfeasibleError
from pipeplan.examples import model
from pipeplan.planning import frontier, plan_frontier, sharding_frontier, too_large
from pipeplan.planning.frontier import frontier_request, search_frontier
from pipeplan.planning.plan_frontier import _FrontierSearch, some_plan
from pipeplan.planning.request import Request, Splitting
from pipeplan.planning.sharding_frontier import least_of_splits
from pipeplan.time_limit import Limit
from pipeplan.units import format_bytes, parse_bytes

GPT2 = model("gpt2-124m", microbatch_sizes=(1, 2, 4), shards=(1, 2, 4))
LIMIT = parse_bytes("379MB")


def asked(memory: str | None, *devices: int, mini_batch: int = 64) -> Request:
    memory_bytes = None if memory is None else parse_bytes(memory)
    cluster = named_cluster("tensoropt", 16)
    given = {"devices": devices, "cluster": cluster, "memory_bytes": memory_bytes, "mini_batch": mini_batch}
    return frontier_request(GPT2, splitting=Splitting(), **given)  # type: ignore[arg-type]


@pytest.fixture
def unpriced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for costs fails, and what is looked for has all the time it wants."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("costs were asked for")

    for room in (frontier, plan_frontier, sharding_frontier):
        monkeypatch.setattr(room, "costs_of_splits", fail)
    for name in ("TOO_LARGE_SECONDS", "TOO_LARGE_PLAN_SECONDS"):
        monkeypatch.setattr(too_large, name, math.inf)


@pytest.mark.usefixtures("unpriced")
def test_it_is_said_before_costs_are_worked_out_and_a_plan_that_does_is_found() -> None:
    request = asked("379MB", 16)
    least = least_of_splits(request, Splitting())
    assert least.state_bytes > LIMIT, "whatever its samples"
    with pytest.raises(InfeasibleError) as told:
        search_frontier(request)
    text = str(told.value)
    missing, needs, state = map(format_bytes, (least.num_bytes - LIMIT, least.num_bytes, least.state_bytes))
    assert f"nothing fits into 379MB per device, at least {missing} too little: with 64 samples" in text
    assert f"each needs at least {needs} on 16 devices, {state} of it for parameters" in text
    assert "mini-batch to" not in text.split("--split-level")[0], "no number of samples does"
    assert told.value.enough_bytes is None
    (said,) = re.findall(r"give --plans: one was found that takes ([0-9.]+[MG]B)", text)
    plan = some_plan(frontier._as_plans(request), Limit())
    assert plan is not None
    assert format_bytes(plan.memory_bytes) == said
    assert max(device.peak_bytes for device in plan.plan.predicted.memory) == plan.memory_bytes <= LIMIT


def test_fewer_samples_are_tracked_where_they_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose least is too large are passed over, and the first that fits is told."""
    for name in ("TOO_LARGE_SECONDS", "TOO_LARGE_PLAN_SECONDS"):
        monkeypatch.setattr(too_large, name, math.inf)
    tracked: list[int] = []
    real = too_large.split_frontier

    def counted(request: Request, splitting: Splitting) -> Any:
        tracked.append(request.batch.mini_batch)
        return real(request, splitting)

    monkeypatch.setattr(too_large, "split_frontier", counted)
    with pytest.raises(InfeasibleError, match=r"lower --mini-batch to 16,") as told:
        search_frontier(asked("2.5GB", 16))
    assert tracked[0] <= 32
    assert "that may do" not in str(told.value) or "--split-level operator" in str(told.value)
    assert search_frontier(asked("2.5GB", 16, mini_batch=16)).points


def test_what_is_too_large_on_some_devices_is_a_note_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where costs are soon worked out they say how much exactly; the others are not priced."""
    monkeypatch.setattr(too_large, "TOO_LARGE_DEVICES", 1)
    small = replace(asked(None, 1, 2, 4, mini_batch=16), time_limit=math.inf)
    least = {each.num_devices: least_of_splits(each, Splitting()).num_bytes for each in small.by_devices}
    request = replace(small, memory_bytes=(least[2] + least[4]) // 2)
    found = search_frontier(request)
    assert {point.num_devices for point in found.points} == {4}
    assert f"2 devices: not enough, each would need at least {format_bytes(least[2])}" in found.notes
    assert any(note.startswith("1 device: not enough, each would need at least ") for note in found.notes)


@pytest.mark.usefixtures("unpriced")
def test_plans_waste_no_time_on_one_stage_that_does_not_fit() -> None:
    """That is all that there is to it: nothing is left to be tracked."""
    search = _FrontierSearch(Limit(), iter(()), rough=[16])
    search.one_stage(replace(asked("379MB", 16), splitting=None))
    assert (search.best, search.rough) == ([], [])


def test_what_takes_long_to_find_out_is_not_known() -> None:
    """A fifth of the time, by a clock that each question moves; without a limit there is all the time it wants."""
    request, asked_for = asked("379MB", 16), 0

    def clock() -> float:
        nonlocal asked_for
        asked_for += 1
        return float(asked_for)

    assert too_large.too_large(request, Splitting(), Limit(20.0, clock=clock)) is None
    assert asked_for < 10
    assert too_large.too_large(request, Splitting(), None) == least_of_splits(request, Splitting())
