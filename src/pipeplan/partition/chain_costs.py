"""What stages of a chain cost, for many ranges of blocks at once.

A range has blocks begin..end-1 and is given by its two ends: two integers or two arrays of any equal shapes, as which
the results come back. All are of one way to run the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED, StageCost

__all__ = ["Array", "ChainCosts", "FloatArray", "Place", "Repeat", "over_all"]

Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]

Place = int | Array
"""Where a range begins or ends, or ranges do."""

Repeat = tuple[int, int, int]
"""Two blocks, in the order of the chain, that take the same tensor, and its bytes: a stage with both holds it once."""


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """Running sums [block + 1] of what blocks cost, in ns and bytes.

    ``widest`` [power, begin] is the largest workspace of the 2^power blocks from ``begin`` on. ``repeated``
    [begin, end] are bytes that the blocks of a range count as held more than once.
    """

    forward: Array
    compute: Array
    activations: Array
    parameters: Array
    static: Array
    widest: Array
    repeated: Array | None = None

    @classmethod
    def of(cls, costs: Sequence[StageCost], repeats: Iterable[Repeat] = ()) -> Self:
        """Those of blocks with these ``costs`` [block], each as a stage of its own."""
        known = list(repeats)
        return cls(
            _sums(cost.forward_ns for cost in costs),
            _sums(cost.compute_ns for cost in costs),
            _sums(cost.activation_bytes for cost in costs),
            _sums(cost.parameter_bytes for cost in costs),
            _sums(cost.static_bytes for cost in costs),
            _widest([cost.workspace_bytes for cost in costs]),
            _sums_inside(known, len(costs)) if known else None,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in the chain."""
        return len(self.compute) - 1

    def time(self, begins: Place, ends: Place) -> Array:
        """Ns of forward and backward."""
        return _between(self.compute, begins, ends)

    def activation(self, begins: Place, ends: Place) -> Array:
        """Bytes that a micro-batch in flight holds."""
        held = _between(self.activations, begins, ends)
        return held if self.repeated is None else np.maximum(0, held - self.repeated[begins, ends])

    def workspace(self, begins: Place, ends: Place) -> Array:
        """The largest workspace, in bytes; no range is empty. Two powers cover each."""
        power = np.frexp(ends - begins)[1] - 1
        largest: Array = np.maximum(self.widest[power, begins], self.widest[power, ends - 2**power])
        return largest

    def memory(self, begins: Place, ends: Place, in_flight: Place) -> Array:
        """Bytes with so many micro-batches in flight."""
        needed: Array = in_flight * self.activation(begins, ends) + self.workspace(begins, ends)
        return needed + _between(self.static, begins, ends)

    def room(self, begins: Place, ends: Place, limit: int) -> Array:
        """Micro-batches of which so many bytes hold the activations; -1 if they do not even hold the rest."""
        left = limit - _between(self.static, begins, ends) - self.workspace(begins, ends)
        each = self.activation(begins, ends)
        return np.where(left < 0, -1, np.where(each > 0, left // np.maximum(each, 1), UNLIMITED))


def over_all(num_blocks: int, of: Callable[[Array, Array], Array], none: float) -> FloatArray:
    """[begin, end] the value ``of`` every range of blocks, and ``none`` where there is no range."""
    found = np.full((num_blocks + 1, num_blocks + 1), none)
    ranges = np.triu_indices(num_blocks + 1, 1)
    found[ranges] = of(*ranges)
    return found


def _sums(values: Iterable[int]) -> Array:
    return np.array([0, *accumulate(values)], dtype=np.int64)


def _between(sums: Array, begins: Place, ends: Place) -> Array:
    between: Array = sums[ends] - sums[begins]
    return between


def _widest(workspaces: Sequence[int]) -> Array:
    rows = [np.array(workspaces, dtype=np.int64)]
    for power in range(len(workspaces).bit_length() - 1):
        ahead = np.concatenate((rows[-1][2**power :], np.zeros(2**power, dtype=np.int64)))
        rows.append(np.maximum(rows[-1], ahead))
    return np.array(rows)


def _sums_inside(repeats: Iterable[Repeat], count: int) -> Array:
    """[begin, end] bytes of the repeats whose two blocks both are among blocks begin .. end-1."""
    table = np.zeros((count + 1, count + 1), dtype=np.int64)
    for first, second, size in repeats:
        table[first, second + 1] += size
    found: Array = np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
    return found
