"""Algorithm 1 of Collage against the proved optimum on random models, and how long both take.

    python benchmarks/kernel_covers.py --graphs 200 --operators 60      # the table of docs/benchmarks/planners.md
    python benchmarks/kernel_covers.py --graphs 5 --operators 1000

Models are random: each operator takes results of one or two of the four before it; one backend runs every operator
alone, two others run some alone and fuse up to five. Times are random, and a change of backend takes nothing, 10 or 40
where an operator takes 50 to 150. Both sides get the same groups, times and changes. Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from tables import machine, markdown, note

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pipeplan.kernels.covers import MOST_STATES, algorithm_1
from pipeplan.schedule.cpsat.cover import exact_cover
from pipeplan.schedule.cpsat.solver import Budget
from references.kernel_covers import random_case

HEADER = ["states kept", "cheapest found", "mean over it", "largest over it", "changes", "s each", "slowest, s"]


def rows(graphs: int, operators: int, limit: float) -> Iterator[list[str]]:
    """A row for each number of states that are kept, and one of the solver."""
    cases = [random_case(seed, operators) for seed in range(graphs)]
    proved, seconds = [], []
    for number, (graph, matches, change) in enumerate(cases):
        begun = time.process_time()
        first = algorithm_1(graph, matches, change, 20)
        cover, bound = exact_cover(graph, matches, change, Budget(limit), first)
        seconds.append(time.process_time() - begun)
        proved.append((cover, bound))
        note(f"{number + 1} of {graphs}: {cover.total_ns}, {'proved' if cover.proved else f'at least {bound}'}")
    for states in (1, 20, MOST_STATES):
        over, times, changes = [], [], []
        for (graph, matches, change), (_, bound) in zip(cases, proved, strict=True):
            begun = time.process_time()
            found = algorithm_1(graph, matches, change, states)
            times.append(time.process_time() - begun)
            over.append(found.total_ns / bound - 1)
            changes.append(found.num_changes)
        yield [
            str(states),
            f"{sum(each < 1e-12 for each in over)} of {graphs}",
            f"{mean(over):.3%}",
            f"{max(over):.2%}",
            f"{mean(changes):.1f}",
            f"{mean(times):.3f}",
            f"{max(times):.2f}",
        ]
    exact = sum(cover.proved for cover, _ in proved)
    changes = [cover.num_changes for cover, _ in proved]
    yield [
        *("CP-SAT", f"{exact} of {graphs} proved", "", "", f"{mean(changes):.1f}"),
        *(f"{mean(seconds):.3f}", f"{max(seconds):.2f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--operators", type=int, default=60)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each proof")
    given = parser.parse_args()
    found = list(rows(given.graphs, given.operators, given.limit))
    print(machine(), "\n")
    print(markdown(HEADER, found))


if __name__ == "__main__":
    main()
