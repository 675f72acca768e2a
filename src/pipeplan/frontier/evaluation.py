"""Expressions computed as frontiers, and strategies read off them."""

from __future__ import annotations

from collections.abc import Callable

from pipeplan.frontier.contraction import contract
from pipeplan.frontier.expression import Expression, in_order
from pipeplan.frontier.table import Table, gather, product

__all__ = ["Tables", "evaluate", "points_taken"]

Tables = dict[int, Table]
"""What has been computed, by an expression's key."""


def evaluate(root: Expression, tables: Tables, kept: Callable[[int, Table], Table] | None = None) -> Table:
    """The table of an expression; every distinct part is computed once and stays in ``tables``.

    ``kept`` may drop points of a part, told its key, that no frontier of the whole has use for.
    """
    for part in in_order(root):
        if part.key not in tables:
            made = _computed(part, tables)
            tables[part.key] = kept(part.key, made) if kept else made
    return tables[root.key]


def _computed(part: Expression, tables: Tables) -> Table:
    sources = [tables[source.key] for source in part.sources]
    if part.given is not None:
        return part.given
    if part.cells is not None:
        return gather(sources[0], part.cells)
    return (contract if part.operation == "contract" else product)(*sources)


def points_taken(root: Expression, point: int, tables: Tables) -> dict[Expression, int]:
    """The point of every given table that is in a point of the whole."""
    taken: dict[Expression, int] = {}
    stack = [(root, point)]
    while stack:
        part, index = stack.pop()
        picks = tables[part.key].picks
        if part.given is not None:
            taken[part] = index
        stack.extend((source, int(picks[s, index])) for s, source in enumerate(part.sources))
    return taken
