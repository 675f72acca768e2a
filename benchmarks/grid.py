"""Schedules on a grid of uneven stages and little memory: the search beside the best classic schedule that fits.

Chains with F = I = W = 100 us per device and 10 us on every hop, one and two chunks per device, varied: stages
uneven by up to 30 % either way, short weight gradients, a last stage twice as heavy, a device with half the memory.
Memory is in multiples of p: 1p is room for the activations of as many micro-batches as there are devices.

    python benchmarks/grid.py [--limit 20] [--devices 4,8] [--longer 120] [--memory 0.5,0.75] [--work]

With ``--longer`` a cell that is not proved is searched again for so many seconds, from what was found: the side that
moves was loose. At the end is what is missed of: nine of ten cells on 4 devices proved, and the others within 1 %; and
a mean gap at 0.5p and 0.75p of at most a quarter of that before. The exit code is then 1.
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
from pipeplan.schedule.state import Schedule
from pipeplan.time_limit import WorkClock
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
    parser.add_argument("--memory", default=",".join(f"{each:g}" for each in MEMORY), help="in multiples of p")
    parser.add_argument("--work", action="store_true", help="seconds are of the process's work, by one worker")
    parser.add_argument("--longer", type=float, help="seconds for those that are not proved, once more")
    options = parser.parse_args()
    load_solver()
    rows = [
        _row(variant, devices, chunks, memory, options)
        for devices in map(int, options.devices.split(","))
        for chunks in map(int, options.chunks.split(","))
        for variant in VARIANTS
        for memory in map(float, options.memory.split(","))
    ]
    header = ["p, N", "chunks", "stages", "memory", "best classic that fits", "ours", "ours / classic", "bound", "gap"]
    header += ["search, s", *(["loose"] if options.longer else [])]
    print(markdown(header, rows))
    of = " of work" if options.work else ""
    print(f"\nMakespans in us, {options.limit:g} s{of} per search; {machine()}.")
    for devices, gaps in GAPS.items():
        tight = [gap for memory, gap in gaps if memory < 1] or [0.0]
        proved = f"{sum(gap == 0 for _, gap in gaps)} of {len(gaps)} proved"
        print(f"{devices} devices: {proved}; {sum(tight) / len(tight):.2%} in the mean at 0.5p and 0.75p")
    missed = []
    small = [gap for _, gap in GAPS.get(4, [])]
    if sum(gap > 0 for gap in small) > len(small) / 10 or max(small, default=0.0) > 0.01:
        missed.append("nine of ten cells on 4 devices proved, and the others within 1 %")
    known = [(gap, BEFORE[each]) for each in GAPS.keys() & BEFORE.keys() for memory, gap in GAPS[each] if memory < 1]
    if sum(gap for gap, _ in known) > sum(before for _, before in known) / 4:
        missed.append("a quarter of the mean gap before at 0.5p and 0.75p")
    if missed:
        print("\nmissed:", *missed, sep="\n* ")
        raise SystemExit(1)


BEFORE = {4: 0.066, 8: 0.079}
"""{devices: mean gap at 0.5p and 0.75p} of 2026-11-21, from before bounds by few devices."""

GAPS: dict[int, list[tuple[float, float]]] = {}
"""{devices: (memory in p, gap)}"""


def _row(variant: Variant, devices: int, chunks: int, memory: float, options: argparse.Namespace) -> tuple[str, ...]:
    cell = workload(variant, devices, chunks, memory)
    classic, name = best_classic(cell)
    found = search_schedule(cell, _budget(options.limit, options.work))
    gap = found.makespan_ns / found.bound_ns - 1
    GAPS.setdefault(devices, []).append((memory, gap))
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
        f"{gap:.1%}",
        f"{found.seconds:.1f}",
        *([_loose(cell, found, options)] if options.longer else []),
    )
    note(" | ".join((*row, found.scheduler)))
    return row


def _budget(seconds: float, work: bool) -> Budget:
    return Budget(seconds, clock=WorkClock(), workers=1) if work else Budget(seconds)


def _loose(cell: Workload, found: Schedule, options: argparse.Namespace) -> str:
    """Which side of a gap moves in some seconds more, and to what in us."""
    if found.optimal:
        return "-"
    longer = search_schedule(cell, _budget(options.longer, options.work), known=found)
    plan, bound = longer.makespan_ns < found.makespan_ns, longer.bound_ns > found.bound_ns
    moved = [f"plan ({longer.makespan_ns / 1000:,.0f})"] * plan + [f"bound ({longer.bound_ns / 1000:,.0f})"] * bound
    return (" and ".join(moved) or "neither moves") + (", proved" if longer.optimal else "")


if __name__ == "__main__":
    main()
