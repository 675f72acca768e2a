"""A graph of blocks as a tree of series and parallel parts (Valdes, Tarjan and Lawler, 1982).

In a *series* part everything in one child comes before everything in the next; the children of a *parallel* part
have no order between them. A graph whose order is of this kind is called series-parallel; what is written down is the
order, so edges that follow from others make no difference.

Edges that follow from others are dropped. Then two reductions are applied as long as one applies: a block whose only
successor has no other predecessor is joined with it in series; blocks with the same predecessors and the same
successors are joined in parallel. They end in one part exactly if the graph is series-parallel.

Where they do not, order is added. What is left is cut in two, everything on one side before everything on the other,
where that makes the critical path least long and, of such cuts, nearest to the middle; then the sides are looked at
on their own. :class:`SeriesParallel` says what that cost.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from pipeplan import graphs
from pipeplan.errors import UsageError
from pipeplan.time_limit import checked, checkpoint

Kind = Literal["block", "series", "parallel"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A block (or several that are never taken apart, in an order they can run in), or parts joined.

    The parts of a series are never series themselves, and those of a parallel part never parallel.
    """

    kind: Kind
    parts: tuple[Part, ...] = ()
    names: tuple[str, ...] = ()

    def post_order(self) -> Iterator[Part]:
        """Every part under this one, parts before what they are parts of; works at any depth."""
        stack: list[tuple[Part, bool]] = [(self, False)]
        while stack:
            part, seen = stack.pop()
            if seen or not part.parts:
                yield part
            else:
                stack.append((part, True))
                stack += [(each, False) for each in reversed(part.parts)]

    @property
    def blocks(self) -> tuple[str, ...]:
        """Its blocks, in an order they can run in: parallel parts one after another."""
        return tuple(name for part in self.post_order() for name in part.names)


@dataclass(frozen=True, slots=True)
class SeriesParallel:
    """A decomposition and what it cost.

    ``added_orders`` counts the pairs of blocks that have an order in ``tree`` and had none in the graph. The critical
    paths are the longest sums of weights along the graph's order and along the tree's.
    """

    tree: Part
    added_orders: int
    critical_path_before: int
    critical_path_after: int


def in_line(blocks: Iterable[str]) -> Part:
    """Blocks one after another, as a decomposition."""
    parts = tuple(Part("block", names=(block,)) for block in blocks)
    return parts[0] if len(parts) == 1 else Part("series", parts)


