"""Cuts for tools that serve: one pipeline over all devices, whose busiest stage runs forward as quickly as can be.

Of whole layers, or whatever else stays together; exact, by the least bottleneck that stages can keep to one after
another. No profile says what inference keeps in a cache, so that times decide and memory is that of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pipeplan.costs import StageCost
from pipeplan.costs.speeds import at_speed
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Placement
from pipeplan.partition.mapping import neighbours
from pipeplan.planning.candidates import cut_so, open_splits
from pipeplan.planning.request import Request
from pipeplan.planning.uniform_space import Blocks, Choice
from pipeplan.units import format_bytes

_MOST = 2_000_000
"""Steps in which stages are evened out that need not be the busiest."""


@dataclass(frozen=True, slots=True)
class Served:
    """A placement, ns of a micro-batch's forward on its busiest stage, and what stages of equal work would take."""

    placement: Placement
    busiest_ns: int
    even_ns: int


def served(request: Request) -> Served:
    """The cut with the quickest busiest stage, of all ways of splitting blocks over the devices.

    Raises:
        InfeasibleError: none fits into memory.
        UsageError: devices cannot form one pipeline.
    """
    pipelines = [*_pipelines(request)]
    if not pipelines:
        raise _no_pipeline(request)
    found, even = list[tuple[int, int, Choice, tuple[int, ...]]](), math.inf
    for choice in pipelines:
        chain = _ServedChain.of(request, choice)
        even = min(even, chain.even_ns)
        begins = chain.cut()
        if begins is not None:
            found.append((chain.busiest(begins), choice.shards, choice, begins))
    if not found:
        limit = min(size for size in request.memory if size is not None)
        raise InfeasibleError(
            f"no cut into whole layers fits into {format_bytes(limit)} per device, whatever splits them; raise "
            "--memory, or give more --devices"
        )
    busiest, _, choice, begins = min(found, key=lambda each: each[:2])
    return Served(cut_so(request, choice, "busiest stage", begins).placement, busiest, int(even))


def _pipelines(request: Request) -> Iterator[Choice]:
    """Pipelines over all devices: of each number of shards the ranks that are left."""
    blocks = len(request.profile.blocks)
    for split in open_splits(request):
        ranks, rest = divmod(request.num_devices, split.width)
        fits = split.context == split.expert == 1 and not rest and ranks <= blocks
        if fits and request.positions in (None, ranks):
            yield Choice("one-to-one", 1, request.batch, False, False, shards=split.shards, positions=ranks)


def _no_pipeline(request: Request) -> UsageError:
    blocks, title = len(request.profile.blocks), "" if request.only is None else request.only.title
    shards = sorted({split.shards for split in open_splits(request)})
    asked = "" if request.positions is None else f" in {request.positions} ranks"
    return UsageError(
        f"{request.num_devices} devices{asked} are not one pipeline of whole layers for {title}: {blocks} can stand "
        f"apart, and blocks have costs for {', '.join(map(str, shards))} devices that split them; choose --devices of "
        f"at most {blocks * max(shards)}, and --pp so that --pp x --tp is --devices"
    )


@dataclass(frozen=True, slots=True)
class _ServedChain:
    """Blocks of a choice: running sums of their forwards, and what stages of them need on each rank."""

    sums: Sequence[int]
    costs: Sequence[StageCost]
    in_flight: Sequence[int]
    limits: Sequence[int | None]
    speeds: Sequence[float]

    @classmethod
    def of(cls, request: Request, choice: Choice) -> _ServedChain:
        units = neighbours(request.cluster, request.num_devices, choice.width)
        costs = Blocks.of(request.profile).costs(choice.pricing)
        count, memory, speeds = choice.batch.num_microbatches, request.memory, request.speeds
        return cls(
            [0, *accumulate(cost.forward_ns for cost in costs)],
            costs,
            [min(count, len(units) - rank) for rank in range(len(units))],
            [min((size for x in unit if (size := memory[x]) is not None), default=None) for unit in units],
            [min(speeds[x] for x in unit) for unit in units],
        )

    @property
    def even_ns(self) -> int:
        """Ns of every stage if all had work by their speed."""
        return math.ceil(self.sums[-1] / sum(self.speeds))

    def busiest(self, begins: Sequence[int]) -> int:
        """Ns of the busiest stage."""
        ends = (*begins[1:], len(self.costs))
        return max(self._ns(rank, *each) for rank, each in enumerate(zip(begins, ends, strict=True)))

    def _ns(self, rank: int, begin: int, end: int) -> int:
        return at_speed(self.sums[end] - self.sums[begin], self.speeds[rank])

    def cut(self) -> tuple[int, ...] | None:
        """The first block of each stage, of the least bottleneck; None if nothing fits."""
        low, high = 1, max(self._ns(rank, 0, len(self.costs)) for rank in range(len(self.speeds)))
        if self._filled(high) is None:
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._filled(middle) is not None else (middle + 1, high)
        return self._evened(low) or self._filled(low)

    def _filled(self, most_ns: int) -> tuple[int, ...] | None:
        """Stages that each take as many blocks as they can within so many ns; None where some blocks are left."""
        begins, begin, ranks = list[int](), 0, len(self.speeds)
        for rank in range(ranks):
            last = len(self.costs) - (ranks - rank - 1)
            begins.append(begin)
            ends = self._ends(rank, begin, last, most_ns)
            if not ends:
                return None
            begin = ends[-1]
        return tuple(begins) if begin == len(self.costs) else None

    def _ends(self, rank: int, begin: int, last: int, most_ns: int) -> list[int]:
        """Where a stage that begins there may end: after a block at least, within ns and memory."""
        found, limit = list[int](), self.limits[rank]
        whole: StageCost | None = None
        for end in range(begin + 1, last + 1):
            if self._ns(rank, begin, end) > most_ns:
                break
            if limit is not None:
                one = self.costs[end - 1]
                whole = one if whole is None else whole + one
                if whole.memory_bytes(self.in_flight[rank]) > limit:
                    break
            found.append(end)
        return found

    def _evened(self, most_ns: int) -> tuple[int, ...] | None:
        """Of the cuts with this bottleneck the one whose stages are most alike; None where that takes too long."""
        ranks, blocks = len(self.speeds), len(self.costs)
        if ranks * blocks * min(blocks, 2 + 2 * blocks // ranks) > _MOST:
            return None
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
        for rank in range(ranks):
            last, after = blocks - (ranks - rank - 1), dict[int, tuple[int, tuple[int, ...]]]()
            for begin, (value, begins) in best.items():
                for end in self._ends(rank, begin, last, most_ns):
                    own = value + self._ns(rank, begin, end) ** 2
                    if end not in after or own < after[end][0]:
                        after[end] = own, (*begins, begin)
            best = after
        return best[blocks][1] if blocks in best else None


def request_of(request: Request, placement: Placement) -> Request:
    """The search for the rest of a plan with these stages: 1F1B, which runs no forward later than it must."""
    said = ("positions", "shards", "context", "expert", "replicas", "chunks")
    none: dict[str, Any] = dict.fromkeys(said)
    return replace(request, placement=placement, scheduler="1f1b", sizes=(), start=None, **none)
