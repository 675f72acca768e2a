"""PipeDream's planner (Narayanan et al. 2019, 3.1): contiguous stages with replicas, the slowest as fast as can be.

A machine has *levels*: m_k components of level k - 1, joined by links of level k, make one of level k. For blocks
i..j-1 on m components of level k the programme has

    A_k(i, j, m) = least over cuts s and m' < m of max(A_k(i, s, m - m'), message at s, T_k(s, j, m'))
    T_k(i, j, m) = max(A_{k-1}(i, j, all components of one of level k), sum of gradients over m components)

and A_0 is the compute of one device. A message is what passes the cut and the gradients that come back, over links of
level k; sums and messages run beside compute, so that the longest of all bounds the pace. Times are those of a
mini-batch, all of whose micro-batches pass before gradients are summed: the paper sums them after each.

Replicas share every micro-batch, where the paper has them take turns; that of m components is the m-th part of it, and
has the profile's costs for so many samples. As the paper's optimizer may (``use_fewer_machines``), stages leave devices
idle where no number of replicas divides the micro-batch.

Memory is not in the paper. Of one level it is that of 1F1B for the number of stages that follow, which the programme
then counts as well. Of several levels every device that follows counts as a stage, as in the paper's optimizer
(``use_memory_constraint``), where there are blocks for it: that never takes too little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED
from pipeplan.files import Placement
from pipeplan.partition.baselines import StageTable, for_each_size, least_bottleneck, require_few_blocks
from pipeplan.partition.chain.costs import Array, ChainCosts
from pipeplan.partition.links import CountedLinks
from pipeplan.partition.problem import Partition, PartitionProblem, Way
from pipeplan.time_limit import checked

Devices = tuple[int, ...]


def pipedream(problem: PartitionProblem, *, beside: bool = True) -> Iterator[Partition]:
    """For each size, the contiguous partition with the fastest slowest stage on at most the available devices.

    Gradients are summed ``beside`` compute, as in the paper, or after it: then a stage takes both, as it does where a
    mini-batch ends before the next begins.

    Raises:
        NoPartitionError: no partition fits into memory.
        TooLargeError: the blocks are too many.
    """
    require_few_blocks(problem, "PipeDream")
    order, links, join = problem.order, problem.links, _longer if beside else _both
    levels = links.levels(problem.num_devices) if links else [problem.num_devices]

    def planned(problem: PartitionProblem, ways: Sequence[Way]) -> Partition | None:
        if links is None or len(levels) == 1:
            return _on_one_level(problem, ways, order, join)
        return _LevelProgramme(problem, ways, order, links, levels, join).partition()

    return for_each_size(problem, planned, f"no split of {len(order)} blocks into stages in a line fits")


def _longer(computing: Array, summing: Array) -> Array:
    found: Array = np.maximum(computing, summing)
    return found


def _both(computing: Array, summing: Array) -> Array:
    found: Array = np.minimum(computing + summing, UNLIMITED)
    return found


def _on_one_level(
    problem: PartitionProblem, ways: Sequence[Way], order: Sequence[str], join: Callable[[Array, Array], Array]
) -> Partition | None:
    stages, size = StageTable.of_chain(problem, ways, order), ways[0].microbatch_size
    count = problem.mini_batch // size
    times = join(stages.times - stages.waits, stages.waits)
    if problem.links is not None:
        times = np.maximum(times, count * _messages(problem.links, order, size, 1)[stages.begins])
    found = least_bottleneck(problem, replace(stages, times=times))
    if found is None:
        return None
    placed = problem.placed([(order[begin:end], way) for begin, end, way in found[1]])
    return Partition(placed, found[0], optimal=True)


def _messages(links: CountedLinks, order: Sequence[str], samples: int, apart: int) -> Array:
    """[cut] ns of what passes it both ways between neighbours among components of ``apart`` devices."""
    forth, back = links.passing(order, samples)
    found: Array = links.between(0, apart, forth[0]) + links.between(0, apart, back[0])
    return found


class _Where(NamedTuple):
    """One component of a level, of which there are ``replicas`` that do the same; ``later`` devices follow it."""

    level: int
    replicas: int
    later: int


class _Replicated(NamedTuple):
    begin: int
    end: int
    way: Way
    devices: Devices


@dataclass
class _LevelProgramme:
    """The programme over several levels of links, for one micro-batch size.

    ``levels`` are the devices in a component of each level. Values [begin, end] are ns of the mini-batch, ``UNLIMITED``
    where nothing fits.
    """

    problem: PartitionProblem
    ways: Sequence[Way]
    order: Sequence[str]
    links: CountedLinks
    levels: Sequence[int]
    join: Callable[[Array, Array], Array]

    def __post_init__(self) -> None:
        self.sums: ChainCosts = self.problem.chain(self.order)
        self.size = self.ways[0].microbatch_size
        self.count = self.problem.mini_batch // self.size
        self.begins, self.ends = np.triu_indices(len(self.order) + 1, 1)
        self.gradients = self.sums.gradients(self.begins, self.ends)[0]
        self.tables: dict[_Where, Array] = {}
        self.waits: dict[tuple[int, int], Array] = {}
        self.passed: dict[tuple[int, int], Array] = {}
        self.replicas = sorted({way.replicas for way in self.ways})

    def partition(self) -> Partition | None:
        top = _Where(len(self.levels), 1, 0)
        value = int(self._table(top)[-1, 0, len(self.order)])
        if value >= UNLIMITED:
            return None
        stages = self._traced(top, self._components(len(self.levels)), 0, len(self.order), (0,))
        placed = tuple(
            each.way.placed(self.order[each.begin : each.end], 0).model_copy(update={"devices": each.devices})
            for each in stages
        )
        whole = Placement(strategy="stage graph", num_devices=self.problem.num_devices, stages=placed)
        return Partition(whole, value, optimal=self.problem.memory_bytes is None)

    def _below(self, level: int) -> int:
        """Devices in one of the components that make one of a level."""
        return self.levels[level - 2] if level > 1 else 1

    def _components(self, level: int) -> int:
        return self.levels[level - 1] // self._below(level)

    def _grid(self, values: Array) -> Array:
        found = np.full((len(self.order) + 1,) * 2, UNLIMITED)
        found[self.begins, self.ends] = values
        return found

    def _fits(self, way: Way, later: int) -> NDArray[np.bool_]:
        limit = self.problem.memory_bytes
        if limit is None:
            return np.ones(len(self.begins), dtype=np.bool_)
        most = self.sums.most_in_flight(self.begins, self.ends, limit)[way.row]
        fits: NDArray[np.bool_] = most >= np.minimum(self.count, 1 + np.minimum(later, len(self.order) - self.ends))
        return fits

    def _of_device(self, where: _Where) -> tuple[Array, list[Way]]:
        """A_0 of a device that is one of so many replicas, and the ways that can run there."""
        ways = [way for way in self.ways if way.replicas == where.replicas]
        times = self.sums.time(self.begins, self.ends)
        of_ways = [np.where(self._fits(way, where.later), self.count * times[way.row], UNLIMITED) for way in ways]
        return np.stack(of_ways or [np.full(len(self.begins), UNLIMITED)]), ways

    def _table(self, where: _Where) -> Array:
        """A_k [components, begin, end] of one component of a level, on at most so many below it; of none nothing."""
        if where not in self.tables:
            self.tables[where] = self._filled(where)
        return self.tables[where]

    def _filled(self, where: _Where) -> Array:
        if where.level == 0:
            return self._grid(self._of_device(where)[0].min(axis=0))[None]
        last, sent = len(self.order), self._sent(where)
        found = [np.full((last + 1, last + 1), UNLIMITED)]
        for most in checked(range(1, self._components(where.level) + 1), 1):
            best = np.minimum(found[-1], self._single(where, most, 0))
            for first in filter(partial(self._possible, where), range(1, most)):
                begun = self._single(where, first, most - first)
                for cut in checked(range(1, last), 64):
                    head = np.maximum(begun[:cut, cut], sent[cut])
                    both = np.maximum(head[:, None], found[most - first][cut, cut + 1 :])
                    np.minimum(best[:cut, cut + 1 :], both, out=best[:cut, cut + 1 :])
            found.append(best)
        return np.stack(found)

    def _inside(self, where: _Where, components: int, after: int) -> _Where:
        """Each of the components of a stage that has ``after`` of them following it."""
        later = where.later + after * self._below(where.level) if self.problem.memory_bytes is not None else 0
        return _Where(where.level - 1, where.replicas * components, later)

    def _single(self, where: _Where, components: int, after: int) -> Array:
        """T_k [begin, end] of a single stage on so many components."""
        if not self._possible(where, components):
            return np.full((len(self.order) + 1,) * 2, UNLIMITED)
        inside = self._table(self._inside(where, components, after))[-1]
        return self.join(inside, self._summed(where.level, components))

    def _possible(self, where: _Where, components: int) -> bool:
        """Whether stages can have replicas on so many components each."""
        return any(count % (where.replicas * components) == 0 for count in self.replicas)

    def _summed(self, level: int, components: int) -> Array:
        """[begin, end] ns of summing gradients over components of a level, and of what else follows the actions."""
        if (level, components) not in self.waits:
            devices = tuple(range(0, components * self._below(level), self._below(level)))
            sizes, places = np.unique(self.gradients, return_inverse=True)
            times = np.array([self.links.after(size, devices) for size in sizes.tolist()], dtype=np.int64)
            self.waits[level, components] = self._grid(times[places])
        return self.waits[level, components]

    def _sent(self, where: _Where) -> Array:
        """[cut] ns of the messages between components below a level."""
        key = where.level, where.replicas
        if key not in self.passed:
            samples = -(-self.size // where.replicas)
            self.passed[key] = self.count * _messages(self.links, self.order, samples, self._below(where.level))
        return self.passed[key]

    def _traced(self, where: _Where, most: int, begin: int, end: int, firsts: Devices) -> list[_Replicated]:
        """The stages that the value of these blocks is of, on components whose replicas have these first devices."""
        if where.level == 0:
            times, ways = self._of_device(where)
            way = int(np.argmin([self._grid(each)[begin, end] for each in times]))
            return [_Replicated(begin, end, ways[way], firsts)]
        table, below = self._table(where), self._below(where.level)
        while most > 1 and table[most - 1, begin, end] == table[most, begin, end]:
            most -= 1
        value = table[most, begin, end]

        def within(components: int, after: int, end: int) -> list[_Replicated]:
            own = tuple(first + below * number for first in firsts for number in range(components))
            inside = self._inside(where, components, after)
            return self._traced(inside, len(self._table(inside)) - 1, begin, end, own)

        if self._single(where, most, 0)[begin, end] == value:
            return within(most, 0, end)
        sent = self._sent(where)
        for first in range(1, most):
            cuts = np.arange(begin + 1, end)
            heads = np.maximum(self._single(where, first, most - first)[begin, cuts], sent[cuts])
            (equal,) = np.nonzero(np.maximum(heads, table[most - first][cuts, end]) == value)
            if len(equal):
                cut = int(cuts[equal[0]])
                rest = tuple(device + below * first for device in firsts)
                return [*within(first, most - first, cut), *self._traced(where, most - first, cut, end, rest)]
        raise AssertionError("the value is that of some stages")
