"""All configurations of an operator on a number of devices, with what each costs (TensorOpt equation 1)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from pipeplan.costs.communication import send_time, time_of_groups
from pipeplan.costs.devices import DevicePreset
from pipeplan.sharding.configurations.layouts import (
    ANY,
    MOST_DIMENSIONS,
    Layout,
    MeshSplit,
    Tensor,
    mesh_name,
    ways_to_split,
)
from pipeplan.sharding.configurations.operation import InnerExchange, Map, Splittable
from pipeplan.sharding.configurations.resharding import Resharding, groups_along

__all__ = ["Configuration", "OperatorScale", "Rule", "Splits", "Taken", "configurations", "recomputed"]

Splits = Mapping[str, MeshSplit]
"""The split of every axis that is split."""

Rule = Callable[[Splittable, Splits], bool]
"""Whether a configuration is looked at: planners that restrict what may be split are such rules."""


@dataclass(frozen=True, slots=True)
class OperatorScale:
    """What a profile says of an operator beyond its closed form.

    ``forward`` and ``backward`` are measured over told time of its block; ``state_bytes`` are its unsplit parameters,
    gradients and optimizer state, of which ``parameter_bytes`` parameters (gradients are as large).
    """

    forward: float = 1.0
    backward: float = 1.0
    parameter_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Configuration:
    """How an operator is split and what it costs each device; times in ns, of all its samples.

    ``weight_grad_ns`` is the part of backward that can wait, holding ``deferred_bytes``: None where it cannot.
    ``sync_ns`` adds up the parameters' gradients. ``state_bytes`` are parameters, gradients and optimizer state,
    ``inside_bytes`` what backward needs beside inputs and output, ``entry_bytes`` the first input. Layouts are those of
    the inputs, of the gradients given for them (none if none are), and of the output, whose gradient is taken where
    the output lies and is no sum.
    """

    name: str
    splits: Splits
    forward_ns: int
    backward_ns: int
    weight_grad_ns: int
    deferred_bytes: int | None
    sync_ns: int
    parameter_bytes: int
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
    """A configuration that keeps its inputs alone: backward runs forward first, and needs what that holds."""
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
) -> tuple[Configuration, ...]:
    """Every valid configuration of an operator on the devices of ``resharding``, in a fixed order."""
    found = []
    for way in ways_to_split(resharding.devices, [axis.size for axis in operation.axes], mesh_dimensions):
        splits = {axis.name: split for axis, split in zip(operation.axes, way, strict=True) if split}
        extents = {axis.name: split.extent if split else 1 for axis, split in zip(operation.axes, way, strict=True)}
        if operation.allows(extents) and (rule is None or rule(operation, splits)):
            found.append(_priced(operation, splits, extents, scale, device, resharding))
    return tuple(found)


def _priced(
    operation: Splittable,
    splits: Splits,
    extents: Mapping[str, int],
    scale: OperatorScale,
    device: DevicePreset,
    resharding: Resharding,
) -> Configuration:
    numbers = operation.numbers(extents)
    times = operation.times(numbers, device)
    forward, backward = _exchanged(operation.exchanges(numbers), splits, resharding)
    parts = prod(extents[name] for name in operation.weighted if name in extents)
    parameters = -(-scale.parameter_bytes // parts)
    summed = [split for name, split in splits.items() if name not in operation.weighted]
    deferred = operation.deferred_bytes(numbers)
    return Configuration(
        name=mesh_name(list(splits.items()), resharding.devices),
        splits=splits,
        forward_ns=round(times.forward_ns * scale.forward + forward),
        backward_ns=round((times.input_grad_ns + times.weight_grad_ns) * scale.backward + backward),
        weight_grad_ns=0 if deferred is None else round(times.weight_grad_ns * scale.backward),
        deferred_bytes=deferred,
        sync_ns=round(sum(_sum_ns(parameters, split, resharding) for split in summed)),
        parameter_bytes=parameters,
        state_bytes=-(-scale.state_bytes // parts),
        inside_bytes=operation.inside_bytes(numbers),
        entry_bytes=operation.entry_bytes(numbers),
        workspace_bytes=operation.workspace_bytes(numbers),
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


def _sum_ns(size: int, split: MeshSplit, resharding: Resharding) -> float:
    """Time to add up gradients of so many bytes along a split: the cheapest way from a sum to a whole tensor."""
    if not size:
        return 0.0
    tensor = Tensor((ANY, ANY, ANY), size)
    return float(resharding.times(tensor, [Layout(partial=split)], [Layout()])[0, 0])


def _layout(taken: Map, splits: Splits) -> Layout:
    samples, places, features = (splits.get(name) if name else None for name in taken)
    return Layout(samples, places, features)


def _partial(operation: Splittable, taken: Map, splits: Splits) -> Layout:
    """The layout of a tensor that is a sum along whatever the operator splits and the tensor does not have."""
    lacking = [split for name, split in splits.items() if name not in taken and name not in operation.combined]
    assert len(lacking) <= 1, f"{operation.kind} leaves a sum along {lacking}"
    return _layout(taken, splits)._replace(partial=lacking[0] if lacking else None)
