"""The planners that TensorOpt compares with, with our costs (sections 2.2 and 5.1).

* *Data parallelism*: every operator splits its samples over all devices.
* *OptCNN-like*: the least time, whatever it takes in memory. One point.
* *ToFu-like*: all parameters, and what has none, are split over all devices, and nothing is replicated; the least
  memory. One point.
* *Mesh-TensorFlow-like*: all operators use one mesh, samples and places lie along the same of its dimensions
  everywhere, and every operator takes a tensor as it was given, so that a dimension split for one is split for all
  that have it. Only sums are made on the way. The frontier over all meshes and such choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np

from pipeplan.costs.layouts import MeshSplit
from pipeplan.errors import UsageError
from pipeplan.sharding.cost_model import CostModel
from pipeplan.sharding.details import details_of
from pipeplan.sharding.graph import CostGraph, Strategy
from pipeplan.sharding.operators import Rule, Splits, Splittable, factorizations, splits_of
from pipeplan.sharding.table import Table
from pipeplan.sharding.tracking import track
from pipeplan.workload.mesh import EXPERTS, SAMPLES


@dataclass(frozen=True, slots=True)
class BaselinePoint:
    """Memory per device and time of a strategy."""

    memory_bytes: int
    time_ns: int


def data_parallel(model: CostModel) -> BaselinePoint:
    """Samples over all devices, everywhere; gradients of all parameters are summed.

    Raises:
        UsageError: the devices do not divide the samples.
    """
    found = track(_by_samples(model).graph)
    return BaselinePoint(int(found.memory_bytes[-1]), int(found.time_ns[-1]))


def _by_samples(model: CostModel) -> CostModel:
    whole = MeshSplit(model.resharding.devices, 1)
    return _restricted(model, lambda operation, splits: splits == {"samples": whole})


def fastest(model: CostModel) -> BaselinePoint:
    """The least time by a search that sees no memory, and the memory that its strategy takes."""
    found = fastest_strategy(model)
    return BaselinePoint(found.memory_bytes, found.time_ns)


def fastest_strategy(model: CostModel) -> Strategy:
    """The strategy with the least time by a search that sees no memory."""
    found = track(_times_of(model.graph))
    strategy = found.strategy(len(found.time_ns) - 1)
    return replace(strategy, memory_bytes=details_of(model, strategy).memory_bytes)


def split_everything(model: CostModel) -> BaselinePoint:
    """The least memory where no device has what another has.

    Raises:
        UsageError: an operator cannot be split so.
    """
    found = track(_nothing_twice(model).graph)
    return BaselinePoint(int(found.memory_bytes[0]), int(found.time_ns[0]))


def _nothing_twice(model: CostModel) -> CostModel:
    devices = model.resharding.devices

    def rule(operation: Splittable, splits: Splits) -> bool:
        own = {axis.name for axis in operation.axes}
        needed = operation.weighted & own or own
        return prod(split.extent for name, split in splits.items() if name in needed) == devices

    return _restricted(model, rule)


def one_mesh_for_all(model: CostModel) -> list[BaselinePoint]:
    """The frontier of strategies that Mesh-TensorFlow can express, memory ascending."""
    points: list[BaselinePoint] = []
    for each in _meshes(model):
        try:
            found = track(each.graph)
        except IMPOSSIBLE:
            continue
        points += [
            BaselinePoint(*pair) for pair in zip(found.memory_bytes.tolist(), found.time_ns.tolist(), strict=True)
        ]
    return _frontier(points)


def _meshes(model: CostModel) -> Iterator[CostModel]:
    """The model on every mesh, with samples and places along each of its dimensions."""
    for mesh in factorizations(model.resharding.devices, model.options.mesh_dimensions):
        for fixed in _choices(mesh):
            yield _on_mesh(model, splits_of(mesh), fixed)


IMPOSSIBLE = (UsageError, ValueError)
"""What making and tracking a restricted graph raises where an operator, or a tensor between two, cannot be split so."""


@dataclass(frozen=True, slots=True)
class Only:
    """What a planner looks at of all that the free search does, and which of that it takes.

    ``models`` are the model with the configurations it has, in each of its ways; ``takes`` the fastest or the smallest
    strategy of these, or all that no other of them beats; ``blind`` is a search that sees no memory.
    """

    models: Callable[[CostModel], Iterable[CostModel]]
    takes: Literal["fastest", "smallest", "all"]
    words: str
    blind: bool = False


ONLY: dict[str, Only] = {
    "data-parallel": Only(lambda model: [_by_samples(model)], "fastest", "samples over all devices everywhere"),
    "optcnn": Only(lambda model: [model], "fastest", "the least time by a search that sees no memory", blind=True),
    "tofu": Only(lambda model: [_nothing_twice(model)], "smallest", "the least memory where nothing is replicated"),
    "mesh-tensorflow": Only(_meshes, "all", "one mesh for all, with no layout changed on the way but by sums"),
}
"""By the names that ``frontier --only`` takes."""


def _choices(mesh: tuple[int, ...]) -> Iterator[dict[str, MeshSplit | None]]:
    """Along which dimension of the mesh samples and places lie."""
    dimensions = (None, *splits_of(mesh))
    for samples in dimensions:
        for places in dimensions:
            if samples is None or samples != places:
                yield {"samples": samples, "places": places}


def _on_mesh(model: CostModel, dimensions: tuple[MeshSplit, ...], fixed: dict[str, MeshSplit | None]) -> CostModel:
    def rule(operation: Splittable, splits: Splits) -> bool:
        own = {axis.name for axis in operation.axes if axis.size > 1}
        return set(splits.values()) <= set(dimensions) and all(
            _along(name, splits) == split for name, split in fixed.items() if name in own
        )

    return _restricted(model, rule, aligned=True)


def _along(axis: str, splits: Splits) -> MeshSplit | None:
    """Where an axis lies; samples are split along devices that share experts, too."""
    return splits.get(axis) or (splits.get(EXPERTS) if axis == SAMPLES else None)


def _restricted(model: CostModel, rule: Rule, *, aligned: bool = False) -> CostModel:
    return replace(model, options=replace(model.options, rule=rule, aligned=aligned))


def _times_of(graph: CostGraph) -> CostGraph:
    """The same graph with the fastest variant of every cell, and no memory."""
    known: dict[int, Table] = {}

    def timed(costs: Table) -> Table:
        if id(costs) not in known:
            last = (costs.starts[1:] - 1)[np.diff(costs.starts) > 0]
            starts = np.r_[0, np.cumsum(np.diff(costs.starts) > 0)].astype(np.int64)
            nothing = np.zeros(len(last), np.int64)
            known[id(costs)] = Table(
                costs.rows, costs.columns, starts, nothing, costs.time_ns[last], costs.picks[:, last]
            )
        return known[id(costs)]

    return CostGraph(
        tuple(replace(node, costs=timed(node.costs)) for node in graph.nodes),
        tuple(replace(edge, costs=timed(edge.costs)) for edge in graph.edges),
        tuple(tie.timed() for tie in graph.ties),
    )


def _frontier(points: list[BaselinePoint]) -> list[BaselinePoint]:
    kept: list[BaselinePoint] = []
    for point in sorted(points, key=lambda each: (each.memory_bytes, each.time_ns)):
        if not kept or point.time_ns < kept[-1].time_ns:
            kept.append(point)
    return kept
