"""Partitions of a chain with frontiers for stages, against every partition there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.profiles import joined
from pipeplan.costs import stage_costs
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, Profile
from pipeplan.partition import stage_frontier
from pipeplan.partition.problem import Way
from pipeplan.partition.stage_frontier import StageFrontiers


def chain_profile(seed: int, num_blocks: int) -> Profile:
    """A chain with costs for 1, 2 and 4 samples on 1 and 2 shards."""
    random = Random(seed)
    blocks = []
    for index in range(num_blocks):
        rows = tuple(
            CostRow(
                microbatch_size=size,
                shards=shards,
                forward_ns=random.randrange(1, 50) * size,
                backward_ns=random.randrange(1, 50) * size,
                activation_bytes=random.randrange(50) * size,
                workspace_bytes=random.randrange(20),
            )
            for size in (1, 2, 4)
            for shards in (1, 2)
        )
        parameters = random.randrange(40) * 2
        state = {"parameter_bytes": parameters, "optimizer_bytes": parameters}
        blocks.append(Block(id=f"b{index}", operator="linear", costs=rows, **state))
    return joined(blocks, bytes_per_sample=1)


def every_partition(profile: Profile, num_devices: int, num_stages: int) -> Iterator[list[tuple[tuple[str, ...], Way]]]:
    """All cuts of the chain with all ways for all groups of one, two or all devices."""
    names = [block.id for block in profile.blocks]
    ways = [
        Way(4, replicas, 0, recompute, shards)
        for replicas in (1, 2, 3, 4)
        for shards in (1, 2)
        for recompute in (False, True)
        if 4 % replicas == 0 and replicas * shards in {1, 2, num_devices}
    ]
    for inner in itertools.combinations(range(1, len(names)), num_stages - 1):
        cuts = [0, *inner, len(names)]
        runs = [tuple(names[a:b]) for a, b in itertools.pairwise(cuts)]
        for chosen in itertools.product(ways, repeat=num_stages):
            if sum(way.num_devices for way in chosen) == num_devices:
                yield list(zip(runs, chosen, strict=True))


def takes(profile: Profile, partition: list[tuple[tuple[str, ...], Way]], num_microbatches: int) -> tuple[int, int]:
    """Bytes of the device that needs most, ns of the slowest stage."""
    memory = slowest = 0
    for place, (blocks, way) in enumerate(partition):
        costs = [stage_costs(profile, [b], 4 // way.replicas, way.shards, recompute=way.recompute) for b in blocks]
        in_flight = min(len(partition) - place, num_microbatches)
        static = sum(cost.static_bytes for cost in costs)
        held = sum(cost.activation_bytes for cost in costs)
        memory = max(memory, static + in_flight * held + max(cost.workspace_bytes for cost in costs))
        slowest = max(slowest, sum(cost.forward_ns + cost.backward_ns for cost in costs))
    return memory, slowest


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(2, 3), st.integers(1, 3))
def test_the_slowest_stage_is_as_quick_as_memory_allows(
    seed: int, num_blocks: int, num_devices: int, num_microbatches: int
) -> None:
    profile = chain_profile(seed, num_blocks)
    frontiers = StageFrontiers(profile, 4, num_microbatches, num_devices, (False, True))
    every = {
        stages: [takes(profile, each, num_microbatches) for each in every_partition(profile, num_devices, stages)]
        for stages in range(1, min(num_blocks, num_devices) + 1)
    }
    most = max(memory for found in every.values() for memory, _ in found)
    for limit in (None, most, 3 * most // 4, most // 2, most // 4):
        cuts = {cut.num_stages: cut for cut in frontiers.fastest(num_devices, limit)}
        for stages, found in every.items():
            fitting = [slowest for memory, slowest in found if limit is None or memory <= limit]
            assert (stages in cuts) == bool(fitting)
            if fitting:
                cut = cuts[stages]
                assert cut.slowest_ns == min(fitting)
                ways = [
                    Way(4, stage.replicas, 0, bool(stage.recompute), stage.shards) for stage in cut.placement.stages
                ]
                stated = [(stage.blocks, way) for stage, way in zip(cut.placement.stages, ways, strict=True)]
                assert takes(profile, stated, num_microbatches) == (cut.memory_bytes, cut.slowest_ns)


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(4, 9), st.integers(1, 40), st.integers(1, 4))
def test_the_quickest_are_those_of_all_numbers_of_stages(
    seed: int, num_blocks: int, num_microbatches: int, most: int
) -> None:
    frontiers = StageFrontiers(chain_profile(seed, num_blocks), 4, num_microbatches, 8, (False, True))
    largest = max(cut.memory_bytes for cut in frontiers.fastest(8, None))
    for limit in (None, largest // 2, largest // 4, largest // 6):
        every = frontiers.fastest(8, limit)
        assert [cut.placement for cut in frontiers.fastest(8, limit, most)] == [cut.placement for cut in every[:most]]


def test_stages_that_cannot_be_among_the_quickest_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, groups = list[int](), stage_frontier._Cuts._groups
    monkeypatch.setattr(
        stage_frontier._Cuts, "_groups", lambda cuts, place: looked.append(place) or groups(cuts, place)
    )
    frontiers = StageFrontiers(chain_profile(0, 12), 4, 2, 8, (False, True))
    (cut,) = frontiers.fastest(8, None, most=1)
    assert cut.num_stages <= max(looked) < 8
    looked.clear()
    frontiers.fastest(8, None)
    assert max(looked) == 8


def test_sizes_that_were_not_profiled_are_refused() -> None:
    with pytest.raises(UsageError, match="micro-batches of 64"):
        StageFrontiers(chain_profile(0, 2), 64, 1, 2, (False,))
