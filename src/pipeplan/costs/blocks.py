"""Costs of one block for any micro-batch size between the measured ones."""

from __future__ import annotations

from pipeplan.errors import UsageError
from pipeplan.model import Block, CostRow

__all__ = ["block_costs"]


def block_costs(
    block: Block, microbatch_size: int, shards: int = 1, *, recompute: bool = False, input_bytes: int = 0
) -> CostRow:
    """The block's row for a micro-batch size, interpolated linearly between its neighbours where it has none.

    With ``recompute`` the block's own rows for it are used; without such rows they follow from the others:
    F keeps only the inputs (``input_bytes`` for this micro-batch), B and I run the forward again first and need
    what it holds as workspace.

    Raises:
        UsageError: no rows for this shard count, or the size is outside the rows' range.
    """
    rows = sorted(
        (row for row in block.costs if row.shards == shards and row.recompute == recompute and not row.configuration),
        key=lambda row: row.microbatch_size,
    )
    if not rows and recompute:
        return _recomputed(block_costs(block, microbatch_size, shards), input_bytes)
    if not rows:
        known = sorted({row.shards for row in block.costs})
        raise UsageError(f"block {block.id!r} has no costs for {shards} shards, only for {known}; profile it with them")
    below = [row for row in rows if row.microbatch_size <= microbatch_size]
    above = [row for row in rows if row.microbatch_size >= microbatch_size]
    if not below or not above:
        sizes = [row.microbatch_size for row in rows]
        raise UsageError(
            f"block {block.id!r} has costs for micro-batch sizes {sizes}, not for {microbatch_size}; choose "
            f"--microbatch-size from {sizes[0]} to {sizes[-1]}, or profile it with --microbatch {microbatch_size}"
        )
    return _between(below[-1], above[0], microbatch_size)


_TIMES = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns")
_SIZES = ("activation_bytes", "weight_grad_bytes", "workspace_bytes")


def _between(low: CostRow, high: CostRow, microbatch_size: int) -> CostRow:
    if low.microbatch_size == high.microbatch_size:
        return low
    offset, width = microbatch_size - low.microbatch_size, high.microbatch_size - low.microbatch_size
    values: dict[str, object] = {
        "microbatch_size": microbatch_size,
        "shards": low.shards,
        "recompute": low.recompute,
    }
    for field in (*_TIMES, *_SIZES):
        before, after = getattr(low, field), getattr(high, field)
        if before is not None and after is not None:
            values[field] = before + round((after - before) * offset / width)
    return CostRow.model_validate(values)


def _recomputed(row: CostRow, input_bytes: int) -> CostRow:
    again = {
        field: getattr(row, field) + row.forward_ns
        for field in ("backward_ns", "input_grad_ns")
        if getattr(row, field) is not None
    }
    return row.model_copy(
        update={
            **again,
            "recompute": True,
            "activation_bytes": min(input_bytes, row.activation_bytes),
            "workspace_bytes": row.workspace_bytes + row.activation_bytes,
        }
    )
