"""Counts by torch's own rules of sharding, beside what torch holds, and beside the even parts of plans."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pipeplan.costs.torch_parts import fully_sharded, owned_whole


@pytest.mark.slow  # four processes, and torch
def test_counts_are_what_torch_holds_rank_by_rank(tmp_path: Path) -> None:
    from runtime_support.sharding_ranks import held, shapes

    for rank, found in enumerate(held(tmp_path)):
        for ranks, counts in found.items():
            cut, whole = fully_sharded(shapes(), ranks), owned_whole(shapes(), ranks)
            own = cut.owned[rank % ranks]
            assert counts["fully_shard"] == {"stored": cut.stored[rank % ranks], "gradients": own, "moments": own}
            assert counts["zero"] == {"stored": whole.stored[rank % ranks], "moments": whole.owned[rank % ranks]}


@pytest.mark.parametrize("seed", range(20))
def test_even_parts_lie_within_torchs_padding(seed: int) -> None:
    draw = random.Random(seed)
    shapes = [tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(1, 12))]
    for ranks in (1, 2, 4, 8):
        cut = fully_sharded(shapes, ranks)
        assert cut.even <= max(cut.stored) <= cut.even + -(-cut.padding // ranks)
        assert min(cut.owned) <= cut.even <= max(cut.owned) <= cut.stored[0]
        whole = owned_whole(shapes, ranks)
        assert sum(whole.owned) == sum(cut.owned) == whole.stored[0]
        assert min(whole.owned) <= whole.even <= max(whole.owned)


def test_a_single_number_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="single number"):
        fully_sharded([(2, 3), ()], 2)
