"""Whether what a backend makes is what eager torch makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipeplan.errors import ExecutionError

_WIDTHS = {torch.float64: 1e-3, torch.bfloat16: 300.0, torch.float16: 50.0}
"""How much farther from eager's numbers may be in other formats than float32: some steps of their last bits."""

_MOST = 0.3
"""So far off the largest number is wrong in any format, unless a backend says otherwise."""


def require_same(wanted: Sequence[Tensor], found: Sequence[Tensor], tolerance: float, dtype: torch.dtype) -> None:
    """Require the same tensors: no farther apart than so much of the largest number of each, in float32.

    In bfloat16 300 times as much, in float16 50 times, but no more than 0.3 unless the tolerance itself is more.

    Raises:
        ExecutionError: they are not; the text says by how much.
    """
    wider = _WIDTHS.get(dtype, 1.0)
    allowed = max(tolerance, min(tolerance * wider, _MOST)) if wider > 1 else tolerance * wider
    if [tuple(each.shape) for each in wanted] != [tuple(each.shape) for each in found]:
        raise ExecutionError("it gives tensors of other shapes than eager torch")
    for one, other in zip(wanted, found, strict=True):
        off = distance(one, other)
        if not off <= allowed:
            raise ExecutionError(
                f"its numbers are off eager's by {off:.2g} of the largest, and {allowed:.2g} is allowed: wrong"
            )


def in_one(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of parameters as one tensor; none of none.

    Some are nothing but what rounding leaves, such as that of the bias of an attention's keys: they are compared with
    the largest of all.
    """
    flat = [each.detach().flatten() for each in gradients]
    return [torch.cat(flat)] if flat else []


def distance(wanted: Tensor, found: Tensor) -> float:
    """The largest difference, relative to the largest number; inf where one is no number and the other is."""
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(wanted, found) else float("inf")
    if not wanted.numel():
        return 0.0
    one, other = wanted.double(), found.double()
    both = torch.isfinite(one)
    if not torch.equal(both, torch.isfinite(other)):
        return float("inf")
    one, other = torch.where(both, one, 0.0), torch.where(both, other, 0.0)
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30))
