"""What stages of a chain cost, for many ranges of blocks at once.

A range has blocks begin..end-1 and is given by its two ends: two integers or two arrays of any equal shapes, as which
the results come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED, StageCost

__all__ = ["Array", "ChainCosts", "FloatArray", "Place", "Repeat", "StageTimes", "over_all"]

Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]

Place = int | Array
"""Where a range begins or ends, or ranges do."""

Repeat = tuple[int, int, int]
"""Two blocks, in the order of the chain, that take the same tensor, and its bytes: a stage with both holds it once."""


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """Running sums [..., block + 1] of what blocks cost, in ns and bytes.

    ``widest`` [..., power, begin] is the largest workspace of the 2^power blocks from ``begin`` on. ``repeated``
    [begin, end] are bytes that the blocks of a range count as held more than once. ``transfer_ns`` is what sending
    between any two stages takes, where that is looked at.
    """

    forward: Array
    compute: Array
    activations: Array
    parameters: Array
    static: Array
    widest: Array
    repeated: Array | None = None
    transfer_ns: int = 0

    @classmethod
    def of(cls, costs: Sequence[StageCost], repeats: Iterable[Repeat] = (), transfer_ns: int = 0) -> Self:
        """Those of blocks with these ``costs`` [block], each as a stage of its own."""
        forward, compute, activations, parameters, static = _sums([costs])[:, 0]
        repeated = _sums_inside(list(repeats), len(costs))
        return cls(forward, compute, activations, parameters, static, _widest([costs])[0], repeated, transfer_ns)

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[StageCost]]) -> Self:
        """Those of the same blocks for several rows: all results then begin with [row]."""
        forward, compute, activations, parameters, static = _sums(rows)
        return cls(forward, compute, activations, parameters, static, _widest(rows))

    @property
    def num_blocks(self) -> int:
        """Blocks in the chain."""
        return int(self.compute.shape[-1]) - 1

    def stages(self, begins: Sequence[int]) -> StageTimes:
        """What each stage takes when the chain is cut so, for a single row."""
        bounds = np.array((*begins, self.num_blocks))
        forwards, totals = np.diff(self.forward[bounds]), np.diff(self.compute[bounds])
        return StageTimes(tuple(forwards.tolist()), tuple((totals - forwards).tolist()), self.transfer_ns)

    def time(self, begins: Place, ends: Place) -> Array:
        """Ns of forward and backward."""
        return _between(self.compute, begins, ends)

    def statics(self, begins: Place, ends: Place) -> Array:
        """Bytes that are held all the time."""
        return _between(self.static, begins, ends)

    def activation(self, begins: Place, ends: Place) -> Array:
        """Bytes that a micro-batch in flight holds."""
        held = _between(self.activations, begins, ends)
        return held if self.repeated is None else np.maximum(0, held - self.repeated[begins, ends])

    def workspace(self, begins: Place, ends: Place) -> Array:
        """The largest workspace, in bytes; no range is empty. Two powers cover each."""
        power = np.frexp(ends - begins)[1] - 1
        largest: Array = np.maximum(self.widest[..., power, begins], self.widest[..., power, ends - 2**power])
        return largest

    def memory(self, begins: Place, ends: Place, in_flight: Place) -> Array:
        """Bytes with so many micro-batches in flight."""
        needed: Array = in_flight * self.activation(begins, ends) + self.workspace(begins, ends)
        return needed + self.statics(begins, ends)

    def room(self, begins: Place, ends: Place, limit: int) -> Array:
        """Micro-batches of which so many bytes hold the activations; -1 if they do not even hold the rest."""
        left = limit - self.statics(begins, ends) - self.workspace(begins, ends)
        each = self.activation(begins, ends)
        return np.where(left < 0, -1, np.where(each > 0, left // np.maximum(each, 1), UNLIMITED))


@dataclass(frozen=True, slots=True)
class StageTimes:
    """``forwards`` and ``backwards`` [stage] of a micro-batch, and what one transfer between stages takes, in ns."""

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    transfer_ns: int = 0

    @property
    def num_stages(self) -> int:
        """Stages of the chain."""
        return len(self.forwards)

    @property
    def totals(self) -> tuple[int, ...]:
        """[stage] forward and backward."""
        return tuple(map(int.__add__, self.forwards, self.backwards))


def over_all(num_blocks: int, of: Callable[[Array, Array], Array], none: float) -> FloatArray:
    """[begin, end] the value ``of`` every range of blocks, and ``none`` where there is no range."""
    found = np.full((num_blocks + 1, num_blocks + 1), none)
    ranges = np.triu_indices(num_blocks + 1, 1)
    found[ranges] = of(*ranges)
    return found


def _between(sums: Array, begins: Place, ends: Place) -> Array:
    between: Array = sums[..., ends] - sums[..., begins]
    return between


def _sums(rows: Sequence[Sequence[StageCost]]) -> Array:
    """[kind, row, block + 1] of forward, compute, activations, parameters and static."""
    each = [
        [
            (cost.forward_ns, cost.compute_ns, cost.activation_bytes, cost.parameter_bytes, cost.static_bytes)
            for cost in row
        ]
        for row in rows
    ]
    values = np.array(each, dtype=np.int64)
    sums = np.zeros((values.shape[2], values.shape[0], values.shape[1] + 1), dtype=np.int64)
    np.cumsum(np.moveaxis(values, 2, 0), axis=2, out=sums[:, :, 1:])
    return sums


def _widest(rows: Sequence[Sequence[StageCost]]) -> Array:
    """[row, power, begin]"""
    levels = [np.array([[cost.workspace_bytes for cost in row] for row in rows], dtype=np.int64)]
    for power in range(len(rows[0]).bit_length() - 1):
        widest = levels[-1].copy()
        np.maximum(widest[:, : -(2**power)], levels[-1][:, 2**power :], out=widest[:, : -(2**power)])
        levels.append(widest)
    return np.stack(levels, axis=1)


def _sums_inside(repeats: Sequence[Repeat], count: int) -> Array | None:
    """[begin, end] bytes of the repeats whose two blocks both are among blocks begin .. end-1."""
    if not repeats:
        return None
    table = np.zeros((count + 1, count + 1), dtype=np.int64)
    for first, second, size in repeats:
        table[first, second + 1] += size
    found: Array = np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
    return found
