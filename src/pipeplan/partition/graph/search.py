"""The least time of the busiest device: a binary search over questions, for the graph as it is and put in a line.

A question is whether all stages can take at most a given time. Its solutions are found from the last part to the first:
of a part before stages with some need (:mod:`~pipeplan.partition.graph.in_flight`) only those are kept that no other
beats in devices and need, so that work does not grow with the number of devices. These facts keep the fronts small and
lose nothing:

- A run of blocks before given stages, with a given choice, is made as long as time and memory let it: a solution
  with a shorter one stays one when the run takes over what it left, since leaving out blocks never costs more.
- The same holds for a run that takes the end of one of the branches before it: it takes as much as it can.
- A solution is left out if it takes more devices than are left when everything else takes its fewest
  (:class:`~pipeplan.partition.graph.shapes.PartBounds`).
- Parts of one shape before the same need have the same solutions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from pipeplan.errors import SearchTimeoutError
from pipeplan.partition.graph.in_flight import Integers, Need
from pipeplan.partition.graph.shapes import NEVER, Group, PartBounds, Shape, Shapes
from pipeplan.partition.problem import NoPartitionError, Partition, PartitionProblem, Way, together
from pipeplan.partition.series_parallel import Part, SeriesParallel, decompose, in_line, topological_order
from pipeplan.search_constants import BOTTLENECK_PARTS, BOUNDED_FAR, BOUNDED_PARTS, BOUNDED_WITHIN, CHUNK
from pipeplan.time_limit import checked, checkpoint


class Entry(NamedTuple):
    """A stage of children begin..end-1 of a series, or of a group of branches; or, without a choice, parts inside.

    A stage of a series with a ``group`` has also the children of that branch of child begin-1 from ``kept`` on;
    ``inside`` are then the stages of what is left of child begin-1.
    """

    begin: int
    end: int
    group: Group
    choice: Way | None
    inside: EntryTrace | None
    kept: int = 0


class EntryTrace(NamedTuple):
    """Entries, the last added first."""

    entry: Entry
    rest: EntryTrace | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Solutions before any is left out: devices and needs, and how the one with a number came about."""

    devices: Integers
    totals: Integers
    differences: Integers
    trace: Callable[[int], EntryTrace | None]


@dataclass(frozen=True, slots=True)
class Front:
    """Solutions, by devices: what each takes, what it needs of the stages before it, and how."""

    devices: Integers
    totals: Integers
    differences: Integers
    traces: list[EntryTrace | None]

    @classmethod
    def start(cls, need: Need) -> Front:
        """Nothing, before what needs that."""
        return cls(np.array([0]), np.array([need.total]), np.array([need.difference]), [None])

    @classmethod
    def best(cls, candidates: Iterable[Candidates]) -> Front:
        """Those that no other beats; of equals one."""
        parts = [part for part in candidates if len(part.devices)]
        if not parts:
            return cls(*(np.zeros(0, dtype=np.int64),) * 3, [])
        devices = np.concatenate([part.devices for part in parts])
        totals = np.concatenate([part.totals for part in parts])
        differences = np.concatenate([part.differences for part in parts])
        kept = _unbeaten_fronts(devices, totals, differences)
        starts = np.cumsum([0, *(len(part.devices) for part in parts)])
        owners = np.searchsorted(starts, kept, side="right") - 1
        within = kept - starts[owners]
        traces = [parts[owner].trace(index) for owner, index in zip(owners.tolist(), within.tolist(), strict=True)]
        return cls(devices[kept], totals[kept], differences[kept], traces)

    def need(self, index: int) -> Need:
        """What one of them needs."""
        return Need(int(self.totals[index]), int(self.differences[index]))


def _unbeaten_fronts(devices: Integers, totals: Integers, differences: Integers) -> Integers:
    """Numbers of the solutions that are left, by devices.

    In this order a solution is only beaten by one before it, so chunk after chunk is compared with what is left.
    """
    order = np.lexsort((differences, totals, devices))
    left = np.zeros(0, dtype=np.int64)
    for start in range(0, len(order), CHUNK):
        chunk = order[start : start + CHUNK]
        if len(left):
            chunk = chunk[~_covered(chunk, left, totals, differences).any(axis=1)]
        inside = np.tril(_covered(chunk, chunk, totals, differences), -1)
        left = np.concatenate((left, chunk[~inside.any(axis=1)]))
    return left


