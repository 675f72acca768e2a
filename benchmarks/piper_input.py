"""Piper's own BERT-32 (Tarnawski et al. 2021, section 5): its planner's stages and what ours make of the same numbers.

    python benchmarks/piper_input.py --input bert32a100.json [--devices 16] [--memory 6GB] [--microbatches 96]
        [--stages piper.json] [--limit 30] [--plans FOLDER] [--processor] [--kept pieces.jsonl --part-seconds 400]

The file is the paper's, from the repository of its authors (github.com/msr-fiddle/piper, inputs/), and no part of ours.
Of it come: times of a layer with 1, 2, 4 and 8 tensor-parallel devices, with and without recomputation; bytes that it
holds for each micro-batch, and besides; bytes of its weights; the bandwidth of a device's link. A sample is a
micro-batch of the paper. What it does not say is read so, for all sides:

* Forward is what recomputation adds to a layer's time, and backward the rest.
* Weights and their gradients are as many bytes (the file's constant bytes of a layer are twice its weights), and
  nothing else is kept. What recomputation holds besides while it runs is workspace.
* What crosses from layer to layer is the larger of the file's two edges into one: it has the mask's and the layer's
  bytes exchanged from the second layer on. Inputs of the model (mask and indices) are on all devices.
* What tensor parallelism exchanges inside of a layer is in the file's times; at the ends of stages messages are whole.

``--stages`` are those that the paper's own program (algo.cpp of that repository) found for the same devices, as its
``Result`` is written in JSON, one on each line: here they have our messages and sums, and the best schedule that is
found, since 1F1B holds more micro-batches before replicas than the paper counts. "Piper's stages" are those of our
planner of that name with 1F1B. Iterations are simulated. ``--plans`` keeps the profile, the cluster and the
plans, which ``pipeplan check`` and ``pipeplan run --emulate`` take. With ``--processor`` limits are of the process's
own work.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from resumed import Paused, Pieces, resumable
from tables import machine, markdown, note

import pipeplan
from pipeplan.errors import InfeasibleError, SearchTimeoutError
from pipeplan.files import (
    Block,
    Cluster,
    CostRow,
    DeviceKind,
    Edge,
    LinkLevel,
    PlacedStage,
    Placement,
    Profile,
    Source,
)
from pipeplan.time_limit import Limit, WorkClock
from pipeplan.units import bytes_of, format_ns

Case = dict[str, Any]
"""A layer on some devices, as the file has it."""

Flags = dict[str, Any]

Within = Callable[[], Limit | None]
"""The limit of a search that is about to begin, by another clock than the wall's."""


def _within(seconds: float, *, processor: bool) -> Limit | None:
    return Limit(seconds, clock=WorkClock()) if processor else None


SEARCHES: dict[str, Flags] = {
    "Piper's stages, 1F1B, nothing recomputed": {"planner": "piper", "recompute": "none", "scheduler": "1f1b"},
    "Piper's stages, 1F1B": {"planner": "piper", "scheduler": "1f1b"},
    "`search --recompute none`": {"recompute": "none"},
    "`search --zero 0`": {"zero": 0},
    "`search`": {},
}


def profile_of(given: dict[str, Any]) -> Profile:
    """The file's layers as blocks, in its order, and what goes between them."""
    layers = [node for node in given["nodes"] if any(case["parameterSize"] for case in node["TMPCs"]["1"])]
    ids = {node["id"]: f"{node['name']}.{node['id']}" for node in layers}
    entering: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for edge in given["edges"]:
        entering[edge["destId"]].append(edge)
    return Profile(
        name="piper-bert32",
        source=Source(method="literature", notes="Piper, NeurIPS 2021, inputs/bert32a100.json"),
        blocks=tuple(block_of(ids[node["id"]], node) for node in layers),
        edges=tuple(
            Edge(
                source=ids[edge["sourceId"]],
                target=ids[edge["destId"]],
                bytes_per_sample=round(max(each["communicationCost"] for each in entering[edge["destId"]])),
            )
            for edge in given["edges"]
            if edge["sourceId"] in ids and edge["destId"] in ids
        ),
    )


def block_of(id_: str, node: dict[str, Any]) -> Block:
    """A layer with its rows: for each number of devices whole, and recomputed."""
    weights = round(node["TMPCs"]["1"][0]["parameterSize"])
    rows = list[CostRow]()
    for count, cases in node["TMPCs"].items():
        plain, again = (next(each for each in cases if each["id"] == name) for name in ("vanilla", "activation recomp"))
        forward = max(0.0, again["timePerSample"] - plain["timePerSample"])
        rows += (row_of(case, int(count), forward, recompute=case is again) for case in (plain, again))
    return Block(id=id_, operator=node["name"], parameter_bytes=weights, gradient_bytes=weights, costs=tuple(rows))


def row_of(case: Case, shards: int, forward_s: float, *, recompute: bool) -> CostRow:
    """What a layer takes on each of its devices."""
    return CostRow(
        microbatch_size=1,
        shards=shards,
        recompute=recompute,
        forward_ns=round(forward_s * 1e9),
        backward_ns=round((case["timePerSample"] - forward_s) * 1e9),
        activation_bytes=round(case["memoryUsageA"]),
        workspace_bytes=max(0, round(case["memoryUsageB"] - 2 * case["parameterSize"])),
    )


