"""Chains of blocks cut into stages: one kernel for every cut, and AutoPipe's planner on it.

Here: contiguous stages. Not here: which device runs a stage (placement), stages that form a graph (graph).
"""

from pipeplan.partition.chain.autopipe import Cuts, Planned, Timeline, autopipe, plan_chain, timeline
from pipeplan.partition.chain.costs import Fitting

__all__ = ["Cuts", "Fitting", "Planned", "Timeline", "autopipe", "plan_chain", "timeline"]
