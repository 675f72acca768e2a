"""Frontier tracking (TensorOpt, Algorithms 2 and 3): all strategies that no other beats in memory and time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pipeplan.frontier.bounds import bounds_of
from pipeplan.frontier.corridors import fewer, gap_by_gap
from pipeplan.frontier.found import Found, computed
from pipeplan.frontier.graph import CostGraph, Strategy
from pipeplan.frontier.reducing import Part, Reducing
from pipeplan.frontier.table import IntArray, Points, reduce_points, union

__all__ = ["Tracked", "track"]

_WEIGHTINGS = 24
"""Weightings by which configurations, and then points, are dropped."""

_AT_ONCE = 2e7
"""Sums of points up to which a frontier is computed as one; beyond, gap by gap of its hull."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """The cost frontier of a graph.

    ``memory_bytes`` ascends and ``time_ns`` descends, [P]. It is ``exact`` unless a heuristic elimination left
    configurations out, or it was asked for up to a factor; even then every point is a strategy, and one that no other
    *found* beats. The ``factor`` is proved: for every strategy of the configurations left in some point takes at most
    ``factor`` times its memory and its time. ``eliminations`` counts them by kind: node, edge, branch, heuristic.
    ``num_computed`` counts the distinct tables of the graph's expression.
    """

    memory_bytes: IntArray
    time_ns: IntArray
    exact: bool
    eliminations: Counter[str]
    num_computed: int
    _of: tuple[Found, ...]
    _picks: IntArray
    factor: float = 1.0

    def strategy(self, point: int) -> Strategy:
        """The strategy of a point, unrolled."""
        part, inside_part = map(int, self._picks[:, point])
        return self._of[part].strategies.strategy(inside_part)


def track(
    graph: CostGraph, *, linear: bool = True, pruned: bool = True, merged: int | None = None, within: float = 0.0
) -> Tracked:
    """The frontier of a graph by eliminations and then linear dynamic programming.

    Without ``linear`` all is eliminated but two nodes (FT-Elimination), for comparison. With ``pruned`` whatever is
    proved to be in no frontier strategy is dropped before and between the steps; the result is the same. ``merged``
    bounds the configurations that branch elimination may make; what would need more is settled heuristically.

    ``within`` above 0 asks only for a ``factor`` of 1 + ``within`` and takes far less; the result's own ``factor`` says
    what was reached.

    Raises:
        ValueError: there is no strategy; not ``pruned``, the frontier is then empty.
    """
    reducing = Reducing(linear) if merged is None else Reducing(linear, merged)
    parts, settled = reducing.parts(graph)
    whole = reducing.whole(parts[0])
    found = [each for part in parts for each in _found(reducing, part, pruned, within)]
    kept = reduce_points(union([_points(index, each) for index, each in enumerate(found)]))
    factor = max(each.factor for each in found)
    done = whole.done + Counter(heuristic=settled)
    exact = not settled and factor == 1
    num_computed = whole.num_tables
    return Tracked(kept.memory_bytes, kept.time_ns, exact, done, num_computed, tuple(found), kept.picks, factor)


def _found(reducing: Reducing, part: Part, pruned: bool, within: float) -> list[Found]:
    """The frontier of a part that needs no heuristics, at once where that is not too much, else gap by gap."""
    if not pruned:
        everything = computed(reducing.whole(part))
        assert everything
        return [everything]
    if within:
        return gap_by_gap(reducing, part, within)
    whole = reducing.whole(part)
    part = fewer(whole, bounds_of(whole.expression, _WEIGHTINGS))
    whole = reducing.whole(part)
    at_once = computed(whole, bounds_of(whole.expression, _WEIGHTINGS), most_sums=_AT_ONCE)
    return [at_once] if at_once else gap_by_gap(reducing, part, within)


def _points(end: int, found: Found) -> Points:
    memory, time = found.strategies.memory_bytes, found.strategies.time_ns
    index = np.arange(len(memory))
    return Points(np.zeros_like(index), memory, time, np.stack((np.full_like(index, end), index)))
