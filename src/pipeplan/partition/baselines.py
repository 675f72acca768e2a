"""What the planners we compare with have in common, and AutoPipe's slicer.

All of them have one micro-batch size b for all stages, so a problem with several sizes has an answer for each. Memory
is that of 1F1B: a stage with s stages after it holds the activations of s + 1 micro-batches. Stages run one after
another, even where the graph has branches. The planners are :mod:`pipeplan.partition.pipedream`, :mod:`.piper` and
:mod:`.dapple`; our own partitioners (chain, graph) are elsewhere.

*AutoPipe's slicer* (III-C): leading micro-batches run their warmup forwards in halves, so that startup halves. Of the
micro-batches to split, micro-batch m runs in halves on stages 0 .. p-1-m, where it is a warmup forward; on the last of
them its halves are sent together, since the next stage would let the first one wait. Backwards are whole, and no stage
holds more micro-batches than before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED
from pipeplan.errors import TooLargeError
from pipeplan.partition.chain.autopipe import Step, steps_in_order
from pipeplan.partition.chain.costs import Array, ChainCosts, StageTimes
from pipeplan.partition.chain.kernel import Programme
from pipeplan.partition.problem import NoPartitionError, Partition, PartitionProblem, Way
from pipeplan.search_constants import BASELINE_BLOCKS
from pipeplan.time_limit import checked

Mask = NDArray[np.bool_]


Planner = Callable[[PartitionProblem, Sequence[Way]], Partition | None]
"""Finds a partition among the ways for one micro-batch size, if there is one."""


def require_few_blocks(problem: PartitionProblem, planner: str) -> None:
    """Refuse blocks whose ranges are too many for a planner's tables. Raises TooLargeError."""
    if len(problem.order) > BASELINE_BLOCKS:
        raise TooLargeError(
            f"{planner}'s planner keeps tables of all ranges of blocks, of at most {BASELINE_BLOCKS:,} blocks and not "
            f"{len(problem.order):,}; --planner auto plans them"
        )


def for_each_size(problem: PartitionProblem, planner: Planner, nothing: str) -> Iterator[Partition]:
    """What a planner finds for the ways of each micro-batch size.

    Raises:
        NoPartitionError: ``nothing``, for all sizes.
    """
    found = list(_of_sizes(problem, planner))
    if not found:
        raise NoPartitionError(
            nothing,
            problem,
            lambda memory: next(_of_sizes(replace(problem, memory_bytes=memory), planner), None) is not None,
        )
    yield from found


def _of_sizes(problem: PartitionProblem, planner: Planner) -> Iterator[Partition]:
    sized = groupby(sorted(problem.ways, key=lambda way: way.microbatch_size), key=lambda way: way.microbatch_size)
    return (partition for _, ways in sized if (partition := planner(problem, list(ways))) is not None)


@dataclass(frozen=True, slots=True)
class StageTable:
    """Every possible stage between two cuts, in every way: [way, stage] ns for the mini-batch.

    ``waits`` is the part of ``times`` that is the gradients' all-reduce, ``most`` the micro-batches whose
    activations it can hold. ``number`` [begin, end] is a stage's place, -1 where there is none.
    """

    ways: tuple[Way, ...]
    begins: Array
    ends: Array
    times: Array
    waits: Array
    most: Array
    number: Array

    @classmethod
    def of(
        cls, problem: PartitionProblem, ways: Sequence[Way], sums: ChainCosts, begins: Array, ends: Array
    ) -> StageTable:
        """Those between these cuts, with ``sums`` [row, cut]."""
        rows = [way.row for way in ways]
        waits = _waits(problem, ways, sums.gradients(begins, ends)[0])
        times = problem.mini_batch // ways[0].microbatch_size * sums.time(begins, ends)[rows] + waits
        limit = problem.memory_bytes
        most = np.full_like(times, UNLIMITED) if limit is None else sums.most_in_flight(begins, ends, limit)[rows]
        number = np.full((sums.num_blocks + 1, sums.num_blocks + 1), -1)
        number[begins, ends] = np.arange(len(begins))
        return cls(tuple(ways), begins, ends, times, waits, most, number)

    @classmethod
    def of_chain(cls, problem: PartitionProblem, ways: Sequence[Way], order: Sequence[str]) -> StageTable:
        """Those of blocks in this order."""
        return cls.of(problem, ways, problem.chain(order), *np.triu_indices(len(order) + 1, 1))

    def within(self, num_microbatches: int, later: int) -> Array:
        """[way, stage] its time, ``UNLIMITED`` where it does not fit with ``later`` stages after it; no more than all
        micro-batches are ever in flight."""
        return np.where(self.most >= min(num_microbatches, later + 1), self.times, UNLIMITED)


def _waits(problem: PartitionProblem, ways: Sequence[Way], sizes: Array) -> Array:
    """[way, stage] ns of the all-reduce of these sizes."""
    distinct, places = np.unique(sizes, return_inverse=True)
    each = [[problem.waiting(size, way) for size in distinct.tolist()] for way in ways]
    return np.array(each, dtype=np.int64)[:, places]


