"""What a forward of several blocks holds, as the checker counts it: by definition, place by place."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import pipeplan
from pipeplan import Block, Edge, Profile
from pipeplan.checker.facts import Facts
from pipeplan.checker.forwards import given_spans, held_bytes
from pipeplan.workload.elements import Stage


@pytest.mark.parametrize("seed", range(20))
def test_outputs_are_there_until_the_last_that_takes_them_has_run(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 9)
    blocks = [
        Block.of(f"b{place}", "1ms", activation=draw.randint(1, 50), workspace=draw.randint(0, 50), gradients=0)
        for place in range(count)
    ]
    pairs = {tuple(sorted(draw.sample(range(count), 2))) for _ in range(2 * count)}
    edges = [
        Edge(source=f"b{source}", target=f"b{target}", bytes_per_sample=1, gradient=False, tensor=tensor)
        for source, target in sorted(pairs)
        for tensor in draw.sample(["one", "other"], draw.randint(1, 2))
    ]
    profile = Profile.of("a graph", blocks, edges=edges, mode="inference")
    places = sorted(draw.sample(range(count), draw.randint(1, count)))
    last = {place: max((to for source, to in pairs if source == place), default=-1) for place in places}
    stays = {p: last[p] for p in places if last[p] >= 0 and {to for source, to in pairs if source == p} <= {*places}}
    rows = [blocks[place].costs[0] for place in places]
    size = {place: row.activation_bytes for place, row in zip(places, rows, strict=True)}
    most = [
        row.workspace_bytes + sum(size[other] for other in stays if other <= place <= stays[other])
        for place, row in zip(places, rows, strict=True)
    ]
    stage = Stage(blocks=tuple(f"b{place}" for place in places), devices=(0,), microbatch_size=1)
    given = sum(size[place] for place in places if place not in stays)
    assert held_bytes(profile, stage, rows) == (given, max(most))


def test_sums_of_what_all_forwards_give_are_exact() -> None:
    """Of four on a device, each of which fits into 64 bits with all its micro-batches, and all of them do not."""
    profile = pipeplan.example("shape-circular", devices=2, chunks=4, inference=True)
    asked = {"devices": 2, "microbatches": 400, "scheduler": "gpipe", "deterministic": True, "time_limit": "2s"}
    plan = pipeplan.search(profile, **asked).plan.unrolled()
    most = tuple(replace(each, acquire_bytes=10**16) for each in plan.operations)
    spans = given_spans(Facts.of(plan.model_copy(update={"operations": most})))
    assert [np.concatenate([each.sizes for each in own]).sum() for own in spans] == [4 * 400 * 10**16] * 2
