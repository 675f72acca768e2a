"""A first look at a very long run: its times may take long to repeat."""

from __future__ import annotations

import pytest

from builders.profiles import joined
from pipeplan.files import Block, CostRow
from pipeplan.planning.candidates import PlacementCandidate, placed, strategy_choices
from pipeplan.planning.request import Request
from pipeplan.planning.trials import Trial
from pipeplan.schedule.search import FirstLook, first_look


@pytest.mark.slow
def test_a_look_waits_until_times_repeat() -> None:
    """DualPipeV of 32 stages, one of them longer, repeats after over 20,000 actions; in groups it takes 8 % more."""
    row = CostRow(
        microbatch_size=1,
        forward_ns=1000,
        backward_ns=2230,
        input_grad_ns=1230,
        weight_grad_ns=1000,
        activation_bytes=1,
    )
    rows = [row] * 31 + [row.model_copy(update={"forward_ns": 1030})]
    blocks = [Block(id=f"b{at}", operator="layer", parameter_bytes=1, costs=(own,)) for at, own in enumerate(rows)]
    how = {"mini_batch": 256, "microbatch_size": 1, "placement": "v-shape", "split_backward": True}
    request = Request.of(joined(blocks), devices=16, **how)
    candidate = placed(request, strategy_choices(request)[0])
    assert isinstance(candidate, PlacementCandidate)
    (way,) = Trial.of(request, candidate).ways
    found, early = (
        first_look(way, look, names=["dualpipe-v"]) for look in (FirstLook(), FirstLook(most_written=20_000))
    )
    assert found is not None
    assert early is not None
    assert (found.scheduler, early.scheduler) == ("dualpipe-v", "dualpipe-v+groups")
    assert 1.08 * found.iteration_ns < early.iteration_ns
