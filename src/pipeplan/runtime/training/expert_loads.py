"""Which experts words choose, counted by all ranks of a run."""

from __future__ import annotations

from collections.abc import Iterable

from pipeplan.runtime.executor.process_groups import AllRanks
from pipeplan.runtime.executor.rank_program import StagePart
from pipeplan.runtime.executor.stage import StageRunner
from pipeplan.runtime.launch.job import ExpertLoad
from pipeplan.workload.mesh import EXPERTS, PLACES, SAMPLES, SHARDS


def expert_loads(stages: Iterable[StageRunner], ranks: AllRanks) -> tuple[ExpertLoad, ...]:
    """What all ranks have counted of each block until now, the same on each. Collective.

    Of ranks that have the same words the first one counts.
    """
    own = {
        block: (each.chosen.tolist(), int(each.dropped), int(each.own), float(each.busiest), float(each.average))
        for stage in stages
        for block, each in stage.word_counts.items()
        if _has_words_of_its_own(stage.part, stage.part.blocks.index(block))
    }
    everyones = ranks.gather(own)
    found = []
    for block in dict.fromkeys(block for counts in everyones for block in counts):
        those = {rank: counts[block] for rank, counts in enumerate(everyones) if block in counts}
        chosen, dropped, rows, busiest, average = zip(*those.values(), strict=True)
        tokens, left_out = tuple(map(sum, zip(*chosen, strict=True))), sum(dropped)
        taken = 1 - left_out / max(1, sum(tokens))  # averages are of these; estimates know nothing of what is left out
        factor = taken * sum(busiest) / max(1.0, sum(average))
        found.append(ExpertLoad(block, tokens, tuple(those), rows, left_out, factor))
    return tuple(found)


def _has_words_of_its_own(part: StagePart, number: int) -> bool:
    """Whether no rank before this one has the same words of a block: those that split it have, but where each has
    samples or places of its own; and where a stage shares experts, its shards have slices of the sequence.
    """
    own = {SAMPLES, PLACES, EXPERTS, *([SHARDS] if part.shares[number].experts else [])}
    return all(axis.place(part.place) == 0 for name, axis in part.meshes[number].named if name not in own)
