"""Equal parts of a graph joined into one, and the fewest devices that parts need in a given time.

What is solved once for parts with equal loads and equal structure holds for all of them. A *run* is children
begin..end-1 of a series as one stage.

Tables of fewest devices bound the exact search: from the first child of a series to the last, and for every state of
what comes after (:class:`Needs`, rounded down), the fewest devices for a number of children. Where memory has no limit,
needs do not matter and the bounds are exact. Else they are below the truth because needs are rounded, because what
comes before parallel branches is said to need no more than what comes after them, and because a stage with the end of a
branch is said to hold what the state with the least does. A beginning of a series is a part of the table of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from typing import Literal

import numpy as np

from pipeplan.costs import UNLIMITED, StageCost
from pipeplan.partition.chain.costs import ChainCosts
from pipeplan.partition.graph.in_flight import Integers, Needs
from pipeplan.partition.problem import Costs, PartitionProblem, Way, together
from pipeplan.partition.series_parallel import Part
from pipeplan.search_constants import MAX_GROUPS
from pipeplan.time_limit import checked

Group = tuple[int, ...]
"""Branches that are taken together, by shape."""

Left = tuple[int, ...]
Split = tuple[Left, tuple[tuple[Left, Group], ...]]
"""Branches that are left, and every group that can be taken from them with what is left then."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """A kind of part.

    ``children`` are shapes by number: in order for a series, sorted for parallel parts, itself for a block. ``costs``
    are the running sums over at least the children of a series or block, [row] first. ``work`` is the least ns of all
    devices for the mini-batch.
    """

    number: int
    kind: Literal["block", "series", "parallel"]
    children: tuple[int, ...]
    load: Costs
    work: int
    costs: ChainCosts | None = None

    @property
    def sums(self) -> ChainCosts:
        """Costs of a series or block."""
        assert self.costs is not None
        return self.costs


class Shapes:
    """The shapes of a tree's parts; a tree that is not a series is looked at as a series of one.

    ``choices`` are those of the problem with which some block fits; ``needs`` are under these.
    """

    def __init__(self, problem: PartitionProblem, tree: Part) -> None:
        self.problem, self.tree = problem, tree
        self.shapes: list[Shape] = []
        self.of: dict[Part, int] = {}
        self._known: dict[Hashable, int] = {}
        self._beginnings: dict[int, tuple[int, int]] = {}
        self._capacities: dict[tuple[int, int], Integers] = {}
        self._longest: dict[tuple[int, int], Integers] = {}
        self._loads: dict[Group, Costs] = {}
        for part in checked(tree.post_order(), 64):
            self.of[part] = self._number(part)
        if tree.kind == "parallel":
            self.root = self._add(("series", self.of[tree]), "series", (self.of[tree],))
        else:
            self.root = self.of[tree]
        self._splits: dict[int, tuple[Split, ...]] = {}
        blocks = [shape.load for shape in self.shapes if shape.kind == "block"]
        self.choices = tuple(each for each in problem.ways if any(problem.fits(block, each) for block in blocks))
        self.needs = Needs(self.choices, problem.mini_batch, problem.memory_bytes is not None)

    def unlimited(self) -> Shapes:
        """The same with as much memory as anything takes: a bound that is quick to find."""
        return Shapes(replace(self.problem, memory_bytes=None), self.tree) if self.needs.limited else self

    def __getitem__(self, number: int) -> Shape:
        return self.shapes[number]

    def splits(self, number: int) -> tuple[Split, ...]:
        """How a parallel part's branches can be taken in groups, each from what is left, the last left first."""
        if number not in self._splits:
            counts = Counter(self.shapes[number].children)
            ways = reduce(lambda total, count: total * (count + 1) * (count + 2) // 2, counts.values(), 1)
            found = self._all_splits(counts) if ways <= MAX_GROUPS else self._splits_in_line(number)
            self._splits[number] = tuple(found)
        return self._splits[number]

    def shortened(self, number: int, branch: int, count: int) -> int:
        """A parallel part of which one branch has only its first ``count`` children left, or is gone for 0."""
        children = list(self.shapes[number].children)
        children.remove(branch)
        if count:
            children.append(self.beginning(branch, count))
        return self._add(("parallel", tuple(sorted(children))), "parallel", tuple(sorted(children)))

    def beginning(self, number: int, count: int) -> int:
        """A series' first children."""
        whole = self.shapes[number]
        children = whole.children[:count]
        found = self._add(("series", children), "series", children, whole=whole)
        self._beginnings.setdefault(found, (number, count))
        return found

    def whole(self, number: int) -> tuple[int, int]:
        """The series (or block) that a shape is the beginning of, often itself, and how many of its children it has."""
        return self._beginnings.get(number, (number, len(self.shapes[number].children)))

    def capacities(self, number: int, end: int) -> Integers:
        """[row, first child] micro-batches of which a run before ``end`` can hold the activations, ascending."""
        if (number, end) not in self._capacities:
            assert self.problem.memory_bytes is not None
            found = self.shapes[number].sums.most_in_flight(
                np.arange(end), np.full(end, end), self.problem.memory_bytes
            )
            self._capacities[number, end] = found
        return self._capacities[number, end]

    def longest(self, number: int, end: int) -> Integers:
        """[state, choice] first child of the longest run before ``end`` that fits before what needs that."""
        if (number, end) not in self._longest:
            self._longest[number, end] = self.fitting(number, end, self.needs.microbatches).astype(np.int32)
        return self._longest[number, end]

    def fitting(self, number: int, end: int, microbatches: Integers) -> Integers:
        """As :meth:`longest`, for [need, choice] micro-batches in flight."""
        first = np.zeros_like(microbatches)
        if self.problem.memory_bytes is not None:
            capacities = self.capacities(number, end)
            for row, columns in self.columns:
                first[:, columns] = np.searchsorted(capacities[row], microbatches[:, columns])
        return first

    @cached_property
    def columns(self) -> list[tuple[int, Integers]]:
        """(row, choices that have it)."""
        return [(int(row), np.flatnonzero(self.needs.rows == row)) for row in np.unique(self.needs.rows)]

    def load(self, group: Group) -> Costs:
        """The load of branches in one stage."""
        if group not in self._loads:
            self._loads[group] = together(self.shapes[branch].load for branch in group)
        return self._loads[group]

    def work(self, group: Group) -> int:
        """The least work of branches."""
        return sum(self.shapes[branch].work for branch in group)

    def _number(self, part: Part) -> int:
        if part.kind == "block":
            load = together(self.problem.costs[name] for name in part.names)
            return self._add(("block", load), "block", (), load)
        children = tuple(self.of[each] for each in part.parts)
        if part.kind == "parallel":
            children = tuple(sorted(children))
        return self._add((part.kind, children), part.kind, children)

    def _add(
        self,
        key: Hashable,
        kind: Literal["block", "series", "parallel"],
        children: tuple[int, ...],
        load: Costs | None = None,
        whole: Shape | None = None,
    ) -> int:
        """The shape with a key; the beginning of a ``whole`` shares its sums."""
        if key in self._known:
            return self._known[key]
        number = self._known[key] = len(self.shapes)
        parts = [self.shapes[child] for child in children]
        total = load or together(part.load for part in parts)
        work = sum(part.work for part in parts) if parts else self.problem.work(total)
        shape = Shape(number, kind, children or (number,), total, work)
        if whole is not None:
            shape = replace(whole, number=number, kind=kind, children=children, load=total, work=work)
        elif kind != "parallel":
            loads = [part.load for part in parts or [shape]]
            shape = replace(shape, costs=ChainCosts.of_rows(list(zip(*loads, strict=True))))
        self.shapes.append(shape)
        return number

    def _all_splits(self, counts: Mapping[int, int]) -> Iterator[Split]:
        """Groups of any branches; of equal branches it matters only how many."""
        kinds = sorted(counts)
        for left in checked(product(*(range(counts[kind] + 1) for kind in kinds)), 16):
            first = next((at for at, count in enumerate(left) if count), None)
            if first is None:
                continue
            ranges = [range(1 if at == first else 0, count + 1) for at, count in enumerate(left)]
            yield (
                left,
                tuple(
                    (
                        tuple(count - some for count, some in zip(left, taken, strict=True)),
                        tuple(kind for kind, some in zip(kinds, taken, strict=True) for _ in range(some)),
                    )
                    for taken in product(*ranges)
                ),
            )

    def _splits_in_line(self, number: int) -> Iterator[Split]:
        """Groups of neighbours, branches in order of their work."""
        line = sorted(self.shapes[number].children, key=lambda child: (self.shapes[child].work, child))
        for end in checked(range(1, len(line) + 1), 16):
            yield (end,), tuple(((begin,), tuple(line[begin:end])) for begin in range(end))

    def nothing_left(self, number: int) -> Left:
        """What is left when no branch of a parallel part is."""
        return tuple(0 for _ in self.splits(number)[0][0])


NEVER = UNLIMITED >> 20
"""More devices than there can be, of which many add up to less than what an integer holds."""


class PartBounds:
    """Bounds for all parts of a tree, for stages that take at most ``most_ns`` for the mini-batch."""

    def __init__(self, shapes: Shapes, most_ns: int) -> None:
        self.shapes, self.most_ns = shapes, most_ns
        self._problem, self._needs = shapes.problem, shapes.needs
        self._tables: dict[int, Integers] = {}
        self._reaches: dict[int, Integers] = {}
        self._parallels: dict[int, Integers] = {}
        self._lefts: dict[int, dict[Left, Integers]] = {}
        self._quick: dict[Group, list[int]] = {}
        self._groups: dict[Group, Integers | None] = {}
        self._kept: dict[tuple[int, int, int, int, int, int], int] = {}

    def fewest(self) -> int:
        """Devices for the whole tree."""
        if not self.shapes.choices:
            return NEVER
        return int(self.table(self.shapes.root)[-1, self._needs.state(self._needs.none)])

    def table(self, number: int) -> Integers:
        """[count, state] devices for the first children of a series (or block)."""
        if number not in self._tables:
            shape = self.shapes[number]
            table = np.full((len(shape.children) + 1, self._needs.num_states), NEVER, dtype=np.int64)
            table[0] = 0
            for end in checked(range(1, len(table)), 4):
                for devices in self._ways(shape, end, table):
                    np.minimum(table[end], devices, out=table[end])
            self._tables[number] = table
        return self._tables[number]

    def of(self, number: int) -> Integers:
        """[state] devices for a series, a block or the beginning of a series."""
        whole, count = self.shapes.whole(number)
        found: Integers = self.table(whole)[count]
        return found

    def parallel(self, number: int) -> Integers:
        """[state] devices for parallel branches."""
        if number not in self._parallels:
            children = self.shapes[number].children
            if sum(bool(self.quick((child,))) for child in children) > 1:
                self._parallels[number] = next(reversed(self.lefts(number).values()))
            else:
                self._parallels[number] = np.sum([self.of(child) for child in children], axis=0)
        return self._parallels[number]

    def lefts(self, number: int) -> dict[Left, Integers]:
        """[state] devices for each number of branches that can be left, all of them last."""
        if number not in self._lefts:
            found = {self.shapes.nothing_left(number): np.zeros(self._needs.num_states, dtype=np.int64)}
            for left, groups in self.shapes.splits(number):
                ways = [found[rest] + taken for rest, group in groups if (taken := self._taken(group)) is not None]
                found[left] = np.min(ways, axis=0)
            self._lefts[number] = found
        return self._lefts[number]

    def reach(self, number: int) -> Integers:
        """[end, choice] first child of the longest runs before ``end`` that are quick enough."""
        if number not in self._reaches:
            shape = self.shapes[number]
            end = len(shape.children) + 1
            times = shape.sums.compute[:, :end].tolist()
            columns = [list(self._reached(times[choice.row], shape.sums, choice)) for choice in self.shapes.choices]
            self._reaches[number] = np.array(columns, dtype=np.int64).T
        return self._reaches[number]

    def quick(self, group: Group) -> list[int]:
        """Choices, by number, under which a group of branches is quick enough as one stage."""
        if group not in self._quick:
            parts = [(each,) for each in group] if len(group) > 1 else []
            possible = all(self.quick(part) for part in dict.fromkeys(parts))
            self._quick[group] = self._quick_of(self.shapes.load(group)) if possible else []
        return self._quick[group]

    def kept(self, number: int, begin: int, end: int, choice: int, branch: int, microbatches: int) -> int:
        """Children of a branch that stay out of a stage of children begin..end-1 after it, at the least."""
        key = (number, begin, end, choice, branch, microbatches)
        if key not in self._kept:
            row, part = self.shapes.choices[choice].row, self.shapes[branch]
            run, low, high = self.shapes[number].sums.stage(begin, end, row), 0, len(part.children)
            while low < high:
                middle = (low + high) // 2
                whole = run + part.sums.stage(middle, len(part.children), row)
                low, high = (low, middle) if self._is_good(whole, choice, microbatches) else (middle + 1, high)
            self._kept[key] = low
        return self._kept[key]

    def tails(
        self, number: int, begin: int, end: int, choice: int, microbatches: int
    ) -> Iterator[tuple[int, int, int]]:
        """(branch, children kept, what is left of the parallel part) of a run that takes the end of a branch."""
        parallel = self.shapes[number].children[begin - 1]
        for branch in dict.fromkeys(self.shapes[parallel].children):
            kept = self.kept(number, begin, end, choice, branch, microbatches)
            if kept < len(self.shapes[branch].children):
                yield branch, kept, self.shapes.shortened(parallel, branch, kept)

    def _ways(self, shape: Shape, end: int, table: Integers) -> Iterator[Integers]:
        """[state] devices with a run that ends before ``end``, or with the parallel parts there."""
        reach = self.reach(shape.number)[end]
        columns = np.flatnonzero(reach < end)
        if len(columns):
            first = np.maximum(self.shapes.longest(shape.number, end)[:, columns], reach[columns])
            following = self._needs.following[:, columns]
            devices = self._needs.replicas[columns] + table[np.minimum(first, end - 1), following]
            yield np.where(first < end, devices, NEVER).min(axis=1)
            yield from self._with_tails(shape, end, table, columns, first)
        child = self.shapes[shape.children[end - 1]]
        if child.kind == "parallel":
            yield table[end - 1] + self.parallel(child.number)

    def _with_tails(
        self, shape: Shape, end: int, table: Integers, columns: Integers, first: Integers
    ) -> Iterator[Integers]:
        """[state] devices with a run that takes the end of a branch before it, for each such run."""
        for begin in checked(range(1, end), 16):
            if self.shapes[shape.children[begin - 1]].kind != "parallel":
                continue
            for column in np.flatnonzero((first == begin).any(axis=0)):
                choice, here = int(columns[column]), first[:, column] == begin
                following = self._needs.following[:, choice]
                microbatches = int(self._needs.microbatches[here, choice].min())
                for _, _, rest in self.tails(shape.number, begin, end, choice, microbatches):
                    devices = table[begin - 1] + self.parallel(rest) + self._needs.replicas[choice]
                    yield np.where(here, devices[following], NEVER)

    def _taken(self, group: Group) -> Integers | None:
        """[state] devices for a group of branches; None if it cannot be one."""
        if len(group) == 1:
            return self.of(group[0])
        if group not in self._groups:
            quick = self.quick(group)
            self._groups[group] = self._together(self.shapes.load(group), quick) if quick else None
        return self._groups[group]

    def _together(self, load: Costs, quick: list[int]) -> Integers:
        """[state] devices for a stage with this load under one of some choices."""
        devices = self._needs.replicas[quick]
        fits = self.fitting(load, quick)
        if fits is None:
            return np.full(self._needs.num_states, devices.min())
        least: Integers = np.where(self._needs.microbatches[:, quick] <= fits, devices, NEVER).min(axis=1)
        return least

    def fitting(self, load: Costs, choices: list[int]) -> Integers | None:
        """[choice] micro-batches for which a stage with this load fits; None for no limit."""
        limit = self._problem.memory_bytes
        if limit is None:
            return None
        rows = [self.shapes.choices[choice].row for choice in choices]
        return np.array([load[row].most_in_flight(limit) for row in rows], dtype=np.int64)

    def _reached(self, times: list[int], sums: ChainCosts, choice: Way) -> Iterator[int]:
        time, size, begin = self._problem.time, sums.sizes(), 0
        yield 0
        for end in range(1, len(times)):
            while begin < end and time(times[end] - times[begin], size(begin, end), choice) > self.most_ns:
                begin += 1
            yield begin

    def _quick_of(self, load: Costs) -> list[int]:
        times = np.array([cost.compute_ns for cost in load], dtype=np.int64)[self._needs.rows]
        known = self._needs.repeats * times <= self.most_ns
        choices = self.shapes.choices
        return [
            index
            for index in np.flatnonzero(known).tolist()
            if self._problem.time(int(times[index]), load[0].gradient_bytes, choices[index]) <= self.most_ns
        ]

    def _is_good(self, run: StageCost, choice: int, microbatches: int) -> bool:
        """Whether a stage is quick enough and fits."""
        if self._problem.time(run.compute_ns, run.gradient_bytes, self.shapes.choices[choice]) > self.most_ns:
            return False
        limit = self._problem.memory_bytes
        return limit is None or run.memory_bytes(microbatches) <= limit
