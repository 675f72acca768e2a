"""Large frontiers, gap by gap of their hull.

Neighbours on the hull (:mod:`pipeplan.frontier.hull`) have a line below which there is no strategy, and a frontier
point between them lies in the triangle over that line. Most lie close to the line. So what is looked at first is a
*corridor*: all strategies that cost, in the line's weights, at most a small share of what the triangle's corner does
beyond the line. That leaves few configurations, few points in each cell and few sums of points. What was found says
whether it was enough: a strategy not found must be in a corner between two neighbours that were, and where all corners
lie in the corridor there is none. Else the corridor is made wider, at most up to the highest corner left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipeplan.frontier.bounds import Bounds, Corner, Weighing, corner_of, ends_of, solved, weighing
from pipeplan.frontier.expression import Expression
from pipeplan.frontier.found import Found, computed
from pipeplan.frontier.hull import Gap, Solved, hull_of, level
from pipeplan.frontier.reducing import Part, Reducing, Whole
from pipeplan.frontier.scalars import inside, optimum
from pipeplan.frontier.table import Weights

__all__ = ["fewer", "gap_by_gap"]

_MOST_WEIGHTINGS = 64
"""Weightings by which a frontier is cut into gaps."""

_SHARE = 0.01
"""The first corridor, of the height of a gap's triangle."""

_WIDER = (4.0, 2.0)
"""By how much a corridor grows at a time: after few sums of points, and after many."""

_MANY_SUMS = 300_000

_RELAXED = 1e-9


def fewer(whole: Whole, bounds: Bounds) -> Part:
    """The part without configurations that the bounds rule out; equal operators keep the same."""
    kept = {}
    for node in whole.part.graph.nodes:
        points = np.flatnonzero(bounds.useful(whole.rows[node.name].key, node.costs))
        kept[node.name] = np.unique(np.searchsorted(node.costs.starts, points, side="right") - 1)
    return whole.part.fewer(kept)


def gap_by_gap(reducing: Reducing, part: Part, within: float) -> list[Found]:
    """The frontier of a part as the frontiers of its gaps, each exact or up to a factor of 1 + ``within``."""
    whole = reducing.whole(part)
    root = whole.expression
    taken: dict[Solved, Mapping[Expression, int]] = {}

    def solve(weights: Weights) -> Solved:
        points = optimum(root, inside(root, weights), weights)
        found = solved(points, weights)
        taken[found] = points
        return found

    ends = ends_of(root)
    gaps = hull_of(solve, (solve(ends[0].solved.at), solve(ends[1].solved.at)), within, _MOST_WEIGHTINGS)
    factor = max([1.0, *(gap.factor for gap in gaps if gap.factor <= 1 + within)])
    hull = _of_strategies(whole, list(taken.values())).within(factor)
    return [hull, *(_in_gap(reducing, whole, gap, ends, within) for gap in gaps if gap.factor > 1 + within)]


def _of_strategies(whole: Whole, strategies: Sequence[Mapping[Expression, int]]) -> Found:
    """Strategies told by the point of every given table in each."""
    taken = {part: np.array([points[part] for points in strategies]) for part in strategies[0]}
    given = {part.key: part.given for part in taken if part.given is not None}
    return Found(whole.strategies(taken, given))


def _in_gap(reducing: Reducing, whole: Whole, gap: Gap, ends: tuple[Weighing, Weighing], within: float) -> Found:
    """What is in a gap, by corridors that get wider until that is proved."""
    corner = corner_of(gap, ends, weighing(whole.expression, level(gap.left, gap.right)))
    least, most = corner.weighings[-1].least, corner.most[-1]
    limit = least + _SHARE * (most - least)
    while True:
        found = _in_corridor(reducing, whole, corner.lower(limit))
        left = _left(found, gap, corner.weighings[-1], limit)
        if left.factor <= 1 + within:
            return found.within(left.factor)
        limit = min(left.highest, least + _WIDER[found.num_sums > _MANY_SUMS] * (limit - least))


def _in_corridor(reducing: Reducing, whole: Whole, corner: Corner) -> Found:
    """All strategies under a corner; its weightings are told anew by the few configurations that it leaves."""
    narrow = reducing.whole(fewer(whole, Bounds((corner,))))
    again = tuple(weighing(narrow.expression, each.solved.at) for each in corner.weighings)
    found = computed(narrow, Bounds((replace(corner, weighings=again),)))
    assert found
    return found


class _Left(NamedTuple):
    """What a corridor left open: the factor that is proved, and the highest corner in the line's weights."""

    factor: float
    highest: float


def _left(found: Found, gap: Gap, line: Weighing, limit: float) -> _Left:
    memory = np.r_[gap.left.memory_bytes, found.strategies.memory_bytes, gap.right.memory_bytes]
    time = np.r_[gap.left.time_ns, found.strategies.time_ns, gap.right.time_ns]
    costs = line.cost(memory[1:], time[:-1])
    open_ = np.flatnonzero(costs > limit * (1 + _RELAXED))
    if not len(open_):
        return _Left(1.0, limit)
    points = [Solved(int(m), int(t), line.solved.at) for m, t in zip(memory, time, strict=True)]
    stairs = [Gap(points[at], points[at + 1], line.solved.at, limit) for at in open_.tolist()]
    return _Left(max(stair.factor for stair in stairs), float(costs[open_].max()))
