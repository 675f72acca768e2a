"""Small problems of every kind that a plan can be, drawn by a random number generator, to try all schedules of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

from builders.shapes import shape_workload
from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts
from pipeplan.files import Block, CostRow, Edge, PlacedStage, Placement, Profile, Source
from pipeplan.workload.elements import Bucket, Stage, TiedState
from pipeplan.workload.kinds import GRADIENT_ROLES
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.workload import Workload

__all__ = ["KINDS", "small_problem", "with_tail"]

SHAPES = ("v", "v split", "zbv", "zbv split", "circular", "x", "m", "mllm", "nn", "k")
KINDS = (*SHAPES, "groups", "recomputed", "rounds", "graph", "reduced")
"""Shapes of the literature, ``split``: with I and W apart. Stages on groups of devices that are replicas or shards;
stages that compute again; stages whose micro-batches have sizes of their own; any stage graph, several stages on a
device; groups whose gradients are summed, with steps and gathers behind."""


def small_problem(kind: str, random: Random, larger: bool = False) -> OneMicrobatch:
    """A small plan whose operations take and hold anything; every device has a little more room than it needs.

    ``larger``: of more micro-batches than can all be tried.
    """
    return _of_shape(kind, random, larger) if kind in SHAPES else _of_stages(kind, random, larger)


def _of_shape(kind: str, random: Random, larger: bool) -> OneMicrobatch:
    chunks = {"circular": 3}.get(kind)
    name, split = kind.removesuffix(" split"), kind.endswith(" split")
    count = (2 if name in ("zbv", "circular", "x") else 3) + larger
    devices = random.choice([2, 3]) if name in ("v", "m", "mllm") else 2
    costs = ShapeCosts(
        6, None if split else 6, 6 if split else None, 6 if split else None, comm_ns=random.choice([0, 2])
    )
    more = {} if chunks is None else {"chunks": chunks}
    workload = shape_workload(name, devices, count, costs=costs, split=split, **more)
    bytes_of = {stage: random.randint(0, 3) for stage in range(len(workload.stages))}
    operations = []
    for each in workload.operations:
        held, kind_of = bytes_of[each.stage], each.kind
        early = held // 2 if split else held
        operations.append(
            replace(
                each,
                duration_ns=random.randint(1, 5),
                acquire_bytes=held if kind_of == "F" else 0,
                release_bytes={"F": 0, "B": held, "I": early, "W": held - early}[kind_of],
                workspace_bytes=random.choice([0, 0, 1]),
            )
        )
    free = OneMicrobatch.of(replace(workload, operations=tuple(operations)))
    groups = range(free.num_devices)
    room = tuple(free.needed_bytes(device) + random.choice([0, 1, 2, 4]) for device in groups)
    return replace(free, capacity=(*room, *free.capacity[len(room) :]))


def _of_stages(kind: str, random: Random, larger: bool) -> OneMicrobatch:
    num_devices = random.choice([2, 2, 3])
    num_stages = random.choice({"graph": [3, 3, 4], "rounds": [2], "reduced": [2]}.get(kind, [2, 2, 3]))
    in_groups, split = kind in ("groups", "reduced"), kind != "rounds" and num_stages < 4 and random.random() < 0.3
    groups = _groups(num_devices, random) if in_groups else [(device,) for device in range(num_devices)]
    chosen = [random.choice(groups) for _ in range(num_stages)]
    if len(set(chosen)) == 1:  # of devices that all do the same one is left
        chosen[0] = next(group for group in groups if group != chosen[1])
    if in_groups and all(len(group) == 1 for group in chosen):
        chosen[-1] = groups[-1]
    size = {"rounds": 2}.get(kind, MOST_SAMPLES if in_groups else 1)
    stages = [_stage(kind, index, group, random) for index, group in enumerate(chosen)]
    if kind == "recomputed" and not any(stage.recompute for stage in stages):
        stages[0] = stages[0].model_copy(update={"recompute": True})
    profile = Profile(
        name="small",
        source=Source(method="literature"),
        blocks=tuple(_block(index, split, random) for index in range(num_stages)),
        edges=_edges(num_stages, kind == "graph", random),
    )
    placement = Placement(strategy="small", num_devices=num_devices, stages=tuple(stages))

    def build(memory: Sequence[int | None]) -> OneMicrobatch:
        return OneMicrobatch.of(
            build_workload(
                profile,
                placement,
                num_microbatches=2 + (num_stages == 2 and kind not in ("rounds", "reduced")) + larger,
                microbatch_size=size,
                split_backward=split,
                memory_bytes=memory,
            )
        )

    free = build([None] * num_devices)
    group_of = range(num_devices) if free.reduction is None else free.reduction.groups
    spare = [random.choice([0, 1, 2, 4]) + 2 * (kind == "rounds") for _ in range(num_devices)]
    problem = build([None if g < 0 else free.needed_bytes(g) + spare[g] for g in group_of])
    if kind != "reduced":
        return problem
    given = problem.workload if problem.reduction is None else problem.reduction.workload
    return OneMicrobatch.of(with_tail(given, random))


MOST_SAMPLES = 6
"""In a micro-batch of groups: two or three replicas have as many."""


def _groups(num_devices: int, random: Random) -> list[tuple[int, ...]]:
    """Those to choose from, all devices last."""
    everything = range(num_devices)
    return [
        *((device,) for device in everything),
        *(combinations(everything, 2) if num_devices > 2 else ()),
        tuple(everything),
    ]


def _stage(kind: str, index: int, devices: tuple[int, ...], random: Random) -> PlacedStage:
    copies = {random.choice(["shards", "replicas"]): len(devices)} if len(devices) > 1 else {}
    return PlacedStage(
        blocks=(f"b{index}",),
        devices=devices,
        recompute=random.random() < 0.5 if kind == "recomputed" else None,
        microbatch_size=random.choice([1, 2]) if kind == "rounds" else None,
        **copies,
    )


def _block(index: int, split: bool, random: Random) -> Block:
    """Costs for any samples and shards that are no more alike than any others."""
    bytes_, own = random.choice([0, 1, 2, 3]), split and random.random() < 0.7
    rows = []
    for size in (1, 2, 3, MOST_SAMPLES):
        for shards in (1, 2, 3):
            row = {
                "microbatch_size": size,
                "shards": shards,
                "forward_ns": random.randint(1, 5),
                "backward_ns": random.randint(1, 5),
                "activation_bytes": bytes_,
                "workspace_bytes": random.choice([0, 0, 1]),
            }
            if own:
                row |= {"input_grad_ns": random.randint(1, 5), "weight_grad_ns": random.randint(1, 5)}
                row |= {"weight_grad_bytes": random.randint(0, bytes_)}
            rows.append(CostRow.model_validate(row))
    return Block(id=f"b{index}", operator="x", costs=tuple(rows))


def _edges(num_stages: int, any_graph: bool, random: Random) -> tuple[Edge, ...]:
    """A chain; or as many pairs of stages and more, of which some go another way than a chain's."""
    pairs = [*combinations(range(num_stages), 2)]
    chain = [(source, target) for source, target in pairs if target == source + 1]
    joined = chain
    while any_graph and (joined == chain or len(joined) < len(chain)):
        joined = [pair for pair in pairs if random.random() < 0.6]
    return tuple(
        Edge(
            source=f"b{source}",
            target=f"b{target}",
            transfer_ns=random.randint(0, 2),
            bytes_per_sample=random.choice([0, 1, 2]),
        )
        for source, target in joined
    )


def with_tail(workload: Workload, random: Random) -> Workload:
    """The same with gradients to sum, of stages and of what they share, steps, and parameters to gather.

    Some stages may sum theirs in two or three buckets.
    """
    last = {each.stage: each.duration_ns for each in workload.operations if each.role in GRADIENT_ROLES}

    def few() -> int:
        return random.choice([0, 2, 5, 9])

    def in_buckets(number: int, stage: Stage) -> Stage:
        if not stage.sync_ns or random.choice([False, True]):
            return stage
        ahead = sorted((random.randint(0, last[number]) for _ in range(random.randint(1, 2))), reverse=True)
        buckets = (Bucket(blocks=1, bytes=1, ahead_ns=ns, sync_ns=random.choice([1, 2, 4])) for ns in (*ahead, 0))
        return replace(stage, buckets=tuple(buckets))

    stages = tuple(
        in_buckets(number, replace(each, sync_ns=few(), step_ns=few(), gather_ns=few()))
        for number, each in enumerate(workload.stages)
    )
    everywhere = tuple(each.devices for each in stages)
    table = TiedState(name="table", stages=tuple(range(len(stages))), devices=everywhere, sync_ns=few())
    return replace(workload, stages=stages, tied=(table,) if random.choice([False, True]) else ())
