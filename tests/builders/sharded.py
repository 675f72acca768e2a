"""Stages whose replicas divide gradients and parameters, and exchange them by actions of programs."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from builders.orders import random_orders
from builders.profiles import joined
from pipeplan.costs import build_workload
from pipeplan.files import Block, Cluster, CostRow, DeviceKind, LinkLevel, PlacedStage, Placement, Plan, Profile, Recipe
from pipeplan.files.profile import Source
from pipeplan.planning.build_plan import assemble
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.engine import with_links
from pipeplan.workload.task_graph import Orders, TaskGraph, task_graph


def chain_of(sizes: list[int], *, split: bool = False, step_bytes_per_s: int | None = None) -> Profile:
    """Blocks with so many parameters, each of 100 ns of forward and 200 of backward for a sample."""
    back = {"input_grad_ns": 110, "weight_grad_ns": 90, "weight_grad_bytes": 40} if split else {"backward_ns": 200}
    row = CostRow(microbatch_size=1, forward_ns=100, activation_bytes=100, workspace_bytes=30, **back)
    blocks = [Block(id=f"b{n}", operator="layer", parameters=size, costs=(row,)) for n, size in enumerate(sizes)]
    found = joined(blocks, bytes_per_sample=8).model_copy(update={"recipe": Recipe(name="bf16-mixed")})
    return found.model_copy(update={"step_bytes_per_s": step_bytes_per_s})


def pairs(count: int, contention: float = 0.0) -> Cluster:
    """So many devices, all as near; 1 ns for a byte."""
    level = LinkLevel(name="wire", group_size=count, latency_ns=5, bandwidth_bytes_per_s=10**9)
    kinds = (DeviceKind(name="small", count=count),)
    source = Source(method="estimated")
    return Cluster(name="pairs", source=source, devices=kinds, levels=(level,), contention=contention)


def exchanging(blocks: list[int], every: tuple[int | None, int], devices: tuple[int, ...]) -> PlacedStage:
    """A stage of some blocks whose devices are replicas that gather and reduce as often as this."""
    return PlacedStage(
        blocks=tuple(f"b{n}" for n in blocks),
        devices=devices,
        replicas=len(devices),
        zero=2 if every[0] is None else 3,
        unshard_every=every[0],
        reduce_every=every[1],
    )


def placed(*stages: PlacedStage) -> Placement:
    """These stages."""
    count = 1 + max(device for stage in stages for device in stage.devices)
    return Placement(strategy="by hand", num_devices=count, stages=stages)


def random_sharded(random: Random) -> tuple[Profile, Placement]:
    """A chain in two or three stages, on one or two pairs of devices, each exchanging in a way of its own."""
    number, split = random.randint(2, 3), random.random() < 0.4
    sizes = [random.choice([10, 100, 300]) for _ in range(random.randint(number, 3 * number))]
    profile = chain_of(sizes, split=split)
    cuts = [0, *sorted(random.sample(range(1, len(sizes)), number - 1)), len(sizes)]
    stages = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        devices = random.choice([(0, 1), (2, 3)])
        every = random.choice([None, 1, 2, 3, 100]), random.choice([1, 2, 100])
        stages.append(exchanging([*range(begin, end)], every, devices))
    if not any(stage.devices == (0, 1) for stage in stages):
        stages = [stage.model_copy(update={"devices": (0, 1)}) for stage in stages]
    return profile, placed(*stages)


def assembled(graph: TaskGraph, orders: Orders, profile: Profile) -> Plan:
    """The plan of these orders."""
    bound = weak_iteration_bound(graph.workload)
    return assemble(graph, orders, bound, Fraction(0), "by hand", recipe=profile.recipe)


def sharded_plan() -> Plan:
    """Two stages, gathered for two actions and reduced after two micro-batches; and both for one."""
    profile = chain_of([100] * 5)
    placement = placed(exchanging([0, 1, 2], (2, 2), (0, 1)), exchanging([3, 4], (1, 1), (2, 3)))
    workload = build_workload(profile, placement, num_microbatches=3, microbatch_size=2, cluster=pairs(4))
    graph = task_graph(workload)
    orders = with_links(graph, random_orders(graph, Random(1))[:4])
    return assembled(graph, orders, profile)
