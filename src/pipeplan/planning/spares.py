"""A plan for some of a cluster's devices, the others spare: what that loses, and what of failures it covers.

Both searches, for the devices that are left and for all of them, have half of the time: what they find compares.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from pipeplan.errors import InfeasibleError, PipeplanError
from pipeplan.files import Plan
from pipeplan.planning.build_plan import Result
from pipeplan.planning.comparison import Comparison
from pipeplan.planning.frontier import FrontierResult
from pipeplan.planning.request import Request
from pipeplan.search_constants import SPARES_RESERVED, SPARES_SHARE
from pipeplan.simulator.failures import SECONDS_PER_DEVICE, are_simulated, failures
from pipeplan.simulator.spares import Spares
from pipeplan.time_limit import Limit

Found = TypeVar("Found")


def _reserved(request: Request) -> float:
    """Seconds for what a plan takes where spare nodes take over; none where that is known, or would take too long."""
    assert request.cluster is not None
    seconds = SECONDS_PER_DEVICE * request.cluster.num_devices
    return seconds if are_simulated(request.cluster) and seconds <= SPARES_RESERVED * request.time_limit else 0.0


def for_both(
    request: Request, search: Callable[[Request, Limit | None], Found], within: Limit | None
) -> tuple[Found, Found | PipeplanError, float]:
    """What a search finds for the devices that are not spare, then for all, and the seconds that each had.

    Raises what it does for the former; what it raises for the latter is returned.
    """
    assert request.cluster is not None
    seconds = SPARES_SHARE * (request.time_limit - _reserved(request))
    asked = replace(request, spares=0, time_limit=seconds)
    free = asked.free
    count = request.cluster.num_devices
    whole = replace(
        asked, num_devices=count, start=None, free=None if free is None else replace(free, num_devices=count)
    )

    def share() -> Limit | None:
        return within if within is None or request.deterministic else Limit.part_of(within, seconds)

    found = search(asked, share())
    try:
        return found, search(whole, share()), seconds
    except PipeplanError as error:
        return found, error, seconds


def spared(request: Request, plan: Plan | None, time_ns: int, whole: int | PipeplanError, seconds: float) -> Spares:
    """The spares of a request, by what was found without and with them: ns of an iteration, or why there is none."""
    assert request.cluster is not None
    simulated = not are_simulated(request.cluster) or _reserved(request) > 0
    left = () if plan is None else failures(plan, request.cluster, request.stated_profile if simulated else None)
    return Spares(
        request.spares,
        request.cluster.num_devices,
        time_ns,
        whole if isinstance(whole, int) else None,
        seconds,
        left,
        "" if isinstance(whole, int) else str(whole),
    )


def search_spared(request: Request, search: Callable[[Request, Limit | None], Result], within: Limit | None) -> Result:
    """The plan for devices that are not spare, and what the others cost and cover."""
    found, whole, seconds = for_both(request, search, within)
    every = whole if isinstance(whole, PipeplanError) else whole.plan.predicted.whole_ns
    answer = spared(request, found.plan, found.plan.predicted.whole_ns, every, seconds)
    return replace(found, spares=answer, notes=(*found.notes, *answer.said))


def compare_spared(
    request: Request, compare: Callable[[Request, Limit | None], Comparison], within: Limit | None
) -> Comparison:
    """The rows for devices that are not spare, and what the others cost: by the best row of each."""
    found, whole, seconds = for_both(request, compare, within)

    def best(comparison: Comparison) -> int | None:
        return min((row.iteration_ns for row in comparison.rows if row.fits), default=None)

    time = best(found)
    if time is None:
        return found
    every = whole if isinstance(whole, PipeplanError) else best(whole) or InfeasibleError("nothing fits on all devices")
    answer = spared(request, None, time, every, seconds)
    return replace(found, spares=answer, notes=(*found.notes, *answer.said))


def frontier_spared(
    request: Request, frontier: Callable[[Request, Limit | None], FrontierResult], within: Limit | None
) -> FrontierResult:
    """The points for devices that are not spare, and what the others cost: by the quickest point of each."""
    found, whole, seconds = for_both(request, frontier, within)
    number = min(range(len(found.points)), key=lambda index: found.points[index].time_ns)
    every = whole if isinstance(whole, PipeplanError) else min(point.time_ns for point in whole.points)
    plan = None
    with suppress(PipeplanError):  # a strategy that no plan can say
        plan = found.plan(number + 1) if found.makes_plans else None
    answer = spared(request, plan, found.points[number].time_ns, every, seconds)
    return replace(found, spares=answer, notes=(*found.notes, *answer.said))
