"""Replicas that divide what training keeps (ZeRO): bytes, exchanges, plans and what searches make of it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from builders.clusters import cluster_of
from builders.orders import gpipe_orders
from builders.plans import plan_of
from builders.profiles import joined
from pipeplan import _api
from pipeplan.checker import check
from pipeplan.cli.main import cli
from pipeplan.costs import build_workload, group_costs, state_of
from pipeplan.costs.recipes import checked_recipe
from pipeplan.costs.zero import WHOLE, Zero, price_of_exchange
from pipeplan.errors import FileError, InfeasibleError, UsageError
from pipeplan.files import (
    Block,
    Cluster,
    CostRow,
    DeviceKind,
    LinkLevel,
    MeasuredCurve,
    PlacedStage,
    Placement,
    Plan,
    Profile,
    Recipe,
    Source,
    TiedParameter,
    parse,
    to_json,
    write_file,
)
from pipeplan.partition.chain.costs import ChainCosts
from pipeplan.partition.problem import PartitionProblem
from pipeplan.planning import candidates
from pipeplan.planning.comparison import compare
from pipeplan.planning.frontier import frontier_request, search_frontier
from pipeplan.planning.request import Request
from pipeplan.planning.steps import STEPS, search_plan, without
from pipeplan.reporting.terminal import zero_words
from pipeplan.simulator.recost import recosted, relinked
from pipeplan.workload.elements import ONCE
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, MemoryBytes
from pipeplan.workload.tail import tail_at
from support.marks import slow_but

pytestmark = pytest.mark.counted

MIXED = Recipe(name="bf16-mixed")
ROWS = tuple(
    CostRow(microbatch_size=size, forward_ns=100 * size, backward_ns=200 * size, activation_bytes=100 * size)
    for size in (1, 2, 4)
)


def profile_of(
    sizes: Sequence[int], recipe: Recipe = MIXED, frozen: int = 0, tied: Sequence[tuple[int, ...]] = ()
) -> Profile:
    """A chain of blocks with so many parameters, of which ``tied`` blocks share 40 each."""
    blocks = [
        Block(id=f"b{n}", operator="layer", parameters=size, frozen_parameters=frozen, costs=ROWS)
        for n, size in enumerate(sizes)
    ]
    shared = tuple(
        TiedParameter(name=f"table{n}", blocks=tuple(f"b{each}" for each in group), parameters=40)
        for n, group in enumerate(tied)
    )
    return joined(blocks, bytes_per_sample=8).model_copy(update={"recipe": recipe, "tied": shared})


def placed(*stages: tuple[Sequence[int], Sequence[int], dict[str, int]], num_routes: int = 1) -> Placement:
    """Stages of blocks, on devices of which each is a replica, with what else they say."""
    return Placement(
        strategy="by hand",
        num_routes=num_routes,
        num_devices=1 + max(device for _, devices, _ in stages for device in devices),
        stages=tuple(
            PlacedStage(blocks=tuple(f"b{n}" for n in blocks), devices=tuple(devices), replicas=len(devices), **keys)
            for blocks, devices, keys in stages
        ),
    )


def planned(profile: Profile, placement: Placement, cluster: Cluster | None = None) -> Plan:
    workload = build_workload(profile, placement, num_microbatches=2, microbatch_size=4, cluster=cluster)
    return plan_of(workload, gpipe_orders(workload)).model_copy(update={"recipe": profile.recipe})


NODES = Cluster(
    name="two nodes of two",
    source=Source(method="estimated"),
    devices=(DeviceKind(name="small", count=4),),
    levels=(
        LinkLevel(name="inside", group_size=2, latency_ns=5, bandwidth_bytes_per_s=10**9),
        LinkLevel(name="between", group_size=4, latency_ns=50, bandwidth_bytes_per_s=10**8),
    ),
)


@pytest.mark.parametrize(
    ("recipe", "whole", "divided"),
    [
        (MIXED, {PARAMETERS: 202 + 18, GRADIENTS: 404}, {MASTER: 404, OPTIMIZER: 808}),
        (Recipe(name="fp32"), {PARAMETERS: 404 + 36, GRADIENTS: 404}, {OPTIMIZER: 808}),
        # the float32 parameters that are cast at each use are all that is kept of them, and every replica needs them
        (Recipe(name="bf16-autocast"), {PARAMETERS: 36, GRADIENTS: 404, MASTER: 404}, {OPTIMIZER: 808}),
        (checked_recipe("bf16", optimizer="momentum"), {PARAMETERS: 202 + 18, GRADIENTS: 202}, {OPTIMIZER: 202}),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_level_1_divides_master_copies_and_the_optimizers_state(
    recipe: Recipe, whole: dict[Any, int], divided: dict[Any, int]
) -> None:
    """101 trained parameters and 9 frozen ones on four replicas; parts are rounded up."""
    profile = profile_of([101], recipe, frozen=9)
    for keys, parts in (({}, 1), ({"zero": 1}, 4), ({"zero": 1, "zero_group": 2}, 2)):
        plan = planned(profile, placed(([0], range(4), keys)), cluster_of(4))
        expected = MemoryBytes({**whole, **{kind: -(-size // parts) for kind, size in divided.items()}})
        assert plan.stages[0].state == expected
        check(plan, profile, cluster_of(4)).require()


@pytest.mark.parametrize(
    ("recipe", "two", "three", "beside"),
    [
        (MIXED, {PARAMETERS: 220, GRADIENTS: 101}, {PARAMETERS: 55, GRADIENTS: 101}, (808, 808 + 440)),
        (Recipe(name="fp32"), {PARAMETERS: 440, GRADIENTS: 101}, {PARAMETERS: 110, GRADIENTS: 101}, (808, 808 + 880)),
        # of the copy that is cast at each use, which is workspace by itself, there is one more: the one gathered ahead
        (
            Recipe(name="bf16-autocast"),
            {PARAMETERS: 36, GRADIENTS: 101, MASTER: 404},
            {PARAMETERS: 9, GRADIENTS: 101, MASTER: 101},
            (220 + 808, 220 + 808 + 220),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_levels_2_and_3_divide_gradients_and_parameters(
    recipe: Recipe, two: dict[Any, int], three: dict[Any, int], beside: tuple[int, int]
) -> None:
    """101 trained parameters and 9 frozen ones; what is exchanged is whole, for two blocks."""
    profile = profile_of([101], recipe, frozen=9)
    for level, expected, workspace in zip((2, 3), (two, three), beside, strict=True):
        plan = planned(profile, placed(([0], range(4), {"zero": level})), cluster_of(4))
        state = dict(plan.stages[0].state.items())
        assert {kind: state[kind] for kind in expected} == expected
        assert state[OPTIMIZER] == 202
        assert {each.workspace_bytes for each in plan.operations} == {workspace}
        check(plan, profile, cluster_of(4)).require()


def replayed(blocks: Sequence[tuple[int, int, int, int]], num_microbatches: int) -> int:
    """Ns of (gather, forward, backward, reduction) of blocks on one device with a network, event by event.

    A block's copy is gathered while the one before it runs, its gradient reduced while the one after it does: the
    network has what is needed sooner first, and there is room for two copies and two gradients.
    """
    steps = [(gather, forward, 0) for gather, forward, _, _ in blocks]
    steps += [(gather, backward, reduce) for gather, _, backward, reduce in reversed(blocks)]
    steps *= num_microbatches
    computed, network, gathered, reduced = 0, steps[0][0], steps[0][0], [0] * (len(steps) + 2)
    for number, (_, compute, _reduce) in enumerate(steps):
        start = max(computed, gathered, reduced[number])
        for kind in ("gather", "reduce") if number + 1 < len(steps) else ("reduce",):
            network = max(network, start) + (steps[number + 1][0] if kind == "gather" else steps[number - 1][2])
            if kind == "gather":
                gathered = network
            else:
                reduced[number + 1] = network
        computed = start + compute
    return max(network, computed) + steps[-1][2]


def timed(sizes: Sequence[int], speed: int, num_microbatches: int) -> tuple[int, int]:
    """What a stage of blocks takes in an iteration by level 3 on four replicas, and by events."""
    profile, cluster = profile_of(sizes), cluster_of(4, latency_ns=0, bandwidth=10**9 * speed)
    placement = placed((range(len(sizes)), range(4), {"zero": 3}))
    workload = build_workload(profile, placement, num_microbatches=num_microbatches, microbatch_size=4, cluster=cluster)
    (stage,), forward = workload.stages, {4: 100}[workload.microbatch_size]
    exchanges = [(3 * -(-2 * size // (4 * speed)), 3 * -(-4 * size // (4 * speed))) for size in sizes]
    told = stage.gather_ns + num_microbatches * sum(each.duration_ns for each in workload.operations) + stage.sync_ns
    return told, replayed([(gather, forward, 2 * forward, reduce) for gather, reduce in exchanges], num_microbatches)


def test_exchanges_hide_behind_the_compute_of_neighbours() -> None:
    """Where compute is longer only the first gather and the last reduction show, whatever the blocks' sizes."""
    draw = random.Random(1)
    for _ in range(20):
        sizes = [4 * draw.randint(0, 5) for _ in range(draw.randint(1, 6))]
        told, happened = timed(sizes, 1, draw.randint(1, 4))
        assert told == happened


