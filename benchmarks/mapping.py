"""Devices for the groups of large stage graphs: how long links are busy, and how long that takes to find.

    python benchmarks/mapping.py                  # prints the table of docs/algorithms/mapping.md

1,024 devices: nodes of 8, racks of 8 nodes. Groups are numbered at random, but for the first. What is planted is the
same graph with its groups in a good order on devices 0, 1, 2 ...
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from tables import machine, markdown, note

from pipeplan.files import Cluster, DeviceKind, LinkLevel, Source
from pipeplan.partition.mapping import LinkTime, link_time, mapped

DEVICES, MEGABYTE = 1_024, 1_000_000
LEVELS = (("node", 8, 2_000, 300 * 10**9), ("rack", 64, 5_000, 50 * 10**9), ("network", DEVICES, 10_000, 10 * 10**9))

Edges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Question:
    """Groups in a good order, their edges, and the bytes of each edge and of each group's all-reduce."""

    name: str
    groups: Sequence[int]
    edges: Edges
    sizes: Sequence[int] = (10 * MEGABYTE,)
    sync: int = 100 * MEGABYTE
    shuffled: bool = True


def questions() -> Iterator[Question]:
    draw, chain, four = random.Random(0), list(pairwise(range(256))), [4] * 256
    yield Question("chain of 256 x 4", four, chain, shuffled=False)
    yield Question("chain of 256 x 4, shuffled", four, chain)
    yield Question("chain of 1,024 x 1, shuffled", [1] * 1_024, list(pairwise(range(1_024))))
    yield Question("chain of 256 x 4, edges of 1, 10, 100 MB", four, chain, [size * MEGABYTE for size in (1, 10, 100)])
    yield Question("chain of 256 x 1 to 4, a third left over", [draw.randint(1, 4) for _ in four], chain)
    yield Question("chain of 7 x 146", [146] * 7, list(pairwise(range(7))))
    yield Question("8 branches of 31 x 4", [4] * 250, branches(8, 31))
    yield Question("grid of 16 x 16 x 4, tile by tile", four, grid(16))
    yield Question("random, 4 edges each", four, [(g, h) for g in range(256) for h in draw.sample(range(256), 4)])
    yield Question("random, 30 edges each", four, [(g, h) for g in range(256) for h in draw.sample(range(256), 30)])


def branches(count: int, length: int) -> Edges:
    """Chains of groups side by side, with one group before and one after them."""
    runs = [[0, *range(1 + branch * length, 1 + (branch + 1) * length), 1 + count * length] for branch in range(count)]
    return [pair for run in runs for pair in pairwise(run)]


def grid(side: int) -> Edges:
    """Neighbours in a square, numbered so that each quarter, and each quarter of it, comes as a whole."""

    def number(row: int, column: int) -> int:
        return sum(((row >> bit & 1) << 1 | column >> bit & 1) << 2 * bit for bit in range(side.bit_length()))

    cells = list(product(range(side), repeat=2))
    down = [(number(row, column), number(row + 1, column)) for row, column in cells if row + 1 < side]
    return down + [(number(row, column), number(row, column + 1)) for row, column in cells if column + 1 < side]


def cluster() -> Cluster:
    levels = [
        LinkLevel(name=name, group_size=size, latency_ns=latency, bandwidth_bytes_per_s=rate)
        for name, size, latency, rate in LEVELS
    ]
    kinds = (DeviceKind(name="device", count=DEVICES),)
    return Cluster(name="racks", source=Source(method="estimated"), devices=kinds, levels=tuple(levels))


def in_order(groups: Iterable[int]) -> list[tuple[int, ...]]:
    devices = iter(range(DEVICES))
    return [tuple(next(devices) for _ in range(count)) for count in groups]


def row(question: Question) -> list[str]:
    draw, numbers = random.Random(1), list(range(len(question.groups)))
    if question.shuffled:
        draw.shuffle(numbers)
    planted = {edge: draw.choice(question.sizes) for edge in question.edges if edge[0] != edge[1]}
    planted |= {(h, g): size for (g, h), size in planted.items()}
    traffic = {(numbers[g], numbers[h]): size for (g, h), size in planted.items()}
    groups = [count for _, count in sorted(zip(numbers, question.groups, strict=True))]
    sync, here = [question.sync] * len(groups), cluster()
    begin = time.process_time()
    devices = mapped(groups, traffic, here, sync=sync)
    seconds = time.process_time() - begin
    found = link_time(devices, traffic, here, sync=sync)
    plain = link_time(in_order(groups), traffic, here, sync=sync)
    good = link_time(in_order(question.groups), planted, here, sync=sync)
    note(f"{question.name}: {found} in {seconds:.2f} s")
    return [question.name, told(plain), told(good), told(found), f"{seconds:.2f}"]


def told(time: LinkTime) -> str:
    return f"{time.total_ns / 1e6:,.0f} ({time.busiest_ns / 1e6:,.2f})"


def main() -> None:
    header = ["groups", "0, 1, 2 ...: ms in total (busiest)", "planted", "found", "seconds of one core"]
    print(markdown(header, [row(question) for question in questions()]), end="\n\n")
    print(f"{machine()}.")


if __name__ == "__main__":
    main()
