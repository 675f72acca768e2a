"""Blocks that several models have, whole and as one device's share: transformer halves, embeddings, heads.

Half a transformer layer is a block, with its norm before it: pre-LayerNorm, GELU with the tanh approximation, no
dropout. As in Megatron-LM (Shoeybi et al. 2019) heads, and the width between the two layers of the perceptron, are
split over devices: layers by their outputs or by their inputs, tables and the loss by words. Norms, residuals and what
travels between blocks are divided along the sequence (Korthikanti et al. 2022) where a stack's ``divided`` says so and
devices can have equal slices, else whole on every device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.models.spec import Batch, BlockSpec, Collective, Model
from pipeplan.runtime.parallel.context import context_of
from pipeplan.runtime.parallel.context_attention import causal_attention
from pipeplan.runtime.parallel.device import precise
from pipeplan.runtime.parallel.sharding import WHOLE, Cut, Shards, Split, require_even
from pipeplan.runtime.parallel.split_layers import HIDDEN, RowLinear, Tile, cross_entropy, draw

WORDS = Cut(even=False)
"""Of a table, or an output layer, with a row for each word or class."""

Layer = TypeVar("Layer", nn.Linear, RowLinear, Tile)

_FLOAT32_BYTES = 4
_LOSS_NUMBERS = 2
"""Per token and device, of words split over devices: the logarithm of the sum of exponentials, the target's logit."""


@dataclass(frozen=True, slots=True)
class ZooSize(ABC):
    """Dimensions of a model of the zoo; each family adds its own, and makes a model of them."""

    @property
    def longest(self) -> int:
        """The longest sequence it takes: as it has positions, or else its own; 0 where samples are no sequences."""
        found: int = getattr(self, "positions", getattr(self, "sequence", 0))
        return found

    def model(self, name: str) -> Model:
        """The whole model, which can be cut into models of which every block is one device's share."""
        return replace(self._model(name, WHOLE), sharded=lambda count: self._model(name, Shards(count)))

    @abstractmethod
    def _model(self, name: str, shards: Shards) -> Model:
        """The model, or one device's share of it."""


def columns(name: str, *, parts: int = 1, biased: bool = True) -> dict[str, Cut]:
    """A linear layer split by its outputs, in each of ``parts`` of them."""
    cut = Cut(parts=parts)
    return {f"{name}.{each}": cut for each in (("weight", "bias") if biased else ("weight",))}


