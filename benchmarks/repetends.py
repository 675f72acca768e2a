"""Seconds up to a proved repetend: every shape of the literature on 4 to 128 devices.

    python benchmarks/repetends.py                     # prints the table of docs/benchmarks/repetends.md
    python benchmarks/repetends.py --devices 4,8 --runs 1

Forward 1 ms, backward 3 ms (ZB: input and weight gradient 1 ms each), shared blocks 1 and 1 ms, no memory cap. The
clock starts before the problem is built and stops when the least period is proved; loading the solver's library
(once per process) is left out. Each entry is the median of some runs with different seeds.
"""

from __future__ import annotations

import argparse
import statistics
import time

from tables import machine, markdown, note

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.schedule.cpsat.repetend import least_period
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.workload.one_microbatch import OneMicrobatch

MS = 1_000_000
SPLIT = ShapeCosts(input_grad_ns=MS, weight_grad_ns=MS)
SHAPES: dict[str, tuple[str, ShapeCosts, int | None]] = {
    "V": ("v", ShapeCosts(), None),
    "X": ("x", ShapeCosts(), None),
    "M": ("m", ShapeCosts(), None),
    "MLLM": ("mllm", ShapeCosts(), None),
    "NN": ("nn", ShapeCosts(), None),
    "K": ("k", ShapeCosts(), None),
    "circular, 4 chunks": ("circular", ShapeCosts(), 4),
    "ZB (F, I, W)": ("v", SPLIT, None),
    "ZB-V": ("zbv", SPLIT, None),
}


def seconds_to_proof(title: str, num_devices: int, seed: int, limit: float) -> float | None:
    """Seconds of one search, None if nothing was proved in time."""
    name, costs, chunks = SHAPES[title]
    profile = shape(name, num_devices, chunks=chunks, costs=costs)
    assert profile.placement is not None
    workload = build_workload(
        profile,
        profile.placement,
        num_microbatches=4 * num_devices,
        microbatch_size=1,
        split_backward=costs is SPLIT,
    )
    begun = time.perf_counter()
    found = least_period(OneMicrobatch.of(workload), Budget(limit, seed), limit)
    return time.perf_counter() - begun if found.proved else None


def entry(title: str, num_devices: int, runs: int, limit: float) -> str:
    found = [seconds_to_proof(title, num_devices, seed, limit) for seed in range(runs)]
    proved = [seconds for seconds in found if seconds is not None]
    if len(proved) < len(found):
        return f"{len(found) - len(proved)} of {runs} not in {limit:g}"
    text = f"{statistics.median(proved):.3f}"
    note(f"{title}, {num_devices} devices: {text} s (from {min(proved):.3f} to {max(proved):.3f})")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="4,8,16,32,128")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one search")
    options = parser.parse_args()
    seconds_to_proof("V", 4, 0, options.limit)  # loads the solver
    rows = [
        [str(count), *(entry(title, count, options.runs, options.limit) for title in SHAPES)]
        for count in map(int, options.devices.split(","))
    ]
    print(markdown(["devices", *SHAPES], rows))
    print(f"\nSeconds, median of {options.runs}; {machine()}.")


if __name__ == "__main__":
    main()
