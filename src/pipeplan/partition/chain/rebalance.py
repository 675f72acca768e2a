"""Cuts for devices that run several stages: level what the *devices* do, and keep stages short.

The busiest device bounds the period, and the longest stage the time that a pipeline takes to fill: both together
(:func:`~pipeplan.partition.chain.interleaved_dp.run_time`) come first, then the squares of the devices' sums, then the
squares of the stages' times; none of this where memory is missing, which goes before all.

Cuts are improved one window at a time: a run of stages on different devices is cut anew with everything outside left as
it is, exactly (:func:`~pipeplan.partition.chain.kernel.least_split` with what each device does outside the window
added), with no stage longer than the longest is, and then with stages of any length. It ends where no window improves:
a local optimum. Then better cuts are looked for exactly
(:func:`~pipeplan.partition.chain.interleaved_dp.shortest_run`), unless that would take too long; in practice it takes a
moment for the v-shape with two chunks, and for few dozen blocks otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED
from pipeplan.partition.chain.costs import Array, Chain, Held, Range
from pipeplan.partition.chain.interleaved_dp import PER_DEVICE, run_time, shortest_run
from pipeplan.partition.chain.kernel import Cost, Fits, least_split

__all__ = ["Allowed", "evenest", "levelled", "roomiest"]

Cuts = tuple[int, ...]

Allowed = Callable[[Array, Array], NDArray[np.bool_]]
"""(begins, ends) -> whether blocks begin..end-1 may be a stage; fewer of them may be if all may."""


def evenest(chain: Chain, allowed: Allowed) -> Cuts | None:
    """Cuts with the least longest stage, then the least squares of the stages' times; None if there are none.

    Each stage fits onto its device alone, and is one that is ``allowed``.
    """
    window = _StageWindow.of(chain, (), 0, chain.num_stages)
    return window.cut(window.load, lambda kind, begins, ends: allowed(begins, ends) & window.fits(kind, begins, ends))


def levelled(chain: Chain, begins: Cuts) -> Cuts:
    """Better cuts than ``begins``, for devices that run several stages."""
    if any(chain.missing(begins)):
        begins = _descended(chain, begins, for_memory=True)
    for longest in (chain.longest(begins), chain.times[-1]):
        begins = _descended(chain, begins, longest=longest)
    fits = not any(chain.missing(begins))
    better = shortest_run(chain, run_time(chain, begins) if fits else (PER_DEVICE + 1) * chain.times[-1] + 1)
    return begins if better is None else _descended(chain, better, longest=chain.longest(better))


def roomiest(chain: Chain) -> Cuts:
    """Cuts under which the device that misses most memory misses little: the least, for one stage per device.

    Where nothing can fit, no more is done than to have cuts to tell of.
    """
    window = _StageWindow.of(chain, (), 0, chain.num_stages)
    begins = window.cut(window.shortage)
    assert begins is not None  # there are as many blocks as stages, and nothing has to fit
    done = chain.num_stages == len(chain.memory) or chain.hopeless
    return begins if done else _descended(chain, begins, for_memory=True)


def _descended(chain: Chain, begins: Cuts, *, longest: int = 0, for_memory: bool = False) -> Cuts:
    """Cut windows anew while that lowers the value; every step lowers it, so this ends.

    No stage is made to take more than ``longest`` ns, unless it is ``for_memory``.
    """
    value, improved = _value(chain, begins), True
    while improved:
        improved = False
        for first, last in _windows(chain):
            candidate = _recut(chain, begins, first, last, longest, for_memory=for_memory)
            if candidate is not None and _value(chain, candidate) < value:
                begins, value, improved = candidate, _value(chain, candidate), True
    return begins


def _value(chain: Chain, begins: Cuts) -> tuple[int, int, int, int]:
    loads = chain.loads(begins)
    stages = sum(chain.time(begin, end) ** 2 for begin, end in chain.ranges(begins))
    return sum(chain.missing(begins)), run_time(chain, begins), sum(load * load for load in loads), stages


def _windows(chain: Chain) -> list[Range]:
    """Runs of stages to cut anew: every neighbouring pair, and runs over all devices."""
    width, count = len(chain.memory), chain.num_stages
    pairs = [(first, first + 2) for first in range(count - 1)]
    starts = range(0, count - width + 1, max(1, width // 2)) if width > 2 else ()
    return pairs + [
        (first, first + width) for first in starts if len(set(chain.devices[first : first + width])) == width
    ]


def _recut(chain: Chain, begins: Cuts, first: int, last: int, longest: int, *, for_memory: bool) -> Cuts | None:
    """The cuts with stages first..last-1 cut anew; None if nothing fits.

    A pair of stages on one device is cut as if each stood alone: what they do together stays.
    """
    window = _StageWindow.of(chain, begins, first, last)

    def fits(kind: int, begins: Array, ends: Array) -> NDArray[np.bool_]:
        short: NDArray[np.bool_] = chain.costs.time(begins, ends) <= longest
        return short & window.fits(kind, begins, ends)

    inner = window.cut(window.shortage) if for_memory else window.cut(window.load, fits)
    return None if inner is None else (*begins[:first], *inner, *begins[last:])


@dataclass(frozen=True, slots=True)
class _OutsideWindow:
    """What a device does for its stages outside a window, in ns and bytes, and its memory's ``limit``."""

    time: int
    before: Held
    after: Held
    limit: int

    @classmethod
    def of(cls, chain: Chain, device: int, low: int, ranges: Sequence[Range]) -> _OutsideWindow:
        """That of ``ranges``, in the order of the chain; the window begins at block ``low``."""
        limit = chain.memory[device]
        return cls(
            sum(chain.time(*each) for each in ranges),
            chain.held([each for each in ranges if each[0] < low]),
            chain.held([each for each in ranges if each[0] >= low]),
            UNLIMITED if limit is None else limit,
        )


