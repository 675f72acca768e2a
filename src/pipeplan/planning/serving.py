"""Cuts for tools that serve: one pipeline over all devices, of whole layers or whatever else stays together.

Exact, by what stages can keep to one after another: the quickest busiest stage, of a forward or of a decode step, or
the most tokens in the cache of every stage. Where a profile says nothing of decode steps, forwards decide and memory is
that of a plan; else it is weights, what a step works in, and the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pipeplan.costs import StageCost
from pipeplan.costs.speeds import at_speed
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Block, Placement
from pipeplan.partition.mapping import neighbours
from pipeplan.planning.candidates import cut_so, open_splits
from pipeplan.planning.decoding import DecodeCost, Decoding, decoding_of
from pipeplan.planning.request import Request
from pipeplan.planning.uniform_space import Blocks, Choice
from pipeplan.search_constants import SERVING_STEPS
from pipeplan.time_limit import checked
from pipeplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class Served:
    """A placement, ns of a micro-batch's forward on its busiest stage, and what stages of equal work would take.

    Where the profile has ``decoding`` steps, ns are of these, and ``tokens`` fit into the cache of every stage, where
    memory is limited; no more than ``even_tokens`` could, if stages had room alike.
    """

    placement: Placement
    busiest_ns: int
    even_ns: int
    decoding: Decoding | None = None
    tokens: int | None = None
    even_tokens: int | None = None


def served(request: Request) -> Served:
    """The best cut, of all ways of splitting blocks over the devices: the quickest, or with the most cache.

    Raises:
        InfeasibleError: none fits into memory.
        UsageError: devices cannot form one pipeline; the profile has no rows for what is asked.
    """
    pipelines = [*_pipelines(request)]
    if not pipelines:
        raise _no_pipeline(request)
    decoding = serving_of(request)
    found, even, most = list[tuple[int, int, int, Choice, tuple[int, ...], int | None]](), math.inf, 0
    for choice in pipelines:
        chain = _ServedChain.of(request, choice, decoding)
        even, most = min(even, chain.even_ns), max(most, chain.even_tokens or 0)
        begins = chain.cut()
        if begins is not None:
            tokens = chain.tokens(begins)
            worse = -(tokens or 0) if decoding is not None and decoding.objective == "cache" else 0
            found.append((worse, chain.busiest(begins), choice.shards, choice, begins, tokens))
    if not found:
        raise _nothing_fits(request, decoding, most)
    _, busiest, _, choice, begins, tokens = min(found, key=lambda each: each[:3])
    placement = cut_so(request, choice, "busiest stage", begins).placement
    return Served(placement, busiest, int(even), decoding, tokens, None if tokens is None else most)


def serving_of(request: Request) -> Decoding | None:
    """The decode steps that a request's cut is best for, if its profile has some. Raises UsageError."""
    profile = request.profile if request.joined is None else request.joined.whole
    return decoding_of(profile, request.serving, limited=all(size is not None for size in request.memory))


