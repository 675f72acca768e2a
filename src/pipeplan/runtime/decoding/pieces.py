"""A device's piece of the caches of an attention, written in place, and attention to it.

Every request has room for all its words from the start, as it is known how many those can be; word t of the request in
slot s is kept by device (t + s) modulo the number of pieces, as its word t // pieces. Where words look back over a
window there is room for a window and a pass alone: then word n of a piece lies at n modulo that room. Pages would have
to be gathered before attention, which takes as long as that or several times as long (``benchmarks/cache_pages.py``),
and save nothing where all requests end after as many words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeplan.runtime.decoding.attention import attention
from pipeplan.runtime.decoding.requests import Row

_UNEVEN = 1.3
"""Times the words that rows look at together: up to so many are read at once, padded, and more by each row alone."""


Span = tuple[int, int]
"""First word of a piece that is looked at, and the one after the last."""


def room_for(longest: int, window: int | None, width: int, pieces: int) -> int:
    """Words for which a piece of a cache has room, of texts of at most ``longest`` of which ``width`` enter at once."""
    return -(-(longest if window is None else min(longest, window + width - 1)) // pieces)


Seen = tuple[Tensor | None, Tensor | None]
"""A mask of what is not looked at, and which places look at nothing; None where all look at all, or at something."""


@dataclass(frozen=True, slots=True)
class Looks:
    """What rows of a pass look at in a piece: number ``place`` of ``count``, of caches that begin with slot ``first``.

    ``width`` words of each row enter, of which the last ``row.count`` are of its text.
    """

    rows: tuple[Row, ...]
    width: int
    place: int
    count: int
    first: int
    _masks: dict[tuple[int | None, int], Seen] = field(default_factory=dict)
    _spans: dict[int | None, Span | None] = field(default_factory=dict)

    def words(self, device: torch.device) -> Tensor:
        """[rows, width] where in its text each word is; -1 where there is none."""
        found = torch.full((len(self.rows), self.width), -1, dtype=torch.long)
        for number, row in enumerate(self.rows):
            found[number, self.width - row.count :] = torch.arange(row.begin, row.begin + row.count)
        return found.to(device)

    def keepers(self, device: torch.device) -> Tensor:
        """[rows, width] the place of the device that keeps each word; -1 where there is none."""
        words = self.words(device)
        slots = torch.tensor([row.slot for row in self.rows], dtype=torch.long, device=device)
        return ((words + slots[:, None]) % self.count).masked_fill(words < 0, -1)

    def range(self, number: int, word: int, window: int | None) -> tuple[int, int]:
        """Words of this piece that a word of a row looks at: its own, and those before it in the window."""
        offset = (self.place - self.rows[number].slot) % self.count
        end = (word - offset) // self.count + 1
        begin = 0 if window is None else max(0, (word - window - offset) // self.count + 1)
        return min(begin, end), end

    def ranges(self, number: int, window: int | None) -> list[tuple[int, int]]:
        """The same of each of a row's words."""
        row = self.rows[number]
        return [self.range(number, row.begin + turn, window) for turn in range(row.count)]

    def common(self, window: int | None, room: int) -> Span | None:
        """First place and the one after the last of what all rows look at, where it is worth while to read it at once;
        a piece has ``room`` for so many words."""
        if window not in self._spans:
            self._spans[window] = self._common(window, room)
        return self._spans[window]

    def _common(self, window: int | None, room: int) -> Span | None:
        slots = [row.slot for row in self.rows]
        if self.width > 1 or not slots or slots[-1] - slots[0] + 1 != len(slots):
            return None
        ranges = self._firsts(window)
        begin, end = min(each for each, _ in ranges), max(each for _, each in ranges)
        if end > room:
            return 0, room
        looked = sum(end - begin for begin, end in ranges)
        return (begin, end) if 0 < len(slots) * (end - begin) <= _UNEVEN * looked else None

    def _firsts(self, window: int | None) -> list[Span]:
        """What each row's first word looks at."""
        return [self.range(number, row.begin, window) for number, row in enumerate(self.rows)]

    def seen(self, window: int | None, number: int, span: Span, like: Tensor) -> Seen:
        """What places of a row do not look at in a span, or those of all rows, number -1: [rows, 1, places, words].

        Found once: every layer looks at the same.
        """
        key = window, number
        if key not in self._masks:
            if number >= 0:
                ranges = self.ranges(number, window)
                self._masks[key] = _unseen(ranges, [max(end for _, end in ranges)] * len(ranges), span, like)
            else:  # rows come first, of one place each
                ranges = self._firsts(window)
                mask, blank = _unseen(ranges, [end for _, end in ranges], span, like)
                self._masks[key] = (
                    None if mask is None else mask.permute(2, 1, 0, 3),
                    None if blank is None else blank.permute(2, 1, 0),
                )
        return self._masks[key]


