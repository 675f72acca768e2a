"""Expressions computed as frontiers, and strategies read off them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipeplan.frontier.bounds import Bounds
from pipeplan.frontier.contraction import contract
from pipeplan.frontier.expression import Expression, in_order
from pipeplan.frontier.pairing import Limit, product
from pipeplan.frontier.table import IntArray, Table, gather, select
from pipeplan.time_limit import checkpoint

__all__ = ["Tables", "evaluate", "points_taken"]

Tables = dict[int, Table]
"""What has been computed, by an expression's key."""


def evaluate(
    root: Expression, tables: Tables, bounds: Bounds | None = None, *, most_sums: float = math.inf
) -> int | None:
    """Computes the table of an expression; every distinct part is computed once and stays in ``tables``.

    With ``bounds`` points that no frontier of the whole has use for are dropped. Tells how many pairs of points were
    offered to products; None if they would have been more than ``most_sums``.
    """
    num_sums = 0
    for part in in_order(root):
        checkpoint()
        if part.key not in tables:
            sources = [tables[source.key] for source in part.sources]
            num_sums += _sums(part, sources)
            if num_sums > most_sums:
                return None
            made = _computed(part, sources, bounds.limit(part.key) if bounds else None)
            tables[part.key] = select(made, bounds.useful(part.key, made)) if bounds else made
    return num_sums


def _sums(part: Expression, sources: Sequence[Table]) -> int:
    """How many pairs of points a part offers."""
    if part.operation == "contract":
        return int((sources[0].counts @ sources[1].counts).sum())
    return int((sources[0].counts * sources[1].counts).sum()) if part.operation == "product" else 0


def _computed(part: Expression, sources: Sequence[Table], limit: Limit | None) -> Table:
    if part.given is not None:
        return part.given
    if part.cells is not None:
        return gather(sources[0], part.cells)
    left, right = sources
    return contract(left, right, limit) if part.operation == "contract" else product(left, right, limit)


def points_taken(root: Expression, tables: Tables) -> dict[Expression, IntArray]:
    """The point of every given table that is in each point of the whole, [P]."""
    taken: dict[Expression, IntArray] = {}
    stack = [(root, np.arange(tables[root.key].num_points))]
    while stack:
        part, points = stack.pop()
        if part.given is not None:
            taken[part] = points
        stack.extend((source, tables[part.key].picks[s, points]) for s, source in enumerate(part.sources))
    return taken
