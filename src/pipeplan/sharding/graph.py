"""What frontier tracking works on: operators with configurations, those never needed left out.

What frontier tracking works on: operators with configurations, and tensors between them (TensorOpt section 2.1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np
import numpy.typing as npt

from pipeplan.costs import UNLIMITED
from pipeplan.sharding.table import IntArray, Table, gather

__all__ = ["CostEdge", "CostGraph", "CostNode", "Strategy", "undominated"]


@dataclass(frozen=True, slots=True)
class CostNode:
    """An operator: the memory and time of each of its K configurations, a table of 1 x K cells.

    A cell has one point, or one for each variant worth having (such as recomputation); none is a configuration that
    cannot be. ``configurations`` names the cells.
    """

    name: str
    configurations: tuple[str, ...]
    costs: Table


@dataclass(frozen=True, slots=True)
class CostEdge:
    """A tensor: what it costs for each pair of configurations, a table of K_source x K_target cells.

    A cell may offer several variants, as tensor reuse does (section 4.2); ``variants`` names them. Several edges may
    join the same two nodes.
    """

    source: str
    target: str
    costs: Table
    variants: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class CostGraph:
    """Operators and tensors; memory and time of a strategy are the sums over all of them (equation 3)."""

    nodes: tuple[CostNode, ...]
    edges: tuple[CostEdge, ...]

    def __post_init__(self) -> None:
        sizes = {node.name: len(node.configurations) for node in self.nodes}
        if len(sizes) < len(self.nodes):
            raise ValueError("two operators have the same name")
        for node in self.nodes:
            _shape(node.name, node.costs, (1, sizes[node.name]))
        for edge in self.edges:
            _shape(f"{edge.source} -> {edge.target}", edge.costs, (sizes[edge.source], sizes[edge.target]))
        self.order()

    def order(self) -> tuple[str, ...]:
        """The operators in topological order, ties as they are listed."""
        graph = nx.DiGraph()
        graph.add_nodes_from(node.name for node in self.nodes)
        graph.add_edges_from((edge.source, edge.target) for edge in self.edges)
        position = {node.name: index for index, node in enumerate(self.nodes)}
        return tuple(nx.lexicographical_topological_sort(graph, key=position.__getitem__))

    def restricted(self, kept: Mapping[str, IntArray]) -> CostGraph:
        """The graph with only some configurations of each operator, by their places."""
        nodes = [
            CostNode(
                node.name,
                tuple(node.configurations[k] for k in kept[node.name]),
                _only(node.costs, [0], kept[node.name]),
            )
            for node in self.nodes
        ]
        edges = [replace(edge, costs=_only(edge.costs, kept[edge.source], kept[edge.target])) for edge in self.edges]
        return CostGraph(tuple(nodes), tuple(edges))


@dataclass(frozen=True, slots=True)
class Strategy:
    """A configuration for every operator and a variant for every tensor, by their place in the graph."""

    memory_bytes: int
    time_ns: int
    configurations: Mapping[str, int]
    node_variants: Mapping[str, int]
    edge_variants: tuple[int, ...]


def _only(costs: Table, rows: npt.ArrayLike, columns: IntArray) -> Table:
    """Some rows and columns of given costs, of which every point remains the variant it was."""
    chosen = gather(costs, np.asarray(rows)[:, None] * costs.columns + columns[None, :])
    return replace(chosen, picks=costs.picks[:, chosen.picks[0]])


def _shape(what: str, costs: Table, expected: tuple[int, int]) -> None:
    if (costs.rows, costs.columns) != expected:
        raise ValueError(f"{what}: costs of {costs.rows} x {costs.columns} cells, but {expected[0]} x {expected[1]}")
    if not costs.num_points:
        raise ValueError(f"{what}: no configuration is allowed")


def undominated(graph: CostGraph, besides: Mapping[str, IntArray] | None = None) -> dict[str, IntArray]:
    """The configurations of every operator, by their places, without which some strategies would be missed.

    One is left out if another one takes no more, itself and on every tensor with whatever is at its far end; of equal
    ones the first stays. ``besides`` is a further cost of each configuration of some operators. Where a cell has
    several points all configurations stay.
    """
    touching: dict[str, list[tuple[bool, Table]]] = defaultdict(list)
    for edge in graph.edges:
        touching[edge.source].append((False, edge.costs))
        touching[edge.target].append((True, edge.costs))
    known: dict[object, IntArray] = {}
    kept = {}
    for node in graph.nodes:
        more = None if besides is None else besides.get(node.name)
        tables = [(True, node.costs), *touching[node.name]]
        alike = tuple((taken, id(each)) for taken, each in tables), None if more is None else more.tobytes()
        if alike not in known:
            known[alike] = _useful(tables, more)
        kept[node.name] = known[alike]
    return kept


def _useful(tables: Sequence[tuple[bool, Table]], besides: IntArray | None) -> IntArray:
    """Of an operator, by its own table and those of its tensors, of which it is the taker (columns) or the giver."""
    size = tables[0][1].columns
    rows = []
    for taken, table in tables:
        costs = _costs(table)
        if costs is None:
            return np.arange(size)
        rows.append((costs if taken else costs.swapaxes(1, 2)).reshape(-1, size))
    return _best(np.concatenate(rows if besides is None else [*rows, besides[None, :]]))


def _costs(table: Table) -> IntArray | None:
    """Memory and time, [2, rows, columns], never where a cell is empty; None where one has several points."""
    counts = table.counts
    if counts.max(initial=0) > 1:
        return None
    found = np.full((2, *counts.shape), UNLIMITED)
    found[:, counts > 0] = table.memory_bytes, table.time_ns
    return found


def _best(costs: IntArray) -> IntArray:
    """The columns that no other column is at most as large as throughout, of costs [N, K]."""
    number = np.arange(costs.shape[1])
    at_most = np.asarray((costs[:, :, None] <= costs[:, None, :]).all(axis=0))
    beaten = at_most & (~at_most.T | (number[:, None] < number[None, :]))
    return np.flatnonzero(~(beaten & (number[:, None] != number[None, :])).any(axis=0))
