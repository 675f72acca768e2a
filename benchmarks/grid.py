"""Schedules on a grid of uneven stages and little memory: the search beside the best classic schedule that fits.

Chains with F = I = W = 100 us per device and 10 us on every hop, one and two chunks per device, varied: stages
uneven by up to 30 % either way, short weight gradients, a last stage twice as heavy, a device with half the memory.
Memory is in multiples of p: 1p is room for the activations of as many micro-batches as there are devices.

    python benchmarks/grid.py [--limit 20] [--devices 4,8]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from tables import machine, markdown, note

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget, load_solver
from pipeplan.schedule.search import search_schedule
from pipeplan.workload.memory import overflow
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload

ACTIVATION = 2_000_000_000
MICROBATCHES = {4: 12, 8: 32, 16: 64}
MEMORY = (0.5, 0.75, 1.0, 2.0)


@dataclass(frozen=True)
class Variant:
    """Costs in us, and what is changed about the stages of a workload."""

    name: str
    costs: tuple[int, int, int] = (100, 100, 100)
    factor: Callable[[int, int], float] = lambda stage, stages: 1.0
    small_device: bool = False


def uneven(seed: int) -> Callable[[int, int], float]:
    return lambda stage, stages: 1 + Random(f"{seed} {stage}").uniform(-0.3, 0.3)


VARIANTS = (
    Variant("even"),
    Variant("uneven, first draw", factor=uneven(1)),
    Variant("uneven, second draw", factor=uneven(2)),
    Variant("short W", costs=(100, 160, 40)),
    Variant("heavy last stage", factor=lambda stage, stages: 2.0 if stage == stages - 1 else 1.0),
    Variant("one small device", small_device=True),
)


def workload(variant: Variant, devices: int, chunks: int, memory: float) -> Workload:
    """A cell's workload; times in ns, in whole us."""
    forward, input_grad, weight_grad = (1000 * time for time in variant.costs)
    costs = ShapeCosts(
        forward,
        input_grad_ns=input_grad,
        weight_grad_ns=weight_grad,
        comm_ns=10_000,
        activation_bytes=ACTIVATION,
        weight_grad_bytes=ACTIVATION // 2,
    )
    profile = shape("zbv" if chunks == 2 else "v", devices, costs=costs)
    assert profile.placement is not None
    rooms = [int(memory * devices * ACTIVATION)] * devices
    if variant.small_device:
        rooms[devices // 2] //= 2
    plain = build_workload(
        profile,
        profile.placement,
        num_microbatches=MICROBATCHES[devices],
        microbatch_size=1,
        split_backward=True,
        memory_bytes=rooms,
    )
    stages = len(plain.stages)
    operations = tuple(
        replace(
            operation, duration_ns=round(operation.duration_ns * variant.factor(operation.stage, stages) / 1000) * 1000
        )
        for operation in plain.operations
    )
    return replace(plain, operations=operations)


def best_classic(cell: Workload) -> tuple[int, str]:
    """Makespan in ns and name of the best classic schedule that fits."""
    problem, graph = OneMicrobatch.of(cell), task_graph(cell)
    found = []
    for name, classic in CLASSIC.items():
        if classic.applies(problem) is None:
            orders = classic.orders(problem, graph)
            if overflow(graph, orders) is None:
                starts = earliest_starts(graph, orders)
                found.append((max(map(sum, zip(starts, graph.durations, strict=True))), name))
    return min(found, default=(0, "none fits"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds per search")
    parser.add_argument("--devices", default="4,8")
    parser.add_argument("--chunks", default="1,2")
    options = parser.parse_args()
    load_solver()
    rows = [
        _row(variant, devices, chunks, memory, options.limit)
        for devices in map(int, options.devices.split(","))
        for chunks in map(int, options.chunks.split(","))
        for variant in VARIANTS
        for memory in MEMORY
    ]
    header = ["p, N", "chunks", "stages", "memory", "best classic that fits", "ours", "ours / classic", "bound", "gap"]
    header.append("search, s")
    print(markdown(header, rows))
    print(f"\nMakespans in us, {options.limit:g} s per search; {machine()}.")


def _row(variant: Variant, devices: int, chunks: int, memory: float, limit: float) -> tuple[str, ...]:
    cell = workload(variant, devices, chunks, memory)
    classic, name = best_classic(cell)
    found = search_schedule(cell, Budget(limit))
    assert not classic or found.makespan_ns <= classic
    row = (
        f"{devices}, {MICROBATCHES[devices]}",
        str(chunks),
        variant.name,
        f"{memory:g}p",
        f"{classic / 1000:,.0f} ({name})" if classic else name,
        f"{found.makespan_ns / 1000:,.0f}",
        f"{found.makespan_ns / classic:.3f}" if classic else "",
        f"{found.bound_ns / 1000:,.0f}",
        f"{found.makespan_ns / found.bound_ns - 1:.1%}",
        f"{found.seconds:.1f}",
    )
    note(" | ".join((*row, found.scheduler)))
    return row


if __name__ == "__main__":
    main()
