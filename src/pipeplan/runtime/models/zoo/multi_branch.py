"""Models with branches side by side: GraphPipe's (section 3.10.3), and Flava as Tessel has it.

MMT: branches of transformer layers, one for each kind of input. DLRM: branches of linear layers for dense features and
tables for sparse ones. CANDLE-Uno: branches of linear layers. All are concatenated before what follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from pipeplan.runtime.models.spec import BlockSpec, Model, stacked
from pipeplan.runtime.models.zoo.gpt import GPTSize, words
from pipeplan.runtime.models.zoo.layers import (
    WORDS,
    ArrayExchange,
    ClassHead,
    LayerStack,
    SelfAttention,
    ZooSize,
    columns,
    exchanged,
    layers,
    linear,
    loss_exchange,
    num_targets,
    positions_of,
)
from pipeplan.runtime.parallel.device import precise
from pipeplan.runtime.parallel.sharding import WHOLE, Shards, Split
from pipeplan.runtime.parallel.split_layers import HIDDEN, Tile, WordEmbedding, hidden_of

_NO_TOKENS = LayerStack(layers=0, hidden=0, heads=0, sequence=0)
"""Of features that are no sequence, which devices have whole."""


@dataclass(frozen=True, slots=True)
class MultiModalSize(ZooSize):
    """Dimensions of an MMT: branches of equal layers, whose tokens are patches of ``patch`` numbers."""

    branches: int
    layers: int
    hidden: int
    heads: int
    patch: int
    sequence: int

    @property
    def stack(self) -> LayerStack:
        """The layers of a branch."""
        return LayerStack(self.layers, self.hidden, self.heads, self.sequence, divided=True)

    def _model(self, name: str, shards: Shards) -> Model:
        """Branches, their outputs concatenated for every token, and a number per token with its loss."""
        branches = [self._branch(f"branch{index}", f"patches{index}", shards) for index in range(self.branches)]
        return _joined(name, branches, self.sequence * self.hidden, self.hidden, self._sample, self.stack, shards)

    def _branch(self, id_: str, sample: str, shards: Shards) -> list[BlockSpec]:
        first = patches(f"{id_}.embedding", self.stack, self.patch, sample, shards)
        return [first, *layers(f"{id_}.layer", self.stack, (first.id,), shards=shards)]

    def _sample(self, generator: Generator) -> dict[str, Tensor]:
        """Random patches for each branch, and for every token their scaled sum."""
        made = torch.randn(self.branches, self.sequence, self.patch, generator=generator)
        named = {f"patches{index}": each for index, each in enumerate(made)}
        return {**named, "targets": made.sum(dim=(0, 2)) / math.sqrt(self.branches * self.patch)}


@dataclass(frozen=True, slots=True)
class RecommendationSize(ZooSize):
    """Dimensions of a DLRM: as many branches of dense as of sparse features.

    A dense branch has ``layers`` linear layers of ``hidden`` numbers, as many as its features; so have the layers after
    the interaction. A sparse one takes ``lookups`` rows of ``width`` numbers from a table of ``vocabulary``.
    """

    branches: int
    layers: int
    hidden: int
    lookups: int
    vocabulary: int
    width: int

    def _model(self, name: str, shards: Shards) -> Model:
        """Dense branches, then tables, their outputs concatenated, then layers and a number per sample."""
        dense = _perceptrons(self, "dense", "dense", shards)
        tables = [self._table(index, shards) for index in range(self.branches)]
        numbers = {branch[-1].id: self.hidden for branch in dense}
        numbers |= {table.id: self.lookups * self.width for table in tables}
        joined = concatenation("interaction", numbers)
        top = perceptron("top.layer", self.layers, sum(numbers.values()), self.hidden, shards, sources=(joined.id,))
        head = value_head(top[-1].id, self.hidden)
        blocks = (*(block for branch in dense for block in branch), *tables, joined, *top, head)
        return Model(name, blocks, partial(stacked, self._sample), num_targets)

    def _table(self, index: int, shards: Shards) -> BlockSpec:
        return BlockSpec(
            f"sparse{index}.embedding",
            "embedding",
            partial(EmbeddingRows, self.vocabulary, self.width, shards),
            samples=(f"sparse{index}",),
            dimensions={"lookups": self.lookups, "hidden": self.width, "vocabulary": shards.own(self.vocabulary)},
            collectives=exchanged(shards, ("all_reduce", "F", self.lookups * self.width)),
            split=Split(partial(EmbeddingRows, self.vocabulary, self.width), {"table.weight": WORDS}),
        )

    def _sample(self, generator: Generator) -> dict[str, Tensor]:
        """Random features; the target is a sum of one dense feature of every branch."""
        dense = torch.randn(self.branches, self.hidden, generator=generator)
        sparse = torch.randint(self.vocabulary, (self.branches, self.lookups), generator=generator)
        named = {f"dense{index}": each for index, each in enumerate(dense)}
        named |= {f"sparse{index}": each for index, each in enumerate(sparse)}
        return {**named, "targets": dense[:, 0].sum() / math.sqrt(self.branches)}


class EmbeddingRows(nn.Module):
    """Rows of a table side by side: indices [samples, lookups] to [samples, lookups x width]."""

    def __init__(self, vocabulary: int, width: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.table = WordEmbedding(vocabulary, width, shards, std=1.0)

    def forward(self, indices: Tensor) -> Tensor:
        """[samples, lookups] to [samples, lookups x width]."""
        result: Tensor = self.table(indices).flatten(1)
        return result


@dataclass(frozen=True, slots=True)
class ResponseSize(ZooSize):
    """Dimensions of a CANDLE-Uno: branches of ``layers`` linear layers of ``hidden`` numbers, as many as features."""

    branches: int
    layers: int
    hidden: int

    def _model(self, name: str, shards: Shards) -> Model:
        """Branches, their outputs concatenated, and a number per sample with its loss."""
        branches = _perceptrons(self, "branch", "features", shards)
        return _joined(name, branches, self.hidden, self.hidden, self._sample)

    def _sample(self, generator: Generator) -> dict[str, Tensor]:
        """Random features; the target is a sum of one feature of every branch."""
        made = torch.randn(self.branches, self.hidden, generator=generator)
        named = {f"features{index}": each for index, each in enumerate(made)}
        return {**named, "targets": made[:, 0].sum() / math.sqrt(self.branches)}


def _perceptrons(
    size: RecommendationSize | ResponseSize, branch: str, sample: str, shards: Shards
) -> list[list[BlockSpec]]:
    """The branches of linear layers, each with the batch's features of the same number."""
    return [
        perceptron(
            f"{branch}{index}.layer", size.layers, size.hidden, size.hidden, shards, samples=(f"{sample}{index}",)
        )
        for index in range(size.branches)
    ]


