"""Where memory is short: the plainest layouts that need least are asked first what they need, and are a first plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from builders.chains import chain_profile, split_chain
from pipeplan.errors import InfeasibleError
from pipeplan.files import Profile, TiedParameter
from pipeplan.planning.candidates import even_cuts, has_table, likely_choices
from pipeplan.planning.infeasibility import ExplainShortage, shortage
from pipeplan.planning.leanest import least_bytes, placed_lean, plainest_first, weighing_levels
from pipeplan.planning.request import Request
from pipeplan.planning.steps import STEPS, EvenCut
from pipeplan.planning.trials import PlanSearch
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.units import MAX_BYTES

TABLE, OWN, ACTIVATION = 10**9, 5 * 10**7, 10**8
PUNCTUAL = ExplainShortage(seconds=0.0, working=0.0)


def shared_ends(own: int = OWN) -> Profile:
    """Ten blocks, whose ends share a table of 1 GB: with gradients of as much, and 6 GB that an optimizer keeps."""
    chain = chain_profile(10, placed=False, parameter_bytes=own, activation_bytes=ACTIVATION)
    kept = {"parameter_bytes": TABLE, "optimizer_bytes": 6 * TABLE}
    blocks = [block.model_copy(update={"optimizer_bytes": 6 * own}) for block in chain.blocks]
    blocks = [blocks[0].model_copy(update=kept), *blocks[1:-1], blocks[-1].model_copy(update=kept)]
    tied = TiedParameter.model_validate({"name": "table", "blocks": (blocks[0].id, blocks[-1].id), **kept})
    return chain.model_copy(update={"blocks": tuple(blocks), "tied": (tied,)})


def branching(chain: Profile) -> Profile:
    """The same but that the third block waits for the first two, so that whole blocks have no table of layouts."""
    first, second, *others = chain.edges
    return chain.model_copy(update={"edges": (first.model_copy(update={"target": second.target}), second, *others)})


def asked(memory_bytes: int, **others: Any) -> Request:
    how: dict[str, Any] = {"devices": 4, "mini_batch": 8, "memory_bytes": memory_bytes}
    return Request.of(shared_ends(), **how | others)


def on_four_replicas() -> int:
    """Bytes of a device that has all blocks, their table once, and a fourth of what the optimizer keeps."""
    return (TABLE + 8 * OWN) * (2 + 6 // 4) + (TABLE + 8 * OWN) * 2 // 4 + ACTIVATION


@pytest.mark.counted(1e-4)
@pytest.mark.parametrize("scheduler", ["auto", "1f1b"])
@pytest.mark.parametrize("of_table", [False, True])
def test_replicas_that_divide_their_state_are_asked_before_one_pipeline_is_asked_for_less(
    scheduler: str, of_table: bool
) -> None:
    """On one pipeline an end has all that is kept of the table, 8 GB; that was halved for most of the time."""
    request = asked(3 * 10**9, scheduler=scheduler)
    request = request if of_table else replace(request, profile=branching(request.profile))
    assert has_table(request) == of_table
    found = shortage(request, InfeasibleError("no"), 0.15, PUNCTUAL)
    assert "(tp 1 dp 4 ZeRO 1 pp 1, all recomputed)" in str(found)
    assert found.enough_bytes is not None
    assert found.enough_bytes <= 1.01 * on_four_replicas()


def test_what_a_layout_must_hold_is_no_more_than_it_needs_where_it_is_placed() -> None:
    """Else it would not be placed where it fits; and of one stage on each device it is near that."""
    request = weighing_levels(asked(10**9))
    plain, others = plainest_first(request)
    assert {(each.replicas, each.recompute) for each in plain} == {(1, True), (2, True), (4, True)}
    for point in plain + others:
        found = placed_lean(request, point)
        if isinstance(found, InfeasibleError):
            assert found.enough_bytes is not None
            assert least_bytes(request, point) <= found.enough_bytes
            assert found.enough_bytes <= 1.2 * least_bytes(request, point) or point not in plain


def test_a_row_of_the_table_needs_no_less_than_its_largest_block() -> None:
    """Of even shares alone one pipeline would need 2.6 GB, where one block has 4 GB by itself."""
    chain = split_chain(8, shards=(1, 2), activation_bytes=ACTIVATION)
    large = chain.blocks[0].model_copy(update={"parameter_bytes": TABLE, "optimizer_bytes": 2 * TABLE})
    profile = chain.model_copy(update={"blocks": (large, *chain.blocks[1:])})
    request = Request.of(profile, devices=4, mini_batch=8, memory_bytes=MAX_BYTES)
    rows = likely_choices(request)
    for row in rows:
        kept = (2 * TABLE + 2 * TABLE // row.choice.zero.group) // row.choice.shards
        assert row.least_bytes >= kept
    assert min(row.least_bytes for row in rows if row.choice.replicas * row.choice.shards == 1) >= 4 * TABLE


@pytest.mark.slow
@pytest.mark.counted(1e-4)
@pytest.mark.parametrize("shards", [(1,), (1, 2)], ids=["grid", "table"])
def test_a_first_plan_fits_into_what_is_said_to_do(shards: tuple[int, ...]) -> None:
    """Blocks that take as long, and keep more and more, are cut evenly by what they keep: by time they do not fit."""
    chain = split_chain(8, shards=shards, activation_bytes=ACTIVATION)
    blocks = [
        block.model_copy(update={"parameter_bytes": place * OWN, "optimizer_bytes": 0})
        for place, block in enumerate(chain.blocks, 1)
    ]
    profile = chain.model_copy(update={"blocks": tuple(blocks)})
    request = replace(asked(10**8), profile=profile if len(shards) > 1 else branching(profile))
    assert has_table(request) == (len(shards) > 1), "whole blocks that are no chain have none"
    enough = shortage(request, InfeasibleError("no"), 0.3, PUNCTUAL).enough_bytes
    assert enough is not None
    roomy = request.within(enough)
    assert not list(even_cuts(roomy))
    search = PlanSearch(roomy, Budget(math.inf), None, STEPS)
    EvenCut(seconds=math.inf).run(search)
    assert search.answer is not None
    assert search.answer.best is not None
    assert search.answer.best.fullest[0] <= enough
