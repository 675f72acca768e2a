"""Piper's planner (Tarnawski et al. 2021): stages between downsets, with degrees of data and tensor parallelism.

A downset has with every block all blocks before it. A partition is a chain of downsets, each stage the difference of
two: so stages are convex, but need not be contiguous in any given order. A stage of blocks S on d replicas of t devices
each has, for the mini-batch, the load

    compute of S, with what is computed again + messages over all edges that leave or enter S + sum of its gradients

of which the largest is least: computing and communicating take turns (section 3 there). A message is the tensor and its
gradient, of the samples of one replica, over the bandwidth between devices that are far from each other: the paper has
one bandwidth. Edges count one by one, and no latency does. Blocks split over t devices have costs that contain their
own messages.

Which blocks of a stage compute again is the paper's heuristic for its knapsack: those with the least more time for each
byte less come first, until the stage fits. Memory is that of 1F1B: what is kept of a micro-batch, once more for every
stage that follows. Here replicas share each micro-batch, where the paper has them take turns; so a stage holds as many
micro-batches as stages follow, and one, but only its samples of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED
from pipeplan.costs.messages import edge_bytes
from pipeplan.errors import TooLargeError
from pipeplan.partition.baselines import StageTable, for_each_size, least_bottleneck
from pipeplan.partition.chain.costs import Array, ChainCosts, Place
from pipeplan.partition.problem import Partition, PartitionProblem, Way
from pipeplan.search_constants import MAX_DOWNSETS
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Again, Recompute, recompute_of

Mask = NDArray[np.bool_]


def piper(
    problem: PartitionProblem, max_downsets: int = MAX_DOWNSETS, split: Sequence[PartitionProblem] = ()
) -> Iterator[Partition]:
    """The chain of downsets whose largest load is least, on at most the devices there are, for each size.

    ``split`` are the same problem where each block is split: their rows say over how many devices, and each of their
    devices stands for so many.

    Raises:
        TooLargeError: the graph has more downsets than ``max_downsets``.
        NoPartitionError: no partition fits into memory.
    """
    order, cuts = problem.order, downsets(problem, max_downsets)
    nested = _nested(cuts)
    whole = replace(problem, num_devices=problem.num_devices * problem.rows[0].shards)

    def planned(whole: PartitionProblem, ways: Sequence[Way]) -> Partition | None:
        size = ways[0].microbatch_size
        problems = [replace(each, memory_bytes=whole.memory_bytes) for each in (problem, *split)]
        table = _DownsetTable.between(problems, size, order, cuts, nested)
        found = least_bottleneck(whole, table)
        if found is None:
            return None
        stages, count = [], len(found[1])
        for place, (begin, end, way) in enumerate(found[1]):
            inside, number = np.flatnonzero(cuts[end] & ~cuts[begin]).tolist(), int(table.number[begin, end])
            again = table.again(way, number, inside, min(whole.mini_batch // size, count - place))
            stages.append(([order[block] for block in inside], way._replace(recompute=again)))
        return Partition(whole.placed(stages), found[0])

    return for_each_size(whole, planned, f"no partition of {len(order)} blocks along downsets fits")


def downsets(problem: PartitionProblem, most: int = MAX_DOWNSETS) -> Mask:
    """[downset, block] all downsets of the graph, by size; those of equal size in a fixed order.

    Raises:
        TooLargeError: there are more than ``most``.
    """
    order, count = problem.order, len(problem.costs)
    place = {block: index for index, block in enumerate(order)}
    before = [0] * count
    for source, target in problem.edges:
        before[place[target]] |= 1 << place[source]
    layer, found = {0}, [0]
    for _ in range(count if count < most else 0):  # each layer has one at least
        layer = {
            downset | 1 << block
            for downset in checked(layer, 16)
            for block in range(count)
            if not downset >> block & 1 and before[block] & ~downset == 0
        }
        found += sorted(layer)
        if len(found) > most:
            break
    if len(found) > most or count >= most:
        raise TooLargeError(
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


@dataclass(frozen=True, slots=True)
class _PartlyAgain:
    """Stages of which some blocks compute ``again`` what the others keep, in place of keeping all of it.

    ``ranks`` are blocks in the order in which they are taken; ``freed`` and ``more`` [cut, rank] the bytes of a
    micro-batch and the ns that those before a rank bring and cost. ``left`` [stage] are the bytes beside state and the
    larger workspace of both ways, ``held`` those of a micro-batch of which everything is kept.
    """

    again: Again
    ranks: Array
    freed: Array
    more: Array
    left: Array
    held: Array

    @classmethod
    def of(
        cls, chain: ChainCosts, sums: _NestedCosts, rows: tuple[int, int], again: Again, room: Array, held: Array
    ) -> _PartlyAgain:
        """Between two rows, with ``room`` [row, stage] beside state and workspace, and ``held`` [row, stage]."""
        plain, other = rows
        freed, more = (np.diff(each[plain]) - np.diff(each[other]) for each in (chain.activations, chain.compute))
        able = np.flatnonzero(freed > 0)
        ranks = able[np.argsort(-more[able] / freed[able], kind="stable")]

        def before(values: Array) -> Array:
            inside = sums.members[:, ranks] * values[ranks]
            return np.concatenate([np.zeros((len(inside), 1), dtype=np.int64), np.cumsum(inside, axis=1)], axis=1)

        left = np.minimum(room[plain], room[other])
        return cls(again, ranks, before(freed), before(-more), left, held[plain])

    def taken(self, begins: Array, ends: Array, stages: Array, in_flight: int) -> Array:
        """[stage] the fewest ranks with which each of some stages fits; one more than there are if none do."""
        left, held, begins, ends = self.left[stages], self.held[stages], begins[stages], ends[stages]
        low, high = np.zeros(len(stages), dtype=np.int64), np.full(len(stages), len(self.ranks) + 1)
        for _ in range((len(self.ranks) + 1).bit_length()):
            middle = (low + high) // 2
            within = np.minimum(middle, len(self.ranks))
            fits = in_flight * (held - self.freed[ends, within] + self.freed[begins, within]) <= left
            low, high = np.where(fits, low, np.minimum(middle + 1, high)), np.where(fits, middle, high)
        return low


@dataclass(frozen=True, slots=True)
class _DownsetTable(StageTable):
    """Every stage between two downsets, on any devices; ``choices`` [way] are those of ways that keep everything."""

    choices: Sequence[_PartlyAgain | None] = field(kw_only=True)

    @classmethod
    def between(
        cls,
        problems: Sequence[PartitionProblem],
        size: int,
        order: Sequence[str],
        cuts: Mask,
        ends: tuple[Array, Array],
    ) -> _DownsetTable:
        """Those of micro-batches of a size, in the ways of all of these problems."""
        ways, times, waits, most = list[Way](), list[Array](), list[Array](), list[Array]()
        choices = list[_PartlyAgain | None]()
        number = np.full((len(cuts), len(cuts)), -1)
        number[ends] = np.arange(len(ends[0]))
        for problem in problems:
            chain = problem.chain(order)
            sums = _NestedCosts.over(chain, cuts)
            for way, again in _paired([way for way in problem.ways if way.microbatch_size == size]):
                own = StageTable.of(problem, [way], sums, *ends)
                shards = problem.rows[way.row].shards
                messages = _messages(problem, way, order, cuts, shards)
                ways.append(way._replace(shards=shards))
                times.append(own.times[0] + problem.mini_batch // size * messages[ends])
                waits.append(own.waits[0])
                most.append(own.most[0])
                choices.append(None)
                if again is not None and (limit := problem.memory_bytes) is not None:
                    room, held = limit - sums.statics(*ends) - sums.workspace(*ends), sums.activation(*ends)
                    choices[-1] = _PartlyAgain.of(chain, sums, (way.row, again.row), _alike(again), room, held)
        return cls(tuple(ways), *ends, np.stack(times), np.stack(waits), np.stack(most), number, choices=choices)

    def within(self, num_microbatches: int, later: int) -> Array:
        """As for any stages, where those that do not fit compute some of their blocks again."""
        times, in_flight = StageTable.within(self, num_microbatches, later), min(num_microbatches, later + 1)
        for place, choice in enumerate(self.choices):
            (open_,) = np.nonzero(times[place] >= UNLIMITED)
            if choice is not None and len(open_):
                more = self._more(choice, open_, in_flight)
                longer = self.times[place, open_] + num_microbatches * np.maximum(more, 0)
                times[place, open_] = np.where(more >= 0, longer, UNLIMITED)
        return times

    def _more(self, choice: _PartlyAgain, stages: Array, in_flight: int) -> Array:
        """[stage] ns of a micro-batch that some stages take more, so that they fit; -1 where they do not."""
        taken = choice.taken(self.begins, self.ends, stages, in_flight)
        last = np.minimum(taken, len(choice.ranks))
        more = choice.more[self.ends[stages], last] - choice.more[self.begins[stages], last]
        return np.where(taken <= len(choice.ranks), more, -1)

    def again(self, way: Way, stage: int, inside: Sequence[int], in_flight: int) -> Recompute:
        """What each of the blocks ``inside`` a stage computes again, in the quickest of the choices of a way."""
        best, found = UNLIMITED, way.recompute
        for place, choice in enumerate(self.choices):
            if self.ways[place] != way:
                continue
            if self.most[place, stage] >= in_flight or choice is None:
                return way.recompute
            more = int(self._more(choice, np.array([stage]), in_flight)[0])
            if 0 <= more < best:
                taken = int(choice.taken(self.begins, self.ends, np.array([stage]), in_flight)[0])
                chosen = set(choice.ranks[:taken].tolist())
                best = more
                found = recompute_of([choice.again if block in chosen else _alike(way) for block in inside])
        return found


def _paired(ways: Sequence[Way]) -> list[tuple[Way, Way | None]]:
    """Ways that keep everything, each with those in which it may compute blocks again; else ways as they are."""
    kept = [way for way in ways if not way.recompute]
    paired = [
        (way, [each for each in ways if each.recompute and each.replicas == way.replicas]) for way in kept or ways
    ]
    return [(way, again) for way, others in paired for again in (others if kept and others else [None])]


def _alike(way: Way) -> Again:
    assert not isinstance(way.recompute, tuple)
    return way.recompute


def _messages(problem: PartitionProblem, way: Way, order: Sequence[str], cuts: Mask, shards: int) -> Array:
    """[begin, end] ns of a micro-batch's messages over edges that leave or enter what is between two downsets."""
    links, samples = problem.links, way.microbatch_size // way.replicas
    rate = links.bandwidth(problem.num_devices * shards) if links else None
    if links is None or rate is None:
        return np.zeros((len(cuts), len(cuts)), dtype=np.int64)
    place = {block: index for index, block in enumerate(order)}
    edges = [edge for edge in links.edges if edge.transfer_ns is None]
    sizes = np.array([edge_bytes(edge, samples) * (1 + edge.gradient) for edge in edges], dtype=np.int64)
    made, taken = (
        cuts[:, [place[block] for block in blocks]].astype(np.int64) * sizes
        for blocks in ([edge.source for edge in edges], [edge.target for edge in edges])
    )
    into = made @ cuts[:, [place[edge.target] for edge in edges]].T.astype(np.int64)  # made before, taken up to there
    entering = into - taken.sum(axis=1)[:, None]
    leaving = (made - taken).sum(axis=1) - made.sum(axis=1)[:, None] + into
    found: Array = np.ceil((entering + leaving) * (1e9 / rate)).astype(np.int64)
    return found
