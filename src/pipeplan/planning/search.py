"""The search over everything that is left open: placements, each with its schedules, best by iteration time.

All candidates are looked at first: bounds, and known schedules alone. Those that may still become the best then get
shares of the time, the more promising ones more and more of it. There is a plan from the first look on. What is done
when is the list of :mod:`pipeplan.planning.steps`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.files import Placement
from pipeplan.planning.build_plan import Result, planned
from pipeplan.planning.candidates import candidates
from pipeplan.planning.infeasibility import most_telling
from pipeplan.planning.request import Request
from pipeplan.planning.steps import STEPS, LookAtCandidates
from pipeplan.planning.trials import PlanSearch
from pipeplan.schedule.cpsat.solver import Budget, load_solver
from pipeplan.schedule.state import Progress, SearchStep, named


def search_plan(request: Request, *, progress: Progress | None = None, steps: Sequence[SearchStep] = STEPS) -> Result:
    """Search the best plan of a placement, a strategy, or with ``auto`` of all of them, for a mini-batch.

    With ``split_backward`` left open both ways get a short look and the better one the rest of the time, and the bound
    is for both. With ``auto`` micro-batches have any of the request's sizes per replica, and recomputation is a choice
    like others; otherwise it is tried only where nothing fits without. ``steps`` are what is tried.

    Raises:
        InfeasibleError: nothing fits; the text names the device, the bytes and what to change.
        UsageError: a request that contradicts the profile.
    """
    load_solver()
    search = PlanSearch(request, Budget(request.time_limit, request.seed, request.deterministic), progress, steps)
    looking = named(steps, LookAtCandidates) or LookAtCandidates()
    search.run(lambda: candidates(request, steps, looking.chains_between))
    best = search.best
    if best is None or best.best is None:
        raise most_telling(search.failures)
    schedule = best.settled
    plan = planned(request, best.candidate, schedule, best.best.workload)
    chosen = None if isinstance(request.placement, Placement) else search.partition_seconds
    return Result(plan, schedule, search.budget.elapsed, chosen, search.budget.interrupted)