@dataclass(frozen=True, slots=True)
class _StageWindow:
    """Stages in a row that together have blocks low..high-1; ``kinds`` [stage] indexes what differs between them."""

    chain: Chain
    low: int
    high: int
    kinds: tuple[int, ...]
    outside: tuple[_OutsideWindow, ...]

    @classmethod
    def of(cls, chain: Chain, begins: Cuts, first: int, last: int) -> _StageWindow:
        """Stages first..last-1 where the others begin at ``begins``."""
        low = begins[first] if first else 0
        high = begins[last] if last < chain.num_stages else chain.num_blocks
        others: dict[int, list[Range]] = {device: [] for device in chain.devices}
        if last - first < chain.num_stages:
            for stage, (device, blocks) in enumerate(zip(chain.devices, chain.ranges(begins), strict=True)):
                if not first <= stage < last:
                    others[device].append(blocks)
        each = [_OutsideWindow.of(chain, device, low, others[device]) for device in chain.devices[first:last]]
        distinct = tuple(dict.fromkeys(each))
        return cls(chain, low, high, tuple(distinct.index(one) for one in each), distinct)

    def cut(self, cost: Cost, fits: Fits | None = None) -> Cuts | None:
        """First blocks of the stages, cut so that the dearest is as cheap as can be, then the squares."""
        begins = least_split(
            lambda kind, begins, ends: cost(kind, self.low + begins, self.low + ends),
            self.high - self.low,
            self.kinds,
            None if fits is None else lambda kind, begins, ends: fits(kind, self.low + begins, self.low + ends),
        )
        return None if begins is None else tuple(self.low + begin for begin in begins)

    def load(self, kind: int, begins: Array, ends: Array) -> Array:
        """What a stage's device then does in all, in ns."""
        return self.outside[kind].time + self.chain.costs.time(begins, ends)

    def needed(self, kind: int, begins: Array, ends: Array) -> Array:
        """Bytes its device then takes."""
        outside = self.outside[kind]
        return self.chain.bytes_between(outside.before, begins, ends, outside.after)

    def shortage(self, kind: int, begins: Array, ends: Array) -> Array:
        """Bytes its device then takes, shifted so that equal costs are equal shortages; 0 where there is no limit."""
        most = max((limit for limit in self.chain.memory if limit is not None), default=0)
        return np.maximum(0, most - self.outside[kind].limit + self.needed(kind, begins, ends))

    def fits(self, kind: int, begins: Array, ends: Array) -> NDArray[np.bool_]:
        """Whether its device holds that."""
        return self.needed(kind, begins, ends) <= self.outside[kind].limit
