"""Frontier tracking (TensorOpt, Algorithms 2 and 3): all strategies that no other beats in memory and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeplan.frontier.bounds import bounds_of
from pipeplan.frontier.elimination import Reduced
from pipeplan.frontier.evaluation import Tables, evaluate, points_taken
from pipeplan.frontier.expression import Expression
from pipeplan.frontier.graph import CostGraph, Strategy
from pipeplan.frontier.scalars import FloatArray, inside
from pipeplan.frontier.table import IntArray, Points, Table, reduce_points, select, union

__all__ = ["Tracked", "track"]

_MERGED = 4096
"""Branch elimination makes at most so many configurations; a node that would make more is settled by heuristics."""

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

    def held(self, name: str, choice: int) -> _Part:
        """With one configuration of an operator, all others as they are."""
        return self.fewer(
            {**{each: np.arange(len(left)) for each, left in self.places.items()}, name: np.array([choice])}
        )

    def same(self, other: _Part) -> bool:
        """Whether both leave the same configurations."""
        return all(np.array_equal(left, other.places[name]) for name, left in self.places.items())


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
    parts, settled = way.parts(whole)
    computed = [way.computed(part) for part in parts]
    found = reduce_points(union([_points(index, each.table) for index, each in enumerate(computed)]))
    done = computed[0].done + Counter(heuristic=settled)

    num_computed = sum(len(each.tables) for each in computed)
    return Tracked(found.memory_bytes, found.time_ns, not settled, done, num_computed, tuple(computed), found.picks)


@dataclass(frozen=True, slots=True)
class _Way:
    """The options of :func:`track`, and its steps."""

    linear: bool
    pruned: bool
    merged: int

    def parts(self, whole: _Part) -> tuple[list[_Part], int]:
        """The graph, or one part for each of the heuristics; and how many operators they hold to a choice.

        One chooses for least memory, one for least time, one for least of both, all along.
        """
        found: list[_Part] = []
        held = 0
        for weights in ((1.0, 0.0), (0.0, 1.0), None):
            part, settled = whole, 0
            while (chosen := self._choice(part, weights)) is not None:
                part, settled = part.held(*chosen), settled + 1
            if not settled:
                return [whole], 0
            held = max(held, settled)
            if not any(part.same(other) for other in found):
                found.append(part)
        return found, held

    def _choice(self, part: _Part, weights: tuple[float, float] | None) -> tuple[str, int] | None:
        """The operator with most neighbours that cannot be eliminated exactly, and its configuration."""
        reduced, _, _ = Reduced.of(part.graph)
        if self._reduce(reduced):
            return None
        left = [node for node in reduced.nodes.keys() - set(self._kept(reduced)) if node not in reduced.joint]
        node = max(left or set(reduced.nodes) - reduced.joint, key=lambda each: (len(reduced.neighbours(each)), -each))
        return part.graph.order()[node], _promising(reduced, node, weights)

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
        kept = {}
        for node in part.graph.nodes:
            points = np.flatnonzero(bounds.useful(rows[node.name].key, node.costs))
            kept[node.name] = np.unique(np.searchsorted(node.costs.starts, points, side="right") - 1)
        return part.fewer(kept)

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
    """Drops the points of a part's table that no frontier strategy has."""
    bounds = bounds_of(whole, _WEIGHTINGS)
    return lambda key, table: select(table, bounds.useful(key, table))


def _along(reduced: Reduced, chain: list[int]) -> Expression:
    """Linear dynamic programming (Algorithm 3) over nodes of which each has an edge to the next at most."""
    writer = reduced.writer
    frontier = reduced.nodes[chain[0]]
    for before, node in pairwise(chain):
        joined = (before, node) in reduced.edges
        reached = writer.contract(frontier, reduced.between(before, node)) if joined else writer.union(frontier)
        frontier = writer.product(reached, reduced.nodes[node])
    return writer.union(frontier)


def _promising(reduced: Reduced, node: int, weights: tuple[float, float] | None) -> int:
    """The best configuration by these weights, or by both costs over their least.

    Each is judged by its own costs and, for every neighbour, the best that its edge offers.
    """
    if weights is not None:
        return int(np.argmin(_judged(reduced, node, weights)))
    memory, time = (_judged(reduced, node, each) for each in ((1.0, 0.0), (0.0, 1.0)))
    return int(np.argmin(memory / max(memory.min(), 1) + time / max(time.min(), 1)))


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