def topological_order(blocks: Sequence[str], edges: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Blocks in an order they can run in, as near to the given one as edges allow.

    Raises:
        UsageError: as :func:`decompose`.
    """
    return _ordered(blocks, edges).names


def decompose(
    blocks: Sequence[str], edges: Iterable[tuple[str, str]], weights: Mapping[str, int] | None = None
) -> SeriesParallel:
    """The parts of a graph, with order added where it is not series-parallel.

    ``weights`` [block] are what critical paths are measured in, not negative; 1 each if not given. Parallel parts are
    in the order of their first blocks in ``blocks``.

    Raises:
        UsageError: there are no blocks, or the edges have a cycle or name something else.
    """
    order = _ordered(blocks, edges)
    index = {block: at for at, block in enumerate(order.names)}
    costs = [1 if weights is None else weights[block] for block in order.names]
    below = _reach(order.successors)
    before = max(_heads(range(len(costs)), costs, order.successors).values())
    reduction = _GraphReduction(list(costs), _reduced(order.successors, below))
    reduction.run()
    position = {block: at for at, block in enumerate(blocks)}
    tree = _flat(_joined(reduction), order.names, [position[block] for block in index])
    after, pairs = _measured(tree, {block: costs[at] for block, at in index.items()})
    return SeriesParallel(tree, pairs - sum(bits.bit_count() for bits in below), before, after)


# The graph -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Graph:
    """Blocks in topological order; ``successors`` [block] are indices into it, ascending."""

    names: tuple[str, ...]
    successors: list[list[int]]


def _ordered(blocks: Sequence[str], edges: Iterable[tuple[str, str]]) -> _Graph:
    if not blocks:
        raise UsageError("a graph without blocks cannot be decomposed; give at least one block")
    pairs, known = tuple(edges), set(blocks)
    unknown = next((name for pair in pairs for name in pair if name not in known), None)
    if unknown is not None:
        raise UsageError(f"an edge names {unknown!r}, which is not among the {len(blocks)} blocks")
    try:
        names = graphs.topological_order(blocks, pairs)
    except graphs.CycleError as error:
        raise UsageError(f"{error}: blocks in it cannot be decomposed; remove one of its edges") from None
    index = {name: at for at, name in enumerate(names)}
    successors: list[set[int]] = [set() for _ in names]
    for source, target in pairs:
        successors[index[source]].add(index[target])
    return _Graph(names, [sorted(after) for after in successors])


def _reach(successors: Sequence[Sequence[int]]) -> list[int]:
    """[node] everything after it, as bits; nodes are in topological order."""
    below = [0] * len(successors)
    for node in checked(reversed(range(len(successors)))):
        for after in successors[node]:
            below[node] |= below[after] | 1 << after
    return below


def _reduced(successors: Sequence[Sequence[int]], below: Sequence[int]) -> list[set[int]]:
    """[node] successors that do not follow from others."""
    kept: list[set[int]] = []
    for after in successors:
        covered, chosen = 0, set()
        for node in after:  # ascending: whatever leads to a node has been looked at before it
            if not covered >> node & 1:
                chosen.add(node)
                covered |= below[node]
        kept.append(chosen)
    return kept


def _heads(nodes: Iterable[int], weights: Sequence[int], successors: Sequence[Iterable[int]]) -> dict[int, int]:
    """For each node in topological order, the largest sum of weights on a path that ends with it."""
    heads = dict.fromkeys(nodes, 0)
    for node in heads:
        heads[node] += weights[node]
        for after in successors[node]:
            if after in heads:
                heads[after] = max(heads[after], heads[node])
    return heads


# Reductions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Join:
    """Two parts joined; a part is an index of the graph or another join."""

    kind: Kind
    first: int | _Join
    second: int | _Join


@dataclass(slots=True)
class _GraphReduction:
    """Nodes of a graph and what has been joined in them; ``alive`` nodes stand for parts.

    Sets of neighbours are compared by sums of random numbers first (``keys``), which change with a neighbour in one
    step; so the work is near the number of edges, times a logarithm for neighbours that are renamed.
    """

    weights: list[int]
    after: list[set[int]]
    before: list[set[int]] = field(init=False)
    parts: list[int | _Join] = field(init=False)
    alive: list[bool] = field(init=False)
    _codes: list[int] = field(init=False)
    _keys: list[list[int]] = field(init=False)
    _queue: list[int] = field(init=False)

    def __post_init__(self) -> None:
        size, draw = len(self.after), random.Random(0)
        self.before = [set() for _ in range(size)]
        for node, after in enumerate(self.after):
            for other in after:
                self.before[other].add(node)
        self.parts, self.alive = list(range(size)), [True] * size
        self._codes = [draw.getrandbits(64) for _ in range(size)]
        self._keys = [
            [sum(self._codes[other] for other in side[node]) for side in (self.before, self.after)]
            for node in range(size)
        ]
        self._queue = list(reversed(range(size)))

    def run(self) -> None:
        """Reduce until nothing applies."""
        known: dict[tuple[int, int], int] = {}
        reduced = 0
        while self._queue:
            reduced += 1
            if not reduced % 64:
                checkpoint()
            node = self._queue.pop()
            if not self.alive[node] or self._in_series(node):
                continue
            key = (self._keys[node][0], self._keys[node][1])
            twin = known.get(key, node)
            if twin != node and self._are_twins(twin, node):
                self._join_parallel(twin, node)
            else:
                known[key] = node

    def _in_series(self, node: int) -> bool:
        """Join the node with the one after or before it, if one of them is all it has on that side."""
        for first, second in ((node, self._only(self.after[node])), (self._only(self.before[node]), node)):
            if first >= 0 and second >= 0 and len(self.after[first]) == len(self.before[second]) == 1:
                self._join_series(first, second)
                return True
        return False

    @staticmethod
    def _only(nodes: set[int]) -> int:
        return next(iter(nodes)) if len(nodes) == 1 else -1

    def _are_twins(self, one: int, other: int) -> bool:
        return self.alive[one] and self.before[one] == self.before[other] and self.after[one] == self.after[other]

    def _join_series(self, first: int, second: int) -> None:
        """One node for both; the one with more neighbours keeps its number."""
        joined, weight = _Join("series", self.parts[first], self.parts[second]), self.weights[first]
        if len(self.after[second]) <= len(self.before[first]):
            self._replace(second, first, self.after, self.before, 0)
            kept, gone = first, second
        else:
            self._replace(first, second, self.before, self.after, 1)
            kept, gone = second, first
        self.weights[kept] = weight + self.weights[second]
        self.parts[kept], self.alive[gone] = joined, False
        self._queue.append(kept)

    def _replace(self, old: int, new: int, side: list[set[int]], back: list[set[int]], key: int) -> None:
        """``new`` takes the neighbours of ``old`` on one side; theirs are in ``back``, summed in ``key``."""
        for other in side[old]:
            back[other].remove(old)
            back[other].add(new)
            self._keys[other][key] += self._codes[new] - self._codes[old]
            self._queue.append(other)
        side[new] = side[old]
        self._keys[new][1 - key] = self._keys[old][1 - key]

    def _join_parallel(self, kept: int, gone: int) -> None:
        self.parts[kept] = _Join("parallel", self.parts[kept], self.parts[gone])
        self.weights[kept] = max(self.weights[kept], self.weights[gone])
        self.alive[gone] = False
        for side, back, key in ((self.before, self.after, 1), (self.after, self.before, 0)):
            for other in side[gone]:
                back[other].remove(gone)
                self._keys[other][key] -= self._codes[gone]
                self._queue.append(other)
        self._queue.append(kept)


# What no reduction joins ---------------------------------------------------------------------------------------


def _joined(reduction: _GraphReduction) -> int | _Join:
    """One part: what the reductions left, cut where that costs least."""
    left = [node for node, alive in enumerate(reduction.alive) if alive]
    if len(left) == 1:
        return reduction.parts[left[0]]
    return _Cutting.of(reduction, left).run()


@dataclass(frozen=True, slots=True)
class _Cutting:
    """Nodes in topological order, what each represents, and all successors of each, as bits."""

    parts: list[int | _Join]
    weights: list[int]
    after: list[list[int]]
    before: list[list[int]]
    below: list[int]

    @classmethod
    def of(cls, reduction: _GraphReduction, left: Sequence[int]) -> _Cutting:
        """The nodes that a reduction left."""
        order = _ordered([str(node) for node in left], _named(reduction.after, left)).names
        index = {int(name): at for at, name in enumerate(order)}
        after = [sorted(index[other] for other in reduction.after[node]) for node in index]
        before = [sorted(index[other] for other in reduction.before[node]) for node in index]
        weights = [reduction.weights[node] for node in index]
        return cls([reduction.parts[node] for node in index], weights, after, before, _reach(after))

    def run(self) -> int | _Join:
        """All nodes as one part."""
        todo: list[list[int] | tuple[Kind, int]] = [list(range(len(self.parts)))]
        done: list[int | _Join] = []
        while todo:
            checkpoint()
            item = todo.pop()
            if isinstance(item, tuple):
                kind, count = item
                joined = done[-count]
                for part in done[len(done) - count + 1 :]:
                    joined = _Join(kind, joined, part)
                done[-count:] = [joined]
            elif len(item) == 1:
                done.append(self.parts[item[0]])
            else:
                kind, pieces = self._split(item)
                todo.append((kind, len(pieces)))
                todo += reversed(pieces)
        return done[0]

    def _split(self, nodes: list[int]) -> tuple[Kind, list[list[int]]]:
        """Nodes, in topological order, as what is parallel, or as what is or is now made one after another."""
        groups = self._groups(nodes)
        if len(groups) > 1:
            return "parallel", groups
        cuts = self._cuts(nodes)
        if not cuts:
            nodes, cut = self._cheapest(nodes)
            cuts = [cut]
        return "series", [sorted(nodes[low:high]) for low, high in zip([0, *cuts], [*cuts, len(nodes)], strict=True)]

    def _groups(self, nodes: list[int]) -> list[list[int]]:
        """Nodes apart that no path joins."""
        inside, group = set(nodes), dict[int, int]()
        groups: list[list[int]] = []
        for start in nodes:
            stack = [] if start in group else [start]
            if stack:
                groups.append([])
            while stack:
                node = stack.pop()
                if node not in group:
                    group[node] = len(groups) - 1
                    groups[-1].append(node)
                    stack += [other for other in (*self.after[node], *self.before[node]) if other in inside]
        return [sorted(each) for each in groups]

    def _cuts(self, nodes: list[int]) -> list[int]:
        """Positions with everything before them ahead of everything from them on."""
        common, rest, found = -1, sum(1 << node for node in nodes), []
        for at, node in enumerate(nodes[:-1], start=1):
            common &= self.below[node]
            rest &= ~(1 << node)
            if common & rest == rest:
                found.append(at)
        return found

    def _cheapest(self, nodes: list[int]) -> tuple[list[int], int]:
        """The nodes with what can end first in front, and where to cut them.

        The longest path after the cut counts first, then how far it is from the middle: where cuts take slices off
        the end, what each adds to the path adds up.
        """
        heads = _heads(nodes, self.weights, self.after)
        tails = _heads(reversed(nodes), self.weights, self.before)
        order = sorted(nodes, key=lambda node: (heads[node], node))
        longest = list(accumulate((tails[node] for node in reversed(order)), max))[::-1]
        size = len(order)
        cut = min(range(1, size), key=lambda at: (heads[order[at - 1]] + longest[at], abs(size - 2 * at)))
        return order, cut


def _named(after: Sequence[Iterable[int]], nodes: Iterable[int]) -> list[tuple[str, str]]:
    return [(str(node), str(other)) for node in nodes for other in after[node]]


# The tree ------------------------------------------------------------------------------------------------------


def _flat(joined: int | _Join, names: Sequence[str], positions: Sequence[int]) -> Part:
    """The tree with joins of one kind in one part; works at any depth."""
    done: dict[int, tuple[Part, int]] = {}  # by join: its part and the first position in it
    stack = [(joined, False)]
    while stack:
        join, seen = stack.pop()
        if isinstance(join, int):
            done[join] = (Part("block", names=(names[join],)), positions[join])
            continue
        children = _children(join)
        if not seen:
            stack += [(join, True), *((child, False) for child in children)]
            continue
        parts = [done.pop(child if isinstance(child, int) else -id(child)) for child in children]
        if join.kind == "parallel":
            parts.sort(key=lambda each: each[1])
        done[-id(join)] = (Part(join.kind, tuple(part for part, _ in parts)), min(first for _, first in parts))
    return next(iter(done.values()))[0]


def _children(join: _Join) -> list[int | _Join]:
    """What is joined in one kind, in order."""
    found: list[int | _Join] = []
    stack: list[int | _Join] = [join]
    while stack:
        each = stack.pop()
        if isinstance(each, _Join) and each.kind == join.kind:
            stack += [each.second, each.first]
        else:
            found.append(each)
    return found


def _measured(tree: Part, weights: Mapping[str, int]) -> tuple[int, int]:
    """The tree's critical path, and how many pairs of blocks have an order in it."""
    stack: list[tuple[int, int, int]] = []  # critical path, blocks, pairs
    for part in tree.post_order():
        if part.kind == "block":
            stack.append((weights[part.names[0]], 1, 0))
            continue
        paths, counts, pairs = zip(*stack[-len(part.parts) :], strict=True)
        del stack[-len(part.parts) :]
        if part.kind == "parallel":
            stack.append((max(paths), sum(counts), sum(pairs)))
        else:
            across = sum(before * count for before, count in zip(accumulate(counts), counts[1:], strict=False))
            stack.append((sum(paths), sum(counts), sum(pairs) + across))
    path, _, ordered = stack[0]
    return path, ordered
