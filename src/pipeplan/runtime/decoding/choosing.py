"""The word that is taken of a text's logits: the likeliest, or one drawn by their probabilities.

What is drawn depends on the run's seed, the request and the place in its text, and on nothing that a plan decides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_NUMBERS = 2**53


@dataclass(frozen=True, slots=True)
class WordChoice:
    """``temperature`` 0 takes the likeliest word, and the first of several; else logits are divided by it.

    Drawn are only the ``top`` likeliest words, all without it.
    """

    temperature: float = 0.0
    top: int | None = None
    seed: int = 0

    def of(self, logits: Tensor, request: int, place: int) -> int:
        """The word of logits [words] that comes at this place of a request's text.

        Raises:
            ValueError: logits are NaN, which would be the likeliest of all, or infinite; -inf is of words that never
                come, if it is not of all.
        """
        never = logits.isneginf()
        odd = logits.numel() if bool(never.all()) else int((~logits.isfinite() & ~never).sum())
        if odd:
            raise ValueError(
                f"{odd} of {logits.numel()} logits are no finite numbers, so that no token can be chosen; look at the "
                "weights, or run in a wider --dtype"
            )
        if not self.temperature:
            return int(logits.argmax())
        scaled = logits.double() / self.temperature
        if self.top is not None and self.top < scaled.numel():
            least = scaled.topk(self.top).values[-1]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        ends = scaled.softmax(0).cumsum(0)
        drawn = self._drawn(request, place) * float(ends[-1])
        found = int(torch.searchsorted(ends, torch.tensor(drawn, dtype=ends.dtype, device=ends.device), right=True))
        return min(found, ends.numel() - 1)

    def _drawn(self, request: int, place: int) -> float:
        """An even number from 0 to 1."""
        digest = hashlib.sha256(f"{self.seed}/{request}/{place}".encode()).digest()
        return (int.from_bytes(digest[:8], "big") >> 11) / _NUMBERS