@pytest.mark.parametrize("seed", range(12))
def test_check_agrees_on_levels_2_and_3_in_any_plan(seed: int) -> None:
    """Groups, routes, recomputed blocks, split backwards, forwards in parts, shards, recipes, contention, nodes."""
    draw = random.Random(seed)
    shards = draw.choice([1, 2])
    rows = tuple(
        row.model_copy(update={"shards": count, "input_grad_ns": 90 * row.microbatch_size, "weight_grad_ns": 80})
        for row in ROWS
        for count in (1, 2)
    )
    recipe = Recipe(name=draw.choice(["fp32", "bf16-mixed", "bf16-autocast", "bf16"]))
    profile = profile_of([draw.randint(0, 300) for _ in range(4)], recipe, frozen=draw.choice([0, 11]))
    costed = tuple(block.model_copy(update={"costs": rows}) for block in profile.blocks)
    profile = profile.model_copy(update={"blocks": costed})
    keys = {"zero": draw.choice([2, 3])} | ({"zero_group": 2} if draw.random() < 0.5 else {})
    routes = draw.choice([1, 2])
    parted = draw.choice([0, 1]) if routes == 1 else 0
    stages = tuple(
        PlacedStage(
            blocks=("b0", "b1") if part == 0 else ("b2", "b3"),
            devices=tuple(range(4 * shards * (part ^ route), 4 * shards * (1 + (part ^ route)))),
            shards=shards,
            replicas=4,
            route=route,
            num_parted=parted,
            recompute=draw.choice([False, True, (True, False)]),
            **keys,
        )
        for route in range(routes)
        for part in (0, 1)
    )
    placement = Placement(strategy="by hand", num_devices=8 * shards, num_routes=routes, stages=stages)
    cluster = cluster_of(8 * shards).model_copy(update={"contention": draw.choice([0.0, 0.3])})
    if seed % 2:
        (outer,), size = cluster.levels, 2 * shards if seed % 4 == 1 else 4 * shards
        inner = LinkLevel(name="inside", group_size=size, latency_ns=1, bandwidth_bytes_per_s=3 * 10**9)
        cluster = cluster.model_copy(update={"levels": (inner, outer)})
    workload = build_workload(
        profile,
        placement,
        num_microbatches=2,
        microbatch_size=8,
        cluster=cluster,
        split_backward=draw.random() < 0.5,
    )
    plan = plan_of(workload, gpipe_orders(workload)).model_copy(update={"recipe": recipe})
    check(parse(to_json(plan), Plan), profile, cluster).require()


