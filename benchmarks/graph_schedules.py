"""Greedy schedules against kFkB on stage graphs: the case study, and the models of GraphPipe's evaluation.

    python benchmarks/graph_schedules.py               # prints the tables of docs/algorithms/graph-schedules.md
    python benchmarks/graph_schedules.py --devices 8

Stages, replicas and micro-batch sizes are GraphPipe's (``pipeplan.partition.graph``), costs and links those of the
paper's testbed. Times are simulated, messages and the sum of gradients included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tables import machine, markdown, note

from pipeplan.costs import build_workload
from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.communication import all_reduce_time
from pipeplan.examples import model
from pipeplan.files import Block, Cluster, CostRow, Edge, Profile, Source
from pipeplan.partition.graph.search import graphpipe
from pipeplan.partition.problem import PartitionProblem
from pipeplan.schedule.stage_graph import best_kfkb_orders, greedy_orders, kfkb_orders
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.stage_graphs import samples_held

MINI_BATCHES = {"mmt": 16, "mmt-2": 16, "dlrm-8": 64, "candle-uno-8": 1024}
"""Per device (3.10.3)."""

HEADER = ["", "stages", "depth", "micro-batches of", "1F1B", "best kFkB", "greedy", "greedy found in"]


def case_study() -> Profile:
    """Fig. 3.8: two branches of four times attention and two linear layers; larger micro-batches are better."""
    times = {1: 30, 2: 40, 4: 60}
    rows = tuple(
        CostRow(microbatch_size=size, forward_ns=ns, backward_ns=2 * ns, activation_bytes=size << 20)
        for size, ns in times.items()
    )
    names = [[f"{branch}{index}" for index in range(12)] for branch in "ab"]
    blocks = [Block(id=name, operator="layer", costs=rows) for branch in names for name in branch]
    free = tuple(CostRow(microbatch_size=size, forward_ns=1, backward_ns=1) for size in times)
    blocks.append(Block(id="concatenation", operator="concatenation", costs=free))
    pairs = [pair for branch in names for pair in zip(branch, [*branch[1:], "concatenation"], strict=True)]
    edges = tuple(Edge(source=source, target=target, bytes_per_sample=1) for source, target in pairs)
    return Profile(name="case study", source=Source(method="literature"), blocks=tuple(blocks), edges=edges)


def in_a_line(profile: Profile) -> tuple[tuple[str, str], ...]:
    """The blocks as a chain: what planners for chains see."""
    order = profile.topological_order()
    return tuple(zip(order, order[1:], strict=False))


def planned(
    profile: Profile,
    num_devices: int,
    mini_batch: int,
    memory: int,
    cluster: Cluster | None,
    sizes: Sequence[int] | None,
) -> Workload:
    """GraphPipe's stages, and what they run."""
    problem = PartitionProblem.of(
        profile,
        num_devices,
        mini_batch,
        memory_bytes=memory,
        microbatch_sizes=sizes,
        all_reduce=lambda size, replicas: all_reduce_time(cluster, range(replicas), size),
    )
    if cluster is None:  # the case study has no replicas
        problem = replace(problem, ways=tuple(way for way in problem.ways if way.replicas == 1))
    placement = next(graphpipe(problem, tolerance=0.01)).placement
    size = max(stage.microbatch_size or 0 for stage in placement.stages)
    return build_workload(
        profile,
        placement,
        num_microbatches=mini_batch // size,
        microbatch_size=size,
        memory_bytes=[memory] * num_devices,
        cluster=cluster,
    )


def row(name: str, workload: Workload) -> list[str]:
    """One line of the table; each schedule's time, the most of one device's memory and samples of all stages."""
    tasks = task_graph(workload)
    ones, best = kfkb_orders(workload, tasks), best_kfkb_orders(workload, tasks)
    begin = time.perf_counter()
    greedy = greedy_orders(workload, tasks)
    seconds = time.perf_counter() - begin
    base = makespan(tasks, ones)
    sizes = sorted({stage.microbatch_size for stage in workload.stages})
    return [
        name,
        str(len(workload.stages)),
        str(depth(workload)),
        ", ".join(map(str, sizes)),
        *(cell(tasks, orders, base) for orders in (ones, best, greedy)),
        f"{seconds:.2f} s",
    ]


def depth(workload: Workload) -> int:
    """Stages on the longest path."""
    depths = [1] * len(workload.stages)
    pairs = {(each.source_stage, each.target_stage) for each in workload.dependencies}
    for source, target in sorted(pair for pair in pairs if pair[0] < pair[1]):
        depths[target] = max(depths[target], depths[source] + 1)
    return max(depths)


def cell(graph: TaskGraph, orders: Orders, base: int) -> str:
    """Time as a part of 1F1B's; memory of the fullest device; samples in flight of all stages."""
    memory = max(each.peak_bytes for each in peak_memory(graph, orders)) / 2**30
    return f"{makespan(graph, orders) / base:.3f}, {memory:.2f} GiB, {sum(samples_held(graph, orders))}"


def makespan(graph: TaskGraph, orders: Orders) -> int:
    """End of the last action, in ns."""
    starts = earliest_starts(graph, with_links(graph, orders))
    return max(map(int.__add__, starts, graph.durations))


def rows(devices: Sequence[int]) -> Iterator[list[str]]:
    """The case study as graph and as line, then the models."""
    study = case_study()
    memory = 3 * 5 * 4 << 20
    for name, edges in (("case study", None), ("case study in a line", in_a_line(study))):
        kept = tuple(Edge(source=a, target=b, bytes_per_sample=1) for a, b in edges) if edges else study.edges
        yield row(name, planned(study.model_copy(update={"edges": kept}), 8, 32, memory, None, (1, 2, 4)))
    for name, each in MINI_BATCHES.items():
        profile = model(name, device="v100-16gb")
        for count in devices:
            note(f"{name} on {count} devices")
            cluster = named_cluster("graphpipe", count)
            yield row(f"{name} on {count}", planned(profile, count, each * count, 16 << 30, cluster, None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="4,8,16,32")
    asked = parser.parse_args()
    print(markdown(HEADER, list(rows([int(count) for count in asked.devices.split(",")]))))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
