"""Host memory for what is received, used again as soon as nothing holds on to it.

What is received starts an autograd graph, may leave its stage as a view of itself, or be kept by a model's code. So no
plan can say when its memory is free, but torch can: it lets go of what backs a tensor with the last tensor on it.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict

import torch
from torch import Tensor

__all__ = ["Buffers"]


class Buffers:
    """Lends memory to tensors and gets it back when the last tensor on it, view or not, is gone.

    Fresh memory would cost page faults: from 32 MiB on, where the C library gives back what is freed, receiving into it
    takes several times as long.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = defaultdict(list)
        self.num_made = 0

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape with anything in it."""
        count = math.prod(shape)
        size = max(count, 1) * dtype.itemsize
        free = self._free[size]
        memory = free.pop() if free else self._make(size)
        lease = memoryview(memory)  # torch holds on to this, and to nothing else of ours
        weakref.finalize(lease, free.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=dtype)[:count].view(shape)

    def _make(self, size: int) -> bytearray:
        self.num_made += 1
        return bytearray(size)
