"""Attention cores: scores, softmax, and their mixture, which backward may compute again (Korthikanti et al. 2022).

By torch's ``checkpoint`` around the core alone. Around the block with a policy (selective activation checkpointing) it
keeps what every other operator made, more than backward needs: ``benchmarks/recomputed_cores.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

_ATEN = torch.ops.aten.scaled_dot_product_attention
ATTENTION: set[object] = {torch.nn.functional.scaled_dot_product_attention, _ATEN, _ATEN.default}
"""Functions that are cores. Modules that have one of their own add it, so that stages need not know them."""


class RecomputedCores(TorchFunctionMode):
    """Attention cores inside keep what they are given, and are computed again in backward; ``count`` them."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function; attention in a checkpoint of its own."""
        self.count += func in ATTENTION
        again = partial(checkpoint, func, use_reentrant=False)
        run = again if func in ATTENTION else func
        return run(*args, **(kwargs or {}))
