"""Frontier tracking (TensorOpt, Algorithms 2 and 3): all strategies that no other beats in memory and time.

Large frontiers are tracked gap by gap of their hull. Neighbours on the hull (:mod:`pipeplan.sharding.bounds`) have a
line below which there is no strategy, and a frontier point between them lies in the triangle over that line. Most lie
close to the line. So what is looked at first is a *corridor*: all strategies that cost, in the line's weights, at most
a small share of what the triangle's corner does beyond the line. That leaves few configurations, few points in each
cell and few sums of points. What was found says whether it was enough: a strategy not found must be in a corner between
two neighbours that were, and where all corners lie in the corridor there is none. Else the corridor is made wider, at
most up to the highest corner left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeplan.search_constants import (
    CORRIDOR,
    CORRIDOR_GROWTH,
    GAP_WEIGHTINGS,
    POINT_WEIGHTINGS,
    SUMS_AT_ONCE,
)
from pipeplan.sharding import compiled
from pipeplan.sharding.bounds import (
    RELAXED,
    Bounds,
    Corner,
    Gap,
    Solved,
    Weighing,
    bounds_of,
    cheapest,
    corner_of,
    end_weights,
    ends_of,
    hull_of,
    level,
    solved,
    weighing,
)
from pipeplan.sharding.elimination import ReducedPart, Reducing, Strategies, Whole
from pipeplan.sharding.graph import CostGraph, Expression, Strategy, contract, in_order
from pipeplan.sharding.held_bounds import factor_of_all
from pipeplan.sharding.table import (
    IntArray,
    PointLimit,
    Points,
    Table,
    Weights,
    gather,
    product,
    reduce_points,
    select,
    union,
)
from pipeplan.sharding.threads import spread
from pipeplan.time_limit import TimeUpError, checkpoint


@dataclass(frozen=True, slots=True)
class PartFrontier:
    """Strategies of a part.

    Of all strategies that were looked for, some here takes at most ``factor`` times the memory and the time. Finding
    them took ``num_sums`` pairs of points.
    """

    strategies: Strategies
    factor: float = 1.0
    num_sums: int = 0

    def within(self, factor: float) -> PartFrontier:
        """The same, proved up to a factor."""
        return replace(self, factor=factor)


Tables = dict[int, Table]
"""What has been computed, by an expression's key."""


def evaluate(
    root: Expression, tables: Tables, bounds: Bounds | None = None, *, most_sums: float = math.inf
) -> int | None:
    """Computes the table of an expression; every distinct part is computed once and stays in ``tables``.

    With ``bounds`` points that no frontier of the whole has use for are dropped. Says how many pairs of points were
    offered to products; None if they would have been more than ``most_sums``.
    """
    num_sums = 0
    for part in in_order(root):
        checkpoint()
        if part.key not in tables:
            sources = [tables[source.key] for source in part.sources]
            own = _sums(part, sources)
            num_sums += own
            if num_sums > most_sums:
                return None
            made = _computed(part, sources, bounds.limit(part.key) if bounds else None, own)
            tables[part.key] = select(made, bounds.useful(part.key, made)) if bounds else made
    return num_sums


def _sums(part: Expression, sources: Sequence[Table]) -> int:
    """How many pairs of points a part offers."""
    if part.operation == "contract":
        return int(sources[0].counts.sum(axis=0) @ sources[1].counts.sum(axis=1))
    return int((sources[0].counts * sources[1].counts).sum()) if part.operation == "product" else 0


def _computed(part: Expression, sources: Sequence[Table], limit: PointLimit | None, num_sums: int) -> Table:
    if part.given is not None:
        return part.given
    if part.cells is not None:
        return gather(sources[0], part.cells)
    left, right = sources
    loops = compiled.kernels(num_sums)
    if loops is not None:
        made = compiled.contract if part.operation == "contract" else compiled.product
        return made(loops, left, right, limit)
    return contract(left, right, limit) if part.operation == "contract" else product(left, right, limit)


def points_taken(root: Expression, tables: Tables) -> dict[Expression, IntArray]:
    """The point of every given table that is in each point of the whole, [P]."""
    taken: dict[Expression, IntArray] = {}
    stack = [(root, np.arange(tables[root.key].num_points))]
    while stack:
        part, points = stack.pop()
        if part.given is not None:
            taken[part] = points
        stack.extend((source, tables[part.key].picks[s, points]) for s, source in enumerate(part.sources))
    return taken


def computed(whole: Whole, bounds: Bounds | None = None, *, most_sums: float = math.inf) -> PartFrontier | None:
    """The frontier of a part, as far as ``bounds`` leave points; None if it takes more than ``most_sums``."""
    tables: Tables = {}
    num_sums = evaluate(whole.expression, tables, bounds, most_sums=most_sums)
    if num_sums is None:
        return None
    return PartFrontier(whole.strategies(points_taken(whole.expression, tables), tables), num_sums=num_sums)


