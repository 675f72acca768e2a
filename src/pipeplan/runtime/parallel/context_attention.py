"""Causal attention of devices that share every sequence, of which each has an early and a late piece.

Keys and values of all places are gathered, and again in its backward, for which only a device's own pieces are kept;
what it finds for those of others goes back to them, summed. While they come it computes with its own, a c-th of its
work where c devices share sequences. Or they go around a ring beside it: :mod:`pipeplan.runtime.parallel.ring`.

torch's ``context_parallel`` balances alike, but only on GPUs, without windows, and in place of all attention of a
process: ``benchmarks/context_parallel.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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
        coming, own, others = _begin(pieces, context), *_looks(query, context, window)
        key, value = torch.split(pieces, sizes, -1)
        merged = Merged(query, value)
        for look in own:
            merged.add(looked(query, key, value, look, scale), look)
        key, value = torch.split(coming(), sizes, -1)
        for look in others:
            merged.add(looked(query, key, value, look, scale), look)
        made, sums = merged.whole
        ctx.sizes, ctx.context, ctx.scale, ctx.window = sizes, context, scale, window
        ctx.save_for_backward(lying_alone(query), pieces, made, sums)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, pieces, made, sums = ctx.saved_tensors
        whole, context, of_query = PartialAttention(made, sums), ctx.context, Summed(query)

        def back(both: Tensor, looks: Iterable[Reach]) -> Iterator[tuple[Reach, Tensor]]:
            """Gradients of what is looked at of ``both``, keys and values; those of queries are added up."""
            key, value = torch.split(both, ctx.sizes, -1)
            for look in looks:
                found = looked_back(gradients[0], query, key, value, whole, look, ctx.scale)
                of_query.add(found.query, look.queries)
                yield look, torch.cat(found[1:], -1)

        coming, own, others = _begin(pieces, context), *_looks(query, context, ctx.window)
        of_own = torch.zeros_like(pieces)
        for look, each in back(pieces, own):
            look.of_keys(of_own).add_(each)
        gathered = coming()
        of_all = torch.zeros_like(gathered)
        for look, each in back(gathered, others):
            look.of_keys(of_all).add_(each)
        of_all = by_device(of_all, context.count, _PLACES)
        of_all.chunk(context.count, _PLACES)[context.index].add_(of_own)
        return of_query.whole, context.scattered(of_all, _PLACES), None, None, None, None


_to_gathered: Callable[[Tensor, Tensor, list[int], Shards, float, int | None], Tensor] = _Gathered.apply


def _looks(query: Tensor, context: Shards, window: int | None) -> tuple[list[Reach], list[Reach]]:
    """What queries look at of the device's own pieces, and of all places in the order of the sequence."""
    places = query.shape[_PLACES]
    if window is not None and window < places * context.count:
        return [], [*_near(query, context, window)]
    if context.count == 1:
        return [Reach((0, places), (0, places), causal=True)], []
    return [*_own(places)], [*_others(places, context)]


def _own(places: int) -> Iterator[Reach]:
    """Each piece's queries at its own places, the late one's at all of the early piece.

    Together they are one causal mask, of which kernels with large blocks would compute more that is not looked at.
    """
    early, late = (0, places // 2), (places // 2, places)
    yield Reach(early, early, causal=True)
    yield Reach(late, late, causal=True)
    yield Reach(late, early)


def _others(places: int, context: Shards) -> Iterator[Reach]:
    """All queries at the places before the early piece; the late piece's at those between the two."""
    early, late = pieces_of(places * context.count, context)
    if early[0] > 0:
        yield Reach((0, places), (0, early[0]))
    if early[1] < late[0]:
        yield Reach((places // 2, places), (early[1], late[0]))


def _near(query: Tensor, context: Shards, window: int) -> Iterator[Reach]:
    """Each piece's queries at the places in reach of any of them."""
    length = query.shape[_PLACES] * context.count
    pieces = pieces_of(length, context) if context.count > 1 else ((0, length),)
    for at, (begin, end) in enumerate(pieces):
        own = at * (end - begin), (at + 1) * (end - begin)
        if window >= end:
            yield from [Reach(own, (0, begin))] if begin else []
            yield Reach(own, (begin, end), causal=True)
        else:
            keys = max(0, begin - window + 1), end
            yield Reach(own, keys, mask=in_window((begin, end), keys, window, query.device))


def _begin(pieces: Tensor, context: Shards) -> Callable[[], Tensor]:
    """Begin to gather what all devices have; what is returned waits, and gives it in the order of the sequence."""
    coming = context.begin_joining(pieces, _PLACES)
    return lambda: in_order(coming(), context.count, _PLACES)
