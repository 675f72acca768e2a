"""What things cost: interpolation over micro-batch size, stages, links."""

from pipeplan.costs.blocks import block_costs
from pipeplan.costs.communication import transfer_time
from pipeplan.costs.stage_cost import UNLIMITED, StageCost
from pipeplan.costs.stages import build_workload, can_split, gradient_sync, group_costs, stage_costs

__all__ = [
    "UNLIMITED",
    "StageCost",
    "block_costs",
    "build_workload",
    "can_split",
    "gradient_sync",
    "group_costs",
    "stage_costs",
    "transfer_time",
]
