"""Blocks that several models have: embedded patches, linear layers, concatenations, heads of one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.model import Batch, BlockSpec
from pipeplan.runtime.zoo.layers import Stack, linear, positions_of

__all__ = ["concatenation", "num_targets", "patches", "perceptron", "value_head"]


class Patches(nn.Module):
    """Linear embedding of patches, to which positions without parameters are added."""

    positions: Tensor

    def __init__(self, stack: Stack, patch: int) -> None:
        super().__init__()
        self.embed = linear(patch, stack.hidden)
        self.register_buffer("positions", positions_of(stack.sequence, stack.hidden), persistent=False)

    def forward(self, patches: Tensor) -> Tensor:
        """[samples, sequence, patch] to [samples, sequence, hidden]."""
        result: Tensor = self.embed(patches) + self.positions
        return result


class Concatenation(nn.Module):
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


def patches(id_: str, stack: Stack, patch: int, sample: str) -> BlockSpec:
    """The embedding of a batch's patches."""
    sizes = stack.sizes | {"patch": patch}
    return BlockSpec(id_, "patch-embedding", partial(Patches, stack, patch), samples=(sample,), dimensions=sizes)


def perceptron(
    prefix: str, layers: int, inputs: int, outputs: int, *, sources: Sequence[str] = (), samples: Sequence[str] = ()
) -> list[BlockSpec]:
    """Linear layers with a ReLU each, a block apiece; the first takes ``inputs`` numbers of sources or samples."""
    blocks: list[BlockSpec] = []
    for layer in range(layers):
        taken = outputs if layer else inputs
        blocks.append(
            BlockSpec(
                f"{prefix}{layer}",
                "linear",
                partial(_dense, taken, outputs),
                sources=(blocks[-1].id,) if layer else tuple(sources),
                samples=() if layer else tuple(samples),
                dimensions={"inputs": taken, "outputs": outputs},
            )
        )
    return blocks


def _dense(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


def concatenation(id_: str, numbers: Mapping[str, int]) -> BlockSpec:
    """Joins blocks that give so many numbers per sample."""
    return BlockSpec(id_, "concatenation", Concatenation, tuple(numbers), dimensions={"outputs": sum(numbers.values())})


def value_head(source: str, width: int) -> BlockSpec:
    """A number for every row of a block's output, against ``targets``."""
    sizes = {"inputs": width, "outputs": 1}
    return BlockSpec("head", "head", partial(ValueHead, width), (source,), ("targets",), loss=True, dimensions=sizes)


def num_targets(batch: Batch) -> int:
    """What a summed loss is divided by."""
    return batch["targets"].numel()
