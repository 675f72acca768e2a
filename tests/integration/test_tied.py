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
from pipeplan.costs import StageCost, build_workload, stage_costs, state_of
from pipeplan.costs.communication import all_reduce_time
from pipeplan.errors import UsageError
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


WAYS = ("shards2", "samples2", "copies2")


def drawn_ways(seed: int) -> tuple[Profile, Placement]:
    """The same with each block of some stages of two devices split in a way of its own."""
    draw = random.Random(seed)
    profile, placement = drawn(seed)
    stages = tuple(
        stage.model_copy(
            update={"shards": 2, "replicas": 1, "configurations": tuple(draw.choice(WAYS) for _ in stage.blocks)}
        )
        if len(stage.devices) == 2 and draw.random() < 0.7
        else stage
        for stage in placement.stages
    )
    return profile, placement.model_copy(update={"stages": stages})


def planned_ways(profile: Profile, placement: Placement, cluster: Cluster | None = None) -> Plan:
    """Its actions' costs are not the point: the same for every stage with configurations."""
    given = {n: StageCost(100, 200) for n, stage in enumerate(placement.stages) if stage.configurations}
    how = {"num_microbatches": 4, "microbatch_size": 4}
    workload = build_workload(profile, placement, cluster=cluster, given=given, **how)  # type: ignore[arg-type]
    return plan_of(workload, gpipe_orders(workload))


