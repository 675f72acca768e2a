"""Gradients summed in buckets while a stage's last action still runs: by hand; what plans say of it, their checks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders.orders import gpipe_orders
from builders.plans import plan_of
from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.costs.buckets import BUCKET_BYTES
from pipeplan.errors import FileError
from pipeplan.files import Block, Cluster, CostRow, Edge, PlacedStage, Placement, Plan, Profile, Recipe, Source
from pipeplan.files.profile import TiedParameter
from pipeplan.files.read_write import parse, to_json
from pipeplan.simulator.recost import recosted, relinked
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.elements import Bucket
from pipeplan.workload.tail import tail_of
from pipeplan.workload.workload import Workload

LINKS = Cluster.of("links", 4, levels=[("all", 4, "1us", 10**12)])
HALF = BUCKET_BYTES // 2


def profile_of(sizes: list[int], tied: tuple[TiedParameter, ...] = ()) -> Profile:
    """A chain of blocks of so many parameters, whose backward takes 1, 2, 3, ... ms; half of it weight gradients."""
    blocks = [
        Block(
            id=f"b{n}",
            operator="layer",
            parameters=size,
            costs=tuple(
                CostRow(
                    microbatch_size=samples,
                    forward_ns=10**6,
                    backward_ns=(n + 1) * 10**6,
                    input_grad_ns=(n + 1) * 500_000,
                    weight_grad_ns=(n + 1) * 500_000,
                )
                for samples in (1, 2)
            ),
        )
        for n, size in enumerate(sizes)
    ]
    return Profile(
        name="chain",
        source=Source(method="literature"),
        recipe=Recipe(name="fp32"),
        blocks=tuple(blocks),
        edges=tuple(Edge(source=f"b{n}", target=f"b{n + 1}", bytes_per_sample=1) for n in range(len(sizes) - 1)),
        tied=tied,
    )


def workload_of(profile: Profile, *, split: bool = False, zero: int = 0, cuts: tuple[int, ...] = ()) -> Workload:
    """All blocks on four devices, or in two stages of two replicas each: ``cuts`` says where."""
    ids = tuple(block.id for block in profile.blocks)
    ends = [0, *cuts, len(ids)]
    width = 4 // (len(ends) - 1)
    stages = tuple(
        PlacedStage(blocks=ids[begin:end], devices=tuple(range(n * width, (n + 1) * width)), replicas=width, zero=zero)
        for n, (begin, end) in enumerate(zip(ends, ends[1:], strict=False))
    )
    return build_workload(
        profile,
        Placement(strategy="one-to-one", num_devices=4, stages=stages),
        num_microbatches=2,
        microbatch_size=4,
        split_backward=split,
        cluster=LINKS,
    )


@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_ready_from_the_last_block_to_the_first_in_proportion_to_their_time(split: bool) -> None:
    """Blocks of half a bucket but for the last, of a whole one, and one that is frozen."""
    (stage,) = workload_of(profile_of([HALF // 4, HALF // 4 + 1, 0, HALF // 2]), split=split).stages
    duration = 5 * 10**6 if split else 10 * 10**6
    assert [(each.blocks, each.bytes) for each in stage.buckets] == [(1, 2 * HALF), (3, 2 * HALF + 4)]
    assert [each.ahead_ns for each in stage.buckets] == [duration * 6 // 10, 0]
    assert all(0 < each.sync_ns < stage.sync_ns for each in stage.buckets)


def test_a_stage_of_one_bucket_has_none() -> None:
    assert workload_of(profile_of([5, 5, 5])).stages[0].buckets == ()
    assert workload_of(profile_of([0, HALF])).stages[0].buckets == ()


def test_a_bucket_begins_while_the_last_action_runs() -> None:
    workload = workload_of(profile_of([HALF, HALF, HALF]))
    (stage,) = workload.stages
    ends = [3 * 10**6, 50 * 10**6]
    tail = tail_of(workload, ends)
    late, early = stage.buckets[-1].sync_ns, stage.buckets[0]
    assert tail.sums[0] == (50 * 10**6 - early.ahead_ns, 50 * 10**6 - early.ahead_ns + early.sync_ns)
    assert tail.exposed_reduction_ns == late < tail_of(workload.ways_to_sum[0], ends).exposed_reduction_ns


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("split", [False, True])
def test_plans_in_buckets_are_checked_and_simulated(zero: int, split: bool) -> None:
    """Of two stages of a table that both have, and one stage that has it twice."""
    tied = (TiedParameter(name="table", parameters=HALF // 2, blocks=("b0", "b1", "b3")),)
    profile = profile_of([HALF, HALF, HALF, HALF], tied)
    workload = workload_of(profile, split=split, zero=zero, cuts=(3,))
    assert len(workload.stages[0].buckets) == 3
    plan = plan_of(workload, gpipe_orders(workload))
    assert check(plan, profile, LINKS).problems == ()
    assert simulate(plan).iteration_ns == plan.predicted.iteration_ns
    again = parse(to_json(plan), Plan)
    assert again.stages == plan.stages
    assert recosted(again, profile, LINKS).stages == relinked(again, LINKS).stages == plan.stages
    for key in ("bytes", "ahead_ns", "sync_ns"):
        first = plan.stages[0].buckets[0]
        worse = replace(first, **{key: getattr(first, key) - 1})
        stages = (replace(plan.stages[0], buckets=(worse, *plan.stages[0].buckets[1:])), plan.stages[1])
        found = check(plan.model_copy(update={"stages": stages}), profile, LINKS).problems
        assert any(each.place == f"stages[0].buckets[0].{key}" for each in found)


@pytest.mark.parametrize(
    ("buckets", "problem"),
    [
        ((Bucket(blocks=2, bytes=1), Bucket(blocks=2, bytes=1)), "have 4 blocks together, the stage has 3"),
        ((Bucket(blocks=2, bytes=1), Bucket(blocks=1, bytes=1, ahead_ns=1)), "are ahead by 0, 1 ns"),
        ((Bucket(blocks=2, bytes=1, ahead_ns=10**8), Bucket(blocks=1, bytes=1)), "at most 6000000 ns"),
    ],
)
def test_buckets_that_cannot_be_are_refused(buckets: tuple[Bucket, ...], problem: str) -> None:
    workload = workload_of(profile_of([HALF] * 3))
    plan = plan_of(workload, [[("0F", 0), ("0B", 0), ("0F", 1), ("0B", 1)]] * 4)
    bad = plan.model_copy(update={"stages": (replace(plan.stages[0], buckets=buckets),)})
    with pytest.raises(FileError, match=problem):
        parse(to_json(bad), Plan)