def _joined(
    name: str,
    branches: Sequence[Sequence[BlockSpec]],
    numbers: int,
    width: int,
    sample: Callable[[Generator], dict[str, Tensor]],
    stack: LayerStack = _NO_TOKENS,
    shards: Shards = WHOLE,
) -> Model:
    """Branches that give ``numbers`` numbers per sample, in rows of ``width``: concatenated, with a number per row.

    Those of a ``stack`` are tokens, which devices divide as the branches' layers do.
    """
    joined = concatenation("concatenation", {branch[-1].id: numbers for branch in branches}, stack, shards)
    head = value_head(joined.id, len(branches) * width, stack, shards)
    blocks = (*(block for branch in branches for block in branch), joined, head)
    return Model(name, blocks, partial(stacked, sample), num_targets)


@dataclass(frozen=True, slots=True)
class CaptionsSize(ZooSize):
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
    def text(self) -> GPTSize:
        """The tower for text; it is read with a causal mask."""
        return GPTSize(self.layers, self.hidden, self.heads, self.vocabulary, self.positions, self.sequence)

    @property
    def image(self) -> LayerStack:
        """The tower for images."""
        return LayerStack(self.layers, self.hidden, self.heads, self.tokens, divided=True)

    @property
    def cross(self) -> LayerStack:
        """The cross-encoder; of its two sequences the paper's lengths, 77 and 197, have no divisor in common."""
        return replace(self.image, sequence=self.sequence + self.tokens, divided=False)

    def _model(self, name: str, shards: Shards) -> Model:
        """Both towers, the cross-encoder on all devices, and a class per sample with its loss."""
        first = words(self.text, "text.embedding", shards)
        text = [first, *layers("text.layer", self.text.stack, (first.id,), shards=shards)]
        second = patches("image.embedding", self.image, self.patch, "patches", shards)
        image = [second, *layers("image.layer", self.image, (second.id,), shards=shards)]
        ends = (text[-1].id, image[-1].id)
        cross = layers("cross.layer", self.cross, ends, shards=shards, shared=True, first=FusedAttention)
        blocks = (*text, *image, *cross, self._pool(cross[-1].id, shards))
        return Model(name, blocks, partial(stacked, self._sample), num_targets)

    def _pool(self, source: str, shards: Shards) -> BlockSpec:
        build = partial(ClassHead, self.cross, self.hidden, biased=True, first=True)
        return BlockSpec(
            "cross.pool",
            "pool",
            partial(build, shards),
            (source,),
            ("targets",),
            loss=True,
            dimensions=self.cross.sizes | {"outputs": shards.own(self.hidden)},
            shared=True,
            collectives=exchanged(shards, loss_exchange(shards, 1), ("all_reduce", "I", self.hidden)),
            split=Split(build, {"output.weight": WORDS, "output.bias": WORDS}),
        )

    def _sample(self, generator: Generator) -> dict[str, Tensor]:
        """Random words and patches; the class follows from the first word."""
        text = torch.randint(self.vocabulary, (self.sequence,), generator=generator)
        noise = torch.randn(self.tokens, self.patch, generator=generator)
        return {"tokens": text, "patches": noise, "targets": text[0] % self.hidden}


