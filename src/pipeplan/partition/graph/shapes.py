"""Parts of a graph with equal loads and equal structure, made one: what is solved once for all of them.

A *run* is children begin..end-1 of a series as one stage. Blocks may be taken together before, never to be taken apart,
so that less has to be searched (GraphPipe 3.5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from typing import Literal

import numpy as np

from pipeplan.partition.chain.costs import ChainCosts
from pipeplan.partition.graph.in_flight import Integers, Needs
from pipeplan.partition.problem import Costs, PartitionProblem, together
from pipeplan.partition.series_parallel import Part

__all__ = ["Group", "Shape", "Shapes", "grouped"]


def grouped(tree: Part, weights: Mapping[str, int], grain: int) -> Part:
    """The tree with neighbours in a series, and parallel blocks, taken together while they weigh at most ``grain``."""
    done: list[tuple[Part, int]] = []
    for part in tree.post_order():
        if part.kind == "block":
            done.append((part, sum(weights[name] for name in part.names)))
            continue
        children = done[-len(part.parts) :]
        del done[-len(part.parts) :]
        total = sum(weight for _, weight in children)
        if total <= grain and all(child.kind == "block" for child, _ in children):
            kept = [_merged([child for child, _ in children])]
        else:
            kept = _neighbours(children, grain) if part.kind == "series" else [child for child, _ in children]
        done.append((kept[0] if len(kept) == 1 else Part(part.kind, tuple(kept)), total))
    return done[0][0]


def _neighbours(children: Sequence[tuple[Part, int]], grain: int) -> list[Part]:
    groups: list[tuple[list[Part], int]] = []
    for child, weight in children:
        open_ = groups and groups[-1][0][-1].kind == child.kind == "block"
        if open_ and groups[-1][1] + weight <= grain:
            groups[-1] = ([*groups[-1][0], child], groups[-1][1] + weight)
        else:
            groups.append(([child], weight))
    return [_merged(group) for group, _ in groups]


def _merged(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    return Part("block", names=tuple(name for part in parts for name in part.names))


MAX_GROUPS = 3_000
"""Ways to take a group of branches from those that are left, over all that can be left, of a parallel part; beyond
that groups are of neighbours in order of their work."""

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
        """Of a series or block."""
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
        for part in tree.post_order():
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
        for left in product(*(range(counts[kind] + 1) for kind in kinds)):
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
        for end in range(1, len(line) + 1):
            yield (end,), tuple(((begin,), tuple(line[begin:end])) for begin in range(end))

    def nothing_left(self, number: int) -> Left:
        """What is left when no branch of a parallel part is."""
        return tuple(0 for _ in self.splits(number)[0][0])
