"""Cuts for devices that run several stages: balance the *devices*, and keep stages short.

A run of four micro-batches for each of D devices takes about ``4 * D * busiest device + (D - 1) * longest stage``: what
the busiest device does, and the way through the pipeline there and back, which interleaving shortens by making stages
short (Megatron-LM, SC'21, 2.2.2). So with the ns of both, ``4 * busiest + longest`` is to be least, then the squares of
the devices' sums, then the squares of the stages' times; none of this where memory is missing, which goes before all.

Cuts are improved one window at a time: a run of stages on different devices is cut anew with everything outside left as
it is, exactly (:func:`~pipeplan.partition.chain.kernel.least_split` with what each device does outside the window
added), with no stage longer than the longest is, and then with stages of any length. It ends where no window improves:
a local optimum. Then better cuts are looked for exactly (:func:`shortest_run`), unless that would take too long.

For a longest stage, the least busy busiest device is found as follows. Device 0 runs the first stage of every chunk
that goes down and the last of every chunk that goes up, device 1 the next ones, and so on. So devices eat the chain
from fixed ends: what a down chunk and the up chunk after it leave is one *segment*, eaten from both sides; a chunk
alone is a segment eaten from the left. A dynamic programme over what is left after each device is exact; where segments
meet is tried out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, product

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED
from pipeplan.partition.chain.costs import Array, Chain, Held, Range
from pipeplan.partition.chain.kernel import Cost, Fits, balanced_split, least_split
from pipeplan.search_constants import (
    BORDER_STEPS,
    CHOICES_AT_ONCE,
    MAX_REBALANCED,
    MOST_LENGTH_RANGES,
    MOST_LENGTHS,
    PER_DEVICE,
)
from pipeplan.time_limit import checked, checkpoint


@dataclass(frozen=True, slots=True)
class _LeftOver:
    """What may be left of the segments: ``begins`` and ``ends`` [state, segment] of blocks, each state once.

    ``busiest`` [state] is what the busiest device so far takes, in ns, and ``before`` [state] the state it came from.
    """

    begins: Array
    ends: Array
    busiest: Array
    before: Array


def run_time(chain: Chain, begins: Sequence[int]) -> int:
    """Time of a run with many devices, divided by their number, in ns."""
    return PER_DEVICE * max(chain.loads(begins)) + chain.longest(begins)


def shortest_run(chain: Chain, below: int) -> tuple[int, ...] | None:
    """Cuts that fit and whose :func:`run_time` is as short as can be, if that is less than ``below`` ns.

    None if there are none, or none were found in ``MAX_REBALANCED`` steps. Where stages can have many times, not all of
    these are tried as that of the longest. Devices of different speeds are not looked at so.
    """
    if chain.speeds or math.comb(chain.num_blocks - 1, len(_sides(chain)) - 1) > MAX_REBALANCED:
        return None
    best, steps = None, MAX_REBALANCED
    for longest in checked(_lengths(chain, below), 1):
        found, looked_at = least_busiest(chain, -(-(below - longest) // PER_DEVICE), longest, steps)
        if found is not None:
            best, below = found, run_time(chain, found)
        steps -= looked_at
        if steps < 0:
            break
    return best


def _lengths(chain: Chain, below: int) -> list[int]:
    """Times of the longest stage to try, none of which rules a short run out by itself.

    They fall: the longer it may be, the less busy devices must be, which leaves few choices. Of very many ranges of
    blocks only those are looked at that begin at every second, third or later block.
    """
    even = balanced_split(np.diff(chain.times).tolist(), chain.num_stages)
    assert even is not None  # there are as many blocks as stages
    most = below - PER_DEVICE * -(-chain.times[-1] // len(chain.memory))
    sums = chain.costs.compute
    firsts, lasts = (np.searchsorted(sums, sums + limit) for limit in (chain.longest(even), most))
    counts = np.maximum(lasts - firsts, 0)
    begins = np.arange(0, len(sums), 1 + int(counts.sum()) // MOST_LENGTH_RANGES)
    own = zip(begins.tolist(), firsts[begins].tolist(), lasts[begins].tolist(), strict=True)
    ranges = [sums[first:last] - sums[begin] for begin, first, last in own]
    times = np.unique(np.concatenate(ranges))
    some = np.unique(np.linspace(0, max(0, len(times) - 1), MOST_LENGTHS).astype(int))
    lengths: list[int] = times[some[: len(times)]].tolist()
    return lengths[::-1]


def least_busiest(chain: Chain, below: int, longest: int, steps: int) -> tuple[tuple[int, ...] | None, int]:
    """Cuts that fit and minimise the work of the busiest device, if that is below ``below`` ns; and the steps it took.

    No stage takes more than ``longest`` ns. None if there are none, or if finding them takes more than ``steps``.
    """
    num_devices, sides = len(chain.memory), _sides(chain)
    if below <= -(-chain.times[-1] // num_devices):
        return None, 0
    starts = np.array(list(_starts(chain.num_blocks, len(sides) - 1)))
    none = np.zeros(len(starts), dtype=np.int64)
    layers, looked_at = [_LeftOver(starts[:, :, 0], starts[:, :, 1], none, none)], 0
    for device in range(num_devices):
        found, last, first, count = [], layers[-1], 0, len(layers[-1].before)
        while first < len(last.before):
            checkpoint()
            some = slice(first, first + count)
            after = num_devices - 1 - device
            takes = _takes(chain, sides, after, last.begins[some], last.ends[some], below - 1, longest)
            if takes is None:  # of fewer states, then
                if count == 1:
                    return None, steps + 1
                count = max(1, count // 2)
                continue
            looked_at += len(takes[0])
            if looked_at > steps:
                return None, looked_at
            found.append((takes[0] + first, *takes[1:]))
            first += count
        of, *taken = map(np.concatenate, zip(*found, strict=True))
        layers.append(_least_busy(chain, device, sides, last, of, *taken))
        if not len(layers[-1].before):
            return None, looked_at
    return _traced(sides, layers), looked_at


def _least_busy(
    chain: Chain,
    device: int,
    sides: Sequence[int],
    last: _LeftOver,
    of: Array,
    begins: Array,
    ends: Array,
    loads: Array,
) -> _LeftOver:
    """Every state once, as after the takes of a device that leave it least busy: of states ``of`` the ``last``."""
    if (limit := chain.memory[device]) is not None:
        taken = list[tuple[Array, Array]]()
        for segment, each in enumerate(sides):
            cuts = last.begins[of, segment], begins[:, segment], ends[:, segment], last.ends[of, segment]
            taken += [cuts[:2], cuts[2:]][:each]
        fits = chain.all_bytes_of(taken) <= limit
        of, begins, ends, loads = of[fits], begins[fits], ends[fits], loads[fits]
    busiest, states = np.maximum(last.busiest[of], loads), _numbered(chain.num_blocks + 1, begins, ends)
    order = np.lexsort((busiest, states))
    firsts = np.flatnonzero(np.diff(states[order], prepend=-1))
    seen = np.minimum.reduceat(order, firsts) if len(order) else order
    best = order[firsts][np.argsort(seen)]  # in the order in which they were found
    return _LeftOver(begins[best], ends[best], busiest[best], of[best])


def _numbered(base: int, begins: Array, ends: Array) -> Array:
    """[row] a number for what is left, the same for the same."""
    numbers, count = np.zeros(len(begins), dtype=np.int64), 1
    for column in (*begins.T, *ends.T):
        if count > np.iinfo(np.int64).max // base:
            different, numbers = np.unique(numbers, return_inverse=True)
            count = len(different)
        numbers, count = numbers * base + column, count * base
    return numbers


def _sides(chain: Chain) -> list[int]:
    """[segment] 2 for a chunk that goes down and one that comes up again, 1 for a chunk alone."""
    sides: list[int] = []
    for first in range(0, chain.num_stages, len(chain.memory)):
        goes_up = len(chain.memory) > 1 and chain.devices[first] > chain.devices[first + 1]
        sides = [*sides[:-1], 2] if goes_up else [*sides, 1]
    return sides


def _starts(num_blocks: int, junctions: int) -> Iterator[tuple[Range, ...]]:
    """Where segments may meet: blocks of each."""
    for cuts in checked(combinations(range(1, num_blocks), junctions)):
        yield tuple(zip((0, *cuts), (*cuts, num_blocks), strict=True))


def _takes(
    chain: Chain, sides: Sequence[int], after: int, begins: Array, ends: Array, most: int, longest: int
) -> tuple[Array, Array, Array, Array] | None:
    """Every choice of a device's stages from each state that leaves a block for each stage of those ``after`` it.

    (state it is of, what it leaves: begins and ends, ns of work), by states, then the first segment's first stage, the
    shortest first. It takes no more than ``most``, and leaves others no more than that; none of its stages takes more
    than ``longest``. None if there are too many to be looked at together.
    """
    times = np.asarray(chain.times)
    must = (times[ends] - times[begins]).sum(axis=1) - after * most
    two = np.array(sides) == 2
    least = times[begins + 1] - times[begins] + np.where(two, times[ends] - times[ends - 1], 0)
    rest = [np.cumsum(each[:, ::-1], axis=1)[:, ::-1] - each for each in (least, times[ends] - times[begins])]
    of, loads, lows, highs = np.arange(len(begins)), np.zeros(len(begins), dtype=np.int64), begins, ends
    for segment, count in enumerate(sides):
        for side in range(count):
            begin, end = lows[:, segment], highs[:, segment]
            others = count - 1 - side
            later = longest * (sum(sides[segment + 1 :]) + others)
            at_least, at_most = rest[0][of, segment], np.minimum(later, rest[1][of, segment] + others * longest)
            if others:
                at_least = at_least + times[end] - times[end - 1]
            need, room = must[of] - loads - at_most, np.minimum(longest, most - loads - at_least)
            if side == 0:
                first = np.maximum(begin + 1, np.searchsorted(times, times[begin] + need))
                last = np.minimum(
                    end - others - count * after, np.searchsorted(times, times[begin] + room, "right") - 1
                )
                if count == 1 and not after:
                    first = np.maximum(first, end)
            else:
                first = np.maximum(begin + 2 * after, np.searchsorted(times, times[end] - room))
                last = np.minimum(end - 1, np.searchsorted(times, times[end] - np.maximum(0, need), "right") - 1)
                if not after:
                    last = np.minimum(last, begin)
            counts = np.maximum(0, last - first + 1)
            if counts.sum() > CHOICES_AT_ONCE:
                return None
            rows = np.repeat(np.arange(len(of)), counts)
            nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            of, lows, highs = of[rows], lows[rows], highs[rows]
            if side == 0:
                lows[:, segment] = first[rows] + nth
                loads = loads[rows] + times[lows[:, segment]] - times[begin[rows]]
            else:
                highs[:, segment] = last[rows] - nth
                loads = loads[rows] + times[end[rows]] - times[highs[:, segment]]
    return of, lows, highs, loads


def _traced(sides: Sequence[int], layers: Sequence[_LeftOver]) -> tuple[int, ...]:
    """First block of each stage on the way to the best state of the last layer."""
    state = int(np.argmin(layers[-1].busiest))
    begins: list[int] = []
    for before, layer in zip(layers[-2::-1], layers[:0:-1], strict=True):
        high, state = layer.ends[state], int(layer.before[state])
        for segment, count in enumerate(sides):
            begins += [int(before.begins[state, segment]), int(high[segment])][:count]
    return tuple(sorted(begins))


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


def balanced(chain: Chain) -> tuple[int, ...]:
    """Cuts without a look at memory: the least longest stage; of devices that run several stages loads are levelled.

    One border is moved by a block or two at a time, as long as the busier of its two devices then works less.
    """
    begins = evenest(chain, lambda begins, ends: np.ones(begins.shape, dtype=bool))
    assert begins is not None  # there are as many blocks as stages
    if chain.num_stages == len(chain.memory):
        return begins
    speeds = chain.speeds or [1] * len(chain.memory)
    loads: list[float] = [*chain.loads(begins)]
    borders, moved = [*begins, chain.num_blocks], True
    while moved:
        moved = False
        for stage, by in checked(product(range(1, chain.num_stages), BORDER_STEPS), 64):
            border, left, right = borders[stage] + by, chain.devices[stage - 1], chain.devices[stage]
            if left == right or not borders[stage - 1] < border < borders[stage + 1]:
                continue
            taken = chain.times[border] - chain.times[borders[stage]]
            after = loads[left] + taken / speeds[left], loads[right] - taken / speeds[right]
            if max(after) < max(loads[left], loads[right]):
                borders[stage], (loads[left], loads[right]), moved = border, after, True
    return tuple(borders[:-1])


def even(chain: Chain) -> tuple[int, ...]:
    """The first block of each stage where times are cut at equal parts of the whole, in one pass: never far from even.

    No stage is without a block. There is one stage for each device. Faster devices have so much larger parts.
    """
    count, blocks, begins = chain.num_stages, chain.num_blocks, [0]
    before = list(accumulate((chain.speeds[device] for device in chain.devices), initial=0.0)) if chain.speeds else []
    for stage in range(1, count):
        part = int(before[stage] * chain.times[-1] / before[-1]) if before else stage * chain.times[-1] // count
        near = bisect_left(chain.times, part)
        begins.append(min(max(near, begins[-1] + 1), blocks - count + stage))
    return tuple(begins)


def least_short(chain: Chain) -> Cuts:
    """Cuts under which the device that misses most memory misses little: the least, for one stage per device.

    Where nothing can fit, there are cuts all the same, for the error to name.
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
        for first, last in checked(_windows(chain), 1):
            candidate = _recut(chain, begins, first, last, longest, for_memory=for_memory)
            if candidate is not None and _value(chain, candidate) < value:
                begins, value, improved = candidate, _value(chain, candidate), True
    return begins


