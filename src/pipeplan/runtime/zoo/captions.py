"""Flava as Tessel has it (section VI-D): a tower for text, one for images, a cross-encoder over the tokens of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor, nn

from pipeplan.runtime.batches import stacked
from pipeplan.runtime.model import BlockSpec, Model
from pipeplan.runtime.shards import WHOLE, Shards, Split
from pipeplan.runtime.zoo.gpt import GPTSize, words
from pipeplan.runtime.zoo.layers import LayerStack, SelfAttention, layers, linear
from pipeplan.runtime.zoo.parts import num_targets, patches
from pipeplan.runtime.zoo.splitting import WORDS, exchanged, summed_loss, with_shares, words_told

__all__ = ["CaptionsSize"]


@dataclass(frozen=True, slots=True)
class CaptionsSize:
    """Dimensions: each of the three encoders has ``layers`` of the same size.

    Texts have ``sequence`` words, at most ``positions``; images ``tokens`` patches of ``patch`` numbers.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    sequence: int
    tokens: int
    patch: int

    @property
    def longest(self) -> int:
        """The longest text."""
        return self.positions

    @property
    def text(self) -> GPTSize:
        """The tower for text; it is read with a causal mask."""
        return GPTSize(self.layers, self.hidden, self.heads, self.vocabulary, self.positions, self.sequence)

    @property
    def image(self) -> LayerStack:
        """The tower for images."""
        return LayerStack(self.layers, self.hidden, self.heads, self.tokens)

    @property
    def cross(self) -> LayerStack:
        """The cross-encoder."""
        return replace(self.image, sequence=self.sequence + self.tokens)

    def model(self, name: str) -> Model:
        """Both towers, the cross-encoder on all devices, and a class per sample with its loss."""
        return with_shares(partial(self._model, name))

    def _model(self, name: str, shards: Shards) -> Model:
        first = words(self.text, "text.embedding", shards)
        text = [first, *layers("text.layer", self.text.stack, (first.id,), shards=shards)]
        second = patches("image.embedding", self.image, self.patch, "patches", shards)
        image = [second, *layers("image.layer", self.image, (second.id,), shards=shards)]
        ends = (text[-1].id, image[-1].id)
        cross = layers("cross.layer", self.cross, ends, shards=shards, shared=True, first=FusedAttention)
        blocks = (*text, *image, *cross, self._pool(cross[-1].id, shards))
        return Model(name, blocks, partial(stacked, self._sample), num_targets)

    def _pool(self, source: str, shards: Shards) -> BlockSpec:
        begin, end = shards.range(self.hidden)
        return BlockSpec(
            "cross.pool",
            "pool",
            partial(Pool, self.cross, shards),
            (source,),
            ("targets",),
            loss=True,
            dimensions=self.cross.sizes | {"outputs": end - begin},
            shared=True,
            collectives=exchanged(shards, words_told(shards, 1), ("all_reduce", "I", self.hidden)),
            split=Split(partial(Pool, self.cross), {"output.weight": WORDS, "output.bias": WORDS}),
        )

    def _sample(self, generator: Generator) -> dict[str, Tensor]:
        """Random words and patches; the class is told by the first word."""
        text = torch.randint(self.vocabulary, (self.sequence,), generator=generator)
        noise = torch.randn(self.tokens, self.patch, generator=generator)
        return {"tokens": text, "patches": noise, "targets": text[0] % self.hidden}


class FusedAttention(SelfAttention):
    """Attention over the tokens of several towers, one after another."""

    def forward(self, *towers: Tensor) -> Tensor:
        """[samples, tokens, hidden] each to [samples, all tokens, hidden]."""
        return super().forward(torch.cat(towers, dim=1))


class Pool(nn.Module):
    """Final norm, the first token by a linear layer to as many classes, and the sum of the samples' cross-entropies."""

    def __init__(self, stack: LayerStack, shards: Shards = WHOLE) -> None:
        super().__init__()
        begin, end = shards.range(stack.hidden)
        self.classes, self.shards = stack.hidden, shards
        self.norm = nn.LayerNorm(stack.hidden)
        self.output = linear(stack.hidden, end - begin)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, tokens, hidden] and classes [samples] to a scalar, in float32 at least."""
        logits = self.output(self.shards.shared(self.norm(x)[:, 0]))
        return summed_loss(logits, targets, self.classes, self.shards)
