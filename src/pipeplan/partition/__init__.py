"""Which blocks form a stage, and on which devices.

Here: cutting chains and graphs, placement strategies, mapping onto a cluster. Not here: how a stage's blocks are split
over its devices (sharding), when a stage runs (schedule), which of several placements is best (planning).
"""

from pipeplan.partition.chain.kernel import balanced_split
from pipeplan.partition.placement import STRATEGIES, can_spread, place
from pipeplan.partition.submodules import Submodule, place_submodules

__all__ = ["STRATEGIES", "Submodule", "balanced_split", "can_spread", "place", "place_submodules"]