def parts_on(workload: Workload, profile: Profile) -> dict[str, list[set[tuple[str, int]]]]:
    """{table: [device] the parts that it has: how a table is split there, and which part}"""
    found = {each.name: [set[tuple[str, int]]() for _ in workload.devices] for each in profile.tied}
    for each in profile.tied:
        for stage in workload.stages:
            for index, block in enumerate(stage.blocks):
                way = stage.configurations[index] if stage.configurations else f"shards{stage.shards}"
                for place, device in enumerate(stage.devices if block in each.blocks else ()):
                    whole = way in ("samples2", "shards1")
                    found[each.name][device].add(("whole", 0) if whole else (way, place % stage.shards))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_each_device_has_one_copy_of_each_part_whatever_the_configurations(seed: int) -> None:
    """Bytes and sums, by what each device has; check finds the same from the profile."""
    profile, placement = drawn_ways(seed)
    cluster = cluster_of(3, latency_ns=1000)
    plan = planned_ways(profile, placement, cluster)
    workload, ids = plan.workload, [block.id for block in profile.blocks]
    own = {block.id: block.parameter_bytes - TABLE * _tables_of(profile, block.id) for block in profile.blocks}
    parts = parts_on(workload, profile)
    alone = {
        each.name: sum(not set(each.blocks).isdisjoint(s.blocks) for s in workload.stages) < 2 for each in profile.tied
    }
    for device in range(placement.num_devices):
        expected = 0
        for stage in workload.stages if device < 3 else ():
            for index, block in enumerate(stage.blocks if device in stage.devices else ()):
                way = stage.configurations[index] if stage.configurations else f"shards{stage.shards}"
                expected += own[block] // (2 if way == "shards2" else 1)
        expected += sum(TABLE // (2 if way == "shards2" else 1) for those in parts.values() for way, _ in those[device])
        assert workload.states[device][PARAMETERS] == expected
        tables = sum(each.sync_ns for each in plan.tied if device in each.all_devices)
        assert tables == sum(
            _summed(parts[name], device, cluster) for name, here in alone.items() if not here and parts[name][device]
        )
    assert len(ids) == len(own)
    check(plan, profile, cluster).require()


def _tables_of(profile: Profile, block: str) -> int:
    return sum(block in each.blocks for each in profile.tied)


def _summed(parts: Sequence[set[tuple[str, int]]], device: int, cluster: Cluster) -> int:
    """Ns in which a device sums a table that stages share: each of its parts in turn, or the whole once."""
    ways = {way for those in parts for way, _ in those}
    if len(ways) > 1:
        return all_reduce_time(cluster, [n for n, those in enumerate(parts) if those], TABLE)
    size = TABLE // (2 if ways == {"shards2"} else 1)
    return sum(
        all_reduce_time(cluster, [n for n, those in enumerate(parts) if part in those], size) for part in parts[device]
    )


def test_a_device_sums_its_parts_one_after_another() -> None:
    """Where it has the first half in one stage and the second in another, it is in both sums; others in one."""
    profile, cluster = chain([40, 40], (0, 1)), cluster_of(3, latency_ns=1000)
    plan = planned(profile, placed([0, 1], [((0, 1), 2), ((1, 2), 2)], 2), cluster)
    once = all_reduce_time(cluster, [0, 1], TABLE // 2)
    assert [(each.stages, each.devices) for each in plan.tied] == [((0, 1), ((0,), (1,))), ((0, 1), ((1,), (2,)))]
    assert [(each.devices, each.duration_ns) for each in plan.workload.gradient_sums] == [
        ((0, 1), once),
        ((1, 2), once),
    ]
    found = simulate(plan)
    ready = max(found.rates.last_end_ns)  # both are of both stages
    assert found.rates.tail.sums == ((ready, ready + once), (ready + once, ready + 2 * once))
    assert plan.predicted.iteration_ns == found.iteration_ns == ready + 2 * once
    check(plan, profile, cluster).require()


@pytest.mark.parametrize("key", ["parameter_bytes", "gradient_bytes", "optimizer_bytes", "sync_ns"])
def test_check_recomputes_what_stages_with_configurations_keep_and_sum(key: str) -> None:
    profile, cluster = chain([40, 8, 80], (0, 2)), cluster_of(3, latency_ns=1000)
    ways = ("samples2", "copies2")
    first = PlacedStage(blocks=("b0", "b1"), devices=(0, 1), shards=2, configurations=ways)
    last = PlacedStage(blocks=("b2",), devices=(2,))
    plan = planned_ways(profile, Placement(strategy="by hand", num_devices=3, stages=(first, last)), cluster)
    assert plan.stages[0].sync_ns == all_reduce_time(cluster, [0, 1], 40) > 0, "the table is summed over all three"
    assert [each.sync_ns for each in plan.tied] == [all_reduce_time(cluster, [0, 1, 2], TABLE)]
    check(plan, profile, cluster).require()
    content = plan.model_dump(mode="json")
    for number in range(2):
        changed = json.loads(json.dumps(content))
        changed["stages"][number][key] += 4
        found = check(Plan.model_validate_json(json.dumps(changed)), profile, cluster).problems
        assert f"stages[{number}].{key}" in {problem.place for problem in found if problem.rule == "profile"}


def test_sums_inside_a_stage_are_not_left_out_on_another_cluster() -> None:
    """They are not in the plan by themselves, as times of its actions are not."""
    profile = chain([40, 8, 80], (0, 2))
    stage = PlacedStage(blocks=("b0", "b1", "b2"), devices=(0, 1), shards=2, configurations=("samples2",) * 3)
    plan = planned_ways(profile, Placement(strategy="by hand", num_devices=2, stages=(stage,)), cluster_of(2))
    with pytest.raises(UsageError, match=r"leave out --cluster"):
        simulate(plan, cluster=cluster_of(2, latency_ns=5))


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
    assert max(ends) == ends[0] == ends[1], "the first stage's backward is the last"
    last = max(ends[1], ends[3] + plan.stages[3].sync_ns) + plan.stages[0].sync_ns  # device 1 is in all three
    expected = last + table.sync_ns
    assert simulate(plan).iteration_ns == plan.predicted.iteration_ns == expected
    check(plan, profile, cluster).require()


def test_another_cluster_and_profile_change_the_sum() -> None:
    profile, slow = chain([40, 8, 80], (0, 2)), cluster_of(3, latency_ns=5000)
    placement = placed([0, 1, 2], [((0,), 1), ((1,), 1), ((2,), 1)], 3)
    plan = planned(profile, placement)
    assert [each.sync_ns for each in plan.tied] == [0]
    for workload in (relinked(plan, slow), recosted(plan, profile, slow)):
        assert [each.sync_ns for each in workload.tied] == [all_reduce_time(slow, [0, 2], TABLE)]
        (summed,) = workload.gradient_sums
        assert (summed.devices, summed.duration_ns) == ((0, 2), workload.tied[0].sync_ns)


def test_check_wants_what_is_tied() -> None:
    profile, placement = chain([40, 8, 80], (0, 2)), placed([0, 1, 2], [((0,), 1), ((1,), 1), ((0,), 1)], 3)
    plan = planned(profile, placement)
    content = plan.model_dump(mode="json")
    assert parse(to_json(plan), Plan) == plan
    for change, place in [
        ({"tied": []}, "tied"),
        ({"tied": [content["tied"][0] | {"name": "another"}]}, "tied"),
        ({"tied": [content["tied"][0] | {"stages": [0], "devices": [[0]]}]}, "tied"),
        ({"tied": [content["tied"][0] | {"parts": 2}]}, "tied"),
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
        ({"stages": [0, 0]}, "more bytes than stage 0 keeps on device 0"),
        ({"stages": [0]}, "1 stages and devices of 2"),
        ({"stages": [0, 1]}, "device 0, which is none of stage 1"),
        ({"parameter_bytes": 10**6}, "more bytes than stage 0 keeps"),
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
    assert held == sum(state_of(block, profile.recipe).total for block in profile.blocks)
    assert point == held + kept - state_of(profile.tied[0], profile.recipe).total


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
