"""Plans whose devices are alike, in programs that several devices play and with one for each device."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from builders.orders import random_orders
from builders.sharded import assembled
from pipeplan.costs import build_workload, stages
from pipeplan.files import Block, Cluster, CostRow, DeviceKind, LinkLevel, PlacedStage, Placement, Plan, Profile, Recipe
from pipeplan.files.folded import folded_workload
from pipeplan.files.profile import Edge, Source, TiedParameter
from pipeplan.schedule.search import first_look
from pipeplan.workload.engine import with_links
from pipeplan.workload.task_graph import Orders, TaskGraph, task_graph
from pipeplan.workload.workload import Workload

Pair = tuple[Plan, Plan, Profile, Cluster]
"""Folded, and of devices; what they are made from."""


def alike_profile(draw: Random, *, tied: bool, shared: bool = False) -> Profile:
    """A chain of blocks that one or two devices may split; the first and the last may share a table.

    Where they are ``shared`` two devices may have parts of each sequence, and two have experts.
    """
    split = draw.random() < 0.5
    back = {"backward_ns": 200}
    if split:
        back = {"input_grad_ns": 110, "weight_grad_ns": 90, "weight_grad_bytes": 40}
    blocks = [
        Block(
            id=f"b{number}",
            operator="layer",
            parameters=draw.choice([10, 100, 300]),
            expert_parameters=6 * shared,
            costs=tuple(
                CostRow(
                    microbatch_size=size,
                    shards=shards,
                    context=context,
                    expert=expert,
                    forward_ns=draw.randint(50, 150) * size,
                    activation_bytes=100 * size,
                    workspace_bytes=30,
                    **back,
                )
                for shards in (1, 2)
                for context, expert in ((1, 1), (2, 1), (1, 2), (2, 2))[: 4 if shared else 1]
                for size in (1, 8)
            ),
        )
        for number in range(8)
    ]
    edges = tuple(
        Edge(source=one.id, target=other.id, bytes_per_sample=draw.choice([8, 150]))
        for one, other in zip(blocks, blocks[1:], strict=False)
    )
    table = (TiedParameter(name="table", blocks=("b0", "b7"), parameters=6),) if tied else ()
    source = Source(method="estimated")
    return Profile(
        name="alike",
        source=source,
        blocks=tuple(blocks),
        edges=edges,
        tied=table,
        recipe=Recipe(name="bf16-mixed"),
        step_bytes_per_s=10**9,
    )


def alike_placement(draw: Random, *, same: bool, shared: bool = False) -> Placement:
    """Stages on one to three positions, some twice; all split alike, or only with a number of replicas in common.

    Where they are ``shared`` pairs of devices may have parts of each sequence, or experts, or both.
    """
    positions, chunks, common = draw.choice([2, 3]), draw.choice([1, 2]), draw.choice([2, 4])
    shapes = [(draw.choice([1, 2]), common * draw.choice([1, 2])) for _ in range(positions)]
    shapes = shapes[:1] * positions if same else shapes
    groups, used = [], 0
    for shards, replicas in shapes:
        groups.append(tuple(range(used, used + shards * replicas)))
        used += shards * replicas
    cuts = sorted(draw.sample(range(1, 8), positions * chunks - 1))
    placed = []
    zero = draw.choice([0, 1])
    context, expert = draw.choice([(2, 1), (1, 2), (2, 2)]) if shared else (1, 1)
    groups = [tuple(range(own[0] * context, (own[-1] + 1) * context)) for own in groups]
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, 8], strict=True)):
        (shards, replicas), devices = shapes[number % positions], groups[number % positions]
        names = tuple(f"b{block}" for block in range(begin, end))
        placed.append(
            PlacedStage(
                blocks=names,
                devices=devices,
                shards=shards,
                replicas=replicas,
                context=context,
                expert=expert,
                zero=zero,
                recompute=draw.choice([True, False]),
            )
        )
    return Placement(strategy="by hand", num_devices=used * context, stages=tuple(placed))


def two_levels(count: int, node: int) -> Cluster:
    """Nodes of so many devices, and slower links between them."""
    inner = LinkLevel(name="node", group_size=node, latency_ns=5, bandwidth_bytes_per_s=10**9)
    outer = LinkLevel(
        name="net", group_size=node * -(-count // node) * 2, latency_ns=9, bandwidth_bytes_per_s=3 * 10**8
    )
    kinds = (DeviceKind(name="small", count=count, memory_bytes=10**6),)
    return Cluster(name="two", source=Source(method="estimated"), devices=kinds, levels=(inner, outer))


def plans_of(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    idle: int = 0,
    first: int = 0,
    *,
    shared: bool = False,
    looped: bool = False,
) -> Pair:
    """A random case, in one random order of its actions, from device ``first`` on, and so many more that run nothing.

    Where it is ``shared`` devices share sequences or experts; where it is ``looped`` orders are a schedule's, of so
    many micro-batches that both plans are written with a loop.
    """
    draw = Random(seed)
    profile = alike_profile(draw, tied=seed % 3 == 0, shared=shared)
    placement = alike_placement(draw, same=seed % 2 == 0, shared=shared)
    placed = [
        stage.model_copy(update={"devices": tuple(device + first for device in stage.devices)})
        for stage in placement.stages
    ]
    count = placement.num_devices + idle + first
    placement = placement.model_copy(update={"num_devices": count, "stages": tuple(placed)})
    node = draw.choice([2, 4, placement.num_devices])
    cluster = two_levels(placement.num_devices, node)
    monkeypatch.setattr(stages, "FOLD_FROM", 0)
    size = 8 * draw.choice([1, 2])
    count = draw.randint(30, 40) if looped else draw.randint(2, 4)

    def workload(least: int) -> Workload:
        return build_workload(
            profile,
            placement,
            num_microbatches=count,
            microbatch_size=size,
            split_backward=True,
            cluster=cluster,
            fold_least=least,
        )

    graph = task_graph(workload(2))
    alike = graph.workload
    assert alike.players, "the case has devices that are alike"
    orders = _in_turn(graph) if looped else random_orders(graph, draw)[: len(alike.devices)]
    plain = task_graph(workload(0))
    program_of = {device: number for number, own in enumerate(alike.players) for device in own.devices}
    on_devices = [orders[program_of[device]] for device in range(placement.num_devices)]
    both = ((graph, orders), (plain, on_devices))
    on_programs, devices = (assembled(each, with_links(each, own), profile, looped=looped) for each, own in both)
    return on_programs, devices, profile, cluster


def _in_turn(graph: TaskGraph) -> Orders:
    """What repeats: each device takes what may begin first, no more than a few micro-batches at once."""
    found = first_look(graph.workload, names=("1f1b", "interleaved-1f1b"))
    assert found is not None
    assert found.loop is None
    return found.orders[: len(graph.workload.devices)]


@dataclass(frozen=True)
class Replicas:
    """Two positions with two stages each, all split alike."""

    shards: int
    replicas: int

    @property
    def devices(self) -> int:
        """Of both positions."""
        return 2 * self.shards * self.replicas


def plan_of_replicas(of: Replicas, num_microbatches: int = 4) -> Plan:
    """A plan that is folded where it has more than a few devices, a sample for each replica."""
    profile, half = alike_profile(Random(5), tied=False), of.devices // 2
    placed = tuple(
        PlacedStage(
            blocks=tuple(f"b{2 * stage + block}" for block in range(2)),
            devices=tuple(range(half * (stage % 2), half * (stage % 2 + 1))),
            shards=of.shards,
            replicas=of.replicas,
            zero=1,
        )
        for stage in range(4)
    )
    placement = Placement(strategy="by hand", num_devices=of.devices, stages=placed)
    workload = build_workload(
        profile,
        placement,
        num_microbatches=num_microbatches,
        microbatch_size=of.replicas,
        split_backward=True,
        cluster=two_levels(of.devices, min(8, of.devices)),
    )
    workload = workload if workload.players else folded_workload(workload)
    graph = task_graph(workload)
    orders = random_orders(graph, Random(1))[: len(workload.devices)]
    return assembled(graph, with_links(graph, orders), profile)
