"""The planners we compare with, written small: PipeDream's, DAPPLE's and Piper's, and AutoPipe's slicer.

Here: what the papers' algorithms choose. Not here: our own partitioners (chain, graph).
"""

from pipeplan.partition.baselines.bottleneck import pipedream, piper
from pipeplan.partition.baselines.dapple import dapple

__all__ = ["dapple", "pipedream", "piper"]
