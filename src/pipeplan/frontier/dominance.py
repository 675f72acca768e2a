"""Configurations that another one of the same operator replaces everywhere, at no more memory and time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

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
    touching: dict[str, list[IntArray | None]] = defaultdict(list)
    for edge in graph.edges:
        tensor = _costs(edge.costs)
        touching[edge.source].append(None if tensor is None else tensor.swapaxes(1, 2))
        touching[edge.target].append(tensor)
    kept = {}
    for node in graph.nodes:
        costs = [_costs(node.costs), *touching[node.name]]
        known = [each.reshape(-1, len(node.configurations)) for each in costs if each is not None]
        if len(known) < len(costs):
            kept[node.name] = np.arange(len(node.configurations))
            continue
        if besides is not None and node.name in besides:
            known.append(besides[node.name][None, :])
        kept[node.name] = _best(np.concatenate(known))
    return kept


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
