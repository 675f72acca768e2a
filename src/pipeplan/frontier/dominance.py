"""Configurations that another one of the same operator replaces everywhere, at no more memory and time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from pipeplan.frontier.graph import CostGraph
from pipeplan.frontier.table import IntArray, Table

__all__ = ["undominated"]

_NEVER = np.iinfo(np.int64).max


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
    found = np.full((2, *counts.shape), _NEVER)
    found[:, counts > 0] = table.memory_bytes, table.time_ns
    return found


def _best(costs: IntArray) -> IntArray:
    """The columns that no other column is at most as large as throughout, of costs [N, K]."""
    number = np.arange(costs.shape[1])
    at_most = np.asarray((costs[:, :, None] <= costs[:, None, :]).all(axis=0))
    beaten = at_most & (~at_most.T | (number[:, None] < number[None, :]))
    return np.flatnonzero(~(beaten & (number[:, None] != number[None, :])).any(axis=0))
