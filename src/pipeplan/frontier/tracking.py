"""Frontier tracking (TensorOpt, Algorithms 2 and 3): all strategies that no other beats in memory and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeplan.frontier.bounds import bounds_of
from pipeplan.frontier.evaluation import Tables, evaluate, points_taken
from pipeplan.frontier.expression import Expression
from pipeplan.frontier.graph import CostGraph, Strategy
from pipeplan.frontier.reducing import Part, Reducing, Whole
from pipeplan.frontier.table import IntArray, Points, Table, reduce_points, select, union

__all__ = ["Tracked", "track"]

_ROUNDS = (8, 24)
"""Weightings by which configurations are dropped, few while there are many configurations."""

_WEIGHTINGS = 48
"""Weightings by which points are dropped while the frontier is computed."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """The cost frontier of a graph.

    ``memory_bytes`` ascends and ``time_ns`` descends, [P]. It is ``exact`` unless a heuristic elimination left
    configurations out; even then every point is a strategy, and one that no other *found* beats. ``eliminations``
    counts them by kind: node, edge, branch, heuristic. ``num_computed`` counts the distinct tables computed.
    """

    memory_bytes: IntArray
    time_ns: IntArray
    exact: bool
    eliminations: Counter[str]
    num_computed: int
    _of: tuple[_Computed, ...]
    _picks: IntArray

    def strategy(self, point: int) -> Strategy:
        """The strategy of a point, unrolled."""
        part, inside_part = map(int, self._picks[:, point])
        return self._of[part].strategy(inside_part)


def track(graph: CostGraph, *, linear: bool = True, pruned: bool = True, merged: int | None = None) -> Tracked:
    """The frontier of a graph by eliminations and then linear dynamic programming.

    Without ``linear`` all is eliminated but two nodes (FT-Elimination), for comparison. With ``pruned`` whatever is
    proved to be in no frontier strategy is dropped before and between the steps; the result is the same. ``merged``
    bounds the configurations that branch elimination may make; what would need more is settled heuristically.
    """
    reducing = Reducing(linear) if merged is None else Reducing(linear, merged)
    parts, settled = reducing.parts(graph)
    computed = [_computed(reducing, part, pruned) for part in parts]
    found = reduce_points(union([_points(index, each.table) for index, each in enumerate(computed)]))
    done = computed[0].whole.done + Counter(heuristic=settled)
    num_computed = sum(len(each.tables) for each in computed)
    return Tracked(found.memory_bytes, found.time_ns, not settled, done, num_computed, tuple(computed), found.picks)


@dataclass(frozen=True, slots=True)
class _Computed:
    """The frontier of a part, and what its strategies are read off from."""

    whole: Whole
    tables: Tables

    @property
    def table(self) -> Table:
        return self.tables[self.whole.expression.key]

    def strategy(self, point: int) -> Strategy:
        return self.whole.strategy(points_taken(self.whole.expression, point, self.tables), self.tables)


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


def _points(end: int, table: Table) -> Points:
    index = np.arange(table.num_points)
    picks = np.stack((np.full_like(index, end), index))
    return Points(np.zeros_like(index), table.memory_bytes, table.time_ns, picks)
