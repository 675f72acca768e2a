"""What a decode step of a stage takes whose blocks have configurations, counted again from the profile's rows.

Devices that share requests take the row of the one that has most; those that split a block its row of as many shards;
those with pieces of the same caches the row of pieces, or else the core of a piece of every cache they share, and the
exchanges of what goes before it and comes after. What lies otherwise than the next block takes it is gathered, and so
is what leaves the stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pipeplan.costs.communication import Exchange, prices_of, time_of_groups
from pipeplan.costs.decoding import bytes_between, cached_bytes, phase_costs
from pipeplan.costs.devices import preset_called
from pipeplan.files import Block, Cluster, Edge, PhaseRow, Profile
from pipeplan.files.plan import Decode
from pipeplan.files.row_messages import Combining
from pipeplan.workload.elements import Stage
from pipeplan.workload.mesh import CACHE, CACHE_BY_QUERIES, EXPERTS, SAMPLES, SHARDS, Mesh

_NUMBER_BYTES = 8
"""Of a token, which the last stage gives for each request."""

_LOGARITHM_BYTES = 4
"""Of a head's sum of exponentials."""

Links = Callable[[Combining, int, Sequence[Sequence[int]]], float]
"""Ns in which groups of devices all run a collective about so many bytes."""


class Ways(NamedTuple):
    """How a configuration shares a block: requests among ``samples`` x ``pieces`` x ``experts`` devices, heads among
    ``shards``."""

    mesh: Mesh
    samples: int
    pieces: int
    shards: int
    by_queries: bool
    experts: int

    @classmethod
    def of(cls, text: str) -> Ways:
        """As a configuration says."""
        mesh = Mesh.parse(text)
        by_queries = mesh.size_of(CACHE_BY_QUERIES) > 1
        pieces = mesh.size_of(CACHE_BY_QUERIES if by_queries else CACHE)
        return cls(mesh, mesh.size_of(SAMPLES), pieces, mesh.size_of(SHARDS), by_queries, mesh.size_of(EXPERTS))

    @classmethod
    def plain(cls, samples: int, shards: int) -> Ways:
        """Of a stage without configurations."""
        return cls(Mesh(((SAMPLES, samples), (SHARDS, shards))), samples, 1, shards, False, 1)

    @property
    def owners(self) -> int:
        """Devices, or groups of shards, that have requests of their own."""
        return self.samples * self.pieces * self.experts

    @property
    def sharers(self) -> int:
        """Devices, or groups of shards and of pieces, among which caches are shared out."""
        return self.samples * self.experts

    @property
    def name(self) -> str:
        """The plain way that it is, or its mesh."""
        split = [name for name, size in self.mesh.axes if size > 1]
        plain = {SAMPLES: "dp", CACHE: "cp", CACHE_BY_QUERIES: "cp-q", SHARDS: "tp"}
        return plain[split[0]] if len(split) == 1 and split[0] in plain else str(self.mesh)


def links_of(profile: Profile, cluster: Cluster | None) -> Links:
    """The links of a cluster, else those of the device that the profile is of, else none that take time.

    A stage's devices are taken as the first of the cluster.
    """
    if cluster is not None:
        return lambda kind, size, groups: time_of_groups(cluster, Exchange(kind, size), groups)
    preset = preset_called(profile.source.device)
    if preset is None:
        return lambda kind, size, groups: 0.0
    prices = prices_of(preset)
    return lambda kind, size, groups: prices(Exchange(kind, size), len(groups[0])) if size else 0.0


def step_ns(stage: Stage, decode: Decode, profile: Profile, links: Links) -> int:
    """Ns of a step of the largest group.

    Raises:
        UsageError: the profile has no rows for it.
    """
    ways = [Ways.of(text) for text in stage.configurations]
    largest, total = stage.microbatch_size, 0
    into: Mapping[str, Sequence[Edge]] = profile.edges_into
    for place, (name, way) in enumerate(zip(stage.blocks, ways, strict=True)):
        if place:
            size = largest * sum(bytes_between(profile, edge, 1) for edge in into.get(name, ()))
            total += _gathered_ns(ways[place - 1], way.owners, size, links)
        total += _block_ns(profile.by_id[name], way, largest, decode.context_tokens, links)
    taken = [edge for edge in profile.edges if edge.source == stage.blocks[-1]]
    size = largest * (sum(bytes_between(profile, edge, 1) for edge in taken) or _NUMBER_BYTES)
    return max(1, total + _gathered_ns(ways[-1], 1, size, links))


