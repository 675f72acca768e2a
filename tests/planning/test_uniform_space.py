"""Tensor, data and pipeline parallel sizes together: what is chosen, the bound over all, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.profiles import joined
from builders.requests import request_of
from pipeplan.costs import stage_costs
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, PlacedStage, Placement, Profile
from pipeplan.partition.chain.autopipe import timeline
from pipeplan.partition.chain.costs import StageTimes
from pipeplan.partition.mapping import neighbours
from pipeplan.planning.bounds import request_bound
from pipeplan.planning.candidates import uniform_choices
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, search_plan, without

SIZES, SHARDS, MINI_BATCH = (1, 2), (1, 2), 8
UNIFORM = without({"stage graphs", "published planners", "slice forwards"}, STEPS)


@st.composite
def chains(draw: st.DrawFn, most: int = 6) -> Profile:
    """Two to six blocks with costs for one and two shards and samples; two devices take more than half of one's time."""

    def block(index: int) -> Block:
        rows = []
        alone = draw(st.integers(2, 30)), draw(st.integers(2, 60)), draw(st.integers(1, 40))
        for size, shards in itertools.product(SIZES, SHARDS):
            forward, backward, held = (part * size // shards + draw(st.integers(0, 2)) for part in alone)
            row = {"microbatch_size": size, "shards": shards, "activation_bytes": held}
            rows.append(CostRow(**row, forward_ns=forward + 1, backward_ns=backward + 1))
        return Block(id=f"b{index}", operator="layer", parameter_bytes=draw(st.integers(0, 20)), costs=tuple(rows))

    return joined([block(index) for index in range(draw(st.integers(2, most)))])


def iterations(profile: Profile, num_devices: int, memory: int | None) -> Iterator[int]:
    """1F1B on every cut, for every uniform (shards, replicas, stages, micro-batch size): where it fits, its ns."""
    ids = [block.id for block in profile.blocks]
    for shards, samples, replicas in itertools.product(SHARDS, SIZES, range(1, num_devices + 1)):
        if MINI_BATCH % (samples * replicas) == 0:
            count = MINI_BATCH // (samples * replicas)
            for stages in range(1, min(len(ids), num_devices // (shards * replicas)) + 1):
                for cuts in itertools.combinations(range(1, len(ids)), stages - 1):
                    ends = [0, *cuts, len(ids)]
                    costs = [stage_costs(profile, ids[a:b], samples, shards) for a, b in itertools.pairwise(ends)]
                    held = [cost.memory_bytes(min(count, stages - place)) for place, cost in enumerate(costs)]
                    if memory is None or max(held) <= memory:
                        times = StageTimes(
                            tuple(cost.forward_ns for cost in costs), tuple(cost.backward_ns for cost in costs)
                        )
                        yield timeline(times, count).iteration_ns


def asked(profile: Profile, num_devices: int, memory: int | None = None, **others: Any) -> Request:
    fixed = {"scheduler": "1f1b", "num_parted": 0, "split_backward": False, "recompute": False}
    quick = {"time_limit": 1.0, "deterministic": True, "sizes": SIZES, "memory_bytes": memory}
    return request_of(profile, "auto", Batch(MINI_BATCH, 1), num_devices, **(fixed | quick | others))


@settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
@given(chains(), st.integers(1, 8), st.one_of(st.none(), st.integers(60, 300)))
def test_search_finds_the_best_of_all_uniform_layouts(profile: Profile, num_devices: int, memory: int | None) -> None:
    """Every size of tensor, data and pipeline parallelism, micro-batch and cut, by brute force."""
    request = asked(profile, num_devices, memory)
    best = min(iterations(profile, num_devices, memory), default=None)
    if best is None:
        return
    found = search_plan(request, steps=UNIFORM)
    assert found.plan.predicted.iteration_ns == best
    assert found.lower_bound_ns <= best
    assert request_bound(request) <= best
    least = min(each.least_ns for each in uniform_choices(request))
    assert least <= best
