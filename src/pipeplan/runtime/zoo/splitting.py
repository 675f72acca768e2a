"""How blocks are split over devices, and what one device's share needs of the others.

As in Megatron-LM (Shoeybi et al. 2019): layers are split by their outputs or by their inputs, tables and the loss by
words. Norms, and what travels between blocks, are whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.model import Collective, Model
from pipeplan.runtime.shards import WHOLE, Cut, Shards, Split
from pipeplan.runtime.split_layers import cross_entropy

__all__ = [
    "WORDS",
    "columns",
    "exchanged",
    "replicated",
    "summed_loss",
    "with_shares",
    "words_told",
]


WORDS = Cut(even=False)
"""Of a table, or an output layer, with a row for each word or class."""

_FLOAT32_BYTES = 4
_LOSS_NUMBERS = 3
"""Per token and device, of words split over devices: largest logit, sum of exponentials, the target's logit."""


def with_shares(make: Callable[[Shards], Model]) -> Model:
    """A whole model that can be cut into models of which every block is one device's share."""
    return replace(make(WHOLE), sharded=lambda count: make(Shards(count)))


def columns(name: str, *, parts: int = 1, biased: bool = True) -> dict[str, Cut]:
    """A linear layer split by its outputs, in each of ``parts`` of them."""
    cut = Cut(parts=parts)
    return {f"{name}.{each}": cut for each in (("weight", "bias") if biased else ("weight",))}


def replicated(build: Callable[[], nn.Module]) -> Split:
    """A block that every device has and does in full."""
    return Split(lambda shards: build())


def exchanged(
    shards: Shards, *arrays: tuple[Literal["all_reduce", "all_gather"], Literal["F", "I"], int]
) -> tuple[Collective, ...]:
    """Collectives after F or I, each about an array of so many numbers per sample; none where nothing is split."""
    found = (Collective(operation, phase, _FLOAT32_BYTES * numbers) for operation, phase, numbers in arrays)
    return tuple(found) if shards.count > 1 else ()


def words_told(shards: Shards, rows: int) -> tuple[Literal["all_gather"], Literal["F"], int]:
    """What devices tell each other about the losses of so many rows per sample."""
    return "all_gather", "F", rows * _LOSS_NUMBERS * shards.count


def summed_loss(logits: Tensor, targets: Tensor, classes: int, shards: Shards) -> Tensor:
    """The sum of cross-entropies, in float32 at least: a sum of thousands needs the digits.

    Args:
        logits: [..., this device's of all classes].
        targets: [...].
        classes: on all devices.
        shards: this device's place.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if shards.count == 1:  # one operator instead of several
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return cross_entropy(logits, targets, classes, shards).sum()
