"""Number formats under autocast: parameters stay as they are, operators that gain from it compute in a short format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Autocast", "precise"]


@dataclass(frozen=True, slots=True)
class Autocast:
    """``torch.autocast`` for blocks on a kind of device; calling it gives a context to run one in."""

    device: str
    dtype: torch.dtype

    def __call__(self) -> torch.autocast:
        """A context in which a block runs.

        Weights cast once are not kept for the next use: those cast while gradients are off, as in the forward of
        modules whose weight gradients wait, would be taken where they are on, and their gradients be lost.
        """
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least, in which losses and norms are added up."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
