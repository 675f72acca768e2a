"""Causal attention of devices that share every sequence, of which each has an early and a late piece.

Keys and values of all places are gathered, and again in its backward, for which only a device's own pieces are kept;
what it finds for those of others goes back to them, summed. While they come it computes with its own, a c-th of its
work where c devices share sequences. Or they go around a ring beside it: :mod:`pipeplan.runtime.parallel.ring`.

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
from pipeplan.runtime.parallel.context import Ring
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
from pipeplan.runtime.parallel.ring import gradients_of, looks, ring_attention
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
        ctx: Any, query: Tensor, pieces: Tensor, sizes: list[int], context: Shards, scale: float, window: int | None
    ) -> Tensor:
        merged = Merged(query, pieces[..., sizes[0] :])
        for device, part in _parts(pieces, context):
            key, value = torch.split(part, sizes, -1)
            for look in _looks(query, context, device, window):
                merged.add(looked(query, key, value, look, scale), look)
        made, sums = merged.whole
        ctx.sizes, ctx.context, ctx.scale, ctx.window = sizes, context, scale, window
        ctx.save_for_backward(lying_alone(query), pieces, made, sums)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, pieces, made, sums = ctx.saved_tensors
        whole, context, of_query = PartialAttention(made, sums), ctx.context, Summed(query)
        of_parts = dict[int, Tensor]()
        for device, part in _parts(pieces, context):
            key, value = torch.split(part, ctx.sizes, -1)
            found = [
                (look, looked_back(gradients[0], query, key, value, whole, look, ctx.scale))
                for look in _looks(query, context, device, ctx.window)
            ]
            for look, each in found:
                of_query.add(each.query, look.queries)
            of_parts[device] = torch.cat(gradients_of([key, value], found), -1)
        of_all = torch.cat([of_parts[device] for device in range(context.count)], _PLACES)
        return of_query.whole, context.scattered(of_all, _PLACES), None, None, None, None


_to_gathered: Callable[[Tensor, Tensor, list[int], Shards, float, int | None], Tensor] = _Gathered.apply


def _parts(pieces: Tensor, context: Shards) -> Iterator[tuple[int, Tensor]]:
    """Each device's pieces with its number: its own while those of the others are gathered, then these."""
    coming = context.begin_gathering(pieces)
    yield context.index, pieces
    yield from (each for each in enumerate(coming()) if each[0] != context.index)


def _looks(query: Tensor, context: Shards, device: int, window: int | None) -> Iterator[Reach]:
    """What queries look at of a device's keys."""
    places = 0, query.shape[_PLACES]
    if context.count == 1 and window is not None and window < places[1]:
        yield Reach(places, places, mask=in_window(places, places, window, query.device))
    else:
        yield from looks(context, device, query, window)
