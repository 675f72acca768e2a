"""Encoders with decoders that attend to their output; both embeddings and the output layer share one table.

mT5's form as Tessel has it (section VI-A), and the Transformer of Vaswani et al. (2017) with norms before the halves of
a layer. Positions have no parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.models.spec import BlockSpec, Model, token_batch
from pipeplan.runtime.models.zoo.gpt import norm_by_operator
from pipeplan.runtime.models.zoo.layers import (
    FeedForward,
    LayerStack,
    SelfAttention,
    ZooSize,
    columns,
    entering,
    exchanged,
    halves,
    into_split,
    layers,
    leaving,
    linear,
    num_targets,
    positions_of,
    row_linear,
    word_embedding,
    word_head,
)
from pipeplan.runtime.parallel.sharding import WHOLE, Cut, Shards
from pipeplan.runtime.parallel.split_layers import WordEmbedding, hidden_of

_START = 0
"""The word before the decoder's first."""


@dataclass(frozen=True, slots=True)
class TranslationSize(ZooSize):
    """Dimensions: ``layers`` of the encoder and as many of the decoder, texts of ``sequence`` words on both sides.

    ``biased``: norms and linear layers with biases. ``shared`` spreads embeddings and head over all devices.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    biased: bool
    shared: bool

    @property
    def stack(self) -> LayerStack:
        """The layers of the encoder."""
        return LayerStack(self.layers, self.hidden, self.heads, self.sequence, biased=self.biased, divided=True)

    def _model(self, name: str, shards: Shards) -> Model:
        """Encoder, then decoder, then head with loss."""
        source = self._words("encoder.embedding", "tokens", shards)
        encoder = layers("encoder.layer", self.stack, (source.id,), shards=shards)
        norm = norm_by_operator("encoder.norm", self.stack, encoder[-1].id)
        split = self.stack.split(lambda shards: norm.build())
        encoded = replace(norm, split=split, divided=self.stack.divides(shards))
        target = self._words("decoder.embedding", "decoder_tokens", shards)
        decoder = _decoder(replace(self.stack, causal=True), (target.id, encoded.id), shards)
        head = word_head(decoder[-1].id, self.stack, self.vocabulary, shards, shared=self.shared)
        blocks = (source, *encoder, encoded, target, *decoder, head)
        table = [(source.id, "token.weight"), (target.id, "token.weight"), (head.id, "output.weight")]
        return Model(name, blocks, self._batch, num_targets, tied=(tuple(table),))

    def _words(self, id_: str, sample: str, shards: Shards) -> BlockSpec:
        build = partial(WordLookup, self.stack, self.vocabulary)
        return word_embedding(
            id_, (sample,), build, ("token",), self.stack, self.vocabulary, shards, shared=self.shared
        )

    def _batch(self, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        """A text that counts up, whose translation is the same text one word on."""
        text = token_batch(self.vocabulary, self.sequence, num_samples, step, seed)
        return {**text, "decoder_tokens": F.pad(text["targets"][:, :-1], (1, 0), value=_START)}


class WordLookup(nn.Module):
    """Token embedding times the root of its width, plus positions (Vaswani et al. 2017, 3.4, 3.5)."""

    positions: Tensor

    def __init__(self, stack: LayerStack, vocabulary: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.scale = math.sqrt(stack.hidden)
        divided = stack.divides(shards)
        self.token = WordEmbedding(vocabulary, stack.hidden, shards, std=1 / self.scale, divided=divided)
        positions = hidden_of(shards).sliced(positions_of(stack.sequence, stack.hidden))
        own = (shards if divided else WHOLE).sliced(positions, 0)
        self.register_buffer("positions", own, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, sequence] to [samples, sequence, hidden], or this device's part of sequence and hidden."""
        result: Tensor = self.token(tokens) * self.scale + self.positions
        return result


