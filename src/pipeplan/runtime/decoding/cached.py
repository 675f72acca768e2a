"""Blocks run as they are, and where they call torch's attention it meets the caches of their requests.

A block computes query, key and value of the words that enter. Where devices have pieces of caches (cache parallelism;
thesis, section 4.4), each attends to its pieces for the requests of all, and what it found goes to the one whose
request it is: queries, keys and values of all requests are gathered, or queries alone, and the new keys and values are
sent to the one that keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from pipeplan.errors import UsageError
from pipeplan.runtime.decoding.attention import merged
from pipeplan.runtime.decoding.exchanges import Form, StageExchange
from pipeplan.runtime.decoding.latents import LatentHeads
from pipeplan.runtime.decoding.layouts import BlockLayout
from pipeplan.runtime.decoding.pieces import CachePiece, Looks
from pipeplan.runtime.decoding.requests import Pass
from pipeplan.runtime.parallel.attention_cores import ATTENTION


class WordWay(NamedTuple):
    """Between two devices with pieces of the same caches: which of one's words [rows * width] ``go``, how many ``come``
    from the other, and which of these are ``kept``; None: all.
    """

    go: Tensor | None
    come: int
    kept: Tensor | None


@dataclass(frozen=True)
class CachedRows:
    """The rows of a pass as a device has them in blocks of a layout, and those of which it has a piece of the cache.

    ``total`` are the slots of the group. What follows from these is found once for all layers.
    """

    rows: Pass
    layout: BlockLayout
    device: int
    total: int

    @cached_property
    def own(self) -> range:
        """Its own among the rows of the pass."""
        return self._of(self.device)

    @cached_property
    def line(self) -> dict[int, range]:
        """{device: its rows} of those that have pieces of the same caches, this one among them."""
        return {device: self._of(device) for device in self.layout.line(self.device)}

    @cached_property
    def looks(self) -> Looks:
        """What the rows of the line look at here."""
        first, *_ = found = [*self.line.values()]
        rows = self.rows.rows[first.start : found[-1].stop]
        axis, slots = self.layout.pieces, self.layout.cached(self.device, self.total)
        return Looks(rows, self.rows.width, axis.place(self.device), axis.size, slots.start)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, for others of the line neither."""
        return not self.looks.rows

    @cached_property
    def keepers(self) -> Tensor:
        """[rows of the line, width] who keeps each word, by the place in the line; -1 of none."""
        return self.looks.keepers(torch.device("cpu"))

    def within(self, rows: range) -> slice:
        """Some rows of the line, as numbered there."""
        first = min(each.start for each in self.line.values())
        return slice(rows.start - first, rows.stop - first)

    @cached_property
    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """Which words of the line's rows are kept here [rows, width], and for each its slot here and number there."""
        chosen = self.keepers == self.looks.place
        slots = torch.tensor([row.slot - self.looks.first for row in self.looks.rows], dtype=torch.long)
        words = self.looks.words(torch.device("cpu")) // self.looks.count
        return chosen, slots[:, None].expand(chosen.shape)[chosen], words[chosen]

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Slots and numbers of the words kept here, and where in [rows, width] these are, None of all in order."""
        chosen, slots, words = self.kept
        return slots, words, _numbers(chosen)

    @cached_property
    def ways(self) -> dict[int, WordWay]:
        """{device of the line: the words that go there and come from there}; what stays here goes to this one."""
        valid, alone, found = self.keepers >= 0, self.layout.by_queries, {}
        for device, others in self.line.items():
            here = self._kept_by(self.device, others)
            goes = self._kept_by(device, self.own) if alone or device == self.device else valid[self.within(self.own)]
            comes = here if alone else valid[self.within(others)]
            found[device] = WordWay(_numbers(goes), int(comes.sum()), _numbers(here[comes]))
        return found

    def _kept_by(self, device: int, rows: range) -> Tensor:
        """[rows, width] which of the words of some rows a device of the line keeps."""
        found: Tensor = self.keepers[self.within(rows)] == self.layout.pieces.place(device)
        return found

    def _of(self, device: int) -> range:
        slots = self.layout.slots(device, self.total)
        found = [number for number, row in enumerate(self.rows.rows) if row.slot in slots]
        return range(found[0], found[-1] + 1) if found else range(*2 * [self._after(slots.start)])

    def _after(self, slot: int) -> int:
        return sum(row.slot < slot for row in self.rows.rows)


def _numbers(chosen: Tensor) -> Tensor | None:
    """The places of what is chosen, one after another; None of all."""
    return None if bool(chosen.all()) else chosen.flatten().nonzero().flatten()


def _taken(words: Tensor, chosen: Tensor | None) -> Tensor:
    """Some of [words, ...]; None: all."""
    return words if chosen is None else words.index_select(0, chosen)


@dataclass(slots=True)
class BlockCaches:
    """The caches of a block's attentions, in the order of their calls, of one group.

    ``key_heads`` are those of keys on this device before copies (None: all that come), ``window`` how far words look
    back, ``words`` the most of a text.
    """

    num_slots: int
    words: int
    key_heads: int | None
    window: int | None
    pieces: list[CachePiece] = field(default_factory=list)

    def piece(self, number: int) -> CachePiece:
        """That of an attention."""
        while len(self.pieces) <= number:
            self.pieces.append(CachePiece(self.num_slots, self.words))
        return self.pieces[number]

    @property
    def num_bytes(self) -> int:
        """What they have room for."""
        return sum(piece.num_bytes for piece in self.pieces)


class DecodingAttention(TorchFunctionMode):
    """Attention inside meets caches: those of the block and the rows that :meth:`begin` was told of."""

    def __init__(self) -> None:
        super().__init__()
        self._exchange: StageExchange | None = None
        self._calls = 0

    def begin(
        self, caches: BlockCaches, rows: CachedRows, exchange: StageExchange | None, latent: LatentHeads | None
    ) -> None:
        """Before each block, with what the devices exchange by that have pieces of the same caches."""
        self._caches, self._rows, self._exchange, self._latent, self._calls = caches, rows, exchange, latent, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function; attention with the caches."""
        if func in ATTENTION:
            return self._attend(*args, **(kwargs or {}))
        if func is linear and self._latent is not None and args[1] is self._latent.weight:
            return self._latent.instead(args[0])
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """[rows, heads, width, size] of queries, keys and values to the mixture; what is causal is so by its words."""
        if attn_mask is not None or dropout_p:
            raise UsageError("its attention has a mask, a bias or dropout of its own, for which there is no cache")
        caches, rows = self._caches, self._rows
        piece = caches.piece(self._calls)
        self._calls += 1
        if rows.layout.pieces.size == 1 and not rows.own:  # a row stands in, of which nothing is kept
            return query.new_zeros(*query.shape[:-1], value.shape[-1])
        latent, wide = self._latent, query
        if latent is None:
            copies = key.shape[1] // (caches.key_heads or key.shape[1])
            written = [each[:, :: max(1, copies)].transpose(1, 2) for each in (key, value)]  # words first
        else:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            written, query = [latent.written(key)], latent.queries(query)
        if rows.layout.pieces.size == 1:
            slots, words, chosen = rows.places
            piece.append(slots, words, *(_taken(each.flatten(0, 1), chosen) for each in written))
            mixed, _ = self._met(piece, query, scale)
        else:
            mixed = self._in_pieces(piece, query, written, scale)
        return mixed if latent is None else latent.values(mixed, wide)

    def _met(self, piece: CachePiece, query: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """The piece's mixture, of latents without the key beside each, and its logarithms of sums."""
        mixed, sums = piece.attend(query, self._rows.looks, self._caches.window, scale)
        return mixed if self._latent is None else mixed[..., : self._latent.size], sums

    def _in_pieces(self, piece: CachePiece, query: Tensor, written: Sequence[Tensor], scale: float | None) -> Tensor:
        rows = self._rows
        queries, kept = self._gather(query, written)
        slots, words, _ = rows.places
        piece.append(slots, words, *kept)
        mixed, sums = self._met(piece, queries, scale)
        return self._merge(query, mixed, sums)

    def _gather(self, query: Tensor, written: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Queries of the whole line, and what is written [words, heads, size] of those words that are kept here."""
        assert self._exchange is not None, "pieces are of several devices"
        rows, own = self._rows, len(self._rows.own)
        mine = [query[:own], *(each[:own].flatten(0, 1) for each in written)]
        given, coming = dict[int, Sequence[Tensor]](), dict[int, Sequence[Form]]()
        for device, others in rows.line.items():
            if device == rows.device:
                continue
            way = rows.ways[device]
            given[device] = [mine[0], *(_taken(each, way.go) for each in mine[1:])] if own else []
            shapes = [(len(others), *query.shape[1:])] + [(way.come, *each.shape[1:]) for each in mine[1:]]
            coming[device] = [(shape, query.dtype) for shape in shapes] if len(others) else []
        found = self._exchange.trade("attention", given, coming)
        parts: list[list[Tensor]] = [[] for _ in mine]
        for device, others in rows.line.items():
            if len(others):
                queries, *new = mine if device == rows.device else found[device]
                of = rows.ways[device]
                kept = of.go if device == rows.device else of.kept
                for part, each in zip(parts, (queries, *(_taken(each, kept) for each in new)), strict=True):
                    part.append(each)
        queries, *kept_words = map(torch.cat, parts)
        return queries, kept_words

    def _merge(self, query: Tensor, mixed: Tensor, sums: Tensor) -> Tensor:
        """The own rows' mixtures of all pieces; as what came, where none is its own and a row stood in for one."""
        assert self._exchange is not None
        rows = self._rows
        given: Mapping[int, Sequence[Tensor]] = {
            device: [mixed[rows.within(others)], sums[rows.within(others)]]
            for device, others in rows.line.items()
            if device != rows.device and len(others)
        }
        own = [mixed[rows.within(rows.own)], sums[rows.within(rows.own)]]
        forms = [(tuple(each.shape), each.dtype) for each in own]
        coming = {device: forms for device in rows.line if device != rows.device and len(rows.own)}
        found = {**self._exchange.trade("attention", given, coming), rows.device: own}
        if not len(rows.own):
            return query.new_zeros(*query.shape[:-1], mixed.shape[-1])
        pieces = [found[device] for device in rows.line]
        return merged(torch.stack([each for each, _ in pieces]), torch.stack([each for _, each in pieces]))
