"""Placements that need little memory: which should need least, and chains cut so that little does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from pipeplan.costs.zero import AUTO
from pipeplan.errors import UsageError
from pipeplan.files import Placement
from pipeplan.partition.chain.rebalance import least_short
from pipeplan.planning.candidates import (
    CandidateOrError,
    PlacementCandidate,
    grid,
    has_table,
    least_held,
    likely_choices,
    placed,
)
from pipeplan.planning.request import Request
from pipeplan.planning.uniform_space import BoundedChoice, Choice
from pipeplan.search_constants import LEAN_CUTS
from pipeplan.units import MAX_BYTES

Point = BoundedChoice | Choice | PlacementCandidate
"""A layout that may be cut: a row of a table, a strategy's, or one with its stages."""


def least_bytes(request: Request, point: Point) -> float:
    """Bytes that a point needs before it is placed: of a row of a table its closed form's, else what it must hold.

    It is infinite where blocks have no costs for it.
    """
    if isinstance(point, BoundedChoice):
        return point.least_bytes
    if isinstance(point, PlacementCandidate):
        return 0.0
    try:
        return least_held(request, point)
    except UsageError:
        return math.inf


def plainest_first(request: Request) -> tuple[list[Point], list[Point]]:
    """Of the grid those that recompute, with the fewest samples on each replica and the first strategy; and the others.

    The first are few, one for each number of replicas and level by which they divide what they keep, and any of them
    may need least: first comes that which must hold least.
    """
    points = [point for each in request.levels for point in grid(each) if not isinstance(point, UsageError)]
    strategies = list(dict.fromkeys(map(_strategy, points)))

    def kind(point: Choice | PlacementCandidate) -> tuple[bool, int, int]:
        replicas = point.replicas if isinstance(point, Choice) else point.placement.stages[0].replicas
        return not point.recompute, point.batch.microbatch_size // replicas, strategies.index(_strategy(point))

    points.sort(key=kind)
    plain = [point for point in points if kind(point) == kind(points[0])]
    return [*sorted(plain, key=partial(least_bytes, request))], [*points[len(plain) :]]


def _strategy(point: Choice | PlacementCandidate) -> str:
    return point.strategy if isinstance(point, Choice) else point.placement.strategy


def placed_lean(request: Request, point: Point) -> CandidateOrError:
    """A point cut so that little memory does: where it is open what blocks recompute, all do."""
    point = point.choice if isinstance(point, BoundedChoice) else point
    if isinstance(point, Choice) and point.levels:
        point = replace(point, recompute=True, levels=())
    return placed(request, point, least_short)


def leanest_rows(rows: Iterable[BoundedChoice]) -> list[BoundedChoice]:
    """Rows of a table, first what should need least, and of what needs as much the quickest."""
    return sorted(rows, key=lambda each: (each.least_bytes, each.usual_ns))


def lean_cuts(request: Request) -> Iterator[PlacementCandidate]:
    """The first :data:`LEAN_CUTS` that may fit, cut so that little memory does, where that fits.

    It is what there is where memory is just enough.
    """
    limit, request = request.least_memory, weighing_levels(request)
    if limit is None:
        return
    rows = leanest_rows(likely_choices(request.within(MAX_BYTES)))
    able = (point for point in rows or chain(*plainest_first(request)) if least_bytes(request, point) <= limit)
    for point in islice(able, LEAN_CUTS):
        candidate = placed_lean(request, point)
        if isinstance(candidate, PlacementCandidate):
            yield candidate


def weighing_levels(request: Request) -> Request:
    """The same with every level by which replicas may divide what they keep, where that is open: as one table of
    layouts, or as several requests."""
    if request.zero not in (None, AUTO):
        return request
    if has_table(request):
        return replace(request, zero=None, any_level=True)
    placement = request.placement
    given = [stage.copies for stage in placement.stages] if isinstance(placement, Placement) else None
    may_divide = max(given) > 1 if given else request.num_devices > 1 and request.replicas != 1
    return request.with_any_level() if may_divide else request
