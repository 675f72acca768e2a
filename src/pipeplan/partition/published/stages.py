"""What PipeDream's, Piper's and DAPPLE's planners share: every possible stage, and the least slowest stage.

All three have one micro-batch size b for all stages, so a problem with several sizes has an answer for each. Memory is
that of 1F1B: a stage with s stages after it holds the activations of s + 1 micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED
from pipeplan.errors import InfeasibleError
from pipeplan.partition.chain_costs import Array, ChainCosts
from pipeplan.partition.chain_kernel import Programme
from pipeplan.partition.problem import Partition, PartitionProblem, Way

__all__ = ["Mask", "Stages", "for_each_size", "least_bottleneck"]

Mask = NDArray[np.bool_]


def for_each_size(
    problem: PartitionProblem, planner: Callable[[Sequence[Way]], Partition | None], nothing: str
) -> Iterator[Partition]:
    """What a planner finds for the ways of each micro-batch size.

    Raises:
        InfeasibleError: ``nothing``, for all sizes.
    """
    sized = groupby(sorted(problem.ways, key=lambda way: way.microbatch_size), key=lambda way: way.microbatch_size)
    found = [partition for _, ways in sized if (partition := planner(list(ways))) is not None]
    if not found:
        raise InfeasibleError(
            f"{nothing} {problem.num_devices} devices of {problem.memory_bytes} bytes; raise --memory or --devices, "
            "or lower --microbatch-size"
        )
    yield from found


@dataclass(frozen=True, slots=True)
class Stages:
    """Every possible stage between two cuts, in every way: [way, stage] ns for the mini-batch, and room.

    ``waits`` is the part of ``times`` that is the gradients' all-reduce, ``room`` the micro-batches a stage has memory
    for. ``number`` [begin, end] is a stage's place, -1 where there is none.
    """

    ways: tuple[Way, ...]
    begins: Array
    ends: Array
    times: Array
    waits: Array
    room: Array
    number: Array

    @classmethod
    def of(cls, problem: PartitionProblem, ways: Sequence[Way], sums: ChainCosts, begins: Array, ends: Array) -> Stages:
        """Those between these cuts, with ``sums`` [row, cut]."""
        rows = [way.row for way in ways]
        waits = _waits(problem, ways, sums.parameters[0, ends] - sums.parameters[0, begins])
        times = problem.mini_batch // ways[0].microbatch_size * sums.time(begins, ends)[rows] + waits
        limit = problem.memory_bytes
        room = np.full_like(times, UNLIMITED) if limit is None else sums.room(begins, ends, limit)[rows]
        number = np.full((sums.num_blocks + 1, sums.num_blocks + 1), -1)
        number[begins, ends] = np.arange(len(begins))
        return cls(tuple(ways), begins, ends, times, waits, room, number)

    @classmethod
    def of_chain(cls, problem: PartitionProblem, ways: Sequence[Way], order: Sequence[str]) -> Stages:
        """Those of blocks in this order."""
        return cls.of(problem, ways, problem.chain(order), *np.triu_indices(len(order) + 1, 1))

    def fitting(self, num_microbatches: int, later: int) -> Mask:
        """[way, stage] whether there is room with so many stages after it; no more than all micro-batches are ever in
        flight."""
        fits: Mask = self.room >= min(num_microbatches, later + 1)
        return fits


def _waits(problem: PartitionProblem, ways: Sequence[Way], sizes: Array) -> Array:
    """[way, stage] ns of the all-reduce of so many bytes."""
    distinct, places = np.unique(sizes, return_inverse=True)
    each = [[problem.waiting(size, way) for size in distinct.tolist()] for way in ways]
    return np.array(each, dtype=np.int64)[:, places]


def least_bottleneck(problem: PartitionProblem, stages: Stages) -> tuple[int, list[tuple[int, int, Way]]] | None:
    """The slowest stage's ns, and (begin, end, way) of each stage, of the partition whose slowest stage is least slow.

    The programme goes over (stages after a cut, cut, devices left), because the memory of a stage depends on how many
    come after it; without a memory limit one layer does for any number of them. None if nothing fits.
    """
    last, devices = len(stages.number) - 1, problem.num_devices
    programme = Programme(last + 1, UNLIMITED, devices=[way.replicas for way in stages.ways], num_devices=devices)
    candidates, start = _from_the_end(stages.number), programme.start(range(devices + 1))
    if problem.memory_bytes is None:
        layers = [programme.repeated(start, _price(stages, stages.times), candidates)] * last
    else:
        count, layers = problem.mini_batch // stages.ways[0].microbatch_size, [start]
        for later in range(min(devices, last)):
            times = np.where(stages.fitting(count, later), stages.times, UNLIMITED)
            layers.append(programme.extended(layers[-1], _price(stages, times), candidates))
        best = min(range(1, len(layers)), key=lambda number: int(layers[number].values[devices, last]))
        layers = layers[1 : best + 1]
    value = int(layers[-1].values[devices, last])
    if value >= UNLIMITED:
        return None
    traced = programme.traced(layers, last)
    return value, [(last - end, last - begin, stages.ways[way]) for begin, end, way in traced]


def _price(stages: Stages, times: Array) -> Callable[[Array, Array], Array]:
    """What stages take, for cuts that are numbered from the end."""
    last = len(stages.number) - 1
    return lambda begins, ends: times[:, stages.number[last - ends, last - begins]]


def _from_the_end(number: Array) -> Array:
    """[cut, candidate] where stages may begin, the nearest first; cuts are numbered from the end."""
    possible = (number >= 0)[::-1, ::-1]
    order = np.argsort(~possible[:, ::-1], axis=1, kind="stable")
    nearest = np.take_along_axis(possible[:, ::-1], order, axis=1)
    found: Array = np.where(nearest, len(number) - 1 - order, -1)[:, : max(1, int(possible.sum(axis=1).max()))]
    return found
