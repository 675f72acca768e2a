"""Attention to some of the keys, beside which others are looked at: what it makes, and what merges it with theirs.

A softmax over all keys is found from those over parts of them, and the logarithms of the parts' sums of exponentials
(FlashAttention, section 3.1; Ring Attention, Liu et al. 2023). Backward of a part is that of the whole, of whose
probabilities it has some: it takes what all parts made together, and the logarithms of all their sums.

torch has both behind its attention, as operators for each kind of device: flash attention on CPUs, and on GPUs for
formats of two bytes. What these lack is in plain torch here, some queries at a time: masks on GPUs, wider formats
there, values of another size than keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PLACES = 2
"""The dimension of places in what comes as [samples, heads, places, size]."""

_MOST_SCORES = 1 << 22
"""Numbers in the scores that plain torch makes at a time: 16 MiB in float32."""


class PartialAttention(NamedTuple):
    """What queries made of some keys: [samples, heads, places, size], and the logarithms of sums, [.., places]."""

    made: Tensor
    sums: Tensor


class Gradients(NamedTuple):
    """Those of queries, keys and values, each of its shape."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Reach:
    """Which places of queries look at which of keys: first, and the one after the last.

    All do; ``causal``: of equally many, each at those up to its own; or as the ``mask`` says, [queries, keys], in which
    every query looks at some.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False
    mask: Tensor | None = None

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Their places of a tensor."""
        return _within(tensor, self.queries)

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Their places of a tensor."""
        return _within(tensor, self.keys)


def looked(query: Tensor, key: Tensor, value: Tensor, look: Reach, scale: float) -> PartialAttention:
    """What the queries that look make of what they look at. Keys and values may have fewer heads than queries."""
    given = look.of_queries(query), look.of_keys(key), look.of_keys(value)
    if _has_cpu_kernel(*given):
        found = _CPU(*given, 0.0, look.causal, attn_mask=_added(look.mask, query), scale=scale)
        return PartialAttention(found[0], found[1])
    if _has_gpu_kernel(*given, look):
        found = _GPU(*given, 0.0, look.causal, scale=scale)
        return PartialAttention(found[0], found[1])
    with _without_autocast(query.device.type):
        return _plain(*given, look, scale)


def looked_back(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: PartialAttention, look: Reach, scale: float
) -> Gradients:
    """The gradients of what looks and of what is looked at, from the ``gradient`` of what the ``whole`` made."""
    given = look.of_queries(query), look.of_keys(key), look.of_keys(value)
    back, made, sums = look.of_queries(gradient), look.of_queries(whole.made), look.of_queries(whole.sums)
    if _has_cpu_kernel(*given):
        how: dict[str, Any] = {"attn_mask": _added(look.mask, query), "scale": scale}
        return Gradients(*_CPU_BACK(back, *given, made, sums, 0.0, look.causal, **how))
    if _has_gpu_kernel(*given, look):
        sizes, state = (look.queries[1] - look.queries[0], look.keys[1] - look.keys[0]), _no_state(query)
        whole_samples = None, None  # none is of a length of its own
        rest = (made, sums.contiguous(), *whole_samples, *sizes, 0.0, look.causal, state, state)
        return Gradients(*_GPU_BACK(back, *given, *rest, scale=scale))
    with _without_autocast(query.device.type):
        return _plain_back(back, *given, PartialAttention(made, sums), look, scale)


class Merged:
    """What parts make together. In formats of two bytes it is summed up in float32, and rounded once."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._shape = (*query.shape[:-1], value.shape[-1])
        self._format = query.dtype
        self._whole: PartialAttention | None = None
        self._begun = list[tuple[int, int]]()

    def add(self, part: PartialAttention, look: Reach) -> None:
        """Merge what some queries made."""
        wide, (begin, end) = part.made.to(_wide(part.made)), look.queries
        if self._whole is None and wide.shape == self._shape:
            self._whole = PartialAttention(wide, part.sums)
        elif self._whole is None:
            sums = torch.full(self._shape[:-1], -torch.inf, dtype=part.sums.dtype, device=wide.device)
            self._whole = PartialAttention(_by_places(wide, self._shape).zero_(), sums)
        made, sums = look.of_queries(self._whole.made), look.of_queries(self._whole.sums)
        if self._whole.made is wide:
            pass
        elif all(end <= first or last <= begin for first, last in self._begun):
            made.copy_(wide)
            sums.copy_(part.sums)
        else:
            made.lerp_(wide, torch.sigmoid(part.sums - sums).to(wide.dtype).unsqueeze(-1))
            sums.copy_(torch.logaddexp(sums, part.sums))
        self._begun.append(look.queries)

    @property
    def whole(self) -> PartialAttention:
        """What all made, places before heads in memory, as the layers behind attention take it."""
        assert self._whole is not None, "every query looks at itself"
        made = self._whole.made
        if made.dtype == self._format and made.transpose(1, 2).is_contiguous():
            return self._whole
        found = _by_places(made, self._shape, self._format)
        return PartialAttention(found.copy_(made), self._whole.sums)


class Summed:
    """Gradients of a tensor that several parts add to. In formats of two bytes they are summed up in float32."""

    def __init__(self, like: Tensor) -> None:
        self._format = like.dtype
        self._sum = torch.zeros_like(like, dtype=_wide(like))

    def add(self, found: Tensor, places: tuple[int, int]) -> None:
        """Add what some places have of it."""
        _within(self._sum, places).add_(found)

    @property
    def whole(self) -> Tensor:
        """In the format of what it is of."""
        return self._sum.to(self._format)


