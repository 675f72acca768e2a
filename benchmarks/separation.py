"""Gradient separation beside brute force on small random schedules, and its cost on large ones.

    python benchmarks/separation.py [--cases 400]

Prints the tables of docs/algorithms/separation.md. The first leaves out cases with more than
4,000 ways to place W.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tables import machine, markdown

from builders.chains import chain_workload  # a package beside the tests
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.rules.separation import separate
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import Orders, TaskGraph, task_graph
from references.separation import best_of_all, length, num_placings, random_case

MOST_PLACINGS = 4000
SIZES = ((4, 16), (8, 64), (16, 128), (32, 256), (64, 512))
"""Devices and micro-batches of 1F1B."""


def quality(cases: int, *, memory: bool) -> list[str]:
    """How often brute force is shorter than the given schedules, and than ours."""
    tried = [case for case in (random_case(seed, memory=memory) for seed in range(cases)) if _small(*case)]
    lengths = [(length(g, orders), length(g, separate(g, orders)), best_of_all(g, orders)) for g, orders in tried]
    better = [(given, found, best) for given, found, best in lengths if best < given]
    gaps = [found / best - 1 for _, found, best in lengths]
    return [
        "as much as is used, or 1 or 2 bytes more" if memory else "any",
        str(len(lengths)),
        str(len(better)),
        str(sum(found < given for given, found, _ in better)),
        str(sum(found == best for _, found, best in lengths)),
        f"{sum(gaps) / len(gaps):.2%}",
        f"{max(gaps):.1%}",
    ]


def _small(graph: TaskGraph, orders: Orders) -> bool:
    return num_placings(graph, orders) <= MOST_PLACINGS


def cost(num_devices: int, count: int) -> list[str]:
    """Length of 1F1B with F = I = W before and after, beside ZB-H1, and seconds."""
    workload = chain_workload(num_devices, count, forward=1, split=(1, 1))
    graph, problem = task_graph(workload), OneMicrobatch.of(workload)
    orders = CLASSIC["1f1b"].orders(problem, graph)
    begin = time.perf_counter()
    found = separate(graph, orders)
    seconds = time.perf_counter() - begin
    lengths = [length(graph, o) for o in (orders, found, CLASSIC["zb-h1"].orders(problem, graph))]
    return [f"{num_devices} x {count}", f"{graph.num_tasks:,}", *map(str, lengths), f"{seconds:.2f} s"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=400)
    cases = parser.parse_args().cases
    header = ["memory", "cases", "can be shorter", "shortened", "as short as possible", "mean excess", "worst"]
    print(markdown(header, [quality(cases, memory=memory) for memory in (False, True)]))
    print()
    print(
        markdown(
            ["devices x micro-batches", "actions", "1F1B", "separated", "ZB-H1", "time"], [cost(*s) for s in SIZES]
        )
    )
    print(f"\n{machine()}")
