"""The frontier up to a stated factor, by weightings of memory and time alone.

A strategy that is best for some weighting lies on the convex hull of the frontier, and finding it takes minima of
numbers instead of sets of points. Between two of them that lie side by side every strategy is above a line: that of
the weighting in which they are equal, at the least value it has. From that follows by which factor a strategy between
them can be better, in memory against the one, in time against the other. The widest gap is halved until no factor
exceeds what was asked for, or the gap holds no strategy below its line.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.frontier.table import Weights

__all__ = ["Gap", "Solved", "hull_of", "level"]

_RELAXED = 1e-9


@dataclass(frozen=True, slots=True)
class Solved:
    """A strategy that is best for some weights; ``at`` says where it was found."""

    memory_bytes: int
    time_ns: int
    at: Weights


@dataclass(frozen=True, slots=True)
class Gap:
    """Two neighbours, and a line that every strategy between them is on or above: weights . (memory, time) >= least."""

    left: Solved
    right: Solved
    weights: Weights
    least: float

    @property
    def factor(self) -> float:
        """By how much a strategy between the two can beat both: the one in time, the other in memory.

        At memory m it beats the left one in time by at most ``left.time / line(m)``, which rises with m, and the right
        one in memory by ``right.memory / m``, which falls; the larger of both has its least where they meet.
        """
        low, high = float(self.left.memory_bytes), float(self.right.memory_bytes)
        for _ in range(60):
            middle = (low + high) / 2
            if self._faster(middle) < self.right.memory_bytes / max(middle, 1.0):
                low = middle
            else:
                high = middle
        return min(self._faster(high), self.right.memory_bytes / max(low, 1.0))

    def _faster(self, memory: float) -> float:
        line = (self.least - self.weights[0] * memory) / self.weights[1] if self.weights[1] else 0.0
        return self.left.time_ns / max(line, float(self.right.time_ns), 1.0)


def hull_of(solve: Callable[[Weights], Solved], ends: tuple[Solved, Solved], within: float, most: int) -> list[Gap]:
    """The gaps between neighbours on the hull, by ascending memory, from its leanest to its fastest strategy.

    ``solve`` finds a strategy of least weighted cost. No gap has a factor above 1 + ``within``, unless ``most``
    weightings were not enough, or a gap has nothing on its line but its ends: those are left as they are.
    """
    open_, closed = [_entry(Gap(*ends, (1.0, 0.0), 0.0))], []
    for _ in range(most - len(ends)):
        if not open_ or -open_[0][0] <= 1 + within:
            break
        gap = heapq.heappop(open_)[-1]
        middle = solve(level(gap.left, gap.right))
        least = _cost(middle.at, middle)
        if least >= _cost(middle.at, gap.left) * (1 - _RELAXED):
            closed.append(Gap(gap.left, gap.right, middle.at, least))
            continue
        for pair in ((gap.left, middle), (middle, gap.right)):
            heapq.heappush(open_, _entry(Gap(*pair, middle.at, least)))
    gaps = [*closed, *(entry[-1] for entry in open_)]
    return sorted(gaps, key=lambda gap: (gap.left.memory_bytes, gap.right.memory_bytes))


Entry = tuple[float, int, int, Gap]


def _entry(gap: Gap) -> Entry:
    return (-gap.factor, gap.left.memory_bytes, gap.right.memory_bytes, gap)


def level(left: Solved, right: Solved) -> Weights:
    """The weights in which two strategies are equal, the larger one 1."""
    memory, time = float(left.time_ns - right.time_ns), float(right.memory_bytes - left.memory_bytes)
    largest = max(memory, time, 1e-300)
    return memory / largest, time / largest


def _cost(weights: Weights, solved: Solved) -> float:
    return weights[0] * solved.memory_bytes + weights[1] * solved.time_ns
