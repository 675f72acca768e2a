"""Frontier tracking (TensorOpt, Algorithms 2 and 3): all strategies that no other beats in memory and time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
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
    _of: tuple[_Computed, ...]
    _picks: IntArray

    def strategy(self, point: int) -> Strategy:
        """The strategy of a point, unrolled."""
        part, inside_part = map(int, self._picks[:, point])
        return self._of[part].strategy(inside_part)


@dataclass(frozen=True, slots=True)
class _Part:
    """A graph that eliminations reduce to one cell: all of the given one, or with some operators held to a choice.

    ``places`` says which of an operator's configurations are left, by their places in the given graph.
    """

    graph: CostGraph
    places: Mapping[str, IntArray]

    def fewer(self, kept: Mapping[str, IntArray]) -> _Part:
        """With these configurations of what is left."""
        places = {name: old[kept[name]] for name, old in self.places.items()}
        return _Part(self.graph.restricted(kept), places)


@dataclass(frozen=True, slots=True)
class _Computed:
    """The frontier of a part, and what its strategies are read off from."""

    part: _Part
    whole: Expression
    rows: dict[str, Expression]
    edges: list[Expression]
    tables: Tables
    done: Counter[str]

    @property
    def table(self) -> Table:
        return self.tables[self.whole.key]

    def strategy(self, point: int) -> Strategy:
        """The strategy of a point, unrolled."""
        taken = points_taken(self.whole, point, self.tables)
        rows = {name: (self.tables[row.key], taken[row]) for name, row in self.rows.items()}
        return Strategy(
            memory_bytes=int(self.table.memory_bytes[point]),
            time_ns=int(self.table.time_ns[point]),
            configurations={name: int(self.part.places[name][row.cell_of(at)]) for name, (row, at) in rows.items()},
            node_variants={name: int(row.picks[0, at]) for name, (row, at) in rows.items()},
            edge_variants=tuple(int(self.tables[edge.key].picks[0, taken[edge]]) for edge in self.edges),
        )


def track(graph: CostGraph, *, linear: bool = True, pruned: bool = True, merged: int = _MERGED) -> Tracked:
    """The frontier of a graph by eliminations and then linear dynamic programming.

    Without ``linear`` all is eliminated but two nodes (FT-Elimination), for comparison. With ``pruned`` whatever is
    proved to be in no frontier strategy is dropped before and between the steps; the result is the same. ``merged``
    bounds the configurations that branch elimination may make; what would need more is settled heuristically.
    """
    way = _Way(linear, pruned, merged)
    whole = _Part(graph, {node.name: np.arange(len(node.configurations)) for node in graph.nodes})
    parts, num_settled, exact = way.settled(whole)
    computed = [way.computed(part) for part in parts]
    found = reduce_points(union([_points(index, each.table) for index, each in enumerate(computed)]))
    done = computed[0].done + Counter(heuristic=num_settled)

    num_computed = sum(len(each.tables) for each in computed)
    return Tracked(found.memory_bytes, found.time_ns, exact, done, num_computed, tuple(computed), found.picks)


@dataclass(frozen=True, slots=True)
class _Way:
    """The options of :func:`track`, and its steps."""

    linear: bool
    pruned: bool
    merged: int

    def settled(self, part: _Part) -> tuple[list[_Part], int, bool]:
        """Parts that need no heuristics, operators settled in each, and whether every configuration is in some part."""
        reduced, rows, _ = Reduced.of(part.graph)
        if self._reduce(reduced):
            return [part], 0, True
        left = [node for node in reduced.nodes.keys() - set(self._kept(reduced)) if node not in reduced.joint]
        node = max(left or set(reduced.nodes) - reduced.joint, key=lambda each: (len(reduced.neighbours(each)), -each))
        choices, every = _promising(reduced, node)
        name = part.graph.order()[node]
        all_of = {other: np.arange(row.columns) for other, row in rows.items()}
        found = [self.settled(part.fewer({**all_of, name: np.array([choice])})) for choice in choices]
        parts = [each for parts, _, _ in found for each in parts]
        return parts, 1 + max(num for _, num, _ in found), every and all(exact for _, _, exact in found)

    def computed(self, part: _Part) -> _Computed:
        """The frontier of a part that needs no heuristics."""
        for weightings in _ROUNDS if self.pruned else ():
            part = self._fewer(part, weightings)
        reduced, rows, edges = Reduced.of(part.graph)
        whole = self._whole(reduced)
        tables: Tables = {}
        evaluate(whole, tables, _kept_of(whole) if self.pruned else None)
        return _Computed(part, whole, rows, edges, tables, reduced.done)

    def _fewer(self, part: _Part, weightings: int) -> _Part:
        """A part without configurations that no frontier strategy has; equal operators keep the same."""
        reduced, rows, _ = Reduced.of(part.graph)
        bounds = bounds_of(self._whole(reduced), weightings)
        used: dict[int, npt.NDArray[np.bool_]] = {}
        for node in part.graph.nodes:
            row = rows[node.name]
            points = np.flatnonzero(bounds.useful(row, node.costs))
            cells = np.searchsorted(node.costs.starts, points, side="right") - 1
            used.setdefault(row.key, np.zeros(row.columns, dtype=bool))[cells] = True
        return part.fewer({name: np.flatnonzero(used[row.key]) for name, row in rows.items()})

    def _whole(self, reduced: Reduced) -> Expression:
        done = self._reduce(reduced)
        assert done
        return _along(reduced, sorted(reduced.nodes))

    def _reduce(self, reduced: Reduced) -> bool:
        """Algorithm 2 without heuristics; whether what is left is linear."""
        kept = self._kept(reduced)
        while len(kept) < len(reduced.nodes) and reduced.eliminate(kept, merged=self.merged, in_order=not self.linear):
            kept = self._kept(reduced)
        return len(kept) == len(reduced.nodes)

    def _kept(self, reduced: Reduced) -> Collection[int]:
        """What no step may eliminate: the linear part, or the two ends."""
        return reduced.linear() if self.linear else {min(reduced.nodes), max(reduced.nodes)}


def _kept_of(whole: Expression) -> Callable[[int, Table], Table]:
    """Drops the points of a part that no instance of it has use for."""
    bounds = bounds_of(whole, _WEIGHTINGS)
    parts = defaultdict(list)
    for part in in_order(whole):
        parts[part.key].append(part)
    return lambda key, table: select(table, np.logical_or.reduce([bounds.useful(each, table) for each in parts[key]]))


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
    both = memory / max(memory.min(), 1) + time / max(time.min(), 1)
    choices = sorted({int(np.argmin(costs)) for costs in (memory, time, both)})
    return choices, len(choices) == np.count_nonzero(np.isfinite(both))


def _judged(reduced: Reduced, node: int, weights: tuple[float, float]) -> FloatArray:
    values: dict[int, FloatArray] = {}
    row = reduced.nodes[node]
    costs: FloatArray = inside(row, weights, values)[row.key][0].copy()
    for other in reduced.neighbours(node):
        edge = reduced.between(node, other)
        costs += inside(edge, weights, values)[edge.key].min(axis=1)
    return costs


def _points(end: int, table: Table) -> Points:
    index = np.arange(table.num_points)
    picks = np.stack((np.full_like(index, end), index))
    return Points(np.zeros_like(index), table.memory_bytes, table.time_ns, picks)
