"""Seconds to the same makespan: Tessel on z3, as its paper describes it, and pipeplan's search.

    pip install 'pipeplan[bench]'
    python benchmarks/tessel_z3.py                     # prints the table of docs/benchmarks/repetends.md
    python benchmarks/tessel_z3.py --shapes v,k --limit 60

4 devices, forward 1 ms, backward 3 ms, shared blocks 1 and 1 ms, 16 micro-batches, no memory cap (``--memory M``: room
for M blocks' activations on each device). First z3 (see z3_tessel.py) searches to its end or to the limit; then
pipeplan's search runs until it has a schedule that takes no longer. Both are timed by pipeplan's simulator and checked.
Importing either solver is not counted.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from importlib.metadata import version

from tables import machine, markdown, note
from timed import makespan_of, timed_search
from z3_tessel import Found, Planner

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.schedule.cpsat.solver import load_solver
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload

DEVICES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One shape: what z3 found and its makespan; pipeplan's makespan when its search had got as far, and the seconds.

    A makespan of None: z3 has found nothing. Seconds of None: a run of pipeplan did not get there.
    """

    name: str
    tessel: Found
    makespan: int | None
    reached: int | None
    ours: float | None

    @property
    def ratio(self) -> float | None:
        """z3's seconds over ours; a lower bound where z3 met the limit."""
        return self.tessel.seconds / self.ours if self.ours else None

    def cells(self) -> list[str]:
        """The table's entries."""
        at_least = "" if self.tessel.finished else "≥ "
        repetend = self.tessel.repetend
        return [
            self.name.upper(),
            str(self.tessel.solved),
            str(repetend.span) if repetend else "none",
            f"{self.tessel.repetend_seconds:.2f}",
            f"{at_least}{self.tessel.completion_seconds:.2f}",
            f"{at_least}{self.tessel.seconds:.2f}",
            f"{self.tessel.proof_seconds:.2f}",
            f"{self.makespan / 1e6:g}" if self.makespan else "none",
            f"{self.reached / 1e6:g}" if self.reached else "",
            f"{self.ours:.4f}" if self.ours else "not in time",
            f"{at_least}{number(self.ratio)}" if self.ratio else "",
        ]


HEADER = [
    "shape",
    "repetends solved",
    "span",
    "z3: repetend",
    "warmup and cooldown",
    "together",
    "of it: nothing shorter",
    "makespan, ms",
    "pipeplan: makespan at most that, ms",
    "seconds",
    "ratio",
]


def number(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def workload_of(name: str, num_microbatches: int, memory: int | None) -> Workload:
    profile = shape(name, DEVICES, costs=ShapeCosts(activation_bytes=1))
    assert profile.placement is not None
    return build_workload(
        profile,
        profile.placement,
        num_microbatches=num_microbatches,
        microbatch_size=1,
        memory_bytes=[memory] * DEVICES,
    )


def row(name: str, options: argparse.Namespace) -> Row:
    workload = workload_of(name, options.microbatches, options.memory)
    tessel = Planner(OneMicrobatch.of(workload), options.limit).search()
    makespan = makespan_of(task_graph(workload), tessel.orders) if tessel.orders else None
    reached, ours = seconds_to(workload, makespan, options) if makespan else (None, None)
    found = Row(name, tessel, makespan, reached, ours)
    note(" ".join(found.cells()))
    return found


def seconds_to(workload: Workload, target: int, options: argparse.Namespace) -> tuple[int | None, float | None]:
    """The run with the median seconds, of some with different seeds; its makespan, and its seconds."""
    runs = [timed_search(workload, options.search_limit, target, seed=seed, stop=True) for seed in range(options.runs)]
    found = [(run.target_seconds, run.schedule.makespan_ns) for run in runs if run.target_seconds is not None]
    if len(found) < len(runs):
        return None, None
    seconds, makespan = statistics.median_low(found)
    return makespan, seconds


def means(rows: list[Row]) -> str:
    """Means over the shapes on which pipeplan came as far as z3."""
    compared = [row for row in rows if row.ours]
    if not compared:
        return ""
    ours = statistics.mean(row.ours or 0.0 for row in compared)
    theirs = statistics.mean(row.tessel.seconds for row in compared)
    finding = statistics.mean(row.tessel.seconds - row.tessel.proof_seconds for row in compared)
    least = "" if all(row.tessel.finished for row in compared) else "at least "
    return (
        f"Mean over {len(compared)} shapes: z3 {theirs:.2f} s, pipeplan {ours:.4f} s. Ratio of the means {least}"
        f"{number(theirs / ours)}, without z3's proofs that no warmup or cooldown is shorter {number(finding / ours)}; "
        f"mean of the ratios {least}{number(statistics.mean(row.ratio or 0.0 for row in compared))}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="v,x,m,nn,k")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--memory", type=int, help="blocks' activations each device has room for; no limit by default")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for z3 on one shape")
    parser.add_argument("--search-limit", type=float, default=20.0, help="seconds for one search of pipeplan")
    parser.add_argument("--runs", type=int, default=5, help="searches of pipeplan, of which the median counts")
    options = parser.parse_args()
    load_solver()
    rows = [row(name, options) for name in options.shapes.split(",")]
    print(markdown(HEADER, [found.cells() for found in rows]))
    print(f"\n{means(rows)} pipeplan: median of {options.runs} searches of {options.search_limit:g} s.", end=" ")
    print(f"{machine()}, z3-solver {version('z3-solver')}.")


if __name__ == "__main__":
    main()
