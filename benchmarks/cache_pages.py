"""What a decode step's attention takes where caches stand in one piece, and where pages of them are gathered before it.

    python benchmarks/cache_pages.py         # prints the table of docs/inference.md; a minute, one thread

Torch's attention on CPUs reads keys and values of a request from one piece. Pages are of 16 tokens, in any order, and
gathered by ``index_select`` into memory that is there already.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tables import machine, markdown

from pipeplan.runtime.decoding.attention import attention

_PAGE = 16


def median_us(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times[2:]) / 1000


def row(requests: int, heads: int, words: int, size: int, repeats: int) -> list[str]:
    query = torch.randn(requests, heads, 1, size)
    key, value = (torch.randn(requests, heads, words, size) for _ in range(2))
    whole = median_us(lambda: attention(query, key, value, None, None), repeats)
    count = requests * words // _PAGE
    pages = [torch.randn(count, heads * _PAGE * size) for _ in range(2)]
    rooms = [torch.empty_like(each) for each in pages]
    order = torch.randperm(count)

    def gather() -> None:
        for each, room in zip(pages, rooms, strict=True):
            torch.index_select(each, 0, order, out=room)

    gathered = median_us(gather, repeats)
    what = f"{requests} requests, {heads} heads of {size}, {words:,} tokens"
    return [what, f"{whole:,.0f} us", f"{gathered:,.0f} us", f"{gathered / whole:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(8, 12, 256, 64), (8, 12, 2048, 64), (32, 8, 512, 64), (8, 8, 8192, 128)]
    heads = ["a step", "attention", "gathering pages before it", "of attention"]
    print(markdown(heads, [row(*case, asked.repeats) for case in cases]))
    print(machine())


if __name__ == "__main__":
    main()
