"""Tessel's Fig. 11 and 12: the steady bubble rate against the repetend's span, and against memory.

    python benchmarks/bubble_rates.py                  # prints the two tables of docs/benchmarks/repetends.md

4 devices, forward 1, backward 3, shared blocks 1 and 1; each chain block's forward holds 1 of memory, and K's shared
one too. Every value is proved; where a search ran out of time it says so.
"""

from __future__ import annotations

import argparse

from tables import machine, markdown, note

from pipeplan.costs import build_workload
from pipeplan.errors import InfeasibleError
from pipeplan.examples import ShapeCosts, shape
from pipeplan.schedule.cpsat.repetend import least_period
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.workload.one_microbatch import OneMicrobatch

DEVICES = 4


def rate(name: str, limit: float, *, memory: int | None = None, max_span: int | None = None) -> str:
    """The steady bubble rate at the least period, as the table has it."""
    profile = shape(name, DEVICES, costs=ShapeCosts(activation_bytes=1))
    assert profile.placement is not None
    workload = build_workload(
        profile, profile.placement, num_microbatches=16, microbatch_size=1, memory_bytes=[memory] * DEVICES
    )
    try:
        problem = OneMicrobatch.of(workload)
    except InfeasibleError:
        return "does not fit"
    found = least_period(problem, Budget(limit), limit, max_span=max_span)
    if found.pattern is None or not found.proved:
        return "out of time"
    value = float(1 - sum(problem.work) / (DEVICES * found.pattern.period))
    text = f"{value:.1%}" if value else "0"
    note(f"{name}, memory {memory}, span {max_span}: {text} in {found.seconds:.1f} s")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="v,x,m,nn,k")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one search")
    options = parser.parse_args()
    shapes = options.shapes.split(",")
    spans, memories = range(1, 8), range(1, 8)
    by_span = [[name.upper(), *(rate(name, options.limit, max_span=span) for span in spans)] for name in shapes]
    by_memory = [[name.upper(), *(rate(name, options.limit, memory=memory) for memory in memories)] for name in shapes]
    print(markdown(["span at most", *map(str, spans)], by_span), end="\n\n")
    print(markdown(["memory per device", *map(str, memories)], by_memory), end="\n\n")
    print(f"{machine()}.")


if __name__ == "__main__":
    main()
