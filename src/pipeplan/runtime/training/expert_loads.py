"""Which experts words choose, counted by all ranks of a run."""

from __future__ import annotations

from collections.abc import Iterable

from pipeplan.runtime.executor.process_groups import AllRanks
from pipeplan.runtime.executor.stage import StageRunner
from pipeplan.runtime.launch.job import ExpertLoad


def expert_loads(stages: Iterable[StageRunner], ranks: AllRanks) -> tuple[ExpertLoad, ...]:
    """What all ranks have counted of each block until now, the same on each. Collective.

    Where ranks split a block, and do not share its experts, all of them have the same words, and the first one counts.
    """
    own = {
        block: (each.chosen.tolist(), int(each.dropped), int(each.own), float(each.busiest), float(each.average))
        for stage in stages
        for block, each in stage.word_counts.items()
        if stage.part.shares[stage.part.blocks.index(block)].experts or stage.part.place == 0
    }
    everyones = ranks.gather(own)
    found = []
    for block in dict.fromkeys(block for counts in everyones for block in counts):
        those = {rank: counts[block] for rank, counts in enumerate(everyones) if block in counts}
        chosen, dropped, rows, busiest, average = zip(*those.values(), strict=True)
        found.append(
            ExpertLoad(
                block,
                tuple(map(sum, zip(*chosen, strict=True))),
                tuple(those),
                rows,
                sum(dropped),
                sum(busiest) / max(1.0, sum(average)),
            )
        )
    return tuple(found)
