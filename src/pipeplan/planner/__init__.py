"""From a profile to a plan: joins costs, placement, schedule, lowering and checking into one result."""

from pipeplan.planner.assembly import assemble
from pipeplan.planner.batch import Batch, resolve_batch
from pipeplan.planner.candidates import Candidate
from pipeplan.planner.request import Options, Request, choose_placement
from pipeplan.planner.result import Result
from pipeplan.planner.search import search_plan
from pipeplan.planner.trials import workloads

__all__ = [
    "Batch",
    "Candidate",
    "Options",
    "Request",
    "Result",
    "assemble",
    "choose_placement",
    "resolve_batch",
    "search_plan",
    "workloads",
]
