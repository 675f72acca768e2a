"""The planners we compare with, written small: PipeDream's, DAPPLE's and Piper's."""

from pipeplan.partition.published.costs import Option, Question
from pipeplan.partition.published.dapple import dapple
from pipeplan.partition.published.pipedream import pipedream
from pipeplan.partition.published.piper import piper
from pipeplan.partition.published.stages import PublishedPlan, PublishedStage
from pipeplan.partition.published.timing import stage_loads

__all__ = ["Option", "PublishedPlan", "PublishedStage", "Question", "dapple", "pipedream", "piper", "stage_loads"]
