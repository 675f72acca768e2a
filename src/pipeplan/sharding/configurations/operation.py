"""Operators as what can be split: their axes, how these lie in inputs, output and parameters, and one share's costs.

An operator is written as its index notation is: a matrix product takes [samples, places, rows] and a weight
[rows, columns] to [samples, places, columns]. From that follows what a split costs beside computing:

* an axis of the operator that its output lacks (``rows`` of a product) leaves the output *partial*;
* an axis that an input lacks (``columns``) leaves that input's gradient partial;
* an axis that the parameters lack (``samples``, ``places``) leaves their gradient partial: it is all-reduced.

Costs of a share are the closed forms of :mod:`pipeplan.costs.operators` at the share's sizes; what an operator
exchanges in its middle (statistics of a norm, keys and values, the state of a recurrent cell) is said by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal, NamedTuple

from pipeplan.costs.communication import Combining, Exchange
from pipeplan.costs.devices import DevicePreset, Kernel
from pipeplan.costs.operators import Operator
from pipeplan.sharding.configurations.layouts import Tensor

__all__ = ["IMAGE", "Axis", "InnerExchange", "Map", "Numbers", "Splittable", "Times", "tokens"]

Map = tuple[str | None, str | None, str | None]
"""Which axis of the operator each dimension of a tensor is: samples, places, features; None where it is whole."""

Numbers = Mapping[str, int]

IMAGE: Map = ("samples", "places", "features")
"""A tensor that has all three, none of them under another name."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that an operator can be split along.

    ``size`` pieces that stay whole, of ``unit`` numbers each (a head, a row of an image); ``called`` is the model's
    name for it, the same in all operators that have it (``hidden``, ``vocabulary``).
    """

    name: str
    size: int
    unit: int = 1
    called: str = ""

    def share(self, extent: int) -> int:
        """Numbers on one of so many devices."""
        return self.size // extent * self.unit


class InnerExchange(NamedTuple):
    """A collective in the middle of an operator, along an axis: how often in forward and in backward.

    ``neighbours``: the bytes go to the next device along the axis instead, and as many come from it.
    """

    axis: str
    operation: Combining | Literal["neighbours"]
    num_bytes: int
    forward: int = 1
    backward: int = 1

    @property
    def exchange(self) -> Exchange | None:
        """The collective; None among neighbours."""
        return None if self.operation == "neighbours" else Exchange(self.operation, self.num_bytes)


class Times(NamedTuple):
    """Times in ns of forward, of the input's gradient and of the weight's."""

    forward_ns: float
    input_grad_ns: float
    weight_grad_ns: float


@dataclass(frozen=True)
class Splittable(ABC):
    """One operator of a model, for all samples of a micro-batch.

    ``width`` is bytes per number. ``learns``: whether a gradient goes back to its input. Operators that are equal cost
    the same in every configuration.
    """

    axes: tuple[Axis, ...]
    width: int
    learns: bool = True

    kind: ClassVar[str]
    inputs: ClassVar[tuple[Map, ...]] = (IMAGE,)
    output: ClassVar[Map] = IMAGE
    weighted: ClassVar[frozenset[str]] = frozenset()
    """Axes that its parameters have."""
    combined: ClassVar[frozenset[str]] = frozenset()
    """Axes that the output lacks, but whose sums it takes itself."""
    keeps: ClassVar[tuple[bool, ...]] = (True,)
    """Which of its inputs backward needs."""
    keeps_output: ClassVar[bool] = False

    @abstractmethod
    def share(self, numbers: Numbers) -> Operator:
        """Costs of a share that has so many numbers of each axis."""

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        """What the shares exchange in the middle of it; it counts where the axis is split."""
        return ()

    def entry_bytes(self, numbers: Numbers) -> int:
        """Bytes of its first input."""
        return self.width * prod(numbers[name] for name in self.inputs[0] if name)

    def inside_bytes(self, numbers: Numbers) -> int:
        """What backward needs beside inputs and output."""
        return max(0, self.share(numbers).saved_bytes - (self.entry_bytes(numbers) if self.keeps[0] else 0))

    def workspace_bytes(self, numbers: Numbers) -> int:
        """What it holds besides while it runs."""
        share = self.share(numbers)
        return max(share.gradient_bytes, share.update_bytes)

    def deferred_bytes(self, numbers: Numbers) -> int | None:
        """What it holds from its input's gradient until its weight's; None where that is not known."""
        return None

    @property
    def parameters(self) -> int:
        """Numbers in its parameters, unsplit."""
        return self.share(self.numbers()).parameters

    def numbers(self, extents: Mapping[str, int] | None = None) -> dict[str, int]:
        """Numbers of each axis on one device; whole without ``extents``."""
        return {axis.name: axis.share((extents or {}).get(axis.name, 1)) for axis in self.axes}

    def allows(self, extents: Mapping[str, int]) -> bool:
        """Whether it can be split so, where dividing its axes is not all that matters."""
        return True

    def tensor(self) -> Tensor:
        """Its output."""
        numbers = self.numbers()
        sizes = tuple(numbers[name] if name else 1 for name in self.output)
        return Tensor((sizes[0], sizes[1], sizes[2]), self.width * prod(sizes))

    def axis(self, name: str) -> Axis:
        """The axis of this name."""
        return next(axis for axis in self.axes if axis.name == name)

    def input_map(self, port: int) -> Map:
        """The map of an input; the last one said holds for all after it."""
        return self.inputs[min(port, len(self.inputs) - 1)]

    def keeps_input(self, port: int) -> bool:
        """Whether backward needs an input; the last one said holds for all after it."""
        return self.keeps[min(port, len(self.keeps) - 1)]

    def times(self, numbers: Numbers, device: DevicePreset) -> Times:
        """Times of a share by the closed forms, without what it exchanges."""
        share = self.share(numbers)
        return Times(*(_kernels_ns(part, device) for part in (share.forward, share.input_grad, share.weight_grad)))


def _kernels_ns(kernels: Iterable[Kernel], device: DevicePreset) -> float:
    return sum(
        count * device.kernel_ns(each.flops, each.moved_bytes, matrix=each.matrix)
        for each, count in Counter(kernels).items()  # a recurrent layer launches the same in every step
    )


def tokens(numbers: Numbers) -> int:
    """Places of all samples."""
    return numbers["samples"] * numbers["places"]
