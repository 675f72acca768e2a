"""Makespans on chains with little memory beside what known tools reach.

All stages F = I = W = 100 per device, communication 10 on every hop; memory in multiples of p, where 1p is room for as
many micro-batches' activations as there are devices. The known figures were measured by running the tools: 1F1B, the
zero-bubble schedules ZB1P, ZB2P, ZB-V and their automatic ones under a memory limit.

    python benchmarks/known_tools.py [--limit 20] [--devices 4,8,16]
"""

from __future__ import annotations

import argparse

from tables import machine, markdown, note
from timed import timed_search

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.model.workload import Workload
from pipeplan.schedule.solver import load_solver

ACTIVATION = 2_000_000_000
MICROBATCHES = {4: 12, 8: 32, 16: 64}

KNOWN = {  # (shape, memory in p) -> tool, makespan at p = 4, 8, 16
    ("v", 2.0): ("ZB2P", (3930, 10_370, 20_850)),
    ("v", 1.0): ("ZB1P", (4020, 10_580, 21_300)),
    ("zbv", 1.0): ("ZB-V", (3880, 10_280, 20_680)),
    ("v", 0.75): ("ZB automatic", (5580, 21_680, None)),
    ("v", 0.5): ("ZB automatic", (8000, 35_320, None)),
    ("zbv", 0.75): ("", (None, None, None)),
    ("zbv", 0.5): ("", (None, None, None)),
}


def workload(name: str, devices: int, memory: float) -> Workload:
    costs = ShapeCosts(
        100, None, 100, 100, comm_ns=10, activation_bytes=ACTIVATION, weight_grad_bytes=ACTIVATION // 2
    )
    profile = shape(name, devices, costs=costs)
    assert profile.placement is not None
    return build_workload(
        profile,
        profile.placement,
        num_microbatches=MICROBATCHES[devices],
        microbatch_size=1,
        split_backward=True,
        memory_bytes=[int(memory * devices * ACTIVATION)] * devices,
    )


def row(name: str, memory: float, devices: int, place: int, limit: float) -> list[str]:
    tool, makespans = KNOWN[name, memory]
    known = makespans[place]
    found = timed_search(workload(name, devices, memory), limit, 0)
    schedule = found.schedule
    assert known is None or schedule.makespan_ns <= known
    cells = [
        f"{devices}, {MICROBATCHES[devices]}",
        "two" if name == "zbv" else "one",
        f"{memory:g}p",
        f"{known:,} ({tool})" if known is not None else "-",
        f"{schedule.makespan_ns:,}",
        f"{schedule.bound_ns:,}",
        f"{schedule.makespan_ns / schedule.bound_ns - 1:.1%}",
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
        row(name, memory, devices, list(MICROBATCHES).index(devices), options.limit)
        for devices in chosen
        for name, memory in KNOWN
    ]
    header = ["p, N", "chunks", "memory", "known", "ours", "bound", "gap", "best found at, s", "search, s"]
    print(markdown(header, rows))
    print(f"\n{options.limit:g} s per search; {machine()}.")


if __name__ == "__main__":
    main()
