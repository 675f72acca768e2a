"""Products of rows with the weight of their group each, such as experts' of the words that chose them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeplan.runtime.parallel.experts import Experts, has_data
from pipeplan.runtime.parallel.weight_grads import accumulate_later


def grouped(rows: Tensor, weight: Tensor, ends: Tensor, *, waits: bool = True) -> Tensor:
    """Rows [rows, inputs] times the weight of their group [groups, outputs, inputs], to [rows, outputs].

    Rows of group g end before row ``ends[g]``. The weight's gradient can be deferred where it ``waits``; the product is
    then in autocast's format, as a linear layer's is.
    """
    if waits and not rows.is_meta and torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    return _grouped(rows, weight, ends, waits)


class _GroupedFunction(torch.autograd.Function):
    """Saves rows only for the gradient of the weight, and the weight only for that of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, waits: bool) -> Tensor:
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None)
        ctx.weight, ctx.bounds, ctx.waits = weight, _bounds(rows, ends), waits
        return _products(rows, weight, ctx.bounds)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        rows, saved = ctx.saved_tensors
        weight, bounds = ctx.weight, ctx.bounds
        back = None if saved is None else _products(gradient, saved.transpose(1, 2), bounds)

        def weight_grad() -> Tensor:
            made: Tensor
            if not has_data(rows):
                made = GROUPED_MM(gradient.t(), rows.to(gradient.dtype), len(bounds))
                return made
            made = torch.zeros_like(weight)
            for group, (begin, end) in enumerate(bounds):
                made[group] = gradient[begin:end].t() @ rows[begin:end].to(gradient.dtype)
            return made

        if rows is None:
            return back, None, None, None
        deferred = ctx.waits and accumulate_later(weight, weight_grad, (rows, gradient))
        return back, None if deferred else weight_grad(), None, None


_grouped: Callable[..., Tensor] = _GroupedFunction.apply


def _bounds(rows: Tensor, ends: Tensor) -> list[tuple[int, int]]:
    """The first row of each group, and the one after its last; without data nobody asks which."""
    found = ends.tolist() if has_data(rows) else [rows.shape[0]] * ends.shape[0]
    return list(zip([0, *found[:-1]], found, strict=True))


_LIBRARY = torch.library.Library("pipeplan", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types here
_LIBRARY.define("grouped_mm(Tensor left, Tensor right, int groups) -> Tensor")  # type: ignore[no-untyped-call]  # the same


def _shape_only(left: Tensor, right: Tensor, groups: int) -> Tensor:
    sizes = left.shape[0], right.shape[-1]
    return left.new_empty(sizes if right.ndim == 3 else (groups, *sizes))


_LIBRARY.impl("grouped_mm", _shape_only, "Meta")  # type: ignore[no-untyped-call]  # the same
GROUPED_MM: Any = torch.ops.pipeplan.grouped_mm
"""All groups' products in one operator, where tensors have no data: of [rows, n] with [groups, n, m], or of [n, rows]
with [rows, m] to [groups, n, m]. As ``torch._grouped_mm``, whose numbers are of bfloat16 alone."""


def _products(rows: Tensor, weight: Tensor, bounds: list[tuple[int, int]]) -> Tensor:
    made: Tensor
    if not has_data(rows):
        made = GROUPED_MM(rows, weight.transpose(1, 2).to(rows.dtype), len(bounds))
        return made
    made = rows.new_zeros(rows.shape[0], weight.shape[1])
    for group, (begin, end) in enumerate(bounds):
        if end > begin:
            torch.mm(rows[begin:end], weight[group].t().to(rows.dtype), out=made[begin:end])
    return made


def gated(gate_up: Tensor, down: Tensor, activation: str) -> Experts:
    """Experts of two layers with a gate: weights [experts, 2 x width, hidden] and [experts, hidden, width].

    Their gradients do not wait for W, as those of transformers' own product do not, with which they are profiled.
    """

    def experts(rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = grouped(rows, gate_up, ends, waits=False).chunk(2, dim=-1)
        return grouped(_ACTIVATIONS[activation](gate) * up, down, ends, waits=False)

    return experts


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda given: F.gelu(given, approximate="tanh"),
    "relu": F.relu,
}

GATES = tuple(_ACTIVATIONS)
"""What may stand before a gate of :func:`gated`."""
