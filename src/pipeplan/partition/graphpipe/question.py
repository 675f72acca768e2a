"""Can all stages take at most so long? Answered with the fewest devices, for parts from the last to the first.

What stages need of those before them is kept as a :class:`Need`. With 1F1B a stage x before stages y has, by
Table 3.2, ``max over y of max(i_y + b_y, i_y - b_y + 2 b_x)`` samples in flight, so all that counts of the stages y
are the largest ``i + b`` and the largest ``i - b``. Of a part only those solutions are kept that no other beats in
devices and both numbers, so that work does not grow with the number of devices.

Three facts keep the tables small and lose nothing:

- A run of blocks before given stages, with a given choice, is made as long as time and memory let it: a solution
  with a shorter one stays one when the run takes over what it left, since leaving out blocks never costs more.
- Devices of a part do at least its least work (:meth:`Problem.work`). What they could do beyond that in the given
  time is waste; a part cannot waste more than all devices together may.
- Parts of one shape before the same need have the same solutions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeplan.partition.graphpipe.problem import Choice, Load, Problem
from pipeplan.partition.graphpipe.shapes import Group, Shape, Shapes

__all__ = ["Entry", "Need", "Question", "Solution"]


class Need(NamedTuple):
    """The largest ``in flight + micro-batch size`` and ``in flight - micro-batch size`` of stages, in samples."""

    total: int
    difference: int

    def in_flight(self, microbatch_size: int, mini_batch: int) -> int:
        """Samples in flight of a stage before those stages."""
        needed = max(microbatch_size, self.total, self.difference + 2 * microbatch_size)
        return min(mini_batch, needed)


class Entry(NamedTuple):
    """A stage of children begin..end-1 of a series, or of a group of branches; or, without a choice, parts inside."""

    begin: int
    end: int
    group: Group
    choice: Choice | None
    inside: Trace | None


class Trace(NamedTuple):
    """Entries, the last added first."""

    entry: Entry
    rest: Trace | None


class Solution(NamedTuple):
    """Devices that a part takes, what it needs of the stages before it, and how."""

    devices: int
    need: Need
    trace: Trace | None


@dataclass(slots=True)
class Question:
    """Whether stages can be found that take at most ``most_ns`` for the mini-batch, in the memory there is.

    Without ``with_flow`` samples in flight are not looked at, nor is memory: fewer solutions have to be kept.
    """

    shapes: Shapes
    most_ns: int
    num_devices: int
    with_flow: bool
    _problem: Problem = field(init=False)
    _waste: int = field(init=False)
    _solved: dict[tuple[int, Need], list[Solution]] = field(init=False, default_factory=dict)
    _reaches: dict[tuple[int, int], list[tuple[Choice, int]]] = field(init=False, default_factory=dict)
    _grouped: dict[Group, list[Choice]] = field(init=False, default_factory=dict)
    _loads: dict[Group, tuple[Load, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._problem = self.shapes.problem
        self._waste = self.num_devices * self.most_ns - self.shapes[self.shapes.root].work

    def answer(self) -> Solution | None:
        """Of all solutions one with the fewest samples in flight, then the fewest devices."""
        return min(self.solutions(), key=lambda each: (each.need.total, each.devices), default=None)

    def solutions(self) -> list[Solution]:
        """Those that no other beats in devices and samples in flight."""
        if self._waste < 0:
            return []
        return self._series(self.shapes[self.shapes.root], Need(0, -4 * self._problem.mini_batch))

    def _series(self, shape: Shape, after: Need) -> list[Solution]:
        """Solutions of a series (or block) before what needs ``after``."""
        key = (shape.number, after)
        if key not in self._solved:
            fronts: list[list[Solution]] = [[] for _ in range(len(shape.children) + 1)]
            fronts[-1] = [Solution(0, after, None)]
            for end in range(len(shape.children), 0, -1):
                fronts[end] = _best(fronts[end])
                for solution in fronts[end]:
                    for begin, more in self._extended(shape, end, solution):
                        if self._viable(more.devices, shape.works[-1] - shape.works[begin]):
                            fronts[begin].append(more)
            self._solved[key] = _best(fronts[0])
        return self._solved[key]

    def _extended(self, shape: Shape, end: int, after: Solution) -> Iterator[tuple[int, Solution]]:
        """(first child, solution) with a run that ends before ``end``, or with the parts of the child there."""
        for choice, begin in self._reach(shape, end):
            first = self._fitting(shape, begin, end, choice, after.need)
            if first < end:
                trace = Trace(Entry(first, end, (), choice, None), after.trace)
                yield first, Solution(after.devices + choice.replicas, self._needed(choice, after.need), trace)
        child = self.shapes[shape.children[end - 1]]
        if child.kind == "parallel":
            for inside in self._parallel(child, after.need):
                trace = Trace(Entry(end - 1, end, (), None, inside.trace), after.trace)
                yield end - 1, Solution(after.devices + inside.devices, inside.need, trace)

    def _reach(self, shape: Shape, end: int) -> list[tuple[Choice, int]]:
        """(choice, first child) of the longest runs before ``end`` that are quick enough."""
        key = (shape.number, end)
        if key not in self._reaches:
            found = []
            for choice in self._problem.choices:
                begin = self._earliest(shape, end, choice)
                if begin < end and self._viable(choice.replicas, shape.works[end] - shape.works[begin]):
                    found.append((choice, begin))
            self._reaches[key] = found if self.with_flow else _furthest(found)
        return self._reaches[key]

    def _earliest(self, shape: Shape, end: int, choice: Choice) -> int:
        """First child of the longest run that is quick enough."""
        if self._problem.all_reduce_is_free(choice):
            times = shape.times[choice.row]
            room = self.most_ns // (self._problem.mini_batch // choice.microbatch_size)
            return bisect_left(times, times[end] - room, 0, end)
        return bisect_left(
            range(end),
            True,
            key=lambda begin: shape.time(self._problem, begin, end, choice) <= self.most_ns,
        )

    def _fitting(self, shape: Shape, begin: int, end: int, choice: Choice, after: Need) -> int:
        """First child of the longest run from ``begin`` on that fits in memory."""
        limit = self._problem.memory_bytes
        if limit is None or not self.with_flow:
            return begin
        held = after.in_flight(choice.microbatch_size, self._problem.mini_batch)
        if shape.memory(begin, end, choice, held) <= limit:
            return begin
        return bisect_left(
            range(end), True, begin, end, key=lambda first: shape.memory(first, end, choice, held) <= limit
        )

    def _parallel(self, shape: Shape, after: Need) -> list[Solution]:
        """Solutions of parallel branches: every group of them one stage, or a branch by itself with its own stages."""
        key = (shape.number, after)
        if key not in self._solved:
            nothing = self.shapes.nothing_left(shape.number)
            works = {nothing: 0}
            fronts = {nothing: [Solution(0, Need(0, -4 * self._problem.mini_batch), None)]}
            for left, groups in self.shapes.splits(shape.number):
                works[left] = works[groups[0][0]] + self._load(groups[0][1])[1]
                fronts[left] = _best(
                    more
                    for rest, group in groups
                    for taken in self._taken(group, after)
                    for more in _together(fronts[rest], taken)
                    if self._viable(more.devices, works[left])
                )
            self._solved[key] = fronts[left]
        return self._solved[key]

    def _taken(self, group: Group, after: Need) -> Iterator[Solution]:
        """Solutions of a group of branches, as one entry each."""
        if len(group) == 1:
            for inside in self._series(self.shapes[group[0]], after):
                yield inside._replace(trace=Trace(Entry(0, 0, group, None, inside.trace), None))
            return
        load, limit = self._load(group)[0], self._problem.memory_bytes
        for choice in self._quick(group):
            held = after.in_flight(choice.microbatch_size, self._problem.mini_batch)
            if limit is None or not self.with_flow or self._problem.memory_of(load, choice, held) <= limit:
                trace = Trace(Entry(0, 0, group, choice, None), None)
                yield Solution(choice.replicas, self._needed(choice, after), trace)

    def _load(self, group: Group) -> tuple[Load, int]:
        if group not in self._loads:
            self._loads[group] = self.shapes.load(group), self.shapes.work(group)
        return self._loads[group]

    def _quick(self, group: Group) -> list[Choice]:
        """Choices under which a group of branches is quick enough as one stage."""
        if group not in self._grouped:
            load, work = self._load(group)
            self._grouped[group] = [
                choice
                for choice in self._problem.choices
                if self._viable(choice.replicas, work) and self._problem.time_of(load, choice) <= self.most_ns
            ]
        return self._grouped[group]

    def _needed(self, choice: Choice, after: Need) -> Need:
        """What a stage needs of those before it."""
        if not self.with_flow:
            return after
        held = after.in_flight(choice.microbatch_size, self._problem.mini_batch)
        return Need(held + choice.microbatch_size, held - choice.microbatch_size)

    def _viable(self, devices: int, work: int) -> bool:
        """Whether the other devices could do all other work."""
        return devices <= self.num_devices and devices * self.most_ns - work <= self._waste


def _together(rest: Iterable[Solution], taken: Solution) -> Iterator[Solution]:
    """A group of branches beside others."""
    assert taken.trace is not None
    for other in rest:
        need = Need(max(other.need.total, taken.need.total), max(other.need.difference, taken.need.difference))
        yield Solution(other.devices + taken.devices, need, Trace(taken.trace.entry, other.trace))


def _best(solutions: Iterable[Solution]) -> list[Solution]:
    """Those that no other beats in devices and both needs; of equals one."""
    kept: list[Solution] = []
    for solution in sorted(solutions, key=lambda each: each[:2]):
        total, difference = solution.need
        if not any(each.need.total <= total and each.need.difference <= difference for each in kept):
            kept.append(solution)
    return kept


def _furthest(found: Iterable[tuple[Choice, int]]) -> list[tuple[Choice, int]]:
    """Where only devices count: of runs with as many replicas or fewer, those that reach further."""
    kept: list[tuple[Choice, int]] = []
    for choice, begin in sorted(found, key=lambda each: (each[0].replicas, each[1])):
        if not kept or begin < kept[-1][1]:
            kept.append((choice, begin))
    return kept