def in_autocast(tensor: Tensor) -> Tensor:
    """The tensor in the format that autocast narrows attention to, where it is on."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def _without_autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def in_window(queries: tuple[int, int], keys: tuple[int, int], window: int, device: torch.device) -> Tensor:
    """[queries, keys]: whether a place looks at another: itself and the window - 1 before it."""
    distance = torch.arange(*queries, device=device)[:, None] - torch.arange(*keys, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def lying_alone(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where keeping it would keep more: queries that keys and values were made together with."""
    if tensor.is_meta or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _by_places(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor [samples, heads, places, size] with places before heads in memory."""
    samples, heads, places, size = shape
    return like.new_empty((samples, places, heads, size), dtype=dtype or like.dtype).transpose(1, 2)


_CPU: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACK: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_GPU: Any = torch.ops.aten._scaled_dot_product_flash_attention
_GPU_BACK: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward


def _within(tensor: Tensor, places: tuple[int, int]) -> Tensor:
    begin, end = places
    return tensor if end - begin == tensor.shape[_PLACES] else tensor.narrow(_PLACES, begin, end - begin)


def _wide(tensor: Tensor) -> torch.dtype:
    """The format in which sums of many of its numbers are made."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as what is added to scores, in their format."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _has_cpu_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _has_gpu_kernel(query: Tensor, key: Tensor, value: Tensor, look: Reach) -> bool:
    """FlashAttention 2: no masks, and sizes that are multiples of 8 up to 256."""
    size, narrow = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    fits = size == value.shape[-1] and size % 8 == 0 and size <= 256
    return query.device.type == "cuda" and narrow and fits and look.mask is None


def _no_state(query: Tensor) -> Tensor:
    """Of random numbers, of which a core without dropout draws none."""
    return torch.empty(2, dtype=torch.int64, device=query.device)


def _rows(query: Tensor, keys: int, look: Reach) -> Iterator[tuple[int, int, Tensor | None]]:
    """Some queries at a time: first, and the one after the last, and at which keys they do not look."""
    samples, heads, places, _ = query.shape
    each = max(1, _MOST_SCORES // (samples * heads * keys))
    for begin in range(0, places, each):
        end, hidden = min(begin + each, places), None
        if look.causal:
            at = torch.arange(begin, end, device=query.device)[:, None]
            hidden = torch.arange(keys, device=query.device)[None, :] > at
        elif look.mask is not None:
            hidden = ~look.mask[begin:end]
        yield begin, end, hidden


def _by_groups(tensor: Tensor, heads: int) -> Tensor:
    """[samples, heads of keys, queries' heads to each of them, ...]"""
    return tensor.reshape(tensor.shape[0], heads, -1, *tensor.shape[_PLACES:])


def _scores(query: Tensor, key: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    found = query @ key.unsqueeze(2).mT * scale
    return found if hidden is None else found.masked_fill_(hidden, -torch.inf)


def _plain(query: Tensor, key: Tensor, value: Tensor, look: Reach, scale: float) -> PartialAttention:
    wide, heads = _wide(query), key.shape[1]
    made = query.new_empty(*query.shape[:-1], value.shape[-1])
    sums = torch.empty(query.shape[:-1], dtype=wide, device=query.device)
    queries, keys, values = _by_groups(query, heads).to(wide), key.to(wide), value.to(wide)
    for begin, end, hidden in _rows(query, key.shape[_PLACES], look):
        scores = _scores(queries[..., begin:end, :], keys, hidden, scale)
        found = scores.logsumexp(-1)
        sums[..., begin:end] = found.flatten(1, 2)
        shares = scores.sub_(found.unsqueeze(-1)).exp_()
        made[..., begin:end, :] = (shares @ values.unsqueeze(2)).flatten(1, 2)
    return PartialAttention(made, sums)


def _plain_back(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: PartialAttention, look: Reach, scale: float
) -> Gradients:
    wide, heads = _wide(query), key.shape[1]
    queries, keys, values = _by_groups(query, heads).to(wide), key.to(wide).unsqueeze(2), value.to(wide).unsqueeze(2)
    backs = _by_groups(gradient, heads).to(wide)
    mean = (backs * _by_groups(whole.made, heads).to(wide)).sum(-1, keepdim=True)
    sums = _by_groups(whole.sums, heads).unsqueeze(-1)
    of_queries = torch.empty_like(queries)
    of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
    for begin, end, hidden in _rows(query, key.shape[_PLACES], look):
        own = queries[..., begin:end, :]
        shares = _scores(own, key.to(wide), hidden, scale).sub_(sums[..., begin:end, :]).exp_()
        back = backs[..., begin:end, :]
        of_values += (shares.mT @ back).sum(2, keepdim=True)
        of_scores = shares * (back @ values.mT - mean[..., begin:end, :]) * scale
        of_queries[..., begin:end, :] = of_scores @ keys
        of_keys += (of_scores.mT @ own).sum(2, keepdim=True)
    return Gradients(
        of_queries.flatten(1, 2).to(query.dtype), of_keys.squeeze(2).to(key.dtype), of_values.squeeze(2).to(value.dtype)
    )
