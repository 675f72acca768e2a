"""Blocks whose devices divide the sequence: what a stage holds and what its ends take, in plans and checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeplan
from builders.orders import serial_orders
from builders.plans import plan_of
from pipeplan.checker import check
from pipeplan.costs import build_workload, stage_costs
from pipeplan.costs.communication import all_gather_time
from pipeplan.files import Block, Cluster, CostRow, Edge, LinkLevel, PlacedStage, Placement, Plan, Profile, Source
from pipeplan.files.cluster import DeviceKind
from pipeplan.workload.elements import Dependency
from pipeplan.workload.workload import Workload
from support.marks import some_of

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


# Slices between stages ------------------------------------------------------------------------------------------------

LENGTH = 24  # bytes of a sample, of which 1, 2, 3, 4 and 6 devices have equal parts


def chain(*, whole: tuple[str, ...] = ()) -> Profile:
    """Four blocks in a row; the first one's output goes to the third and to the fourth, too. Some divide nothing."""

    def block(name: str) -> Block:
        rows = [
            CostRow(microbatch_size=size, forward_ns=1000, input_grad_ns=1000, weight_grad_ns=1000, shards=shards,
                    sequence_parallel=shards > 1 and name not in whole)
            for shards in (1, 2, 3, 4, 6)
            for size in (1, 12)
        ]  # fmt: skip
        return Block(id=name, operator="ffn", costs=tuple(rows))

    edges = [Edge(source=a, target=b, tensor=a, bytes_per_sample=LENGTH) for a, b in ("ab", "bc", "cd", "ac", "ad")]
    shift = Edge(source="a", target="d", tensor="shift", bytes_per_sample=7, broadcast=True)
    blocks = tuple(map(block, "abcd"))
    return Profile(name="chain", source=Source(method="estimated"), blocks=blocks, edges=(*edges, shift))


LINKS = CLUSTER.model_copy(
    update={
        "devices": (DeviceKind(name="device", count=12),),
        "levels": (LinkLevel(name="all", group_size=12, bandwidth_bytes_per_s=10**9, latency_ns=50),),
    }
)

Part = tuple[str, tuple[int, ...], int]
"""Blocks of a stage, its devices, how many of them split each block."""


