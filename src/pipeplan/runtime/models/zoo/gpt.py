"""GPT-2 (Radford et al. 2019): learned positions, pre-LayerNorm layers, causal attention.

The output layer shares the token embedding. No dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pipeplan.runtime.models.spec import BlockSpec, Model, Texts
from pipeplan.runtime.models.synthetic_batches import next_tokens, token_batch
from pipeplan.runtime.models.zoo.layers import (
    WORDS,
    LayerStack,
    exchanged,
    layers,
    linear,
    num_targets,
    summed_loss,
    with_shares,
    words_told,
)
from pipeplan.runtime.models.zoo.per_operator import operators_of_head, operators_of_layers
from pipeplan.runtime.parallel.sharding import WHOLE, Cut, Shards, Split
from pipeplan.runtime.parallel.split_layers import HIDDEN, WordEmbedding, hidden_of

__all__ = ["GPTSize", "Head", "TokenEmbedding", "gpt", "words"]


@dataclass(frozen=True, slots=True)
class GPTSize:
    """Dimensions of a GPT-2 model.

    ``positions`` is the longest sequence it can take, ``sequence`` the one its batches have. With ``tied`` the output
    layer shares the token embedding's weight. ``shared`` spreads embedding and head over all devices, as Tessel does.
    With ``by_operator`` every operator is a block.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    sequence: int
    tied: bool = True
    shared: bool = False
    by_operator: bool = False

    @property
    def longest(self) -> int:
        """The longest sequence."""
        return self.positions

    @property
    def stack(self) -> LayerStack:
        """Its layers."""
        return LayerStack(self.layers, self.hidden, self.heads, self.sequence, causal=True)

    def model(self, name: str) -> Model:
        """The model of this size."""
        return _by_operator(name, self) if self.by_operator else gpt(name, self)


class TokenEmbedding(nn.Module):
    """Token and position embedding: tokens [samples, sequence] to [samples, sequence, hidden]."""

    def __init__(self, size: GPTSize, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.token = WordEmbedding(size.vocabulary, size.hidden, shards)
        self.position = nn.Embedding(size.positions, size.hidden // hidden_of(shards).count)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, sequence] to [samples, sequence, hidden], or this device's part of hidden."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = self.token(tokens) + self.position(positions)
        return result


class Head(nn.Module):
    """Final LayerNorm, output layer (shares the token embedding) and the sum of the tokens' cross-entropies."""

    def __init__(self, size: GPTSize, shards: Shards = WHOLE) -> None:
        super().__init__()
        begin, end = shards.range(size.vocabulary)
        self.vocabulary, self.shards = size.vocabulary, shards
        self.norm = nn.LayerNorm(size.hidden)
        self.output = linear(size.hidden, end - begin, biased=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, sequence, hidden] and targets [samples, sequence] to a scalar, in float32 at least."""
        logits = self.output(self.shards.shared(self.norm(x)))
        return summed_loss(logits, targets, self.vocabulary, self.shards)


def gpt(name: str, size: GPTSize) -> Model:
    """A GPT-2 of the given size: embedding, then attention and feed-forward of each layer, then head with loss."""
    return with_shares(partial(_gpt, name, size))


def _gpt(name: str, size: GPTSize, shards: Shards) -> Model:
    """The model, or the first device's share of it."""
    first = words(size, "embedding", shards)
    middle = layers("layer", size.stack, (first.id,), shards=shards)
    return Model(
        name,
        (first, *middle, _head(size, middle[-1].id, shards)),
        partial(token_batch, size.vocabulary, size.sequence),
        num_targets,
        tied=((("embedding", "token.weight"), ("head", "output.weight")),) if size.tied else (),
        texts=Texts(size.vocabulary, size.sequence + 1, next_tokens),
    )


def _by_operator(name: str, size: GPTSize) -> Model:
    """The model with an operator to a block."""
    first = words(size, "embedding", WHOLE)
    middle = operators_of_layers(size.stack, first.id)
    return Model(
        name,
        (first, *middle, *operators_of_head(size.stack, size.vocabulary, middle[-1].id)),
        partial(token_batch, size.vocabulary, size.sequence),
        num_targets,
        tied=((("embedding", "token.weight"), ("head.output", "weight")),) if size.tied else (),
        texts=Texts(size.vocabulary, size.sequence + 1, next_tokens),
    )


def words(size: GPTSize, id_: str, shards: Shards) -> BlockSpec:
    """The embedding of the batch's ``tokens``."""
    begin, end = shards.range(size.vocabulary)
    build = partial(TokenEmbedding, size)
    by_width = {"token.weight": Cut(1), "position.weight": Cut(1)}
    return BlockSpec(
        id_,
        "embedding",
        partial(TokenEmbedding, size, shards),
        samples=("tokens",),
        dimensions=size.stack.sizes | {"vocabulary": end - begin},
        shared=size.shared,
        collectives=exchanged(shards, ("all_reduce", "F", size.stack.numbers)),
        split=Split(build, {"token.weight": WORDS}),
        splits={HIDDEN: Split(build, by_width, gives=True)},
    )


def _head(size: GPTSize, source: str, shards: Shards) -> BlockSpec:
    begin, end = shards.range(size.vocabulary)
    return BlockSpec(
        "head",
        "head",
        partial(Head, size, shards),
        (source,),
        ("targets",),
        loss=True,
        dimensions=size.stack.sizes | {"vocabulary": end - begin},
        shared=size.shared,
        collectives=exchanged(shards, words_told(shards, size.sequence), ("all_reduce", "I", size.stack.numbers)),
        split=Split(partial(Head, size), {"output.weight": WORDS}),
    )