@pytest.mark.parametrize("size", [40, 80, 160, 400, 4000])
def test_exchanges_of_alike_blocks_take_what_they_take_event_by_event(size: int) -> None:
    """Also where the network is the longer; by no more than what turns from forward to backward and back."""
    for blocks in (1, 2, 8):
        for num_microbatches in (1, 3):
            told, happened = timed([size] * blocks, 1, num_microbatches)
            gather, reduce = 3 * size // 2, 3 * size
            assert abs(told - happened) <= (1 + num_microbatches) * (gather + reduce)
            assert abs(told - happened) <= 0.5 * happened if blocks == 8 else True


def test_what_several_blocks_have_cannot_be_exchanged_block_by_block() -> None:
    profile = profile_of([100, 100], tied=[(0, 1)])
    for level in (2, 3):
        with pytest.raises(UsageError, match=f"zero {level} exchanges state block by block, .*'b0' and 'b1' share"):
            planned(profile, placed(([0, 1], range(4), {"zero": level})))
    plan = planned(profile, placed(([0, 1], range(4), {"zero": 1})))
    stages = (replace(plan.stages[0], zero=2),)
    report = check(plan.model_copy(update={"stages": stages}), profile)
    assert any("'table0'" in str(each) and each.place == "stages[0].zero" for each in report.problems)
    with pytest.raises(ValueError, match="blocks with configurations cannot"):
        PlacedStage(blocks=("b0",), devices=(0, 1), replicas=2, zero=2, configurations=("shards1",))


def test_what_is_exchanged_is_the_two_halves_of_an_all_reduce() -> None:
    """Rings: 3 steps of a quarter each. Gradients are float32; gathered is the bf16 copy of what is trained."""
    profile = profile_of([100], frozen=10)
    stage = planned(profile, placed(([0], range(4), {"zero": 1})), cluster_of(4)).stages[0]
    assert (stage.sync_ns, stage.gather_ns) == (3 * (7 + 100), 3 * (7 + 50))
    whole = planned(profile, placed(([0], range(4), {})), cluster_of(4)).stages[0]
    assert (whole.sync_ns, whole.gather_ns) == (6 * (7 + 100), 0)


def test_groups_scatter_inside_and_sum_parts_between() -> None:
    profile = profile_of([100])
    plan = planned(profile, placed(([0], range(4), {"zero": 1, "zero_group": 2})), NODES)
    inside, between = 5 + 200, 2 * (50 + 2 * 1000)  # two parts of 200 bytes leave each node, half of each per step
    assert (plan.stages[0].sync_ns, plan.stages[0].gather_ns) == (inside + between, 5 + 100)
    check(plan, profile, NODES).require()


def test_what_is_frozen_is_neither_summed_nor_gathered() -> None:
    stage = planned(profile_of([0], frozen=100), placed(([0], range(4), {"zero": 1})), cluster_of(4)).stages[0]
    assert (stage.sync_ns, stage.gather_ns) == (0, 0)


CUSTOM = Recipe()


def test_blocks_that_state_bytes_gather_all_their_parameters() -> None:
    blocks = [Block(id="b0", operator="layer", parameter_bytes=200, optimizer_bytes=900, costs=ROWS)]
    profile = joined(blocks)
    plan = planned(profile, placed(([0], range(4), {"zero": 1})), cluster_of(4))
    assert plan.stages[0].state == MemoryBytes({PARAMETERS: 200, GRADIENTS: 200, OPTIMIZER: 225})
    assert plan.stages[0].gather_ns == 3 * (7 + 50)
    check(plan, profile, cluster_of(4)).require()


