"""Frontier tracking (TensorOpt, Algorithms 2 and 3): all strategies that no other beats in memory and time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeplan.frontier.bounds import bounds_of
from pipeplan.frontier.elimination import Reduced
from pipeplan.frontier.evaluation import Tables, evaluate, points_taken
from pipeplan.frontier.expression import Expression, in_order
from pipeplan.frontier.graph import CostGraph, Strategy
from pipeplan.frontier.scalars import FloatArray, inside
from pipeplan.frontier.table import IntArray, Points, Table, reduce_points, select, union

__all__ = ["Tracked", "track"]

_MERGED = 4096
"""Branch elimination makes at most so many configurations; a node that would make more is settled by heuristics."""

_ROUNDS = (6, 16)
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
    _strategy: Callable[[int], Strategy]

    def strategy(self, point: int) -> Strategy:
        """The strategy of a point, unrolled."""
        return self._strategy(point)


@dataclass(frozen=True, slots=True)
class _Computed:
    """The frontier of an end, and all tables on the way to it."""

    table: Table
    tables: Tables


@dataclass(frozen=True, slots=True)
class _End:
    """A graph reduced to one cell, and whether everything was tried on the way."""

    whole: Expression
    exact: bool
    done: Counter[str]


def track(graph: CostGraph, *, linear: bool = True, pruned: bool = True, merged: int = _MERGED) -> Tracked:
    """The frontier of a graph by eliminations and then linear dynamic programming.

    Without ``linear`` all is eliminated but two nodes (FT-Elimination), for comparison. With ``pruned`` whatever is
    proved to be in no frontier strategy is dropped before and between the steps; the result is the same. ``merged``
    bounds the configurations that branch elimination may make; what would need more is settled heuristically.
    """
    places = {node.name: np.arange(len(node.configurations)) for node in graph.nodes}
    for weightings in _ROUNDS if pruned else ():
        graph, places = _fewer(graph, places, weightings, linear, merged)
    reduced, rows, edges = Reduced.of(graph)
    ends = _finish(reduced, linear, merged)
    computed = [_computed(end, pruned) for end in ends]
    found = reduce_points(union([_points(index, end.table) for index, end in enumerate(computed)]))

    def strategy(point: int) -> Strategy:
        index, inside_end = found.picks[:, point].tolist()
        tables = computed[index].tables
        taken = points_taken(ends[index].whole, inside_end, tables)
        return Strategy(
            memory_bytes=int(found.memory_bytes[point]),
            time_ns=int(found.time_ns[point]),
            configurations={name: int(places[name][tables[row.key].cell_of(taken[row])]) for name, row in rows.items()},
            node_variants={name: int(tables[row.key].picks[0, taken[row]]) for name, row in rows.items()},
            edge_variants=tuple(int(tables[edge.key].picks[0, taken[edge]]) for edge in edges),
        )

    exact = all(end.exact for end in ends)
    num_computed = sum(len(end.tables) for end in computed)
    return Tracked(found.memory_bytes, found.time_ns, exact, ends[0].done, num_computed, strategy)


Places = dict[str, IntArray]
"""Which of an operator's configurations are left, by their places in the whole graph."""


def _fewer(graph: CostGraph, places: Places, weightings: int, linear: bool, merged: int) -> tuple[CostGraph, Places]:
    """The graph without configurations that no frontier strategy has; equal operators keep the same.

    Where heuristics leave something out they would prove nothing of the whole, and all stays.
    """
    reduced, rows, _ = Reduced.of(graph)
    ends = _finish(reduced, linear, merged)
    if not all(end.exact for end in ends):
        return graph, places
    costs = {node.name: node.costs for node in graph.nodes}
    used: dict[int, npt.NDArray[np.bool_]] = {}
    for end in ends:
        bounds = bounds_of(end.whole, weightings)
        for name, row in rows.items():
            row_table = costs[name]
            points = np.flatnonzero(bounds.useful(row, row_table))
            cells = np.searchsorted(row_table.starts, points, side="right") - 1
            used.setdefault(row.key, np.zeros(row.columns, dtype=bool))[cells] = True
    kept = {name: np.flatnonzero(used[row.key]) for name, row in rows.items()}
    return graph.restricted(kept), {name: places[name][kept[name]] for name in places}


def _computed(end: _End, pruned: bool) -> _Computed:
    """The frontier of one end, with the tables it is read off from."""
    tables: Tables = {}
    if not pruned:
        return _Computed(evaluate(end.whole, tables), tables)
    bounds = bounds_of(end.whole, _WEIGHTINGS)
    parts = defaultdict(list)
    for part in in_order(end.whole):
        parts[part.key].append(part)

    def kept(key: int, table: Table) -> Table:
        return select(table, np.logical_or.reduce([bounds.useful(part, table) for part in parts[key]]))

    return _Computed(evaluate(end.whole, tables, kept), tables)


def _finish(reduced: Reduced, linear: bool, merged: int) -> list[_End]:
    """Algorithm 2; one end for every choice made heuristically."""
    kept = _kept(reduced, linear)
    while len(kept) < len(reduced.nodes) and reduced.eliminate(kept, merged=merged, in_order=not linear):
        kept = _kept(reduced, linear)
    if len(kept) == len(reduced.nodes):
        return [_End(_along(reduced, sorted(kept)), True, reduced.done)]
    node = max(reduced.nodes.keys() - set(kept), key=lambda other: (len(reduced.neighbours(other)), -other))
    choices, every = _promising(reduced, node)
    ends = [end for choice in choices for end in _finish(reduced.fix(node, choice), linear, merged)]
    return [_End(end.whole, end.exact and every, end.done) for end in ends]


def _kept(reduced: Reduced, linear: bool) -> Collection[int]:
    """What no step may eliminate: the linear part, or the two ends."""
    return reduced.linear() if linear else {min(reduced.nodes), max(reduced.nodes)}


def _along(reduced: Reduced, chain: list[int]) -> Expression:
    """Linear dynamic programming (Algorithm 3) over nodes of which each has an edge to the next at most."""
    writer = reduced.writer
    frontier = reduced.nodes[chain[0]]
    for before, node in pairwise(chain):
        joined = (before, node) in reduced.edges
        reached = writer.contract(frontier, reduced.between(before, node)) if joined else writer.union(frontier)
        frontier = writer.product(reached, reduced.nodes[node])
    return writer.union(frontier)


def _promising(reduced: Reduced, node: int) -> tuple[list[int], bool]:
    """Configurations that heuristic elimination tries: least memory, least time, least of both; and if that is all.

    Each is judged by its own costs and, for every neighbour, the best that its edge offers.
    """
    memory, time = (_judged(reduced, node, weights) for weights in ((1.0, 0.0), (0.0, 1.0)))
    both = _judged(reduced, node, (1 / max(memory.min(), 1), 1 / max(time.min(), 1)))
    choices = sorted({int(np.argmin(costs)) for costs in (memory, time, both)})
    return choices, len(choices) == np.count_nonzero(np.isfinite(both))


def _judged(reduced: Reduced, node: int, weights: tuple[float, float]) -> FloatArray:
    row = reduced.nodes[node]
    costs = inside(row, weights)[row.key][0].copy()
    for other in reduced.neighbours(node):
        edge = reduced.between(node, other)
        costs += inside(edge, weights)[edge.key].min(axis=1)
    return np.asarray(costs)


def _points(end: int, table: Table) -> Points:
    index = np.arange(table.num_points)
    picks = np.stack((np.full_like(index, end), index))
    return Points(np.zeros_like(index), table.memory_bytes, table.time_ns, picks)
