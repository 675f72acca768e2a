"""Operators as units that can be split, and all their configurations on some devices with their costs (equation 1).

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, permutations
from math import prod
from typing import ClassVar, Literal, NamedTuple

from pipeplan.costs.communication import Exchange, send_time, time_of_groups
from pipeplan.costs.devices import DevicePreset, Kernel
from pipeplan.costs.layouts import Layout, MeshSplit, Tensor, groups_along, joined
from pipeplan.costs.operators import Operator
from pipeplan.costs.resharding import Resharding, sum_ns
from pipeplan.files.row_messages import Combining
from pipeplan.time_limit import checked
from pipeplan.workload.kinds import GRADIENTS, MemoryBytes
from pipeplan.workload.mesh import EXPERTS, SAMPLES, SHARDS

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
        """Numbers on one of ``extent`` devices."""
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
        """Costs of a share with these numbers of each axis."""

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

    def allows(self, splits: Splits) -> bool:
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

    def keeps_input(self, port: int) -> bool:
        """Whether backward needs an input; the last one said holds for all after it."""
        return self.keeps[min(port, len(self.keeps) - 1)]

    def standing(self, splits: Splits, resharding: Resharding) -> Splittable:
        """The same with the times that it has where its shares stand so: of closed forms they are the same."""
        return self

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


MOST_DIMENSIONS = 3
"""Dimensions of a mesh."""


@cache
def factorizations(count: int, most: int = MOST_DIMENSIONS) -> tuple[tuple[int, ...], ...]:
    """Every mesh of ``count`` devices: at most ``most`` ordered factors above 1; none for a single device."""
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


Splits = Mapping[str, MeshSplit]
"""The split of every axis that is split."""

Rule = Callable[[Splittable, Splits], bool]
"""Whether a configuration is looked at: planners that restrict what may be split are such rules."""


@dataclass(frozen=True, slots=True)
class OperatorScale:
    """What a profile says of an operator beyond its closed form.

    ``forward`` and ``backward`` are measured over computed time of its block; ``state`` is what training keeps of its
    parameters, and ``running_bytes`` are of a copy of them that is there while it runs, both unsplit. Of these each of
    several ``shards`` has ``repeated`` and ``running_repeated`` whole; numbers of them that divide sequences
    (``dividing``) each make a part of its gradients. ``experts`` and ``running_experts`` are what of all that is of
    experts, of which each of the devices that share them has its part.
    """

    forward: float = 1.0
    backward: float = 1.0
    state: MemoryBytes = field(default_factory=MemoryBytes)
    running_bytes: int = 0
    repeated: MemoryBytes = field(default_factory=MemoryBytes)
    running_repeated: int = 0
    dividing: frozenset[int] = frozenset()
    experts: MemoryBytes = field(default_factory=MemoryBytes)
    running_experts: int = 0

    def whole_sum_ns(self, splits: Splits, resharding: Resharding) -> int:
        """Time to add up, along shards, gradients that each of them has whole and makes a part of."""
        if SHARDS not in splits or splits[SHARDS].extent not in self.dividing:
            return 0
        return round(sum_ns(self.repeated[GRADIENTS], splits[SHARDS], resharding))

    def state_on(self, parts: int, splits: Splits) -> MemoryBytes:
        """What a device keeps that has one of so many parts."""
        whole = self.state + self.repeated * _again(splits)
        return (
            (whole - self.experts).share(parts) + self.experts_on(splits) if EXPERTS in splits else whole.share(parts)
        )

    def experts_on(self, splits: Splits) -> MemoryBytes:
        """What a device keeps of experts that devices share; nothing where each has all of them."""
        return self.experts.share(splits[EXPERTS].extent) if EXPERTS in splits else MemoryBytes()

    def running_on(self, parts: int, splits: Splits) -> int:
        """Bytes of the copy on a device that has one of so many parts."""
        whole = self.running_bytes + self.running_repeated * _again(splits)
        if EXPERTS not in splits:
            return -(-whole // parts)
        return -(-(whole - self.running_experts) // parts) - (-self.running_experts // splits[EXPERTS].extent)


def _again(splits: Splits) -> int:
    """How many shards there are beside one."""
    return splits[SHARDS].extent - 1 if SHARDS in splits else 0


@dataclass(frozen=True, slots=True)
class Configuration:
    """How an operator is split and what it costs each device; times in ns, of all its samples.

    ``weight_grad_ns`` is the part of backward that can wait, holding ``deferred_bytes``: None where it cannot.
    ``sync_ns`` adds up the ``gradient_bytes`` of parameters, over shards those that each has whole, and over devices
    that share experts all but the ``expert_bytes`` of each one's own. They are among the
    ``state_bytes`` that training keeps and the optimizer's step goes through in ``step_ns``, both once per iteration.
    ``inside_bytes`` is what backward needs beside inputs and output, ``entry_bytes`` the first input. Layouts are those
    of the inputs, of the gradients given for them (none if none are), and of the output, whose gradient is taken where
    the output lies and is no sum.
    """

    name: str
    splits: Splits
    forward_ns: int
    backward_ns: int
    weight_grad_ns: int
    deferred_bytes: int | None
    sync_ns: int
    step_ns: int
    gradient_bytes: int
    expert_bytes: int
    state_bytes: int
    inside_bytes: int
    entry_bytes: int
    workspace_bytes: int
    inputs: tuple[Layout, ...]
    input_gradients: tuple[Layout, ...]
    output: Layout

    @property
    def compute_ns(self) -> int:
        """Forward and backward, with what is exchanged in the middle of them."""
        return self.forward_ns + self.backward_ns

    def taken(self, port: int) -> Layout:
        """The layout of an input."""
        return self.inputs[min(port, len(self.inputs) - 1)]

    def returned(self, port: int) -> Layout:
        """The layout of the gradient of an input."""
        return self.input_gradients[min(port, len(self.input_gradients) - 1)]


class Taken(NamedTuple):
    """A tensor that an operator takes; of all samples where it is broadcast."""

    tensor: Tensor
    port: int
    broadcast: bool

    def local_bytes(self, way: Configuration) -> int:
        """What a device has of it as it is taken."""
        return self.tensor.num_bytes if self.broadcast else self.tensor.local_bytes(way.taken(self.port))


def recomputed(way: Configuration, inputs: Collection[Taken]) -> Configuration:
    """A configuration that keeps only its inputs: backward runs forward first, and needs what that holds."""
    return replace(
        way,
        backward_ns=way.backward_ns + way.forward_ns,
        inside_bytes=min(way.inside_bytes, sum(each.local_bytes(way) for each in inputs)),
        workspace_bytes=way.workspace_bytes + way.inside_bytes,
    )


def configurations(
    operation: Splittable,
    scale: OperatorScale,
    device: DevicePreset,
    resharding: Resharding,
    *,
    rule: Rule | None = None,
    mesh_dimensions: int = MOST_DIMENSIONS,
    step_ns: Callable[[MemoryBytes], int] = lambda state: 0,
) -> tuple[Configuration, ...]:
    """Every valid configuration of an operator on the devices of ``resharding``, in a fixed order.

    ``step_ns`` is the time of the optimizer's step of what a device keeps.
    """
    found = []
    for sized in unpriced(operation, scale, resharding.devices, rule=rule, mesh_dimensions=mesh_dimensions):
        priced = _priced(operation, sized, scale, device, resharding)
        found.append(replace(priced, step_ns=step_ns(scale.state_on(num_parts(operation, sized.splits), sized.splits))))
    return tuple(found)


_WAYS_PER_QUESTION = 16
"""Configurations that are priced between two looks at the time: each may take milliseconds."""


def unpriced(
    operation: Splittable,
    scale: OperatorScale,
    devices: int,
    *,
    rule: Rule | None = None,
    mesh_dimensions: int = MOST_DIMENSIONS,
) -> Iterator[Configuration]:
    """The same in the same order with their sizes, but no times."""
    ways = ways_to_split(devices, [axis.size for axis in operation.axes], mesh_dimensions)
    for way in checked(ways, _WAYS_PER_QUESTION):
        splits = {axis.name: split for axis, split in zip(operation.axes, way, strict=True) if split}
        if operation.allows(splits) and (rule is None or rule(operation, splits)):
            yield _sized(operation, splits, scale, devices)


def _extents(operation: Splittable, splits: Splits) -> dict[str, int]:
    return {axis.name: splits[axis.name].extent if axis.name in splits else 1 for axis in operation.axes}


def _priced(
    operation: Splittable, sized: Configuration, scale: OperatorScale, device: DevicePreset, resharding: Resharding
) -> Configuration:
    numbers = operation.numbers(_extents(operation, sized.splits))
    times = operation.standing(sized.splits, resharding).times(numbers, device)
    forward, backward = _exchanged(operation.exchanges(numbers), sized.splits, resharding)
    return replace(
        sized,
        forward_ns=round(times.forward_ns * scale.forward + forward),
        backward_ns=round((times.input_grad_ns + times.weight_grad_ns) * scale.backward + backward),
        weight_grad_ns=0 if sized.deferred_bytes is None else round(times.weight_grad_ns * scale.backward),
        sync_ns=sync_ns(operation, sized.splits, sized.gradient_bytes, resharding, sized.expert_bytes)
        + scale.whole_sum_ns(sized.splits, resharding),
    )


def _sized(operation: Splittable, splits: Splits, scale: OperatorScale, devices: int) -> Configuration:
    numbers = operation.numbers(_extents(operation, splits))
    parts = num_parts(operation, splits)
    state = scale.state_on(parts, splits)
    return Configuration(
        name=mesh_name(list(splits.items()), devices),
        splits=splits,
        forward_ns=0,
        backward_ns=0,
        weight_grad_ns=0,
        deferred_bytes=operation.deferred_bytes(numbers),
        sync_ns=0,
        step_ns=0,
        gradient_bytes=state[GRADIENTS],
        expert_bytes=scale.experts_on(splits)[GRADIENTS],
        state_bytes=state.total,
        inside_bytes=operation.inside_bytes(numbers),
        entry_bytes=operation.entry_bytes(numbers),
        workspace_bytes=operation.workspace_bytes(numbers) + scale.running_on(parts, splits),
        inputs=tuple(_layout(taken, splits) for taken in operation.inputs),
        input_gradients=tuple(_partial(operation, taken, splits) for taken in operation.inputs if operation.learns),
        output=_partial(operation, operation.output, splits),
    )


def _exchanged(exchanges: tuple[InnerExchange, ...], splits: Splits, resharding: Resharding) -> tuple[float, float]:
    """Time in forward and in backward of what the shares exchange in the middle of an operator."""
    forward = backward = 0.0
    for each in exchanges:
        if each.axis in splits:
            time = _exchange_ns(each, splits[each.axis], resharding)
            forward += each.forward * time
            backward += each.backward * time
    return forward, backward


def _exchange_ns(inner: InnerExchange, split: MeshSplit, resharding: Resharding) -> float:
    exchange = inner.exchange
    if exchange is not None:
        return time_of_groups(resharding.cluster, exchange, groups_along([split], resharding.devices))
    pairs = [
        (device, device + split.stride)
        for device in range(resharding.devices)
        if split.coordinate(device) + 1 < split.extent
    ]
    return float(send_time(resharding.cluster, pairs, inner.num_bytes))


def num_parts(operation: Splittable, splits: Splits) -> int:
    """Into how many equal parts its parameters are split."""
    return prod(split.extent for name, split in splits.items() if name in operation.weighted)


def way_of(operation: Splittable, splits: Splits) -> frozenset[tuple[object, MeshSplit]]:
    """How its parameters are split and their gradients summed: splits of its parameters' axes, those of sums joined.

    Operators of which it is equal have the same share of what they share on every device, and sum it over the same. As
    one may call rows what another calls columns, axes go by their sizes, where these differ.
    """
    weighted = [axis for axis in operation.axes if axis.name in operation.weighted]
    sizes = Counter(axis.share(1) for axis in weighted)
    shares: set[tuple[object, MeshSplit]] = {
        (axis.called if axis.called == SHARDS or sizes[axis.share(1)] > 1 else axis.share(1), splits[axis.name])
        for axis in weighted
        if axis.name in splits
    }
    return frozenset(
        shares | {("", each) for each in joined(splits[name] for name in splits.keys() - operation.weighted)}
    )


def sync_ns(operation: Splittable, splits: Splits, size: int, resharding: Resharding, experts: int = 0) -> int:
    """Time to add up gradients of ``size`` bytes on each device, along all that its parameters do not have.

    Of these bytes those of ``experts`` are other ones on each device that shares them.
    """
    summed = [split for name, split in splits.items() if name not in {*operation.weighted, EXPERTS}]
    whole = round(sum(sum_ns(size, split, resharding) for split in summed))
    return whole + (round(sum_ns(size - experts, splits[EXPERTS], resharding)) if EXPERTS in splits else 0)


def sample_splits(splits: Splits) -> list[MeshSplit]:
    """Along which devices have other samples: those that share experts do, too."""
    return joined(splits[name] for name in (SAMPLES, EXPERTS) if name in splits)


def _layout(taken: Map, splits: Splits) -> Layout:
    samples, places, features = (splits.get(name) if name else None for name in taken)
    if EXPERTS in splits and taken[0] == SAMPLES:
        (samples,) = sample_splits(splits)
    return Layout(samples, places, features)


def _partial(operation: Splittable, taken: Map, splits: Splits) -> Layout:
    """The layout of a tensor that is a partial sum along every axis that the operator splits and the tensor lacks."""
    lacking = [split for name, split in splits.items() if name not in taken and name not in operation.combined]
    assert len(lacking) <= 1, f"{operation.kind} leaves a sum along {lacking}"
    return _layout(taken, splits)._replace(partial=lacking[0] if lacking else None)