class CachePiece:
    """Keys and values of all requests that a device keeps some of: [slots, heads, room, size], made when they come.

    Where one tensor is kept, it has both.
    """

    def __init__(self, num_slots: int, num_words: int) -> None:
        self._sizes = num_slots, num_words
        self._kept: tuple[Tensor, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """What it has room for."""
        return sum(each.nbytes for each in self._kept or ())

    def fill(self) -> None:
        """Noise in all of it, for measurements: numbers close to zero can be slow."""
        with torch.inference_mode():  # in which it was made
            for each in self._kept or ():
                each.normal_()

    def append(self, slots: Tensor, words: Tensor, *written: Tensor) -> None:
        """Keep keys and values [words, heads, size] as these ``words`` of these ``slots``."""
        if self._kept is None:
            self._kept = tuple(
                each.new_zeros(self._sizes[0], each.shape[1], self._sizes[1], each.shape[2]) for each in written
            )
        for kept, each in zip(self._kept, written, strict=True):
            kept[slots, :, words % self._sizes[1]] = each

    def attend(self, query: Tensor, looks: Looks, window: int | None, scale: float | None) -> tuple[Tensor, Tensor]:
        """Attention of queries [rows, heads, width, size]: mixtures, and logarithms of sums [rows, heads, width].

        What looks at nothing has no mixture, 0, and a sum of nothing, -inf.
        """
        assert self._kept is not None, "what a row enters is kept somewhere before it looks"
        room = self._sizes[1]
        if (span := looks.common(window, room)) is not None:
            slot = looks.rows[0].slot - looks.first
            seen = looks.seen(window, -1, span, query)
            return self._of(query, slice(slot, slot + len(looks.rows)), span, seen, scale)
        mixed = query.new_zeros(*query.shape[:-1], self._kept[-1].shape[-1])
        sums = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
        for number, row in enumerate(looks.rows):
            ranges = looks.ranges(number, window)
            begin, end = min(each for each, _ in ranges), max(each for _, each in ranges)
            if end > begin:
                begin, end = (0, room) if end > room else (begin, end)
                at = slice(number, number + 1), slice(None), slice(looks.width - row.count, None)
                seen = looks.seen(window, number, (begin, end), query)
                slot = row.slot - looks.first
                mixed[at], sums[at] = self._of(query[at], slice(slot, slot + 1), (begin, end), seen, scale)
        return mixed, sums

    def _of(self, query: Tensor, slots: slice, span: Span, seen: Seen, scale: float | None) -> tuple[Tensor, Tensor]:
        """Attention of queries [rows, heads, places, size] to words of as many slots; heads that share keys are places
        of one."""
        assert self._kept is not None
        mask, blank = seen
        keys, values = (each[slots, :, slice(*span)] for each in (self._kept[0], self._kept[-1]))
        rows, heads, places, size = query.shape
        shared = heads // keys.shape[1]
        folded = query.reshape(rows, keys.shape[1], shared * places, size)
        if mask is not None and places > 1:
            mask = mask.repeat(1, 1, shared, 1)
        mixed, sums = attention(folded, keys, values, mask, scale)
        mixed, sums = mixed.reshape(rows, heads, places, -1), sums.reshape(rows, heads, places)
        return mixed, sums if blank is None else sums.masked_fill(blank, -torch.inf)


def _unseen(ranges: Sequence[Span], written: Sequence[int], span: Span, like: Tensor) -> Seen:
    """Of some ranges of a span [1, 1, ranges, words] and [1, 1, ranges], where so many words have been ``written``."""
    if all(each == span for each in ranges):
        return None, None
    words = torch.arange(*span, device=like.device)
    if max(written) > span[1]:  # the last of them, each at its number modulo the room
        last = torch.tensor(written, device=like.device)[:, None] - 1
        words = last - (last - words) % span[1]
    first, after = torch.tensor(ranges, device=like.device).T[..., None]
    unseen = ((words < first) | (words >= after))[None, None]
    blank = unseen.all(-1)
    mask = torch.zeros(unseen.shape, dtype=like.dtype, device=like.device).masked_fill_(unseen, -torch.inf)
    return mask, blank if bool(blank.any()) else None
