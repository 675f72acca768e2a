"""Frontier tracking (TensorOpt, Algorithms 2 and 3): all strategies that no other beats in memory and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pipeplan.frontier.bounds import bounds_of
from pipeplan.frontier.evaluation import Tables, evaluate, points_taken
from pipeplan.frontier.expression import Expression
from pipeplan.frontier.graph import CostGraph, Strategy
from pipeplan.frontier.hull import Solved, Weights, hull_of
from pipeplan.frontier.reducing import Part, Reducing, Whole
from pipeplan.frontier.scalars import inside, optimum
from pipeplan.frontier.table import IntArray, Points, Table, reduce_points, select, union

__all__ = ["Tracked", "track"]

_ROUNDS = (8, 24)
"""Weightings by which configurations are dropped, few while there are many configurations."""

_MOST_WEIGHTINGS = 400
"""Weightings after which a hull is as fine as it gets."""

_WEIGHTINGS = 48
"""Weightings by which points are dropped while the frontier is computed."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """The cost frontier of a graph.

    ``memory_bytes`` ascends and ``time_ns`` descends, [P]. It is ``exact`` unless a heuristic elimination left
    configurations out, or it was asked for up to a factor; even then every point is a strategy, and one that no other
    *found* beats. The ``factor`` is proved: for every strategy of the configurations left in some point takes at most
    ``factor`` times its memory and its time. ``eliminations`` counts them by kind: node, edge, branch, heuristic.
    ``num_computed`` counts the distinct tables computed.
    """

    memory_bytes: IntArray
    time_ns: IntArray
    exact: bool
    eliminations: Counter[str]
    num_computed: int
    _of: tuple[_Computed | _Hull, ...]
    _picks: IntArray
    factor: float = 1.0

    def strategy(self, point: int) -> Strategy:
        """The strategy of a point, unrolled."""
        part, inside_part = map(int, self._picks[:, point])
        return self._of[part].strategy(inside_part)


def track(
    graph: CostGraph, *, linear: bool = True, pruned: bool = True, merged: int | None = None, within: float = 0.0
) -> Tracked:
    """The frontier of a graph by eliminations and then linear dynamic programming.

    Without ``linear`` all is eliminated but two nodes (FT-Elimination), for comparison. With ``pruned`` whatever is
    proved to be in no frontier strategy is dropped before and between the steps; the result is the same. ``merged``
    bounds the configurations that branch elimination may make; what would need more is settled heuristically.

    ``within`` above 0 asks only for a ``factor`` of 1 + ``within`` and takes far less (:mod:`pipeplan.frontier.hull`);
    the result's own ``factor`` says what was reached.
    """
    reducing = Reducing(linear) if merged is None else Reducing(linear, merged)
    parts, settled = reducing.parts(graph)
    computed = [_hull(reducing, part, within) if within else _computed(reducing, part, pruned) for part in parts]
    found = reduce_points(union([_points(index, *each.costs) for index, each in enumerate(computed)]))
    factor = max(each.factor for each in computed)
    done = computed[0].whole.done + Counter(heuristic=settled)
    num_computed = sum(len(each.tables) for each in computed)
    exact = not settled and factor == 1
    return Tracked(found.memory_bytes, found.time_ns, exact, done, num_computed, tuple(computed), found.picks, factor)


@dataclass(frozen=True, slots=True)
class _Computed:
    """The frontier of a part, and what its strategies are read off from."""

    whole: Whole
    tables: Tables
    factor: ClassVar[float] = 1.0

    @property
    def costs(self) -> tuple[IntArray, IntArray]:
        """Memory and time of every point."""
        table = self.tables[self.whole.expression.key]
        return table.memory_bytes, table.time_ns

    def strategy(self, point: int) -> Strategy:
        return self.whole.strategy(points_taken(self.whole.expression, point, self.tables), self.tables)


@dataclass(frozen=True, slots=True)
class _Hull:
    """Strategies on the hull of a part's frontier, each with the point of every given table, and the proved factor."""

    whole: Whole
    found: tuple[Solved, ...]
    taken: tuple[dict[Expression, int], ...]
    tables: Tables
    factor: float

    @property
    def costs(self) -> tuple[IntArray, IntArray]:
        """Memory and time of every point."""
        memory = np.array([each.memory_bytes for each in self.found], np.int64)
        return memory, np.array([each.time_ns for each in self.found], np.int64)

    def strategy(self, point: int) -> Strategy:
        return self.whole.strategy(self.taken[point], self.tables)


def _hull(reducing: Reducing, part: Part, within: float) -> _Hull:
    """The hull of a part that needs no heuristics, as fine as asked for."""
    whole = reducing.whole(part)
    taken: dict[Solved, dict[Expression, int]] = {}
    tables: Tables = {}

    def solve(weights: Weights) -> Solved:
        points = optimum(whole.expression, inside(whole.expression, weights), weights)
        memory = time = 0
        for each, point in points.items():
            assert each.given is not None
            tables[each.key] = each.given
            memory += int(each.given.memory_bytes[point])
            time += int(each.given.time_ns[point])
        solved = Solved(memory, time, weights)
        taken[solved] = points
        return solved

    found, factor = hull_of(solve, within, _MOST_WEIGHTINGS)
    return _Hull(whole, tuple(found), tuple(taken[each] for each in found), tables, factor)


def _computed(reducing: Reducing, part: Part, pruned: bool) -> _Computed:
    """The frontier of a part that needs no heuristics."""
    for weightings in _ROUNDS if pruned else ():
        part = _fewer(reducing.whole(part), weightings)
    whole = reducing.whole(part)
    tables: Tables = {}
    evaluate(whole.expression, tables, _kept_of(whole.expression) if pruned else None)
    return _Computed(whole, tables)


def _fewer(whole: Whole, weightings: int) -> Part:
    """The part without configurations that no frontier strategy has; equal operators keep the same."""
    bounds = bounds_of(whole.expression, weightings)
    kept = {}
    for node in whole.part.graph.nodes:
        points = np.flatnonzero(bounds.useful(whole.rows[node.name].key, node.costs))
        kept[node.name] = np.unique(np.searchsorted(node.costs.starts, points, side="right") - 1)
    return whole.part.fewer(kept)


def _kept_of(whole: Expression) -> Callable[[int, Table], Table]:
    """Drops the points of a part's table that no frontier strategy has."""
    bounds = bounds_of(whole, _WEIGHTINGS)
    return lambda key, table: select(table, bounds.useful(key, table))


def _points(end: int, memory_bytes: IntArray, time_ns: IntArray) -> Points:
    index = np.arange(len(memory_bytes))
    picks = np.stack((np.full_like(index, end), index))
    return Points(np.zeros_like(index), memory_bytes, time_ns, picks)
