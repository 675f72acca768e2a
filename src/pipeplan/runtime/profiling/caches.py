"""Attention that reads a cache: blocks run as they are, and their attention meets as many tokens as the texts have.

A block of a model that takes one token of each text computes that token's query, key and value. Where it calls torch's
attention, :class:`CachedAttention` lets the query meet a whole cache, of which the key and value become the last. So
blocks of every model can be measured and counted, whatever wrote them, as long as their attention is torch's.

Where all heads share a latent (DeepSeek-V2, section 2.1.2 and appendix C), a step never makes keys and values of what
is cached: each head's query is taken through the matrix that would make its keys, and meets the latents themselves;
their mixture is taken through the one that would make its values. For one token that is as much work as making its own
key and value, which the block does, so that only the attention core is another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeplan.costs.devices import Kernel
from pipeplan.files.profile import Phase
from pipeplan.runtime.models.spec import CausalDecoder
from pipeplan.runtime.parallel.attention_cores import ATTENTION

_LIBRARY = torch.library.Library("pipeplan", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types here
_LIBRARY.define("attended(Tensor query, Tensor key, Tensor value, int[] case) -> Tensor")  # type: ignore[no-untyped-call]  # the same
_LIBRARY.impl("attended", lambda query, key, value, case: query.new_empty([*query.shape[:-1], value.shape[-1]]), "Meta")  # type: ignore[no-untyped-call]  # the same
ATTENDED = torch.ops.pipeplan.attended
"""Stands for attention to a cache on the meta device, by :attr:`CachedCase.numbers`."""


@dataclass(frozen=True, slots=True)
class CachedCase:
    """What attention is of: texts of so many ``tokens``, of which tokens look back over a ``window`` at most.

    ``key_heads`` are those cached on this device (None: as many as of queries), ``latent`` is as :class:`CausalDecoder`
    has it, and ``width`` bytes of a number of the cache.
    """

    phase: Phase
    tokens: int
    key_heads: int | None = None
    latent: tuple[int, int] | None = None
    window: int | None = None
    width: int = 2

    @classmethod
    def of(cls, phase: Phase, tokens: int, decoder: CausalDecoder, block: str, shards: int, width: int) -> CachedCase:
        """That of a block on one of the devices that split it."""
        heads = None if decoder.key_heads is None else max(1, decoder.key_heads // shards)
        return cls(phase, tokens, heads, decoder.latent, decoder.windows(block), width)

    @property
    def kept(self) -> int:
        """Words of a text that a step looks back at, its own included."""
        return self.tokens if self.window is None else min(self.tokens, self.window)

    @property
    def numbers(self) -> list[int]:
        """As an operator's argument."""
        latent = self.latent or (0, 0)
        return [self.phase == "decode", self.tokens, self.key_heads or 0, *latent, self.window or 0, self.width]

    @classmethod
    def read(cls, numbers: list[int]) -> CachedCase:
        """From an operator's argument."""
        decodes, tokens, heads, rank, rotated, window, width = numbers
        latent = (rank, rotated) if rank else None
        return cls("decode" if decodes else "prefill", tokens, heads or None, latent, window or None, width)