class FusedAttention(SelfAttention):
    """Attention over the tokens of several towers, one after another."""

    def forward(self, *towers: Tensor) -> Tensor:
        """[samples, tokens, hidden] each to [samples, all tokens, hidden]."""
        return super().forward(torch.cat(towers, dim=1))


# Blocks -----------------------------------------------------------------------------------------------------------


class Patches(nn.Module):
    """Linear embedding of patches, to which positions without parameters are added."""

    positions: Tensor

    def __init__(self, stack: LayerStack, patch: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.shards, self.divided, own = shards, stack.divides(shards), hidden_of(shards)
        self.embed = linear(patch, stack.hidden // shards.count // own.count)
        positions = own.sliced(positions_of(stack.sequence, stack.hidden))
        positions = (shards if self.divided else WHOLE).sliced(positions, 0)
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, patches: Tensor) -> Tensor:
        """[samples, sequence, patch] to [samples, sequence, hidden], or this device's part of sequence and hidden."""
        made = self.embed(patches)
        return (self.shards.exchanged(made, 1, 2) if self.divided else self.shards.gathered(made)) + self.positions


class Dense(nn.Module):
    """A linear layer with a ReLU, split by its outputs."""

    def __init__(self, inputs: int, outputs: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.shards = shards
        self.layer = nn.Linear(inputs, outputs // shards.count)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, inputs] to [samples, outputs]."""
        return self.shards.gathered(F.relu(self.layer(self.shards.shared(x))))


class DenseTile(nn.Module):
    """A linear layer with a ReLU, of whose weight devices have tiles."""

    def __init__(self, inputs: int, outputs: int, shards: Shards) -> None:
        super().__init__()
        self.layer = Tile(inputs, outputs, shards)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, inputs of this device] to [samples, outputs of this device]."""
        return F.relu(self.layer(x))


class ConcatenationBlock(nn.Module):
    """What several blocks give, side by side in the last dimension."""

    def forward(self, *outputs: Tensor) -> Tensor:
        """[samples, ..., width] each to [samples, ..., sum of the widths]."""
        return torch.cat(outputs, dim=-1)


class ValueHead(nn.Module):
    """A number for every row by a linear layer, and the sum of their squared errors.

    Of several ``shards`` each has a slice of every sample's rows; they exchange a number per sample.
    """

    def __init__(self, width: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.shards, self.output = shards, linear(width, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, ..., width], or a slice of rows, and targets [samples, ...] to a scalar, in float32 at least."""
        found = precise(self.output(x).squeeze(-1))  # a sum of thousands needs the digits
        if self.shards.count == 1:  # one operator instead of several
            return F.mse_loss(found, targets.to(found.dtype), reduction="sum")
        errors = found - self.shards.sliced(targets, 1).to(found.dtype)
        return self.shards.summed(errors.square().sum(1)).sum()


def patches(id_: str, stack: LayerStack, patch: int, sample: str, shards: Shards) -> BlockSpec:
    """The embedding of a batch's patches."""
    own = stack.numbers // shards.count
    divided: tuple[ArrayExchange, ...] = ("all_to_all", "F", own), ("all_to_all", "I", own)
    whole: tuple[ArrayExchange, ...] = (("all_gather", "F", stack.numbers),)
    return BlockSpec(
        id_,
        "patch-embedding",
        partial(Patches, stack, patch, shards),
        samples=(sample,),
        dimensions=stack.sizes | {"patch": patch},
        collectives=exchanged(shards, *(divided if stack.divides(shards) else whole)),
        split=stack.split(partial(Patches, stack, patch), columns("embed")),
        divided=stack.divides(shards),
        splits={HIDDEN: Split(partial(Patches, stack, patch), columns("embed"), gives=True)},
    )


def perceptron(
    prefix: str,
    layers: int,
    inputs: int,
    outputs: int,
    shards: Shards,
    *,
    sources: Sequence[str] = (),
    samples: Sequence[str] = (),
) -> list[BlockSpec]:
    """Linear layers with a ReLU each, a block apiece; the first takes ``inputs`` numbers of sources or samples."""
    blocks: list[BlockSpec] = []
    for layer in range(layers):
        taken = outputs if layer else inputs
        feeds = (blocks[-1].id,) if layer else tuple(sources)
        returned = exchanged(shards, ("all_reduce", "I", taken)) if feeds else ()
        block = BlockSpec(
            f"{prefix}{layer}",
            "linear",
            partial(Dense, taken, outputs, shards),
            feeds,
            () if layer else tuple(samples),
            dimensions={"inputs": taken, "outputs": outputs // shards.count},
            collectives=(*exchanged(shards, ("all_gather", "F", outputs)), *returned),
            split=Split(partial(Dense, taken, outputs), columns("layer")),
            splits=Tile.ways(partial(DenseTile, taken, outputs), "layer"),
        )
        blocks.append(block)
    return blocks


def concatenation(
    id_: str, numbers: Mapping[str, int], stack: LayerStack = _NO_TOKENS, shards: Shards = WHOLE
) -> BlockSpec:
    """Joins blocks, which give these ``numbers`` per sample; of a ``stack``, in slices where its devices divide it."""
    sizes = {"outputs": sum(numbers.values())}
    split, divided = _by_rows(stack, shards, lambda _: ConcatenationBlock())
    return BlockSpec(
        id_, "concatenation", ConcatenationBlock, tuple(numbers), dimensions=sizes, split=split, divided=divided
    )


def value_head(source: str, width: int, stack: LayerStack = _NO_TOKENS, shards: Shards = WHOLE) -> BlockSpec:
    """A number for every row of a block's output, against ``targets``; rows as :func:`concatenation` has them."""
    split, divided = _by_rows(stack, shards, partial(ValueHead, width))
    return BlockSpec(
        "head",
        "head",
        partial(ValueHead, width, shards if divided else WHOLE),
        (source,),
        ("targets",),
        loss=True,
        dimensions={"inputs": width, "outputs": 1},
        collectives=exchanged(shards, ("all_reduce", "F", 1)) if divided else (),
        split=split,
        divided=divided,
    )


def _by_rows(stack: LayerStack, shards: Shards, build: Callable[[Shards], nn.Module]) -> tuple[Split, bool]:
    """How devices split a block whose parameters all have: by a stack's tokens where it can be; and whether these do.

    Else each does all of it.
    """

    def own(shards: Shards) -> nn.Module:
        return build(shards if stack.divides(shards) else WHOLE)

    return stack.split(own), stack.divides(shards)
