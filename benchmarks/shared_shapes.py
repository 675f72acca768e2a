"""Shapes with blocks shared by all devices: the search beside Tessel's own construction and its 1F1B+.

Tessel's construction is the best repetend, then time-optimal warmup and cooldown around one repetition (IV-B, IV-C),
as benchmarks/time_optimal.py composes it. 1F1B+ is VI-A's; it does not exist for K. Forward 1, backward 3, shared 1
and 1, no memory cap. With ``--memory`` the search alone, with room for a quarter, a half and all of the micro-batches
that the repetend reaches over (1.5 times the devices, 0.75 for K), and for any number. There are 3 micro-batches for
each device up to 8, and 2 beyond. Costs are tenfold then, so that ``--comm 1`` is a tenth of a forward; ``--split``
runs input gradients of 20, with what is computed again, and weight gradients of 10 apart.

    python benchmarks/shared_shapes.py [--limit 20]
    python benchmarks/shared_shapes.py --memory [--devices 4,8,16,32] [--shapes m,mllm,nn,k] [--parts 0.25,0.5,1,none]
        [--limit 5] [--split] [--comm 1] [--work]

With ``--work`` a search has so many seconds of the process's work, by one worker, which a busy machine does not change.
Loops are compiled before, as a command after the first one finds them; the first has plain ones for 10 to 16 s.
At the end is what is missed of: no cell without limit that is not proved, repeats, and holds no more than the repetend
needs; M proved everywhere; gaps of the others of at most 5 % at a quarter and all of the span, and 12 % at half of it,
on up to 32 devices, and 10, 10 and 15 % beyond; a quarter proved on up to 8. The exit code is then 1.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from importlib.util import find_spec

from tables import machine, markdown, note
from time_optimal import composed

from pipeplan.costs import build_workload
from pipeplan.errors import InfeasibleError
from pipeplan.examples import ShapeCosts, shape
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget, load_solver
from pipeplan.schedule.search import search_schedule
from pipeplan.time_limit import WorkClock
from pipeplan.workload.compiled_span import compile_loops
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph

COSTS = ShapeCosts(1, 3, shared_forward_ns=1, shared_backward_ns=1)


def one_forward_one_backward_plus(problem: OneMicrobatch) -> int | None:
    """Its makespan in ns; None where it does not apply."""
    classic, graph = CLASSIC["1f1b+"], task_graph(problem.workload)
    if classic.applies(problem) is not None:
        return None
    return max(map(sum, zip(earliest_starts(graph, classic.orders(problem, graph)), graph.durations, strict=True)))


def row(name: str, devices: int, microbatches: int, limit: float) -> tuple[str, ...]:
    profile = shape(name, devices, costs=COSTS)
    assert profile.placement is not None
    workload = build_workload(profile, profile.placement, num_microbatches=microbatches, microbatch_size=1)
    problem = OneMicrobatch.of(workload)
    plus, tessel = one_forward_one_backward_plus(problem), composed(problem, limit).makespan
    found = search_schedule(workload, Budget(limit))
    assert found.makespan_ns <= min(tessel, plus or tessel)
    cells = (
        name.upper(),
        str(devices),
        str(microbatches),
        str(plus) if plus is not None else "-",
        str(tessel),
        str(found.makespan_ns),
        str(found.bound_ns),
        f"{found.makespan_ns / found.bound_ns - 1:.1%}",
        f"{found.seconds:.1f}",
    )
    note(" | ".join(cells))
    return cells


def limited_row(name: str, devices: int, part: float | None, options: argparse.Namespace) -> tuple[str, ...]:
    """A search within a part of the span's memory, None: in any."""
    microbatches = (3 if devices <= 8 else 2) * devices
    reach = math.ceil(devices * (0.75 if name == "k" else 1.5))
    room = None if part is None else max(1, math.ceil(part * devices * (0.75 if name == "k" else 1.5)))
    costs = replace(COSTS, forward_ns=10, backward_ns=30, shared_forward_ns=10, shared_backward_ns=10)
    if options.split:
        costs = replace(costs, backward_ns=None, input_grad_ns=20, weight_grad_ns=10)
    profile = shape(name, devices, costs=replace(costs, comm_ns=options.comm, activation_bytes=1))
    assert profile.placement is not None
    workload = build_workload(
        profile,
        profile.placement,
        num_microbatches=microbatches,
        microbatch_size=1,
        split_backward=options.split,
        memory_bytes=[room] * devices,
    )
    budget = Budget(options.limit, clock=WorkClock(), workers=1) if options.work else Budget(options.limit)
    try:
        found = search_schedule(workload, budget)
    except InfeasibleError:
        return (name.upper(), str(devices), str(microbatches), str(room), *["does not fit"] * 6)
    gap = found.makespan_ns / found.bound_ns - 1
    cells = (
        name.upper(),
        str(devices),
        str(microbatches),
        "any" if room is None else str(room),
        f"{found.makespan_ns / 10:g}",
        f"{found.bound_ns / 10:g}",
        f"{gap:.1%}",
        "yes" if found.repeats else "no",
        str(found.most_bytes),
        f"{found.seconds:.1f}",
    )
    note(" | ".join(cells))
    said = f"{name.upper()} on {devices} with room for {cells[3]}"
    if part is None:
        if not (found.optimal and found.repeats and found.most_bytes <= reach):
            MISSED.append(f"{said}: gap {cells[6]}, repeats: {cells[7]}, {found.most_bytes} in flight, {reach} needed")
        return cells
    asked = 0.0 if name == "m" or (part == 0.25 and devices <= 8) else ASKED[devices > 32][part]
    if gap > asked + 0.0005:
        MISSED.append(f"{said}: {cells[6]}, {asked:.0%} asked")
    return cells