@pytest.mark.parametrize("level", [2, 3])
def test_groups_scatter_with_each_microbatch_and_sum_parts_once(level: int) -> None:
    """Two blocks, of which the first is left over: its reduction, and by level 3 its gather; then parts of both."""
    profile = profile_of([100, 300])
    plan = planned(profile, placed(([0, 1], range(4), {"zero": level, "zero_group": 2})), NODES)
    between, gathered = 2 * (50 + 2 * 4000), {2: 5 + 400, 3: 5 + 100}[level]
    assert (plan.stages[0].sync_ns, plan.stages[0].gather_ns) == (5 + 200 + between, gathered)
    forward, backward = {2: (200, 205 + 605), 3: (105 + 305, 310 + 910)}[level]
    assert [each.duration_ns for each in plan.operations] == [forward, backward]
    check(plan, profile, NODES).require()
    for changes in ({"duration_ns": forward + 1}, {"workspace_bytes": 1}):
        operations = (replace(plan.operations[0], **changes), *plan.operations[1:])
        problems = check(plan.model_copy(update={"operations": operations}), profile, NODES).problems
        assert any(each.place == f"operations[0F].{next(iter(changes))}" for each in problems)


def test_compute_is_slower_beside_the_network_by_the_clusters_contention() -> None:
    """A block gathers for 111 ns beside 100, reduces for 201 beside 100, and both beside 200."""
    whole, placement = profile_of([60]), placed(([0], range(4), {"zero": 3}))
    rows = tuple(row.model_copy(update={"input_grad_ns": 100, "weight_grad_ns": 100}) for row in ROWS[:1])
    split = whole.model_copy(update={"blocks": (whole.blocks[0].model_copy(update={"costs": rows}),)})
    for slower, forward, *backward in ((0.0, 111, 312, 111, 201), (0.5, 156, 356, 156, 201), (1.0, 211, 512, 211, 301)):
        cluster = cluster_of(4).model_copy(update={"contention": slower})
        assert parse(to_json(cluster), Cluster) == cluster
        assert ("contention" in to_json(cluster)) == bool(slower)
        for profile, expected in ((whole, [forward, backward[0]]), (split, [forward, *backward[1:]])):
            workload = build_workload(
                profile,
                placement,
                num_microbatches=2,
                microbatch_size=4,
                cluster=cluster,
                split_backward=profile is split,
            )
            assert [each.duration_ns for each in workload.operations] == expected
            assert (workload.stages[0].gather_ns, workload.stages[0].sync_ns) == (111, 201)
            plan = plan_of(workload, gpipe_orders(workload)).model_copy(update={"recipe": MIXED})
            check(plan, profile, cluster).require()


def test_slower_links_are_less_in_the_way_of_compute() -> None:
    """Gathers of 65 ns inside nodes take half of that, of 960 over a node's one link, ten times slower, a twentieth."""
    row = CostRow(microbatch_size=4, forward_ns=5000, backward_ns=9000, activation_bytes=100)
    profile, cluster = profile_of([60]), NODES.model_copy(update={"contention": 0.5})
    profile = profile.model_copy(update={"blocks": (profile.blocks[0].model_copy(update={"costs": (row,)}),)})
    for group, expected in ((2, 5000 + 32), (4, 5000 + 48)):
        placement = placed(([0], range(4), {"zero": 3, "zero_group": group}))
        workload = build_workload(profile, placement, num_microbatches=1, microbatch_size=16, cluster=cluster)
        assert workload.operations[0].duration_ns == expected
        plan = plan_of(workload, gpipe_orders(workload)).model_copy(update={"recipe": MIXED})
        check(plan, profile, cluster).require()
        assert [device.contention for device in plan.devices] == [0.05] * 4  # sums are over all four
        assert recosted(plan, profile, cluster) == plan.workload


@pytest.mark.parametrize("level", [0, 1])
def test_sums_of_a_stage_slow_the_others_of_its_devices(level: int) -> None:
    """Those of the last stage run beside the backward of the first, of which half of that time is made up behind it."""
    profile, found = profile_of([0, 60]), list[Plan]()
    placement = placed(([0], range(4), {"zero": level}), ([1], range(4), {"zero": level}))
    for slower in (0.0, 0.5):
        cluster = cluster_of(4).model_copy(update={"contention": slower})
        plan = planned(profile, placement, cluster)
        check(plan, profile, cluster).require()
        assert recosted(plan, profile, cluster) == plan.workload
        assert [device.contention for device in plan.devices] == [slower] * 4
        found.append(plan)
    whole, slowed = (tail_at(plan.workload, plan.starts_ns, None) for plan in found)
    ((begin, end),), acted = whole.sums, whole.acted_ns[0]
    assert begin < acted
    assert slowed.summed_ns == (acted + round(0.5 * (min(end, acted) - begin)),) * 4
    assert max(slowed.summed_ns) > max(end, acted)
    assert any("contention" in problem.place for problem in check(found[1], profile, cluster_of(4)).problems)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("gradient_bytes", 150, "profile"),
        ("parameter_bytes", 75, "profile"),
        ("master_bytes", 99, "profile"),
        ("sync_ns", 1, "profile"),
        ("gather_ns", 1, "profile"),
        ("zero", 2, "profile"),
    ],
)
def test_check_computes_all_of_level_3_anew(key: str, value: int, rule: str) -> None:
    profile, cluster = profile_of([101, 50]), cluster_of(4)
    plan = planned(profile, placed(([0, 1], range(4), {"zero": 3})), cluster)
    changed = replace(plan.stages[0], **{key: value})
    report = check(plan.model_copy(update={"stages": (changed,)}), profile, cluster)
    assert {problem.rule for problem in report.problems} >= {rule}


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("optimizer_bytes", 801, "profile"),
        ("master_bytes", 99, "profile"),
        ("sync_ns", 1, "profile"),
        ("gather_ns", 1, "profile"),
        ("zero", 0, "profile"),
        ("zero_group", 2, "profile"),
    ],
)
def test_check_computes_it_all_anew(key: str, value: int, rule: str) -> None:
    profile, cluster = profile_of([101, 50]), cluster_of(4)
    plan = planned(profile, placed(([0, 1], range(4), {"zero": 1})), cluster)
    changed = replace(plan.stages[0], **{key: value})
    report = check(plan.model_copy(update={"stages": (changed,)}), profile, cluster)
    assert {problem.rule for problem in report.problems} >= {rule}


