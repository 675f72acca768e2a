"""Which blocks form a stage, and on which devices."""

from pipeplan.partition.chain.kernel import balanced_split
from pipeplan.partition.placement import STRATEGIES, can_spread, place
from pipeplan.partition.submodules import Submodule, place_submodules

__all__ = ["STRATEGIES", "Submodule", "balanced_split", "can_spread", "place", "place_submodules"]
