"""What heuristic elimination loses: small graphs that it is forced on, against full enumeration.

Every pair of nodes is joined, and branch elimination is forbidden, so that nothing else takes the graph apart. The loss
at a memory is how much longer the quickest strategy found takes than the quickest there is; memories are those of the
exact frontier that the found one reaches, and how many it does not reach is a column of its own.

    python benchmarks/frontier_heuristics.py
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import references.cost_graphs as graphs  # beside the tests, which it serves, too
from pipeplan.sharding.tracking import track

_GRAPHS = 40


def losses(num_nodes: int, num_configurations: int, seed: int) -> tuple[list[float], int, int]:
    """Losses at the memories reached, how many are not, and operators held to a choice."""
    rng = np.random.default_rng(seed)
    graph = graphs.graph_of(rng, [num_configurations] * num_nodes, graphs.complete(num_nodes), high=1000)
    exact = graphs.enumerate_frontier(graph)
    found = track(graph, merged=1)
    points = list(zip(found.memory_bytes.tolist(), found.time_ns.tolist(), strict=True))
    best = [min((t for m, t in points if m <= memory), default=None) for memory, _ in exact]
    lost = [reached / time - 1 for reached, (_, time) in zip(best, exact, strict=True) if reached is not None]
    return lost, best.count(None), found.eliminations["heuristic"]


def main() -> None:
    print("| operators | configurations | held to a choice | median loss | 95th percentile | largest | not reached |")
    print("|---|---|---|---|---|---|---|")
    for num_nodes, num_configurations in ((4, 3), (4, 6), (5, 3), (5, 5), (6, 3), (6, 4)):
        results = [losses(num_nodes, num_configurations, seed) for seed in range(_GRAPHS)]
        lost = sorted(loss for found, _, _ in results for loss in found)
        missed = sum(missing for _, missing, _ in results)
        held = max(number for _, _, number in results)
        at = [statistics.median(lost), lost[int(0.95 * (len(lost) - 1))], lost[-1]]
        cells = [num_nodes, num_configurations, held, *(f"{loss:.1%}" for loss in at)]
        print("|", " | ".join(map(str, [*cells, f"{missed / (missed + len(lost)):.0%}"])), "|")


if __name__ == "__main__":
    main()
