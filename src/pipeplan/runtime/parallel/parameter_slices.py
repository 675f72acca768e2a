"""Parts of parameters: which part of each a device has, along one axis of a mesh or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.errors import UsageError

__all__ = ["Cut", "ParameterPart", "Slice", "range_of"]


def range_of(total: int, count: int, index: int) -> tuple[int, int]:
    """One of ``count`` shares of ``total`` rows: first, and the one after the last. Shares differ by one at most."""
    each, more = divmod(total, count)
    begin = index * each + min(index, more)
    return begin, begin + each + (index < more)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is split: along ``dimension``, in each of ``parts`` equal parts of it by itself.

    The weight of a layer that makes query, key and value has three parts. Shares are equal, except where ``even`` is
    False: those of a table of words differ by one row at most.
    """

    dimension: int = 0
    parts: int = 1
    even: bool = True

    def cut(self, whole: Tensor, count: int, index: int) -> Tensor:
        """One of ``count`` shares. Raises UsageError where they would not be equal and must be."""
        size = whole.shape[self.dimension]
        if size % self.parts or (self.even and size // self.parts % count) or size // self.parts < count:
            of = f" in each of {self.parts} parts" if self.parts > 1 else ""
            raise UsageError(
                f"shape {list(whole.shape)} has {size // self.parts}{of} along dimension {self.dimension}, which "
                f"{count} devices cannot share{' evenly' if self.even else ''}"
            )
        begin, end = range_of(size // self.parts, count, index)
        pieces = [part.narrow(self.dimension, begin, end - begin) for part in self._parts(whole)]
        return torch.cat(pieces, self.dimension) if len(pieces) > 1 else pieces[0]

    def add(self, share: Tensor, whole: Tensor, count: int, index: int) -> None:
        """Add one of ``count`` shares to the whole, in place."""
        begin, end = range_of(whole.shape[self.dimension] // self.parts, count, index)
        for part, of in zip(self._parts(whole), self._parts(share), strict=True):
            part.narrow(self.dimension, begin, end - begin).add_(of)

    def places(self, share: Tensor, size: int, count: int, index: int) -> list[tuple[int, Tensor]]:
        """Views of a share with where each begins in the whole, which is ``size`` long along the dimension."""
        each = size // self.parts
        begin, _ = range_of(each, count, index)
        return [(number * each + begin, part) for number, part in enumerate(self._parts(share))]

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.chunk(self.parts, self.dimension)


@dataclass(frozen=True, slots=True)
class Slice:
    """Share ``index`` of ``count`` of a parameter that is ``cut``."""

    cut: Cut
    count: int
    index: int


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """What a device has of a parameter: all of it, or a slice along each axis of a mesh that cuts it.

    Of the devices that split the block, ``copies`` have this part and the same gradient of it; this is number ``copy``.
    """

    slices: tuple[Slice, ...] = ()
    copies: int = 1
    copy: int = 0

    @property
    def adds(self) -> bool:
        """Whether its gradient adds to those of the block's other devices, instead of being the same as another's."""
        return self.copy == 0

    @property
    def kind(self) -> tuple[tuple[tuple[Cut, int], ...], int]:
        """What parts that are made by the same cuts have in common."""
        return tuple((each.cut, each.count) for each in self.slices), self.copies

    @property
    def number(self) -> tuple[int, ...]:
        """Which it is of its kind."""
        return (*(each.index for each in self.slices), self.copy)

    def within(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor. Raises UsageError where parts would not be equal and must be."""
        for each in self.slices:
            whole = each.cut.cut(whole, each.count, each.index)
        return whole

    def spread(self, part: Tensor, whole: Tensor) -> None:
        """Add the part to a whole tensor."""
        if not self.slices:
            whole += part
            return
        *outer, last = self.slices
        for each in outer:
            whole = each.cut.cut(whole, each.count, each.index)  # a view, for a cut of a single part
        last.cut.add(part, whole, last.count, last.index)

    def places(self, part: Tensor, shape: Sequence[int]) -> list[tuple[list[int], Tensor]]:
        """Views of the part with where each begins in the whole, which has this shape."""
        found = [([0] * part.dim(), part)]
        for each in self.slices:
            at = each.cut.dimension
            found = [
                ([*begin[:at], offset, *begin[at + 1 :]], piece)
                for begin, tensor in found
                for offset, piece in each.cut.places(tensor, shape[at], each.count, each.index)
            ]
        return found
