"""What torch's own sharding gives every rank, by its rules for whole parameters, where plans divide evenly.

``fully_shard`` cuts dimension 0 of each parameter into equal parts, of which it stores the last ones padded
(torch.distributed.fsdp, ``FSDPParam``). ``ZeroRedundancyOptimizer`` gives every parameter to one rank, whole: the
largest first, each to the rank that has least by then (torch.distributed.optim). Numbers are of elements; times bytes
of a recipe they are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Shape = Sequence[int]
"""Of a parameter; none is a single number."""


@dataclass(frozen=True, slots=True)
class TorchParts:
    """Elements [rank] of which a rank has gradient and optimizer state, and those it stores of parameters, padded.

    ``gathered`` are those that every rank has of parameters while they are whole: for as long as a module computes or,
    with ``reshard_after_forward=False``, from its forward to its backward; none where nothing is gathered. ``even`` is
    what plans say of each rank: an equal part of all, rounded up.
    """

    owned: tuple[int, ...]
    stored: tuple[int, ...]
    gathered: int = 0

    @property
    def even(self) -> int:
        """The equal part."""
        return -(-sum(self.owned) // len(self.owned))

    @property
    def padding(self) -> int:
        """Elements that are stored beyond those that there are."""
        return sum(self.stored) - sum(self.owned)


def fully_sharded(shapes: Iterable[Shape], ranks: int) -> TorchParts:
    """Of ``fully_shard`` (ZeRO 3), with every parameter cut in dimension 0: gradients, optimizer and parameters alike.

    Raises:
        ValueError: a parameter is a single number, which has no dimension to cut.
    """
    owned, stored = [0] * ranks, 0
    for shape in shapes:
        if not shape:
            raise ValueError("fully_shard cuts dimension 0, and a parameter is a single number")
        rows, width = shape[0], math.prod(shape[1:])
        part = -(-rows // ranks)
        stored += part * width
        for rank in range(ranks):
            owned[rank] += max(0, min(part, rows - rank * part)) * width
    return TorchParts(tuple(owned), (stored,) * ranks, sum(owned))


def owned_whole(shapes: Iterable[Shape], ranks: int) -> TorchParts:
    """The parts of ``ZeroRedundancyOptimizer``, with one group of parameters; every rank stores all parameters."""
    sizes = sorted((math.prod(shape) for shape in shapes), reverse=True)
    owned = [0] * ranks
    for size in sizes:
        owned[owned.index(min(owned))] += size
    return TorchParts(tuple(owned), (sum(sizes),) * ranks)
