"""A plan in columns: its actions and messages numbered through, when they run, and what actions wait for.

Actions come first, operation after operation, then messages, hop after hop. Own code of the checker: what is compared
here was computed by :mod:`pipeplan.workload.pairs` and others, which it does not import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipeplan.workload.columns import IntArray, column, sharing, spread
from pipeplan.workload.samples import Slots


@dataclass(frozen=True, slots=True)
class Wait:
    """What an operation waits for: another, ``lag_ns`` after its end; ``part_ns`` from a part of one to one's part.

    Where it first needs something in a later part of its actions, or another's action goes on after the part that makes
    it, the lag is that much less, and may be negative. Then ``inside`` says that it may wait for a message that stands
    after it in its program.

    ``later`` is by how many micro-batches its own is later than the other's. ``dependency`` is the number of the
    dependency that says so; None where it is the pace of an operation, which waits for itself. ``needs`` [action],
    where there is such a list, is how many of the other's first actions it waits for; otherwise for those that hold its
    samples.
    """

    source: int
    lag_ns: int
    part_ns: int
    dependency: int | None
    needs: tuple[int, ...] | None
    inside: bool = False
    later: int = 0


@dataclass(frozen=True, slots=True)
class ActionColumns:
    """``firsts`` [operation] is its first action, and in the end the number of all; the rest are [action], in ns.

    ``targets``, ``sources``, ``lags`` and ``waits`` [pair]: an action of ``targets`` waits until so much after the end
    of one of ``sources``, as the wait of its operation with this number says.
    """

    firsts: IntArray
    starts: IntArray
    durations: IntArray
    ends: IntArray
    targets: IntArray
    sources: IntArray
    lags: IntArray
    waits: IntArray

    @classmethod
    def of(
        cls,
        slots: Sequence[Slots],
        starts: Sequence[Sequence[int]],
        durations: tuple[Sequence[int], Sequence[int]],
        waits: Sequence[Sequence[Wait]],
    ) -> ActionColumns:
        """Of a plan's operations; ``durations`` of whole micro-batches and of parts."""
        firsts = np.array([0, *accumulate(map(len, slots))])
        counts = np.diff(firsts)
        whole, part = (np.repeat(column(each, 8), counts) for each in durations)
        numbers = np.arange(firsts[-1]) - np.repeat(firsts[:-1], counts)
        takes = np.where(numbers < np.repeat([2 * each.num_parted for each in slots], counts), part, whole)
        begun = column([start for own in starts for start in own], 8)
        pairs = [*_pairs(slots, firsts, waits)] or [(np.zeros(0, np.int64),) * 4]
        joined = (np.concatenate(each) for each in zip(*pairs, strict=True))
        return cls(firsts, begun, takes, begun + takes, *joined)

    @property
    def arrivals(self) -> IntArray:
        """[pair] when the action that waits may start, as far as this goes."""
        return self.ends[self.sources] + self.lags

    def entry(self, action: int) -> tuple[int, int]:
        """The operation of an action, and which of its actions it is."""
        operation = int(np.searchsorted(self.firsts, action, side="right")) - 1
        return operation, action - int(self.firsts[operation])


def _pairs(
    slots: Sequence[Slots], firsts: IntArray, waits: Sequence[Sequence[Wait]]
) -> Iterator[tuple[IntArray, IntArray, IntArray, IntArray]]:
    """Targets, sources, lags, and the numbers of waits, wait after wait."""
    for target, own in enumerate(waits):
        for index, wait in enumerate(own):
            count, parts = len(slots[target]), 2 * min(slots[target].num_parted, slots[wait.source].num_parted)
            if wait.later:  # between micro-batches of one size
                targets = np.arange(wait.later, max(wait.later, count))
                numbers = targets - wait.later
            elif wait.needs is not None:
                targets, numbers = spread(np.zeros(count, np.int64), np.array(wait.needs, np.int64))
            elif slots[target] is slots[wait.source]:
                targets = numbers = np.arange(count)
            else:
                targets, numbers = spread(*sharing(slots[target], slots[wait.source]))
            lags = np.full(len(targets), wait.lag_ns)
            if parts:
                both = (targets < 2 * slots[target].num_parted) & (numbers < 2 * slots[wait.source].num_parted)
                lags[both] = wait.part_ns
            yield targets + firsts[target], numbers + firsts[wait.source], lags, np.full(len(targets), index)
