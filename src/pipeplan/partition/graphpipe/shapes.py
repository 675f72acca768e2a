"""Parts with equal loads and equal structure, made one: what is solved once for all of them.

A *run* is children begin..end-1 of a series as one stage. Sums over runs are differences of running sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, product
from operator import add
from typing import Literal

from pipeplan.partition.graphpipe.problem import Choice, Load, Problem
from pipeplan.partition.series_parallel import Part

__all__ = ["MAX_GROUPS", "Group", "Shape", "Shapes", "Split"]

MAX_GROUPS = 10_000
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

    ``children`` are shapes by number: in order for a series, sorted for parallel parts, itself for a block. Running
    sums over the children of a series or block: ``times`` and ``activations`` [samples][child + 1],
    ``parameters`` and ``statics`` [child + 1]; ``workspaces`` [power][samples][child] is the largest of 2 ** power
    children from there on. ``work`` is the least ns of all devices for the mini-batch, ``works`` its running sum.
    """

    number: int
    kind: Literal["block", "series", "parallel"]
    children: tuple[int, ...]
    load: Load
    work: int
    times: tuple[list[int], ...] = ()
    activations: tuple[list[int], ...] = ()
    parameters: Sequence[int] = ()
    statics: Sequence[int] = ()
    works: Sequence[int] = ()
    workspaces: tuple[tuple[list[int], ...], ...] = ()

    def time(self, problem: Problem, begin: int, end: int, choice: Choice) -> int:
        """Ns for the mini-batch of a run."""
        times = self.times[choice.row]
        return problem.time(times[end] - times[begin], self.parameters[end] - self.parameters[begin], choice)

    def memory(self, begin: int, end: int, choice: Choice, in_flight: int) -> int:
        """Bytes of a run on each device."""
        activations = self.activations[choice.row]
        held = -(-in_flight // choice.microbatch_size) * (activations[end] - activations[begin])
        power = (end - begin).bit_length() - 1
        largest = self.workspaces[power][choice.row]
        workspace = max(largest[begin], largest[end - (1 << power)])
        return self.statics[end] - self.statics[begin] + held + workspace


class Shapes:
    """The shapes of a tree's parts; a tree that is not a series is looked at as a series of one."""

    def __init__(self, problem: Problem, tree: Part) -> None:
        self.problem, self.tree = problem, tree
        self.shapes: list[Shape] = []
        self.of: dict[Part, int] = {}
        self._known: dict[Hashable, int] = {}
        for part in tree.post_order():
            self.of[part] = self._number(part)
        if tree.kind == "parallel":
            self.root = self._add(("series", self.of[tree]), "series", (self.of[tree],))
        else:
            self.root = self.of[tree]
        self._splits: dict[int, tuple[Split, ...]] = {}

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

    def load(self, group: Group) -> Load:
        """The load of branches in one stage."""
        return reduce(add, (self.shapes[branch].load for branch in group))

    def work(self, group: Group) -> int:
        """The least work of branches."""
        return sum(self.shapes[branch].work for branch in group)

    def _number(self, part: Part) -> int:
        if part.kind == "block":
            load = reduce(add, (self.problem.loads[name] for name in part.names))
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
        load: Load | None = None,
    ) -> int:
        if key in self._known:
            return self._known[key]
        number = self._known[key] = len(self.shapes)
        parts = [self.shapes[child] for child in children]
        total = load or reduce(add, (part.load for part in parts))
        work = sum(part.work for part in parts) if parts else self.problem.work(total)
        shape = Shape(number, kind, children or (number,), total, work)
        if kind != "parallel":
            shape = _with_sums(shape, [part.load for part in parts] or [total], [part.work for part in parts] or [work])
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


def _with_sums(shape: Shape, loads: Sequence[Load], works: Sequence[int]) -> Shape:
    rows = range(len(shape.load.times))
    return Shape(
        shape.number,
        shape.kind,
        shape.children,
        shape.load,
        shape.work,
        tuple([0, *accumulate(load.times[row] for load in loads)] for row in rows),
        tuple([0, *accumulate(load.activations[row] for load in loads)] for row in rows),
        [0, *accumulate(load.parameter_bytes for load in loads)],
        [0, *accumulate(load.static_bytes for load in loads)],
        [0, *accumulate(works)],
        _range_maxima([[load.workspaces[row] for load in loads] for row in rows]),
    )


def _range_maxima(values: Sequence[list[int]]) -> tuple[tuple[list[int], ...], ...]:
    """[power][row][at] the largest of 2 ** power values from ``at`` on."""
    levels = [tuple(values)]
    width = 1
    while 2 * width <= len(values[0]):
        levels.append(tuple([max(pair) for pair in zip(row, row[width:], strict=False)] for row in levels[-1]))
        width *= 2
    return tuple(levels)
