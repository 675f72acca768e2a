"""What the blocks of a model's shares come to, for every micro-batch size, number of shards and of parts of sequences.

Where sequences are parted, two traces of a block say all of it: of whole sequences, and of the smallest parts in more
samples (:mod:`pipeplan.runtime.profiling.closed_forms`). Shares between the two are never made.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import torch

from pipeplan.errors import UsageError
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.profiling.benches import RowKey
from pipeplan.runtime.profiling.build_profile import (
    AnyShare,
    BlockGraph,
    BlockNode,
    GraphShare,
    Kind,
    ModelShare,
    SharesLike,
    kinds_of,
    require_pieces,
)
from pipeplan.runtime.profiling.closed_forms import CountedBlock, Extent, Growth, NoClosedForm, Scale, TracedBlock
from pipeplan.runtime.profiling.counting import traced
from pipeplan.runtime.profiling.rounds import Progress

Pair = tuple[int, int]
"""Parts of sequences, and devices that split blocks."""

PIECES = (2, 4, 8)
"""Numbers of devices that share sequences in estimates that are not told."""

_SHORTEST = 512
"""Places of a piece, below which its products fill no device and the messages between pieces are all that is left."""

_MORE_SAMPLES = (3, 5, 7, 11)
"""How many times as many samples the second trace has: the first of these that tells them from parts of sequences."""


def pieces_of(model: Model) -> tuple[tuple[int, ...], str]:
    """Numbers of devices that share sequences where nobody asks for some, whole ones among them; and why no others."""
    if model.parted is None or model.in_context is None:
        return (1,), f"pipeplan run does not know how devices share sequences of {model.name}"
    found = [1]
    for count in PIECES:
        try:
            require_pieces(model, count)
            own = model.part_length(count)
        except UsageError as error:
            return tuple(found), "" if len(found) > 1 else str(error)
        if own < _SHORTEST:
            return tuple(found), "" if len(found) > 1 else f"pieces of {own} places are shorter than {_SHORTEST}"
        found.append(count)
    return tuple(found), ""


@dataclass(frozen=True, slots=True)
class SharesCounted:
    """The shares of a model that are asked for, by pairs, and what each kind of their blocks comes to at every size."""

    shares: dict[Pair, AnyShare] = field(default_factory=dict)
    blocks: list[CountedBlock] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShareCounter:
    """Counts blocks of a model, by its own ``graph``, ``fused`` and with and without ``recompute``; ``progress`` is
    called before each run.
    """

    model: Model
    graph: BlockGraph
    dtype: torch.dtype
    fused: bool
    recompute: bool = False
    progress: Progress | None = None

    def count(self, pairs: Sequence[Pair], sizes: Sequence[int]) -> SharesCounted:
        """All shares of ``pairs`` at micro-batch ``sizes``. Raises UsageError and ExecutionError."""
        made = SharesLike(self.model, self.graph, self.dtype)
        parts = {count: sorted(part for part, n in pairs if n == count) for _, count in pairs}
        ends = {count: _Ends(made.of(1, count), made.of(own[-1], count)) for count, own in parts.items() if own[-1] > 1}
        closed = self._between(ends, parts, sizes)
        known: dict[Pair, AnyShare] = {(each.context, each.shards): each for pair in ends.values() for each in pair}
        known |= closed.shares
        shares = {pair: known.get(pair) or made.of(*pair) for pair in pairs}
        left = [share for pair, share in shares.items() if pair not in closed.shares and isinstance(share, ModelShare)]
        rest = self.traced(left, sizes) if left else {}
        blocks = [*closed.blocks, *(block.counted(key) for key, block in rest.items())]
        return SharesCounted(shares, blocks)

    def traced(self, shares: Sequence[ModelShare], sizes: Sequence[int]) -> dict[RowKey, TracedBlock]:
        """The traces of all kinds of blocks of some shares."""
        return traced(shares, sizes, self.dtype, self.recompute, self.progress, fused=self.fused)

    def _between(
        self, ends: Mapping[int, _Ends], parts: Mapping[int, Sequence[int]], sizes: Sequence[int]
    ) -> SharesCounted:
        """The shares that closed forms give, from whole sequences to the smallest parts, and their blocks."""
        found, one = SharesCounted(), min(sizes)
        if not ends:
            return found
        more = next(each for each in _MORE_SAMPLES if all(own.last.context % each for own in ends.values()))
        here = _KindTraces.of([own.whole for own in ends.values()], one, self)
        there = _KindTraces.of([own.last for own in ends.values()], one * more, self)
        for count, own in ends.items():
            with suppress(NoClosedForm):
                shares = [own.share(part) for part in parts[count]]
                try:
                    blocks = list(own.blocks(shares, sizes, here, there))
                except NoClosedForm:
                    if one > 1:
                        raise
                    blocks = [  # one sample alone needs no sums over samples, or copies for them
                        *self._anew(own, shares, [1], 1),
                        *self._anew(own, shares, sizes[1:], more),
                    ]
                found.shares.update({(share.context, count): share for share in shares})
                found.blocks.extend(blocks)
        return found

    def _anew(self, ends: _Ends, shares: Sequence[AnyShare], sizes: Sequence[int], more: int) -> list[CountedBlock]:
        """Blocks by traces at the smallest of ``sizes``, and in the smallest parts with ``more`` times as many."""
        if not sizes:
            return []
        here, there = _KindTraces.of([ends.whole], sizes[0], self), _KindTraces.of([ends.last], sizes[0] * more, self)
        return list(ends.blocks(shares, sizes, here, there))


@dataclass(frozen=True, slots=True)
class _KindTraces:
    """The traces of all kinds of blocks of some shares at one size."""

    kinds: Mapping[Hashable, Kind]
    blocks: Mapping[RowKey, TracedBlock]
    size: int

    @classmethod
    def of(cls, shares: Sequence[ModelShare], size: int, counter: ShareCounter) -> _KindTraces:
        """Those of the shares."""
        return cls(kinds_of(shares), counter.traced(shares, [size]), size)

    def of_block(self, node: BlockNode, *, recompute: bool) -> TracedBlock | None:
        """That of a block; None where it is not computed again."""
        shards, context, expert, id_ = self.kinds[node.likeness]
        return self.blocks.get(RowKey(id_, self.size, shards, recompute, context, expert=expert))


class _Ends(NamedTuple):
    """One device's share of ``whole`` sequences, and of the smallest parts, the ``last``."""

    whole: ModelShare
    last: ModelShare

    @property
    def nodes(self) -> dict[str, tuple[BlockNode, BlockNode]]:
        """The first of each kind of block of whole sequences, with that of the smallest parts. Raises NoClosedForm."""
        found: dict[Hashable, tuple[BlockNode, BlockNode]] = {}
        for one, other in zip(self.whole.graph.blocks, self.last.graph.blocks, strict=True):
            if found.setdefault(one.likeness, (one, other))[1].likeness != other.likeness:
                raise NoClosedForm("blocks that are alike have parts that are not")
        return {one.spec.id: (one, other) for one, other in found.values()}

    def share(self, part: int) -> AnyShare:
        """That of so many parts, between the two. Raises NoClosedForm."""
        if part == 1:
            return self.whole
        scale = Growth(Extent(1, 1), Extent(1, self.last.context)).at(Extent(1, part))
        blocks = tuple(
            replace(
                one, spec=_spec_between(one.spec, other.spec, scale), likeness=(part, self.whole.shards, one.likeness)
            )
            for one, other in zip(self.whole.graph.blocks, self.last.graph.blocks, strict=True)
        )
        return GraphShare(self.whole.shards, replace(self.whole.graph, blocks=blocks), part)

    def blocks(
        self, shares: Sequence[AnyShare], sizes: Sequence[int], here: _KindTraces, there: _KindTraces
    ) -> Iterator[CountedBlock]:
        """What each kind of block of shares between comes to at some sizes. Raises NoClosedForm."""
        growth = Growth(Extent(here.size, 1), Extent(there.size, self.last.context))
        scales = {(share.context, size): growth.at(Extent(size, share.context)) for share in shares for size in sizes}
        for (id_, nodes), recompute in product(self.nodes.items(), (False, True)):
            one, other = here.of_block(nodes[0], recompute=recompute), there.of_block(nodes[1], recompute=recompute)
            if one is not None and other is not None:
                for (part, size), scale in scales.items():
                    yield one.scaled(other, scale).counted(RowKey(id_, size, self.whole.shards, recompute, part))


def _spec_between(one: BlockSpec, other: BlockSpec, scale: Scale) -> BlockSpec:
    forms = [
        (spec.divided, sorted(spec.dimensions), [(each.operation, each.phase, each.over) for each in spec.collectives])
        for spec in (one, other)
    ]
    if forms[0] != forms[1]:
        raise NoClosedForm("devices exchange other things, or do not divide the parts that they have")
    sizes = {name: scale(size, other.dimensions[name]) for name, size in one.dimensions.items()}
    collectives = tuple(
        replace(each, bytes_per_sample=scale(each.bytes_per_sample, like.bytes_per_sample))
        for each, like in zip(one.collectives, other.collectives, strict=True)
    )
    return replace(one, dimensions=sizes, collectives=collectives)
