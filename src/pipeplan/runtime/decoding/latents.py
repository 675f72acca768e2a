"""Latent attention (DeepSeek-V2, section 2.1), whose caches have latents in place of keys and values.

All heads share one latent of a word, and one rotated key. A block's layer makes each head's key and value of the
latent. Here that layer makes nothing: its rows for keys are taken to the queries, which then meet latents themselves,
and those for values to the mixture of latents (appendix C there). For one word that is as much work, and no word that
is cached has its keys and values made again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeplan.errors import UsageError


@dataclass(slots=True)
class LatentHeads:
    """The heads of a block on this device: ``weight`` [heads * (its key + its value), numbers of a latent] is that of
    the layer which makes keys and values of latents, ``rotated`` the numbers of the key that all heads share."""

    weight: Tensor
    rotated: int
    _made: Tensor | None = field(init=False, default=None)

    def instead(self, latents: Tensor) -> Tensor:
        """Note what would enter the layer, [..., numbers of a latent], and give what nobody reads in its result's
        place."""
        self._made = latents
        return latents.new_empty(*latents.shape[:-1], self.weight.shape[0])

    def written(self, key: Tensor) -> Tensor:
        """[rows, words, 1, numbers] what is kept of the words of keys [rows, heads, words, size]: the latents noted
        last, and the key that all heads share."""
        assert self._made is not None, "a block makes latents before it attends"
        rows, _, words, _ = key.shape
        latents = self._made.reshape(rows, words, 1, -1)
        self._made = None
        return torch.cat([latents, key[:, :1, :, -self.rotated :].transpose(1, 2)], -1)

    def queries(self, query: Tensor) -> Tensor:
        """[rows, heads, words, size] as queries of what is :meth:`written`."""
        own = query[..., : -self.rotated]
        met = torch.einsum("rhwn,hnk->rhwk", own, self._heads(query)[:, : own.shape[-1]])
        return torch.cat([met, query[..., -self.rotated :]], -1)

    def values(self, mixed: Tensor, query: Tensor) -> Tensor:
        """[rows, heads, words, size of values] of mixtures of latents, where queries came as ``query``."""
        return torch.einsum("rhwk,hvk->rhwv", mixed, self._heads(query)[:, query.shape[-1] - self.rotated :])

    @property
    def size(self) -> int:
        """Numbers of a latent."""
        return self.weight.shape[1]

    def _heads(self, query: Tensor) -> Tensor:
        heads = query.shape[1]
        if self.weight.shape[0] % heads:
            raise UsageError(
                f"the layer that makes keys and values of latents gives {self.weight.shape[0]} numbers, which "
                f"{heads} heads cannot share"
            )
        return self.weight.view(heads, -1, self.size)
