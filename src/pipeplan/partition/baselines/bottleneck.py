"""PipeDream's and Piper's planners: the least slowest stage, by dynamic programming.

What PipeDream's, Piper's and DAPPLE's planners share: every possible stage, and the least slowest stage.

All three have one micro-batch size b for all stages, so a problem with several sizes has an answer for each. Memory is
that of 1F1B: a stage with s stages after it holds the activations of s + 1 micro-batches.

PipeDream's planner (Narayanan et al. 2019, 3.1): contiguous stages of the linearised graph, each replicated.

Its dynamic programme finds the split and replication with the least slowest stage, synchronisation included. Memory
is that of the later versions, which limit what is in flight by 1F1B. All samples go through stages in a line, even
where the graph has branches.

Piper's planner (Tarnawski et al. 2021): a dynamic programme over the downsets of the graph.

A downset has with every block all blocks before it. A partition is a chain of downsets, each stage the difference of
two: so stages are convex, but need not be contiguous in any given order. Every stage chooses its replicas and whether
it recomputes, under the memory that the number of stages after it leaves. Like PipeDream's, its stages run one after
another, whatever the graph; splitting blocks over devices is left out here, as our stages have no such choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.partition.chain.costs import Array, ChainCosts, Place
from pipeplan.partition.chain.kernel import Programme
from pipeplan.partition.problem import Partition, PartitionProblem, Way

__all__ = ["MAX_DOWNSETS", "Mask", "StageTable", "downsets", "for_each_size", "least_bottleneck", "pipedream", "piper"]


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
class StageTable:
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
    def of(
        cls, problem: PartitionProblem, ways: Sequence[Way], sums: ChainCosts, begins: Array, ends: Array
    ) -> StageTable:
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
    def of_chain(cls, problem: PartitionProblem, ways: Sequence[Way], order: Sequence[str]) -> StageTable:
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


def least_bottleneck(problem: PartitionProblem, stages: StageTable) -> tuple[int, list[tuple[int, int, Way]]] | None:
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


def _price(stages: StageTable, times: Array) -> Callable[[Array, Array], Array]:
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


def pipedream(problem: PartitionProblem) -> Iterator[Partition]:
    """The contiguous partition with the least slowest stage, on at most the devices there are, for each size.

    Raises:
        InfeasibleError: no partition fits into memory.
    """
    order = problem.order

    def planned(ways: Sequence[Way]) -> Partition | None:
        found = least_bottleneck(problem, StageTable.of_chain(problem, ways, order))
        if found is None:
            return None
        placed = problem.placed([(order[begin:end], way) for begin, end, way in found[1]])
        return Partition(placed, found[0], optimal=True)

    return for_each_size(problem, planned, f"no split of {len(order)} blocks into stages in a line fits")


MAX_DOWNSETS = 3_000
"""With more of them the pairs, each of which is a possible stage, become too many: millions."""


def piper(problem: PartitionProblem, max_downsets: int = MAX_DOWNSETS) -> Iterator[Partition]:
    """The chain of downsets with the least slowest stage, on at most the devices there are, for each size.

    Raises:
        UsageError: the graph has more downsets than ``max_downsets``.
        InfeasibleError: no partition fits into memory.
    """
    order, cuts = problem.order, downsets(problem, max_downsets)
    sums = _NestedCosts.over(problem.chain(order), cuts)
    begins, ends = _nested(cuts)

    def planned(ways: Sequence[Way]) -> Partition | None:
        found = least_bottleneck(problem, StageTable.of(problem, ways, sums, begins, ends))
        if found is None:
            return None
        stages = [(np.flatnonzero(cuts[end] & ~cuts[begin]), way) for begin, end, way in found[1]]
        placed = problem.placed([([order[block] for block in blocks], way) for blocks, way in stages])
        return Partition(placed, found[0], optimal=True)

    return for_each_size(problem, planned, f"no partition of {len(order)} blocks along downsets fits")


def downsets(problem: PartitionProblem, most: int = MAX_DOWNSETS) -> Mask:
    """[downset, block] all downsets of the graph, by size; those of equal size in a fixed order.

    Raises:
        UsageError: there are more than ``most``.
    """
    order, count = problem.order, len(problem.costs)
    place = {block: index for index, block in enumerate(order)}
    before = [0] * count
    for source, target in problem.edges:
        before[place[target]] |= 1 << place[source]
    layer, found = {0}, [0]
    for _ in range(count):
        layer = {
            downset | 1 << block
            for downset in layer
            for block in range(count)
            if not downset >> block & 1 and before[block] & ~downset == 0
        }
        found += sorted(layer)
        if len(found) > most:
            raise UsageError(
                f"Piper's planner does not finish on this graph: it has more than {most} downsets of {count} blocks; "
                "group blocks, or choose another planner"
            )
    return np.array([[downset >> block & 1 for block in range(count)] for downset in found], dtype=np.bool_)


def _nested(cuts: Mask) -> tuple[Array, Array]:
    """Every downset with each that contains it."""
    found = [np.flatnonzero((cuts[begin + 1 :] | ~cuts[begin]).all(axis=1)) + begin + 1 for begin in range(len(cuts))]
    return np.repeat(np.arange(len(cuts)), [len(ends) for ends in found]), np.concatenate(found)


@dataclass(frozen=True, slots=True)
class _NestedCosts(ChainCosts):
    """Sums [row, cut] over sets of blocks instead of the first blocks: a stage has those of one set without another's.

    ``members`` [cut, block] are the sets, ``workspaces`` [row, block] those of blocks.
    """

    members: Mask = field(kw_only=True)
    workspaces: Array = field(kw_only=True)

    @classmethod
    def over(cls, chain: ChainCosts, members: Mask) -> _NestedCosts:
        """Of the blocks of a chain."""
        sums: Array = np.diff(chain.sums) @ members.T.astype(np.int64)
        return cls(sums, chain.widest, members=members, workspaces=chain.widest[:, 0])

    def workspace(self, begins: Place, ends: Place) -> Array:
        """The largest of the blocks between two sets, block after block so that memory does for millions of pairs."""
        largest = np.zeros((len(self.workspaces), *np.shape(begins)), dtype=np.int64)
        for sizes, inside in zip(self.workspaces.T, self.members.T, strict=True):
            np.maximum(largest, sizes[:, None] * (inside[ends] & ~inside[begins]), out=largest)
        return largest