def workload_on(
    parts: list[Part], *, whole: tuple[str, ...] = (), size: int = 12, before: bool = False
) -> tuple[Profile, Workload]:
    """Stages on twelve devices; ``before`` messages were slices."""
    stages = tuple(
        PlacedStage(blocks=tuple(blocks), devices=devices, shards=shards, replicas=len(devices) // shards)
        for blocks, devices, shards in parts
    )
    placement = Placement(strategy="given", num_devices=12, stages=stages)
    found = build_workload(chain(whole=whole), placement, num_microbatches=1, microbatch_size=size,
                           split_backward=True, cluster=LINKS, whole_messages=before)  # fmt: skip
    return chain(whole=whole), found


def planned(workload: Workload) -> Plan:
    return plan_of(workload, serial_orders(workload))


def problems_of(plan: Plan, known: Profile) -> list[str]:
    """Places, but for links that plans of tests do not wait for."""
    found = check(plan, profile=known, cluster=LINKS).problems
    return [f"{each.place} {each.message}" for each in found if each.rule != "links"]


def sent(workload: Workload, source: str, target: str) -> tuple[int, dict[tuple[int, int], int]]:
    """Of how many slices, and {(sender, receiver): bytes}."""
    (found,) = [each for each in workload.dependencies if (each.source, each.target) == (source, target)]
    return found.slices, {(hop.source_device, hop.target_device): hop.bytes for hop in found.hops}


def longer(workload: Workload) -> dict[str, int]:
    """By how much operations are longer than the blocks of their stages."""
    own = {each.id: each.duration_ns - 1000 * len(workload.stages[each.stage].blocks) for each in workload.operations}
    return {id_: more for id_, more in own.items() if more}


def test_equal_shards_send_what_they_hold() -> None:
    """From each device to its counterpart, wherever that is; nothing is gathered."""
    _, found = workload_on([("ab", (0, 1, 2), 3), ("cd", (5, 3, 4), 3)], size=2)
    slices, bytes_of = sent(found, "0F", "1F")
    assert slices == 3
    assert bytes_of == dict.fromkeys([(0, 5), (1, 3), (2, 4)], 2 * 2 * LENGTH // 3 + 7)  # a's and b's output, the shift
    assert sent(found, "1I", "0I") == (3, dict.fromkeys([(5, 0), (3, 1), (4, 2)], 2 * 2 * LENGTH // 3 + 7))
    assert longer(found) == {}


@pytest.mark.parametrize(
    ("first", "second", "forth", "back", "gathered"),
    [
        (2, 4, {(0, 4): 6, (0, 5): 6, (1, 6): 6, (1, 7): 6}, {(4, 0): 12, (6, 1): 12}, {"1I": (2, 12)}),
        (4, 1, {(0, 4): 24}, {(4, 0): 6, (4, 1): 6, (4, 2): 6, (4, 3): 6}, {"0F": (4, 24)}),
        (4, 6, {(0, 4): 4, (0, 5): 4, (1, 6): 4, (2, 7): 4, (2, 8): 4, (3, 9): 4},
         {(4, 0): 6, (5, 1): 6, (7, 2): 6, (8, 3): 6}, {"0F": (2, 12), "1I": (3, 12)}),
    ],
)  # fmt: skip
def test_neighbours_gather_what_makes_up_a_receivers_slice(
    first: int,
    second: int,
    forth: dict[tuple[int, int], int],
    back: dict[tuple[int, int], int],
    gathered: dict[str, tuple[int, int]],
) -> None:
    """Bytes of one tensor of one sample; who gathers how much, with how many."""
    parts = [("abc", tuple(range(first)), first), ("d", tuple(range(4, 4 + second)), second)]
    _, found = workload_on(parts, size=1)
    for ends, of_tensor in ((("0F", "1F"), forth), (("1I", "0I"), back)):
        assert sent(found, *ends)[1] == {pair: 2 * size + 7 for pair, size in of_tensor.items()}
    times = {id_: 2 * all_gather_time(LINKS, range(count), size) for id_, (count, size) in gathered.items()}
    assert longer(found) == times


@pytest.mark.parametrize(
    ("parts", "whole", "slices"),
    [
        ([("ab", (0, 1), 2), ("cd", (1, 0), 2)], (), 1),  # each has the other's slice
        ([("ab", (0, 1), 2), ("cd", (0, 1), 2)], (), 2),
        ([("ab", (0, 1), 2), ("cd", (0, 1, 2, 3), 4)], (), 1),  # the second device has the other half
        ([("ab", (0, 1), 2), ("cd", (0, 2, 1, 3), 4)], (), 4),
        ([("ab", (0, 1), 2), ("cd", (2, 3), 2)], ("c", "d"), 1),
        ([("ab", (0, 1), 2), ("cd", (2, 3), 2)], ("d",), 2),  # a's output is taken whole, b's is not
        ([("ab", (0, 1), 2), ("cd", (2, 3), 2)], ("a", "b"), 2),  # cut from what is whole
    ],
)
def test_all_is_sent_where_slices_would_not_do(parts: list[Part], whole: tuple[str, ...], slices: int) -> None:
    known, found = workload_on(parts, whole=whole)
    assert sent(found, "0F", "1F")[0] == slices
    assert problems_of(planned(found), known) == []


def test_a_tensor_that_some_blocks_take_whole_is_sent_so() -> None:
    known, found = workload_on([("ab", (0, 1), 2), ("cd", (2, 3), 2)], whole=("d",), size=1)
    assert sent(found, "0F", "1F")[1] == dict.fromkeys([(0, 2), (1, 3)], LENGTH + LENGTH // 2 + 7)
    assert longer(found) == {"0F": all_gather_time(LINKS, (0, 1), LENGTH)}
    assert problems_of(planned(found), known) == []


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[Part], tuple[str, ...]]:
    cuts = draw(st.sampled_from([["a", "bcd"], ["ab", "cd"], ["a", "b", "cd"], ["a", "b", "c", "d"]]))
    devices = st.permutations(range(12))
    parts = []
    for blocks in cuts:
        shards, replicas = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (4, 1), (4, 3), (6, 2)]))
        first = draw(st.integers(0, 12 - shards * replicas))
        in_order = draw(st.booleans())
        those = range(12) if in_order else draw(devices)
        parts.append((blocks, tuple(those[first : first + shards * replicas]), shards))
    return parts, draw(st.sampled_from([(), ("b",), ("a", "c"), ("d",)]))


@given(placements())
@settings(max_examples=some_of(30), deadline=None)
def test_the_checker_agrees_and_every_device_is_sent_what_it_keeps(drawn: tuple[list[Part], tuple[str, ...]]) -> None:
    """Whatever the devices; and a plan of before, whose messages are whole, is as valid."""
    parts, whole = drawn
    known, found = workload_on(parts, whole=whole)
    plan = planned(found)
    assert problems_of(plan, known) == []
    for each in plan.dependencies:
        if each.slices > 1 and each.hops:
            assert problems_of(changed(plan, each, slices=1), known), "what it carries is not all"
    _, old = workload_on(parts, whole=whole, before=True)
    assert all(each.slices == 1 for each in old.dependencies)
    assert problems_of(planned(old), known) == []


def changed(plan: Plan, one: Dependency, **changes: Any) -> Plan:
    dependencies = tuple(replace(each, **changes) if each is one else each for each in plan.dependencies)
    return plan.model_copy(update={"dependencies": dependencies})


def test_what_is_damaged_of_slices_is_found() -> None:
    known, found = workload_on([("ab", (0, 1), 2), ("cd", (0, 2, 1, 3), 4)])
    plan = planned(found)
    (one,) = [each for each in plan.dependencies if each.target == "1F" and each.source == "0F"]
    (hop, *rest) = one.hops
    other = replace(hop, source_device=1 - hop.source_device)
    for changes, place in (
        ({"slices": 2}, "slices"),
        ({"slices": 1}, "hops[0].bytes"),
        ({"hops": (replace(hop, bytes=4 * hop.bytes), *rest)}, "hops[0].bytes"),
        ({"hops": (other, *rest)}, "hops[0]"),
    ):
        problems = check(changed(plan, one, **changes), profile=known, cluster=LINKS).problems
        assert any(each.place.endswith(place) for each in problems), changes
    (inside,) = [each for each in plan.dependencies if (each.source, each.target) == ("0F", "0I")]
    assert not check(changed(plan, inside, slices=2)).valid
    turned, _ = [replace(stage, devices=(0, 1, 2, 3)) if stage.shards == 4 else stage for stage in plan.stages][::-1]
    problems = check(plan.model_copy(update={"stages": (plan.stages[0], turned)})).problems
    assert any("has another slice than it takes" in each.message for each in problems)
    everywhole = chain(whole=("c", "d"))
    assert any(each.place.endswith("slices") for each in check(plan, profile=everywhole, cluster=LINKS).problems)
