"""The stages of a published planner's plan as loads, so that all planners' plans are simulated alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeplan.partition.autopipe import StageLoads
from pipeplan.partition.published.costs import Integers, Question
from pipeplan.partition.published.stages import PublishedPlan

__all__ = ["stage_loads"]


def stage_loads(question: Question, plan: PublishedPlan) -> StageLoads:
    """Forward and backward of each stage's replicas for one micro-batch; stages run one after another."""
    place = {name: index for index, name in enumerate(question.names)}
    members = [[place[block] for block in stage.blocks] for stage in plan.stages]
    options = [question.options.index(stage.option) for stage in plan.stages]
    return StageLoads(
        _sums(question.forwards, members, options), _sums(question.backwards, members, options), transfer_ns=0
    )


def _sums(times: Integers, members: Sequence[Sequence[int]], options: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(np.sum(times[blocks, option])) for blocks, option in zip(members, options, strict=True))
