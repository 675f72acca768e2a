"""Blocks run as they are, and where they call torch's attention it meets the caches of their requests.

A block computes query, key and value of the words that enter. Where devices have pieces of caches (cache parallelism;
thesis, section 4.4), each attends to its pieces for the requests of all, and what it found goes to the one whose
request it is: queries, keys and values of all requests are gathered, or queries alone, and the new keys and values are
sent to the one that keeps them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeplan.errors import UsageError
from pipeplan.runtime.decoding.attention import merged
from pipeplan.runtime.decoding.exchanges import Form, StageExchange
from pipeplan.runtime.decoding.layouts import BlockLayout
from pipeplan.runtime.decoding.pieces import CachePiece, Looks
from pipeplan.runtime.decoding.requests import Pass
from pipeplan.runtime.parallel.attention_cores import ATTENTION


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

    def kept_by(self, device: int, rows: range) -> Tensor:
        """[rows, width] which of the words of some rows a device of the line keeps."""
        found: Tensor = self.keepers[self.within(rows)] == self.layout.pieces.place(device)
        return found

    def _of(self, device: int) -> range:
        slots = self.layout.slots(device, self.total)
        found = [number for number, row in enumerate(self.rows.rows) if row.slot in slots]
        return range(found[0], found[-1] + 1) if found else range(*2 * [self._after(slots.start)])

    def _after(self, slot: int) -> int:
        return sum(row.slot < slot for row in self.rows.rows)


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

    def begin(self, caches: BlockCaches, rows: CachedRows, exchange: StageExchange | None) -> None:
        """Before each block, with what the devices exchange by that have pieces of the same caches."""
        self._caches, self._rows, self._exchange, self._calls = caches, rows, exchange, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function; attention with the caches."""
        return self._attend(*args, **(kwargs or {})) if func in ATTENTION else func(*args, **(kwargs or {}))

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
        copies = key.shape[1] // (caches.key_heads or key.shape[1])
        key, value = (each[:, :: max(1, copies)].transpose(1, 2) for each in (key, value))  # words first
        if rows.layout.pieces.size == 1:
            chosen, slots, words = rows.kept
            piece.append(slots, words, key[chosen], value[chosen])
            mixed, _ = piece.attend(query, rows.looks, caches.window, scale)
            return mixed
        return self._in_pieces(piece, query, key, value, scale)

    def _in_pieces(self, piece: CachePiece, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        assert self._exchange is not None, "pieces are of several devices"
        rows = self._rows
        queries, keys, values = self._gather(query, key, value)
        _, slots, words = rows.kept
        piece.append(slots, words, keys, values)
        mixed, sums = piece.attend(queries, rows.looks, self._caches.window, scale)
        return self._merge(query, mixed, sums)

    def _gather(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the whole line, and keys and values [words, heads, size] of those words that are kept here."""
        assert self._exchange is not None
        rows, own = self._rows, len(self._rows.own)
        alone = rows.layout.by_queries
        valid = rows.keepers >= 0
        given, coming = dict[int, Sequence[Tensor]](), dict[int, Sequence[Form]]()

        def passed(device: int, of: range) -> Tensor:
            """Which words of some rows go to a device."""
            return rows.kept_by(device, of) if alone else valid[rows.within(of)]

        for device, others in rows.line.items():
            if device == rows.device:
                continue
            chosen = passed(device, rows.own)
            given[device] = [query[:own], key[:own][chosen], value[:own][chosen]] if own else []
            count = int(passed(rows.device, others).sum())
            forms = [(len(others), *query.shape[1:])], [(count, *each.shape[2:]) for each in (key, value)]
            coming[device] = [(shape, query.dtype) for shapes in forms for shape in shapes] if len(others) else []
        found = self._exchange.trade("attention", given, coming)
        parts = defaultdict[str, list[Tensor]](list)
        for device, others in rows.line.items():
            if not len(others):
                continue
            if device == rows.device:
                chosen = rows.kept_by(device, others)
                queries, keys, values = query[:own], key[:own][chosen], value[:own][chosen]
            else:
                queries, keys, values = found[device]
                if not alone:
                    chosen = rows.kept_by(rows.device, others)[valid[rows.within(others)]]
                    keys, values = keys[chosen], values[chosen]
            for name, each in (("queries", queries), ("keys", keys), ("values", values)):
                parts[name].append(each)
        return torch.cat(parts["queries"]), torch.cat(parts["keys"]), torch.cat(parts["values"])

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
