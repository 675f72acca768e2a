"""Frontiers, or parts of one, from which strategies can be read off after the tables they came from are gone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeplan.frontier.bounds import Bounds
from pipeplan.frontier.evaluation import Tables, evaluate, points_taken
from pipeplan.frontier.expression import Expression
from pipeplan.frontier.graph import Strategy
from pipeplan.frontier.reducing import Whole
from pipeplan.frontier.table import IntArray

__all__ = ["Found", "computed"]


@dataclass(frozen=True, slots=True)
class Found:
    """Strategies of a part, [P], by ascending memory, none of which another beats.

    ``taken`` is the point of every given table in each, ``given`` those tables by their keys. Of all strategies that
    were looked for, some here takes at most ``factor`` times the memory and the time. Finding them took
    ``num_sums`` pairs of points.
    """

    whole: Whole
    memory_bytes: IntArray
    time_ns: IntArray
    taken: Mapping[Expression, IntArray]
    given: Tables
    factor: float = 1.0
    num_sums: int = 0

    def strategy(self, point: int) -> Strategy:
        """One of them, unrolled."""
        taken = {part: int(points[point]) for part, points in self.taken.items()}
        return self.whole.strategy(taken, self.given)

    def within(self, factor: float) -> Found:
        """The same, proved up to a factor."""
        return replace(self, factor=factor)


def computed(whole: Whole, bounds: Bounds | None = None, *, most_sums: float = math.inf) -> Found | None:
    """The frontier of a part, as far as ``bounds`` leave points; None if it takes more than so many sums of points."""
    tables: Tables = {}
    num_sums = evaluate(whole.expression, tables, bounds, most_sums=most_sums)
    if num_sums is None:
        return None
    root = tables[whole.expression.key]
    taken = points_taken(whole.expression, tables)
    given = {part.key: tables[part.key] for part in taken}
    return Found(whole, root.memory_bytes, root.time_ns, taken, given, num_sums=num_sums)
