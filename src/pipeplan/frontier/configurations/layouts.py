"""How a tensor lies on the devices: which split each of its dimensions has, and whether it is a sum still to be made.

Every tensor is seen as [samples, places, features]: places are positions of a sequence or rows of an image, features
its hidden numbers or channels. A *partial* tensor is the sum of what the devices along one split hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

from pipeplan.frontier.configurations.splits import Split, nested

__all__ = ["ANY", "DIMENSIONS", "Layout", "Tensor", "all_layouts"]

ANY = 0
"""Size of a dimension of which is not known what divides it: whoever takes it says so."""

DIMENSIONS = ("samples", "places", "features")


class Layout(NamedTuple):
    """The split of every dimension, None where it is whole on every device, and the split it is partial along."""

    samples: Split | None = None
    places: Split | None = None
    features: Split | None = None
    partial: Split | None = None

    @property
    def shards(self) -> int:
        """Into how many pieces the tensor is cut."""
        count = 1
        for split in self[:3]:
            count *= split.extent if split else 1
        return count

    @property
    def free(self) -> bool:
        """Whether it is whole everywhere and no sum."""
        return not any(self)

    def used(self) -> tuple[Split, ...]:
        """Every split in it."""
        return tuple(split for split in self if split)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole tensor: what its dimensions can be divided by, and its bytes."""

    sizes: tuple[int, int, int]
    num_bytes: int

    def fits(self, layout: Layout) -> bool:
        """Whether every split divides its dimension."""
        return all(not split or size % split.extent == 0 for size, split in zip(self.sizes, layout[:3], strict=True))

    def local_bytes(self, layout: Layout) -> int:
        """What one device holds."""
        return -(-self.num_bytes // layout.shards)


@cache
def all_layouts(devices: int) -> tuple[Layout, ...]:
    """Every layout on so many devices, of meshes of any number of dimensions."""
    runs = [
        Split(extent, stride)
        for extent in range(2, devices + 1)
        for stride in range(1, devices + 1)
        if devices % (extent * stride) == 0
    ]
    return tuple(Layout(*each) for each in _combinations(runs, devices))


def _combinations(runs: Sequence[Split], devices: int) -> list[tuple[Split | None, ...]]:
    """Choices for the four entries of a layout, built entry by entry so that few are looked at in vain."""
    found: list[tuple[Split | None, ...]] = [()]
    for _ in Layout._fields:
        found = [
            (*start, each)
            for start, each in product(found, [None, *runs])
            if nested([split for split in (*start, each) if split], devices)
        ]
    return found
