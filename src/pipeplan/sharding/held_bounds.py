"""How far a frontier may be off where heuristics held operators to a configuration: a bound over all strategies.

In any weights of memory and time what eliminations leave of a graph is a sum of numbers, of operators and of edges
between two. However much of an edge's costs is given to the configurations of its two ends, no strategy costs less than
the least of every operator with what it is given and the least of every edge without. Message passing (MPLP; Globerson
and Jaakkola, 2007) moves costs from edge to edge so that this sum only grows. So every strategy lies above a line in
each of some weightings, and how far a corner between two points that were found can be moved towards the origin until
it leaves one of the lines is the factor by which a strategy could beat both.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pipeplan.search_constants import HELD_GROWTH, HELD_SWEEPS, HELD_WEIGHTINGS
from pipeplan.sharding.bounds import RELAXED, Solved, inside, level
from pipeplan.sharding.elimination import Reduced
from pipeplan.sharding.table import FloatArray, IntArray, Weights
from pipeplan.time_limit import TimeUpError, checkpoint


def factor_of_all(left: Reduced, memory: IntArray, time: IntArray, enough: float) -> float:
    """Up to which factor points are proved, over all strategies of the graph that ``left`` is left of.

    For every strategy some point, by ascending memory, takes at most so much more of both. What is looked for ends at
    a factor that is ``enough``, and when time is up; inf where nothing is proved.
    """
    up_to = np.full(len(memory) + 1, np.inf)  # [corner]: before the first point, between two, after the last
    corners = np.r_[memory, np.inf], np.r_[np.inf, time]
    slopes, used = _slopes(memory, time), set[Weights]()
    weights: Weights | None = (1.0, 0.0)
    try:
        while weights is not None and weights not in used and len(used) < HELD_WEIGHTINGS:
            used.add(weights)
            least = least_of_all(left, weights) * (1 - RELAXED)
            cost = sum(weight * costs for weight, costs in zip(weights, corners, strict=True) if weight)
            if least > 0:
                up_to = np.minimum(up_to, cost / least)
            worst = int(np.argmax(up_to))
            if up_to[worst] <= enough:
                break
            weights = (0.0, 1.0) if len(used) == 1 else slopes[worst]
    except TimeUpError:
        pass  # what is proved stays
    return max(1.0, float(up_to.max()))


def _slopes(memory: IntArray, time: IntArray) -> list[Weights | None]:
    """[corner] the weights in which the two points are equal that are its neighbours on the lower hull."""
    hull = list[int]()
    for point in range(len(memory)):
        while len(hull) > 1 and _above(memory, time, hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    found: list[Weights | None] = [None] * (len(memory) + 1)
    for one, other in pairwise(hull):
        ends = (Solved(int(memory[point]), int(time[point]), (0.0, 0.0)) for point in (one, other))
        found[one + 1 : other + 1] = [level(*ends)] * (other - one)
    return found


def _above(memory: IntArray, time: IntArray, first: int, middle: int, last: int) -> bool:
    """Whether a point is on or above the line through two others."""
    wide, high = int(memory[last] - memory[first]), int(time[first] - time[last])
    return wide * int(time[first] - time[middle]) <= high * int(memory[middle] - memory[first])


def least_of_all(left: Reduced, weights: Weights) -> float:
    """A bound from below on the weighted cost of every strategy."""
    values: dict[int, FloatArray] = {}
    rows = {node: inside(row, weights, values)[row.key][0] for node, row in left.nodes.items()}
    costs = {pair: inside(edge, weights, values)[edge.key] for pair, edge in left.edges.items()}
    tables = [*rows.values(), *costs.values()]
    # What cannot be may cost any amount beyond all others: less than it does, so that nothing is bounded too high.
    most = 1.0 + sum(float(np.max(each, initial=0.0, where=np.isfinite(each))) for each in tables)
    own = {node: np.minimum(row, most) for node, row in rows.items()}
    costs = {pair: np.minimum(edge, most) for pair, edge in costs.items()}
    given = {(pair, end): np.zeros(len(own[end])) for pair in costs for end in pair}
    best = -np.inf
    for _ in range(HELD_SWEEPS):
        for pair, edge in costs.items():
            checkpoint()
            first, second = (own[end] - given[pair, end] for end in pair)
            full = edge + first[:, None] + second[None, :]
            for end, rest, share in zip(pair, (first, second), (full.min(axis=1), full.min(axis=0)), strict=True):
                own[end], given[pair, end] = share / 2, share / 2 - rest
        kept = [edge - given[pair, pair[0]][:, None] - given[pair, pair[1]] for pair, edge in costs.items()]
        bound = sum(float(each.min()) for each in (*own.values(), *kept))
        if bound <= best + abs(best) * HELD_GROWTH:
            return max(best, bound)
        best = bound
    return best
