"""Floating-point operations of matrix products and convolutions, by torch's formulas and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pipeplan.runtime.parallel.grouped_rows import GROUPED_MM

_aten = torch.ops.aten


def product_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> int | None:
    """FLOPs of an operator with these arguments and result; None if it is not a product."""
    operator = func._overloadpacket
    count = _FLOPS.get(operator) or flop_registry.get(operator)  # which grows as models are loaded
    return None if count is None else int(count(*args, **kwargs, out_val=made))


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has its constructors without types
    """Adds up the ``flops`` of all products inside. On the meta device attention is two products, which count whole."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        made = func(*args, **(kwargs or {}))
        self.flops += product_flops(func, args, kwargs or {}, made) or 0
        return made


def _of_attention(flops: Any, num_tensors: int, causal_at: int) -> Any:
    """Counts FLOPs of fused attention on the CPU, which torch misses before 2.15; a causal mask leaves half.

    The first ``num_tensors`` arguments count; number ``causal_at`` is whether there is such a mask.
    """

    def count(*arguments: Any, out_val: Any = None, **more: Any) -> int:
        causal = more.get("is_causal", any(arguments[causal_at : causal_at + 1]))
        return int(flops(*(each.shape for each in arguments[:num_tensors]))) // (2 if causal else 1)

    return count


def _grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Products of groups: of [rows, n] with [groups, n, m], or in backward of [n, rows] with [rows, m]."""
    groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


_FLOPS: dict[Any, Any] = {  # of operators that torch has no formula for
    _aten._grouped_mm: _grouped,
    GROUPED_MM: _grouped,
    _aten._scaled_dot_product_flash_attention_for_cpu: _of_attention(sdpa_flop_count, 3, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_attention(sdpa_backward_flop_count, 4, 7),
}
