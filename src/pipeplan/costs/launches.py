"""What launching a block takes the host, for every action, where costs do not have it: most of what small ones take."""

from __future__ import annotations

from pipeplan.files import Block, CostRow, Profile
from pipeplan.time_limit import checked


def with_launches(profile: Profile, overhead_ns: int) -> Profile:
    """The profile whose blocks take so much longer in each F and B, or in each I and W."""
    if not overhead_ns:
        return profile
    launched = profile.model_copy(
        update={"blocks": tuple(_launched(block, overhead_ns) for block in checked(profile.blocks, 64))}
    )
    return launched.with_kinds({kind: with_launches(own, overhead_ns) for kind, own in profile.of_kinds.items()})


def _launched(block: Block, overhead_ns: int) -> Block:
    return block.model_copy(update={"costs": tuple(_longer(row, overhead_ns) for row in block.costs)})


def _longer(row: CostRow, overhead_ns: int) -> CostRow:
    halves = {
        key: time + overhead_ns
        for key in ("input_grad_ns", "weight_grad_ns")
        if (time := getattr(row, key)) is not None
    }
    whole = {"forward_ns": row.forward_ns + overhead_ns}
    if row.has_backward:
        whole["backward_ns"] = row.whole_backward_ns + overhead_ns
    return row.model_copy(update={**whole, **halves})
