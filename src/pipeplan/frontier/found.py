"""Frontiers, or parts of one, from which strategies can be read off after the tables they came from are gone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipeplan.frontier.bounds import Bounds
from pipeplan.frontier.evaluation import Tables, evaluate, points_taken
from pipeplan.frontier.reducing import Strategies, Whole

__all__ = ["Found", "computed"]


@dataclass(frozen=True, slots=True)
class Found:
    """Strategies of a part.

    Of all strategies that were looked for, some here takes at most ``factor`` times the memory and the time. Finding
    them took ``num_sums`` pairs of points.
    """

    strategies: Strategies
    factor: float = 1.0
    num_sums: int = 0

    def within(self, factor: float) -> Found:
        """The same, proved up to a factor."""
        return replace(self, factor=factor)


def computed(whole: Whole, bounds: Bounds | None = None, *, most_sums: float = math.inf) -> Found | None:
    """The frontier of a part, as far as ``bounds`` leave points; None if it takes more than so many sums of points."""
    tables: Tables = {}
    num_sums = evaluate(whole.expression, tables, bounds, most_sums=most_sums)
    if num_sums is None:
        return None
    return Found(whole.strategies(points_taken(whole.expression, tables), tables), num_sums=num_sums)
