"""What to say where no strategy of one stage fits, and what would do: cheap questions first, for seconds at most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain

from pipeplan.costs.blocks import splitting_remedy
from pipeplan.errors import InfeasibleError, PipeplanError
from pipeplan.files import Profile
from pipeplan.planning.plan_frontier import changes_that_do, halved, some_plan
from pipeplan.planning.request import Request, Splitting
from pipeplan.planning.sharding_frontier import least_of_splits, split_frontier
from pipeplan.search_constants import (
    ROUGH,
    TOO_LARGE_BOUNDING,
    TOO_LARGE_DEVICES,
    TOO_LARGE_LEAST_SECONDS,
    TOO_LARGE_PLAN_SECONDS,
    TOO_LARGE_SECONDS,
)
from pipeplan.sharding.least_memory import LeastMemory
from pipeplan.time_limit import Limit
from pipeplan.units import format_bytes, named_devices, rounded_up


def too_large(request: Request, splitting: Splitting, within: Limit | None) -> LeastMemory | None:
    """What all strategies on a request's devices take at least, where that is more than fits; None where it is not.

    It is asked where working out their costs would take long. Of thousands of kinds of blocks it would, too: after a
    part of the time it is not known.
    """
    if request.least_memory is None or request.num_devices <= TOO_LARGE_DEVICES:
        return None
    found = None
    with nullcontext() if within is None else Limit.part_of(within, TOO_LARGE_BOUNDING * within.seconds).ended():
        found = least_of_splits(request, splitting)
    return found if found is not None and found.num_bytes > request.least_memory else None


def nothing_fits(
    request: Request,
    splitting: Splitting,
    plans: Request,
    found: Mapping[int, int],
    bounds: Mapping[int, LeastMemory],
    within: Limit | None,
) -> InfeasibleError:
    """By what each number of devices needs, and the least of that; and changes that would do.

    Of numbers of devices either the least memory of a strategy was ``found``, or ``bounds`` are below all of them.
    ``plans`` asks for whole plans in the same memory.
    """
    limit, least = request.least_memory or 0, dict(found) | {count: each.num_bytes for count, each in bounds.items()}
    needs = ", ".join(f"{format_bytes(least[count])} on {named_devices(count)}" for count in sorted(least))
    enough = rounded_up(min(found.values())) if found else None
    missing = (enough or min(least.values())) - limit
    time = Limit(
        TOO_LARGE_SECONDS if within is None else min(TOO_LARGE_SECONDS, max(TOO_LARGE_LEAST_SECONDS, within.left()))
    )
    with time.hearing_interrupts():
        ways = list(_ways(request, splitting, plans, time))
    if enough is not None:
        ways = [f"raise --memory to {format_bytes(enough)}", *ways]
    elif not ways:
        ways = [f"raise --memory beyond {format_bytes(min(least.values()))}"]
    if one_share(request.profile, splitting.whole_blocks):
        ways.append(f"let blocks be split: {more_ways(request.profile)}")
    state = min((each.state_bytes for each in bounds.values()), default=0)
    needs += f", {format_bytes(state)} of it for parameters and what training keeps of them" * (state > limit)
    return InfeasibleError(
        f"nothing fits into {format_bytes(limit)} per device, {'at least ' * (enough is None)}{format_bytes(missing)} "
        f"too little: with {request.batch.mini_batch} samples per iteration each needs at least {needs}; "
        f"{', or '.join(ways)}",
        enough,
        [
            {"num_devices": count, "memory_bytes": rounded_up(found[count]), "what": "one stage, split block by block"}
            for count in sorted(found, reverse=True)
        ],
    )


def _ways(request: Request, splitting: Splitting, plans: Request, time: Limit) -> Iterator[str]:
    """Changes that were found to do, and one that may."""
    limit = request.least_memory or 0

    def fits(asked: Request) -> bool:
        if least_of_splits(asked, splitting).num_bytes > limit:
            return False
        rough = replace(splitting, within=max(splitting.within, ROUGH))
        return split_frontier(asked, rough).points[0].memory_bytes <= limit

    searching = Limit.part_of(time, TOO_LARGE_PLAN_SECONDS)
    plan = some_plan(plans, searching)
    yield from changes_that_do(request, fits, time)
    if plan is not None:
        yield f"give --plans: one was found that takes {format_bytes(plan.memory_bytes)}"
    elif searching.expired:
        yield "give --plans: there was no time to find one that fits"
    if splitting.whole_blocks:
        with suppress(PipeplanError), time.ended():  # operators of the blocks may not be known
            yield from _by_operators(request, replace(splitting, whole_blocks=False), limit)


def _by_operators(request: Request, splitting: Splitting, limit: int) -> Iterator[str]:
    """What may do where operators are split by themselves, which takes long to find out."""
    for fewer, asked in chain([("", request)], halved(request)):
        least = least_of_splits(asked, splitting)
        if least.state_bytes > limit:
            return
        if least.num_bytes <= limit:
            also = fewer and f" and {fewer}"
            yield f"give --split-level operator{also}: that may do, {format_bytes(least.num_bytes)} are needed at least"
            return


def more_ways(profile: Profile) -> str:
    """How there are more ways of splitting blocks of a profile that has rows for one share only."""
    ways = (splitting_remedy(profile), "give --split-level operator here, for blocks whose dimensions are known")
    return ", or ".join(filter(None, ways))


def one_share(profile: Profile, whole_blocks: bool) -> bool:
    """Whether whole blocks have no rows by which devices could share them."""
    return whole_blocks and all(row.shards == 1 for block in profile.blocks for row in block.rows())
