"""Algorithm 1: the contiguous split with the least longest stage, for every number of blocks and stages at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.partition.autopipe.loads import Cuts

__all__ = ["Balance"]


@dataclass(frozen=True, slots=True)
class Balance:
    """The paper's table: [stages][blocks] the least longest stage of the first blocks, and where its last begins.

    ``begins_of`` asks it for any of them, since the heuristic search splits the blocks before the master stage over
    and over. Stages have at least one block each. Of equal splits the one whose later stages begin earliest is taken,
    as the printed loop finds it first.
    """

    longest: tuple[tuple[int, ...], ...]
    lasts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sums: Sequence[int], num_stages: int) -> Balance:
        """Fill the table for blocks with these running sums [block + 1] of their times.

        Where the last stage begins later it is shorter and the rest longer, so where they meet is found by
        bisection: n p log n steps instead of the printed n^2 p.
        """
        num_blocks = len(sums) - 1
        longest, lasts = [tuple(sums)], [(0,) * (num_blocks + 1)]
        for stages in range(2, num_stages + 1):
            before = longest[-1]
            begins = [_meeting(sums, before, stages, end) for end in range(num_blocks + 1)]
            longest.append(tuple(max(before[begin], sums[end] - sums[begin]) for end, begin in enumerate(begins)))
            lasts.append(tuple(begins))
        return cls(tuple(longest), tuple(lasts))

    def begins_of(self, num_blocks: int, num_stages: int) -> Cuts:
        """The split of the first ``num_blocks`` blocks, at least as many as stages."""
        begins: list[int] = []
        end = num_blocks
        for stages in range(num_stages, 0, -1):
            end = self.lasts[stages - 1][end]
            begins.append(end)
        return tuple(reversed(begins))


def _meeting(sums: Sequence[int], before: Sequence[int], stages: int, end: int) -> int:
    """Where the last of ``stages`` stages of the first ``end`` blocks begins; of too few blocks it does not matter."""
    low, high = stages - 1, end - 1
    if high < low:
        return max(0, high)
    met = bisect_left(range(high), True, low, high, key=lambda begin: before[begin] >= sums[end] - sums[begin])
    found = min((met - 1, met) if met > low else (met,), key=lambda begin: max(before[begin], sums[end] - sums[begin]))
    target = max(before[found], sums[end] - sums[found])
    return bisect_left(range(high), True, low, found, key=lambda begin: sums[end] - sums[begin] <= target)
