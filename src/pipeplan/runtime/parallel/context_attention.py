"""Causal attention of devices that share every sequence, of which each has an early and a late piece.

Keys and values of all places are gathered in front of it, and again in its backward, for which only a device's own
pieces are kept; what it finds for those of others goes back to them, summed. Or they go around a ring beside it:
:mod:`pipeplan.runtime.parallel.ring`.

torch's ``context_parallel`` balances alike, but only on GPUs, without windows, and in place of all attention of a
process: ``benchmarks/context_parallel.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from pipeplan.runtime.parallel.attention_cores import ATTENTION
from pipeplan.runtime.parallel.context import Ring, by_device, in_order, pieces_of
from pipeplan.runtime.parallel.partial_attention import (
    Merged,
    PartialAttention,
    Reach,
    Summed,
    in_autocast,
    in_window,
    looked,
    looked_back,
    lying_alone,
)
from pipeplan.runtime.parallel.ring import ring_attention
from pipeplan.runtime.parallel.sharding import WHOLE, Shards

_PLACES = 2
"""The dimension of places of what comes as [samples, heads, places, size]."""


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Shards = WHOLE,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of each place to those up to its own, or to the last ``window`` of them.

    Args:
        query: [samples, heads, places of this device, size].
        key, value: the same, of as many heads or of fewer, which neighbours among the queries' then share.
        context: this device's place among those that have the other places.
        scale: of scores; by default one over the root of the size.
        window: None for any distance.
    """
    if has_torch_function((query, key, value)):  # its core may be computed again, in place of torch's operator
        given: dict[str, Any] = {"scale": scale, "window": window}
        found: Tensor = handle_torch_function(
            causal_attention, (query, key, value), query, key, value, context, **given
        )
        return found
    query, key, value = map(in_autocast, (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if isinstance(context, Ring):
        return ring_attention(query, key, value, context, scale, window)
    sizes = [key.shape[-1], value.shape[-1]]
    return _to_gathered(query, torch.cat((key, value), -1), sizes, context, scale, window)


ATTENTION.add(causal_attention)


class _Gathered(torch.autograd.Function):
    """Attention to keys and values that are gathered, of which a device's own are kept, and its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        pieces: Tensor,
        sizes: list[int],
        context: Shards,
        scale: float,
        window: int | None,
    ) -> Tensor:
        key, value = torch.split(_gathered(pieces, context), sizes, -1)
        merged = Merged(query, value)
        for look in _looks(query, context, window):
            merged.add(looked(query, key, value, look, scale), look)
        made, sums = merged.whole
        ctx.sizes, ctx.context, ctx.scale, ctx.window = sizes, context, scale, window
        ctx.save_for_backward(lying_alone(query), pieces, made, sums)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, pieces, made, sums = ctx.saved_tensors
        whole, context = _gathered(pieces, ctx.context), ctx.context
        of_query, of_whole = Summed(query), torch.zeros_like(whole)
        (key, value), of_both = torch.split(whole, ctx.sizes, -1), torch.split(of_whole, ctx.sizes, -1)
        for look in _looks(query, context, ctx.window):
            found = looked_back(gradients[0], query, key, value, PartialAttention(made, sums), look, ctx.scale)
            of_query.add(found.query, look.queries)
            for total, each in zip(of_both, found[1:], strict=True):
                look.of_keys(total).add_(each)
        return (
            of_query.whole,
            context.scattered(by_device(of_whole, context.count, _PLACES), _PLACES),
            None,
            None,
            None,
            None,
        )


_to_gathered: Callable[[Tensor, Tensor, list[int], Shards, float, int | None], Tensor] = _Gathered.apply


def _looks(query: Tensor, context: Shards, window: int | None) -> Iterator[Reach]:
    """Each piece's queries at the keys before it, and at its own; in windows at those in reach of any of them."""
    length = query.shape[_PLACES] * context.count
    pieces = pieces_of(length, context) if context.count > 1 else ((0, length),)
    for at, (begin, end) in enumerate(pieces):
        own = at * (end - begin), (at + 1) * (end - begin)
        if window is None or window >= end:
            yield from [Reach(own, (0, begin))] if begin else []
            yield Reach(own, (begin, end), causal=True)
        else:
            keys = max(0, begin - window + 1), end
            yield Reach(own, keys, mask=in_window((begin, end), keys, window, query.device))


def _gathered(pieces: Tensor, context: Shards) -> Tensor:
    """What all devices have, in the order of the sequence."""
    return in_order(context.joined(pieces, _PLACES), context.count, _PLACES)
