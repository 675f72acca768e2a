"""Devices that share the sequence of each sample (context parallelism): costs, messages, state, plans and checks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

import pipeplan
from pipeplan.checker import check
from pipeplan.costs import build_workload, stage_costs
from pipeplan.costs.communication import all_reduce_time, transfer_time
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, Edge, LinkLevel, PlacedStage, Placement, Plan, Profile, Source
from pipeplan.files.cluster import DeviceKind
from pipeplan.files.profile import Recipe
from pipeplan.workload.kinds import GRADIENTS, OPTIMIZER, PARAMETERS
from pipeplan.workload.workload import Workload
from support.marks import slow_but

SAMPLE = 6_000
CLUSTER = Cluster(
    name="links",
    source=Source(method="literature"),
    devices=(DeviceKind(name="device", count=16),),
    levels=(LinkLevel(name="all", group_size=16, bandwidth_bytes_per_s=10**9, latency_ns=50),),
)


def profile(*contexts: int, shards: tuple[int, ...] = (1, 2)) -> Profile:
    """Three blocks in a row, each of whose rows takes the less the more devices it is for."""

    def block(name: str) -> Block:
        rows = [
            CostRow(microbatch_size=size, forward_ns=1200 * size // (split * each) + each, backward_ns=2400 * size,
                    activation_bytes=10 * SAMPLE * size // (split * each), shards=split, context=each)
            for each in contexts
            for split in shards
            for size in (1, 4)
        ]  # fmt: skip
        return Block(id=name, operator="ffn", parameters=1000, costs=tuple(rows))

    names = "first", "second", "third"
    edges = [Edge(source=a, target=b, bytes_per_sample=SAMPLE) for a, b in zip(names, names[1:], strict=False)]
    return Profile(
        name="shared sequences",
        source=Source(method="estimated"),
        recipe=Recipe(name="bf16-mixed"),
        blocks=tuple(map(block, names)),
        edges=tuple(edges),
    )


def placement(context: int = 2, replicas: int = 2, shards: int = 1, **others: int) -> Placement:
    """Two stages, each on the next devices."""
    width = shards * context * replicas
    how = {"shards": shards, "context": context, "replicas": replicas, **others}
    stages = [
        PlacedStage(blocks=blocks, devices=tuple(range(first, first + width)), **how)
        for blocks, first in ((("first", "second"), 0), (("third",), width))
    ]
    return Placement(strategy="given", num_devices=2 * width, stages=tuple(stages))


def workload(placed: Placement, known: Profile | None = None, cluster: Cluster | None = CLUSTER) -> Workload:
    return build_workload(known or profile(1, 2), placed, num_microbatches=4, microbatch_size=2, cluster=cluster)


def test_a_stage_costs_what_its_rows_of_that_context_say() -> None:
    whole, parted = (stage_costs(profile(1, 2), ["first", "second"], 2, context=each) for each in (1, 2))
    assert (whole.forward_ns, parted.forward_ns) == (2 * (2400 + 1), 2 * (1200 + 2))
    assert parted.activation_bytes == whole.activation_bytes // 2
    assert parted.state == whole.state  # every device has all parameters


def test_what_is_kept_for_recomputation_is_a_part_of_the_sequence() -> None:
    assert stage_costs(profile(1, 2), ["second"], 4, context=2, recompute=True).activation_bytes == 4 * SAMPLE // 2


def test_a_context_that_was_not_profiled_is_refused() -> None:
    with pytest.raises(UsageError, match="no costs for context 4"):
        stage_costs(profile(1, 2), ["first"], 1, context=4)


def test_messages_carry_a_part_between_devices_with_the_same_part() -> None:
    made = workload(placement(context=2, replicas=2))
    hops = [hop for dependency in made.dependencies for hop in dependency.hops if dependency.source == "0F"]
    assert {(hop.source_device, hop.target_device) for hop in hops} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert {hop.bytes for hop in hops} == {SAMPLE // 2}  # of one sample for each replica, half of it
    assert hops[0].occupancy_ns == transfer_time(CLUSTER, 0, 4, SAMPLE // 2)[1]


def test_replicas_that_come_together_keep_parts_apart() -> None:
    """From two replicas to one: each device takes the same part from both."""
    stages = placement(context=2, replicas=2).stages[0], PlacedStage(blocks=("third",), devices=(4, 5), context=2)
    made = workload(Placement(strategy="given", num_devices=6, stages=stages))
    (forward,) = (each for each in made.dependencies if each.source == "0F" and each.target == "1F")
    assert {(hop.source_device, hop.target_device) for hop in forward.hops} == {(0, 4), (2, 4), (1, 5), (3, 5)}


def test_gradients_are_summed_and_state_divided_over_replicas_and_parts() -> None:
    plain, divided = workload(placement()), workload(placement(zero=1))
    own = plain.stages[0].state
    assert plain.stages[0].sync_ns == all_reduce_time(CLUSTER, (0, 1, 2, 3), own[GRADIENTS])
    found = divided.stages[0].state
    assert found[OPTIMIZER] == own[OPTIMIZER] // 4
    assert found[PARAMETERS] == own[PARAMETERS]
    assert divided.stages[0].sharers == 4
    assert workload(placement(replicas=1)).stages[0].sync_ns > 0


def test_gradients_are_summed_in_buckets_where_only_parts_of_sequences_have_copies() -> None:
    many = profile(1, 2)
    many = many.model_copy(update={"blocks": tuple(b.model_copy(update={"parameters": 10**7}) for b in many.blocks)})
    first, _ = workload(placement(replicas=1), many).stages
    assert [bucket.bytes for bucket in first.buckets] == [4 * 10**7] * 2
    assert not workload(placement(context=1, replicas=1), many).stages[0].buckets


def plan_of(context: int = 2, **others: int) -> tuple[Profile, Plan]:
    known = profile(1, 2, 4)
    placed = placement(context, **others)
    how = {"placement": placed, "devices": placed.num_devices, "mini_batch": 8, "microbatch_size": 2}
    return known, pipeplan.search(known, cluster=CLUSTER, time_limit=1, deterministic=True, **how).plan


@slow_but(
    "how",
    [{"context": 2}, {"context": 4, "replicas": 1, "shards": 2}, {"context": 2, "zero": 2, "shards": 2}],
    lambda how: "zero" not in how,
    ids=str,
)
def test_plans_are_checked_by_other_code_than_made_them(how: dict[str, int]) -> None:
    known, plan = plan_of(**how)
    report = check(plan, profile=known, cluster=CLUSTER)
    assert report.valid, report.problems
    assert {stage.context for stage in plan.stages} == {how["context"]}


def damaged(plan: Plan, number: int, **changes: object) -> Plan:
    stages = [replace(stage, **changes) if n == number else stage for n, stage in enumerate(plan.stages)]
    return plan.model_copy(update={"stages": tuple(stages)})


def test_a_plan_with_another_context_than_its_costs_are_for_is_refused() -> None:
    known, plan = plan_of(2, replicas=2)
    both = damaged(damaged(plan, 0, context=4, replicas=1), 1, context=4, replicas=1)
    assert not check(both, profile=known, cluster=CLUSTER).valid
    unlike = check(damaged(plan, 0, context=4, replicas=1), profile=known, cluster=CLUSTER)
    assert any("all stages must have one context" in str(each) for each in unlike.problems)


def test_a_message_from_another_part_is_refused() -> None:
    known, plan = plan_of(2)
    content = json.loads(plan.model_dump_json())
    (forward,) = (each for each in content["dependencies"] if (each["source"], each["target"]) == ("0F", "1F"))
    forward["hops"][0]["source_device"] = 1
    wrong = Plan.model_validate_json(json.dumps(content))
    report = check(wrong, profile=known, cluster=CLUSTER)
    assert any("a hop is missing" in str(each) for each in report.problems)


def test_files_say_a_context_only_where_there_is_one() -> None:
    """So that files of before keep their fingerprints."""
    for made in (profile(1), placement(1), plan_of(1)[1]):
        assert '"context"' not in made.model_dump_json()
    assert '"context":2' in profile(1, 2).model_dump_json()
    again = Placement.model_validate_json(placement(2).model_dump_json())
    assert again == placement(2)


def test_groups_and_contexts_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValidationError, match="shards 1 x context 2 x replicas 1 must equal the 3 devices"):
        PlacedStage(blocks=("first",), devices=(0, 1, 2), context=2)
    stages = PlacedStage(blocks=("first",), devices=(0, 1), context=2), PlacedStage(blocks=("second",), devices=(2,))
    with pytest.raises(ValidationError, match="all stages must have one context"):
        Placement(strategy="given", num_devices=3, stages=stages)
