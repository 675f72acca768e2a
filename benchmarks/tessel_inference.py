"""Tessel's Flava inference (VI-D, Fig. 15): latency and throughput of Tessel's repetend, 1F1B, tensor parallelism.

    python benchmarks/tessel_inference.py [--devices 4] [--sizes 1,2,4] [--counts 1,2,4,8,16,32,64,128] [--limit 4]
        [--kept pieces.jsonl --part-seconds 90]

Prints Markdown tables. Costs are estimated for V100s of 32 GB and iterations simulated: nothing is measured. A row is a
micro-batch size and a number of micro-batches that arrive together: latency is the time until the last of them is done,
throughput the samples of all over that time. Tensor parallelism is one stage whose blocks all devices split; 1F1B a
chain of one stage on each device, with the branches one after the other; Tessel the K-shape, with the branches beside
each other on halves of the devices, each cut as evenly as its blocks allow, and the cross-encoder split over all of
them. 8 and more devices are not in the paper.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from resumed import Paused, Pieces, resumable
from tables import machine, markdown, note

import pipeplan
from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import InfeasibleError, SearchTimeoutError, UsageError
from pipeplan.examples import model
from pipeplan.files import Block, PlacedStage, Placement, Profile

SIDES: dict[str, dict[str, Any]] = {
    "tensor parallel": {"pp": 1, "scheduler": "gpipe", "shard_shared": "no"},
    "1F1B": {"tp": 1, "placement": "sequential", "scheduler": "1f1b", "shard_shared": "no"},
    "Tessel": {"scheduler": "repetend"},
}
BUDGET_MS = 400.0


def searched(devices: int, side: str, size: int, count: int, seconds: float) -> dict[str, float] | None:
    """Ms until all is done, samples per second and peak bytes; None where nothing fits or is found."""
    cluster = named_cluster("tessel", devices)
    shards = [number for number in (1, 2, 4, 8, 16, 32) if number <= devices]
    profile = model(
        "tessel-flava", device="v100-32gb", microbatch_sizes=(size,), shards=shards, cluster=cluster, inference=True
    )
    flags: dict[str, Any] = dict(SIDES[side])
    if side == "tensor parallel":
        flags["tp"] = devices
    if side == "Tessel":
        flags["placement"] = k_shape(profile, devices, size)
    try:
        found = pipeplan.search(
            profile,
            cluster=cluster,
            microbatch_size=size,
            microbatches=count,
            time_limit=f"{seconds:g}s",
            **flags,
        )
    except (InfeasibleError, SearchTimeoutError, UsageError) as error:
        note(f"  {side}, {devices} devices, {count} x {size}: {str(error)[:300]}")
        return None
    predicted = found.plan.predicted
    return {
        "ms": predicted.iteration_ns / 1e6,
        "rate": size * count * 1e9 / predicted.iteration_ns,
        "period_ms": (predicted.period_ns or 0) / 1e6,
        "bytes": max(each.peak_bytes for each in predicted.memory),
    }


def k_shape(profile: Profile, devices: int, size: int) -> Placement:
    """Text on the first half of the devices, images on the other, what joins them split over all."""
    half, every = devices // 2, tuple(range(devices))
    branches = [[block for block in profile.blocks if block.id.startswith(name)] for name in ("text", "image")]
    stages = [
        PlacedStage(blocks=blocks, devices=(device,))
        for number, branch in enumerate(branches)
        for device, blocks in zip(every[number * half :], even_cut(branch, half, size), strict=False)
    ]
    joined = tuple(block.id for block in profile.blocks if block.shared)
    stages.append(PlacedStage(blocks=joined, devices=every, shards=devices))
    return Placement(strategy="k", num_devices=devices, stages=tuple(stages))


def even_cut(blocks: Sequence[Block], parts: int, size: int) -> list[tuple[str, ...]]:
    """Neighbouring blocks in so many parts, the slowest of which is as quick as can be."""
    times = [
        next(row.forward_ns for row in block.costs if (row.microbatch_size, row.shards) == (size, 1))
        for block in blocks
    ]
    before = [0, *itertools.accumulate(times)]
    best = {(0, 0): (0, 0)}  # (parts, blocks): the slowest part so far, where it begins
    for part, end in itertools.product(range(1, parts + 1), range(1, len(blocks) + 1)):
        ways = [
            (max(best[part - 1, at][0], before[end] - before[at]), at) for at in range(end) if (part - 1, at) in best
        ]
        if ways:
            best[part, end] = min(ways)
    found, end = [], len(blocks)
    for part in range(parts, 0, -1):
        begin = best[part, end][1]
        found.append(tuple(block.id for block in blocks[begin:end]))
        end = begin
    return found[::-1]


def cell(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['ms']:.0f} ms, {found['rate']:.1f}/s"


def within(rows: list[dict[str, dict[str, float] | None]], side: str) -> dict[str, float] | None:
    """The best throughput of a schedule within the latency budget."""
    fitting = [each for row in rows if (each := row[side]) is not None and each["ms"] <= BUDGET_MS]
    return max(fitting, key=lambda each: each["rate"], default=None)


def table(pieces: Pieces, devices: int, sizes: list[int], counts: list[int], seconds: float) -> list[str]:
    """Print the table of a number of devices; the best of each schedule within the budget."""
    lines, rows = [], []
    for size in sizes:
        for count in counts:
            row: dict[str, dict[str, float] | None] = {}
            for side in SIDES:
                name = f"{side}, {devices} devices, {count} x {size}, {seconds:g} s"
                row[side] = pieces.get(name, partial(searched, devices, side, size, count, seconds))
            rows.append(row)
            ours = row["Tessel"]
            over = [
                "-" if ours is None or (other := row[side]) is None else f"{ours['rate'] / other['rate']:.2f}"
                for side in ("tensor parallel", "1F1B")
            ]
            lines.append([str(size), str(count), *map(cell, row.values()), *over])
    print(f"\n{devices} devices\n")
    heads = ["samples", "micro-batches", *SIDES, "Tessel / tensor parallel", "Tessel / 1F1B"]
    print(markdown(heads, lines), flush=True)
    return [str(devices), *(cell(within(rows, side)) for side in SIDES)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="4", help="numbers of GPUs")
    parser.add_argument("--sizes", default="1,2,4", help="samples in a micro-batch")
    parser.add_argument("--counts", default="1,2,4,8,16,32,64,128", help="micro-batches")
    parser.add_argument("--limit", type=float, default=4.0, help="seconds of each search")
    resumable(parser)
    asked = parser.parse_args()
    pieces = Pieces(asked.kept, asked.part_seconds)
    sizes, counts = ([int(each) for each in text.split(",")] for text in (asked.sizes, asked.counts))
    print(machine())
    try:
        best = [table(pieces, int(each), sizes, counts, asked.limit) for each in asked.devices.split(",")]
    except Paused as paused:
        note(str(paused))
        return 3
    print(f"\nthe best throughput within {BUDGET_MS:g} ms\n")
    print(markdown(["devices", *SIDES], best))
    return 0


if __name__ == "__main__":
    sys.exit(main())
