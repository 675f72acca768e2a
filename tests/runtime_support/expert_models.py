"""GPT-2 with experts, whose words choose as they are told to: evenly, or nearly all the same few experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo.mixture import ExpertFeedForward, GPTExpertsSize
from pipeplan.runtime.parallel.context import context_of, own_positions
from pipeplan.runtime.parallel.sharding import Split

EXPERTS, EACH, SEQUENCE, HIDDEN = 8, 2, 16, 32

SIZE = GPTExpertsSize(2, HIDDEN, 2, 64, SEQUENCE, SEQUENCE, experts=EXPERTS, width=24, shared_width=16)

FEW = 5
"""Of the experts that words choose among where they are told to choose unevenly; the others get nothing."""

_CERTAIN = 50.0


class ToldRouter(nn.Linear):
    """Adds to the scores of two experts, by a word's place in its text, which so are chosen."""

    told: Tensor

    def forward(self, normed: Tensor) -> Tensor:
        """[samples, places, hidden] to [samples, places, experts]."""
        return F.linear(normed, self.weight) + _CERTAIN * self.told[: normed.shape[1]].to(normed.dtype)


def _told(pairs: list[tuple[int, int]]) -> Tensor:
    return torch.stack([F.one_hot(torch.tensor(pair), EXPERTS).sum(0) for pair in pairs])


def evenly() -> list[tuple[int, int]]:
    """Two experts for each place: of four devices with two each every pair once, and every expert equally often."""
    return [(2 * a, 2 * b + 1) for a, b in product(range(4), repeat=2)]


def unevenly() -> list[tuple[int, int]]:
    """Nearly all choose the first, and three choose nothing that nobody else does."""
    return [(0, 1 + place % 2 if place < SEQUENCE - 3 else FEW - 1 - place % 2) for place in range(SEQUENCE)]


def _router_told(pairs: list[tuple[int, int]], build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def built(*shards: Any) -> nn.Module:
        made = build(*shards)
        assert isinstance(made, ExpertFeedForward)
        made.router.__class__ = ToldRouter
        context = context_of(made.shards)
        places = own_positions(SEQUENCE // context.count, context, torch.device("cpu"))
        begin, end = made.shards.range(len(places)) if made.divided else (0, len(places))
        made.router.told = _told(pairs)[places[begin:end]]  # type: ignore[assignment]  # those of its class now
        return made

    return built


def _choosing(pairs: list[tuple[int, int]], size: GPTExpertsSize, name: str) -> Model:
    model = size.model(name)
    assert model.in_context is not None
    in_context = model.in_context
    shared = replace(_told_in(pairs, model), loss_of="samples", made_up=True)
    return replace(shared, in_context=lambda count: _told_in(pairs, in_context(count)))


def _told_in(pairs: list[tuple[int, int]], model: Model) -> Model:
    def split(one: Split) -> Split:
        return replace(one, build=_router_told(pairs, one.build))

    blocks = (
        replace(
            block,
            build=_router_told(pairs, block.build),
            split=block.split and split(block.split),
            splits={name: split(one) for name, one in block.splits.items()},
        )
        if block.operator == "moe"
        else block
        for block in model.blocks
    )
    return replace(model, blocks=tuple(blocks))


def even() -> Model:
    """Words choose evenly."""
    return _choosing(evenly(), SIZE, "even")


def uneven() -> Model:
    """Most words choose the same few experts."""
    return _choosing(unevenly(), SIZE, "uneven")


def full() -> Model:
    """The same, of whose experts each takes at most the even share."""
    return _choosing(unevenly(), replace(SIZE, capacity=1.0), "full")
