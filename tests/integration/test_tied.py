"""Parameters that blocks share: one copy on a device, in costs, plans and checks; sums of what lies on several."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from builders.clusters import cluster_of
from builders.orders import gpipe_orders
from builders.plans import plan_of
from builders.profiles import joined
from pipeplan.checker import check
from pipeplan.costs import build_workload, stage_costs
from pipeplan.costs.communication import all_reduce_time
from pipeplan.examples.models import WIDTH, model
from pipeplan.files import Block, Cluster, CostRow, PlacedStage, Placement, Plan, Profile, TiedParameter, parse, to_json
from pipeplan.planning.frontier import frontier_request, search_frontier
from pipeplan.planning.request import Splitting
from pipeplan.sharding.cost_model import CostOptions, cost_model
from pipeplan.sharding.tracking import track
from pipeplan.simulator.recost import recosted, relinked
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.kinds import PARAMETERS
from pipeplan.workload.workload import Workload

TABLE = 960
"""Bytes of a table, which 1 to 4 shards divide."""


def rows() -> tuple[CostRow, ...]:
    return tuple(
        CostRow(microbatch_size=size, shards=shards, forward_ns=100, backward_ns=200, activation_bytes=10)
        for size in (1, 2, 4)
        for shards in (1, 2)
    )


def chain(own: Sequence[int], *groups: Sequence[int]) -> Profile:
    """Blocks with ``own`` bytes of parameters beside the tables that ``groups`` of them share."""
    sizes = [size + TABLE * sum(index in group for group in groups) for index, size in enumerate(own)]
    blocks = [
        Block(id=f"b{n}", operator="layer", parameter_bytes=size, optimizer_bytes=2 * size, costs=rows())
        for n, size in enumerate(sizes)
    ]
    tied = tuple(
        TiedParameter(
            name=f"table{n}",
            blocks=tuple(f"b{each}" for each in group),
            parameter_bytes=TABLE,
            optimizer_bytes=2 * TABLE,
        )
        for n, group in enumerate(groups)
    )
    return joined(blocks, bytes_per_sample=8).model_copy(update={"tied": tied})


def placed(cuts: Sequence[int], groups: Sequence[tuple[tuple[int, ...], int]], count: int) -> Placement:
    """Stages of blocks from each cut to the next, on groups of devices with their shards."""
    return Placement(
        strategy="by hand",
        num_devices=1 + max(device for devices, _ in groups for device in devices),
        stages=tuple(
            PlacedStage(
                blocks=tuple(f"b{n}" for n in range(begin, end)),
                devices=devices,
                shards=shards,
                replicas=len(devices) // shards,
            )
            for begin, end, (devices, shards) in zip(cuts, (*cuts[1:], count), groups, strict=True)
        ),
    )


def planned(profile: Profile, placement: Placement, cluster: Cluster | None = None) -> Plan:
    workload = build_workload(profile, placement, num_microbatches=4, microbatch_size=4, cluster=cluster)
    return plan_of(workload, gpipe_orders(workload))


def held(workload: Workload, profile: Profile, device: int) -> int:
    """Bytes of parameters on a device, counted parameter by parameter."""
    tables: set[tuple[str, int, int]] = set()
    own = 0
    for stage in workload.stages:
        if device not in stage.devices:
            continue
        for block in profile.blocks:
            if block.id in stage.blocks:
                names = [each.name for each in profile.tied if block.id in each.blocks]
                own += (block.parameter_bytes - TABLE * len(names)) // stage.shards
                tables |= {(name, stage.shards, stage.devices.index(device) % stage.shards) for name in names}
    return own + sum(TABLE // shards for _, shards, _ in tables)


def drawn(seed: int) -> tuple[Profile, Placement]:
    """Blocks that share up to two tables, in stages on a few devices, of which some run several."""
    draw = random.Random(seed)
    count = draw.randint(3, 7)
    groups = [sorted(draw.sample(range(count), draw.randint(2, count))) for _ in range(draw.randint(1, 2))]
    profile = chain([4 * draw.randint(0, 50) for _ in range(count)], *groups)
    cuts = [0, *sorted(draw.sample(range(1, count), draw.randint(1, count - 1)))]
    choices = [((0,), 1), ((1,), 1), ((0, 1), 1), ((1, 0), 1), ((0, 1), 2), ((1, 0), 2), ((1, 2), 1), ((1, 2), 2)]
    return profile, placed(cuts, [draw.choice(choices) for _ in cuts], count)


@pytest.mark.parametrize("seed", range(40))
def test_each_device_has_one_copy_of_each_shard(seed: int) -> None:
    profile, placement = drawn(seed)
    plan = planned(profile, placement, cluster_of(3))
    states = plan.workload.states
    expected = [held(plan.workload, profile, device) for device in range(placement.num_devices)]
    assert [state[PARAMETERS] for state in states] == expected
    assert [state.total for state in states] == [4 * size for size in expected]
    check(plan, profile, cluster_of(3)).require()


def test_a_stage_has_once_what_its_blocks_share() -> None:
    profile = chain([4, 4, 4], (0, 2))
    alone = [stage_costs(profile, [f"b{n}"], 1).state[PARAMETERS] for n in range(3)]
    assert alone == [TABLE + 4, 4, TABLE + 4]
    assert stage_costs(profile, ["b0", "b1", "b2"], 1).state[PARAMETERS] == TABLE + 12
    assert stage_costs(profile, ["b0", "b1", "b2"], 1, 2).state[PARAMETERS] == (TABLE + 12) // 2


def test_gpt2_345m_on_one_device_has_each_parameter_once() -> None:
    profile = model("gpt2-345m")
    ids = [block.id for block in profile.blocks]
    for cuts in ([0], [0, 20], [0, 10, 20]):
        stages = tuple(
            PlacedStage(blocks=tuple(ids[begin:end]), devices=(0,))
            for begin, end in zip(cuts, (*cuts[1:], len(ids)), strict=True)
        )
        placement = Placement(strategy="by hand", num_devices=1, stages=stages)
        workload = build_workload(profile, placement, num_microbatches=1, microbatch_size=1)
        assert workload.states[0][PARAMETERS] == WIDTH * 354_823_168


def test_copies_on_several_devices_are_summed_after_the_last_action() -> None:
    """Over all that have one, replicas included; a device of two stages sums its copy once."""
    profile, cluster = chain([40, 8, 8, 80], (0, 3)), cluster_of(4, latency_ns=1000)
    placement = placed([0, 1, 2, 3], [((0, 1), 1), ((2,), 1), ((2,), 1), ((1, 3), 1)], 4)
    plan = planned(profile, placement, cluster)
    (table,) = plan.tied
    assert (table.name, table.stages) == ("table0", (0, 3))
    assert table.sync_ns == all_reduce_time(cluster, [0, 1, 3], TABLE) > 0
    assert plan.stages[0].sync_ns == all_reduce_time(cluster, [0, 1], 40) > 0
    assert plan.stages[3].sync_ns == all_reduce_time(cluster, [1, 3], 80) > 0
    ends = simulate(plan).rates.last_end_ns
    sums = [0, 0, 0, 0]
    for stage in (plan.stages[0], plan.stages[3]):
        for device in stage.devices:
            sums[device] += stage.sync_ns
    expected = max(end + own + table.sync_ns * (n != 2) for n, (end, own) in enumerate(zip(ends, sums, strict=True)))
    assert simulate(plan).iteration_ns == plan.predicted.iteration_ns == expected
    check(plan, profile, cluster).require()


def test_another_cluster_and_profile_change_the_sum() -> None:
    profile, slow = chain([40, 8, 80], (0, 2)), cluster_of(3, latency_ns=5000)
    placement = placed([0, 1, 2], [((0,), 1), ((1,), 1), ((2,), 1)], 3)
    plan = planned(profile, placement)
    assert [each.sync_ns for each in plan.tied] == [0]
    for workload in (relinked(plan, slow), recosted(plan, profile, slow)):
        assert [each.sync_ns for each in workload.tied] == [all_reduce_time(slow, [0, 2], TABLE)]
        assert workload.sums_ns == (workload.tied[0].sync_ns, 0, workload.tied[0].sync_ns)


def test_check_wants_what_is_tied() -> None:
    profile, placement = chain([40, 8, 80], (0, 2)), placed([0, 1, 2], [((0,), 1), ((1,), 1), ((0,), 1)], 3)
    plan = planned(profile, placement)
    content = plan.model_dump(mode="json")
    assert parse(to_json(plan), Plan) == plan
    for change, place in [
        ({"tied": []}, "tied"),
        ({"tied": [content["tied"][0] | {"name": "another"}]}, "tied"),
        ({"tied": [content["tied"][0] | {"stages": [0]}]}, "tied"),
        ({"tied": [content["tied"][0] | {"parameter_bytes": 8}]}, "tied[0].parameter_bytes"),
        ({"tied": [content["tied"][0] | {"sync_ns": 7}]}, "tied[0].sync_ns"),
    ]:
        report = check(Plan.model_validate_json(json.dumps(content | change)), profile)
        assert place in {problem.place for problem in report.problems if problem.rule == "profile"}, change
    memory = [each for each in check(plan.model_copy(update={"tied": ()})).problems if "memory" in each.place]
    assert memory, "without it the device holds two copies, and more than is stated"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": [0, 7]}, "there are 3 stages"),
        ({"stages": [0, 0]}, "twice"),
        ({"parameter_bytes": 10**6}, "more bytes than the stage keeps"),
    ],
)
def test_a_plan_cannot_share_what_is_not_there(change: dict[str, object], message: str) -> None:
    plan = planned(chain([40, 8, 80], (0, 2)), placed([0, 1, 2], [((0,), 1), ((1,), 1), ((0,), 1)], 3))
    content = plan.model_dump(mode="json")
    content["tied"][0] |= change
    with pytest.raises(ValueError, match=message):
        Plan.model_validate_json(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": ("b0", "b9")}, "not a block"),
        ({"blocks": ("b0", "b0")}, "twice"),
        ({"parameter_bytes": TABLE + 41}, "more than block 'b0' counts"),
        ({"optimizer_bytes": 10**6}, "more than block 'b0' counts"),
    ],
)
def test_a_profile_cannot_tie_what_is_not_there(change: dict[str, object], message: str) -> None:
    profile = chain([40, 8, 80], (0, 2))
    tied = profile.tied[0].model_copy(update=change)
    with pytest.raises(ValueError, match=message):
        Profile.model_validate_json(profile.model_copy(update={"tied": (tied,)}).model_dump_json())


def test_a_frontier_on_one_device_has_one_copy() -> None:
    profile = model("gpt2-345m", microbatch_sizes=[1])
    found = cost_model(profile, None, 1, 1, options=CostOptions(blocks=True))
    held = sum(ways[0].state_bytes for ways in found.configurations.values())
    (point,) = track(found.graph).memory_bytes
    kept = sum(found.kept_bytes(node, found.configurations[node.name][0]) for node in found.operators.nodes)
    assert held == sum(block.state.total for block in profile.blocks)
    assert point == held + kept - profile.tied[0].state.total


@pytest.mark.parametrize(("users", "sure"), [((0, 2, 3), True), ((0, 1, 2, 3), False)])
def test_a_frontier_says_where_it_may_count_more_than_devices_hold(users: tuple[int, ...], sure: bool) -> None:
    """Of four blocks in two ways only one way has one copy."""
    request = frontier_request(
        chain([40, 8, 80, 8], users), devices=[2], mini_batch=2, splitting=Splitting(device="v100-16gb")
    )
    found = search_frontier(request)
    assert found.exact == sure
    assert (found.factor == 1) == sure
    assert any("'table0' may count more than once" in note for note in found.notes) == (not sure)
    held = min(point.memory_bytes for point in found.points)
    assert held == (40 + 8 + 80 + 8 + TABLE) * 4 // 2 + 4 * 10, "halves of all, with the table once"
