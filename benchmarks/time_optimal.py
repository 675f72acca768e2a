"""Tessel's Fig. 9: schedules composed of a repetend against time-optimal ones, for few micro-batches.

    python benchmarks/time_optimal.py                  # prints the table of docs/benchmarks/repetends.md; takes a while
    python benchmarks/time_optimal.py --microbatches 3,4 --limit 10

4 devices, forward 1, backward 3, shared blocks 1 and 1, no memory cap.

* *composed*: the repetend is searched (least period, then least latency), replayed, and one repetition in the middle
  is kept while what runs before and after it is scheduled anew, each part time-optimally (Tessel IV-C). Where there
  are too few micro-batches for a repetition of its own, the pattern's beginning and end are all there is.
* *search*: what ``pipeplan search`` finds in 10 seconds, and when it found it.
* *time-optimal*: all actions of all micro-batches as one problem, with nothing given but the sequential schedule's
  makespan as an upper bound. Beyond the limit the best found is reported.
* *ratio*: seconds of time-optimal over seconds of composed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from tables import machine, markdown, note
from timed import timed_search

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.schedule.cpsat.repetend import least_period, shortest_way_through
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.cpsat.windows import reschedule
from pipeplan.schedule.pattern import compose, microbatch_by_microbatch, middle_repetition
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph

DEVICES = 4
SEARCH_SECONDS = 10.0


@dataclass(frozen=True)
class Found:
    """A makespan in ns, what is proved about it, whether a repetition fitted, and the seconds it all took."""

    makespan: int
    bound: int
    seconds: float
    repetition: bool = True

    @property
    def proved(self) -> bool:
        return self.makespan == self.bound


def problem_of(name: str, num_microbatches: int) -> OneMicrobatch:
    profile = shape(name, DEVICES, costs=ShapeCosts())
    assert profile.placement is not None
    return OneMicrobatch.of(
        build_workload(profile, profile.placement, num_microbatches=num_microbatches, microbatch_size=1)
    )


def composed(problem: OneMicrobatch, limit: float) -> Found:
    begun, budget, graph = time.perf_counter(), Budget(limit), task_graph(problem.workload)
    least = least_period(problem, budget, limit)
    assert least.pattern is not None
    pattern, _ = shortest_way_through(problem, least.pattern, budget, limit)
    orders = compose(problem, pattern)
    starts = earliest_starts(graph, orders)
    middle = middle_repetition(problem, pattern)
    improved = bool(middle)
    while improved:
        improved = False
        for warmup in (True, False):
            first, last = min(starts[task] for task in middle), max(starts[task] for task in middle)
            begin, end = (0, first) if warmup else (last + 1, None)
            found = reschedule(problem, graph, orders, starts, budget, limit, begin_ns=begin, end_ns=end)
            if found.orders is not None:
                orders, improved = found.orders, True
                starts = earliest_starts(graph, orders)
    makespan = max(start + duration for start, duration in zip(starts, graph.durations, strict=True))
    return Found(makespan, 0, time.perf_counter() - begun, bool(middle))


def searched(problem: OneMicrobatch, limit: float) -> Found:
    found = timed_search(problem.workload, limit, 0)
    return Found(found.schedule.makespan_ns, found.schedule.bound_ns, found.best_seconds)


def time_optimal(problem: OneMicrobatch, limit: float) -> Found:
    begun, graph = time.perf_counter(), task_graph(problem.workload)
    orders = microbatch_by_microbatch(problem)
    starts = earliest_starts(graph, orders)
    found = reschedule(problem, graph, orders, starts, Budget(limit), limit)
    if found.orders is not None:
        starts = earliest_starts(graph, found.orders)
    makespan = max(start + duration for start, duration in zip(starts, graph.durations, strict=True))
    return Found(makespan, makespan if found.exhausted else found.bound_ns or 0, time.perf_counter() - begun)


def bubble_rate(problem: OneMicrobatch, makespan: int) -> float:
    return 1 - sum(problem.work) * problem.num_microbatches / (problem.num_devices * makespan)


def row(name: str, num_microbatches: int, limit: float) -> list[str]:
    problem = problem_of(name, num_microbatches)
    ours, whole, best = composed(problem, limit), searched(problem, SEARCH_SECONDS), time_optimal(problem, limit)
    cells = [
        name.upper(),
        str(num_microbatches),
        f"{bubble_rate(problem, ours.makespan):.1%}" + ("" if ours.repetition else " †"),
        f"{bubble_rate(problem, whole.makespan):.1%}",
        f"{bubble_rate(problem, best.makespan):.1%}" + ("" if best.proved else " ‡"),
        f"{ours.seconds:.2f}",
        f"{whole.seconds:.2f}",
        f"{best.seconds:.2f}" if best.proved else f"over {limit:g}",
        f"{best.seconds / ours.seconds:.1f}" if best.proved else f"over {limit / ours.seconds:.0f}",
    ]
    note(" ".join(cells))
    return cells


HEADER = [
    "shape",
    "micro-batches",
    "bubble rate, composed",
    "search",
    "time-optimal",
    "seconds, composed",
    "search",
    "time-optimal",
    "ratio",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="v,x,m,nn,k")
    parser.add_argument("--microbatches", default="3,4,5,6,7,8")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one search")
    options = parser.parse_args()
    least_period(problem_of("v", 3), Budget(10), 10)  # loads the solver
    rows = [
        row(name, int(count), options.limit)
        for name in options.shapes.split(",")
        for count in options.microbatches.split(",")
    ]
    print(markdown(HEADER, rows))
    print(f"\n† too few micro-batches for a repetition of its own; ‡ not proved in time. {machine()}.")


if __name__ == "__main__":
    main()