def fewer(whole: Whole, bounds: Bounds) -> ReducedPart:
    """The part without configurations that the bounds rule out; equal operators keep the same."""
    known: dict[int, IntArray] = {}
    for node in whole.part.graph.nodes:
        key = whole.rows[node.name].key
        if key not in known:
            points = np.flatnonzero(bounds.useful(key, node.costs))
            known[key] = np.unique(np.searchsorted(node.costs.starts, points, side="right") - 1)
    return whole.part.fewer({name: known[row.key] for name, row in whole.rows.items()})


def gap_by_gap(reducing: Reducing, part: ReducedPart, within: float, *, as_far: bool = False) -> list[PartFrontier]:
    """The frontier of a part as the frontiers of its gaps, each exact or up to a factor of 1 + ``within``.

    ``as_far`` as there is time: once the ends of its hull are known there is a frontier, with the factor proved so far.
    """
    whole = reducing.whole(part)
    root = whole.expression
    taken: dict[Solved, Mapping[Expression, int]] = {}

    def solve(weights: Weights) -> Solved:
        _, points = cheapest(root, weights)
        found = solved(points, weights)
        taken[found] = points
        return found

    def solve_in_time(weights: Weights) -> Solved | None:
        try:
            return solve(weights)
        except TimeUpError:
            if as_far:
                return None
            raise

    leanest, quickest = end_weights(root)
    gaps = hull_of(solve_in_time, (solve(leanest), solve(quickest)), within, GAP_WEIGHTINGS)
    wide = [gap for gap in gaps if gap.factor > 1 + within]
    inner: dict[Gap, PartFrontier] = {}

    def fill(gap: Gap) -> None:
        inner[gap] = _in_gap(reducing, whole, gap, ends, within)  # one by one: what is there stays

    try:
        ends = ends_of(root)
        if compiled.kernels(0):
            spread(fill, wide)
        else:
            for gap in wide:
                fill(gap)
    except TimeUpError:
        if not as_far:
            raise
    left = [gap for gap in gaps if gap not in inner]
    hull = _of_strategies(whole, list(taken.values())).within(max([1.0, *(gap.factor for gap in left)]))
    return [hull, *(inner[gap] for gap in wide if gap in inner)]


def _of_strategies(whole: Whole, strategies: Sequence[Mapping[Expression, int]]) -> PartFrontier:
    """Strategies from the point of every given table in each."""
    taken = {part: np.array([points[part] for points in strategies]) for part in strategies[0]}
    given = {part.key: part.given for part in taken if part.given is not None}
    return PartFrontier(whole.strategies(taken, given))


def _in_gap(reducing: Reducing, whole: Whole, gap: Gap, ends: tuple[Weighing, Weighing], within: float) -> PartFrontier:
    """What is in a gap, by corridors that get wider until that is proved."""
    corner = corner_of(gap, ends, weighing(whole.expression, level(gap.left, gap.right)))
    least, most = corner.weighings[-1].least, corner.most[-1]
    limit = least + CORRIDOR * (most - least)
    while True:
        found = _at_corner(reducing, whole, corner.lower(limit))
        left = _left(found, gap, corner.weighings[-1], limit)
        if left.factor <= 1 + within:
            return found.within(left.factor)
        growth = next(times for sums, times in CORRIDOR_GROWTH if found.num_sums <= sums)
        limit = min(left.highest, least + growth * (limit - least))


def _at_corner(reducing: Reducing, whole: Whole, corner: Corner) -> PartFrontier:
    """All strategies under a corner; its weightings are computed anew from the few configurations that it leaves."""
    narrow = reducing.whole(fewer(whole, Bounds((corner,))))
    again = tuple(each.of(narrow.expression) for each in corner.weighings)
    found = computed(narrow, Bounds((replace(corner, weighings=again),)))
    assert found
    return found


class _Left(NamedTuple):
    """What a corridor left open: the factor that is proved, and the highest corner in the line's weights."""

    factor: float
    highest: float


def _left(found: PartFrontier, gap: Gap, line: Weighing, limit: float) -> _Left:
    memory = np.r_[gap.left.memory_bytes, found.strategies.memory_bytes, gap.right.memory_bytes]
    time = np.r_[gap.left.time_ns, found.strategies.time_ns, gap.right.time_ns]
    costs = line.cost(memory[1:], time[:-1])
    open_ = np.flatnonzero(costs > limit * (1 + RELAXED))
    if not len(open_):
        return _Left(1.0, limit)
    points = [Solved(int(m), int(t), line.solved.at) for m, t in zip(memory, time, strict=True)]
    stairs = [Gap(points[at], points[at + 1], line.solved.at, limit) for at in open_.tolist()]
    return _Left(max(stair.factor for stair in stairs), float(costs[open_].max()))


