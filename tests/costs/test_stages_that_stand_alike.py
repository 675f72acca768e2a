"""Stages that stand alike are worked out once: with the same answers as one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeplan.costs import zero
from pipeplan.costs.communication import Exchange, GroupPrices
from pipeplan.costs.messages import goes_in_slices
from pipeplan.costs.spread import GroupSpread
from pipeplan.costs.zero import Zero, price_of_exchange, state_groups
from pipeplan.files import Cluster, LinkLevel, Source
from pipeplan.files.cluster import DeviceKind
from pipeplan.workload.elements import Players, Stage
from pipeplan.workload.folding import Fold

pytestmark = pytest.mark.counted


def cluster_of(rng: random.Random) -> Cluster:
    """Two or three levels: nodes of 2 or 4, maybe racks of two or four of these, and all 64 devices."""
    node, racks = rng.choice([2, 4]), rng.choice([(), (2,), (4,)])
    sizes = [node, *(node * each for each in racks), 64]
    levels = (
        LinkLevel(name=f"level{at}", group_size=size, latency_ns=10**at, bandwidth_bytes_per_s=10 ** (11 - at))
        for at, size in enumerate(sizes)
    )
    kind = DeviceKind(name="device", count=64)
    return Cluster(name="drawn", source=Source(method="literature"), devices=(kind,), levels=tuple(levels))


def stage_on(devices: tuple[int, ...], shards: int, level: int, group: int | None) -> Stage:
    replicas = len(devices) // shards
    split: dict[str, Any] = {
        "shards": shards,
        "replicas": replicas,
        "zero": level,
        "zero_group": group if level else None,
    }
    return Stage(blocks=(f"b{devices[0]}",), devices=devices, microbatch_size=replicas, **split)


def alone(cluster: Cluster, operation: Any, size: int, groups: list[list[int]]) -> float:
    """An exchange in these groups where they stand, without looking for others that are alike."""
    spread = GroupSpread.of(cluster, groups) if len(groups[0]) > 1 and size else None
    return 0.0 if spread is None else GroupPrices(cluster, spread)(Exchange(operation, size))


def one_by_one(cluster: Cluster, stages: list[Stage], size: int, whole: int, updated: int) -> tuple[int, int]:
    """Ns to sum, and to gather, as the first of the stages that share blocks does."""
    stage, way = stages[0], Zero.of(stages[0])
    own = state_groups(stage.devices, stage.shards, way.group)
    every = [group for each in stages for group in state_groups(each.devices, each.shards, way.group)]
    cut = way.group if way.level < 2 else 1
    places = [
        sorted(set(place))
        for shard in range(stage.shards)
        for place in zip(*every[shard :: stage.shards], strict=True)
        if len(every) > stage.shards
    ]
    summed = round(alone(cluster, "reduce_scatter", size, own)) if way.level < 2 else 0
    summed += round(alone(cluster, "all_reduce", -(-(size - whole) // cut), places or [[0]]))
    everywhere = [sorted(set(place)) for place in zip(*every, strict=True)]
    summed += round(alone(cluster, "all_reduce", -(-whole // cut), everywhere)) if whole else 0
    return summed, round(alone(cluster, "all_gather", updated, own)) if way.level < 3 else 0


@pytest.mark.parametrize("seed", range(10))
def test_exchanges_of_alike_stages_are_those_of_each_alone(seed: int) -> None:
    """Of positions one after another, and of two routes that share blocks, at any level and in any groups."""
    rng = random.Random(seed)
    for _ in range(6):
        cluster, shards, replicas = cluster_of(rng), rng.choice([1, 2]), rng.choice([2, 4, 8])
        width, level = shards * replicas, rng.randrange(1, 4)
        group = rng.choice([each for each in (2, 4, 8) if each <= replicas])
        positions = [stage_on(tuple(range(at, at + width)), shards, level, group) for at in range(0, 65 - width, width)]
        for at, stage in enumerate(positions):
            sharing = [stage, *rng.sample(positions[at + 1 :], min(1, len(positions) - at - 1) * rng.randrange(2))]
            size, whole, updated = rng.randrange(10**7), rng.choice([0, 1000]), rng.randrange(10**7)
            found = price_of_exchange(cluster, stage, sharing)(size + whole, whole, updated)
            assert found == one_by_one(cluster, sharing, size + whole, whole, updated)


def test_alike_stages_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen positions, each on a node of its own, make their groups once."""
    asked = list[int]()
    cluster = cluster_of(random.Random(0)).model_copy(update={"name": "another"})

    def counted(devices: tuple[int, ...], shards: int, group: int) -> list[list[int]]:
        asked.append(len(devices))
        return state_groups(devices, shards, group)

    monkeypatch.setattr(zero, "state_groups", counted)
    node = cluster.levels[-2].group_size
    for at in range(0, 64, node):
        stage = stage_on(tuple(range(at, at + node)), 1, 1, None)
        price_of_exchange(cluster, stage, [stage])(10**6, 0, 10**6)
    assert len(asked) == 2


@pytest.mark.parametrize("seed", range(10))
def test_programs_are_linked_alike_as_pair_by_pair(seed: int) -> None:
    rng = random.Random(seed)
    answers = set()
    for _ in range(20):
        count, programs = rng.choice([2, 4]), rng.choice([4, 6])
        step = rng.choice([1, programs])
        firsts = [at * count if step == 1 else at for at in range(programs)]
        fold = Fold([Players(first=first, counts=(count,), steps=(step,)) for first in firsts], count)
        pairs = [(rng.randrange(programs), rng.randrange(programs)) for _ in range(rng.randrange(4))]
        sizes = sorted(rng.sample([2, 3, 4, 6, 8, 64], 2))
        together = [
            {
                one // size == other // size
                for one, other in zip(fold.players[a].devices, fold.players[b].devices, strict=True)
            }
            for size in sizes
            for a, b in pairs
        ]
        answers.add(found := fold.alike(pairs, sizes))
        assert found == all(len(each) == 1 for each in together)
    assert answers == {True, False}


def test_slices_go_to_devices_that_do_not_have_them_all() -> None:
    """Where no device is of both stages nothing stands in the way; where some is, its slice must be the one it has."""
    maker, apart = stage_on((0, 1), 2, 0, None), stage_on((2, 3), 2, 0, None)
    same, other = stage_on((0, 1), 2, 0, None), stage_on((1, 0), 2, 0, None)
    assert goes_in_slices(maker, apart)
    assert goes_in_slices(maker, same)
    assert not goes_in_slices(maker, other)
