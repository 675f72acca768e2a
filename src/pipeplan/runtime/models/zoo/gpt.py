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
from pipeplan.runtime.models.zoo.layers import LayerStack, ZooSize, layers, num_targets, word_embedding, word_head
from pipeplan.runtime.models.zoo.per_operator import operators_of_head, operators_of_layers
from pipeplan.runtime.parallel.sharding import WHOLE, Shards
from pipeplan.runtime.parallel.split_layers import WordEmbedding, hidden_of

__all__ = ["GPTSize", "words"]


@dataclass(frozen=True, slots=True)
class GPTSize(ZooSize):
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
        """The model of this size; of one by operators nothing is known of shares."""
        return self._model(name, WHOLE) if self.by_operator else ZooSize.model(self, name)

    def _model(self, name: str, shards: Shards) -> Model:
        """Embedding, then attention and feed-forward of each layer, then head with loss."""
        first = words(self, "embedding", shards)
        if self.by_operator:
            middle = operators_of_layers(self.stack, first.id)
            end, output = operators_of_head(self.stack, self.vocabulary, middle[-1].id), ("head.output", "weight")
        else:
            middle = layers("layer", self.stack, (first.id,), shards=shards)
            end = [word_head(middle[-1].id, self.stack, self.vocabulary, shards, shared=self.shared)]
            output = ("head", "output.weight")
        return Model(
            name,
            (first, *middle, *end),
            partial(token_batch, self.vocabulary, self.sequence),
            num_targets,
            tied=((("embedding", "token.weight"), output),) if self.tied else (),
            texts=Texts(self.vocabulary, self.sequence + 1, next_tokens),
        )


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


def words(size: GPTSize, id_: str, shards: Shards) -> BlockSpec:
    """The embedding of the batch's ``tokens``."""
    build, tables = partial(TokenEmbedding, size), ("token", "position")
    return word_embedding(id_, "tokens", build, tables, size.stack, size.vocabulary, shards, shared=size.shared)
