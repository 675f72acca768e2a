"""GPT-2 (Radford et al. 2019): learned positions, pre-LayerNorm layers, causal attention.

The output layer shares the token embedding. No dropout. Split over devices as in Megatron-LM (Shoeybi et al. 2019).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.batches import token_batch
from pipeplan.runtime.model import BlockSpec, Collective, Model
from pipeplan.runtime.zoo.layers import Stack, layers, require_divisible, sums

__all__ = ["Embedding", "EmbeddingShare", "GPTSize", "Head", "HeadShare", "gpt", "words"]

_FLOAT32_BYTES = 4
_LOSS_NUMBERS = 3
"""Per token and device, of words split over devices: largest logit, sum of exponentials, the target's logit."""


@dataclass(frozen=True, slots=True)
class GPTSize:
    """Dimensions of a GPT-2 model.

    ``positions`` is the longest sequence it can take, ``sequence`` the one its batches have. With ``tied`` the output
    layer shares the token embedding's weight. ``shared`` spreads embedding and head over all devices, as Tessel does.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50257
    positions: int = 1024
    sequence: int = 1024
    tied: bool = True
    shared: bool = False

    @property
    def longest(self) -> int:
        """The longest sequence."""
        return self.positions

    @property
    def stack(self) -> Stack:
        """Its layers."""
        return Stack(self.layers, self.hidden, self.heads, self.sequence, causal=True)

    def model(self, name: str) -> Model:
        """The model of this size."""
        return gpt(name, self)


class Embedding(nn.Module):
    """Token and position embedding: tokens [samples, sequence] to [samples, sequence, hidden]."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.hidden)
        self.position = nn.Embedding(size.positions, size.hidden)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, sequence] to [samples, sequence, hidden]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = self.token(tokens) + self.position(positions)
        return result


class Head(nn.Module):
    """Final LayerNorm, output layer (shares the token embedding) and the sum of the tokens' cross-entropies."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.hidden)
        self.output = nn.Linear(size.hidden, size.vocabulary, bias=False)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, sequence, hidden] and targets [samples, sequence] to a scalar, in float32 at least."""
        logits = self.output(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a sum of thousands needs the digits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class EmbeddingShare(Embedding):
    """The first of several devices' rows of the token embedding, and all positions.

    Words of other devices are zeros here, for the sum over devices to fill in.
    """

    def __init__(self, size: GPTSize, num_devices: int) -> None:
        super().__init__(replace(size, vocabulary=_words(size, num_devices)))

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, sequence] to [samples, sequence, hidden]."""
        elsewhere = tokens >= self.token.num_embeddings
        found = self.token(tokens.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        result: Tensor = found + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return result


class HeadShare(Head):
    """The first of several devices' words of the output layer, and what it knows of the loss.

    Of each token the devices share the sum of exponentials, its shift, and the target's logit.
    """

    def __init__(self, size: GPTSize, num_devices: int) -> None:
        super().__init__(replace(size, vocabulary=_words(size, num_devices)))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, sequence, hidden] and targets [samples, sequence] to a scalar, as if all words were here."""
        logits = self.output(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        elsewhere = targets >= self.output.out_features
        wanted = logits.gather(-1, targets.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        result: Tensor = (logits.logsumexp(-1) - wanted.masked_fill(elsewhere, 0.0)).sum()
        return result


def gpt(name: str, size: GPTSize) -> Model:
    """A GPT-2 of the given size: embedding, then attention and feed-forward of each layer, then head with loss."""
    return replace(_gpt(name, size, 1), sharded=partial(_share, name, size))


def _share(name: str, size: GPTSize, num_devices: int) -> Model:
    """The first device's share: of heads, of the perceptron's width, and of words, of which the last has fewer."""
    require_divisible(name, size.stack, num_devices)
    return _gpt(name, size, num_devices)


def _gpt(name: str, size: GPTSize, num_devices: int) -> Model:
    first = words(size, "embedding", num_devices)
    middle = layers("layer", size.stack, (first.id,), num_devices=num_devices)
    return Model(
        name,
        (first, *middle, _head(size, middle[-1].id, num_devices)),
        partial(token_batch, size.vocabulary, size.sequence),
        lambda batch: batch["targets"].numel(),
        tied=((("embedding", "token.weight"), ("head", "output.weight")),) if size.tied else (),
    )


def words(size: GPTSize, id_: str, num_devices: int = 1) -> BlockSpec:
    """The embedding of the batch's ``tokens``, or one device's share of it."""
    whole, n = num_devices == 1, num_devices
    return BlockSpec(
        id_,
        "embedding",
        partial(Embedding, size) if whole else partial(EmbeddingShare, size, n),
        samples=("tokens",),
        dimensions=size.stack.sizes | {"vocabulary": _words(size, n)},
        shared=size.shared,
        collectives=sums(size.stack, n, "F"),
    )


def _head(size: GPTSize, source: str, num_devices: int) -> BlockSpec:
    whole, n = num_devices == 1, num_devices
    gathered = Collective("all_gather", "F", _FLOAT32_BYTES * size.sequence * _LOSS_NUMBERS * n)
    return BlockSpec(
        "head",
        "head",
        partial(Head, size) if whole else partial(HeadShare, size, n),
        (source,),
        ("targets",),
        loss=True,
        dimensions=size.stack.sizes | {"vocabulary": _words(size, n)},
        shared=size.shared,
        collectives=() if whole else (gathered, *sums(size.stack, n, "I")),
    )


def _words(size: GPTSize, num_devices: int) -> int:
    """Words of the first device."""
    return -(-size.vocabulary // num_devices)
