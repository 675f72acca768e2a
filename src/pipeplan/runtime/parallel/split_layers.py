"""Layers that devices split: linear layers, tables of words, and the loss over a split vocabulary.

Each is built for one device's :class:`~pipeplan.runtime.parallel.sharding.Shards`, and is the whole layer for a device
alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeplan.runtime.parallel.sharding import WHOLE, Cut, Shards, Split
from pipeplan.runtime.parallel.weight_grads import embedding, linear

HIDDEN = "hidden"
"""The axis along which an embedding's width is split: each device makes its part of every sample."""

FEATURES = "features"
"""The axis along which a block takes slices of its inputs' last dimension, and gives such a slice."""


def hidden_of(shards: Shards) -> Shards:
    """A device's place among those that split an embedding's width."""
    return shards.along.get(HIDDEN, WHOLE)


def draw(weight: Tensor, std: float) -> None:
    """Make weights small and random; on the meta device, where torch takes milliseconds for it, they have no values."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class RowLinear(nn.Module):
    """A linear layer split by its inputs: [..., inputs of this device] to [..., outputs], summed over the devices.

    The weight [outputs, inputs of this device] is cut along dimension 1; the bias is whole. With ``divided`` each
    device gets its slice of the sum, along the second dimension.
    """

    bias: nn.Parameter | None

    def __init__(
        self, inputs: int, outputs: int, shards: Shards = WHOLE, *, bias: bool = True, divided: bool = False
    ) -> None:
        super().__init__()
        made = nn.Linear(shards.own(inputs), outputs, bias=bias)
        self.shards, self.weight, self.divided = shards, made.weight, divided
        self.register_parameter("bias", made.bias)

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs of this device] to [..., outputs]."""
        if self.shards.count == 1:
            return linear(input, self.weight, self.bias)
        return self.whole(self.part(input))

    def part(self, input: Tensor) -> Tensor:
        """What this device makes of its inputs, of several one part of a sum."""
        return linear(input, self.weight)

    def whole(self, part: Tensor) -> Tensor:
        """Parts summed over the devices, and the bias."""
        result = self.shards.scattered(part) if self.divided else self.shards.summed(part)
        return result if self.bias is None else result + self.bias

    @property
    def deferred_weights(self) -> tuple[Tensor, ...]:
        """Weights whose gradients can wait for W."""
        return (self.weight,)


class Tile(RowLinear):
    """A linear layer of whose weight devices have tiles: slices of its inputs along ``rows``, of its outputs along
    ``columns``: [..., inputs of this device] to [..., outputs of this device].
    """

    def __init__(self, inputs: int, outputs: int, shards: Shards = WHOLE, *, bias: bool = True) -> None:
        columns = shards.along.get("columns", WHOLE)
        super().__init__(inputs, outputs // columns.count, shards.along.get("rows", WHOLE), bias=bias)
        self.columns = columns

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs of this device] to [..., outputs of this device]."""
        return super().forward(self.columns.shared(input))

    @staticmethod
    def ways(build: Callable[[Shards], nn.Module], name: str = "", *, bias: bool = True) -> dict[str, Split]:
        """How a block that is a tile, or has one under this name and nothing else, can be split."""
        prefix = f"{name}." if name else ""
        columns = {f"{prefix}{each}": Cut() for each in (("weight", "bias") if bias else ("weight",))}
        rows = Split(build, {f"{prefix}weight": Cut(1)}, takes=True)
        return {"rows": rows, "columns": Split(build, columns, gives=True)}


class WordEmbedding(nn.Module):
    """A table of words split by its rows, and by its width along the axis ``hidden``: indices [...] to [..., width].

    The weight [words of this device, width of this device] is ``Cut(0, even=False)``, and ``Cut(1)``. With ``divided``
    each device gets the width of its slice of the indices, along the second dimension.
    """

    def __init__(
        self, words: int, width: int, shards: Shards = WHOLE, *, std: float = 0.02, divided: bool = False
    ) -> None:
        super().__init__()
        self.shards, self.divided, (self.begin, self.end) = shards, divided, shards.range(words)
        self.weight = nn.Parameter(torch.empty(self.end - self.begin, width // hidden_of(shards).count))
        draw(self.weight, std)

    def forward(self, indices: Tensor) -> Tensor:
        """[...] to [..., width of this device]; words of other devices come with the sum."""
        if self.shards.count == 1:
            return embedding(indices, self.weight)
        elsewhere = (indices < self.begin) | (indices >= self.end)
        found = embedding((indices - self.begin).masked_fill(elsewhere, 0), self.weight)
        part = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return self.shards.scattered(part) if self.divided else self.shards.summed(part)

    @property
    def deferred_weights(self) -> tuple[Tensor, ...]:
        """Weights whose gradients can wait for W."""
        return (self.weight,)


def cross_entropy(
    logits: Tensor, targets: Tensor, words: int, shards: Shards = WHOLE, *, ignore_index: int = -100
) -> Tensor:
    """The loss of every token, as ``F.cross_entropy`` without reduction, from the logits of this device's words.

    The devices exchange two numbers per token, where Megatron-LM has three exchanges: the logarithm of the sum of
    exponentials, and the target's logit.

    Args:
        logits: [..., words of this device], made of what comes from ``shards.shared`` or ``shards.joined``.
        targets: [...] indices of words; where they are ``ignore_index`` the loss is 0.
        words: of all devices.
        shards: this device's place.
    """
    begin, end = shards.range(words)
    elsewhere = (targets < begin) | (targets >= end)
    wanted = logits.gather(-1, (targets - begin).masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    own = torch.stack((logits.logsumexp(-1), wanted.masked_fill(elsewhere, 0.0)))
    sums, found = shards.gathered(own.unsqueeze(1), 1).unbind()
    return (sums.logsumexp(0) - found.sum(0)).masked_fill(targets == ignore_index, 0.0)
