"""What no strategy takes less than: below every strategy that is tracked, near the least, and known without a price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeplan.costs.resharding import Resharding
from pipeplan.examples import model
from pipeplan.files import Profile
from pipeplan.planning.request import Batch, Request, Splitting
from pipeplan.planning.sharding_frontier import least_of_splits, split_frontier

GPT2 = model("gpt2-124m", microbatch_sizes=(1, 2, 4), shards=(1, 2, 4))


def with_width(profile: Profile, parameter_bytes: int) -> Profile:
    """Each block with so many bytes of parameters."""
    blocks = tuple(each.model_copy(update={"parameter_bytes": parameter_bytes}) for each in profile.blocks)
    return profile.model_copy(update={"blocks": blocks})


CASES = {
    "blocks": (GPT2, 4, Splitting()),
    "blocks that are large": (with_width(GPT2, 10**9), 4, Splitting()),
    "a device": (GPT2, 1, Splitting()),
    "two dimensions": (GPT2, 4, Splitting(mesh_dimensions=2)),
    "loaded by samples": (GPT2, 4, Splitting(data_parallel_loading=True)),
    "operators": (model("gpt2-124m", microbatch_sizes=(1, 2), shards=(1,)), 2, Splitting(whole_blocks=False)),
    "branches": (model("mmt", microbatch_sizes=(1, 2, 4), shards=(1, 2)), 4, Splitting()),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("samples", [4, 64])
def test_no_strategy_takes_less_and_one_takes_little_more(case: str, samples: int) -> None:
    profile, devices, splitting = CASES[case]
    request = Request(profile, devices, Batch(1, samples))
    least = least_of_splits(request, splitting)
    found = min(point.memory_bytes for point in split_frontier(request, replace(splitting, within=0.01)).points)
    assert 0 < least.state_bytes <= least.num_bytes <= found
    assert least.num_bytes >= 0.8 * found


def test_it_is_known_without_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("a price was asked for")

    for name in ("times", "whole_ns", "move_ns", "_weights_of"):
        monkeypatch.setattr(Resharding, name, fail)
    request = Request(GPT2, 64, Batch(1, 256))
    least = least_of_splits(request, Splitting())
    state = sum(block.parameter_bytes for block in GPT2.blocks)
    assert state / 4 < least.state_bytes < least.num_bytes
