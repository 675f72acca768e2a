"""What a forward of several blocks holds, as the checker counts it: by definition, place by place."""

from __future__ import annotations

import random

import pytest

from pipeplan import Block, Edge, Profile
from pipeplan.checker.forwards import held_bytes
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
