"""Attention to a piece of a cache, and how pieces are merged into attention to all of it.

Each piece gives the mixture of its values and, per head, the logarithm of the sum of its scores' exponentials; these
weigh the mixtures as in FlashDecoding (thesis, section 4.4, which has the largest score and the sum instead: one number
more). On CPUs it is torch's own attention that gives both.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The mixture [rows, heads, places, size of values], and the logarithms of sums [rows, heads, places].

    Args:
        query: [rows, heads, places, size].
        key: [rows, heads, words, size].
        value: [rows, heads, words, its size].
        mask: [rows, 1 or heads, places, words], -inf where a place does not look at a word, else 0; None: at all.
        scale: of scores; None is 1 / sqrt(size).

    A place that looks at no word has the mixture 0; its logarithm means nothing where torch's operator is taken.
    """
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        mixed, sums = _FUSED(query, key, value, attn_mask=mask, scale=scale)
        return mixed, sums
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask
    sums = scores.logsumexp(-1)
    shares = scores.softmax(-1).masked_fill(sums.isneginf().unsqueeze(-1), 0)  # else 0 / 0 where no word is seen
    return shares @ value, sums


def merged(mixed: Tensor, sums: Tensor) -> Tensor:
    """Attention to all pieces: of mixtures [pieces, ..., size] and logarithms [pieces, ...]; empty ones have -inf."""
    shares = (sums - sums.amax(0)).exp()
    shares = shares / shares.sum(0)
    return (mixed.to(shares.dtype) * shares.unsqueeze(-1)).sum(0).to(mixed.dtype)
