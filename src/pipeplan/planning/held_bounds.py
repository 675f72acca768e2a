"""A lower bound on the iteration by work, ways and what devices hold, over every plan of a chain: block by block.

Each block of a plan runs in some way w: so many shards, samples of a micro-batch and parts of a sequence, with
something computed again or nothing. Of a sample it takes W(w) of the devices' time, holds a(w) bytes of all devices
together, and lets it pass in l(w): its forward, and its backward as far as the block before waits for that. What block
b holds of a sample is there from the start of its forward to the end of its backward, in which all later blocks run
both; beside it there is its workspace v(w) while it runs. So with B samples, devices of speeds s and memories M, and
the training state once, an iteration of T has

    B sum over b of W(w(b)) + steps <= T sum s
    B sum over b of [a(w(b)) sum over c >= b of l(w(c)) + v(w(b)) W(w(b))] <= T (sum M - state)

and for any weight z >= 0 of the second, T is at least

    (B min over w of [sum of W + z (a sum of l + v W)] + steps) / (sum s + z (sum M - state))

The minimum is a dynamic programme from the last block to the first, over how long a sample has passed until then; that
is rounded down to one of :data:`HELD_CELLS`, so that the bound holds. In the end that is no more than T either, also
where memory has no limit: micro-batches of many samples, which may be quickest for each, take longest to pass. All ways
may differ from block to block: whatever stages, replicas, micro-batch sizes and routes a plan has. Messages, and what
else is held, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeplan.files import CostRow
from pipeplan.partition.chain.costs import FloatArray
from pipeplan.search_constants import HELD_CELLS, HELD_FINER, HELD_WAYS, HELD_WEIGHTS, HELD_WORK, SLACK
from pipeplan.time_limit import checked


class BlockWay(NamedTuple):
    """How a block may run: device ns and bytes of a sample, of all devices together, and ns until that has passed.

    ``beside`` are the bytes of its workspace times how long they are there, of a sample.
    """

    work: float
    held: float
    passing: float
    beside: float = 0.0


class HeldBound(NamedTuple):
    """What the bound of a chain is made of: [kind] the ways of a block, the kind of each block, and what there is.

    ``computing`` is the sum of the devices' speeds, ``room`` their bytes together beside the state,
    None where some have no limit, ``steps_ns`` what the optimizer takes of them.
    """

    ways: Sequence[Sequence[BlockWay]]
    kinds: Sequence[int]
    samples: int
    computing: float
    room: int | None
    steps_ns: int

    def least_ns(self) -> int:
        """Ns that no iteration is below; 0 where that says nothing."""
        if any(not own for own in self.ways) or self._count > HELD_WAYS:
            return 0
        without = self._with(0.0)
        if self.room is None or self.room <= 0:
            return math.ceil(without * SLACK)
        usual = self.computing / self.room
        known = {weight: self._with(weight * usual) for weight in checked(HELD_WEIGHTS, 1)}
        for _ in checked(range(HELD_FINER), 1):
            order = sorted(known)
            best = order.index(max(known, key=lambda weight: known[weight]))
            for near in (best - 1, best):
                if 0 <= near < len(order) - 1:
                    middle = math.sqrt(order[near] * order[near + 1])
                    known[middle] = self._with(middle * usual)
        return math.ceil(max(without, *known.values()) * SLACK)

    @property
    def _count(self) -> int:
        return sum(len(self.ways[kind]) for kind in self.kinds)

    def _with(self, weight: float) -> float:
        """The bound with a weight of what is held; 0: without a look at it."""
        quickest = [min(own, key=lambda way: way.work) for own in self.ways]
        longest = sum(quickest[kind].passing for kind in self.kinds)
        cells = min(HELD_CELLS, HELD_WORK // self._count)
        cell = longest / (cells - 1) or 1.0
        times: FloatArray = np.arange(cells, dtype=np.float64) * cell
        least: FloatArray = np.full(cells, math.inf)
        least[0] = 0.0
        for kind in checked(reversed(self.kinds), 1):
            least = _one_more(least, self.ways[kind], times, cell, weight)
        by_work = (self.samples * least + self.steps_ns) / (self.computing + weight * (self.room or 0))
        return float(np.maximum(by_work, times).min())


def _one_more(
    before: FloatArray, ways: Sequence[BlockWay], times: FloatArray, cell: float, weight: float
) -> FloatArray:
    """[time] the least with one block more before those, in each of its ways."""
    after: FloatArray = np.full(len(before), math.inf)
    for way in ways:
        shift = min(int(way.passing / cell), len(before) - 1)
        each = before + (way.work + weight * (way.held * (times + way.passing) + way.beside))
        np.minimum(after[shift:], each[: len(before) - shift], out=after[shift:])
        after[-1] = min(after[-1], each[len(before) - 1 - shift :].min())
    return after


def undominated(ways: Sequence[BlockWay]) -> list[BlockWay]:
    """Those that no other is better than in everything."""
    kept: list[BlockWay] = []
    for way in sorted(set(ways)):
        if not any(all(one <= another for one, another in zip(other, way, strict=True)) for other in kept):
            kept.append(way)
    return kept


def way_of(row: CostRow, half: CostRow | None, loose: int, fastest: float, *, splits: bool) -> BlockWay:
    """A row as a way, whose forward may run in two of ``half``; ``loose`` bytes of it a stage need not hold for it."""
    devices, samples = row.shards * row.context, row.microbatch_size
    forward, passing = row.forward_ns, row.forward_ns
    if half is not None:
        forward, passing = min(forward, 2 * half.forward_ns), min(passing, half.forward_ns)
    back, backward = back_ns(row, splits=splits), row.whole_backward_ns
    if splits and row.input_grad_ns is not None and row.weight_grad_ns is not None:
        backward = min(backward, row.input_grad_ns + row.weight_grad_ns)
    work = (forward + backward) * devices / samples
    held, beside = max(0, row.activation_bytes - loose) * devices / samples, row.workspace_bytes * work / fastest
    return BlockWay(work, held, (passing + back) / fastest, beside)


def back_ns(row: CostRow, *, splits: bool) -> int:
    """What of a block's backward the block before waits for: where it may be split, the input gradient alone."""
    split = splits and row.input_grad_ns is not None and row.weight_grad_ns is not None
    return min(row.whole_backward_ns, row.input_grad_ns or 0) if split else row.whole_backward_ns
