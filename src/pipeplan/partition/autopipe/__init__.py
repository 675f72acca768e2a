"""AutoPipe: chains balanced at sub-layer grain by the critical path, and leading micro-batches sent in halves."""

from pipeplan.partition.autopipe.balance import Balance
from pipeplan.partition.autopipe.loads import Cuts, Loads, StageLoads, line_costs
from pipeplan.partition.autopipe.memory import Fitting
from pipeplan.partition.autopipe.search import Planned, plan_chain, plan_depths
from pipeplan.partition.autopipe.simulator import Timeline, timeline
from pipeplan.partition.autopipe.slicer import Sliced, num_to_split, sliced

__all__ = [
    "Balance",
    "Cuts",
    "Fitting",
    "Loads",
    "Planned",
    "Sliced",
    "StageLoads",
    "Timeline",
    "line_costs",
    "num_to_split",
    "plan_chain",
    "plan_depths",
    "sliced",
    "timeline",
]
