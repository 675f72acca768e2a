"""Halves of transformer layers, with norms before them: pre-LayerNorm, GELU with the tanh approximation, no dropout.

Half a layer is a block. Split over devices as in Megatron-LM (Shoeybi et al. 2019): heads, and the width between the
two layers of the perceptron.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.model import BlockSpec, Collective

__all__ = ["Attention", "FeedForward", "Stack", "layers", "linear", "positions_of", "require_divisible", "sums"]

_FLOAT32_BYTES = 4
_LONGEST_WAVE = 10_000


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal transformer layers on ``sequence`` tokens. ``biased``: norms and linear layers with biases, else none."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    causal: bool = False
    biased: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions that all its blocks have."""
        return {"sequence": self.sequence, "hidden": self.hidden}


class Attention(nn.Module):
    """Self-attention, causal or not, with its LayerNorm and residual: [samples, sequence, hidden] to the same.

    Of one device among several it has a share of the heads; what they project is to be summed over the devices.
    """

    def __init__(self, stack: Stack, num_devices: int = 1) -> None:
        super().__init__()
        self.causal = stack.causal
        self.heads, width = stack.heads // num_devices, stack.hidden // num_devices
        self.norm = nn.LayerNorm(stack.hidden, bias=stack.biased)
        self.qkv = linear(stack.hidden, 3 * width, biased=stack.biased)
        self.project = linear(width, stack.hidden, std=_last_std(stack), biased=stack.biased)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, sequence, hidden] to the same."""
        samples, sequence, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(samples, sequence, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = x + self.project(mixed.transpose(1, 2).reshape(samples, sequence, -1))
        return result


class FeedForward(nn.Module):
    """Two-layer perceptron of width 4 x hidden, or one device's share of that, with its LayerNorm and residual."""

    def __init__(self, stack: Stack, num_devices: int = 1) -> None:
        super().__init__()
        width = 4 * stack.hidden // num_devices
        self.norm = nn.LayerNorm(stack.hidden, bias=stack.biased)
        self.expand = linear(stack.hidden, width, biased=stack.biased)
        self.project = linear(width, stack.hidden, std=_last_std(stack), biased=stack.biased)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, sequence, hidden] to the same."""
        result: Tensor = x + self.project(F.gelu(self.expand(self.norm(x)), approximate="tanh"))
        return result


def layers(
    prefix: str, stack: Stack, sources: Sequence[str], *, num_devices: int = 1, shared: bool = False
) -> list[BlockSpec]:
    """The halves of all layers, one after another, the first fed by ``sources``; or one device's shares of them."""
    blocks: list[BlockSpec] = []
    feeds = tuple(sources)
    for layer in range(stack.layers):
        for operator, half, split in (("attention", Attention, "heads"), ("ffn", FeedForward, "ffn")):
            count = stack.heads if split == "heads" else 4 * stack.hidden
            block = BlockSpec(
                f"{prefix}{layer}.{operator}",
                operator,
                partial(half, stack, num_devices),
                feeds,
                dimensions=stack.sizes | {split: count // num_devices},
                shared=shared,
                collectives=sums(stack, num_devices, "F", "I"),
            )
            blocks.append(block)
            feeds = (block.id,)
    return blocks


def sums(stack: Stack, num_devices: int, *phases: Literal["F", "I"]) -> tuple[Collective, ...]:
    """What the shares of a block sum up, as in Megatron-LM: outputs after F, input gradients after I."""
    size = _FLOAT32_BYTES * stack.sequence * stack.hidden
    return tuple(Collective("all_reduce", phase, size) for phase in phases) if num_devices > 1 else ()


def require_divisible(name: str, stack: Stack, num_devices: int) -> None:
    """Refuse so many devices for a stack. Raises UsageError."""
    for what, count in (("heads", stack.heads), ("hidden", stack.hidden)):
        if count % num_devices:
            raise UsageError(
                f"{name} has {count} {what}, which cannot be split over {num_devices} devices; "
                "choose a number that divides them"
            )


def linear(inputs: int, outputs: int, *, std: float = 0.02, biased: bool = True) -> nn.Linear:
    """A linear layer with small random weights and no offset."""
    layer = nn.Linear(inputs, outputs, bias=biased)
    nn.init.normal_(layer.weight, std=std)
    if biased:
        nn.init.zeros_(layer.bias)
    return layer


def positions_of(sequence: int, hidden: int) -> Tensor:
    """[sequence, hidden]: sines and cosines of every position (Vaswani et al. 2017, section 3.5)."""
    waves = _LONGEST_WAVE ** (-torch.arange(0, hidden, 2) / hidden)
    angles = torch.arange(sequence)[:, None] * waves
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :hidden]


def _last_std(stack: Stack) -> float:
    """Of a half's last weights: smaller the more halves add to the residual."""
    return 0.02 / math.sqrt(2 * stack.layers)
