"""Stages of a pipeline whose blocks are each split in a way of its own: a point of the stage's own cost frontier."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeplan.costs import StageCosts
from pipeplan.errors import PipeplanError
from pipeplan.frontier.configurations.building import CostModel, CostOptions, cost_model
from pipeplan.frontier.tracking import Tracked, track
from pipeplan.model import PlacedStage, Profile
from pipeplan.planner.candidates import Candidate
from pipeplan.planner.request import Request
from pipeplan.planner.strategies import split_blocks

__all__ = ["StageSplits"]


@dataclass(slots=True)
class StageSplits:
    """The cost frontiers of stages, each tracked once."""

    request: Request
    _known: dict[object, tuple[CostModel, Tracked] | None] = field(default_factory=dict)

    def split(self, candidate: Candidate, memory_bytes: int | None) -> Candidate | None:
        """The candidate with every stage on several devices at the quickest point of its frontier that memory allows.

        The k-th stage from the end holds k micro-batches in flight. None where no stage has such a point.
        """
        stages = list(candidate.placement.stages)
        given: dict[int, StageCosts] = {}
        for place, stage in enumerate(stages):
            in_flight = min(len(stages) - place, candidate.batch.num_microbatches)
            size = stage.microbatch_size or candidate.batch.microbatch_size
            found = self._quickest(stage, size, in_flight, candidate.batch.num_microbatches, memory_bytes)
            if found is not None:
                stages[place], given[place] = found
        if not given:
            return None
        placement = candidate.placement.model_copy(update={"stages": tuple(stages)})
        return replace(candidate, placement=placement, source=f"{candidate.source}, split", given=given)

    def _quickest(
        self, stage: PlacedStage, size: int, in_flight: int, num_microbatches: int, memory_bytes: int | None
    ) -> tuple[PlacedStage, StageCosts] | None:
        if len(stage.devices) == 1:
            return None
        options = CostOptions(blocks=True, in_flight=in_flight, microbatches=num_microbatches)
        key = (stage.blocks, len(stage.devices), size, options)
        if key not in self._known:
            self._known[key] = self._tracked(stage, size, options)
        known = self._known[key]
        if known is None:
            return None
        model, tracked = known
        for point in reversed(range(len(tracked.time_ns))):  # quickest first
            if memory_bytes is None or tracked.memory_bytes[point] <= memory_bytes:
                split = split_blocks(model, tracked.strategy(point))
                if memory_bytes is None or tracked.memory_bytes[point] + split.costs.workspace_bytes <= memory_bytes:
                    ways = {
                        "blocks": split.blocks,
                        "configurations": split.configurations,
                        "shards": len(stage.devices),
                        "replicas": 1,
                        "recompute": False,
                    }
                    return stage.model_copy(update=ways), split.costs
        return None

    def _tracked(self, stage: PlacedStage, size: int, options: CostOptions) -> tuple[CostModel, Tracked] | None:
        """The frontier of a stage's blocks alone; None where their costs cannot be told."""
        try:
            part = _part(self.request.profile, stage.blocks)
            model = cost_model(part, self.request.cluster, len(stage.devices), size, options=options)
            return model, track(model.graph)
        except (PipeplanError, ValueError):  # blocks of unknown kinds or devices, or that make no profile alone
            return None


def _part(profile: Profile, blocks: tuple[str, ...]) -> Profile:
    """The blocks of a stage and the edges between them."""
    chosen = set(blocks)
    return Profile(
        name=profile.name,
        source=profile.source,
        blocks=tuple(block for block in profile.blocks if block.id in chosen),
        edges=tuple(edge for edge in profile.edges if {edge.source, edge.target} <= chosen),
    )
