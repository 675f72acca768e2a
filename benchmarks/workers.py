"""Searches with one and with several workers: when there is a first plan, and one within 2 % of the final one.

    python benchmarks/workers.py PROFILE CLUSTER [--mini-batch 256] [--limit 60] [--workers 1,2] [--repeat 2]

Prints a Markdown table, a row for each number of workers with the figures of all its runs, which take turns.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from tables import machine, markdown, note

import pipeplan

NEAR = 1.02


def searched(asked: argparse.Namespace, workers: int) -> list[str]:
    """A run's figures: seconds until the first plan and until a near one, the final one, and its candidates."""
    known: list[tuple[float, int]] = []

    def hear(what: str, iteration_ns: int, bound_ns: int, seconds: float) -> None:
        if iteration_ns:
            known.append((seconds, iteration_ns))

    result = pipeplan.search(
        asked.profile,
        cluster=asked.cluster,
        mini_batch=asked.mini_batch,
        time_limit=asked.limit,
        workers=workers,
        progress=hear,
    )
    final, counts = result.plan.predicted.iteration_ns, result.candidates
    near = next(seconds for seconds, iteration_ns in known if iteration_ns <= NEAR * final)
    note(f"{workers} workers: {final / 1e9:.3f} s")
    return [
        f"{known[0][0]:.2f}",
        f"{near:.2f}",
        f"{final / 1e9:.3f} s",
        str(counts.looked_at),
        str(counts.refuted),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("profile")
    parser.add_argument("cluster")
    parser.add_argument("--mini-batch", type=int, default=256)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--repeat", type=int, default=2)
    asked = parser.parse_args()
    runs = defaultdict[int, list[list[str]]](list)
    for _ in range(asked.repeat):
        for count in map(int, asked.workers.split(",")):
            runs[count].append(searched(asked, count))
    header = ["workers", "first plan, s", "within 2 %, s", "final plan", "looked at", "refuted of these"]
    print(markdown(header, [[str(n), *map(", ".join, zip(*own, strict=True))] for n, own in runs.items()]))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
