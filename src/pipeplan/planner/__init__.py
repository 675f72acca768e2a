"""Planning: a :class:`Request` in, a result out, from searching, comparing, tuning, and frontiers.

What schedules, partitions and splits stages lives in rooms of its own.
"""

from pipeplan.planner.assembly import assemble
from pipeplan.planner.batch import Batch, resolve_batch
from pipeplan.planner.candidates import PlacementCandidate
from pipeplan.planner.comparison import Comparison, compare
from pipeplan.planner.frontier import frontier_request, search_frontier
from pipeplan.planner.frontier_result import FrontierResult, Mode
from pipeplan.planner.request import Request, Splitting, choose_placement
from pipeplan.planner.result import Result
from pipeplan.planner.search import search_plan
from pipeplan.planner.trials import workloads
from pipeplan.planner.tuning.tuner import Tuning, tune

__all__ = [
    "Batch",
    "Comparison",
    "FrontierResult",
    "Mode",
    "PlacementCandidate",
    "Request",
    "Result",
    "Splitting",
    "Tuning",
    "assemble",
    "choose_placement",
    "compare",
    "frontier_request",
    "resolve_batch",
    "search_frontier",
    "search_plan",
    "tune",
    "workloads",
]
