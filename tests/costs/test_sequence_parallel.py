"""Blocks whose devices divide the sequence: what a stage holds and what its ends take, in plans and checks."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipeplan
from pipeplan.checker import check
from pipeplan.costs import build_workload, stage_costs
from pipeplan.costs.communication import all_gather_time
from pipeplan.files import Block, Cluster, CostRow, Edge, LinkLevel, PlacedStage, Placement, Profile, Source
from pipeplan.files.cluster import DeviceKind

SAMPLE = 6_000
STAGES = (
    PlacedStage(blocks=("first", "second"), devices=(0, 1), shards=2),
    PlacedStage(blocks=("third",), devices=(2,)),
)


def profile(*, divided: bool = True) -> Profile:
    """Three blocks, whose tensor ``x`` the second and the third take, split over 1 or 2 devices."""

    def block(name: str) -> Block:
        rows = [
            CostRow(microbatch_size=size, forward_ns=100 * size, input_grad_ns=100 * size, weight_grad_ns=100 * size,
                    activation_bytes=10 * SAMPLE * size // shards, shards=shards,
                    sequence_parallel=divided and shards > 1)
            for shards in (1, 2)
            for size in (1, 4)
        ]  # fmt: skip
        return Block(id=name, operator="ffn", costs=tuple(rows))

    edges = [Edge(source="first", target=target, tensor="x", bytes_per_sample=SAMPLE) for target in ("second", "third")]
    return Profile(
        name="divided",
        source=Source(method="estimated"),
        blocks=tuple(map(block, ("first", "second", "third"))),
        edges=(*edges, Edge(source="second", target="third", bytes_per_sample=SAMPLE)),
        placement=Placement(strategy="given", num_devices=3, stages=STAGES),
    )


CLUSTER = Cluster(
    name="links",
    source=Source(method="literature"),
    devices=(DeviceKind(name="device", count=3),),
    levels=(LinkLevel(name="all", group_size=3, bandwidth_bytes_per_s=10**9, latency_ns=50),),
)


def test_rows_between_sizes_are_divided_too() -> None:
    row = stage_costs(profile(), ["first"], 2, 2)
    assert row.activation_bytes == 10 * SAMPLE


@pytest.mark.parametrize("divided", [True, False])
def test_what_is_kept_for_recomputation_is_a_slice(divided: bool) -> None:
    cost = stage_costs(profile(divided=divided), ["second"], 4, 2, recompute=True)
    assert cost.activation_bytes == 4 * SAMPLE // (2 if divided else 1)


def test_a_tensor_of_two_blocks_is_held_once_as_a_slice() -> None:
    """The first block's output is taken by the second and the third."""
    both = stage_costs(profile(), ["second", "third"], 1, 2)
    assert both.activation_bytes == 2 * (10 * SAMPLE // 2) - SAMPLE // 2


def test_what_leaves_is_gathered_and_so_are_gradients_of_what_comes() -> None:
    """Both tensors that leave the first stage in F; the third block runs whole, and nothing enters the first stage."""
    given = {"num_microbatches": 2, "microbatch_size": 2, "split_backward": True, "cluster": CLUSTER}
    placement = profile().placement
    assert placement is not None
    whole, divided = (
        {each.id: each.duration_ns for each in build_workload(profile(divided=d), placement, **given).operations}  # type: ignore[arg-type]  # of several types
        for d in (False, True)
    )
    gather = all_gather_time(CLUSTER, (0, 1), 2 * SAMPLE)
    assert gather > 0
    assert {key: divided[key] - whole[key] for key in whole if divided[key] != whole[key]} == {"0F": 2 * gather}
    stages = (
        PlacedStage(blocks=("first",), devices=(2,)),
        PlacedStage(blocks=("second", "third"), devices=(0, 1), shards=2),
    )
    turned = Placement(strategy="given", num_devices=3, stages=stages)
    whole, divided = (
        {each.id: each.duration_ns for each in build_workload(profile(divided=d), turned, **given).operations}  # type: ignore[arg-type]  # of several types
        for d in (False, True)
    )
    assert {key: divided[key] - whole[key] for key in whole if divided[key] != whole[key]} == {"1I": gather}


@pytest.mark.parametrize("recompute", [False, True])
def test_the_checker_finds_the_same_and_what_was_changed(recompute: bool) -> None:
    known = profile()
    plan = pipeplan.search(known, cluster=CLUSTER, microbatches=4, microbatch_size=2, scheduler="1f1b",
                           recompute="all" if recompute else "none").plan  # fmt: skip
    assert plan.stages[0].shards == 2
    assert check(plan, profile=known, cluster=CLUSTER).valid
    assert check(plan, profile=known).valid, "without the cluster its gathers are not known"
    changed = tuple(
        replace(each, duration_ns=each.duration_ns - 1) if each.id == "0F" else each for each in plan.operations
    )
    found = check(plan.model_copy(update={"operations": changed}), profile=known, cluster=CLUSTER)
    assert "operations[0F].duration_ns" in {problem.place for problem in found.problems}
    other = check(plan, profile=profile(divided=False), cluster=CLUSTER)
    assert "operations[0F].duration_ns" in {problem.place for problem in other.problems}


def test_one_device_divides_nothing() -> None:
    with pytest.raises(ValueError, match="sequence_parallel is of several shards, and shards is 1"):
        CostRow(microbatch_size=1, forward_ns=1, backward_ns=1, sequence_parallel=True)
    assert "sequence_parallel" not in CostRow(microbatch_size=1, forward_ns=1, backward_ns=1).model_dump_json()
