"""Which blocks form a stage, and on which devices."""

from pipeplan.partition.balance import balanced_split
from pipeplan.partition.strategies import STRATEGIES, can_spread, place

__all__ = ["STRATEGIES", "balanced_split", "can_spread", "place"]
