"""Tensors between blocks of a stage: each is held once however many blocks count it, and not if no backward needs it.

A block's row counts what it takes where that has a gradient or its backward needs it, as a stage of that block alone
keeps it, and what it gives where its own backward needs that (:class:`pipeplan.files.Edge`). Of blocks that run
together some count the same tensor; and what passes between two of them is not kept where neither's backward needs it.
Blocks that divide tensors along the sequence have slices, which are other tensors than the whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from types import MappingProxyType

from pipeplan.costs.blocks import places_divided
from pipeplan.costs.messages import edge_bytes
from pipeplan.files import Block, Edge, Profile
from pipeplan.workload.elements import Again

EMPTY: Mapping[str, int] = MappingProxyType({})


def loose_edges(profile: Profile) -> Mapping[str, Sequence[Edge]]:
    """{block: edges into it that it may count together with other blocks, or that a stage need not hold}."""

    def found() -> dict[str, list[Edge]]:
        takers = Counter(edge.key for edge in profile.edges)
        loose: dict[str, list[Edge]] = defaultdict(list)
        for edge in profile.edges:
            unsaved = edge.need == "no" or (edge.gradient and edge.need != "yes")
            if takers[edge.key] > 1 or edge.saved_by_source != "no" or unsaved:
                loose[edge.target].append(edge)
        return dict(loose)

    return profile.once("loose edges", found)


def counted_again(
    profile: Profile,
    blocks: Sequence[str],
    again: Sequence[Again],
    microbatch_size: int,
    parts: Callable[[str], int] = lambda block: 1,
    fused: Mapping[str, int] = EMPTY,
) -> int:
    """Bytes by which the rows of a stage's blocks, which run so ``again``, are more than the stage holds.

    ``parts`` says into how many slices what a block takes and gives is divided. ``fused`` {block: number of what it is
    in} are blocks that a kernel backend runs at once, with one row: what these need is not known, and taken to be all.
    """
    loose = loose_edges(profile)
    if not loose or len(blocks) < 2:
        return 0
    how = dict(zip(blocks, again, strict=True))
    counts, sizes = Counter[Hashable](), dict[Hashable, int]()
    needed, given, entered = set[Hashable](), set[Hashable](), set[Hashable]()
    for block in blocks:
        whole = fused.get(block)
        for edge in loose.get(block, ()):
            slices, inside = parts(block), edge.source in how
            key = edge.key, slices
            if not edge.is_counted(how[block]) or (whole is not None and fused.get(edge.source) == whole):
                continue
            if whole is not None and (key, whole) in entered:
                continue
            entered.add((key, whole))
            counts[key] += 1
            sizes[key] = edge_bytes(edge, microbatch_size, slices)
            if not inside or edge.is_saved(how[block]) or whole is not None:
                needed.add(key)
            own = inside and edge.source not in fused and parts(edge.source) == slices
            if own and edge.is_counted_by_source(how[edge.source]):
                given.add(key)
    return sum((count + (key in given) - (key in needed or key in given)) * sizes[key] for key, count in counts.items())


def bytes_into(block: Block, edges: Iterable[Edge], samples: int, shards: int, context: int) -> int:
    """What a device has of what a block takes by these edges, for so many samples."""
    parts = context * places_divided(block, shards)
    return sum(edge_bytes(edge, samples, parts) for edge in edges)


Repeat = tuple[int, int, int]
"""Two blocks by their places, and bytes that a range with both counts too often; below 0 it counts them too seldom."""


def repeats_of(profile: Profile, order: Sequence[str], again: Again, size: Callable[[Edge], int]) -> tuple[Repeat, ...]:
    """:func:`counted_again` of all ranges of blocks in this order, which all run so ``again``.

    A range that has n takers of a tensor but not its source counts it n - 1 times too often: once for each two of them
    that follow each other. With its source it does not hold it at all, unless it has one whose backward needs it.
    """
    takers: dict[Hashable, list[Edge]] = defaultdict(list)
    for edge in chain.from_iterable(loose_edges(profile).values()):
        if edge.is_counted(again):
            takers[edge.key].append(edge)
    place = {block: index for index, block in enumerate(order if takers else ())}
    found: list[Repeat] = []
    for edges in takers.values():
        own = sorted(edges, key=lambda edge: place[edge.target])
        first, saved = own[0], next((edge for edge in own if edge.is_saved(again)), None)
        found += [(place[one.target], place[other.target], size(other)) for one, other in pairwise(own)]
        if first.is_counted_by_source(again) or saved is not first:
            found.append((place[first.source], place[first.target], size(first)))
            if saved is not None and not first.is_counted_by_source(again):
                found.append((place[first.source], place[saved.target], -size(saved)))
    return tuple(found)
