"""Frontier tracking (TensorOpt, Algorithms 2 and 3): all strategies that no other beats in memory and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeplan.frontier.elimination import Reduced
from pipeplan.frontier.graph import CostGraph, Strategy
from pipeplan.frontier.table import IntArray, Points, Table, reduce_points, union, unroll

__all__ = ["Tracked", "track"]

_MERGED = 4096
"""Branch elimination makes at most so many configurations; a node that would make more is settled by heuristics."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """The cost frontier of a graph.

    ``memory_bytes`` ascends and ``time_ns`` descends, [P]. It is ``exact`` unless a heuristic elimination left
    configurations out; even then every point is a strategy, and one that no other *found* beats. ``eliminations``
    counts them by kind: node, edge, branch, heuristic.
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
class _End:
    """A graph reduced to one frontier, and whether everything was tried on the way."""

    table: Table
    exact: bool
    done: Counter[str]


def track(graph: CostGraph, *, linear: bool = True, merged: int = _MERGED) -> Tracked:
    """The frontier of a graph by eliminations and then linear dynamic programming.

    Without ``linear`` all is eliminated but two nodes (FT-Elimination), for comparison. ``merged`` bounds the
    configurations that branch elimination may make; what would need more is settled heuristically.
    """
    reduced, rows, edges = Reduced.of(graph)
    ends = _finish(reduced, linear, merged)
    found = reduce_points(union([_points(index, end.table) for index, end in enumerate(ends)]))

    def strategy(point: int) -> Strategy:
        end, inside = found.picks[:, point].tolist()
        taken = unroll(ends[end].table, inside)
        return Strategy(
            memory_bytes=int(found.memory_bytes[point]),
            time_ns=int(found.time_ns[point]),
            configurations={name: row.cell_of(taken[id(row)]) for name, row in rows.items()},
            node_variants={name: int(row.picks[0, taken[id(row)]]) for name, row in rows.items()},
            edge_variants=tuple(int(edge.picks[0, taken[id(edge)]]) for edge in edges),
        )

    exact = all(end.exact for end in ends)
    return Tracked(found.memory_bytes, found.time_ns, exact, ends[0].done, reduced.memo.num_computed, strategy)


def _finish(reduced: Reduced, linear: bool, merged: int) -> list[_End]:
    """Algorithm 2; one end for every choice made heuristically."""
    kept = _kept(reduced, linear)
    while len(kept) < len(reduced.nodes) and reduced.eliminate(kept, merged=merged, in_order=not linear):
        kept = _kept(reduced, linear)
    if len(kept) == len(reduced.nodes):
        return [_End(_along(reduced, sorted(kept)), True, reduced.done)]
    node = max(reduced.nodes.keys() - set(kept), key=lambda other: (len(reduced.neighbours(other)), -other))
    choices = promising(reduced, node)
    every = len(choices) == np.count_nonzero(reduced.nodes[node].counts)
    ends = [end for choice in choices for end in _finish(reduced.fix(node, choice), linear, merged)]
    return [_End(end.table, end.exact and every, end.done) for end in ends]


def _kept(reduced: Reduced, linear: bool) -> Collection[int]:
    """What no step may eliminate: the linear part, or the two ends."""
    return reduced.linear() if linear else {min(reduced.nodes), max(reduced.nodes)}


def _along(reduced: Reduced, chain: list[int]) -> Table:
    """Linear dynamic programming (Algorithm 3) over nodes of which each has an edge to the next at most."""
    memo = reduced.memo
    frontier = reduced.nodes[chain[0]]
    for before, node in pairwise(chain):
        joined = (before, node) in reduced.edges
        reached = memo.contract(frontier, reduced.between(before, node)) if joined else memo.union(frontier)
        frontier = memo.product(reached, reduced.nodes[node])
    return memo.union(frontier)


def promising(reduced: Reduced, node: int) -> list[int]:
    """Configurations that heuristic elimination tries: least memory, least time, least of both together.

    Each is judged by its own costs and, for every neighbour, the best that its edge offers.
    """
    sides = [reduced.nodes[node], *(reduced.between(node, other) for other in reduced.neighbours(node))]
    memory = sum(_least(side, side.memory_bytes, index > 0) for index, side in enumerate(sides))
    time = sum(_least(side, side.time_ns, index > 0) for index, side in enumerate(sides))
    costs = np.stack((memory, time)).astype(np.float64)
    finite = np.isfinite(costs).all(axis=0)
    scale = np.maximum(costs[:, finite].min(axis=1, keepdims=True), 1)
    measures = (costs[0], costs[1], (costs / scale).sum(axis=0))
    return sorted({int(np.argmin(np.where(finite, measure, np.inf))) for measure in measures})


def _least(table: Table, values: IntArray, over_columns: bool) -> npt.NDArray[np.float64]:
    """The least value of every cell, or of every row, infinite where there is none."""
    counts = table.counts.ravel()
    cells = np.full(len(counts), np.inf)
    filled = np.flatnonzero(counts)
    cells[filled] = np.minimum.reduceat(values, table.starts[:-1][filled])
    matrix = cells.reshape(table.rows, table.columns)
    least: npt.NDArray[np.float64] = matrix.min(axis=1) if over_columns else matrix[0]
    return least


def _points(end: int, table: Table) -> Points:
    index = np.arange(table.num_points)
    picks = np.stack((np.full_like(index, end), index))
    return Points(np.zeros_like(index), table.memory_bytes, table.time_ns, picks)