def test_routes_divide_alike_and_sum_parts_over_each_other() -> None:
    """Each block is on two routes, of two replicas each: parts of a group are summed with the other route's."""
    profile = profile_of([100, 100])
    both = [([0], (0, 1), 0), ([1], (2, 3), 0), ([0], (2, 3), 1), ([1], (0, 1), 1)]
    stages = ((blocks, devices, {"zero": 1, "route": route}) for blocks, devices, route in both)
    placement = placed(*stages, num_routes=2)
    plan = planned(profile, placement, NODES)
    assert plan.stages[0].sync_ns == (5 + 200) + 2 * (50 + 2 * 1000)
    check(plan, profile, NODES).require()
    unlike = placement.stages[2].model_copy(update={"zero": 0})
    changed = (*placement.stages[:2], unlike, placement.stages[3])
    with pytest.raises(UsageError, match=r"stages\[0\] and stages\[2\] .* divide state unlike"):
        planned(profile, placement.model_copy(update={"stages": changed}))
    stage = replace(plan.stages[2], zero=0)
    report = check(plan.model_copy(update={"stages": (*plan.stages[:2], stage, plan.stages[3])}))
    assert any(problem.place == "stages[2].zero" for problem in report.problems)


@pytest.mark.parametrize("seed", range(12))
def test_a_device_has_its_part_of_what_is_tied_once(seed: int) -> None:
    """Of stages that divide alike on the same devices a table counts once; of unlike ones each counts its own part."""
    draw = random.Random(seed)
    profile = profile_of([draw.randint(50, 90) for _ in range(4)], tied=[(0, 2), (1, 3)][: draw.randint(1, 2)])
    keys = [draw.choice([{}, {"zero": 1}, {"zero": 1, "zero_group": 2}]) for _ in range(2)]
    devices = [draw.choice([range(4), range(4), range(4, 8)]) for _ in range(2)]
    placement = placed(([0, 1], range(4), keys[0]), ([2, 3], devices[1], keys[1]))
    plan = planned(profile, placement, cluster_of(8))
    check(plan, profile, cluster_of(8)).require()
    kept, table = profile.recipe, [state_of(each, profile.recipe) for each in profile.tied]
    expected = MemoryBytes()
    for stage in plan.stages:
        parts = Zero.of(stage).group
        for block in profile.blocks:
            if 0 in stage.devices and block.id in stage.blocks:
                expected += state_of(block, kept).share({MASTER: parts, OPTIMIZER: parts})
    if 0 in plan.stages[1].devices:
        alike = keys[0] == keys[1]
        parts = Zero.of(plan.stages[0]).group
        for state in table:
            shared = {PARAMETERS, GRADIENTS} | ({MASTER, OPTIMIZER} if alike else set())
            once = state // {MASTER: parts, OPTIMIZER: parts}
            expected -= MemoryBytes((kind, size) for kind, size in once.items() if kind in shared)
    assert plan.workload.states[0] == expected


def test_partitions_price_every_number_of_replicas_by_its_own_part() -> None:
    profile = profile_of([100, 60, 80], tied=[(0, 2)])
    problem = PartitionProblem.of(
        profile, 4, 4, zero=lambda count: WHOLE if count == 1 else Zero(1, count) if count % 2 == 0 else None
    )
    assert {way.replicas for way in problem.ways} == {1, 2, 4}
    chain = problem.chain(problem.order)
    for row, pricing in enumerate(problem.rows):
        for begin, end in ((0, 1), (0, 2), (1, 3), (0, 3)):
            (cost,) = group_costs(profile, [problem.order[begin:end]], pricing.samples, zero=pricing.zero)
            assert chain.stage(begin, end, row).state == cost.state
            assert chain.statics(np.array([begin]), np.array([end]))[row] == [cost.static_bytes]
    assert ChainCosts.of(pricing.costs(profile, problem.order)).statics(0, 3) == cost.static_bytes


def test_files_leave_out_what_is_not_divided() -> None:
    profile = profile_of([100])
    whole, divided = (planned(profile, placed(([0], range(4), keys))) for keys in ({}, {"zero": 1, "zero_group": 2}))
    assert "zero" not in to_json(whole)
    assert parse(to_json(divided), Plan) == divided
    assert "zero" not in to_json(whole.placed)
    assert parse(to_json(divided.placed), Placement) == divided.placed
    assert divided.placed.stages[0].zero_group == 2
    text = to_json(divided).replace('"zero_group": 2', '"zero_group": 3')
    with pytest.raises(FileError, match="zero_group 3 does not divide the 4 replicas"):
        parse(text, Plan)
    with pytest.raises(ValueError, match="zero 0 divides nothing"):
        placed(([0], range(4), {"zero_group": 2}))


