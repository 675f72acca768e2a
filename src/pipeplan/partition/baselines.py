"""The planners we compare with, in short: PipeDream's, Piper's and DAPPLE's, and AutoPipe's slicer.

Here: what the papers' algorithms choose. Not here: our own partitioners (chain, graph). All planners have one
micro-batch size b for all stages, so a problem with several sizes has an answer for each. Memory is that of 1F1B: a
stage with s stages after it holds the activations of s + 1 micro-batches. Stages run one after another, even where the
graph has branches.

*PipeDream* (Narayanan et al. 2019, 3.1): contiguous stages of the linearised graph, each replicated; the least slowest
stage, synchronisation included, by dynamic programming. Memory is that of the later versions, which limit what is in
flight by 1F1B.

*Piper* (Tarnawski et al. 2021): the same over the downsets of the graph. A downset has with every block all blocks
before it. A partition is a chain of downsets, each stage the difference of two: so stages are convex, but need not be
contiguous in any given order. Every stage chooses its replicas and whether it recomputes, under the memory that the
number of stages after it leaves; splitting blocks over devices is left out here.

*DAPPLE* (Fan et al. 2021): contiguous stages whose pipeline latency with early backwards is least. The latency of a
plan for M micro-batches is counted along its *pivot* stage Q, the one that bounds its steady phase: the way of the
first micro-batch down to it, M - 1 times its forward and backward, and the way of the last one back up, until the last
stage's gradients are summed:

    sum of F of stages 0 .. Q + (M - 1)(F_Q + B_Q) + max over s of (all-reduce of s + sum of B of stages s .. Q)

where for stages after the pivot the sum is negative: they end before it, by B of the stages between. The published
planner also chooses places for devices in machines and counts sending as stages of its own; here devices are all alike.

*AutoPipe's slicer* (III-C): leading micro-batches run their warmup forwards in halves, so that startup halves. Of the
micro-batches to split, micro-batch m runs in halves on stages 0 .. p-1-m, where it is a warmup forward; on the last of
them its halves are sent together, since the next stage would let the first one wait. Backwards are whole, and no stage
holds more micro-batches than before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED
from pipeplan.errors import UsageError
from pipeplan.partition.chain.autopipe import Step, steps_in_order
from pipeplan.partition.chain.costs import Array, ChainCosts, Place, StageTimes
from pipeplan.partition.chain.kernel import Programme
from pipeplan.partition.problem import NoPartitionError, Partition, PartitionProblem, Way
from pipeplan.time_limit import checked

Mask = NDArray[np.bool_]


Planner = Callable[[PartitionProblem, Sequence[Way]], Partition | None]
"""Finds a partition among the ways for one micro-batch size, if there is one."""


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
    programme = Programme(last + 1, UNLIMITED, devices=[way.replicas for way in stages.ways], num_devices=devices)
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


def pipedream(problem: PartitionProblem) -> Iterator[Partition]:
    """For each size, the contiguous partition with the fastest slowest stage on at most the available devices.

    Raises:
        NoPartitionError: no partition fits into memory.
    """
    order = problem.order

    def planned(problem: PartitionProblem, ways: Sequence[Way]) -> Partition | None:
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
        NoPartitionError: no partition fits into memory.
    """
    order, cuts = problem.order, downsets(problem, max_downsets)
    sums = _NestedCosts.over(problem.chain(order), cuts)
    begins, ends = _nested(cuts)

    def planned(problem: PartitionProblem, ways: Sequence[Way]) -> Partition | None:
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
        """The costs of the blocks of a chain."""
        sums: Array = np.diff(chain.sums) @ members.T.astype(np.int64)
        tied = tuple((each, members.astype(np.int64) @ np.diff(before)) for each, before in chain.tied)
        return cls(sums, chain.widest, tied=tied, members=members, workspaces=chain.widest[:, 0])

    def workspace(self, begins: Place, ends: Place) -> Array:
        """The largest of the blocks between two sets, block after block so that memory does for millions of pairs."""
        largest = np.zeros((len(self.workspaces), *np.shape(begins)), dtype=np.int64)
        for sizes, inside in zip(self.workspaces.T, self.members.T, strict=True):
            np.maximum(largest, sizes[:, None] * (inside[ends] & ~inside[begins]), out=largest)
        return largest


Load = tuple[int, int, int]
"""Of a stage: forward and backward of a micro-batch, and the gradients' all-reduce, in ns."""


def latency(stages: Sequence[Load], num_microbatches: int) -> int:
    """DAPPLE's pipeline latency of stages, in ns."""
    pipeline = _NO_STAGES
    for stage in reversed(stages):
        pipeline = _with_first(np.array(stage), pipeline, num_microbatches - 1)
    return int(_latency(pipeline, num_microbatches - 1))


_NO_STAGES = np.array([0, -1, 0, 0, -UNLIMITED])
"""A pipeline [quantity, ...]: the pivot's forward and backward, the same of all stages before it, forwards of the
stages up to the pivot, their backwards, and the longest all-reduce less the backwards of the stages before it."""


def _with_first(stage: Array, pipeline: Array, rounds: int) -> Array:
    """A pipeline with one more stage at its start, given by its forward, backward and all-reduce [quantity, ...].

    That stage becomes the pivot if its steady phase is longer than that of the pivot with what lies between them.
    """
    forward, backward, wait = stage
    steady, between, forwards, backwards, ending = pipeline
    both = forward + backward
    pivots = rounds * both > rounds * steady + between
    quantities = (
        np.where(pivots, both, steady),
        np.where(pivots, 0, between + both),
        forward + np.where(pivots, 0, forwards),
        backward + np.where(pivots, 0, backwards),
        np.maximum(wait, ending - backward),
    )
    return np.stack(np.broadcast_arrays(*quantities))


