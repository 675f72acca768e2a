"""Shapes with blocks shared by all devices: the search beside Tessel's own construction and its 1F1B+.

Tessel's construction is the best repetend, then time-optimal warmup and cooldown around one repetition (IV-B, IV-C),
as benchmarks/time_optimal.py composes it. 1F1B+ is VI-A's; it does not exist for K. Forward 1, backward 3, shared 1
and 1, no memory cap. With ``--memory`` the search alone, with room for a quarter, a half and all of the micro-batches
that the repetend reaches over (1.5 times the devices, 0.75 for K).

    python benchmarks/shared_shapes.py [--limit 20] [--memory [--devices 4,8,16,32] [--shapes m,mllm,nn,k]]
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from tables import machine, markdown, note
from time_optimal import composed

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget, load_solver
from pipeplan.schedule.search import search_schedule
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


def limited_row(name: str, devices: int, part: float, limit: float) -> tuple[str, ...]:
    """A search within a part of the span's memory."""
    microbatches = (3 if devices <= 8 else 2) * devices
    room = max(1, math.ceil(part * devices * (0.75 if name == "k" else 1.5)))
    profile = shape(name, devices, costs=replace(COSTS, activation_bytes=1))
    assert profile.placement is not None
    workload = build_workload(
        profile,
        profile.placement,
        num_microbatches=microbatches,
        microbatch_size=1,
        memory_bytes=[room] * devices,
    )
    found = search_schedule(workload, Budget(limit))
    gap = found.makespan_ns / found.bound_ns - 1
    numbers = (devices, microbatches, room, found.makespan_ns, found.bound_ns)
    cells = (name.upper(), *map(str, numbers), f"{gap:.1%}", f"{found.seconds:.1f}")
    note(" | ".join(cells))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds per search, and for the construction")
    parser.add_argument("--memory", action="store_true", help="with little memory")
    parser.add_argument("--devices", default="4,8,16,32", help="with --memory")
    parser.add_argument("--shapes", default="m,mllm,nn,k", help="with --memory")
    options = parser.parse_args()
    limit = options.limit
    load_solver()
    if options.memory:
        sizes, names = [*map(int, options.devices.split(","))], options.shapes.split(",")
        limited = [limited_row(name, d, part, limit) for name in names for d in sizes for part in (0.25, 0.5, 1.0)]
        print(markdown(("shape", "devices", "micro-batches", "room", "ours", "bound", "gap", "seconds"), limited))
        print(f"\nMakespans in units of a chain block's forward, {limit:g} s per search; {machine()}.")
        return
    rows = [row(name, d, n, limit) for name in ("m", "mllm", "nn", "k") for d in (4, 8) for n in (16, 64)]
    header = ("shape", "devices", "micro-batches", "1F1B+", "Tessel's", "ours", "bound", "gap", "seconds")
    print(markdown(header, rows))
    print(f"\nMakespans in units of a chain block's forward, {limit:g} s per search; {machine()}.")


if __name__ == "__main__":
    main()
