"""The fewest devices that parts can do with in a given time, at least: tables that bound the exact search.

From the first child of a series to the last, and for every state of what comes after (:class:`Needs`, rounded down):
the fewest devices for so many children. Where memory has no limit, needs do not matter and the bounds are exact. Else
they are below the truth because needs are rounded, because what comes before parallel branches is said to need no
more than what comes after them, and because a stage with the end of a branch is said to hold what the state with the
least does.

A beginning of a series is a part of the table of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeplan.partition.graph.needs import Integers
from pipeplan.partition.graph.shapes import BlockRun, Group, Left, Shape, Shapes
from pipeplan.partition.problem import Costs

__all__ = ["NEVER", "PartBounds"]

NEVER = 1 << 40
"""More devices than there can be."""


class PartBounds:
    """Of all parts of a tree, for stages that take at most ``most_ns`` for the mini-batch."""

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
            for end in range(1, len(table)):
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
            columns = [list(self._reached(shape, index)) for index in range(len(self.shapes.choices))]
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
            run, low, high = self.shapes[number].run(begin, end, row), 0, len(part.children)
            while low < high:
                middle = (low + high) // 2
                whole = run.with_tail(part.run(middle, len(part.children), row))
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
            first = np.maximum(self._longest(shape.number, end, columns), reach[columns])
            following = self._needs.following[:, columns]
            devices = self._needs.replicas[columns] + table[np.minimum(first, end - 1), following]
            yield np.where(first < end, devices, NEVER).min(axis=1)
            yield from self._with_tails(shape, end, table, columns, first)
        child = self.shapes[shape.children[end - 1]]
        if child.kind == "parallel":
            yield table[end - 1] + self.parallel(child.number)

    def _longest(self, number: int, end: int, columns: Integers) -> Integers:
        return self.shapes.longest(number, end)[:, columns]

    def _with_tails(
        self, shape: Shape, end: int, table: Integers, columns: Integers, first: Integers
    ) -> Iterator[Integers]:
        """[state] devices with a run that takes the end of a branch before it, for each such run."""
        for begin in range(1, end):
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
        """[choice] micro-batches for which a stage with this load has room; None for no limit."""
        limit = self._problem.memory_bytes
        if limit is None:
            return None
        rows = [self.shapes.choices[choice].row for choice in choices]
        return np.array([load[row].room(limit) for row in rows], dtype=np.int64)

    def _reached(self, shape: Shape, index: int) -> Iterator[int]:
        choice, time, begin = self.shapes.choices[index], self._problem.time, 0
        times, sizes = shape.times[choice.row], shape.parameters
        yield 0
        for end in range(1, len(shape.children) + 1):
            while begin < end and time(times[end] - times[begin], sizes[end] - sizes[begin], choice) > self.most_ns:
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

    def _is_good(self, run: BlockRun, choice: int, microbatches: int) -> bool:
        """Whether a stage is quick enough and fits."""
        if self._problem.time(run.time, run.parameter_bytes, self.shapes.choices[choice]) > self.most_ns:
            return False
        limit = self._problem.memory_bytes
        return limit is None or run.static_bytes + microbatches * run.activations + run.workspace <= limit
