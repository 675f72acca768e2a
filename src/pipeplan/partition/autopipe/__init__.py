"""AutoPipe: chains balanced at sub-layer grain by the critical path, and leading micro-batches sent in halves."""

from pipeplan.partition.autopipe.memory import Fitting
from pipeplan.partition.autopipe.search import Cuts, Planned, autopipe, plan_chain
from pipeplan.partition.autopipe.simulator import Timeline, timeline
from pipeplan.partition.autopipe.slicer import Sliced, num_to_split, sliced

__all__ = [
    "Cuts",
    "Fitting",
    "Planned",
    "Sliced",
    "Timeline",
    "autopipe",
    "num_to_split",
    "plan_chain",
    "sliced",
    "timeline",
]