def least_bottleneck(problem: PartitionProblem, stages: StageTable) -> tuple[int, list[tuple[int, int, Way]]] | None:
    """The slowest stage's ns, and (begin, end, way) of each stage, of the partition whose slowest stage is least slow.

    The programme goes over (stages after a cut, cut, devices left), because the memory of a stage depends on how many
    come after it; without a memory limit one layer does for any number of them. None if nothing fits.
    """
    last, devices = len(stages.number) - 1, problem.num_devices
    programme = Programme(last + 1, UNLIMITED, devices=[way.num_devices for way in stages.ways], num_devices=devices)
    candidates, start = _from_the_end(stages.number), programme.start(range(devices + 1))
    if problem.memory_bytes is None:
        layers = [programme.repeated(start, _price(stages, stages.times), candidates)] * last
    else:
        count, layers = problem.mini_batch // stages.ways[0].microbatch_size, [start]
        for later in checked(range(min(devices, last)), 1):
            times = stages.within(count, later)
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


@dataclass(frozen=True, slots=True)
class Sliced:
    """1F1B with the first ``num_split`` micro-batches in halves; times in ns.

    ``ends`` are those of whole actions: of a forward in halves, that of the second half. ``startup_ns`` is when the
    last stage starts.
    """

    num_split: int
    startup_ns: int
    iteration_ns: int
    ends: dict[Step, int]


def num_to_split(stages: StageTimes) -> int:
    """Algorithm 2: the fewest leading micro-batches whose splitting is enough; 0 for a single stage.

    Once the first micro-batch runs in halves, the last stage ends its forward earlier, and so the gradient comes to
    stage p-1-m earlier. Splitting the first m micro-batches is enough if micro-batch m, whole, can end its forward on
    that stage by then although it starts on stage 0 only after the halves before it. So the text; the printed test
    in line 34 is the other way round. The gradient's start counts both halves on the last stage, of which line 9
    leaves out one.
    """
    count, transfer = stages.num_stages, stages.transfer_ns
    ways = list(accumulate((time + transfer for time in stages.forwards), initial=0))
    ends = _halves(stages)
    gradient = ends[0][count - 1]
    for split in range(1, count):
        stage = count - 1 - split
        gradient += stages.backwards[stage + 1] + transfer
        latest = gradient - (ways[stage + 1] - transfer)
        if latest >= ends[split - 1][0]:
            return split
    return count if count > 1 else 0


def sliced(stages: StageTimes, num_microbatches: int, num_split: int) -> Sliced:
    """Run 1F1B with the first micro-batches in halves; a half's transfer takes half as long."""
    count = stages.num_stages
    free = [0] * count
    ends: dict[Step, int] = {}
    parts: dict[tuple[int, int], list[int]] = {}
    startup = 0
    for kind, stage, index in steps_in_order(count, num_microbatches):
        if kind == "B":
            arrival = ends["B", stage + 1, index] + stages.transfer_ns if stage < count - 1 else 0
            free[stage] = max(free[stage], arrival) + stages.backwards[stage]
        else:
            halved = index < num_split and stage < count - index
            arrivals = _arrivals(stages, parts.get((stage - 1, index), []), halved)
            parts[stage, index] = _run(free[stage], arrivals, _pieces(stages.forwards[stage], halved))
            free[stage] = parts[stage, index][-1]
            if (stage, index) == (count - 1, 0):
                startup = parts[stage, index][0] - _pieces(stages.forwards[stage], halved)[0]
        ends[kind, stage, index] = free[stage]
    return Sliced(num_split, startup, ends["B", 0, num_microbatches - 1], ends)


def _pieces(time: int, halved: bool) -> list[int]:
    """What the parts of a forward take."""
    return [time - time // 2, time // 2] if halved else [time]


def _arrivals(stages: StageTimes, sent: list[int], halved: bool) -> list[int]:
    """When the parts of an input are there: halves apart where both stages run halves, else all together."""
    if not sent:
        return [0, 0] if halved else [0]
    return [end + _pieces(stages.transfer_ns, True)[0] for end in sent] if halved else [sent[-1] + stages.transfer_ns]


def _run(free: int, arrivals: list[int], pieces: list[int]) -> list[int]:
    """The ends of parts run one after another from ``free`` on, each once it is there."""
    ends = []
    for arrival, piece in zip(arrivals, pieces, strict=True):
        free = max(free, arrival) + piece
        ends.append(free)
    return ends


def _halves(stages: StageTimes) -> list[list[int]]:
    """[micro-batch][stage] ends of forwards in halves, when all the warmup runs so and nothing else."""
    count = stages.num_stages
    free, found = [0] * count, []
    for index in range(count):
        sent: list[int] = []
        for stage in range(count - index):
            sent = _run(free[stage], _arrivals(stages, sent, True), _pieces(stages.forwards[stage], True))
            free[stage] = sent[-1]
        found.append(list(free))
    return found