def test_other_costs_keep_the_level() -> None:
    profile = profile_of([100])
    plan = planned(profile, placed(([0], range(4), {"zero": 1})), cluster_of(4))
    slower = cluster_of(4, bandwidth=10**8)
    expected = planned(profile, placed(([0], range(4), {"zero": 1})), slower).stages
    assert relinked(plan, slower).stages == expected
    assert recosted(plan, profile, slower).stages == expected


def test_times_of_actions_with_exchanges_need_the_profile() -> None:
    profile = profile_of([100])
    plan = planned(profile, placed(([0], range(4), {"zero": 3})), cluster_of(4))
    slower = cluster_of(4, bandwidth=10**8)
    with pytest.raises(UsageError, match=r"stages\[0\] of the plan has zero 3, .* give --profile as well"):
        relinked(plan, slower)
    expected = planned(profile, placed(([0], range(4), {"zero": 3})), slower)
    again = recosted(plan, profile, slower)
    assert (again.stages, again.operations) == (expected.stages, expected.operations)
    assert expected.operations != plan.operations
    made_on = plan.provenance.model_copy(update={"cluster_sha256": 64 * "0"})
    check(plan.model_copy(update={"provenance": made_on}), profile).require()


# Searches ---------------------------------------------------------------------------------------------------------


LARGE = profile_of([1000, 1000])
"""A replica of all of it keeps 36,000 bytes, 12,000 of them parameters and gradients."""


def asked(profile: Profile = LARGE, **words: Any) -> Request:
    fixed: dict[str, Any] = {
        "devices": 4,
        "mini_batch": 8,
        "time_limit": 2.0,
        "deterministic": True,
        "recompute": False,
    }
    return Request.of(profile, **fixed | words)


EIGHT = profile_of([1000] * 8)
"""By level 1 a replica of all of it keeps 72,000 bytes, by level 2 48,000, by level 3 36,000."""


@slow_but("memory, level", [(80_000, 1), (60_000, 2), (52_000, 3)], lambda case: case[1] > 1)
def test_search_divides_as_much_as_it_must(memory: int, level: int) -> None:
    """Beside state there are a micro-batch's 800 bytes; gradients of two blocks, 8,000; copies of two, 4,000.

    Exchanges with each micro-batch take longer than compute, so that the least that fits is the quickest, or 2 for 1.
    """
    words = {"memory_bytes": memory, "replicas": 4, "cluster": cluster_of(4)}
    least = search_plan(asked(EIGHT, **words, zero=level)).plan.predicted.iteration_ns
    for zero in (None, "auto"):
        found = search_plan(asked(EIGHT, **words, zero=zero))
        assert {stage.zero for stage in found.plan.stages} <= {level, 2}
        assert found.plan.predicted.iteration_ns <= least
        assert max(each.peak_bytes for each in found.plan.predicted.memory) <= memory
    if level > 1:
        with pytest.raises(InfeasibleError, match="--zero auto"):
            search_plan(asked(EIGHT, memory_bytes=memory, replicas=4, zero=level - 1))
        tied = EIGHT.model_copy(update={"tied": profile_of([1, 1], tied=[(0, 1)]).tied})
        with pytest.raises(InfeasibleError):
            search_plan(asked(tied, memory_bytes=memory, replicas=4, zero="auto"))


@pytest.mark.slow
def test_searches_choose_how_often_actions_exchange() -> None:
    """Where exchanges take longer than compute, once an iteration; where that does not fit, inside of actions."""
    cluster = cluster_of(4)
    whole = search_plan(asked(EIGHT, replicas=4, zero=3, cluster=cluster)).plan
    assert {(stage.unshard_every, stage.reduce_every) for stage in whole.stages} == {(ONCE, ONCE)}
    assert any("UNSHARD" in text for text in whole.programs[0])
    tight = search_plan(asked(EIGHT, replicas=4, zero=3, cluster=cluster, memory_bytes=52_000)).plan
    assert {stage.reduce_every for stage in tight.stages} == {None}
    assert whole.predicted.iteration_ns < tight.predicted.iteration_ns
    stages = tuple(stage.model_copy(update={"unshard_every": 2, "reduce_every": 1}) for stage in whole.placed.stages)
    placement = whole.placed.model_copy(update={"stages": stages})
    words: dict[str, Any] = {"devices": None, "placement": placement, "microbatch_size": 4, "cluster": cluster}
    given = search_plan(asked(EIGHT, **words)).plan
    assert {(stage.unshard_every, stage.reduce_every) for stage in given.stages} == {(2, 1)}
    again = search_plan(
        asked(EIGHT, devices=None, placement=placement, microbatch_size=4, cluster=cluster, zero=1)
    ).plan
    assert {(stage.zero, stage.unshard_every) for stage in again.stages} == {(1, None)}


