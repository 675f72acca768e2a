"""Encoders with decoders that look at what was encoded; both embeddings and the output layer share one table.

mT5's form as Tessel has it (section VI-A), and the Transformer of Vaswani et al. (2017) with norms before the halves of
a layer. Positions have no parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.batches import token_batch
from pipeplan.runtime.model import BlockSpec, Model
from pipeplan.runtime.zoo.layers import Attention, FeedForward, Stack, layers, linear, positions_of
from pipeplan.runtime.zoo.parts import num_targets

__all__ = ["TranslationSize"]

_START = 0
"""The word before the decoder's first."""


@dataclass(frozen=True, slots=True)
class TranslationSize:
    """Dimensions: ``layers`` of the encoder and as many of the decoder, texts of ``sequence`` words on both sides.

    ``biased``: norms and linear layers with biases. ``shared`` spreads embeddings and head over all devices.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int = 512
    biased: bool = False
    shared: bool = True

    @property
    def longest(self) -> int:
        """The longest text."""
        return self.sequence

    @property
    def stack(self) -> Stack:
        """The layers of the encoder."""
        return Stack(self.layers, self.hidden, self.heads, self.sequence, biased=self.biased)

    def model(self, name: str) -> Model:
        """Encoder, then decoder, then head with loss."""
        source = self._words("encoder.embedding", "tokens")
        encoder = layers("encoder.layer", self.stack, (source.id,))
        encoded = BlockSpec(
            "encoder.norm", "norm", partial(_norm, self.stack), (encoder[-1].id,), dimensions=self.stack.sizes
        )
        target = self._words("decoder.embedding", "decoder_tokens")
        decoder = _decoder(replace(self.stack, causal=True), (target.id, encoded.id))
        blocks = (source, *encoder, encoded, target, *decoder, self._head(decoder[-1].id))
        table = [(source.id, "token.weight"), (target.id, "token.weight"), ("head", "output.weight")]
        return Model(name, blocks, self._batch, num_targets, tied=(tuple(table),))

    def _words(self, id_: str, sample: str) -> BlockSpec:
        build = partial(Words, self.stack, self.vocabulary)
        return BlockSpec(id_, "embedding", build, (), (sample,), dimensions=self._sizes, shared=self.shared)

    def _head(self, source: str) -> BlockSpec:
        return BlockSpec(
            "head",
            "head",
            partial(Prediction, self.stack, self.vocabulary),
            (source,),
            ("targets",),
            loss=True,
            dimensions=self._sizes,
            shared=self.shared,
        )

    @property
    def _sizes(self) -> dict[str, int]:
        return self.stack.sizes | {"vocabulary": self.vocabulary}

    def _batch(self, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        """A text that counts up, whose translation is the same text one word on."""
        text = token_batch(self.vocabulary, self.sequence, num_samples, step, seed)
        return {**text, "decoder_tokens": F.pad(text["targets"][:, :-1], (1, 0), value=_START)}


class Words(nn.Module):
    """Token embedding times the root of its width, plus positions (Vaswani et al. 2017, 3.4, 3.5)."""

    positions: Tensor

    def __init__(self, stack: Stack, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, stack.hidden)
        self.scale = math.sqrt(stack.hidden)
        nn.init.normal_(self.token.weight, std=1 / self.scale)
        self.register_buffer("positions", positions_of(stack.sequence, stack.hidden), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, sequence] to [samples, sequence, hidden]."""
        result: Tensor = self.token(tokens) * self.scale + self.positions
        return result


class CrossAttention(nn.Module):
    """Attention to what was encoded, with its norm and residual."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.heads = stack.heads
        self.norm = nn.LayerNorm(stack.hidden, bias=stack.biased)
        self.query = linear(stack.hidden, stack.hidden, biased=stack.biased)
        self.memory = linear(stack.hidden, 2 * stack.hidden, biased=stack.biased)
        self.project = linear(stack.hidden, stack.hidden, biased=stack.biased)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """[samples, sequence, hidden] and [samples, words of the encoder, hidden] to the first's shape."""
        query = self.query(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        both = self.memory(memory).unflatten(-1, (2, self.heads, -1))
        key, value = both.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = x + self.project(mixed.transpose(1, 2).flatten(2))
        return result


class Prediction(nn.Module):
    """Final norm, output layer (shares the table of words) and the sum of the words' cross-entropies."""

    def __init__(self, stack: Stack, vocabulary: int) -> None:
        super().__init__()
        self.norm = _norm(stack)
        self.output = linear(stack.hidden, vocabulary, biased=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, sequence, hidden] and targets [samples, sequence] to a scalar, in float32 at least."""
        logits = self.output(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a sum of thousands needs the digits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Beside(nn.Module):
    """Part of a decoder's layer, beside whose tensor the encoder's output travels on: one after the other in one.

    So what a block gives is one tensor [samples, words of the decoder + words of the encoder, hidden], and the encoder
    sends its output once, to the decoder's first block. ``last`` hands on the decoder's words alone.
    """

    def __init__(self, part: nn.Module, words: int, last: bool) -> None:
        super().__init__()
        self.part, self.words, self.last = part, words, last
        self.takes_memory = isinstance(part, CrossAttention)

    def forward(self, *given: Tensor) -> Tensor:
        """The decoder's words and the encoder's, in two tensors or in one."""
        x, memory = given if len(given) == 2 else given[0].tensor_split([self.words], dim=1)
        made: Tensor = self.part(x, memory) if self.takes_memory else self.part(x)
        return made if self.last else torch.cat([made, memory], dim=1)


def _decoder(stack: Stack, sources: Sequence[str]) -> list[BlockSpec]:
    """Layers of three parts. From the last attention to the encoder's words on, these travel no further."""
    blocks: list[BlockSpec] = []
    feeds = tuple(sources)
    memory = {"heads": stack.heads, "memory": stack.sequence}
    parts = (("attention", Attention), ("cross-attention", CrossAttention), ("ffn", FeedForward))
    splits = {"attention": {"heads": stack.heads}, "cross-attention": memory, "ffn": {"ffn": 4 * stack.hidden}}
    for layer in range(stack.layers):
        for operator, part in parts:
            last = layer == stack.layers - 1 and operator != "attention"
            alone = last and operator == "ffn"
            block = BlockSpec(
                f"decoder.layer{layer}.{operator}",
                operator,
                partial(part, stack) if alone else partial(_beside, part, stack, last),
                feeds,
                dimensions=stack.sizes | splits[operator],
            )
            blocks.append(block)
            feeds = (block.id,)
    return blocks


def _beside(part: type[nn.Module], stack: Stack, last: bool) -> nn.Module:
    return Beside(part(stack), stack.sequence, last)


def _norm(stack: Stack) -> nn.LayerNorm:
    return nn.LayerNorm(stack.hidden, bias=stack.biased)
