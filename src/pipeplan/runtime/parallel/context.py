"""Devices that share every sequence (context parallelism): each has an early and a late piece of it.

Of twice as many equal pieces as there are devices, device r has the r-th and the r-th from the end. Queries look at
the places up to their own, so that a device's two pieces together have the same work as those of any other (Llama 3,
section 3.3.2): :mod:`pipeplan.runtime.parallel.context_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.runtime.parallel.sharding import WHOLE, Shards

CONTEXT = "context"
"""The axis along which devices share sequences, beside those along which a block is split."""

PIECES = 2
"""How many a device has of every sequence, of one size."""


@dataclass(frozen=True, slots=True)
class Ring(Shards):
    """A device's place among those that share sequences, where keys and values go from each to the next."""

    @classmethod
    def of(cls, place: Shards) -> Ring:
        """The same place."""
        return cls(place.count, place.index, place.collectives, place.along)

    def passed(self, tensors: Sequence[Tensor], by: int) -> Callable[[], list[Tensor]]:
        """Begin to give tensors to the device so many places on; the result waits for those of the one as far back."""
        return self._collectives.begin_passing(tensors, by)


def context_of(shards: Shards) -> Shards:
    """A device's place among those that share sequences with it."""
    return shards.along.get(CONTEXT, WHOLE)


def require_pieces(sequence: int, count: int, name: str) -> None:
    """Check that devices can have pieces of one size. Raises UsageError."""
    if sequence % (PIECES * count):
        raise UsageError(
            f"model {name!r} has sequences of {sequence}, of which {count} devices cannot have an early and a late "
            f"piece each, all of one size: give a --sequence that is a multiple of {PIECES * count}, or search with "
            "another --cp"
        )


def pieces_of(length: int, context: Shards) -> tuple[tuple[int, int], tuple[int, int]]:
    """A device's early and its late piece of a sequence: the first place, and the one after the last."""
    size, late = length // (PIECES * context.count), PIECES * context.count - 1 - context.index
    return (context.index * size, (context.index + 1) * size), (late * size, (late + 1) * size)


def own_pieces(whole: Tensor, context: Shards, dimension: int = 1) -> Tensor:
    """What a device has of a tensor of whole sequences: both pieces, one behind the other."""
    if context.count == 1:
        return whole
    pieces = pieces_of(whole.shape[dimension], context)
    return torch.cat([whole.narrow(dimension, begin, end - begin) for begin, end in pieces], dimension)


def own_positions(length: int, context: Shards, device: torch.device | None = None) -> Tensor:
    """[length] where in their sequence the places are that a device has, of which there are so many."""
    if context.count == 1:
        return torch.arange(length, device=device)
    pieces = pieces_of(length * context.count, context)
    return torch.cat([torch.arange(begin, end, device=device) for begin, end in pieces])


def in_order(gathered: Tensor, count: int, dimension: int = 1) -> Tensor:
    """Places in the order of their sequences, of the pieces of so many devices, one device behind the other.

    Of devices that have neighbouring pieces of a larger number of them these are those that fewer devices would have.
    """
    if count == 1:
        return gathered
    pieces = gathered.chunk(PIECES * count, dimension)
    return torch.cat((*pieces[::PIECES], *reversed(pieces[1::PIECES])), dimension)


def by_device(whole: Tensor, count: int, dimension: int = 1) -> Tensor:
    """The other way round: of places in order the pieces of so many devices, one device behind the other."""
    if count == 1:
        return whole
    pieces = whole.chunk(PIECES * count, dimension)
    return torch.cat([pieces[at] for first in range(count) for at in (first, len(pieces) - 1 - first)], dimension)
