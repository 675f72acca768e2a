"""Levels that nobody asked for: where they are looked at, and what a search finds by them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from builders.sharded import chain_of, pairs
from pipeplan.checker import check
from pipeplan.files import Recipe
from pipeplan.partition.placement import place
from pipeplan.planning.candidates import PlacementCandidate, has_table
from pipeplan.planning.divided_state import divides_by_default
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, EvenCut, search_plan, without
from pipeplan.planning.trials import PlanSearch, Trial
from pipeplan.schedule.cpsat.solver import Budget

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
    request = asked(sizes, memory_bytes, placement="one-to-one")
    found, whole = search_plan(request), search_plan(request, steps=KEPT_WHOLE)
    assert found.plan.predicted.iteration_ns <= whole.plan.predicted.iteration_ns


def test_state_stays_whole_where_dividing_it_would_be_free_or_is_not_open() -> None:
    request = asked([20, 20, 20], 1300, placement="one-to-one")
    assert divides_by_default(request)
    assert divides_by_default(asked([20, 20, 20], None, placement="one-to-one")), (
        "for the optimizer's step is shared out, too"
    )
    custom = request.profile.model_copy(update={"recipe": Recipe()})
    for other in (
        asked([20, 20, 20], 1300),  # in a table of layouts levels are choices like any other
        asked([20, 20, 20], 1300, devices=2, placement="one-to-one"),  # messages take no time
        replace(request, profile=custom),  # as papers print bytes, which may not be apart
        replace(request, zero=0),
        replace(request, replicas=1),
        replace(request, num_parted=1),
        replace(request, planner="graphpipe"),
        replace(request, placement=search_plan(replace(request, zero=0)).plan.placed),
    ):
        assert not divides_by_default(other)


def test_all_levels_are_open_at_once_where_the_first_plan_has_no_room_without_one() -> None:
    """Two blocks that a third waits for, of which the first is too large for a device; half of the time was for whole
    copies alone."""
    profile = chain_of([60, 5, 5])
    first, last = profile.edges
    profile = profile.model_copy(update={"edges": (first.model_copy(update={"target": last.target}), last)})
    request = Request.of(profile, cluster=pairs(2), memory_bytes=1000, mini_batch=8, time_limit=1.0, deterministic=True)
    search = PlanSearch(request, Budget(math.inf), None, STEPS)
    assert not search.gives_way
    EvenCut(seconds=math.inf).run(search)
    assert search.best is None
    assert search.spare is not None
    assert search.gives_way
    assert search_plan(request).plan.predicted.iteration_ns <= (search.spare.value_ns or 0)


def test_a_table_that_has_all_levels_is_looked_at_though_the_first_plan_divides_state() -> None:
    """A search ended with its first plan, three times as long as the best of what it had not looked at."""
    whole = Request.of(
        chain_of([5, 5, 5]), cluster=pairs(2), replicas=2, placement="one-to-one", memory_bytes=99, mini_batch=8
    )
    table = replace(whole, num_devices=4, cluster=pairs(4), positions=2)
    assert not has_table(whole)
    assert has_table(table)
    for request, gives_way in ((whole, True), (table, False)):
        search = PlanSearch(request, Budget(math.inf), None, STEPS)
        assert not search.gives_way
        placement = place(request.profile, "one-to-one", 2, microbatch_size=1)
        search.spare = Trial.of(request, PlacementCandidate(placement, Batch(8, 1), False, "by hand"))
        assert search.gives_way == gives_way
