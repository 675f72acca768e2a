"""How a tensor lies on the devices, and the steps from one layout to another (TensorOpt section 4.2).

Every tensor is seen as [samples, places, features]: places are positions of a sequence or rows of an image, features
its hidden numbers or channels. A layout says which split each dimension has, and whether the tensor is *partial*: the
sum of what the devices along one split hold.

Devices 0 to n - 1 form a mesh, the last dimension's coordinate changing fastest. A *split* is one of its dimensions by
itself: a number of devices, a stride apart. Saying splits instead of meshes makes configurations of different meshes
comparable: [2, 8] with the second dimension unused and [2, 2, 4] with the last two unused are one.

Layouts are the nodes of a graph, and an edge joins two of which one becomes the other by one step:

* *gather*: a dimension gives up the minor part of its split, or all of it (all-gather);
* *slice*: a dimension is split along devices that hold the same; every device drops what is not its own, at no cost
  (along a prime number of devices; more are several slices);
* *exchange*: a dimension gives up the minor part of its split to another dimension (all-to-all);
* *sum*: the devices along the partial split, or along a part of it, add up (all-reduce);
* *scatter*: they add up and a dimension is split along them (reduce-scatter);
* *send*: two layouts with pieces of equal shape on other devices: each device sends its piece to another.

The cheapest sequence is a shortest path (:mod:`pipeplan.costs.resharding`). It counts as one operation, as the paper
fuses it: what lies between the first and the last layout is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal, NamedTuple

ANY = 0
"""Size of a dimension for which it is not known what divides it; its consumer says so."""

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
    """Every layout on ``devices``, of meshes of any number of dimensions."""
    runs = [
        MeshSplit(extent, stride)
        for extent in range(2, devices + 1)
        for stride in range(1, devices + 1)
        if devices % (extent * stride) == 0
    ]
    return tuple(Layout(*each) for each in _combinations(runs, devices))


def _combinations(runs: Sequence[MeshSplit], devices: int) -> list[tuple[MeshSplit | None, ...]]:
    """Choices for the four entries of a layout, built entry by entry so that few dead ends are visited."""
    found: list[tuple[MeshSplit | None, ...]] = [()]
    for _ in Layout._fields:
        found = [
            (*start, each)
            for start, each in product(found, [None, *runs])
            if nested([split for split in (*start, each) if split], devices)
        ]
    return found


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


def joined(splits: Iterable[MeshSplit]) -> list[MeshSplit]:
    """Splits of one mesh with those that follow each other as one."""
    found: list[MeshSplit] = []
    for split in sorted(splits, key=lambda each: -each.stride):
        whole = split.after(found[-1]) if found else None
        found[-1:] = [whole] if whole else [*found[-1:], split]
    return found


def nested(splits: Sequence[MeshSplit], devices: int) -> bool:
    """Whether the splits are dimensions of one mesh of ``devices``."""
    outer = devices
    for split in sorted(splits, key=lambda each: -each.stride):
        if outer % split.reach:
            return False
        outer = split.stride
    return True


How = Literal["gather", "slice", "exchange", "sum", "scatter", "send"]


@dataclass(frozen=True, slots=True)
class Move:
    """One step between two layouts. ``along`` are the devices that talk; ``taken`` and ``given`` are dimensions.

    ``given`` gives up a split (a gather, an exchange), ``taken`` gains one (a slice, an exchange, a scatter).
    """

    how: How
    source: Layout
    target: Layout
    along: MeshSplit | None = None
    given: str = ""
    taken: str = ""


def groups_along(along: Sequence[MeshSplit], devices: int) -> list[list[int]]:
    """The groups of devices that differ in nothing but their coordinates along these splits."""
    found: dict[int, list[int]] = {}
    for device in range(devices):
        rest = device - sum(split.coordinate(device) * split.stride for split in along)
        found.setdefault(rest, []).append(device)
    return list(found.values())


def steps_from(layout: Layout, devices: int) -> Iterator[Move]:
    """Every step from a layout to another that is no send."""
    free = [run for run in _free_runs(layout, devices) if not run.parts]
    for name in DIMENSIONS:
        split = getattr(layout, name)
        yield from _gaining(layout, name, free, "slice")
        for kept, freed in _minor_parts(split):
            rest = layout._replace(**{name: kept})
            yield Move("gather", layout, rest, along=freed, given=name)
            for other in DIMENSIONS:
                for gained in _gaining(rest, other, [freed], "exchange") if other != name else ():
                    yield Move("exchange", layout, gained.target, along=freed, given=name, taken=other)
    for kept, freed in _any_parts(layout.partial):
        rest = layout._replace(partial=kept)
        yield Move("sum", layout, rest, along=freed)
        for name in DIMENSIONS:
            for gained in _gaining(rest, name, [freed], "scatter"):
                yield Move("scatter", layout, gained.target, along=freed, taken=name)


def _gaining(layout: Layout, name: str, runs: Sequence[MeshSplit], how: How) -> Iterator[Move]:
    """The dimension is split along each of these devices too, where that leaves it one split."""
    for run in runs:
        split = run.after(getattr(layout, name))
        if split is not None:
            yield Move(how, layout, layout._replace(**{name: split}), along=run, taken=name)


def _minor_parts(split: MeshSplit | None) -> list[tuple[MeshSplit | None, MeshSplit]]:
    """What can be given up so that the pieces stay in order: all of a split, or its minor part; and what is kept."""
    return [(None, split), *split.parts] if split else []


def _any_parts(split: MeshSplit | None) -> list[tuple[MeshSplit | None, MeshSplit]]:
    """All of a split, or either part of it; a sum has no order."""
    return [*_minor_parts(split), *((minor, major) for major, minor in split.parts)] if split else []


def _free_runs(layout: Layout, devices: int) -> list[MeshSplit]:
    used = layout.used()
    return [run for run in _runs(devices) if nested([*used, run], devices)]


@cache
def _runs(devices: int) -> tuple[MeshSplit, ...]:
    return tuple(layout.samples for layout in all_layouts(devices) if layout.samples and not any(layout[1:]))
