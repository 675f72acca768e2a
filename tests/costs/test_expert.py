"""Devices that share experts (expert parallelism): rows, state, sums of gradients, plans and checks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import ValidationError

import pipeplan
from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.costs.communication import Exchange, LinkPath, all_reduce_time, dispatch_ns, time_of_groups
from pipeplan.costs.zero import Experts, Zero
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, Edge, LinkLevel, PlacedStage, Placement, Profile, Source
from pipeplan.files.cluster import DeviceKind
from pipeplan.files.profile import Recipe
from pipeplan.simulator.recost import relinked
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS
from pipeplan.workload.workload import Workload
from support.marks import always, slow_but

DENSE, SPARSE = 800, 64_000
LINKS = Cluster(
    name="links",
    source=Source(method="literature"),
    devices=(DeviceKind(name="device", count=16),),
    levels=(LinkLevel(name="all", group_size=16, bandwidth_bytes_per_s=10**9, latency_ns=50),),
)


def profile(*sizes: int, split: int = 1) -> Profile:
    """Attention, and words to experts that 1 and some more devices share, of which ``split`` have parts of the same."""
    whole = [
        CostRow(microbatch_size=size, forward_ns=100 * size, backward_ns=200 * size, shards=shards)
        for shards in (1, 2)
        for size in (1, 2)
    ]
    spread = [
        CostRow(
            microbatch_size=size,
            forward_ns=1000 * size // each,
            backward_ns=2000 * size // each,
            shards=shards,
            expert=each,
            expert_shards=split if each > 1 else 1,
            activation_bytes=8 * size // shards,
        )
        for shards in (1, 2)
        for each in (1, *sizes)
        for size in (1, 2)
    ]
    blocks = (
        Block(id="attention", operator="attention", parameters=DENSE, costs=tuple(whole)),
        Block(id="moe", operator="moe", parameters=DENSE + SPARSE, expert_parameters=SPARSE, costs=tuple(spread)),
    )
    edge = Edge(source="attention", target="moe", bytes_per_sample=6)
    return Profile(
        name="experts",
        source=Source(method="estimated"),
        recipe=Recipe(name="bf16-mixed"),
        blocks=blocks,
        edges=(edge,),
    )


def placement(expert: int, shards: int = 1, **others: int) -> Placement:
    """One stage on eight devices."""
    stage = PlacedStage(
        blocks=("attention", "moe"),
        devices=tuple(range(8)),
        shards=shards,
        replicas=8 // shards,
        expert=expert,
        **others,
    )
    return Placement(strategy="given", num_devices=8, stages=(stage,))


def workload(placed: Placement, cluster: Cluster | None = LINKS) -> Workload:
    known = profile(2, 4, 8)
    return build_workload(known, placed, num_microbatches=2, microbatch_size=8, cluster=cluster)


def test_only_blocks_with_experts_have_rows_for_them() -> None:
    attention, moe = profile(4).blocks
    assert [row.forward_ns for row in attention.rows(1, 4)] == [100, 200, 100, 200]
    assert [row.forward_ns for row in moe.rows(1, 4)] == [250, 500, 250, 500]
    with pytest.raises(UsageError, match="no costs for expert 8, only for \\[1, 4\\]"):
        build_workload(profile(4), placement(8), num_microbatches=1, microbatch_size=8)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("expert", [2, 4, 8])
def test_a_device_keeps_its_own_experts_and_its_part_of_the_rest(expert: int, shards: int) -> None:
    (stage,) = workload(placement(expert, shards)).stages
    assert stage.state[PARAMETERS] == 2 * (2 * DENSE // shards + SPARSE // expert)
    assert stage.state[GRADIENTS] == 2 * stage.state[PARAMETERS]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("expert", [2, 4, 8])
def test_devices_with_the_same_experts_divide_what_is_kept_of_them(expert: int, shards: int) -> None:
    (stage,) = workload(placement(expert, shards, zero=1)).stages
    assert stage.state[OPTIMIZER] == 2 * stage.state[MASTER] == 8 * (2 * DENSE + SPARSE) // 8
    assert Experts.of(stage) == Experts(expert, Zero(1, 8 // expert) if expert < 8 else Zero())
    (hybrid,) = workload(placement(expert, shards, zero=1, zero_group=4 // shards)).stages
    assert hybrid.state[OPTIMIZER] == 8 * (2 * DENSE // 4 + SPARSE // max(expert, 4))


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize(("expert", "shards"), [(2, 1), (8, 1), (4, 2), (8, 2)])
def test_experts_are_gathered_and_reduced_by_those_that_have_them(level: int, expert: int, shards: int) -> None:
    """After the rest of their block, beside its compute; where one device alone has them nothing of them is."""
    built = workload(placement(expert, shards, zero=level))
    (stage,) = built.stages
    gathers, kept = level == 3, (2 * DENSE + SPARSE) // 8
    assert stage.state[GRADIENTS] == 4 * kept
    assert stage.state[PARAMETERS] == 2 * (kept if gathers else 2 * DENSE // shards + SPARSE // expert)
    groups = {
        "dense": [list(range(shard, 8, shards)) for shard in range(shards)],
        "sparse": [list(range(first, 8, expert)) for first in range(expert)],
    }
    size = {"dense": DENSE // shards, "sparse": SPARSE // expert if expert < 8 else 0}

    def time(name: Literal["all_gather", "reduce_scatter"], part: str, each: int) -> int:
        return round(time_of_groups(LINKS, Exchange(name, each * size[part]), groups[part])) if size[part] else 0

    gather = {part: time("all_gather", part, 2) if gathers else 0 for part in groups}
    reduce = {part: time("reduce_scatter", part, 4) for part in groups}
    both, moe = [sum(each.values()) for each in (gather, reduce)], 1000 * shards // expert
    forward, backward = built.operations
    assert forward.duration_ns == max(100 * shards, gather["dense"]) + max(moe, both[0])
    assert backward.duration_ns == max(200 * shards, gather["dense"] + reduce["dense"]) + max(2 * moe, sum(both))
    updated = time("all_gather", "dense", 4) + time("all_gather", "sparse", 2)
    assert (stage.sync_ns, stage.gather_ns) == (reduce["dense"], gather["dense"] if gathers else updated)
    assert forward.workspace_bytes == 2 * (2 * gathers + 4) * sum(size.values())


@pytest.mark.parametrize("expert", [2, 4, 8])
def test_gradients_are_summed_by_those_that_have_them(expert: int) -> None:
    (stage,) = workload(placement(expert)).stages
    dense = all_reduce_time(LINKS, range(8), 4 * 2 * DENSE)
    own = all_reduce_time(LINKS, range(0, 8, expert), 4 * SPARSE // expert)
    assert stage.sync_ns == dense + own
    assert (own == 0) == (expert == 8)


@slow_but(
    "expert, how",
    [
        *product([2, 4, 8], [{}, {"zero": 1}, {"shards": 2}, {"shards": 2, "zero": 1}, {"zero": 1, "zero_group": 4}]),
        (2, {"zero": 2}),
        (8, {"zero": 3}),
        (4, {"shards": 2, "zero": 3, "zero_group": 2}),
        (4, {"zero": 3, "unshard_every": 1, "reduce_every": 2}),
    ],
    lambda case: case[0] == 4,
    always,
)
def test_plans_are_checked(expert: int, how: dict[str, int]) -> None:
    known = profile(expert)
    plan = pipeplan.search(
        known,
        cluster=LINKS.first(8),
        placement=placement(expert, **how),
        microbatches=2,
        microbatch_size=8,
        time_limit=5,
        deterministic=True,
    ).plan
    assert not check(plan, known, LINKS.first(8)).problems
    damaged = plan.model_copy(update={"stages": tuple(replace(s, sync_ns=s.sync_ns + 1) for s in plan.stages)})
    assert check(damaged, known, LINKS.first(8)).problems
    damaged = plan.model_copy(update={"stages": tuple(s.with_state(s.state + s.state) for s in plan.stages)})
    assert check(damaged, known, LINKS.first(8)).problems
    damaged = plan.model_copy(update={"operations": (replace(plan.operations[0], duration_ns=1), *plan.operations[1:])})
    assert check(damaged, known, LINKS.first(8)).problems
    with pytest.raises(UsageError, match="--profile"):
        relinked(plan, LINKS.first(8))


@pytest.mark.parametrize("how", [{}, {"zero": 1}, {"shards": 2, "zero": 3}])
def test_devices_that_split_the_same_experts_are_of_those_that_share_them(how: dict[str, int]) -> None:
    """Four devices of which two split each: a quarter on each of them, and as many copies as of whole ones."""
    whole, known = profile(4), profile(4, split=2)
    built = [
        build_workload(each, placement(4, **how), num_microbatches=2, microbatch_size=8, cluster=LINKS)
        for each in (whole, known)
    ]
    (whole_stage,), (stage,) = (each.stages for each in built)
    assert (stage.expert, stage.expert_shards) == (4, 2)
    assert stage == replace(whole_stage, expert_shards=2)
    search = partial(
        pipeplan.search, cluster=LINKS.first(8), microbatches=2, microbatch_size=8, time_limit=5, deterministic=True
    )
    plan = search(known, placement=placement(4, **how)).plan
    assert '"expert_shards": 2' in json.dumps(plan.model_dump(mode="json"))
    assert not check(plan, known, LINKS.first(8)).problems
    for damaged in (1, 4):
        other = plan.model_copy(update={"stages": tuple(replace(s, expert_shards=damaged) for s in plan.stages)})
        texts = list(map(str, check(other, known, LINKS.first(8)).problems))
        assert any(f"expert_shards: is {damaged}; rows of the profile with expert 4" in text for text in texts), texts


def test_rows_may_be_of_several_ways_to_split_the_same_experts() -> None:
    """The same as by a profile of each alone; what a placement leaves open is the fewest."""
    with pytest.raises(ValidationError, match="expert_shards 3 does not divide the 4 devices"):
        CostRow(microbatch_size=1, forward_ns=1, backward_ns=1, expert=4, expert_shards=3)
    with pytest.raises(ValidationError, match="expert_shards 3 does not divide the 4 devices"):
        placement(4, expert_shards=3)
    one, two = profile(4), profile(4, split=2)
    longer = tuple(
        row.model_copy(update={"forward_ns": row.forward_ns + 7}) for row in two.blocks[1].costs if row.expert == 4
    )
    blocks = [
        (each.blocks[0], each.blocks[1].model_copy(update={"costs": rows}))
        for each, rows in ((one, one.blocks[1].costs + longer), (two, two.blocks[1].costs[:2] + longer))
    ]
    both, alone = (two.model_copy(update={"blocks": each}) for each in blocks)
    assert both.expert_shards == {1: (1,), 4: (1, 2)}
    how: dict[str, Any] = {"num_microbatches": 2, "microbatch_size": 8, "cluster": LINKS}
    for said, same in ((None, one), (1, one), (2, alone)):
        placed = placement(4) if said is None else placement(4, expert_shards=said)
        assert build_workload(both, placed, **how) == build_workload(same, placed, **how)
    with pytest.raises(UsageError, match=r"expert 4 with expert_shards 4, only with \[1, 2\]; .* --expert 4 --etp 4"):
        build_workload(both, placement(4, expert_shards=4), **how)
    with pytest.raises(ValidationError, match=r"same case .* expert 4, expert_shards 2, recompute"):
        Block(id="twice", operator="moe", parameters=1, expert_parameters=1, costs=(*longer, longer[0]))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"expert": 3}, "expert 3 does not divide the 8 devices"),
        ({"expert": 2, "configurations": ("a", "b")}, "blocks with configurations cannot share experts"),
    ],
)
def test_what_cannot_be_is_refused(how: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        placement(**how)


def test_rows_and_parameters_of_experts_go_together() -> None:
    row = CostRow(microbatch_size=1, forward_ns=1, backward_ns=1, expert=2)
    with pytest.raises(ValidationError, match="has no expert_parameters"):
        Block(id="ffn", operator="ffn", parameters=1, costs=(row,))
    with pytest.raises(ValidationError, match="expert_parameters 2 are more than the 1"):
        Block(id="ffn", operator="ffn", parameters=1, expert_parameters=2, costs=(row,))


@pytest.mark.parametrize("devices", [2, 8, 16, 64])
@pytest.mark.parametrize("chosen", [1, 2, 8])
def test_words_go_once_to_each_node_and_there_once_to_each_device(devices: int, chosen: int) -> None:
    """Against words whose experts are drawn: evenly, independently, each device with as many experts."""
    links = LinkPath(((1, 4e9), (8, 1e9)))
    drawn = np.random.default_rng(0).integers(0, devices, (20_000, chosen))
    inside = np.mean([len(set(row) - {0}) for row in drawn.tolist()])
    across = np.mean([len({device // 8 for device in row} - {0}) for row in drawn.tolist()])
    expected = max(inside / 4, across if devices > 8 else 0)
    assert dispatch_ns(1.0, chosen, devices, links) == pytest.approx(expected, rel=0.03)


def test_neighbours_that_split_the_same_experts_get_each_word_once() -> None:
    """Sixteen devices in nodes of eight, pairs of them with the same experts: eight places, two nodes."""
    links = LinkPath(((1, 4e9), (8, 1e9)), 3)
    inside = 8 * (1 - (7 / 8) ** 2) * 7 / 8
    across = 2 * (1 - (1 / 2) ** 2) * 1 / 2
    assert dispatch_ns(1000.0, 2, 16, links, 2) == pytest.approx(3 + 1e12 * max(inside / 4e9, across / 1e9))
    assert dispatch_ns(1000.0, 2, 16, links, 8) == pytest.approx(3 + 1e12 * across / 1e9), "those apart are in nodes"
    assert dispatch_ns(1000.0, 2, 16, links, 16) == 0, "all have all"


def test_devices_of_a_node_share_its_limit() -> None:
    levels = (
        LinkLevel(name="node", group_size=8, bandwidth_bytes_per_s=10**10, latency_ns=1),
        LinkLevel(
            name="net", group_size=16, bandwidth_bytes_per_s=10**9, latency_ns=7, node_bandwidth_bytes_per_s=2 * 10**9
        ),
    )
    cluster = LINKS.model_copy(update={"levels": levels})
    assert LinkPath.in_cluster(cluster, 16) == LinkPath(((1, 1e10), (8, 0.25e9)), 7)
    assert LinkPath.in_cluster(cluster, 8) == LinkPath(((1, 1e10),), 1)
    alone = LINKS.model_copy(
        update={"levels": tuple(each.model_copy(update={"node_bandwidth_bytes_per_s": None}) for each in levels)}
    )
    assert LinkPath.in_cluster(alone, 16).levels == ((1, 1e10), (8, 1e9 / 8)), "as messages of all devices do"
