"""Can all stages take at most so long? Answered with the fewest devices, for parts from the last to the first.

What stages need of those before them is kept as a :class:`Need`. With 1F1B a stage x before stages y has, by
Table 3.2, ``max over y of max(i_y + b_y, i_y - b_y + 2 b_x)`` samples in flight, so all that counts of the stages y
are the largest ``i + b`` and the largest ``i - b``. Of a part only those solutions are kept that no other beats in
devices and both numbers, so that work does not grow with the number of devices.

Four facts keep the tables small and lose nothing:

- A run of blocks before given stages, with a given choice, is made as long as time and memory let it: a solution
  with a shorter one stays one when the run takes over what it left, since leaving out blocks never costs more.
- The same holds for a run that takes the end of one of the branches before it: it takes as much as it can.
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
from pipeplan.partition.graphpipe.shapes import Group, Run, Shape, Shapes

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
    """A stage of children begin..end-1 of a series, or of a group of branches; or, without a choice, parts inside.

    A stage of a series with a ``group`` has also the children of that branch of child begin-1 from ``kept`` on;
    ``inside`` are then the stages of what is left of child begin-1.
    """

    begin: int
    end: int
    group: Group
    choice: Choice | None
    inside: Trace | None
    kept: int = 0


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
    _fitted: dict[tuple[int, int, Choice, int], int] = field(init=False, default_factory=dict)
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
        for choice, first, held in self._useful(shape, end, after.need):
            need, devices = self._needed(choice, after.need), after.devices + choice.replicas
            trace = Trace(Entry(first, end, (), choice, None), after.trace)
            yield first, Solution(devices, need, trace)
            if first and self.shapes[shape.children[first - 1]].kind == "parallel":
                yield from self._with_tails(shape, first, end, choice, held, Solution(devices, need, after.trace))
        child = self.shapes[shape.children[end - 1]]
        if child.kind == "parallel":
            for inside in self._parallel(child, after.need):
                trace = Trace(Entry(end - 1, end, (), None, inside.trace), after.trace)
                yield end - 1, Solution(after.devices + inside.devices, inside.need, trace)

    def _useful(self, shape: Shape, end: int, after: Need) -> list[tuple[Choice, int, int]]:
        """(choice, first child, samples in flight) of the longest runs before ``end``.

        Without those that reach no further than one with no more devices and no larger micro-batches; where a run
        ends at parallel parts, how much of a branch it can take as well makes a difference too.
        """
        found: list[tuple[Choice, int, int]] = []
        for choice, begin in self._reach(shape, end):
            size = choice.microbatch_size
            held = after.in_flight(size, self._problem.mini_batch)
            first = self._fitting(shape, begin, end, choice, held)
            tails = first and self.shapes[shape.children[first - 1]].kind == "parallel"
            most = first - 1 if tails else first
            if first < end and not any(other <= most and each[0] <= size for each, other, _ in found):
                found.append((choice, first, held))
        return found

    def _with_tails(
        self, shape: Shape, first: int, end: int, choice: Choice, held: int, stage: Solution
    ) -> Iterator[tuple[int, Solution]]:
        """The run with the end of one of the branches before it as well, and the stages of what is left of those."""
        parallel, run = shape.children[first - 1], shape.run(first, end, choice.row)
        for branch in dict.fromkeys(self.shapes[parallel].children):
            kept = self._kept(run, self.shapes[branch], choice, held)
            if kept == len(self.shapes[branch].children):
                continue
            rest = self.shapes[self.shapes.shortened(parallel, branch, kept)]
            work = shape.works[-1] - shape.works[first - 1] - rest.work
            if self._viable(stage.devices, work):
                for inside in self._parallel(rest, stage.need):
                    trace = Trace(Entry(first, end, (branch,), choice, inside.trace, kept), stage.trace)
                    yield first - 1, Solution(stage.devices + inside.devices, inside.need, trace)

    def _kept(self, run: Run, branch: Shape, choice: Choice, held: int) -> int:
        """Children of a branch that stay out of the stage after it, at the least."""
        count = len(branch.children)
        return bisect_left(
            range(count),
            True,
            key=lambda kept: self._is_good(run.with_tail(branch.run(kept, count, choice.row)), choice, held),
        )

    def _is_good(self, run: Run, choice: Choice, held: int) -> bool:
        """Whether a stage is quick enough and fits."""
        if self._problem.time(run.time, run.parameter_bytes, choice) > self.most_ns:
            return False
        return self._fits(run, choice, held)

    def _fits(self, run: Run, choice: Choice, held: int) -> bool:
        limit = self._problem.memory_bytes
        if limit is None or not self.with_flow:
            return True
        activations = -(-held // choice.microbatch_size) * run.activations
        return run.static_bytes + activations + run.workspace <= limit

    def _reach(self, shape: Shape, end: int) -> list[tuple[Choice, int]]:
        """(choice, first child) of the longest runs before ``end`` that are quick enough."""
        key = (shape.number, end)
        if key not in self._reaches:
            found = []
            for choice in self._problem.choices:
                begin = self._earliest(shape, end, choice)
                work = shape.works[end] - shape.works[begin] + shape.most_branch
                if begin < end and self._viable(choice.replicas, work):
                    found.append((choice, begin))
            found.sort(key=lambda each: (each[0].replicas, each[0].microbatch_size))
            self._reaches[key] = found if self.with_flow else self._furthest(shape, found)
        return self._reaches[key]

    def _furthest(self, shape: Shape, found: Iterable[tuple[Choice, int]]) -> list[tuple[Choice, int]]:
        """Where only devices count: of runs with as many replicas or fewer, those that reach further.

        Where a run ends at parallel parts, how much of a branch it can take as well makes a difference.
        """
        kept: list[tuple[Choice, int]] = []
        for choice, begin in sorted(found, key=lambda each: (each[0].replicas, each[1])):
            tails = begin and self.shapes[shape.children[begin - 1]].kind == "parallel"
            if not kept or begin < kept[-1][1] or (tails and begin == kept[-1][1]):
                kept.append((choice, begin))
        return kept

    def _earliest(self, shape: Shape, end: int, choice: Choice) -> int:
        """First child of the longest run that is quick enough."""
        times, parameters, problem = shape.times[choice.row], shape.parameters, self._problem
        room = self.most_ns // (problem.mini_batch // choice.microbatch_size)
        begin = bisect_left(times, times[end] - room, 0, end)
        if begin == end or problem.all_reduce_is_free(choice):
            return begin

        def is_quick(begin: int) -> bool:
            return problem.time(times[end] - times[begin], parameters[end] - parameters[begin], choice) <= self.most_ns

        return bisect_left(range(end), True, begin, end, key=is_quick)

    def _fitting(self, shape: Shape, begin: int, end: int, choice: Choice, held: int) -> int:
        """First child of the longest run from ``begin`` on that fits in memory."""
        if self._problem.memory_bytes is None or not self.with_flow:
            return begin
        key = (shape.number, end, choice, -(-held // choice.microbatch_size))
        if key not in self._fitted:
            self._fitted[key] = bisect_left(
                range(end),
                True,
                begin,
                end,
                key=lambda first: self._fits(shape.run(first, end, choice.row), choice, held),
            )
        return self._fitted[key]

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
