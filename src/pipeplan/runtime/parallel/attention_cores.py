"""Attention cores (scores, softmax and their mixture), which backward may compute again.

Korthikanti et al. 2022, section 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

ATTENTION = {
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
"""The functions that are cores."""


class RecomputedCores(TorchFunctionMode):
    """Attention cores inside keep what they are given, and are computed again in backward; ``count`` them."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function; attention in a checkpoint of its own."""
        if func not in ATTENTION:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return checkpoint(func, *args, use_reentrant=False, **(kwargs or {}))
