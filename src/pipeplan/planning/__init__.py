"""Planning: a :class:`Request` in, a result out, from searching, comparing, tuning, and frontiers.

Here: which candidates there are, how they share the time, and the plan that is built of the best. Not here: making
schedules, partitions and splits, which have rooms of their own; tables of results (reporting).
"""

from pipeplan.planning.build_plan import Result, assemble
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.comparison import Comparison, compare
from pipeplan.planning.frontier import FrontierResult, Mode, frontier_request, search_frontier
from pipeplan.planning.request import Batch, Request, Splitting, choose_placement, resolve_batch
from pipeplan.planning.steps import search_plan
from pipeplan.planning.trials import workloads
from pipeplan.planning.tuning import Tuning, tune

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
