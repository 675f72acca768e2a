"""Stages whose replicas divide gradients and parameters, and exchange them by actions of programs."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from builders.orders import random_orders
from builders.profiles import joined
from pipeplan.costs import build_workload
from pipeplan.costs.late_inputs import with_late_inputs
from pipeplan.files import Block, Cluster, CostRow, DeviceKind, LinkLevel, PlacedStage, Placement, Plan, Profile, Recipe
from pipeplan.files.profile import Source
from pipeplan.planning.build_plan import assemble
from pipeplan.schedule.search import plain_look
from pipeplan.search_constants import MOST_REPEATED
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.engine import with_links
from pipeplan.workload.steady_state.loop import shortened
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph

Pairs = list[tuple[int, int]]
Pair = tuple[int | None, int]


def chain_of(
    sizes: list[int],
    *,
    split: bool = False,
    step_bytes_per_s: int | None = None,
    edges: Pairs | None = None,
    unit_ns: int = 100,
    experts: int = 0,
) -> Profile:
    """Blocks with so many parameters, each of a unit of forward and 2 of backward for a sample.

    Of these parameters so many are of ``experts``, which two devices may share. A chain, or joined by ``edges`` between
    their numbers, whose messages occupy no link.
    """
    back = {"backward_ns": 2 * unit_ns}
    if split:
        parts = 11 * unit_ns // 10, 9 * unit_ns // 10
        back = {"input_grad_ns": parts[0], "weight_grad_ns": parts[1], "weight_grad_bytes": 40}
    row = CostRow(microbatch_size=1, forward_ns=unit_ns, activation_bytes=100, workspace_bytes=30, **back)
    rows = (row, row.model_copy(update={"expert": 2}))[: 1 + (experts > 0)]
    blocks = [
        Block(id=f"b{n}", operator="layer", parameters=size, expert_parameters=experts, costs=rows)
        for n, size in enumerate(sizes)
    ]
    found = joined(blocks, edges, bytes_per_sample=8, transfer_ns=None if edges is None else 21).model_copy(
        update={"recipe": Recipe(name="bf16-mixed")}
    )
    return found.model_copy(update={"step_bytes_per_s": step_bytes_per_s})


def pairs(count: int, contention: float = 0.0) -> Cluster:
    """So many devices, all as near; 1 ns for a byte."""
    level = LinkLevel(name="wire", group_size=count, latency_ns=5, bandwidth_bytes_per_s=10**9)
    kinds = (DeviceKind(name="small", count=count),)
    source = Source(method="estimated")
    return Cluster(name="pairs", source=source, devices=kinds, levels=(level,), contention=contention)


def exchanging(blocks: list[int], every: Pair, devices: tuple[int, ...], expert: int = 1) -> PlacedStage:
    """A stage of some blocks whose devices are replicas that gather and reduce as often as this."""
    return PlacedStage(
        blocks=tuple(f"b{n}" for n in blocks),
        devices=devices,
        replicas=len(devices),
        expert=expert,
        zero=2 if every[0] is None else 3,
        unshard_every=every[0],
        reduce_every=every[1],
    )


def placed(*stages: PlacedStage) -> Placement:
    """These stages."""
    count = 1 + max(device for stage in stages for device in stage.devices)
    return Placement(strategy="by hand", num_devices=count, stages=stages)


def random_sharded(random: Random, *, late: bool = False) -> tuple[Profile, Placement]:
    """A chain in two or three stages, on one or two pairs of devices, each exchanging in a way of its own.

    Where inputs are to come ``late`` each block takes what one or two blocks before it make, not always the last.
    """
    number, split = random.randint(2, 3), random.random() < 0.4
    sizes = [random.choice([10, 100, 300]) for _ in range(random.randint(number + late, (3 + late) * number))]
    taken = [(random.randrange(block), block) for block in range(1, len(sizes)) for _ in range(2)] if late else None
    profile = chain_of(sizes, split=split, edges=None if taken is None else sorted(set(taken)))
    cuts = [0, *sorted(random.sample(range(1, len(sizes)), number - 1)), len(sizes)]
    stages = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        devices = random.choice([(0, 1), (2, 3)]) if not late or begin else (0, 1)
        devices = (2, 3) if late and end == len(sizes) else devices
        every = random.choice([None, 1, 2, 3, 100]), random.choice([1, 2, 100])
        stages.append(exchanging([*range(begin, end)], every, devices))
    if not any(stage.devices == (0, 1) for stage in stages):
        stages = [stage.model_copy(update={"devices": (0, 1)}) for stage in stages]
    return profile, placed(*stages)


def assembled(graph: TaskGraph, orders: Orders, profile: Profile, *, looped: bool = False) -> Plan:
    """The plan of these orders, which repeat where it is ``looped``: it says one of its rounds, and how often."""
    bound = weak_iteration_bound(graph.workload)
    run = shortened(graph, orders, earliest_starts(graph, orders), MOST_REPEATED) if looped else None
    assert (run is not None) == looped
    if run is not None:
        graph, orders = run.graph, run.orders
    loop = None if run is None else run.loop
    return assemble(graph, orders, bound, Fraction(0), "by hand", loop=loop, recipe=profile.recipe)


def random_plan(seed: int, contention: float = 0.0, *, late: bool = False) -> tuple[Plan, Profile]:
    """A plan of some random stages, and orders that cannot block each other; actions may wait inside for ``late``."""
    draw = Random(seed)
    profile, placement = random_sharded(draw, late=late)
    split = profile.blocks[0].costs[0].input_grad_ns is not None
    workload = build_workload(
        profile,
        placement,
        num_microbatches=draw.randint(1, 5),
        microbatch_size=2,
        split_backward=split,
        cluster=pairs(placement.num_devices, contention),
    )
    if late:
        workload = with_late_inputs(profile, workload, pairs(placement.num_devices, contention))
        if not workload.has_parts:
            return random_plan(seed + 1000, contention, late=True)
    graph = task_graph(workload)
    orders = with_links(graph, random_orders(graph, draw)[: len(workload.devices)])
    return assembled(graph, orders, profile), profile


def plan_on(profile: Profile, placement: Placement, *, late: bool = False, seed: int = 1) -> Plan:
    """Three micro-batches, in an order that cannot block, of a sample for each replica; ``late`` inputs or not."""
    cluster, size = pairs(placement.num_devices), placement.stages[0].replicas
    workload = build_workload(profile, placement, num_microbatches=3, microbatch_size=size, cluster=cluster)
    graph = task_graph(with_late_inputs(profile, workload, cluster) if late else workload)
    assert graph.workload.has_parts == late
    orders = with_links(graph, random_orders(graph, Random(seed))[: placement.num_devices])
    return assembled(graph, orders, profile)


def long_plan(every: Pair, last_every: Pair, *, split: bool = False, late: bool = False, unit_ns: int = 100) -> Plan:
    """240 micro-batches of two stages, three with ``late`` inputs, that exchange so often: one round is written."""
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)] if late else None
    profile = chain_of([100, 100, 50, 20], split=split, edges=edges, unit_ns=unit_ns)
    apart = [exchanging([0], every, (4, 5)), exchanging([1], every, (0, 1))]
    ends = apart if late else [exchanging([0, 1], every, (0, 1))]
    placement, cluster = placed(*ends, exchanging([2, 3], last_every, (2, 3))), pairs(6 if late else 4)
    workload = build_workload(
        profile, placement, num_microbatches=240, microbatch_size=2, split_backward=split, cluster=cluster
    )
    found = plain_look(with_late_inputs(profile, workload, cluster) if late else workload, 1000)
    assert found is not None
    plan = assemble(found.graph, found.orders, 1, Fraction(0), "1f1b", loop=found.loop, recipe=profile.recipe)
    assert plan.loop is not None
    return plan


def sharded_plan() -> Plan:
    """Two stages, gathered for two actions and reduced after two micro-batches; and both for one."""
    profile = chain_of([100] * 5)
    placement = placed(exchanging([0, 1, 2], (2, 2), (0, 1)), exchanging([3, 4], (1, 1), (2, 3)))
    workload = build_workload(profile, placement, num_microbatches=3, microbatch_size=2, cluster=pairs(4))
    graph = task_graph(workload)
    orders = with_links(graph, random_orders(graph, Random(1))[:4])
    return assembled(graph, orders, profile)
