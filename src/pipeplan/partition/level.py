"""Cuts for devices that run several stages: level what the *devices* do, not only the stages.

The busiest device bounds the period, so its sum of forward and backward times comes first, then the squares of the
devices' sums, then the squares of the stages' times; none of this where memory is missing, which goes before all.

Cuts are improved one window at a time: a run of stages on different devices is cut anew with everything outside
left as it is, exactly (:func:`~pipeplan.partition.balance.least_split` with what each device does outside the
window added). It ends where no window improves: a local optimum. Then cuts with a less busy busiest device are looked
for exactly (:func:`~pipeplan.partition.exact.least_busiest`), unless that would take too long; in practice it takes
a moment for the v-shape with two chunks, and for few dozen blocks otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.partition.balance import Cost, least_split
from pipeplan.partition.chain import Chain, Range
from pipeplan.partition.exact import least_busiest

__all__ = ["levelled", "roomiest"]

Cuts = tuple[int, ...]


def levelled(chain: Chain, begins: Cuts) -> Cuts:
    """Better cuts than ``begins``, for devices that run several stages."""
    if any(chain.missing(begins)):
        begins = _descended(chain, begins, for_memory=True)
    begins = _descended(chain, begins, for_memory=False)
    fits = not any(chain.missing(begins))
    better = least_busiest(chain, max(chain.loads(begins)) if fits else chain.times[-1] + 1)
    return begins if better is None else _descended(chain, better, for_memory=False)


def roomiest(chain: Chain) -> Cuts:
    """Cuts under which the device that misses most memory misses little: the least, for one stage per device.

    Where nothing can fit, no more is done than to have cuts to tell of.
    """
    begins = least_split(_shortage(chain, [[] for _ in chain.devices]), chain.num_blocks, chain.num_stages)
    assert begins is not None  # there are as many blocks as stages, and nothing has to fit
    done = chain.num_stages == len(chain.memory) or chain.hopeless
    return begins if done else _descended(chain, begins, for_memory=True)


def _descended(chain: Chain, begins: Cuts, *, for_memory: bool) -> Cuts:
    """Cut windows anew while that lowers the value; every step lowers it, so this ends."""
    value, improved = _value(chain, begins), True
    while improved:
        improved = False
        for first, last in _windows(chain):
            candidate = _recut(chain, begins, first, last, for_memory=for_memory)
            if candidate is not None and _value(chain, candidate) < value:
                begins, value, improved = candidate, _value(chain, candidate), True
    return begins


def _value(chain: Chain, begins: Cuts) -> tuple[int, int, int, int]:
    loads = chain.loads(begins)
    stages = sum(chain.time(begin, end) ** 2 for begin, end in chain.ranges(begins))
    return sum(chain.missing(begins)), max(loads), sum(load * load for load in loads), stages


def _windows(chain: Chain) -> list[Range]:
    """Runs of stages to cut anew: every neighbouring pair, and runs over all devices."""
    width, count = len(chain.memory), chain.num_stages
    pairs = [(first, first + 2) for first in range(count - 1)]
    starts = range(0, count - width + 1, max(1, width // 2)) if width > 2 else ()
    return pairs + [
        (first, first + width) for first in starts if len(set(chain.devices[first : first + width])) == width
    ]


def _recut(chain: Chain, begins: Cuts, first: int, last: int, *, for_memory: bool) -> Cuts | None:
    """The cuts with stages first..last-1 cut anew; None if nothing fits.

    A pair of stages on one device is cut as if each stood alone: what they do together stays.
    """
    low, high = begins[first], chain.num_blocks if last == chain.num_stages else begins[last]
    others = _others(chain, begins, first, last)
    cost = _shortage(chain, others, first) if for_memory else _load(chain, others)

    def fits(stage: int, begin: int, end: int) -> bool:
        return chain.fits(chain.devices[first + stage], sorted([*others[stage], (low + begin, low + end)]))

    inner = least_split(
        lambda stage, begin, end: cost(stage, low + begin, low + end),
        high - low,
        last - first,
        fits if chain.limited and not for_memory else None,
    )
    if inner is None:
        return None
    return (*begins[:first], *(low + begin for begin in inner), *begins[last:])


def _others(chain: Chain, begins: Cuts, first: int, last: int) -> list[list[Range]]:
    """[stage of the window first..last-1] the blocks its device runs outside the window."""
    outside: dict[int, list[Range]] = {device: [] for device in chain.devices}
    for stage, (device, blocks) in enumerate(zip(chain.devices, chain.ranges(begins), strict=True)):
        if not first <= stage < last:
            outside[device].append(blocks)
    return [outside[device] for device in chain.devices[first:last]]


def _load(chain: Chain, others: Sequence[Sequence[Range]]) -> Cost:
    """Cost of a stage: what its device then does in all, in ns."""
    bases = [sum(chain.time(begin, end) for begin, end in each) for each in others]
    return lambda stage, begin, end: bases[stage] + chain.time(begin, end)


def _shortage(chain: Chain, others: Sequence[Sequence[Range]], first: int = 0) -> Cost:
    """Cost of a stage: bytes its device then takes, shifted so that equal costs are equal shortages."""
    most = max((limit for limit in chain.memory if limit is not None), default=0)

    def cost(stage: int, begin: int, end: int) -> int:
        limit = chain.memory[chain.devices[first + stage]]
        return 0 if limit is None else most - limit + chain.bytes_of(sorted([*others[stage], (begin, end)]))

    return cost
