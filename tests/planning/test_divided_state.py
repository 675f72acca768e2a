"""Levels that nobody asked for: where they are looked at, and what a search finds by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders.sharded import chain_of, pairs
from pipeplan.checker import check
from pipeplan.files import Recipe
from pipeplan.planning.divided_state import divides_by_default
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan, without

KEPT_WHOLE = without({"divide state"})


def asked(sizes: list[int], memory_bytes: int | None, **how: Any) -> Request:
    own: dict[str, Any] = {"mini_batch": 8, "time_limit": 1.0, "deterministic": True} | how
    if "devices" not in own:
        own["cluster"] = pairs(2)
    return Request.of(chain_of(sizes), memory_bytes=memory_bytes, **own)


def test_replicas_that_divide_all_take_the_place_of_stages_that_are_uneven() -> None:
    """Three blocks in two stages, or all of them on both devices, which have no room for two copies of their state."""
    request = asked([20, 20, 20], 1300)
    whole, found = search_plan(replace(request, zero=0)), search_plan(request)
    assert whole.plan.predicted.iteration_ns == 4926
    assert found.plan.predicted.iteration_ns == 3670  # what --zero auto finds, in a seventh of its work
    assert {stage.zero for stage in found.plan.placed.stages} == {3}
    assert found.lower_bound_ns <= 3670
    assert not check(found.plan, request.profile, cluster=request.cluster).problems


@pytest.mark.parametrize(("sizes", "memory_bytes"), [([5, 20, 10], 1197), ([5, 10, 10], 559)])
def test_what_is_found_is_never_longer_than_with_all_state_whole(sizes: list[int], memory_bytes: int) -> None:
    request = asked(sizes, memory_bytes)
    found, whole = search_plan(request), search_plan(request, steps=KEPT_WHOLE)
    assert found.plan.predicted.iteration_ns <= whole.plan.predicted.iteration_ns


def test_state_stays_whole_where_dividing_it_would_be_free_or_is_not_open() -> None:
    request = asked([20, 20, 20], 1300)
    assert divides_by_default(request)
    assert divides_by_default(asked([20, 20, 20], None)), "for the optimizer's step is shared out, too"
    custom = request.profile.model_copy(update={"recipe": Recipe()})
    for other in (
        asked([20, 20, 20], 1300, devices=2),  # messages take no time
        replace(request, profile=custom),  # as papers print bytes, which may not be apart
        replace(request, zero=0),
        replace(request, replicas=1),
        replace(request, num_parted=1),
        replace(request, planner="graphpipe"),
        replace(request, placement=search_plan(replace(request, zero=0)).plan.placed),
    ):
        assert not divides_by_default(other)