@dataclass(frozen=True, slots=True)
class Attended:
    """Sizes of an attention: of queries [samples, heads, tokens, size] and keys, before copies, and bytes a number."""

    samples: int
    heads: int
    tokens: int
    key_heads: int
    key_size: int
    value_size: int
    width: int

    @classmethod
    def of(cls, case: CachedCase, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        """The sizes of one whose tensors are these; in a step with a latent of that, which is key and value at once."""
        samples, heads, tokens = query.shape[:3]
        if case.latent is not None and case.phase == "decode":
            rank, rotated = case.latent
            return cls(samples, heads, tokens, 1, rank + rotated, rank, query.itemsize)
        key_heads = min(case.key_heads or key.shape[-3], key.shape[-3])
        return cls(samples, heads, tokens, key_heads, key.shape[-1], value.shape[-1], query.itemsize)

    def kernel(self, case: CachedCase) -> Kernel:
        """One fused kernel: of scores and mixture of what each token looks at; it reads what is cached."""
        met = _pairs(self.tokens, case)
        flops = 2 * self.samples * self.heads * met * (self.key_size + self.value_size)
        ends = self.samples * self.heads * self.tokens * (self.key_size + self.value_size) * self.width
        read = case.kept if case.phase == "decode" else self.tokens
        per_token = self.key_size + (0 if case.latent and case.phase == "decode" else self.value_size)
        width = case.width if case.phase == "decode" else self.width
        cached = self.samples * self.key_heads * read * per_token * width
        return Kernel(flops, ends + cached, matrix=True, form="attention", head_size=self.key_size)


def _pairs(tokens: int, case: CachedCase) -> int:
    """How many tokens the last ``tokens`` of a text look at, all together."""
    first, window = case.tokens - tokens + 1, case.kept
    whole = max(0, window - first + 1)  # those that look at all before them, which are less than the window
    whole = min(whole, tokens)
    return whole * first + whole * (whole - 1) // 2 + (tokens - whole) * window


def attended_kernel(query: Tensor, key: Tensor, value: Tensor, numbers: list[int]) -> Kernel:
    """What :data:`ATTENDED` stands for."""
    case = CachedCase.read(numbers)
    return Attended.of(case, query, key, value).kernel(case)


class CachedAttention(TorchFunctionMode):
    """Attention inside meets a cache, filled with noise; ``found`` are its sizes, and :meth:`run` its cores alone."""

    def __init__(self, case: CachedCase) -> None:
        super().__init__()
        self.case = case
        self.found: list[Attended] = []
        self._caches: list[tuple[Tensor, ...]] = []
        self._cores: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Before each forward."""
        self.found, self._cores = [], []

    def run(self) -> None:
        """The attention cores of the last forward, by themselves."""
        for core in self._cores:
            core()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function; attention with the cache."""
        return self._attend(func, *args, **(kwargs or {})) if func in ATTENTION else func(*args, **(kwargs or {}))

    def _attend(self, func: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        sizes = Attended.of(self.case, query, key, value)
        self.found.append(sizes)
        if query.is_meta:
            made: Tensor = ATTENDED(query, key, value, self.case.numbers)
            return made
        if self.case.phase == "prefill":
            core = partial(func, query, key, value, *rest, **options)
        else:
            if len(self._caches) < len(self.found):
                self._caches.append(self._cache_like(sizes, key))
            core = partial(self._step, sizes, query, key, value, options.get("scale"), len(self.found) - 1)
        self._cores.append(core)
        result: Tensor = core()
        return result

    def _cache_like(self, sizes: Attended, key: Tensor) -> tuple[Tensor, ...]:
        """Keys and values, or latents, as noise: numbers close to zero can be slow."""

        def noise(size: int) -> Tensor:
            shape = (sizes.samples, sizes.key_heads, self.case.kept, size)
            return torch.randn(shape, dtype=key.dtype, device=key.device)

        return (noise(sizes.key_size),) if self.case.latent else (noise(sizes.key_size), noise(sizes.value_size))

    def _step(
        self, sizes: Attended, query: Tensor, key: Tensor, value: Tensor, scale: float | None, number: int
    ) -> Tensor:
        """One token of each text, whose key and value become the last; heads that share keys are rows of one."""
        cached, heads = self._caches[number], sizes.key_heads
        if self.case.latent is not None:
            keys, values = cached[0], cached[0][..., : sizes.value_size]
            queries = query.new_zeros(sizes.samples, 1, sizes.heads, sizes.key_size)
            mixed = F.scaled_dot_product_attention(queries, keys, values, scale=scale).transpose(1, 2)
            missing = value.shape[-1] - mixed.shape[-1]
            return F.pad(mixed, (0, missing)) if missing > 0 else mixed[..., : value.shape[-1]]
        keys, values = cached
        copies = key.shape[-3] // heads
        keys[:, :, -1:], values[:, :, -1:] = key[:, ::copies], value[:, ::copies]
        rows = query.reshape(sizes.samples, heads, sizes.heads // heads, sizes.key_size)
        mixed = F.scaled_dot_product_attention(rows, keys, values, scale=scale)
        return mixed.reshape(sizes.samples, sizes.heads, 1, sizes.value_size)