def _block_ns(block: Block, way: Ways, largest: int, context: int, links: Links) -> int:
    own = -(-largest // way.owners)
    row = phase_costs(block, "decode", own, context, shards=way.shards, expert=way.experts)
    if way.pieces == 1:
        return row.forward_ns
    together, axis = -(-largest // way.samples), way.mesh.axis(CACHE_BY_QUERIES if way.by_queries else CACHE)
    lines = sorted({axis.of(device) for device in range(way.mesh.size)})
    waits = sum(links("all_to_all", size, lines) for size in _sent(block, way, together))
    return _piece_ns(block, row, way, own, together, context) + round(waits)


def chunk_costs_of(
    blocks: Sequence[tuple[Block, int]], profile: Profile, chunk: int, prompt: int
) -> tuple[int, int, int]:
    """Ns of a prompt's last chunk on a stage of ``blocks``, each with its shards; bytes it gives on, and works in.

    That is a prompt of the chunk's length, and its tokens' attention to those before them: the whole prompt's less that
    of a prompt of these, which is at least in proportion to the square of its length.

    Raises:
        UsageError: the profile has no rows for it.
    """
    time = work = 0
    for block, shards in blocks:
        whole = phase_costs(block, "prefill", 1, prompt, shards=shards)
        row = phase_costs(block, "prefill", 1, chunk, shards=shards)
        before = whole.core_ns * (prompt - chunk) ** 2 // prompt**2
        time += row.forward_ns + (max(0, whole.core_ns - before - row.core_ns) if chunk < prompt else 0)
        work = max(work, whole.workspace_bytes)
    last = blocks[-1][0].id
    given = max((bytes_between(profile, edge, chunk) for edge in profile.edges if edge.source == last), default=0)
    return max(1, time), given, work


def _piece_ns(block: Block, row: PhaseRow, way: Ways, own: int, together: int, context: int) -> int:
    """A block whose core is of a piece of every cache: as it was measured, or by the rows of shorter texts."""
    rows = [each for each in block.phases if each.phase == "decode" and each.shards == way.shards]
    if any((each.dcp, each.by_queries) == (way.pieces, way.by_queries) for each in rows):
        measured = phase_costs(
            block, "decode", own, context, shards=way.shards, dcp=way.pieces, by_queries=way.by_queries
        )
        return measured.forward_ns
    seen = min(context, block.cache_window_tokens or context)
    piece = -(-seen // way.pieces)
    if piece >= min(each.context_tokens for each in rows if each.dcp == 1):
        core = phase_costs(block, "decode", together, piece, shards=way.shards).core_ns
    else:  # no row is of so few
        core = -(-row.core_ns * together * piece // (own * seen))
    return row.forward_ns - row.core_ns + core


def _sent(block: Block, way: Ways, together: int) -> tuple[int, int]:
    """Bytes of what goes to the others before attention, and of what each has found for them after it."""
    queries, mixture = (each // way.shards for each in (block.query_bytes_per_token, block.mixture_bytes_per_token))
    written = cached_bytes(block, 1, way.shards)
    heads = -(-block.dimensions.get("heads", 1) // way.shards)
    kept = -(-together // way.pieces) if way.by_queries else together  # requests whose keys and values go along
    return together * queries + kept * written, together * (mixture + heads * _LOGARITHM_BYTES)


def _gathered_ns(way: Ways, into: int, size: int, links: Links) -> int:
    """Ns until what is shared out among owners lies with ``into`` others, each with all of its own; what is more is
    dropped."""
    if into % way.owners == 0:
        return 0
    into = into if way.owners % into == 0 else 1
    beside, groups = way.mesh.size // way.owners, defaultdict[tuple[int, int], list[int]](list)
    for device in range(way.mesh.size):
        owner, copy = divmod(device, beside)
        groups[owner // (way.owners // into), copy].append(device)
    return round(links("all_gather", -(-size // into), [*groups.values()]))
