"""GPT-2 with experts, whose words choose as they are told to: evenly, or nearly all the same few experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo.mixture import ExpertFeedForward, GPTExpertsSize
from pipeplan.runtime.parallel.context import context_of, own_positions
from pipeplan.runtime.parallel.sharding import Shards, Split

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


class DroppingByHand(ExpertFeedForward):
    """Leaves out what is beyond capacities word by word: each device's own are those of some places of some samples."""

    samples: int
    places: list[list[int]]

    def _chosen(self, normed: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        if normed.is_meta:
            return super()._chosen(normed, chosen, shares)
        kept = torch.zeros(*normed.shape[:2], EXPERTS, dtype=shares.dtype)
        for first in range(0, len(normed), self.samples):
            for own in self.places:
                words = [(sample, place) for sample in range(first, first + self.samples) for place in own]
                room = [-(-len(words) * EACH // EXPERTS)] * EXPERTS  # the even share
                for word in words:
                    for number, expert in enumerate(chosen[word].tolist()):
                        room[expert] -= 1
                        if room[expert] >= 0:
                            kept[(*word, expert)] = shares[word][number]
        wide = F.gelu(torch.einsum("swh,efh->swef", normed, self.expand), approximate="tanh")
        return torch.einsum("swef,ehf,swe->swh", wide, self.project, kept)


def full(samples: int = 1, parts: int = 1, *, pieces: bool = False) -> Model:
    """The same, of whose experts each takes at most the even share of a device's words in a micro-batch.

    Whole, it does as devices do that have so many samples of each, and of each sequence one of some parts: slices, or
    an early and a late one of smaller pieces.
    """
    model = _choosing(unevenly(), replace(SIZE, capacity=1.0), "full")
    each = [own_positions(SEQUENCE // parts, Shards(parts, n), torch.device("cpu")).tolist() for n in range(parts)]
    slices = [list(range(n * SEQUENCE // parts, (n + 1) * SEQUENCE // parts)) for n in range(parts)]

    def by_hand(build: Callable[[], nn.Module]) -> nn.Module:
        made = build()
        made.__class__, made.samples, made.places = (  # type: ignore[assignment]  # those of its class now
            DroppingByHand,
            samples,
            each if pieces else slices,
        )
        return made

    blocks = (
        replace(block, build=partial(by_hand, block.build)) if block.operator == "moe" else block
        for block in model.blocks
    )
    return replace(model, blocks=tuple(blocks))


def full_pieces() -> Model:
    """Of two samples of each micro-batch, and two pieces of each sequence."""
    return full(2, 2, pieces=True)
