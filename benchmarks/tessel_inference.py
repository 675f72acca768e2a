"""Tessel's Flava inference (VI-D, Fig. 15): latency and throughput of Tessel's repetend, 1F1B, tensor parallelism.

    python benchmarks/tessel_inference.py [--devices 4] [--sizes 1,2,4] [--counts 1,2,4,8,16,32,64,128] [--limit 4]
        [--kept pieces.jsonl --part-seconds 90]
    python benchmarks/tessel_inference.py --counts 1,2,4,8,16,128 --sizes 1 --texts 77,197 --links 150,25,12.5

Prints Markdown tables. Costs are estimated for V100s of 32 GB and iterations simulated: nothing is measured. A row is a
micro-batch size and a number of micro-batches that arrive together: latency is the time until the last of them is done,
throughput the samples of all over that time. Tensor parallelism is one stage whose blocks all devices split; 1F1B a
chain of one stage on each device, with the branches one after the other; Tessel the K-shape, with the branches beside
each other on halves of the devices, each cut as evenly as its blocks allow, and the cross-encoder split over all of
them. 8 and more devices are not in the paper. With ``--texts`` or ``--links`` it prints what is best within the budget
where texts have so many tokens (the paper has no lengths), and links between devices carry so many GB/s each way.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from resumed import Paused, Pieces, resumable
from tables import machine, markdown, note

import pipeplan
from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import InfeasibleError, SearchTimeoutError, UsageError
from pipeplan.examples.models import MODELS, model
from pipeplan.files import Block, Cluster, PlacedStage, Placement, Profile

SIDES: dict[str, dict[str, Any]] = {
    "tensor parallel": {"pp": 1, "scheduler": "gpipe", "shard_shared": "no"},
    "1F1B": {"tp": 1, "placement": "sequential", "scheduler": "1f1b", "shard_shared": "no"},
    "Tessel": {"scheduler": "repetend"},
}
BUDGET_MS = 400.0


class World(NamedTuple):
    """Tokens of a text, and GB/s of links between devices of a server; 0 is as in the catalog."""

    text: int = 0
    links: float = 0.0

    def cluster(self, devices: int) -> Cluster:
        """The paper's, with these links."""
        found = named_cluster("tessel", devices)
        if not self.links:
            return found
        inside = found.levels[0].model_copy(update={"bandwidth_bytes_per_s": round(1e9 * self.links)})
        return found.model_copy(update={"levels": (inside, *found.levels[1:])})

    def profile(self, cluster: Cluster, size: int) -> Profile:
        """Flava with such texts."""
        usual = MODELS["tessel-flava"]
        own = {"sequence": self.text} if self.text else {}
        shards = [number for number in (1, 2, 4, 8, 16, 32) if number <= cluster.num_devices]
        paper = replace(usual, dimensions={**usual.dimensions, **own})
        how: dict[str, Any] = {"microbatch_sizes": (size,), "shards": shards, "cluster": cluster}
        return model(paper, device="v100-32gb", inference=True, **how)


def searched(devices: int, side: str, size: int, count: int, seconds: float, world: World) -> dict[str, float] | None:
    """Ms until all is done, samples per second and peak bytes; None where nothing fits or is found."""
    cluster = world.cluster(devices)
    profile = world.profile(cluster, size)
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


def rows_of(
    pieces: Pieces, devices: int, sizes: list[int], counts: list[int], seconds: float, world: World
) -> Iterator[dict[str, dict[str, float] | None]]:
    """{side: what it reaches}, of each size and count."""
    for size, count in itertools.product(sizes, counts):
        row: dict[str, dict[str, float] | None] = {}
        for side in SIDES:
            name = f"{side}, {devices} devices, {count} x {size}, {seconds:g} s"
            name += f", texts of {world.text}, {world.links:g} GB/s" if any(world) else ""
            row[side] = pieces.get(name, partial(searched, devices, side, size, count, seconds, world))
        yield row


def best(rows: list[dict[str, dict[str, float] | None]]) -> list[str]:
    """Of each side within the budget, Tessel's over tensor parallelism's, and over 1F1B's with the most at once."""
    found = [within(rows, side) for side in SIDES]
    return [*map(cell, found), ratio(found[2], found[0]), ratio(rows[-1]["Tessel"], rows[-1]["1F1B"])]


def ratio(one: dict[str, float] | None, other: dict[str, float] | None) -> str:
    """Of throughputs."""
    return "-" if one is None or other is None else f"{one['rate'] / other['rate']:.2f}"


def table(pieces: Pieces, devices: int, sizes: list[int], counts: list[int], seconds: float) -> list[str]:
    """Print the table of a number of devices; the best of each schedule within the budget."""
    lines, rows = [], [*rows_of(pieces, devices, sizes, counts, seconds, World())]
    for (size, count), row in zip(itertools.product(sizes, counts), rows, strict=True):
        over = [ratio(row["Tessel"], row[side]) for side in ("tensor parallel", "1F1B")]
        lines.append([str(size), str(count), *map(cell, row.values()), *over])
    print(f"\n{devices} devices\n")
    heads = ["samples", "micro-batches", *SIDES, "Tessel / tensor parallel", "Tessel / 1F1B"]
    print(markdown(heads, lines), flush=True)
    return [str(devices), *best(rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="4", help="numbers of GPUs")
    parser.add_argument("--sizes", default="1,2,4", help="samples in a micro-batch")
    parser.add_argument("--counts", default="1,2,4,8,16,32,64,128", help="micro-batches")
    parser.add_argument("--limit", type=float, default=4.0, help="seconds of each search")
    parser.add_argument("--texts", default="", help="tokens of a text, each another model; with four devices")
    parser.add_argument("--links", default="", help="GB/s between devices of a server, each another cluster")
    resumable(parser)
    asked = parser.parse_args()
    pieces = Pieces(asked.kept, asked.part_seconds)
    sizes, counts = ([int(each) for each in text.split(",")] for text in (asked.sizes, asked.counts))
    print(machine())
    numbers = [int(each) for each in asked.devices.split(",")]
    texts, links = ([float(each) for each in text.split(",") if text] for text in (asked.texts, asked.links))
    worlds = [World(int(text), rate) for text, rate in itertools.product(texts or [0], links or [0])]
    how = sizes, counts, asked.limit
    heads, found = ["devices"], list[list[str]]()
    try:
        if any(any(world) for world in worlds):
            heads = ["devices", "tokens of a text", "GB/s"]
            for devices, world in itertools.product(numbers, worlds):
                said = [f"{each:g}" if each else "-" for each in world]
                found.append([str(devices), *said, *best([*rows_of(pieces, devices, *how, world)])])
        else:
            found = [table(pieces, each, *how) for each in numbers]
    except Paused as paused:
        note(str(paused))
        return 3
    print(f"\nthe best throughput within {BUDGET_MS:g} ms\n")
    most = f"Tessel / 1F1B, {counts[-1]} x {sizes[-1]}"
    print(markdown([*heads, *SIDES, "Tessel / tensor parallel", most], found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
