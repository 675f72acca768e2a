"""What ranks find out of each other by messages that do not grow with their number: one's word, and who disagrees.

Nothing is gathered while all say the same. All here is collective, over the default group, which is gloo's.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")

_NOTHING = -(2**62)
"""Below every number that stands for a text, and below its negative."""


def of_first(value: Value) -> Value:
    """What rank 0 passes to this call; what others pass is not looked at."""
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def all_alike(said: Sequence[str | None]) -> bool:
    """Whether in each place all ranks say the same that say something there; all have as many places.

    The same on every rank.
    """
    if not said:
        return True
    numbers = [None if text is None else _words(text.encode(), 1, 7)[0] for text in said]
    ends = torch.tensor([[_NOTHING, _NOTHING] if each is None else [each, -each] for each in numbers])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    most, least = ends.unbind(1)
    return bool(((most == -least) | (most == _NOTHING)).all())


def alike_in_groups(rank: int, said: Mapping[tuple[int, ...], str]) -> bool:
    """Whether in each of some groups of ranks all of these say the same of it; each says something of all its groups.

    The same on every rank. The first of a group adds a number for what it says for each of the others, and these take
    away that for theirs, so that nothing is left.
    """
    total = torch.zeros(4, dtype=torch.int64)  # of 32 bits each, so that no sum is too large
    for ranks, text in said.items():
        times = len(ranks) - 1 if rank == ranks[0] else -1
        total += times * torch.tensor(_words(array("q", ranks).tobytes() + text.encode(), 4, 4))
    dist.all_reduce(total)
    return not total.any()


def _words(said: bytes, count: int, size: int) -> list[int]:
    """Numbers of so many bytes that stand for what is said."""
    digest = sha256(said).digest()
    return [int.from_bytes(digest[size * number : size * (number + 1)]) for number in range(count)]
