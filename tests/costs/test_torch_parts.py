"""Counts by torch's own rules of sharding, beside what torch holds, and beside the even parts of plans."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from pipeplan.costs import state_of
from pipeplan.costs.torch_parts import fully_sharded, owned_whole
from pipeplan.costs.zero import Zero, cuts
from pipeplan.files import Block, CostRow, Profile, Recipe, Source
from pipeplan.workload.kinds import GRADIENTS, OPTIMIZER, PARAMETERS, MemoryBytes


@pytest.mark.slow  # four processes, and torch
def test_counts_are_what_torch_holds_rank_by_rank(tmp_path: Path) -> None:
    from runtime_support.sharding_ranks import held, shapes

    for rank, found in enumerate(held(tmp_path)):
        for ranks, counts in found.items():
            cut, whole = fully_sharded(shapes(), ranks), owned_whole(shapes(), ranks)
            own = cut.owned[rank % ranks]
            at_rest = {"stored": cut.stored[rank % ranks], "gradients": own, "moments": own}
            assert counts["reshard"] == at_rest | {"whole between": 0}
            assert counts["keep"] == at_rest | {"whole between": cut.gathered}
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


def test_plans_of_level_3_keep_even_parts_of_each_block_within_torchs_padding() -> None:
    """Parameters, gradients and both moments are float32; blocks are modules, each cut by itself."""
    modules = [[(7, 6), (7,)], [(3, 7), (3,)], [(3,), (3,)], [(5, 3), (5,)], [(1, 5), (1,)]]
    row = CostRow(microbatch_size=1, forward_ns=1, backward_ns=1)
    blocks = [
        Block(id=f"b{n}", operator="linear", parameters=sum(map(math.prod, each)), costs=(row,))
        for n, each in enumerate(modules)
    ]
    profile = Profile(name="small", source=Source(method="estimated"), recipe=Recipe(name="fp32"), blocks=tuple(blocks))
    for ranks in (2, 4):
        cut = cuts(profile.recipe, Zero(3, ranks))
        kept = sum((state_of(block, profile.recipe).share(cut) for block in blocks), MemoryBytes())
        parts = [fully_sharded(each, ranks) for each in modules]
        for kind, copies in ((PARAMETERS, 1), (GRADIENTS, 1), (OPTIMIZER, 2)):
            elements = kept[kind] / (4 * copies)
            even, fullest = (sum(map(of, parts)) for of in (lambda each: each.even, lambda each: max(each.stored)))
            assert even - len(modules) < elements <= even <= fullest <= even + sum(each.padding for each in parts)
        assert sum(each.gathered for each in parts) == sum(block.parameters for block in blocks)


def test_a_single_number_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="single number"):
        fully_sharded([(2, 3), ()], 2)