def cluster_of(given: dict[str, Any], devices: int, memory: int) -> Cluster:
    """Devices each with one link of the file's bandwidth."""
    wire = LinkLevel(name="network", group_size=devices, latency_ns=0, bandwidth_bytes_per_s=round(given["bandwidth"]))
    return Cluster(
        name="piper",
        source=Source(method="literature"),
        devices=(DeviceKind(name="a100", count=devices, memory_bytes=memory),),
        levels=(wire,),
    )


def searched(
    profile: Profile,
    cluster: Cluster,
    microbatches: int,
    seconds: float,
    within: Within,
    flags: Flags,
    path: Path | None,
) -> list[str]:
    """Iteration, stages and split of a search's plan, which is written where there is a path."""
    try:
        plan = pipeplan.search(
            profile, cluster=cluster, mini_batch=microbatches, time_limit=seconds, within=within(), **flags
        ).plan
    except (InfeasibleError, SearchTimeoutError) as error:
        return ["-", str(error).partition(";")[0]]
    pipeplan.check(plan, profile=profile, cluster=cluster).require("the plan")
    if path is not None:
        pipeplan.write(plan, path)
    shards, replicas = (sorted({getattr(stage, key) for stage in plan.stages}) for key in ("shards", "replicas"))
    again = sum(each is not False for stage in plan.workload.stages for each in stage.again)
    levels = sorted({stage.zero for stage in plan.stages})
    layout = f"{len(plan.stages)} stages, tp {shards}, dp {replicas}, ZeRO {levels}, {again} blocks recomputed"
    return [format_ns(plan.predicted.iteration_ns), layout.replace("[", "").replace("]", "")]


def placement_of(given: dict[str, Any], profile: Profile, found: dict[str, Any], devices: int) -> Placement:
    """Stages of the paper's program, each on the next devices, with a micro-batch for each of its replicas."""
    ids = {node["id"]: f"{node['name']}.{node['id']}" for node in given["nodes"]}
    stages, free = list[PlacedStage](), 0
    for stage in found["stages"]:
        again = {ids[number] for number, case in stage["TMPCids"] if case != "vanilla"}
        blocks = [block.id for block in profile.blocks if block.id in {ids[number] for number in stage["nodes"]}]
        shards, replicas = stage["tensorParallelDegree"], stage["dataParallelDegree"]
        stages.append(
            PlacedStage(
                blocks=tuple(blocks),
                devices=tuple(range(free, free + shards * replicas)),
                shards=shards,
                replicas=replicas,
                microbatch_size=replicas,
                recompute=tuple(block in again for block in blocks),
            )
        )
        free += shards * replicas
    return Placement(strategy="given", num_devices=devices, stages=tuple(stages))


def best_of_frontier(
    profile: Profile, cluster: Cluster, microbatches: int, seconds: float, within: Within
) -> list[str]:
    """The quickest plan of a frontier."""
    found = pipeplan.frontier(
        profile, cluster=cluster, mini_batch=microbatches, plans=True, time_limit=seconds, within=within()
    )
    best = min(found.points, key=lambda point: point.time_ns)
    return [format_ns(best.time_ns), f"{len(found.points)} points"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--stages", type=Path, help="what the paper's program found, in JSON, one on each line")
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--memory", default="6GB")
    parser.add_argument("--microbatches", type=int, default=96)
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--processor", action="store_true", help="limits are of the process's own work")
    parser.add_argument("--plans", type=Path, help="the folder to keep plans in")
    resumable(parser)
    options = parser.parse_args()
    given = json.loads(options.input.read_text(encoding="utf-8"))
    profile, cluster = profile_of(given), cluster_of(given, options.devices, bytes_of(options.memory))
    if options.plans is not None:
        options.plans.mkdir(parents=True, exist_ok=True)
        pipeplan.write(profile, options.plans / "profile.json")
        pipeplan.write(cluster, options.plans / "cluster.json")
    pieces = Pieces(options.kept, options.part_seconds)
    work = sum(row.forward_ns + (row.backward_ns or 0) for block in profile.blocks for row in block.costs[:1])
    note(f"work of all micro-batches over all devices: {work * options.microbatches / options.devices / 1e9:.2f} s")
    lines = options.stages.read_text(encoding="utf-8").splitlines() if options.stages else []
    own = {
        f"stages of the paper's program, {number}": {
            "placement": placement_of(given, profile, json.loads(line), options.devices),
            "recompute": "auto" if "activation recomp" in line else "none",
        }
        for number, line in enumerate(lines, 1)
    }
    sized = options.microbatches, options.limit, partial(_within, options.limit, processor=options.processor)
    rows = list[list[str]]()
    try:
        for number, (name, flags) in enumerate((own | SEARCHES).items(), 1):
            path = options.plans and options.plans / f"plan-{number}.json"
            rows.append([name, *pieces.get(name, partial(searched, profile, cluster, *sized, flags, path))])
        points = pieces.get("frontier", lambda: best_of_frontier(profile, cluster, *sized))
        rows.append(["`frontier --plans`", *points])
    except Paused as paused:
        note(str(paused))
    note(machine())
    print(markdown(["stages and schedule", "iteration", "layout"], rows))


if __name__ == "__main__":
    main()
