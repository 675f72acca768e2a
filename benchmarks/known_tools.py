"""Makespans on chains with little memory beside what known tools reach.

All stages F = I = W = 100 per device, communication 10 on every hop; memory in multiples of p, where 1p is room for as
many micro-batches' activations as there are devices. The known figures were measured by running the tools: 1F1B, the
zero-bubble schedules ZB1P, ZB2P, ZB-V and their automatic ones under a memory limit.

    python benchmarks/known_tools.py [--limit 20] [--devices 4,8,16]
"""

from __future__ import annotations

import argparse

from grid import MICROBATCHES, VARIANTS, workload
from tables import machine, markdown, note
from timed import timed_search

from pipeplan.schedule.cpsat.solver import load_solver

KNOWN = {  # (chunks, memory in p) -> tool, makespan at p = 4, 8, 16
    (1, 2.0): ("ZB2P", (3930, 10_370, 20_850)),
    (1, 1.0): ("ZB1P", (4020, 10_580, 21_300)),
    (2, 1.0): ("ZB-V", (3880, 10_280, 20_680)),
    (1, 0.75): ("ZB automatic", (5580, 21_680, None)),
    (1, 0.5): ("ZB automatic", (8000, 35_320, None)),
    (2, 0.75): ("", (None, None, None)),
    (2, 0.5): ("", (None, None, None)),
}


def row(chunks: int, memory: float, devices: int, place: int, limit: float) -> list[str]:
    tool, makespans = KNOWN[chunks, memory]
    known = makespans[place]
    found = timed_search(workload(VARIANTS[0], devices, chunks, memory), limit, 0)
    schedule = found.schedule
    makespan, bound = schedule.makespan_ns // 1000, schedule.bound_ns // 1000
    assert known is None or makespan <= known
    cells = [
        f"{devices}, {MICROBATCHES[devices]}",
        "two" if chunks == 2 else "one",
        f"{memory:g}p",
        f"{known:,} ({tool})" if known is not None else "-",
        f"{makespan:,}",
        f"{bound:,}",
        f"{makespan / bound - 1:.1%}",
        f"{found.best_seconds:.1f}",
        f"{schedule.seconds:.1f}",
    ]
    note(" | ".join(cells))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds per search")
    parser.add_argument("--devices", default="4,8,16")
    options = parser.parse_args()
    load_solver()
    chosen = [int(text) for text in options.devices.split(",")]
    rows = [
        row(chunks, memory, devices, list(MICROBATCHES).index(devices), options.limit)
        for devices in chosen
        for chunks, memory in KNOWN
    ]
    header = ["p, N", "chunks", "memory", "known", "ours", "bound", "gap", "best found at, s", "search, s"]
    print(markdown(header, rows))
    print(f"\n{options.limit:g} s per search; {machine()}.")


if __name__ == "__main__":
    main()
