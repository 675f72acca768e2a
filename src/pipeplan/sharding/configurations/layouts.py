"""How tensors lie on devices, and the meshes of devices they lie on.

How a tensor lies on the devices: which split each of its dimensions has, and whether it is a sum still to be made.

Every tensor is seen as [samples, places, features]: places are positions of a sequence or rows of an image, features
its hidden numbers or channels. A *partial* tensor is the sum of what the devices along one split hold.

Device meshes and what is split over their dimensions (TensorOpt section 2.1).

Devices 0 to n - 1 form a mesh of up to three dimensions, the last one's coordinate changing fastest. A *split* is one
of its dimensions by itself: so many devices, a stride apart. Saying splits instead of meshes makes configurations of
different meshes comparable: [2, 8] with the second dimension unused and [2, 2, 4] with the last two unused are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations, product
from typing import NamedTuple

__all__ = [
    "ANY",
    "DIMENSIONS",
    "MOST_DIMENSIONS",
    "Layout",
    "MeshSplit",
    "Tensor",
    "all_layouts",
    "factorizations",
    "mesh_name",
    "nested",
    "splits_of",
    "ways_to_split",
]


ANY = 0
"""Size of a dimension of which is not known what divides it: whoever takes it says so."""

DIMENSIONS = ("samples", "places", "features")


class Layout(NamedTuple):
    """The split of every dimension, None where it is whole on every device, and the split it is partial along."""

    samples: MeshSplit | None = None
    places: MeshSplit | None = None
    features: MeshSplit | None = None
    partial: MeshSplit | None = None

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

    def used(self) -> tuple[MeshSplit, ...]:
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
        MeshSplit(extent, stride)
        for extent in range(2, devices + 1)
        for stride in range(1, devices + 1)
        if devices % (extent * stride) == 0
    ]
    return tuple(Layout(*each) for each in _combinations(runs, devices))


def _combinations(runs: Sequence[MeshSplit], devices: int) -> list[tuple[MeshSplit | None, ...]]:
    """Choices for the four entries of a layout, built entry by entry so that few are looked at in vain."""
    found: list[tuple[MeshSplit | None, ...]] = [()]
    for _ in Layout._fields:
        found = [
            (*start, each)
            for start, each in product(found, [None, *runs])
            if nested([split for split in (*start, each) if split], devices)
        ]
    return found


MOST_DIMENSIONS = 3
"""Dimensions of a mesh."""


class MeshSplit(NamedTuple):
    """A dimension of a mesh: ``extent`` devices, ``stride`` apart in their numbers."""

    extent: int
    stride: int

    @property
    def reach(self) -> int:
        """The devices of one block of this dimension and all after it."""
        return self.extent * self.stride

    def coordinate(self, device: int) -> int:
        """Where a device is along it."""
        return device // self.stride % self.extent

    @property
    def parts(self) -> tuple[tuple[MeshSplit, MeshSplit], ...]:
        """Every way to see it as two dimensions, the one with the larger stride first."""
        return tuple(
            (MeshSplit(self.extent // low, self.stride * low), MeshSplit(low, self.stride))
            for low in range(2, self.extent)
            if self.extent % low == 0
        )

    def after(self, major: MeshSplit | None) -> MeshSplit | None:
        """The split by ``major`` and then by this one, where the two are one dimension; by this one without it."""
        if major is None:
            return self
        return MeshSplit(major.extent * self.extent, self.stride) if major.stride == self.reach else None


@cache
def factorizations(count: int, most: int = MOST_DIMENSIONS) -> tuple[tuple[int, ...], ...]:
    """Every mesh of ``count`` devices: ordered factors above 1, at most so many; none for a single device."""
    if count == 1:
        return ((),)
    if most == 0:
        return ()
    return tuple(
        (first, *rest)
        for first in range(2, count + 1)
        if count % first == 0
        for rest in factorizations(count // first, most - 1)
    )


def splits_of(mesh: Sequence[int]) -> tuple[MeshSplit, ...]:
    """The dimensions of a mesh as splits, the first changing slowest."""
    found, stride = [], 1
    for extent in reversed(mesh):
        found.append(MeshSplit(extent, stride))
        stride *= extent
    return tuple(reversed(found))


def ways_to_split(
    devices: int, sizes: Sequence[int], most: int = MOST_DIMENSIONS
) -> list[tuple[MeshSplit | None, ...]]:
    """Every valid way to split axes of these sizes over a number of devices; None is an axis that is not split.

    For every mesh, each of its dimensions splits at most one axis and each axis is split by at most one, whose extent
    divides the axis; along dimensions that split nothing all devices do the same. Each way is listed once, however
    many meshes show it.
    """
    found: dict[tuple[MeshSplit | None, ...], None] = {}
    for mesh in factorizations(devices, most):
        dimensions = splits_of(mesh)
        for used in range(len(dimensions) + 1):
            for chosen in combinations(dimensions, used):
                for axes in permutations(range(len(sizes)), used):
                    if all(sizes[axis] % split.extent == 0 for axis, split in zip(axes, chosen, strict=True)):
                        by_axis = dict(zip(axes, chosen, strict=True))
                        found.setdefault(tuple(by_axis.get(axis) for axis in range(len(sizes))))
    return list(found)


def nested(splits: Sequence[MeshSplit], devices: int) -> bool:
    """Whether the splits are dimensions of one mesh of so many devices."""
    outer = devices
    for split in sorted(splits, key=lambda each: -each.stride):
        if outer % split.reach:
            return False
        outer = split.stride
    return True


def mesh_name(splits: Sequence[tuple[str, MeshSplit]], devices: int) -> str:
    """A configuration in words, such as ``batch2-copies4-columns2``: the mesh in order and what each dimension splits.

    ``copies`` are devices that do the same.
    """
    words = [f"{name}{extent}" for name, extent in _in_order(splits, devices)]
    return "-".join(words) or "whole"


def _in_order(splits: Sequence[tuple[str, MeshSplit]], devices: int) -> Iterator[tuple[str, int]]:
    outer = devices
    for name, split in sorted(splits, key=lambda each: -each[1].stride):
        if outer > split.reach:
            yield "copies", outer // split.reach
        yield name, split.extent
        outer = split.stride
    if outer > 1:
        yield "copies", outer
