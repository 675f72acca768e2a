"""Links that carry one message at a time: the search beside classic schedules that serve who comes first.

    python benchmarks/busy_links.py                    # prints the table of docs/benchmarks/schedules.md

Forward, input and weight gradient 100 each per device (50 per chunk where there are two), no memory limit; every
message takes its link for the time named, and 5 more to arrive. Every schedule is checked.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from tables import machine, markdown, note

from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.planning.build_plan import assemble
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget, load_solver
from pipeplan.schedule.search import search_schedule
from pipeplan.workload.bounds import period_bound
from pipeplan.workload.engine import with_links
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload

NAMES = {"v": "one stage per device", "circular": "circular, two chunks", "zbv": "v-shape, two chunks"}


def workload_of(name: str, num_devices: int, num_microbatches: int, occupancy: int) -> Workload:
    """The shape over links that a message takes for ``occupancy`` ns."""
    chunks = 2 if name == "circular" else None
    profile = shape(name, num_devices, costs=ShapeCosts(100, None, 100, 100), chunks=chunks)
    assert profile.placement is not None
    workload = build_workload(
        profile, profile.placement, num_microbatches=num_microbatches, microbatch_size=1, split_backward=True
    )
    update = {"latency_ns": 5, "occupancy_ns": occupancy}
    dependencies = tuple(
        replace(dependency, hops=tuple(replace(hop, **update) for hop in dependency.hops))
        for dependency in workload.dependencies
    )
    return replace(workload, dependencies=dependencies)


def makespan(graph: TaskGraph, orders: Orders) -> int:
    return max(map(sum, zip(earliest_starts(graph, orders), graph.durations, strict=True)))


def best_classic(problem: OneMicrobatch, graph: TaskGraph) -> tuple[int, str]:
    """The best classic schedule: makespan in ns, and its name."""
    return min(
        (makespan(graph, with_links(graph, classic.orders(problem, graph))), name)
        for name, classic in CLASSIC.items()
        if classic.applies(problem) is None
    )


def row(name: str, num_devices: int, num_microbatches: int, occupancy: int, limit: float) -> list[str]:
    workload = workload_of(name, num_devices, num_microbatches, occupancy)
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    theirs, classic = best_classic(problem, graph)
    found = search_schedule(workload, Budget(limit))
    check(assemble(graph, found.orders, found.bound_ns, period_bound(problem), "benchmark")).require()
    note(f"{name} {num_devices} {occupancy}: {theirs} ({classic}), {found.makespan_ns} in {found.seconds:.1f} s")
    gap = found.makespan_ns / found.bound_ns - 1
    ratio = theirs / found.makespan_ns
    cells = [occupancy, f"{theirs} ({classic})", found.makespan_ns, f"{gap:.1%}" if gap else "0", f"{ratio:.2f}"]
    return [NAMES[name], str(num_devices), str(num_microbatches), *map(str, cells)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="v,circular,zbv")
    parser.add_argument("--devices", default="4:12,8:16", help="devices:micro-batches")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one search")
    options = parser.parse_args()
    load_solver()
    sizes = [pair.split(":") for pair in options.devices.split(",")]
    rows = [
        row(name, int(devices), int(microbatches), occupancy, options.limit)
        for name in options.shapes.split(",")
        for devices, microbatches in sizes
        for occupancy in ((150, 250) if name == "v" else (60, 100))
    ]
    header = ["placement", "devices", "micro-batches", "occupancy", "best classic", "search", "gap", "ratio"]
    print(markdown(header, rows), end="\n\n")
    print(f"Searches of {options.limit:.0f} s; {machine()}.")


if __name__ == "__main__":
    main()