ASKED = ({0.25: 0.05, 0.5: 0.12, 1.0: 0.05}, {0.25: 0.10, 0.5: 0.15, 1.0: 0.10})
"""Gaps at parts of the span on up to 32 devices, and on more."""
MISSED: list[str] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds per search, and for the construction")
    parser.add_argument("--memory", action="store_true", help="with little memory")
    parser.add_argument("--devices", default="4,8,16,32", help="with --memory")
    parser.add_argument("--shapes", default="m,mllm,nn,k", help="with --memory")
    parser.add_argument("--parts", default="0.25,0.5,1", help="of the span, with --memory; none: any memory")
    parser.add_argument("--split", action="store_true", help="weight gradients apart, with --memory")
    parser.add_argument("--comm", type=int, default=0, help="tenths of a forward that messages take, with --memory")
    parser.add_argument("--work", action="store_true", help="limits are of the process's work, with --memory")
    options = parser.parse_args()
    limit = options.limit
    load_solver()
    if options.memory:
        if find_spec("numba") is not None:
            compile_loops()
        sizes, names = [*map(int, options.devices.split(","))], options.shapes.split(",")
        parts = [None if part == "none" else float(part) for part in options.parts.split(",")]
        limited = [limited_row(name, d, part, options) for name in names for d in sizes for part in parts]
        header = (
            "shape",
            "devices",
            "micro-batches",
            "room",
            "ours",
            "bound",
            "gap",
            "repeats",
            "in flight",
            "seconds",
        )
        print(markdown(header, limited))
        of = "the process's work" if options.work else "the clock"
        print(f"\nMakespans in units of a chain block's forward, {limit:g} s of {of} per search; {machine()}.")
        if MISSED:
            print("\nmissed:", *MISSED, sep="\n* ")
            raise SystemExit(1)
        return
    rows = [row(name, d, n, limit) for name in ("m", "mllm", "nn", "k") for d in (4, 8) for n in (16, 64)]
    titles = ("shape", "devices", "micro-batches", "1F1B+", "Tessel's", "ours", "bound", "gap", "seconds")
    print(markdown(titles, rows))
    print(f"\nMakespans in units of a chain block's forward, {limit:g} s per search; {machine()}.")


if __name__ == "__main__":
    main()
