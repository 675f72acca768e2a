"""Devices that share every sequence (context parallelism): each has an early and a late piece of it.

Of twice as many equal pieces as there are devices, device r has the r-th and the r-th from the end. Queries look at
the places up to their own, so that a device's two pieces together have the same work as those of any other (Llama 3,
section 3.3.2). Keys and values of all places are gathered in front of attention, and again in its backward, for which
only a device's own pieces are kept; what it finds for those of others goes back to them, summed.

torch's ``context_parallel`` balances alike, but only on GPUs, without windows, and in place of all attention of a
process: ``benchmarks/context_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import handle_torch_function, has_torch_function

from pipeplan.errors import UsageError
from pipeplan.runtime.parallel.sharding import WHOLE, Regathered, Shards, kept_for

CONTEXT = "context"
"""The axis along which devices share sequences, beside those along which a block is split."""

_PIECES = 2
_PLACES = 2
"""The dimension of places of keys and values, which come as [samples, heads, places, size]."""


def context_of(shards: Shards) -> Shards:
    """A device's place among those that share sequences with it."""
    return shards.along.get(CONTEXT, WHOLE)


def require_pieces(sequence: int, count: int, name: str) -> None:
    """Check that devices can have pieces of one size. Raises UsageError."""
    if sequence % (_PIECES * count):
        raise UsageError(
            f"model {name!r} has sequences of {sequence}, of which {count} devices cannot have an early and a late "
            f"piece each, all of one size: give a --sequence that is a multiple of {_PIECES * count}, or search with "
            "another --cp"
        )


def pieces_of(length: int, context: Shards) -> tuple[tuple[int, int], tuple[int, int]]:
    """A device's early and its late piece of a sequence: the first place, and the one after the last."""
    size, late = length // (_PIECES * context.count), _PIECES * context.count - 1 - context.index
    return (context.index * size, (context.index + 1) * size), (late * size, (late + 1) * size)


def own_pieces(whole: Tensor, context: Shards, dimension: int = 1) -> Tensor:
    """What a device has of a tensor of whole sequences: both pieces, one behind the other."""
    if context.count == 1:
        return whole
    pieces = pieces_of(whole.shape[dimension], context)
    return torch.cat([whole.narrow(dimension, begin, end - begin) for begin, end in pieces], dimension)


def own_positions(length: int, context: Shards, device: torch.device | None = None) -> Tensor:
    """[length] where in their sequence the places are that a device has, of which there are so many."""
    if context.count == 1:
        return torch.arange(length, device=device)
    pieces = pieces_of(length * context.count, context)
    return torch.cat([torch.arange(begin, end, device=device) for begin, end in pieces])


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
    sizes = [key.shape[-1], value.shape[-1]]
    pieces = context.joined(torch.cat((key, value), -1), _PLACES)
    whole, again = _in_order(pieces, context.count), kept_for(pieces)
    if again is None or whole.is_meta or _recomputing.get():
        return _attended(query, whole, sizes, context, scale, window)
    kept = _Regathering(whole.untyped_storage().data_ptr(), again, context.count)
    with saved_tensors_hooks(kept.pack, kept.unpack):
        return _attended(query, whole, sizes, context, scale, window)


_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Where nothing is kept for backward anyway, but computed again, gathered keys and values among it."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def _attended(
    query: Tensor, whole: Tensor, sizes: list[int], context: Shards, scale: float | None, window: int | None
) -> Tensor:
    """Each piece's queries to the keys that any of them looks at."""
    made, length, grouped = [], whole.shape[_PLACES], query.shape[1] != whole.shape[1]
    for own, (begin, end) in zip(query.chunk(_PIECES, _PLACES), pieces_of(length, context), strict=True):
        first = 0 if window is None else max(0, begin - window + 1)
        mask: Tensor | None = None
        key, value = torch.split(whole.narrow(_PLACES, first, end - first), sizes, -1)
        width = end if window is None else window
        if first < begin and query.is_cuda and width >= end - first:
            mask = causal_lower_right(end - begin, end - first)  # of which kernels make no tensor
        elif first < begin or width < end - first:
            mask = _window(begin, end, first, width, query.device)
        how: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "scale": scale, "enable_gqa": grouped}
        made.append(F.scaled_dot_product_attention(own, key, value, **how))
    return torch.cat(made, _PLACES)


def _window(begin: int, end: int, first: int, width: int, device: torch.device) -> Tensor:
    """[end - begin, end - first]: whether a place looks at a key: itself and the width - 1 before it."""
    distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, end, device=device)[None, :]
    return (distance >= 0) & (distance < width)


def _in_order(gathered: Tensor, count: int) -> Tensor:
    """Places of whole sequences, of the pieces of all devices, one device behind the other."""
    if count == 1:
        return gathered
    pieces = gathered.chunk(_PIECES * count, _PLACES)
    return torch.cat((*pieces[::_PIECES], *reversed(pieces[1::_PIECES])), _PLACES)


@dataclass(frozen=True, slots=True)
class _Within:
    """A part of what is gathered again."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Regathering:
    """What autograd keeps of keys and values that were gathered: where in them something lies.

    The first that backward needs of them gathers them again, and they are let go of with the last.
    """

    storage: int
    again: Regathered
    count: int
    left: int = 0
    whole: Tensor | None = field(default=None)

    def pack(self, tensor: Tensor) -> Tensor | _Within:
        """What is kept."""
        if tensor.untyped_storage().data_ptr() != self.storage:
            return tensor
        self.left += 1
        return _Within(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: Tensor | _Within) -> Tensor:
        """What was given."""
        if isinstance(kept, Tensor):
            return kept
        if self.whole is None:
            self.whole = _in_order(self.again.gather(self.again.share), self.count)
        found, self.left = self.whole.as_strided(kept.size, kept.stride, kept.offset), self.left - 1
        if not self.left:
            self.whole = None
        return found