class EncoderDecoderAttention(nn.Module):
    """Attention to what was encoded, with its norm and residual."""

    def __init__(self, stack: LayerStack, shards: Shards = WHOLE) -> None:
        super().__init__()
        own = stack.hidden // shards.count
        self.heads, self.shards, self.divided = stack.heads_of(shards), shards, stack.divides(shards)
        self.norm = nn.LayerNorm(stack.hidden, bias=stack.biased)
        self.query = linear(stack.hidden, own, biased=stack.biased)
        self.memory = linear(stack.hidden, 2 * own, biased=stack.biased)
        self.project = row_linear(stack.hidden, stack, shards)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """[samples, sequence, hidden] and [samples, words of the encoder, hidden] to the first's shape.

        Or this device's slices of both sequences to its slice.
        """
        query = self.query(into_split(self.norm(x), self.shards, self.divided))
        query = query.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        both = self.memory(into_split(memory, self.shards, self.divided)).unflatten(-1, (2, self.heads, -1))
        key, value = both.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = x + self.project(mixed.transpose(1, 2).flatten(2))
        return result

    @staticmethod
    def cuts(stack: LayerStack) -> dict[str, Cut]:
        """How parameters are split."""
        both = columns("query", biased=stack.biased) | columns("memory", parts=2, biased=stack.biased)
        return {**both, "project.weight": Cut(1)}


_Part = type[SelfAttention] | type[EncoderDecoderAttention] | type[FeedForward]
_PARTS: dict[str, _Part] = {"attention": SelfAttention, "cross-attention": EncoderDecoderAttention, "ffn": FeedForward}


class Beside(nn.Module):
    """Part of a decoder's layer; its tensor carries the encoder's output along, one after the other.

    So what a block gives is one tensor [samples, words of the decoder + words of the encoder, hidden], and the encoder
    sends its output once, to the decoder's first block. ``last`` hands on only the decoder's words. Where sequences are
    divided, it has a slice of each.
    """

    def __init__(self, part: _Part, stack: LayerStack, last: bool, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.part, self.last = part(stack, shards), last
        self.words = stack.sequence // (shards.count if stack.divides(shards) else 1)
        self.takes_memory = part is EncoderDecoderAttention

    def forward(self, *given: Tensor) -> Tensor:
        """The decoder's words and the encoder's, in two tensors or in one."""
        x, memory = given if len(given) == 2 else given[0].tensor_split([self.words], dim=1)
        made: Tensor = self.part(x, memory) if self.takes_memory else self.part(x)
        return made if self.last else torch.cat([made, memory], dim=1)


def _decoder(stack: LayerStack, sources: Sequence[str], shards: Shards) -> list[BlockSpec]:
    """Layers of three parts. From the last attention to the encoder's words on, these travel no further."""
    blocks: list[BlockSpec] = []
    own = halves(stack, shards)
    sizes = {"attention": own["attention"], "cross-attention": {**own["attention"], "memory": stack.sequence}}
    memory = {"cross-attention": exchanged(shards, *entering(stack, shards))}
    both = exchanged(shards, *leaving(stack, shards), *entering(stack, shards))
    for layer in range(stack.layers):
        for operator, split in (sizes | {"ffn": own["ffn"]}).items():
            build, cuts, streams = _part(operator, stack, layer)
            block = BlockSpec(
                f"decoder.layer{layer}.{operator}",
                operator,
                partial(build, shards),
                (blocks[-1].id,) if blocks else tuple(sources),
                dimensions=stack.sizes | split,
                collectives=both + memory.get(operator, ()),
                split=replace(stack.split(build, cuts), streams=streams),
                divided=stack.divides(shards),
            )
            blocks.append(block)
    return blocks


def _part(operator: str, stack: LayerStack, layer: int) -> tuple[Callable[[Shards], nn.Module], dict[str, Cut], int]:
    """What makes a part of a layer, how its parameters are split, and how many sequences it hands on."""
    part = _PARTS[operator]
    last = layer == stack.layers - 1
    if last and operator == "ffn":
        return partial(part, stack), part.cuts(stack), 1
    alone = last and operator != "attention"
    build = partial(Beside, part, stack, alone)
    return build, {f"part.{name}": cut for name, cut in part.cuts(stack).items()}, 1 if alone else 2
