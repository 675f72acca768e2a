"""The planners we compare with, written small: PipeDream's, DAPPLE's and Piper's."""

from pipeplan.partition.baselines.bottleneck import pipedream, piper
from pipeplan.partition.baselines.dapple import dapple

__all__ = ["dapple", "pipedream", "piper"]