@dataclass(frozen=True, slots=True)
class Tracked:
    """The cost frontier of a graph.

    ``memory_bytes`` ascends and ``time_ns`` descends, [P]. It is ``exact`` unless a heuristic elimination left
    configurations out, it was asked for up to a factor, or ties are not sure; even then every point is a strategy, and
    one that no other *found* beats. The ``factor`` is proved: for every strategy of the configurations left in some
    point takes at most ``factor`` times its memory and its time; for every strategy of the graph at most
    ``factor_of_all``, inf where that is not known. ``eliminations`` counts them by kind: node, edge, branch, heuristic.
    ``num_computed`` counts the distinct tables of the graph's expression.
    """

    memory_bytes: IntArray
    time_ns: IntArray
    exact: bool
    eliminations: Counter[str]
    num_computed: int
    _graph: CostGraph
    _of: tuple[PartFrontier, ...]
    _picks: IntArray
    factor: float = 1.0
    factor_of_all: float = 1.0

    def strategy(self, point: int) -> Strategy:
        """The strategy of a point, unrolled."""
        part, inside_part = map(int, self._picks[:, point])
        return self._of[part].strategies.strategy(inside_part).of(self._graph)


def track(
    graph: CostGraph,
    *,
    linear: bool = True,
    pruned: bool = True,
    merged: int | None = None,
    within: float = 0.0,
    as_far: bool = False,
) -> Tracked:
    """The frontier of a graph by eliminations and then linear dynamic programming.

    Without ``linear`` all is eliminated but two nodes (FT-Elimination), for comparison. With ``pruned`` whatever is
    proved to be in no frontier strategy is dropped before and between the steps; the result is the same. ``merged``
    bounds the configurations that branch elimination may make; what would need more is settled heuristically.

    ``within`` above 0 asks only for a ``factor`` of 1 + ``within`` and takes far less; the result's own ``factor`` says
    what was reached. With ``as_far`` a time limit ends that with what there is, once there is anything: the factor is
    then as large as that is far from proved.

    Raises:
        ValueError: there is no strategy; not ``pruned``, the frontier is then empty.
    """
    reducing = Reducing(linear) if merged is None else Reducing(linear, merged)
    lowered = graph.lowered()
    parts, settled = reducing.parts(lowered)
    whole = reducing.whole(parts[0])
    found: list[PartFrontier] = []
    for part in parts:
        try:
            found += _found(reducing, part, pruned, within, as_far)
        except TimeUpError:
            if not (as_far and found):
                raise
            break
    kept = reduce_points(union([_points(index, each) for index, each in enumerate(found)]))
    factor = max(each.factor for each in found)
    of_all = factor
    if settled:
        of_all = factor_of_all(reducing.left(lowered), kept.memory_bytes, kept.time_ns, factor)
    done = whole.done + Counter(heuristic=settled)
    exact = not settled and factor == 1 and all(tie.sure for tie in graph.ties)
    kinds = done, whole.num_tables
    proved = factor, of_all
    return Tracked(kept.memory_bytes, kept.time_ns, exact, *kinds, graph, tuple(found), kept.picks, *proved)


def _found(reducing: Reducing, part: ReducedPart, pruned: bool, within: float, as_far: bool) -> list[PartFrontier]:
    """The frontier of a part that needs no heuristics, at once where that is not too much, else gap by gap."""
    if not pruned:
        everything = computed(reducing.whole(part))
        assert everything
        return [everything]
    if within:
        return gap_by_gap(reducing, part, within, as_far=as_far)
    whole = reducing.whole(part)
    part = fewer(whole, bounds_of(whole.expression, POINT_WEIGHTINGS))
    whole = reducing.whole(part)
    at_once = computed(whole, bounds_of(whole.expression, POINT_WEIGHTINGS), most_sums=SUMS_AT_ONCE)
    return [at_once] if at_once else gap_by_gap(reducing, part, within)


def _points(end: int, found: PartFrontier) -> Points:
    memory, time = found.strategies.memory_bytes, found.strategies.time_ns
    index = np.arange(len(memory))
    return Points(np.zeros_like(index), memory, time, np.stack((np.full_like(index, end), index)))


def knee(memory_bytes: npt.ArrayLike, time_ns: npt.ArrayLike) -> int | None:
    """Which point, of a frontier with memory ascending and time descending; None where there is no such point.

    The one farthest below the straight line between the ends of the frontier, with memory and time each taken as a
    share of their range. There is none where no point lies below the line.
    """
    memory, time = np.asarray(memory_bytes, np.float64), np.asarray(time_ns, np.float64)
    if len(memory) < 3:
        return None
    along = (memory - memory[0]) / (memory[-1] - memory[0])
    above = (time - time[-1]) / (time[0] - time[-1])
    farthest = int(np.argmin(along + above))
    return farthest if along[farthest] + above[farthest] < 1 - RELAXED else None
