"""What things cost: blocks between measured sizes, operators by closed forms, links, stages, training state.

Here: a profile and a placement become a workload; ``uniform/`` has closed forms of whole jobs. Not here: measuring
(runtime.profiling), the figures of devices and clusters (catalog), what follows from costs in time (workload).
"""

from pipeplan.costs.blocks import UNLIMITED, StageCost, TiedShare, block_costs, held_part
from pipeplan.costs.communication import transfer_time
from pipeplan.costs.recipes import state_of, step_bytes, with_recipe
from pipeplan.costs.shared import sum_time, with_syncs
from pipeplan.costs.stages import block_columns, build_workload, can_split, group_costs, stage_costs

__all__ = [
    "UNLIMITED",
    "StageCost",
    "TiedShare",
    "block_columns",
    "block_costs",
    "build_workload",
    "can_split",
    "group_costs",
    "held_part",
    "stage_costs",
    "state_of",
    "step_bytes",
    "sum_time",
    "transfer_time",
    "with_recipe",
    "with_syncs",
]
