"""Attention of devices that send keys and values around a ring beside it (Ring Attention, Liu et al. 2023).

Each device has an early and a late piece of every sequence. It computes with its own keys and values while those of the
device before it come, then with these while the next ones do, and merges what it finds (:mod:`.partial_attention`).
After one hop less than there are devices it has met all. Under a causal mask every step is as much work, on every
device: its own pieces, or all its queries with the early piece of one before it, or its late queries with both pieces
of one behind it; nothing else looks at anything.

Backward begins with the keys and values that forward ended with, which are kept in place of a device's own, and sends
them around the other way, one step ahead of the sums of their gradients. A device's own come last, and their gradients
are at home then, as in Transformer Engine. So it moves twice what forward does: :mod:`pipeplan.costs.context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeplan.runtime.parallel.context import Ring
from pipeplan.runtime.parallel.partial_attention import (
    Gradients,
    Merged,
    PartialAttention,
    Reach,
    Summed,
    in_window,
    looked,
    looked_back,
    lying_alone,
)
from pipeplan.runtime.parallel.sharding import Shards

_PLACES = 2


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float, window: int | None) -> Tensor:
    """As :func:`~pipeplan.runtime.parallel.context_attention.causal_attention`, of which this is one way."""
    return _around(query, key, value, ring, scale, window)


class _Around(torch.autograd.Function):
    """Attention, and its backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float, window: int | None
    ) -> Tensor:
        held, merged = [key.contiguous(), value.contiguous()], Merged(query, value)
        for step in range(ring.count):
            coming = ring.passed(held, 1) if step + 1 < ring.count else None
            for look in looks(ring, ring.index - step, query, window):
                merged.add(looked(query, held[0], held[1], look, scale), look)
            held = held if coming is None else coming()
        ctx.ring, ctx.scale, ctx.window = ring, scale, window
        made, sums = merged.whole
        ctx.save_for_backward(lying_alone(query), *held, made, sums)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        query, *held, made, sums = ctx.saved_tensors
        whole, of_query, of_piece = PartialAttention(made, sums), Summed(query), list[Tensor]()
        for step in range(ring.count):
            coming = ring.passed(held, -1) if step + 1 < ring.count else None
            arriving = ring.passed(of_piece, -1) if step else None
            found = [
                (look, looked_back(gradients[0], query, held[0], held[1], whole, look, ctx.scale))
                for look in looks(ring, ring.index + 1 + step, query, ctx.window)
            ]
            for look, each in found:
                of_query.add(each.query, look.queries)
            of_piece = gradients_of(held, found, None if arriving is None else arriving())
            held = held if coming is None else coming()
        return of_query.whole, *of_piece, None, None, None


_around: Callable[[Tensor, Tensor, Tensor, Ring, float, int | None], Tensor] = _Around.apply


def looks(ring: Shards, source: int, query: Tensor, window: int | None) -> Iterator[Reach]:
    """What a device's queries look at of the keys of the device ``source``, counted around the ring."""
    places, source = query.shape[_PLACES], source % ring.count
    half, later = places // 2, source > ring.index
    if window is not None and window < places * ring.count:
        yield from _near(ring, source, half, window, query.device)
    elif source == ring.index:
        yield Reach((0, places), (0, places), causal=True)  # late queries look at all of the early piece, too
    else:
        yield Reach((half, places), (0, places)) if later else Reach((0, places), (0, half))


def _near(ring: Shards, source: int, half: int, window: int, device: torch.device) -> Iterator[Reach]:
    """Of each pair of pieces what is in reach of the last ``window`` places."""
    for at, own in enumerate(_starts(ring.index, ring.count, half)):
        for begin, first in enumerate(_starts(source, ring.count, half)):
            low, high = max(own, first), min(own + half, first + half - 1 + window)  # queries that look at any
            if low >= high:
                continue
            near, far = max(first, low - window + 1), min(first + half, high)
            queries = (at * half + low - own, at * half + high - own)
            keys = (begin * half + near - first, begin * half + far - first)
            causal = own == first and window >= half
            all_look = low >= far - 1 and high - 1 - near < window
            mask = None if causal or all_look else in_window((low, high), (near, far), window, device)
            yield Reach(queries, keys, causal, mask)


def _starts(device: int, count: int, half: int) -> tuple[int, int]:
    """Where a device's early and its late piece begin in the sequence."""
    return device * half, (2 * count - 1 - device) * half


def gradients_of(
    held: Sequence[Tensor], found: Sequence[tuple[Reach, Gradients]], before: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Those of a piece's keys and values: what came of devices that had it before, and what was found here."""
    whole = (0, held[0].shape[_PLACES])
    if before is None and [look.keys for look, _ in found] == [whole]:
        return [each.contiguous() for each in found[0][1][1:]]
    sums = [torch.zeros_like(each) for each in held] if before is None else list(before)
    for look, own in found:
        for total, each in zip(sums, own[1:], strict=True):
            look.of_keys(total).add_(each)
    return sums
