"""The planners we compare with, written small: PipeDream's, DAPPLE's and Piper's."""

from pipeplan.partition.published.dapple import dapple
from pipeplan.partition.published.pipedream import pipedream
from pipeplan.partition.published.piper import piper

__all__ = ["dapple", "pipedream", "piper"]
