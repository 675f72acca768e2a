"""What things cost: interpolation over micro-batch size, stages, links."""

from pipeplan.costs.blocks import block_costs
from pipeplan.costs.links import transfer_time
from pipeplan.costs.stages import StageCosts, build_workload, can_split, gradient_sync, group_costs, stage_costs

__all__ = [
    "StageCosts",
    "block_costs",
    "build_workload",
    "can_split",
    "gradient_sync",
    "group_costs",
    "stage_costs",
    "transfer_time",
]
