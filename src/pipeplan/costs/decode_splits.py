"""How a stage's devices share a decode step, block by block: by requests, along the cache, by heads, and mixtures.

A block's devices stand on a mesh of up to three axes. Along ``samples`` each has requests of its own; along ``cache``,
too, but of every request's cache each has a piece, which attention of all of them meets (thesis, section 4.4); along
``shards`` heads and inner widths are split, with the collectives that the block's own rows have. Data parallelism,
cache parallelism and tensor parallelism are the meshes of one axis. What has no cache has no axis for it: there both
axes are requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pipeplan.costs.cache_volumes import Kept
from pipeplan.costs.communication import Exchange, prices_of, time_of_groups
from pipeplan.costs.decoding import cached_bytes, phase_costs
from pipeplan.costs.devices import preset_called
from pipeplan.costs.recipes import expert_state_of, state_over
from pipeplan.costs.zero import WHOLE, cuts
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, PhaseRow, Profile
from pipeplan.workload.kinds import MemoryBytes
from pipeplan.workload.mesh import CACHE, CACHE_BY_QUERIES, COPIES, EXPERTS, SAMPLES, SHARDS, Mesh

STATISTIC_BYTES = 4
"""The logarithm of a head's sum of exponentials is in single precision, whatever the model is in; with it pieces merge,
for which the text has two numbers (:func:`.step_volume`)."""


@dataclass(frozen=True, slots=True)
class StepWay:
    """A mesh of ``samples`` x ``cache`` x ``experts`` x ``shards`` devices, or as many ``copies`` that do the same.

    Along its cache axis queries, keys and values are gathered, or ``by_queries`` queries alone; along that of experts
    each has requests of its own and whole experts, whose tokens they exchange.
    """

    samples: int = 1
    cache: int = 1
    shards: int = 1
    copies: int = 1
    by_queries: bool = False
    experts: int = 1

    @property
    def owners(self) -> int:
        """Among how many devices (or groups of shards) requests are shared out, outside of attention."""
        return self.samples * self.cache * self.experts

    @property
    def order(self) -> tuple[int, ...]:
        """Of two that cost the same the first is simpler."""
        return self.cache, self.copies, self.experts, self.shards, int(self.by_queries)

    @property
    def form(self) -> Kept | None:
        """The plain way that it is; None of one device, of copies and of mixtures."""
        split = [axis for axis in (self.samples, self.cache, self.shards) if axis > 1]
        if len(split) != 1 or self.copies > 1 or self.experts > 1:
            return None
        return "dp" if self.samples > 1 else "tp" if self.shards > 1 else "cp-q" if self.by_queries else "cp"

    @property
    def mesh(self) -> Mesh:
        """As plans write it: requests outside, shards neighbours."""
        along = CACHE_BY_QUERIES if self.by_queries else CACHE
        axes = (SAMPLES, self.samples), (along, self.cache), (EXPERTS, self.experts), (SHARDS, self.shards)
        every = (*axes, (COPIES, self.copies))
        return Mesh(tuple((name, size) for name, size in every if size > 1) or ((SHARDS, 1),))


def ways_of(block: Block, devices: int) -> Iterator[StepWay]:
    """Every mesh of so many devices for a block, by the shards that its decode rows are for."""
    known = sorted({row.shards for row in block.phases if row.phase == "decode" and row.expert == 1})
    for shards in (each for each in known if devices % each == 0):
        owners = devices // shards
        yield StepWay(samples=owners, shards=shards)
        for pieces in range(2, owners + 1) if block.cache_bytes_per_token else ():
            if owners % pieces == 0:
                for by_queries in (False, True):
                    yield StepWay(owners // pieces, pieces, shards, by_queries=by_queries)
    for experts in sorted({row.expert for row in block.phases if row.phase == "decode" and row.expert > 1}):
        if devices % experts == 0:
            yield StepWay(samples=devices // experts, experts=experts)
    if devices > 1 and 1 in known:
        yield StepWay(copies=devices)


class StageLinks:
    """What exchanges among a stage's devices take: by a cluster, else by the links of the device that a profile names.

    Of neither nothing is known, and they take no time.
    """

    def __init__(self, profile: Profile, cluster: Cluster | None) -> None:
        self.cluster = cluster
        self._device = None if cluster is not None else preset_called(profile.source.device)
        self._prices = None if self._device is None else prices_of(self._device)

    @property
    def known(self) -> bool:
        """Whether they take time."""
        return self.cluster is not None or self._prices is not None

    def ns(self, exchange: Exchange, groups: Sequence[Sequence[int]]) -> float:
        """Ns in which each of the groups runs an exchange, all at once."""
        if len(groups[0]) < 2 or not exchange.array_bytes:
            return 0.0
        if self.cluster is not None:
            return time_of_groups(self.cluster, exchange, groups)
        return 0.0 if self._prices is None else self._prices(exchange, len(groups[0]))


@dataclass(frozen=True, slots=True)
class DecodeAt:
    """Requests in ``sizes`` [group], of which each takes its steps together, with texts of ``context`` tokens."""

    sizes: tuple[int, ...]
    context: int

    @classmethod
    def of(cls, batch: int, groups: int, context: int) -> DecodeAt:
        """As even groups as can be."""
        return cls(tuple(batch * (n + 1) // groups - batch * n // groups for n in range(groups)), context)

    @property
    def largest(self) -> int:
        """Requests of the largest group, by which steps are timed."""
        return max(self.sizes)

    def owned(self, parts: int) -> int:
        """Requests of all groups of the one of so many devices that has most."""
        return sum(-(-size // parts) for size in self.sizes)


class StepCost(NamedTuple):
    """A block in one way, on each device: ns of a group's step, of them ``exchange_ns`` beside its rows; what it keeps.

    ``working_bytes`` are there while it runs, ``cache_bytes`` are of all groups. ``sent_bytes`` is what a device sends
    along the cache axis in a step. Beside every step the block takes ``chunk_ns`` for a chunk of a prompt, and
    ``chunk_bytes`` are there meanwhile, if prompts join.
    """

    way: StepWay
    step_ns: int
    exchange_ns: int
    state: MemoryBytes
    cache_bytes: int
    working_bytes: int
    sent_bytes: float
    chunk_ns: int = 0
    chunk_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """State and cache."""
        return self.state.total + self.cache_bytes

    @property
    def turn_ns(self) -> int:
        """A step and the chunk beside it."""
        return self.step_ns + self.chunk_ns

    @property
    def needed_bytes(self) -> int:
        """While either runs."""
        return max(self.working_bytes, self.chunk_bytes)


def step_cost(profile: Profile, block: Block, way: StepWay, at: DecodeAt, links: StageLinks) -> StepCost:
    """What a block takes and keeps.

    Raises:
        UsageError: the profile has no decode rows for that: for these shards, or so many requests or tokens of each.
    """
    own = -(-at.largest // way.owners)
    row = phase_costs(block, "decode", own, at.context, shards=way.shards, expert=way.experts)
    apart = expert_state_of(block, profile.recipe) if way.experts > 1 else MemoryBytes()
    state = (state_over(block, profile.recipe, way.shards) - apart).share(cuts(profile.recipe, WHOLE, way.shards))
    state += apart.share(cuts(profile.recipe, WHOLE, way.experts))
    step, working = row.forward_ns, row.workspace_bytes + row.activation_bytes
    exchange, sent, piece = 0.0, 0.0, at.context
    if way.cache > 1:
        kept = at.context if block.cache_window_tokens is None else min(at.context, block.cache_window_tokens)
        piece = -(-kept // way.cache)
        together = -(-at.largest // way.samples)
        arrays = _exchanged(block, way, together)
        exchange = sum(links.ns(each, _along_cache(way)) for each in arrays)
        sent = sum(each.array_bytes for each in arrays) * (way.cache - 1) / way.cache
        step = _step_with_pieces(block, row, way, (own, together), (at.context, piece, kept))
        working += sum(each.array_bytes for each in arrays)
    cached = at.owned(way.samples if way.cache > 1 else way.owners) * cached_bytes(block, piece, way.shards)
    return StepCost(way, step + round(exchange), round(exchange), state, cached, working, sent)


def _step_with_pieces(
    block: Block, row: PhaseRow, way: StepWay, requests: tuple[int, int], tokens: tuple[int, int, int]
) -> int:
    """Ns of a block, of ``requests`` own and together, whose texts, pieces of caches and kept words have so many
    ``tokens``: as measured with pieces, else of ``row`` with the core of pieces in place of its own."""
    own, together = requests
    context, piece, kept = tokens
    if any(
        (each.dcp, each.by_queries, each.shards) == (way.cache, way.by_queries, way.shards) for each in block.phases
    ):
        measured = phase_costs(
            block, "decode", own, context, shards=way.shards, dcp=way.cache, by_queries=way.by_queries
        )
        return measured.forward_ns
    return row.forward_ns - row.core_ns + _core_of_pieces(block, row, together, piece, kept)


def _core_of_pieces(block: Block, row: PhaseRow, requests: int, piece: int, kept: int) -> int:
    """Ns of attention to a piece of each of so many requests' caches, of which all would be ``kept`` tokens.

    Where no row is of so few tokens, it is that of as many in fewer requests: of ``row``, in proportion.

    Raises:
        UsageError: there is no row for so many requests.
    """
    alike = (each for each in block.phases if (each.phase, each.shards, each.dcp) == ("decode", row.shards, 1))
    least = min(each.context_tokens for each in alike)
    if piece < least:
        return -(-row.core_ns * requests * piece // (row.microbatch_size * kept))
    return phase_costs(block, "decode", requests, piece, shards=row.shards).core_ns


def _exchanged(block: Block, way: StepWay, requests: int) -> list[Exchange]:
    """What devices along the cache exchange for so many requests, of the heads that each has: what they give before
    attention in one exchange, and what they found in another, each directly to those that it is for."""
    queries, mixture = block.query_bytes_per_token // way.shards, block.mixture_bytes_per_token // way.shards
    written = cached_bytes(block, 1, way.shards)
    heads = -(-block.dimensions.get("heads", 1) // way.shards)
    found = Exchange("all_to_all", requests * (mixture + heads * STATISTIC_BYTES))
    if way.by_queries:
        own = -(-requests // way.cache) * written
        return [Exchange("all_to_all", requests * queries + own), found]
    return [Exchange("all_to_all", requests * (queries + written)), found]


def _along_cache(way: StepWay) -> list[tuple[int, ...]]:
    axis = way.mesh.axis(CACHE_BY_QUERIES if way.by_queries else CACHE)
    return sorted({axis.of(device) for device in range(way.mesh.size)})


def known_ways(
    profile: Profile,
    block: Block,
    devices: int,
    at: DecodeAt,
    links: StageLinks,
    allows: Callable[[Block, StepWay], bool],
) -> tuple[list[StepCost], list[UsageError]]:
    """A block's ways that are allowed and priced, and why others are not."""
    found, failures = list[StepCost](), list[UsageError]()
    for way in ways_of(block, devices):
        if allows(block, way):
            try:
                found.append(step_cost(profile, block, way, at, links))
            except UsageError as error:
                failures.append(error)
    return found, failures


@cache
def gathered(owners: int, into: int, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that gather, where requests shared out among ``owners`` come to be among fewer.

    Owner n is ``devices // owners`` neighbours. None where owners of the one are not whole numbers of the other's.
    """
    if into >= owners or owners % into:
        return ()
    beside, each = devices // owners, owners // into
    return tuple(
        tuple(first * each * beside + place * beside + copy for place in range(each))
        for first in range(into)
        for copy in range(beside)
    )
