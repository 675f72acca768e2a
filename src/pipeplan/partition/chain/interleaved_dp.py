"""Cuts with the shortest run, where devices run several stages.

A run of four micro-batches for each device takes about ``4 * D * busiest device + (D - 1) * longest stage``: what the
busiest device does, and the way through the pipeline there and back, which interleaving shortens by making stages short
(Megatron-LM, SC'21, 2.2.2). So with the ns of both, ``4 * busiest + longest`` is to be least.

For a longest stage, the least busy busiest device is found as follows. Device 0 runs the first stage of every chunk
that goes down and the last of every chunk that goes up, device 1 the next ones, and so on. So devices eat the chain
from fixed ends: what a down chunk and the up chunk after it leave is one *segment*, eaten from both sides; a chunk
alone is a segment eaten from the left. A dynamic programme over what is left after each device is exact; where segments
meet is tried out.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from pipeplan.partition.chain.costs import Chain, Range
from pipeplan.partition.chain.kernel import balanced_split

__all__ = ["MAX_STEPS", "PER_DEVICE", "least_busiest", "run_time", "shortest_run"]

PER_DEVICE = 4
"""Micro-batches for each device in a run: as many as where nobody says how many there are."""

MAX_STEPS = 50_000
"""Choices the search looks at before it gives up: some tenths of a second."""

_MOST_LENGTHS = 64
"""Longest stages that are tried."""

State = tuple[Range, ...]
"""What is left of each segment."""

Layer = dict[State, tuple[int, State]]
"""What is left -> (busiest device so far in ns, what was left before this device)."""


def run_time(chain: Chain, begins: Sequence[int]) -> int:
    """Time of a run with many devices, divided by their number, in ns."""
    return PER_DEVICE * max(chain.loads(begins)) + chain.longest(begins)


def shortest_run(chain: Chain, below: int) -> tuple[int, ...] | None:
    """Cuts that fit and whose :func:`run_time` is as short as can be, if that is less than ``below`` ns.

    None if there are none, or none were found in ``MAX_STEPS`` steps. Where stages can have many times, not all of
    these are tried as that of the longest.
    """
    best, steps = None, iter(range(MAX_STEPS))
    for longest in _lengths(chain, below):
        found = least_busiest(chain, -(-(below - longest) // PER_DEVICE), longest, steps)
        if found is not None:
            best, below = found, run_time(chain, found)
    return best


def _lengths(chain: Chain, below: int) -> list[int]:
    """Times of the longest stage to try, none of which rules a short run out by itself.

    They fall: the longer it may be, the less busy devices must be, which leaves few choices.
    """
    even = balanced_split(np.diff(chain.times).tolist(), chain.num_stages)
    assert even is not None  # there are as many blocks as stages
    most = below - PER_DEVICE * -(-chain.times[-1] // len(chain.memory))
    times = np.unique(chain.costs.compute[None, :] - chain.costs.compute[:, None])
    times = times[(times >= chain.longest(even)) & (times < most)]
    some = np.unique(np.linspace(0, max(0, len(times) - 1), _MOST_LENGTHS).astype(int))
    lengths: list[int] = times[some[: len(times)]].tolist()
    return lengths[::-1]


def least_busiest(chain: Chain, below: int, longest: int, steps: Iterator[int]) -> tuple[int, ...] | None:
    """Cuts that fit and whose busiest device is as little busy as can be, if that is less than ``below`` ns.

    No stage takes more than ``longest`` ns. None if there are none, or if finding them takes more than ``steps``.
    """
    num_devices, sides = len(chain.memory), _sides(chain)
    junctions = len(sides) - 1
    if below <= -(-chain.times[-1] // num_devices) or math.comb(chain.num_blocks - 1, junctions) > MAX_STEPS:
        return None
    layers: list[Layer] = [dict.fromkeys(_starts(chain.num_blocks, junctions), (0, ()))]
    limits = below - 1, longest
    for device in range(num_devices):
        following: Layer = {}
        for state, (value, _) in layers[-1].items():
            for left, load, taken in _takes(chain, sides, device, state, limits):
                if next(steps, None) is None:
                    return None
                better = left not in following or max(value, load) < following[left][0]
                if better and chain.fits(device, taken):
                    following[left] = (max(value, load), state)
        layers.append(following)
    return _traced(sides, layers)


def _sides(chain: Chain) -> list[int]:
    """[segment] 2 for a chunk that goes down and one that comes up again, 1 for a chunk alone."""
    sides: list[int] = []
    for first in range(0, chain.num_stages, len(chain.memory)):
        goes_up = len(chain.memory) > 1 and chain.devices[first] > chain.devices[first + 1]
        sides = [*sides[:-1], 2] if goes_up else [*sides, 1]
    return sides


def _starts(num_blocks: int, junctions: int) -> Iterator[State]:
    for cuts in combinations(range(1, num_blocks), junctions):
        yield tuple(zip((0, *cuts), (*cuts, num_blocks), strict=True))


def _takes(
    chain: Chain, sides: Sequence[int], device: int, state: State, limits: tuple[int, int]
) -> Iterator[tuple[State, int, list[Range]]]:
    """(what is left, ns of work, blocks) for every choice of the device's stages that leaves the others enough.

    ``limits`` are the most ns of a device, and of a stage.
    """
    (room, longest), after = limits, len(chain.memory) - 1 - device
    must = sum(chain.time(begin, end) for begin, end in state) - after * room
    for left, load in _bites(chain, sides, after, state, must, room, longest):
        taken: list[Range] = []
        for (begin, end), (low, high), ends in zip(state, left, sides, strict=True):
            taken += [(begin, low), (high, end)][:ends]
        if after or all(low == high for low, high in left):
            yield left, load, taken


def _bites(
    chain: Chain, sides: Sequence[int], after: int, state: State, must: int, room: int, longest: int
) -> Iterator[tuple[State, int]]:
    """Bites from all segments that take ``must`` to ``room`` ns together and leave a block for each later stage."""
    if len(state) == 1:
        for left, load in _bite(chain, sides[0], after, state[0], must, room, longest):
            yield (left,), load
        return
    alone = max(0, must - longest * sum(sides[1:]))
    for left, load in _bite(chain, sides[0], after, state[0], alone, room, longest):
        for others, more in _bites(chain, sides[1:], after, state[1:], must - load, room - load, longest):
            yield (left, *others), load + more


def _bite(
    chain: Chain, ends: int, after: int, segment: Range, must: int, room: int, longest: int
) -> Iterator[tuple[Range, int]]:
    """The same for one segment: at least one block from each of its ends."""
    begin, end = segment
    if ends == 1:
        enough = bisect_left(chain.times, chain.times[begin] + must)
        for low in range(max(begin + 1, enough), end - after + 1):
            if chain.time(begin, low) > min(room, longest):
                return
            yield (low, end), chain.time(begin, low)
        return
    for low in range(begin + 1, end - 2 * after):
        head = chain.time(begin, low)
        if head > min(room, longest):
            return
        enough = bisect_right(chain.times, chain.times[end] - max(0, must - head)) - 1
        for high in range(min(end - 1, enough), low + 2 * after - 1, -1):
            if chain.time(high, end) > min(room - head, longest):
                break
            yield (low, high), head + chain.time(high, end)


def _traced(sides: Sequence[int], layers: Sequence[Layer]) -> tuple[int, ...] | None:
    """First block of each stage on the way to the best last layer."""
    if not layers[-1]:
        return None
    left = min(layers[-1], key=lambda state: layers[-1][state][0])
    begins: list[int] = []
    for layer in reversed(layers[1:]):
        state = layer[left][1]
        for (begin, _), (_, high), ends in zip(state, left, sides, strict=True):
            begins += [begin, high][:ends]
        left = state
    return tuple(sorted(begins))
