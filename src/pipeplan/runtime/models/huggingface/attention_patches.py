"""What transformers' models call for attention and experts, in a form that can be exported and measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["NAME", "register"]

NAME = "pipeplan"
"""Of the functions here among transformers' attentions and experts. Attention makes no mask, so that a causal one is
left to the operator; experts have one product each, whose sizes depend on the data but whose shapes do not."""


def register() -> None:
    """Make the functions known to transformers, and the work of experts to torch's FLOP counter. Can be repeated."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(NAME, _attention)
    ExpertsInterface.register(NAME, _experts)
    _count_grouped_products()


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' own attention on torch's operator, with a mask only for a window shorter than the text."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if sliding_window is not None and sliding_window < key.shape[2]:
        attention_mask = _window(sliding_window, key.shape[2], key.device)
    made: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
    return made


def _window(width: int, length: int, device: torch.device) -> Tensor:
    """[1, 1, length, length]: whether a query (third) may look at a key: itself and the width - 1 before it."""
    positions = torch.arange(length, device=device)
    behind = positions[:, None] - positions[None, :]
    return ((behind >= 0) & (behind < width))[None, None]


def _experts(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Sum of each token's experts: hidden [tokens, hidden], chosen and shares [tokens, experts per token].

    Rows are sorted by expert, and ``transformers::grouped_mm_fallback`` multiplies those of each by its weights.
    """
    product = torch.ops.transformers.grouped_mm_fallback
    each = chosen.shape[1]
    expert, order = chosen.flatten().sort()
    numbers = torch.arange(module.num_experts, device=expert.device)
    ends = (expert[:, None] <= numbers).sum(0).to(torch.int32)
    gate, up = product(hidden[order // each], module.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
    made = product(module.act_fn(gate) * up, module.down_proj.transpose(1, 2), ends)
    weighted = made[order.argsort()] * shares.flatten()[:, None].to(made.dtype)
    summed: Tensor = weighted.unflatten(0, (-1, each)).sum(1)
    return summed


def _count_grouped_products() -> None:
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    product = torch.ops.transformers.grouped_mm_fallback
    if product in flop_registry:
        return

    @register_flop_formula(product)
    def forward(input: Any, weight: Any, offsets: Any, *_: Any, **__: Any) -> int:
        return 2 * int(input[0]) * int(weight[1]) * int(weight[2])

    @register_flop_formula(torch.ops.transformers.grouped_mm_fallback_backward)
    def backward(input: Any, weight: Any, *_: Any, **__: Any) -> int:
        return 4 * int(input[0]) * int(weight[1]) * int(weight[2])
