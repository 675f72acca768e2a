"""Blocks that several models have: embedded patches, linear layers, concatenations, heads of one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.models.spec import Batch, BlockSpec
from pipeplan.runtime.models.zoo.layers import LayerStack, columns, exchanged, linear, positions_of, replicated
from pipeplan.runtime.parallel.sharding import WHOLE, Shards, Split
from pipeplan.runtime.parallel.split_layers import HIDDEN, Tile, hidden_of

__all__ = ["concatenation", "num_targets", "patches", "perceptron", "value_head"]


class Patches(nn.Module):
    """Linear embedding of patches, to which positions without parameters are added."""

    positions: Tensor

    def __init__(self, stack: LayerStack, patch: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.shards, own = shards, hidden_of(shards)
        self.embed = linear(patch, stack.hidden // shards.count // own.count)
        positions = own.sliced(positions_of(stack.sequence, stack.hidden))
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, patches: Tensor) -> Tensor:
        """[samples, sequence, patch] to [samples, sequence, hidden], or this device's part of hidden."""
        return self.shards.gathered(self.embed(patches)) + self.positions


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
    """A number for every row by a linear layer, and the sum of their squared errors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.output = linear(width, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, ..., width] and targets [samples, ...] to a scalar, in float32 at least."""
        found = self.output(x).squeeze(-1)
        wide = torch.promote_types(found.dtype, torch.float32)  # a sum of thousands needs the digits
        return F.mse_loss(found.to(wide), targets.to(wide), reduction="sum")


def patches(id_: str, stack: LayerStack, patch: int, sample: str, shards: Shards) -> BlockSpec:
    """The embedding of a batch's patches."""
    return BlockSpec(
        id_,
        "patch-embedding",
        partial(Patches, stack, patch, shards),
        samples=(sample,),
        dimensions=stack.sizes | {"patch": patch},
        collectives=exchanged(shards, ("all_gather", "F", stack.numbers)),
        split=Split(partial(Patches, stack, patch), columns("embed")),
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


def concatenation(id_: str, numbers: Mapping[str, int]) -> BlockSpec:
    """Joins blocks that give so many numbers per sample."""
    sizes = {"outputs": sum(numbers.values())}
    split = replicated(ConcatenationBlock)
    return BlockSpec(id_, "concatenation", ConcatenationBlock, tuple(numbers), dimensions=sizes, split=split)


def value_head(source: str, width: int) -> BlockSpec:
    """A number for every row of a block's output, against ``targets``."""
    build = partial(ValueHead, width)
    return BlockSpec(
        "head",
        "head",
        build,
        (source,),
        ("targets",),
        loss=True,
        dimensions={"inputs": width, "outputs": 1},
        split=replicated(build),
    )


def num_targets(batch: Batch) -> int:
    """What a summed loss is divided by."""
    return batch["targets"].numel()