def _nothing_fits(request: Request, decoding: Decoding | None, most: int) -> InfeasibleError:
    limit = min(size for size in request.memory if size is not None)
    if decoding is None:
        return InfeasibleError(
            f"no cut into whole layers fits into {format_bytes(limit)} per device, whatever splits them; raise "
            "--memory, or give more --devices"
        )
    wanted = f"a cache for {decoding.batch} requests of {decoding.context} tokens"
    if decoding.objective == "cache":
        wanted = f"a cache for one request of {decoding.context} tokens"
    room = f"; there is room for at most {most // decoding.context} such requests" if most else ""
    return InfeasibleError(
        f"no cut into whole layers fits into {format_bytes(limit)} per device with {wanted}{room}; lower --batch or "
        "--context, raise --memory, or give more --devices"
    )


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
    """Groups of blocks of a choice: running sums of their times, and what stages of them need on each rank.

    ``held``, ``active`` and ``cached`` are running sums of bytes kept, of activations, and of the cache of a context,
    with those that several share as often as they are there; ``beside`` is the most that any works in.
    """

    sums: Sequence[int]
    held: Sequence[int]
    active: Sequence[int]
    cached: Sequence[int]
    beside: int
    costs: Sequence[StageCost]
    in_flight: Sequence[int]
    limits: Sequence[int | None]
    speeds: Sequence[float]
    decoding: Decoding | None = None
    steps: Sequence[DecodeCost] = ()

    @classmethod
    def of(cls, request: Request, choice: Choice, decoding: Decoding | None = None) -> _ServedChain:
        units = neighbours(request.cluster, request.num_devices, choice.width)
        costs = Blocks.of(request.profile).costs(choice.pricing)
        count, memory, speeds = choice.batch.num_microbatches, request.memory, request.speeds
        times, steps = [cost.forward_ns for cost in costs], list[DecodeCost]()
        if decoding is not None:
            steps = _steps(request, decoding, choice.shards)
            times = [step.step_ns for step in steps]
        working = [each.working_bytes for each in steps] or [each.workspace_bytes for each in costs]
        return cls(
            [0, *accumulate(times)],
            [0, *accumulate(cost.static_bytes for cost in costs)],
            [0, *accumulate(cost.activation_bytes for cost in costs)],
            [0, *accumulate(step.cached_bytes for step in steps)],
            max(working),
            costs,
            [min(count, len(units) - rank) for rank in range(len(units))],
            [min((size for x in unit if (size := memory[x]) is not None), default=None) for unit in units],
            [min(speeds[x] for x in unit) for unit in units],
            decoding,
            steps,
        )

    @property
    def even_ns(self) -> int:
        """Ns of every stage if all had work by their speed."""
        return math.ceil(self.sums[-1] / sum(self.speeds))

    @property
    def even_tokens(self) -> int | None:
        """Tokens in the cache if stages had room alike, however they are cut; None where memory is unlimited."""
        if self.decoding is None or None in self.limits:
            return None
        room = sum(limit or 0 for limit in self.limits) - sum(self.costs[1:], self.costs[0]).static_bytes
        cached = sum(step.cached_bytes for step in self.steps)
        return max(0, room * self.decoding.context // cached) if cached else None

    def busiest(self, begins: Sequence[int]) -> int:
        """Ns of the busiest stage."""
        return max(self._ns(rank, *each) for rank, each in enumerate(self._stages(begins)))

    def tokens(self, begins: Sequence[int]) -> int | None:
        """Tokens for which every stage has room; None where memory is unlimited, or nothing is cached."""
        found = [self._tokens(rank, *each) for rank, each in enumerate(self._stages(begins))]
        return min((each for each in found if each is not None), default=None)

    def _stages(self, begins: Sequence[int]) -> Iterator[tuple[int, int]]:
        return zip(begins, (*begins[1:], len(self.costs)), strict=True)

    def _ns(self, rank: int, begin: int, end: int) -> int:
        return at_speed(self.sums[end] - self.sums[begin], self.speeds[rank])

    def _tokens(self, rank: int, begin: int, end: int) -> int | None:
        limit, cached = self.limits[rank], sum(step.cached_bytes for step in self.steps[begin:end])
        if self.decoding is None or limit is None or not cached:
            return None
        whole = sum(self.costs[begin + 1 : end], self.costs[begin]).static_bytes
        working = max(step.working_bytes for step in self.steps[begin:end])
        return (limit - whole - working) * self.decoding.context // cached

    def cut(self) -> tuple[int, ...] | None:
        """The first block of each stage, of the best cut; None if nothing fits."""
        tokens = 0
        if self.decoding is not None and None not in self.limits:
            tokens = self.decoding.batch * self.decoding.context
        slowest = max(self._ns(rank, 0, len(self.costs)) for rank in range(len(self.speeds)))
        if self.decoding is not None and self.decoding.objective == "cache":
            most = self.even_tokens
            tokens = (
                self.decoding.context
                if most is None
                else _last(self.decoding.context, most, lambda each: self._filled(slowest, each) is not None)
            )
        if self._filled(slowest, tokens) is None:
            return None
        low = _first(1, slowest, lambda each: self._filled(each, tokens) is not None)
        return self._evened(low, tokens) or self._filled(low, tokens)

    def _filled(self, most_ns: int, tokens: int) -> tuple[int, ...] | None:
        """Stages that each take as many blocks as they can within so many ns, with so many tokens of cache; None where
        some blocks are left.
        """
        begins, begin, ranks = list[int](), 0, len(self.speeds)
        for rank in checked(range(ranks), 64):
            last = len(self.costs) - (ranks - rank - 1)
            begins.append(begin)
            if self._ns(rank, begin, begin + 1) > most_ns:
                return None
            begin = self._end(rank, begin, last, most_ns, tokens)
            if begin == begins[-1]:
                return None
        return tuple(begins) if begin == len(self.costs) else None

    def _end(self, rank: int, begin: int, last: int, most_ns: int, tokens: int) -> int:
        """Where a stage that begins there, and has time for a block, ends at the latest; where it begins, if its memory
        is too small for that block.
        """
        end = _last(begin + 1, last, lambda each: self._ns(rank, begin, each) <= most_ns)
        limit = self.limits[rank]
        if limit is None or self._most_bytes(rank, begin, end, tokens) <= limit:
            return end
        return next(reversed(self._ends(rank, begin, end, most_ns, tokens)), begin)

    def _most_bytes(self, rank: int, begin: int, end: int, tokens: int) -> int:
        """What a stage needs at most: it may share some of that, and none of its blocks work in more."""
        kept = self.held[end] - self.held[begin] + self.beside
        if self.decoding is None:
            return kept + self.in_flight[rank] * (self.active[end] - self.active[begin])
        return kept - (-tokens * (self.cached[end] - self.cached[begin]) // self.decoding.context)

    def _ends(self, rank: int, begin: int, last: int, most_ns: int, tokens: int) -> list[int]:
        """Where a stage that begins there may end: after a block at least, within ns and memory."""
        found, limit = list[int](), self.limits[rank]
        whole: StageCost | None = None
        working = cached = 0
        for end in checked(range(begin + 1, last + 1)):
            if self._ns(rank, begin, end) > most_ns:
                break
            if limit is not None:
                one = self.costs[end - 1]
                whole = one if whole is None else whole + one
                if self.decoding is None:
                    needed = whole.memory_bytes(self.in_flight[rank])
                else:
                    working = max(working, self.steps[end - 1].working_bytes)
                    cached += self.steps[end - 1].cached_bytes
                    needed = whole.static_bytes + working - (-tokens * cached // self.decoding.context)
                if needed > limit:
                    break
            found.append(end)
        return found

    def _evened(self, most_ns: int, tokens: int) -> tuple[int, ...] | None:
        """Of the cuts with this bottleneck the one whose stages are most alike; None where that takes too long."""
        ranks, blocks = len(self.speeds), len(self.costs)
        if ranks * blocks * min(blocks, 2 + 2 * blocks // ranks) > SERVING_STEPS:
            return None
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
        for rank in range(ranks):
            last, after = blocks - (ranks - rank - 1), dict[int, tuple[int, tuple[int, ...]]]()
            for begin, (value, begins) in best.items():
                for end in self._ends(rank, begin, last, most_ns, tokens):
                    own = value + self._ns(rank, begin, end) ** 2
                    if end not in after or own < after[end][0]:
                        after[end] = own, (*begins, begin)
            best = after
        return best[blocks][1] if blocks in best else None


def _steps(request: Request, decoding: Decoding, shards: int) -> list[DecodeCost]:
    """[group of blocks] a decode step of each; alike blocks are looked up once."""
    joined, profile = request.joined, request.profile
    known: dict[tuple[int, ...], DecodeCost] = {}
    found = list[DecodeCost]()
    for name in checked(profile.topological_order()):
        members: Sequence[Block] = [profile.by_id[name]]
        if joined is not None:
            members = [joined.whole.by_id[each] for each in joined.members[name]]
        key = tuple(id(each.phases) for each in members)
        if key not in known:
            known[key] = decoding.cost(members, shards)
        found.append(known[key])
    return found


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number from ``low`` on that holds, where ``high`` does, and all above the first."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The greatest number up to ``high`` that holds, as all below it do; ``low`` where none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def request_of(request: Request, placement: Placement) -> Request:
    """The search for the rest of a plan with these stages: 1F1B, which runs no forward later than it must."""
    said = ("positions", "shards", "context", "expert", "expert_shards", "replicas", "chunks")
    none: dict[str, Any] = dict.fromkeys(said)
    return replace(request, placement=placement, scheduler="1f1b", sizes=(), start=None, **none)
