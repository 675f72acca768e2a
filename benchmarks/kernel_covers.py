"""Algorithm 1 of Collage against the proved optimum on random models, and how long both take.

    python benchmarks/kernel_covers.py --graphs 200 --operators 40 --limit 240      # the tables of
    python benchmarks/kernel_covers.py --graphs 10 --operators 1000 --limit 60      # docs/benchmarks/kernels.md
    python benchmarks/kernel_covers.py --graphs 200 --operators 40 --limit 0        # without the solver

Against the solver's proofs, or with ``--limit 0`` against the programme that leaves out no state, which proves its own.
With ``--proofs FILE`` proofs are kept there, and those that it has are not made again: it may be interrupted.

Models are random: each operator takes results of one or two of the four before it; one backend runs every operator
alone, two others run some alone and fuse up to five. Times are random, and a change of backend takes nothing, 10 or 40
where an operator takes 50 to 150. Both sides get the same groups, times and changes. Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from tables import machine, markdown, note

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pipeplan.kernels.covers import MOST_STATES, KernelMatch, algorithm_1
from pipeplan.kernels.operators import OperatorDag
from pipeplan.schedule.cpsat.cover import exact_cover
from pipeplan.schedule.cpsat.solver import Budget
from references.kernel_covers import random_case

HEADER = ["states kept", "cheapest found", "mean over it", "largest over it", "changes", "s each", "slowest, s"]


Proof = tuple[int, bool, int, float]
"""The least that a cover takes, whether there is one, its changes, and the seconds of the proof."""


def proof(graph: OperatorDag, matches: list[KernelMatch], change: int, limit: float) -> Proof:
    """By the solver, from a quick cover on; or, without a limit, by the programme with all states."""
    begun = time.process_time()
    if not limit:
        whole = algorithm_1(graph, matches, change, None)
        return whole.total_ns, whole.proved, whole.num_changes, time.process_time() - begun
    first = algorithm_1(graph, matches, change, 20)
    cover, bound = exact_cover(graph, matches, change, Budget(limit), first)
    return bound, cover.total_ns == bound, cover.num_changes, time.process_time() - begun


def proofs(graphs: int, operators: int, limit: float, path: Path | None) -> list[Proof]:
    """Those of all graphs, of which some may be in a file."""
    known: dict[str, Proof] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    for seed in range(graphs):
        key = f"{operators}/{seed}" + ("" if limit else "/programme")
        if key not in known:
            known[key] = proof(*random_case(seed, operators), limit)
            note(f"{seed + 1} of {graphs}: {known[key]}")
            if path is not None:
                path.write_text(json.dumps(known))
    return [known[f"{operators}/{seed}" + ("" if limit else "/programme")] for seed in range(graphs)]


def rows(graphs: int, operators: int, proved: list[Proof], limit: float) -> Iterator[list[str]]:
    """A row for each number of states that are kept, and one of the proofs."""
    cases = [random_case(seed, operators) for seed in range(graphs)]
    for states in (1, 20, MOST_STATES):
        over, times, changes = [], [], []
        for (graph, matches, change), (bound, *_) in zip(cases, proved, strict=True):
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
    seconds = [each[3] for each in proved]
    yield [
        *(
            "CP-SAT" if limit else "all",
            f"{sum(each[1] for each in proved)} of {graphs}",
            "",
            "",
            f"{mean(each[2] for each in proved):.1f}",
        ),
        *(f"{mean(seconds):.3f}", f"{max(seconds):.2f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--operators", type=int, default=60)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of the solver for each proof")
    parser.add_argument("--proofs", type=Path, help="where proofs are kept")
    given = parser.parse_args()
    proved = proofs(given.graphs, given.operators, given.limit, given.proofs)
    found = list(rows(given.graphs, given.operators, proved, given.limit))
    print(machine(), "\n")
    print(markdown(HEADER, found))


if __name__ == "__main__":
    main()