ArrayExchange = tuple[Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"], Literal["F", "I", "W"], int]
"""What devices do, in which phase, about how many numbers per sample."""


def exchanged(shards: Shards, *arrays: ArrayExchange) -> tuple[Collective, ...]:
    """Collectives of F, I or W, each about an array with its numbers per sample; none where nothing is split."""
    found = (Collective(operation, phase, _FLOAT32_BYTES * numbers) for operation, phase, numbers in arrays)
    return tuple(found) if shards.count > 1 else ()


def entering(stack: LayerStack, shards: Shards) -> tuple[ArrayExchange, ...]:
    """What devices exchange about an array of the stack that goes into split work; for W slices are gathered again."""
    numbers = stack.numbers
    if not stack.divides(shards):
        return (("all_reduce", "I", numbers),)
    return ("all_gather", "F", numbers), ("reduce_scatter", "I", numbers), ("all_gather", "W", numbers)


def leaving(stack: LayerStack, shards: Shards) -> tuple[ArrayExchange, ...]:
    """What devices exchange about an array of the stack that they have made parts of."""
    if not stack.divides(shards):
        return (("all_reduce", "F", stack.numbers),)
    return ("reduce_scatter", "F", stack.numbers), ("all_gather", "I", stack.numbers)


def loss_exchange(shards: Shards, rows: int) -> tuple[Literal["all_gather"], Literal["F"], int]:
    """What devices exchange about the losses of ``rows`` rows per sample."""
    return "all_gather", "F", rows * _LOSS_NUMBERS * shards.count


def summed_loss(logits: Tensor, targets: Tensor, classes: int, shards: Shards) -> Tensor:
    """The sum of cross-entropies of logits [..., classes of this device] and targets [...], in float32 at least."""
    logits = precise(logits)  # a sum of thousands needs the digits
    if shards.count == 1:  # one operator instead of several
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return cross_entropy(logits, targets, classes, shards).sum()


_LONGEST_WAVE = 10_000


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Equal transformer layers on ``sequence`` tokens.

    ``biased``: norms and linear layers with biases, else none. ``divided``: devices that split a block divide the
    sequence where nothing else is split.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    causal: bool = False
    biased: bool = True
    divided: bool = False

    def divides(self, shards: Shards) -> bool:
        """Whether these devices do."""
        return self.divided and shards.count > 1 and self.sequence % shards.count == 0

    def split(self, build: Callable[[Shards], nn.Module], cuts: Mapping[str, Cut] | None = None) -> Split:
        """How a block of the stack is split."""
        return Split(build, cuts or {}, sequence=self.sequence if self.divided else 0)

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions that all its blocks have."""
        return {"sequence": self.sequence, "hidden": self.hidden}

    @property
    def numbers(self) -> int:
        """Size of the tensor between two blocks, for one sample."""
        return self.sequence * self.hidden

    @property
    def last_std(self) -> float:
        """The deviation of the last weights of a half: the smaller, the more halves the residual adds."""
        return 0.02 / math.sqrt(2 * self.layers)

    def heads_of(self, shards: Shards) -> int:
        """One device's heads. Raises UsageError where they cannot be shared evenly."""
        require_even({"heads": self.heads}, shards.count)
        return self.heads // shards.count


class SelfAttention(nn.Module):
    """Self-attention, causal or not, with its LayerNorm and residual; devices have shares of the heads.

    Causal, it may have the pieces of a sequence that :func:`context_of` its shards says, and of others keys and values.
    """

    def __init__(self, stack: LayerStack, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.causal, self.shards, self.divided = stack.causal, shards, stack.divides(shards)
        self.heads, self.context = stack.heads_of(shards), context_of(shards)
        self.norm = nn.LayerNorm(stack.hidden, bias=stack.biased)
        self.qkv = linear(stack.hidden, 3 * stack.hidden // shards.count, biased=stack.biased)
        self.project = row_linear(stack.hidden, stack, shards)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, sequence, hidden] to the same, or this device's slice of the sequence to the same."""
        qkv = self.qkv(into_split(self.norm(x), self.shards, self.divided)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if self.context.count > 1:
            mixed = causal_attention(query, key, value, self.context)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = x + self.project(mixed.transpose(1, 2).flatten(2))
        return result

    @staticmethod
    def cuts(stack: LayerStack) -> dict[str, Cut]:
        """How parameters are split."""
        return {**columns("qkv", parts=3, biased=stack.biased), "project.weight": Cut(1)}


class FeedForward(nn.Module):
    """Two-layer perceptron of width 4 x hidden, or one device's share of that, with its LayerNorm and residual."""

    def __init__(self, stack: LayerStack, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.shards, self.divided = shards, stack.divides(shards)
        self.norm = nn.LayerNorm(stack.hidden, bias=stack.biased)
        self.expand = linear(stack.hidden, shards.own(4 * stack.hidden), biased=stack.biased)
        self.project = row_linear(4 * stack.hidden, stack, shards)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, sequence, hidden] to the same, or this device's slice of the sequence to the same."""
        wide = self.expand(into_split(self.norm(x), self.shards, self.divided))
        result: Tensor = x + self.project(F.gelu(wide, approximate="tanh"))
        return result

    @staticmethod
    def cuts(stack: LayerStack) -> dict[str, Cut]:
        """How parameters are split."""
        return {**columns("expand", biased=stack.biased), "project.weight": Cut(1)}


def halves(stack: LayerStack, shards: Shards) -> dict[str, dict[str, int]]:
    """The operators of a layer's halves, and the dimensions each can be split along, or one device's share of them."""
    return {"attention": {"heads": stack.heads_of(shards)}, "ffn": {"ffn": shards.own(4 * stack.hidden)}}


def layers(
    prefix: str,
    stack: LayerStack,
    sources: Sequence[str],
    *,
    shards: Shards = WHOLE,
    shared: bool = False,
    first: type[SelfAttention] = SelfAttention,
) -> list[BlockSpec]:
    """The halves of all layers, or one device's shares of them; ``sources`` feed the ``first`` attention."""
    blocks: list[BlockSpec] = []
    for layer in range(stack.layers):
        for operator, split in halves(stack, shards).items():
            attention = SelfAttention if blocks else first
            half = attention if operator == "attention" else FeedForward
            block = BlockSpec(
                f"{prefix}{layer}.{operator}",
                operator,
                partial(half, stack, shards),
                (blocks[-1].id,) if blocks else tuple(sources),
                dimensions=stack.sizes | split,
                shared=shared,
                collectives=exchanged(shards, *leaving(stack, shards), *entering(stack, shards)),
                split=stack.split(partial(half, stack), half.cuts(stack)),
                divided=stack.divides(shards),
                form=(half, stack, shards.count, shards.index),
            )
            blocks.append(block)
    return blocks


def small(layer: Layer, std: float = 0.02) -> Layer:
    """The layer with small random weights and no offset."""
    draw(layer.weight, std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def linear(inputs: int, outputs: int, *, biased: bool = True) -> nn.Linear:
    """A linear layer with small random weights and no offset."""
    return small(nn.Linear(inputs, outputs, bias=biased))


def positions_of(sequence: int, hidden: int) -> Tensor:
    """[sequence, hidden]: sines and cosines of every position (Vaswani et al. 2017, section 3.5)."""
    waves = _LONGEST_WAVE ** (-torch.arange(0, hidden, 2) / hidden)
    angles = torch.arange(sequence)[:, None] * waves
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :hidden]


def row_linear(inputs: int, stack: LayerStack, shards: Shards) -> RowLinear:
    """The last layer of a half, split by its inputs."""
    layer = RowLinear(inputs, stack.hidden, shards, bias=stack.biased, divided=stack.divides(shards))
    return small(layer, stack.last_std)


def into_split(tensor: Tensor, shards: Shards, divided: bool) -> Tensor:
    """What enters split work: of ``divided`` slices of the sequence all of it, of what is whole the same."""
    return shards.joined(tensor) if divided else shards.shared(tensor)


class ClassHead(nn.Module):
    """Final LayerNorm, a linear layer to classes, and the sum of the cross-entropies: of every token, or the first."""

    def __init__(
        self, stack: LayerStack, classes: int, shards: Shards = WHOLE, *, biased: bool = False, first: bool = False
    ) -> None:
        super().__init__()
        self.classes, self.shards, self.first, self.divided = classes, shards, first, stack.divides(shards)
        self.norm = nn.LayerNorm(stack.hidden, bias=stack.biased)
        self.output = linear(stack.hidden, shards.own(classes), biased=biased)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, sequence or a slice of it, hidden] and targets [samples, sequence], or [samples], to a scalar."""
        normed = self.norm(x)
        logits = self.output(into_split(normed[:, 0] if self.first else normed, self.shards, self.divided))
        return summed_loss(logits, targets, self.classes, self.shards)


def word_embedding(
    id_: str,
    samples: tuple[str, ...],
    build: Callable[..., nn.Module],
    tables: Sequence[str],
    stack: LayerStack,
    vocabulary: int,
    shards: Shards,
    *,
    shared: bool,
) -> BlockSpec:
    """The embedding of a batch's words by a module that takes ``samples`` of it, the words first.

    Of the module's ``tables`` ``token`` has the words.
    """
    return BlockSpec(
        id_,
        "embedding",
        partial(build, shards),
        samples=samples,
        dimensions=stack.sizes | {"vocabulary": shards.own(vocabulary)},
        shared=shared,
        collectives=exchanged(shards, *leaving(stack, shards)),
        split=stack.split(build, {"token.weight": WORDS}),
        divided=stack.divides(shards),
        splits={HIDDEN: Split(build, {f"{table}.weight": Cut(1) for table in tables}, gives=True)},
    )


def word_head(source: str, stack: LayerStack, vocabulary: int, shards: Shards, *, shared: bool) -> BlockSpec:
    """The prediction of a word for every token, whose output layer can share the embedding's table."""
    build = partial(ClassHead, stack, vocabulary)
    return BlockSpec(
        "head",
        "head",
        partial(build, shards),
        (source,),
        ("targets",),
        loss=True,
        dimensions=stack.sizes | {"vocabulary": shards.own(vocabulary)},
        shared=shared,
        collectives=exchanged(shards, loss_exchange(shards, stack.sequence), *entering(stack, shards)),
        split=stack.split(build, {"output.weight": WORDS}),
        divided=stack.divides(shards),
    )


class NextWord(nn.Module):
    """The logits of the word after the last, by the modules of a :class:`ClassHead`, or of one device's words."""

    def __init__(self, stack: LayerStack, words: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(stack.hidden, bias=stack.biased)
        self.output = linear(stack.hidden, shards.own(words), biased=False)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, sequence, hidden] to [samples, words of this device]."""
        made: Tensor = self.output(self.norm(x[:, -1]))
        return made


def next_word(source: str, stack: LayerStack, vocabulary: int, shards: Shards, *, shared: bool) -> BlockSpec:
    """The head of a model that writes on; devices gather the logits of all words."""
    build = partial(NextWord, stack, vocabulary)
    return BlockSpec(
        "head",
        "head",
        partial(build, shards),
        (source,),
        dimensions=stack.sizes | {"vocabulary": shards.own(vocabulary)},
        shared=shared,
        collectives=exchanged(shards, ("all_gather", "F", vocabulary)),
        split=stack.split(build, {"output.weight": WORDS}),
    )


def num_targets(batch: Batch) -> int:
    """What a summed loss is divided by."""
    return batch["targets"].numel()
