"""Stages of any form whose blocks are each split in a way of its own: a point of the stage's own cost frontier."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.costs import StageCost
from pipeplan.model import PlacedStage
from pipeplan.partition.block_splits import GroupSplits
from pipeplan.planner.candidates import PlacementCandidate
from pipeplan.planner.strategies import split_blocks

__all__ = ["StageSplits"]


@dataclass(slots=True)
class StageSplits:
    """The cost frontiers of stages of a profile."""

    known: GroupSplits

    def split(self, candidate: PlacementCandidate, memory_bytes: int | None) -> PlacementCandidate | None:
        """The candidate with every stage on several devices at the quickest point of its frontier that memory allows.

        The k-th stage from the end holds k micro-batches in flight. None where no stage has such a point.
        """
        stages = list(candidate.placement.stages)
        given: dict[int, StageCost] = {}
        for place, stage in enumerate(stages):
            in_flight = min(len(stages) - place, candidate.batch.num_microbatches)
            size = stage.microbatch_size or candidate.batch.microbatch_size
            found = self._quickest(stage, size, in_flight, candidate.batch.mini_batch // size, memory_bytes)
            if found is not None:
                stages[place], given[place] = found
        if not given:
            return None
        placement = candidate.placement.model_copy(update={"stages": tuple(stages)})
        return replace(candidate, placement=placement, source=f"{candidate.source}, split", given=given)

    def _quickest(
        self, stage: PlacedStage, size: int, in_flight: int, num_microbatches: int, memory_bytes: int | None
    ) -> tuple[PlacedStage, StageCost] | None:
        if len(stage.devices) == 1:
            return None
        limit, chosen = float("inf") if memory_bytes is None else memory_bytes, set(stage.blocks)
        points = [
            splits.holding(in_flight).quickest([name for name in splits.order if name in chosen], limit)
            for splits in self.known.of(len(stage.devices), size, num_microbatches, (False, True))
        ]
        point = min((each for each in points if each is not None), key=lambda each: each.time_ns, default=None)
        if point is None:
            return None
        split = split_blocks(point.model, point.strategy)
        ways = {
            "blocks": split.blocks,
            "configurations": split.configurations,
            "shards": len(stage.devices),
            "replicas": 1,
            "recompute": point.recompute,
        }
        return stage.model_copy(update=ways), split.costs