def _latency(pipeline: Array, rounds: int) -> Array:
    """[...] ns, with ``rounds`` micro-batches after the first one."""
    steady, _, forwards, backwards, ending = pipeline
    found: Array = forwards + rounds * steady + backwards + ending
    return found


class _DappleSearch:
    """Plans for one micro-batch size.

    ``loads`` [quantity, begin, end, way] and ``most`` [begin, end, way] are of every range of blocks. Kept is by [first
    block of what was cut off, devices it takes] the best of it: its latency in ``values``, ``pipelines`` [quantity,
    ...], ``lengths`` in stages, and of its first stage in ``firsts`` the end, the devices of all stages after it, and
    the way.
    """

    def __init__(self, problem: PartitionProblem, ways: Sequence[Way], order: Sequence[str]) -> None:
        stages, sums = StageTable.of_chain(problem, ways, order), problem.chain(order)
        count, rows = len(order), [way.row for way in ways]
        forward = (sums.forward[:, stages.ends] - sums.forward[:, stages.begins])[rows]
        each = (forward, sums.time(stages.begins, stages.ends)[rows] - forward, stages.waits, stages.most)
        table = np.zeros((len(each), count + 1, count + 1, len(ways)), dtype=np.int64)
        table[:, stages.begins, stages.ends] = np.stack(each).transpose(0, 2, 1)
        self.loads, self.most = table[:3], table[3]
        self.replicas = np.array([way.replicas for way in ways])
        self.num_devices, self.rounds = problem.num_devices, problem.mini_batch // ways[0].microbatch_size - 1
        shape = (count + 1, problem.num_devices)
        self.values, self.lengths = np.full(shape, UNLIMITED + 1), np.zeros(shape, dtype=np.int64)
        self.pipelines = np.zeros((len(_NO_STAGES), *shape), dtype=np.int64)
        self.firsts = np.zeros((3, *shape), dtype=np.int64)
        self.values[count, 0], self.pipelines[:, count, 0] = 0, _NO_STAGES

    def best(self) -> tuple[int, list[tuple[int, int, int]]]:
        """The least latency of the plans looked at that fit, and the (begin, end, way) of its stages."""
        best, found = UNLIMITED, []
        for end in range(len(self.values) - 1, 0, -1):
            for used in checked(map(int, np.flatnonzero(self.values[end] <= UNLIMITED)), 1):
                value, way = self._whole(end, used)
                if value < best:
                    best, found = value, [(0, end, way), *self._traced(end, used)]
                self._extend(end, used)
        return best, found

    def _whole(self, end: int, used: int) -> tuple[int, int]:
        """(latency, way) of the best first stage of all blocks before ``end`` on the devices that are left."""
        pipelines = _with_first(self.loads[:, 0, end], self.pipelines[:, end, used, None], self.rounds)
        fits = self._fit(0, end, used) & (self.replicas <= self.num_devices - used)
        values = np.where(fits, _latency(pipelines, self.rounds), UNLIMITED)
        way = int(values.argmin())
        return int(values[way]), way

    def _extend(self, end: int, used: int) -> None:
        """Cut one more stage off before ``end``, in every way that leaves a block and a device for the first."""
        longer = _with_first(self.loads[:, 1:end, end], self.pipelines[:, end, used, None, None], self.rounds)
        whole = _with_first(self.loads[:, 0, 1:end, None], longer[..., None], self.rounds)
        left = self.num_devices - used - self.replicas
        values = np.where(self.replicas <= left[:, None], _latency(whole, self.rounds), UNLIMITED).min(axis=-1)
        values = np.where(self._fit(slice(1, end), end, used), values, UNLIMITED + 1)
        for way in np.flatnonzero(left > 0):
            taken = used + self.replicas[way]
            (better,) = np.nonzero(values[:, way] < self.values[1:end, taken])
            kept = better + 1, taken
            self.values[kept], self.lengths[kept] = values[better, way], self.lengths[end, used] + 1
            self.pipelines[:, *kept] = longer[:, better, way]
            self.firsts[:, *kept] = np.array([end, used, way])[:, None]

    def _fit(self, begins: int | slice, end: int, used: int) -> Mask:
        """[..., way] whether a stage fits before those that are kept; no more than all micro-batches are in flight."""
        fits: Mask = self.most[begins, end] >= min(self.rounds + 1, self.lengths[end, used] + 1)
        return fits

    def _traced(self, end: int, used: int) -> Iterator[tuple[int, int, int]]:
        """The (begin, end, way) of the stages that are kept."""
        while end < len(self.values) - 1:
            begin, (end, used, way) = end, map(int, self.firsts[:, end, used])
            yield begin, end, way


def dapple(problem: PartitionProblem) -> Iterator[Partition]:
    """Cut stages off the end, one after another, each time judged with all blocks before as one stage; for each size.

    As published: per (first block of what is cut off, devices it takes) only the best is kept, so the result is not
    always the least latency of all plans; for at most two stages it is.

    Raises:
        NoPartitionError: no plan that was looked at fits into memory.
    """
    order = problem.order

    def planned(problem: PartitionProblem, ways: Sequence[Way]) -> Partition | None:
        value, parts = _DappleSearch(problem, ways, order).best()
        if value >= UNLIMITED:
            return None
        stages = [(order[begin:end], ways[way]) for begin, end, way in parts]
        return Partition(problem.placed(stages), value)

    return for_each_size(problem, planned, "no plan that DAPPLE's planner looks at fits")


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