def test_the_best_plans_of_large_requests_exchange_by_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that fits and is quicker, with the orders there are; all else is exchanged inside of actions."""
    monkeypatch.setattr(candidates, "LARGE", 1)
    cluster, steps = cluster_of(4), without(["exchanges by actions"])
    inside, found, tight = (
        search_plan(
            asked(EIGHT, replicas=4, zero=3, cluster=cluster, memory_bytes=memory, time_limit=0.5), steps=those
        ).plan
        for those, memory in ((steps, None), (STEPS, None), (STEPS, 52_000))
    )
    assert {stage.reduce_every for stage in (*inside.stages, *tight.stages)} == {None}
    assert {(stage.unshard_every, stage.reduce_every) for stage in found.stages} == {(ONCE, ONCE)}
    assert any("UNSHARD" in text for text in found.programs[0])
    assert found.predicted.iteration_ns < inside.predicted.iteration_ns
    check(found, EIGHT, cluster).require()


@pytest.mark.slow
def test_auto_divides_less_and_in_smaller_groups_where_that_is_quicker() -> None:
    """One of two stages needs level 3; and neighbours in a node exchange more quickly than all do."""
    profile = profile_of([4000, 200, 200])
    placement = placed(([0], range(4), {}), ([1, 2], range(4, 8), {}))
    wide = Cluster(
        name="pairs",
        source=Source(method="estimated"),
        devices=(DeviceKind(name="small", count=8),),
        levels=(NODES.levels[0], NODES.levels[1].model_copy(update={"group_size": 8})),
    )
    words: dict[str, Any] = {"placement": placement, "devices": None, "microbatch_size": 4, "cluster": wide}
    words["time_limit"] = 0.5
    whole = search_plan(asked(profile, **words, zero=3, memory_bytes=70_000)).plan
    found = search_plan(asked(profile, **words, zero="auto", memory_bytes=70_000)).plan
    assert {stage.zero for stage in whole.stages} == {3}
    assert found.predicted.iteration_ns <= whole.predicted.iteration_ns
    assert found.stages[1].zero < 3
    room = search_plan(asked(profile, **words, zero="auto", memory_bytes=66_000, zero_group=4)).plan
    assert {stage.sharers for stage in room.stages} <= {1, 4}


def test_search_divides_where_nothing_else_fits() -> None:
    """Four replicas of everything: 36,000 bytes each, by level 1 12,000 and a quarter of 24,000.

    Without links level 1 comes first, as it sends no more than sums do.
    """
    room = asked(memory_bytes=40_000, replicas=4)
    assert {stage.zero for stage in search_plan(room).plan.stages} == {1}
    tight = search_plan(asked(memory_bytes=20_000, replicas=4))
    assert [(stage.zero, stage.zero_group) for stage in tight.plan.stages] == [(1, None)]
    assert max(each.peak_bytes for each in tight.plan.predicted.memory) <= 20_000
    assert "zero" not in tight.plan.provenance.options
    with pytest.raises(InfeasibleError, match="--zero auto"):
        search_plan(asked(memory_bytes=20_000, replicas=4, zero=0))
    with pytest.raises(InfeasibleError):
        search_plan(asked(memory_bytes=11_000, replicas=4))


def test_a_given_placement_is_divided_where_it_does_not_fit() -> None:
    placement = placed(([0, 1], range(4), {}))
    found = search_plan(asked(memory_bytes=20_000, devices=None, placement=placement, microbatch_size=4)).plan
    assert [stage.zero for stage in found.stages] == [1]
    found = search_plan(asked(devices=None, placement=placement, microbatch_size=4, zero=1, zero_group=2)).plan
    assert [(stage.zero, stage.zero_group) for stage in found.stages] == [(1, 2)]


def test_search_chooses_replicas_that_fit_divided() -> None:
    """Nothing but replicas on all devices has no bubbles; they fit only where they divide."""
    words = {"memory_bytes": 20_000, "cluster": cluster_of(4, latency_ns=1, bandwidth=10**12)}
    whole, divided = (search_plan(asked(**words, zero=level)).plan for level in (0, "auto"))
    assert search_plan(asked(**words)).plan.predicted.iteration_ns == divided.predicted.iteration_ns, "all are open"
    assert divided.predicted.iteration_ns < whole.predicted.iteration_ns
    assert {stage.zero for stage in divided.stages if stage.replicas > 1} == {1}
    grouped = search_plan(asked(**words, zero=1, zero_group=2)).plan
    assert {stage.sharers for stage in grouped.stages if stage.replicas > 1} == {2}


@pytest.mark.slow
@pytest.mark.long
def test_auto_keeps_state_whole_where_measured_links_make_that_quicker() -> None:
    slow = [
        MeasuredCurve(operation="reduce_scatter", level="wire", num_devices=count, points=((1, 10**6),))
        for count in (2, 4)
    ]
    cluster = cluster_of(4).model_copy(update={"measured": tuple(slow)})
    roomy, tight = (
        search_plan(asked(memory_bytes=memory, replicas=4, zero="auto", cluster=cluster)).plan
        for memory in (40_000, 20_000)
    )
    assert [{stage.zero for stage in plan.stages} for plan in (roomy, tight)] == [{0}, {1}]
    assert roomy.predicted.iteration_ns < tight.predicted.iteration_ns - 900_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"zero_group": 2}, "give --zero auto, too"),
        ({"zero": 3, "profile": profile_of([9, 9], tied=[(0, 1)])}, "'b0' and 'b1' share 'table0', .*; give --zero 1"),
        ({"zero": 1, "replicas": 1}, "leave --replicas out"),
        ({"zero": "auto", "devices": 1}, "--devices 1 leaves no room for replicas"),
        ({"zero": 1, "replicas": 4, "zero_group": 3}, "does not divide the 4 replicas; choose one of 1, 2, 4"),
        ({"zero": 1, "zero_group": 8}, "is more replicas than --devices 4"),
    ],
)
def test_what_cannot_be_divided_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asked(**words)


def test_a_placement_without_replicas_has_nothing_to_divide() -> None:
    placement = placed(([0], [0], {}), ([1], [1], {}))
    with pytest.raises(UsageError, match="no stage of the placement has replicas"):
        asked(devices=None, placement=placement, zero=1)


def test_reports_say_the_level_and_what_it_would_bring(tmp_path: Any) -> None:
    write_file(LARGE, str(tmp_path / "profile.json"))
    words = ["--devices", "4", "--mini-batch", "8", "--replicas", "4", "--deterministic", "--time-limit", "1s"]
    words += ["--memory", "50KB"]

    def said(*more: str) -> str:
        answer = CliRunner().invoke(cli, ["search", str(tmp_path / "profile.json"), *words, *more])
        assert answer.exit_code == 0, answer.output
        return " ".join(answer.output.split())

    assert "ZeRO 1 over 4 replicas" in said("--zero", "auto"), "as quick without links as 2 and 3 seem"
    assert "ZeRO 1 over 2 replicas" in said("--zero", "1", "--zero-group", "2")
    assert "ZeRO 1 over 4 replicas" in said()
    assert "ZeRO" not in said("--zero", "0")
    figures = json.loads(CliRunner().invoke(cli, ["search", str(tmp_path / "profile.json"), *words, "--json"]).stdout)
    assert figures["zero"] == 1
    chosen = said("--tp", "1", "--pp", "1", "--memory", "30KB")
    assert "ZeRO 1 over 4 replicas" in chosen, "in a table of layouts, too"
    assert "is not built yet" not in chosen, "run trains with master copies"
    assert "--zero 0" not in chosen, "run trains with sharded state"
    figures = search_plan(asked(replicas=4, zero=1)).figures()
    assert figures["zero"] == 1


def test_lacksof_levels() -> None:
    stages = planned(LARGE, placed(([0], range(4), {"zero": 1}), ([1], [4, 5], {"zero": 1}))).stages
    assert zero_words(stages) == "ZeRO 1 over 2-4 replicas"
    assert zero_words([replace(stages[0], zero=0)]) == ""


TO_THE_END: dict[str, Any] = {"time_limit": 0.1, "deterministic": True}  # no plan depends on how busy the machine is


@pytest.mark.slow
def test_frontiers_of_plans_divide_too() -> None:
    words = {"devices": [4], "mini_batch": 4, "cluster": cluster_of(4, bandwidth=10**12)} | TO_THE_END
    whole, divided = (search_frontier(frontier_request(LARGE, **words, zero=zero)) for zero in (None, "auto"))
    least = [min(point.memory_bytes for point in each.points) for each in (whole, divided)]
    assert least[1] <= least[0]
    assert any(stage.zero == 1 for number in range(1, 1 + len(divided.points)) for stage in divided.plan(number).stages)
    with pytest.raises(UsageError, match="add --plans, or leave it out"):
        frontier_request(LARGE, devices=[4], zero=1, splitting=_api.Splitting())


@pytest.mark.slow
@pytest.mark.slow
def test_frontiers_of_plans_choose_the_level() -> None:
    """Where links are quick, replicas that divide gradients, too, take no more time and less memory."""
    words = {
        "devices": [2],
        "mini_batch": 8,
        "cluster": cluster_of(2, latency_ns=1, bandwidth=10**13),
        **TO_THE_END,
    }
    found = search_frontier(frontier_request(profile_of([1000] * 4), **words, zero="auto"))
    plans = [found.plan(number) for number in range(1, 1 + len(found.points))]
    assert {stage.zero for plan in plans for stage in plan.stages} & {2, 3}


@pytest.mark.filterwarnings("ignore:--zero 1 divides nothing:UserWarning")
def test_compare_divides_what_it_times() -> None:
    """Also where what was found has no replicas; and in classic schedules on the same stages."""
    cluster = cluster_of(4, latency_ns=1, bandwidth=10**12)
    for words in (
        {"memory_bytes": 80_000, "replicas": 4, "zero": "auto", "placement": "one-to-one"},
        {"zero": 1, "placement": "circular"},
    ):
        found = compare(asked(profile_of([1000] * 8), cluster=cluster, **words | {"time_limit": 1.0}))
        assert len(found.rows) > 1
        assert all(row.fits for row in found.rows)


def test_exchanges_of_groups_use_the_links_at_once() -> None:
    """Two groups of two, each across both nodes: both leave a node at the same time, on one link."""
    stage = planned(profile_of([100]), placed(([0], (0, 2, 1, 3), {"zero": 1, "zero_group": 2}))).stages[0]
    assert price_of_exchange(NODES, stage, [])(400, 0, 200) == (50 + 2 * 2000 + 2 * (5 + 100), 50 + 2 * 1000)