def _covered(some: Integers, others: Integers, totals: Integers, differences: Integers) -> np.ndarray:
    """[some, other] whether the other needs no more."""
    no_more = totals[others] <= totals[some][:, None]
    no_more &= differences[others] <= differences[some][:, None]
    return no_more


class Solution(NamedTuple):
    """Devices that all stages take, what the first of them need of stages before, and how."""

    devices: int
    need: Need
    trace: EntryTrace | None


class _Runs(NamedTuple):
    """Longest runs before an end: [solution, choice] the first child, samples in flight, devices and need."""

    first: Integers
    microbatches: Integers
    devices: Integers
    totals: Integers
    differences: Integers


class Feasibility:
    """Whether stages can be found that take at most ``bounds.most_ns`` for the mini-batch, in the memory there is."""

    def __init__(self, bounds: PartBounds, num_devices: int) -> None:
        self._bounds, self._shapes, self._needs = bounds, bounds.shapes, bounds.shapes.needs
        self._slack = num_devices - bounds.fewest()
        self._solved: dict[tuple[int, Need], Front] = {}

    def solutions(self) -> list[Solution]:
        """Those that no other beats in devices and samples in flight."""
        if self._slack < 0:
            return []
        front = self._series(self._shapes.root, self._needs.none)
        return [
            Solution(int(devices), front.need(index), front.traces[index])
            for index, devices in enumerate(front.devices)
        ]

    def answer(self) -> Solution | None:
        """The solution with the fewest samples in flight, then the fewest devices."""
        return min(self.solutions(), key=lambda each: (each.need.total, each.devices), default=None)

    # Series -------------------------------------------------------------------------------------------------------

    def _series(self, number: int, after: Need) -> Front:
        """Solutions of a series (or block, or the beginning of a series) before what needs ``after``."""
        key = (number, after)
        if key not in self._solved:
            whole, count = self._shapes.whole(number)
            shape, most = self._shapes[whole], self._most(self._bounds.of(number), after)
            waiting: list[list[Candidates]] = [[] for _ in range(count + 1)]
            front = Front.start(after)
            for end in range(count, 0, -1):
                checkpoint()
                front = Front.best(waiting[end]) if end < count else front
                waiting[end] = []
                for begin, more in self._extended(shape, end, front, most):
                    waiting[begin].append(more)
            self._solved[key] = Front.best(waiting[0])
        return self._solved[key]

    def _most(self, fewest: Integers, after: Need) -> int:
        """Devices that a part can have when all others take their fewest."""
        return self._slack + int(fewest[self._needs.state(after)])

    def _extended(self, shape: Shape, end: int, after: Front, most: int) -> Iterator[tuple[int, Candidates]]:
        """(first child, solutions) with a run that ends before ``end``, or with the parts of the child there."""
        if not len(after.devices):
            return
        runs = self._runs(shape, end, after)
        yield from self._plain(shape, end, after, runs, most)
        for begin in checked(range(1, end), 64):
            if self._shapes[shape.children[begin - 1]].kind == "parallel":
                for tailed in self._with_tails(shape, begin, end, after, runs, most):
                    yield begin - 1, tailed
        child = self._shapes[shape.children[end - 1]]
        if child.kind == "parallel":
            for inside in self._branching(shape, end, after, most):
                yield end - 1, inside

    def _runs(self, shape: Shape, end: int, after: Front) -> _Runs:
        held = self._needs.in_flight(after.totals, after.differences)
        microbatches = -(-held // self._needs.each)
        first = self._shapes.fitting(shape.number, end, microbatches)
        first = np.maximum(first, self._bounds.reach(shape.number)[end])
        devices = after.devices[:, None] + self._needs.replicas
        return _Runs(first, microbatches, devices, *self._needs.after(held))

    def _plain(self, shape: Shape, end: int, after: Front, runs: _Runs, most: int) -> Iterator[tuple[int, Candidates]]:
        """(first child, solutions) with one more run."""
        fewest = self._bounds.table(shape.number)
        states = self._needs.states(runs.totals, runs.differences)
        least = runs.devices + fewest[np.minimum(runs.first, end - 1), states]
        rows, columns = np.nonzero((runs.first < end) & (least <= most))
        first = runs.first[rows, columns]
        for begin in np.unique(first).tolist():
            here = first == begin
            yield begin, self._taken_runs(begin, end, after, runs, (rows[here], columns[here]))

    def _taken_runs(
        self, begin: int, end: int, after: Front, runs: _Runs, which: tuple[Integers, Integers]
    ) -> Candidates:
        rows, columns = which
        choices = self._shapes.choices

        def trace(index: int) -> EntryTrace:
            return EntryTrace(Entry(begin, end, (), choices[columns[index]], None), after.traces[rows[index]])

        return Candidates(runs.devices[which], runs.totals[which], runs.differences[which], trace)

    def _with_tails(
        self, shape: Shape, begin: int, end: int, after: Front, runs: _Runs, most: int
    ) -> Iterator[Candidates]:
        """Solutions with a run that takes the end of one of the branches before it, and the rest of those."""
        fewest = self._bounds.table(shape.number)[begin - 1]
        found: dict[tuple[int, int, int, Need], tuple[int, EntryTrace | None, int]] = {}
        for row, choice in zip(*(each.tolist() for each in np.nonzero(runs.first == begin)), strict=True):
            need = Need(int(runs.totals[row, choice]), int(runs.differences[row, choice]))
            state, devices = self._needs.state(need), int(runs.devices[row, choice])
            microbatches = int(runs.microbatches[row, choice])
            for branch, kept, rest in self._bounds.tails(shape.number, begin, end, choice, microbatches):
                key = (branch, kept, rest, need)
                if devices + fewest[state] + self._bounds.parallel(rest)[state] > most:
                    continue
                if key not in found or devices < found[key][0]:
                    found[key] = (devices, after.traces[row], choice)
        for (branch, kept, rest, need), (devices, before, choice) in found.items():
            entry = Entry(begin, end, (branch,), self._shapes.choices[choice], None, kept)
            yield self._inside(entry, devices, self._parallel(rest, need), before, fewest, most)

    def _branching(self, shape: Shape, end: int, after: Front, most: int) -> Iterator[Candidates]:
        """Solutions with the parts of the parallel child before ``end``."""
        child, fewest = shape.children[end - 1], self._bounds.table(shape.number)[end - 1]
        together = fewest + self._bounds.parallel(child)
        for index, devices in enumerate(after.devices.tolist()):
            need = after.need(index)
            if devices + together[self._needs.state(need)] <= most:
                entry = Entry(end - 1, end, (), None, None)
                yield self._inside(entry, devices, self._parallel(child, need), after.traces[index], fewest, most)

    def _inside(
        self, entry: Entry, devices: int, inside: Front, before: EntryTrace | None, fewest: Integers, most: int
    ) -> Candidates:
        """Solutions of parallel parts as entries of a series."""
        least = devices + inside.devices + fewest[self._needs.states(inside.totals, inside.differences)]
        which = np.flatnonzero(least <= most)

        def trace(index: int) -> EntryTrace:
            return EntryTrace(entry._replace(inside=inside.traces[which[index]]), before)

        return Candidates(devices + inside.devices[which], inside.totals[which], inside.differences[which], trace)

    # Parallel parts -----------------------------------------------------------------------------------------------

    def _parallel(self, number: int, after: Need) -> Front:
        """Solutions of parallel branches: every group of them one stage, or a branch by itself with its own stages."""
        key = (number, after)
        if key not in self._solved:
            fewest = self._bounds.lefts(number)
            fronts = {self._shapes.nothing_left(number): Front.start(Need(0, -4 * self._needs.mini_batch))}
            for left, groups in self._shapes.splits(number):
                most = self._most(fewest[left], after)
                fronts[left] = Front.best(
                    self._together(fronts[rest], self._group(group, after), group, most)
                    for rest, group in groups
                    if len(group) == 1 or self._bounds.quick(group)
                )
            self._solved[key] = fronts[left]
        return self._solved[key]

    def _group(self, group: Group, after: Need) -> Front:
        """Solutions of a group of branches."""
        if len(group) == 1:
            return self._series(group[0], after)
        quick = self._bounds.quick(group)
        held = self._needs.in_flight(np.array([after.total]), np.array([after.difference]))
        fits = self._bounds.fitting(self._shapes.load(group), quick)
        most = NEVER if fits is None else fits
        kept = np.array(quick, dtype=np.int64)[-(-held // self._needs.each)[0, quick] <= most]
        totals, differences = (each[0, kept] for each in self._needs.after(held))
        choices = self._shapes.choices

        def trace(index: int) -> EntryTrace:
            return EntryTrace(Entry(0, 0, group, choices[kept[index]], None), None)

        return Front.best([Candidates(self._needs.replicas[kept], totals, differences, trace)])

    def _together(self, rest: Front, taken: Front, group: Group, most: int) -> Candidates:
        """A group of branches beside others."""
        devices = rest.devices[:, None] + taken.devices
        rows, columns = np.nonzero(devices <= most)
        totals = np.maximum(rest.totals[rows], taken.totals[columns])
        differences = np.maximum(rest.differences[rows], taken.differences[columns])

        def trace(index: int) -> EntryTrace:
            inside, before = taken.traces[columns[index]], rest.traces[rows[index]]
            if len(group) == 1:
                return EntryTrace(Entry(0, 0, group, None, inside), before)
            assert inside is not None
            return EntryTrace(inside.entry, before)

        return Candidates(devices[rows, columns], *self._needs.largest(totals, differences), trace)


Staged = tuple[tuple[str, ...], Way]
"""Blocks of a stage and how it runs."""


@dataclass(frozen=True, slots=True)
class GraphPartition(Partition):
    """The stages with the least bottleneck, the decomposition they come from, and which candidate had them.

    ``value_ns`` is the time of the busiest device for the mini-batch, and ``series_parallel_ns`` that of the graph as
    it is, None if nothing fits.
    """

    decomposition: SeriesParallel = field(kw_only=True)
    candidate: Literal["series-parallel", "line"] = field(kw_only=True)
    series_parallel_ns: int | None = field(kw_only=True)


def graphpipe(problem: PartitionProblem, *, tolerance: float = 0.0, lines: bool = True) -> Iterator[GraphPartition]:
    """Stages with the least time of the busiest device, of all that the decomposition and the lines can reach.

    The lines are the blocks in the order they were given in (as far as edges let them) and in the order of the
    decomposition; without ``lines`` only the decomposition is searched, as in the paper's Algorithm 2. Of equal
    partitions those of the decomposition are taken, with few samples in flight, then few
    devices. With a ``tolerance`` the result is at most that share above the optimum. There is one such
    partition.

    Raises:
        NoPartitionError: nothing fits.
    """
    weights = {block: problem.work(costs) for block, costs in problem.costs.items()}
    found = decompose(tuple(problem.costs), problem.edges, weights)
    best: tuple[int, list[Staged]] | None = None
    series_parallel: int | None = None
    for tree in _candidates(problem, found.tree) if lines else [found.tree]:
        better = _least(Shapes(problem, tree), None if best is None else best[0], tolerance)
        if tree is found.tree and better is not None:
            series_parallel = better[0]
        best = better or best
    if best is None:
        raise NoPartitionError(
            "no partition fits", problem, lambda memory: _fits(replace(problem, memory_bytes=memory), found.tree)
        )
    yield GraphPartition(
        problem.placed(best[1], sized=True),
        best[0],
        optimal=not tolerance,
        decomposition=found,
        candidate="series-parallel" if best[0] == series_parallel else "line",
        series_parallel_ns=series_parallel,
    )


def _candidates(problem: PartitionProblem, tree: Part) -> list[Part]:
    """The decomposition and the lines, each once."""
    if all(part.kind == "block" for part in tree.parts) and tree.kind != "parallel":
        return [tree]
    orders = dict.fromkeys((tree.blocks, topological_order(tuple(problem.costs), problem.edges)))
    return [tree, *map(in_line, orders)]


def _least(shapes: Shapes, below: int | None, tolerance: float) -> tuple[int, list[Staged]] | None:
    """The least bottleneck (below a given one) and its stages; None if there is none.

    From what the bounds allow upwards in growing steps, then by halves; what is found is as good as it is, not as
    what was asked, so the end is exact.
    """
    most = _longest(shapes) if below is None else int((below - 1) / (1 + tolerance))
    low = _lowest(shapes.unlimited(), -(-shapes[shapes.root].work // shapes.problem.num_devices), most, tolerance)
    if shapes.needs.limited:
        low = _lowest(shapes, low, most, max(tolerance, BOUNDED_WITHIN))
    asked = low
    best: tuple[int, list[Staged]] | None = None
    step = max(1, low // BOTTLENECK_PARTS)
    while low <= most and (best is None or most - low >= tolerance * low):
        try:
            solution = _answer(shapes, asked)
        except SearchTimeoutError:
            if best is None:
                raise
            return best
        if solution is not None:
            best = _read(shapes, solution)
            most = best[0] - 1
        else:
            low = asked + 1
        asked, step = (min(low + step, most), 2 * step) if best is None else ((low + most) // 2, step)
    return best


def _lowest(shapes: Shapes, low: int, most: int, tolerance: float) -> int:
    """The least bottleneck from ``low`` on that the bounds allow, or less by the tolerance; above ``most`` if none."""
    num_devices = shapes.problem.num_devices
    step, high = max(1, low // BOUNDED_PARTS), min(low, most)
    while PartBounds(shapes, high).fewest() > num_devices:
        far = low < BOUNDED_FAR * step <= 2 * low  # once, before all that is left is tried in vain
        if high == most or (far and PartBounds(shapes, most).fewest() > num_devices):
            return most + 1
        low, high, step = high + 1, min(most, high + step), 2 * step
    while high - low > tolerance * low:
        middle = (low + high) // 2
        low, high = (low, middle) if PartBounds(shapes, middle).fewest() <= num_devices else (middle + 1, high)
    return low


def _answer(shapes: Shapes, most_ns: int) -> Solution | None:
    """Stages that take at most so long."""
    return Feasibility(PartBounds(shapes, most_ns), shapes.problem.num_devices).answer()


def _longest(shapes: Shapes) -> int:
    """More than any stage can take."""
    load = shapes[shapes.root].load
    return max(shapes.problem.time_of(load, choice) for choice in shapes.problem.ways)


def _read(shapes: Shapes, solution: Solution) -> tuple[int, list[Staged]]:
    """A solution's bottleneck and stages, in topological order."""
    problem = shapes.problem
    stages = list(_stages(shapes, shapes.tree, solution.trace))
    loads = [together(problem.costs[name] for name in blocks) for blocks, _ in stages]
    return max(problem.time_of(load, choice) for load, (_, choice) in zip(loads, stages, strict=True)), stages


def _stages(shapes: Shapes, part: Part, trace: EntryTrace | None) -> Iterator[Staged]:
    children = part.parts if part.kind == "series" else (part,)
    for entry in _entries(trace):
        names = tuple(name for child in children[entry.begin : entry.end] for name in child.blocks)
        if entry.choice is None:
            branches = [(shapes.of[branch], branch) for branch in children[entry.begin].parts]
            yield from _branches(shapes, branches, entry.inside)
        elif entry.group:
            branches, tail = _shortened(shapes, children[entry.begin - 1], entry)
            yield from _branches(shapes, branches, entry.inside)
            yield tail + names, entry.choice
        else:
            yield names, entry.choice


def _shortened(shapes: Shapes, part: Part, entry: Entry) -> tuple[list[tuple[int, Part]], tuple[str, ...]]:
    """Parallel branches without the end of one of them, and that end's blocks."""
    branches, number = [(shapes.of[branch], branch) for branch in part.parts], entry.group[0]
    at = [shape for shape, _ in branches].index(number)
    branch = branches.pop(at)[1]
    children = branch.parts or (branch,)
    if entry.kept:
        branches.append((shapes.beginning(number, entry.kept), Part("series", children[: entry.kept])))
    return branches, tuple(name for child in children[entry.kept :] for name in child.blocks)


def _branches(shapes: Shapes, branches: Sequence[tuple[int, Part]], trace: EntryTrace | None) -> Iterator[Staged]:
    """Stages of parallel branches: entries name shapes, any branch of that shape will do."""
    of_shape: dict[int, deque[Part]] = defaultdict(deque)
    for number, branch in branches:
        of_shape[number].append(branch)
    for entry in _entries(trace):
        group = [of_shape[number].popleft() for number in entry.group]
        if entry.choice is None:
            yield from _stages(shapes, group[0], entry.inside)
        else:
            yield tuple(name for branch in group for name in branch.blocks), entry.choice


def _entries(trace: EntryTrace | None) -> Iterator[Entry]:
    while trace is not None:
        yield trace.entry
        trace = trace.rest


def _fits(problem: PartitionProblem, tree: Part) -> bool:
    shapes = Shapes(problem, tree)
    return _answer(shapes, _longest(shapes)) is not None
