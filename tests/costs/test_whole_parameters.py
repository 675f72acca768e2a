"""What devices that split a block each have whole of it: counted in bytes by hand, in plans, and by the checker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

import pipeplan
from pipeplan.checker import check
from pipeplan.costs.experts import kept_of
from pipeplan.costs.recipes import running_bytes, whole_state_of
from pipeplan.costs.zero import Zero
from pipeplan.files import Block, Cluster, CostRow, Edge, Plan, Profile, Recipe, Source, to_json
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, MemoryBytes

ROWS = tuple(CostRow(microbatch_size=1, shards=count, forward_ns=100, backward_ns=200) for count in (1, 2, 4))
BLOCK = Block(
    id="b",
    operator="layer",
    parameters=100,
    whole_parameters=20,
    frozen_parameters=12,
    whole_frozen_parameters=4,
    costs=ROWS,
)


def test_a_device_keeps_its_part_and_what_is_whole() -> None:
    """Of 100 trained parameters 20 and a quarter of 80, of 12 frozen ones 4 and a quarter of 8."""
    recipe = Recipe(name="bf16-mixed")
    trained, frozen = 20 + 80 // 4, 4 + 8 // 4
    expected = {PARAMETERS: 2 * (trained + frozen), GRADIENTS: 4 * trained, MASTER: 4 * trained, OPTIMIZER: 8 * trained}
    assert kept_of(BLOCK, recipe, 4) == MemoryBytes(expected)
    halved = expected | {MASTER: 2 * trained, OPTIMIZER: 4 * trained}
    assert kept_of(BLOCK, recipe, 4, Zero(1, 2)) == MemoryBytes(halved)
    assert running_bytes(BLOCK, Recipe(name="bf16-autocast"), 4) == 2 * 4 * (trained + frozen)


def test_bytes_that_are_stated_go_by_counts() -> None:
    """Those of parameters by all that there are, others by those that are trained."""
    sizes = {"parameter_bytes": 1120, "gradient_bytes": 500, "optimizer_bytes": 800}
    assert whole_state_of(BLOCK.model_copy(update=sizes), Recipe()) == MemoryBytes(
        {PARAMETERS: 240, GRADIENTS: 100, OPTIMIZER: 160}
    )


@pytest.mark.parametrize("key", ["parameters", "frozen_parameters"])
def test_no_more_than_there_are(key: str) -> None:
    with pytest.raises(ValidationError, match=f"whole_{key} 101 are more than the {getattr(BLOCK, key)} {key}"):
        Block.model_validate(BLOCK.model_dump() | {f"whole_{key}": 101})


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_plans_have_it_and_are_refused_without(zero: int) -> None:
    """By code of the checker's own."""
    blocks = tuple(BLOCK.model_copy(update={"id": name}) for name in "ab")
    profile = Profile(name="two", source=Source(method="literature"), recipe=Recipe(name="fp32"), blocks=blocks)
    found = pipeplan.search(
        profile, devices=4, pp=1, tp=2, dp=2, zero=zero, mini_batch=4, microbatch_size=2, deterministic=True
    )
    (stage,) = found.plan.stages
    assert stage.state[OPTIMIZER] == 8 * 2 * (20 + 80 // 2) // (2 if zero else 1)
    check(found.plan, profile).require()
    bare = profile.model_copy(
        update={"blocks": tuple(block.model_copy(update={"whole_parameters": 0}) for block in blocks)}
    )
    assert any("optimizer_bytes" in str(each) for each in check(found.plan, bare).problems)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_buckets_have_it_too(zero: int) -> None:
    """Of blocks that are large enough for one each; gradients that replicas divide have them where all overlaps."""
    more = {"parameters": 2 * 10**8, "whole_parameters": 10**7, "frozen_parameters": 0, "whole_frozen_parameters": 0}
    rows = tuple(row.model_copy(update={"forward_ns": 10**9, "backward_ns": 2 * 10**9}) for row in ROWS)
    blocks = tuple(BLOCK.model_copy(update={"id": name, "costs": rows, **more}) for name in "abc")
    profile = Profile(name="three", source=Source(method="literature"), recipe=Recipe(name="bf16-mixed"), blocks=blocks)
    cluster = Cluster.of("eight", 8, levels=[("node", 4, "3us", "100GB"), ("net", 8, "10us", "10GB")])
    cluster = cluster.model_copy(update={"overlap": "all", "contention": 0.4})
    how: dict[str, Any] = {"pp": 1, "tp": 2, "dp": 4, "mini_batch": 4, "microbatch_size": 4, "deterministic": True}
    how |= {"zero": zero, "zero_group": 2} if zero else {"zero": 0}
    plan = pipeplan.search(profile, cluster=cluster, zero_exchange="inside", **how).plan
    (stage,) = plan.stages
    own = 4 * (10**7 + 19 * 10**7 // 2) // (2 if zero == 3 else 1)
    assert [bucket.bytes for bucket in stage.buckets] == [own] * 3
    check(plan, profile, cluster).require()


DIVIDED = tuple(row.model_copy(update={"sequence_parallel": row.shards > 1}) for row in ROWS)


@pytest.mark.parametrize(("zero", "summed", "between"), [(0, 320, 240), (1, 240, 80)])
def test_what_shards_make_parts_of_is_summed_over_them_too(zero: int, summed: int, between: int) -> None:
    """By hand, at a byte per ns, of two blocks with 80 bytes that each of two shards has whole and 160 that are its.

    Two copies of 320 bytes move as many, and four of 160 bytes 240; or groups of two scatter 480 bytes, half of which
    moves, and the halves of 160 are summed by two.
    """
    plain = tuple(
        BLOCK.model_copy(update={"id": name, "frozen_parameters": 0, "whole_frozen_parameters": 0}) for name in "ab"
    )
    divided = tuple(block.model_copy(update={"costs": DIVIDED}) for block in plain)
    cluster = Cluster.of("four", 4, levels=[("node", 4, 0, 10**9)])
    how: dict[str, Any] = {"pp": 1, "tp": 2, "dp": 2, "zero": zero, "mini_batch": 4, "microbatch_size": 2}
    found = []
    for blocks in (plain, divided):
        profile = Profile(name="two", source=Source(method="literature"), recipe=Recipe(name="fp32"), blocks=blocks)
        plan = pipeplan.search(profile, cluster=cluster, deterministic=True, **how).plan
        check(plan, profile, cluster).require()
        found.append(plan)
    alike, apart = (plan.stages[0] for plan in found)
    assert (alike.whole_gradient_bytes, apart.whole_gradient_bytes) == (0, 160)
    assert "whole_gradient_bytes" not in found[0].model_dump()["stages"][0]
    assert alike.sync_ns == (480 if zero == 0 else 240)
    assert apart.sync_ns == summed + between

    wrong = replace(apart, whole_gradient_bytes=80)
    problems = check(found[1].model_copy(update={"stages": (wrong,)}), profile, cluster).problems
    assert any("whole_gradient_bytes" in str(each) for each in problems)
    assert any("sync_ns" in str(each) for each in problems)
    wrong = replace(apart, whole_gradient_bytes=481)
    with pytest.raises(ValidationError, match=r"stages\[0\].whole_gradient_bytes is 481 of 480 gradient_bytes"):
        Plan.model_validate_json(to_json(found[1].model_copy(update={"stages": (wrong,)})))


def test_strategies_sum_it_too() -> None:
    """By hand: of two blocks that two devices split 80 bytes each, half of which goes each way twice."""
    blocks = tuple(BLOCK.model_copy(update={"id": name, "costs": DIVIDED}) for name in "ab")
    edges = (Edge(source="a", target="b", bytes_per_sample=8),)
    source, recipe = Source(method="literature", device="cpu"), Recipe(name="fp32")
    cluster = Cluster.of("two", 2, levels=[("node", 2, 0, 10**9)])
    sums = []
    for own in (blocks, [block.model_copy(update={"costs": ROWS}) for block in blocks]):
        profile = Profile(name="two", source=source, recipe=recipe, blocks=tuple(own), edges=edges)
        found = pipeplan.frontier(profile, cluster=cluster, mini_batch=1)
        split = [set(point.configurations.values()) == {"shards2"} for point in found.points]
        plan = found.plan(split.index(True) + 1)
        check(plan, profile, cluster).require()
        sums.append(plan.stages[0].sync_ns)
    assert sums == [160, 0]