def _value(chain: Chain, begins: Cuts) -> tuple[int, int, int, int]:
    loads = chain.loads(begins)
    each = zip(chain.devices, chain.ranges(begins), strict=True)
    stages = sum(chain.time_on(device, *blocks) ** 2 for device, blocks in each)
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
        short: NDArray[np.bool_] = window.time(kind, begins, ends) <= longest
        return short & window.fits(kind, begins, ends)

    inner = window.cut(window.shortage) if for_memory else window.cut(window.load, fits)
    return None if inner is None else (*begins[:first], *inner, *begins[last:])


@dataclass(frozen=True, slots=True)
class _OutsideWindow:
    """What a device does for its stages outside a window, in ns and bytes, its memory's ``limit``, and its speed."""

    time: int
    before: Held
    after: Held
    limit: int
    speed: float

    @classmethod
    def of(cls, chain: Chain, device: int, low: int, ranges: Sequence[Range]) -> _OutsideWindow:
        """What is outside the window of ``ranges``, in the order of the chain; it begins at block ``low``."""
        limit = chain.memory[device]
        return cls(
            sum(chain.time_on(device, *each) for each in ranges),
            chain.held([each for each in ranges if each[0] < low]),
            chain.held([each for each in ranges if each[0] >= low]),
            UNLIMITED if limit is None else limit,
            chain.speeds[device] if chain.speeds else 1.0,
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

    def time(self, kind: int, begins: Array, ends: Array) -> Array:
        """What a stage of these blocks takes there, in ns."""
        at_speed_1, speed = self.chain.costs.time(begins, ends), self.outside[kind].speed
        return at_speed_1 if speed == 1 else np.ceil(at_speed_1 / speed).astype(np.int64)

    def load(self, kind: int, begins: Array, ends: Array) -> Array:
        """What a stage's device then does in all, in ns."""
        return self.outside[kind].time + self.time(kind, begins, ends)

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
