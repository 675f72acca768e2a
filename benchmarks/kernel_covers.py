"""Algorithm 1 of Collage against the proved optimum on random models, and how long both take.

    python benchmarks/kernel_covers.py --graphs 200 --operators 40 --limit 240      # the tables of
    python benchmarks/kernel_covers.py --graphs 10 --operators 1000 --limit 60      # docs/benchmarks/kernels.md
    python benchmarks/kernel_covers.py --graphs 200 --operators 40 --limit 0        # without the solver

Against the solver's proofs, or with ``--limit 0`` against the programme that leaves out no state, which proves its own.
With ``--proofs FILE`` proofs are kept there, and those that it has are not made again: it may be interrupted.
It ends with 1 where a cover with all states that are kept by default misses a proof, or takes over a minute.

Models are random: each operator takes results of one or two of the four (``--near``) before it; one backend runs every
operator alone, two others run some alone and fuse up to five. Times are random, and a change of backend takes nothing,
10 or 40 where an operator takes 50 to 150. Both sides get the same groups, times and changes. Seconds are of the
processor.
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


LONGEST = 60.0
"""Seconds that a cover may take (1,000 operators within a minute)."""

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


Case = tuple[OperatorDag, list[KernelMatch], int]
"""A model, what backends run of it, and what a change takes."""


def proofs(cases: list[Case], of: str, limit: float, path: Path | None) -> list[Proof]:
    """Those of all cases, of which some may be in a file, by what they are ``of``."""
    known: dict[str, Proof] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    keys = [f"{of}/{seed}" + ("" if limit else "/programme") for seed in range(len(cases))]
    for key, case in zip(keys, cases, strict=True):
        if key not in known:
            known[key] = proof(*case, limit)
            note(f"{key} of {len(cases)}: {known[key]}")
            if path is not None:
                path.write_text(json.dumps(known))
    return [known[key] for key in keys]


def rows(cases: list[Case], proved: list[Proof], limit: float, missed: list[str]) -> Iterator[list[str]]:
    """A row for each number of states that are kept, and one of the proofs; what of the last is ``missed``."""
    graphs = len(cases)
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
    if dearer := sum(each > 1e-12 for each in over):
        missed.append(f"{dearer} of {graphs} covers are dearer than their bound")
    if max(times) > LONGEST:
        missed.append(f"a cover took {max(times):.1f} s")
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
    parser.add_argument("--near", type=int, default=4, help="of how many before it an operator takes results")
    given = parser.parse_args()
    cases = [random_case(seed, given.operators, given.near) for seed in range(given.graphs)]
    of = f"{given.operators}" + (f"/{given.near}" if given.near != parser.get_default("near") else "")
    proved, missed = proofs(cases, of, given.limit, given.proofs), list[str]()
    found = list(rows(cases, proved, given.limit, missed))
    print(machine(), "\n")
    print(markdown(HEADER, found))
    for each in missed:
        note(each)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
