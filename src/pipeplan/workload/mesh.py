"""Meshes: how the devices that split a stage's blocks are arranged for one block (TensorOpt section 2.1).

Devices stand on a grid, and along each axis of it the block is split in one way. Devices are numbered as the digits of
a number with mixed radix count, the first axis changing slowest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

SAMPLES = "samples"
"""The axis along which devices share the samples."""

PLACES = "places"
"""The axis along which devices share the positions of a sequence."""

SHARDS = "shards"
"""The axis along which the block is split in its usual way: heads, inner width, words."""

CACHE = "cache"
"""The axis along which devices have pieces of every request's cache, whose queries, keys and values are gathered."""

CACHE_BY_QUERIES = "cacheq"
"""The same where queries alone are gathered, and a new key and value is sent to the device that keeps it."""

EXPERTS = "experts"
"""The axis along which devices share samples, or requests, and have some of the experts each; all else of the block is
whole. Where a whole stage shares experts, these are neighbouring devices of it, and no axis of a mesh."""

EXPERT_PARTS = "expertparts"
"""Along which neighbours among these split the same experts."""

COPIES = "copies"
"""The axis along which all devices do the same."""

_WHOLE_ALONG = (SAMPLES, PLACES, CACHE, CACHE_BY_QUERIES, EXPERTS)
"""Axes along which devices have the same parameters, but for experts."""

_AXIS = re.compile(r"([a-z]+)([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True, order=True)
class MeshAxis:
    """``size`` devices whose numbers differ by ``stride``."""

    size: int
    stride: int

    def of(self, device: int) -> tuple[int, ...]:
        """The devices along the axis, among them this one, in order."""
        first = device - self.place(device) * self.stride
        return tuple(first + place * self.stride for place in range(self.size))

    def place(self, device: int) -> int:
        """Where along the axis a device is."""
        return device // self.stride % self.size

    def shared(self, other: MeshAxis) -> int:
        """The largest size such that both begin with an axis of that size: devices there have the same place on it."""
        if self.size * self.stride != other.size * other.stride:
            return 1
        return math.gcd(self.size, other.size)

    def without(self, size: int) -> MeshAxis:
        """What is left of the axis after its first ``size``."""
        return MeshAxis(self.size // size, self.stride)


class HeldPart(NamedTuple):
    """What a device of a mesh has of a block's parameters: a slice along each axis that cuts them, else all.

    ``slices`` are (what is cut, into how many, which of them). Of ``copies`` devices that do the same this is number
    ``copy``; devices that share samples, places or a cache have the same.
    """

    slices: tuple[tuple[str, int, int], ...]
    copies: int
    copy: int

    @property
    def kind(self) -> tuple[object, ...]:
        """What parts that are made by the same cuts have in common."""
        return tuple((cut, count) for cut, count, _ in self.slices), self.copies

    @property
    def num_parts(self) -> int:
        """Into how many equal parts the parameters are cut."""
        return math.prod(count for _, count, _ in self.slices)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Names and sizes of the axes, none twice but those of copies.

    As text ``samples2-shards4``: eight devices, of which each half has its half of the samples and splits the block
    over four.
    """

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh of a text. Raises ValueError."""
        found = [_AXIS.fullmatch(each) for each in text.split("-")]
        axes = tuple((each[1], int(each[2])) for each in found if each is not None)
        named = [name for name, _ in axes if name != COPIES]
        if len(axes) < len(found) or len(set(named)) < len(named):
            raise ValueError(f"{text!r} is not a mesh: write each axis once with its size, as in samples2-shards4")
        order = [name for name, size in axes if size > 1]
        if {SAMPLES, EXPERTS} <= {*order} and abs(order.index(SAMPLES) - order.index(EXPERTS)) > 1:
            raise ValueError(
                f"{text!r} has {SAMPLES} and {EXPERTS} apart, which split samples as one: write them side by side"
            )
        return cls(axes)

    def __str__(self) -> str:
        return "-".join(f"{name}{size}" for name, size in self.axes)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(size for _, size in self.axes)

    def size_of(self, name: str) -> int:
        """Size of an axis; 1 if there is none with the name."""
        return dict(self.axes).get(name, 1)

    @property
    def named(self) -> tuple[tuple[str, MeshAxis], ...]:
        """The axes, and where they lie."""
        sizes = [size for _, size in self.axes]
        return tuple(
            (name, MeshAxis(size, math.prod(sizes[number + 1 :]))) for number, (name, size) in enumerate(self.axes)
        )

    def axis(self, name: str) -> MeshAxis:
        """The position of an axis; of size 1 if there is none with the name."""
        return dict(self.named).get(name, MeshAxis(1, 1))

    @property
    def of_samples(self) -> MeshAxis:
        """The position of devices with samples of their own: those of experts have some, beside the axis of samples."""
        samples, experts = self.axis(SAMPLES), self.axis(EXPERTS)
        if samples.size == 1 or experts.size == 1:
            return samples if experts.size == 1 else experts
        return MeshAxis(samples.size * experts.size, min(samples.stride, experts.stride))

    def plane_without(self, names: Collection[str], device: int) -> tuple[Mesh, tuple[int, ...]]:
        """The mesh without some axes, and the devices that stand on it: those at this one's place along all of them."""
        fixed = [self.axis(name) for name in names]
        rest = Mesh(tuple(each for each in self.axes if each[0] not in names))
        same = (each for each in range(self.size) if all(axis.place(each) == axis.place(device) for axis in fixed))
        return rest, tuple(same)

    def held_part(self, device: int, cut: Callable[[str], str]) -> HeldPart:
        """What a device has of parameters; ``cut`` names what an axis cuts of them."""
        slices, copies, copy = [], 1, 0
        for name, axis in self.named:
            place = axis.place(device)
            if name == COPIES:
                copies, copy = copies * axis.size, copy * axis.size + place
            elif name not in _WHOLE_ALONG and axis.size > 1:
                slices.append((cut(name), axis.size, place))
        return HeldPart(tuple(slices), copies, copy)
