"""What it brings that stages may split each block in a way of its own: the same cuts with all blocks of a stage alike.

python benchmarks/stage_frontiers.py
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from pipeplan.costs.clusters import named_cluster
from pipeplan.examples import model
from pipeplan.partition.per_block_sharding import BlockSplits, GroupSplits
from pipeplan.partition.stage_frontier import StageFrontiers

MODELS = ("tessel-gpt-11b", "tessel-mt5-1.8b", "mmt")
DEVICES, SIZE, NUMBER = 8, 4, 32
STEP = 0.92


class Alike(GroupSplits):
    """No stage splits its blocks in ways of their own."""

    def of(self, *_: object) -> list[BlockSplits]:
        return []


def promised(stages: StageFrontiers, limit: int) -> int | None:
    """Ns of the best partition's iteration, were all its stages as slow as the slowest; None where nothing fits."""
    found = stages.fastest(DEVICES, limit, most=1)
    return found[0].slowest_ns * (NUMBER + found[0].num_stages - 1) if found else None


def main() -> None:
    cluster = named_cluster("tensoropt", DEVICES)
    print("| profile | memory limits | shorter with splits: at how many | median | most |")
    print("|---|---|---|---|---|")
    for name in MODELS:
        profile = model(name, shards=(1, 2, 4))
        own = StageFrontiers(profile, SIZE, NUMBER, DEVICES, (False, True), cluster)
        alike = replace(own, known=Alike(profile, cluster))
        limit, gains = max(cut.memory_bytes for cut in alike.fastest(DEVICES, None)), []
        while (time := promised(own, limit)) is not None:
            before = promised(alike, limit)
            if before is not None:
                gains.append(1 - time / before)
            limit = int(STEP * limit)
        cells = [name, len(gains), sum(gain > 0 for gain in gains), f"{median(gains):.1%}", f"{max(gains):.1%}"]
        print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
