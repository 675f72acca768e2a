"""What bounds by few devices bring under memory: gaps with the closed-form bounds alone, with one device, with more.

Chains as in grid.py and known_tools.py (F = I = W = 100 us per device, 10 us on every hop), and with durations drawn
for each device between 70 and 120. Memory is in multiples of p.

With ``--alone`` bounds alone, without a search: what so many seconds of work prove, beside a makespan that is known
(:data:`KNOWN`), and by how many devices.

    python benchmarks/few_devices.py [--limit 20] [--cells 0-3]
    python benchmarks/few_devices.py --alone 8
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from random import Random
from time import process_time

from grid import MICROBATCHES, VARIANTS, workload
from tables import machine, markdown, note

from pipeplan.schedule.cpsat.solver import Budget, load_solver
from pipeplan.schedule.search import search_schedule
from pipeplan.workload.bounds import strong_iteration_bound
from pipeplan.workload.few_device_bounds import FewDeviceBounds
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.workload import Workload

CELLS = (
    *((devices, 1, memory, "even") for devices in (4, 8, 16) for memory in (0.5, 0.75, 1.0)),
    *((devices, 2, memory, "even") for devices in (4, 8) for memory in (0.5, 0.75)),
    *((8, 1, memory, f"drawn, {seed}") for memory in (0.5, 0.75) for seed in (1, 2)),
    *((8, 2, memory, "drawn, 1") for memory in (0.5, 1.0)),
)

KNOWN = {  # (devices, chunks, memory in p) -> makespan in us that searches found (known_tools.py)
    (4, 1, 0.5): 6380,
    (4, 1, 0.75): 4660,
    (8, 1, 0.5): 16_240,
    (8, 1, 0.75): 11_740,
    (8, 1, 1.0): 10_580,
    (16, 1, 0.5): 31_880,
    (16, 1, 0.75): 23_340,
    (4, 2, 0.5): 4670,
    (8, 2, 0.5): 11_770,
    (8, 2, 0.75): 10_570,
}


def cell(devices: int, chunks: int, memory: float, stages: str) -> Workload:
    """A chain; ``drawn`` ones have 70 to 120 us for each device's F, I and W apart."""
    plain = workload(VARIANTS[0], devices, chunks, memory)
    if stages == "even":
        return plain
    drawn = Random(stages)
    operations = tuple(replace(each, duration_ns=drawn.randint(70, 120) * 1000) for each in plain.operations)
    return replace(plain, operations=operations)


def one_device(problem: OneMicrobatch) -> int:
    """The best bound of a single device in ns."""
    proofs = FewDeviceBounds(problem)
    while proofs.grow() and proofs.most_devices < 2:
        pass
    return proofs.bound


def row(devices: int, chunks: int, memory: float, stages: str, limit: float) -> list[str]:
    """One cell's cells of the table."""
    found = search_schedule(cell(devices, chunks, memory, stages), Budget(limit))
    problem = OneMicrobatch.of(found.workload)
    bounds = (strong_iteration_bound(problem), one_device(problem), found.bound_ns)
    cells = [f"{devices}, {MICROBATCHES[devices]}", str(chunks), f"{memory:g}p", stages]
    best = (bounds[0], max(bounds[:2]), max(bounds))
    gaps = [f"{bound / 1000:,.0f} ({found.makespan_ns / bound - 1:.1%})" for bound in best]
    cells += [f"{found.makespan_ns / 1000:,.0f}", *gaps, f"{found.seconds:.1f}"]
    note(" | ".join(cells))
    return cells


def alone_row(devices: int, chunks: int, memory: float, seconds: float) -> list[str]:
    """What bounds by few devices prove in so many seconds of work, without a search."""
    problem = OneMicrobatch.of(cell(devices, chunks, memory, "even"))
    known, proofs, begun = KNOWN[devices, chunks, memory], FewDeviceBounds(problem), process_time()
    single = one_device(problem) // 1000
    while proofs.bound < 1000 * known and process_time() - begun < seconds and proofs.grow(1000 * known):
        pass
    closed, bound = strong_iteration_bound(problem) // 1000, proofs.bound // 1000
    gaps = [f"{each:,} ({known / each - 1:.1%})" for each in (closed, max(closed, single), max(closed, bound))]
    cells = [f"{devices}, {MICROBATCHES[devices]}", str(chunks), f"{memory:g}p", f"{known:,}", *gaps]
    cells += [str(proofs.most_devices), f"{process_time() - begun:.1f}"]
    note(" | ".join(cells))
    return cells


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds per search")
    parser.add_argument("--cells", default=f"0-{len(CELLS) - 1}", help="the first and the last cell")
    parser.add_argument("--alone", type=float, help="seconds of work for bounds alone")
    options = parser.parse_args()
    if options.alone is not None:
        header = (
            "p, N",
            "chunks",
            "memory",
            "known",
            "closed forms",
            "one device",
            "few devices",
            "together",
            "work, s",
        )
        print(markdown(header, [alone_row(*each, options.alone) for each in KNOWN]))
        print(f"\nMakespans and bounds in us, gaps in brackets; {machine()}.")
        return
    load_solver()
    first, last = map(int, options.cells.split("-"))
    header = ("p, N", "chunks", "memory", "stages", "ours", "closed forms", "one device", "in the search", "search, s")
    print(markdown(header, [row(*each, options.limit) for each in CELLS[first : last + 1]]))
    print(f"\nMakespans and bounds in us, gaps in brackets; {options.limit:g} s per search; {machine()}.")


if __name__ == "__main__":
    main()
