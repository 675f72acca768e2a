"""How long a simulation takes: seconds by the number of actions, plan in memory to all figures.

    python benchmarks/simulator.py                     # prints the table of docs/benchmarks/speed.md

1F1B with forward, input and weight gradient on 64 devices, all hops 10; then the same over links that a message takes
for as long as two actions, so that each message is one more thing to time. The plan's file is read beforehand.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median

from tables import machine, markdown, note

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import Plan
from pipeplan.planning.build_plan import assemble
from pipeplan.schedule.classic import CLASSIC
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.bounds import period_bound, weak_iteration_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload


def workload_of(num_devices: int, num_microbatches: int, occupancy: int) -> Workload:
    """A chain with one stage per device; ``occupancy`` in ns of each message on its link."""
    costs = ShapeCosts(100, None, 100, 100, comm_ns=10, activation_bytes=2, weight_grad_bytes=1)
    profile = shape("v", num_devices, costs=costs)
    assert profile.placement is not None
    workload = build_workload(
        profile, profile.placement, num_microbatches=num_microbatches, microbatch_size=1, split_backward=True
    )
    dependencies = tuple(
        replace(dependency, hops=tuple(replace(hop, occupancy_ns=occupancy) for hop in dependency.hops))
        for dependency in workload.dependencies
    )
    return replace(workload, dependencies=dependencies)


def plan_of(workload: Workload) -> Plan:
    """1F1B of the workload."""
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    orders = CLASSIC["1f1b"].orders(problem, graph)
    return assemble(graph, orders, weak_iteration_bound(workload), period_bound(problem), "1f1b")


def seconds(plan: Plan, repeats: int) -> float:
    """Median time of a simulation."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        simulate(plan)
        times.append(time.perf_counter() - begun)
    return median(times)


def row(num_devices: int, num_microbatches: int, repeats: int) -> list[str]:
    """Actions, seconds with free and with busy links, and microseconds per action or message."""
    cells = []
    for occupancy in (0, 200):
        workload = workload_of(num_devices, num_microbatches, occupancy)
        tasks = len(workload.durations) * num_microbatches
        took = seconds(plan_of(workload), repeats)
        cells += [f"{tasks:,}", f"{took:.2f}", f"{took / tasks * 1e6:.1f}"]
        note(f"{num_devices} devices, {num_microbatches} micro-batches: {tasks} in {took:.2f} s")
    return [str(num_devices), f"{num_microbatches:,}", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--microbatches", default="128,256,512,1024,2048,4096")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    counts = map(int, options.microbatches.split(","))
    rows = [row(options.devices, count, options.repeats) for count in counts]
    header = ["devices", "micro-batches", "actions", "seconds", "us each", "with messages", "seconds", "us each"]
    print(markdown(header, rows), end="\n\n")
    print(f"Median of {options.repeats}; {machine()}.")


if __name__ == "__main__":
    main()
