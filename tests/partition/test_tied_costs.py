"""What runs of blocks keep where they share parameters: every way to add costs up agrees with the stage's own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from builders.profiles import joined
from pipeplan.costs import stage_costs
from pipeplan.errors import InfeasibleError
from pipeplan.files import Block, CostRow, PlacedStage, Profile, TiedParameter
from pipeplan.partition.chain.autopipe import autopipe
from pipeplan.partition.chain.costs import Chain, ChainCosts
from pipeplan.partition.dapple import dapple
from pipeplan.partition.graph.search import graphpipe
from pipeplan.partition.pipedream import pipedream
from pipeplan.partition.piper import piper
from pipeplan.partition.placement import place
from pipeplan.partition.problem import PartitionProblem, Pricing, together
from pipeplan.workload.kinds import GRADIENTS
from support.marks import one_in

TABLE = 960
ROW = CostRow(microbatch_size=1, forward_ns=100, backward_ns=200, activation_bytes=10, workspace_bytes=5)


def chain(count: int, *groups: tuple[int, ...], own: int = 40) -> Profile:
    sizes = [own + TABLE * sum(index in group for group in groups) for index in range(count)]
    blocks = [
        Block(id=f"b{n}", operator="layer", parameter_bytes=size, optimizer_bytes=2 * size, costs=(ROW,))
        for n, size in enumerate(sizes)
    ]
    tied = tuple(
        TiedParameter(
            name=f"t{n}", blocks=tuple(f"b{each}" for each in group), parameter_bytes=TABLE, optimizer_bytes=2 * TABLE
        )
        for n, group in enumerate(groups)
    )
    return joined(blocks, bytes_per_sample=8).model_copy(update={"tied": tied})


def drawn(seed: int) -> Profile:
    draw = random.Random(seed)
    count = draw.randint(3, 7)
    groups = [tuple(sorted(draw.sample(range(count), draw.randint(2, count)))) for _ in range(draw.randint(1, 2))]
    return chain(count, *groups)


@pytest.mark.parametrize("seed", range(12))
def test_all_sums_of_a_run_agree(seed: int) -> None:
    profile = drawn(seed)
    ids = [block.id for block in profile.blocks]
    alone = Pricing(1).costs(profile, ids)
    single, rows = ChainCosts.of(alone), ChainCosts.of_rows([alone, alone])
    size = rows.sizes()
    for begin, end in itertools.combinations(range(len(ids) + 1), 2):
        expected = stage_costs(profile, ids[begin:end], 1)
        (added,) = together((cost,) for cost in alone[begin:end])
        assert (added.state, added.tied) == (expected.state, expected.tied)
        assert rows.stage(begin, end, 1).state == expected.state
        assert rows.stage(begin, end, 1).tied == expected.tied
        ends = np.array([begin]), np.array([end])
        assert single.statics(*ends).tolist() == [expected.static_bytes]
        assert rows.gradients(*ends).tolist() == [[expected.gradient_bytes]] * 2
        assert size(begin, end) == expected.state[GRADIENTS]


@one_in(2, "seed", range(12), first=1)
def test_a_device_of_several_stages_has_a_copy(seed: int) -> None:
    profile = drawn(seed)
    ids = [block.id for block in profile.blocks]
    line = Chain.of(Pricing(1).costs(profile, ids), (0,) * 3, (None,))
    for cuts in itertools.combinations_with_replacement(range(len(ids) + 1), 6):
        ranges = [each for each in zip(cuts[::2], cuts[1::2], strict=True) if each[0] < each[1]]
        if not ranges:
            continue
        blocks = [id_ for begin, end in ranges for id_ in ids[begin:end]]
        assert line.held(ranges).statics == stage_costs(profile, blocks, 1).static_bytes
        if len(ranges) == 3:
            before, (begin, end), after = line.held(ranges[:1]), ranges[1], line.held(ranges[2:])
            found = line.bytes_between(before, np.array([begin]), np.array([end]), after)
            assert found.tolist() == [line.bytes_of(ranges)]


LEAST = 4 * (TABLE + 4 * 40)
"""State of four blocks of which two share a table."""


@pytest.mark.parametrize("strategy", ["one-to-one", "circular", "v-shape", "bidirectional"])
def test_what_fits_with_one_copy_is_placed(strategy: str) -> None:
    """Less than two copies of the table are enough on one device; with a byte less nothing fits."""
    profile, routes = chain(4, (0, 3)), 1 + (strategy == "bidirectional")
    shared = 4 * TABLE
    memory = (LEAST - shared) * routes + shared + 40 * routes + 5 * routes
    stages = place(profile, strategy, 1, microbatch_size=1, memory_bytes=[memory]).stages
    assert {block for stage in stages for block in stage.blocks} == {"b0", "b1", "b2", "b3"}
    with pytest.raises(InfeasibleError):
        place(profile, strategy, 1, microbatch_size=1, memory_bytes=[memory - 1])


@pytest.mark.parametrize("planner", [autopipe, pipedream, dapple, piper, graphpipe])
def test_planners_know_that_a_stage_has_one(planner: Callable[[PartitionProblem], Iterator[Any]]) -> None:
    """All blocks in one stage, as one device needs, fit into what one copy takes, and not into a byte less."""
    profile = chain(4, (0, 3))

    def placed(memory: int) -> tuple[PlacedStage, ...]:
        problem = PartitionProblem.of(profile, 1, 1, memory_bytes=memory)
        stages: tuple[PlacedStage, ...] = list(planner(problem))[-1].placement.stages
        return stages

    memory = LEAST + 40 + 5
    assert [len(stage.blocks) for stage in placed(memory)] == [4]
    with pytest.raises(InfeasibleError):
        placed(memory - 1)
