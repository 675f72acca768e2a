"""The input of frontier tracking: operators and tensors with their costs, and expressions of tables over them.

Operators have configurations, and lie between tensors (TensorOpt section 2.1). An expression is what is to be computed,
written down before it is: tables made of tables, identical ones known as such. In one expression every given table
stands once, so it is a tree. Parts of it with the same ``key`` are equal: identical layers have identical tables, which
are computed once.

``contract(A, B)[r, c]`` is the reduced union over m of ``A[r, m]`` x ``B[m, c]``: a matrix product in which points are
multiplied by *product* and added by *union* and *reduce*. Node elimination (equation 4) contracts K x K with K x K,
linear DP (Algorithm 3, line 6) 1 x K with K x K, which is why it is K times cheaper.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeplan.costs import UNLIMITED
from pipeplan.graphs import topological_order
from pipeplan.search_constants import BATCH_POINTS
from pipeplan.sharding.table import (
    CellPairs,
    IntArray,
    PointLimit,
    Points,
    Table,
    Wanted,
    gather,
    made,
    paired,
    reduce_points,
    table,
    union,
)
from pipeplan.sharding.threads import spread


@dataclass(frozen=True, slots=True)
class CostNode:
    """An operator: the memory and time of each of its K configurations, a table of 1 x K cells.

    A cell has one point, or one for each variant worth having (such as recomputation); none is a configuration that
    cannot be. ``configurations`` names the cells.
    """

    name: str
    configurations: tuple[str, ...]
    costs: Table


@dataclass(frozen=True, slots=True)
class CostEdge:
    """A tensor: what it costs for each pair of configurations, a table of K_source x K_target cells.

    A cell may offer several variants, as tensor reuse does (section 4.2); ``variants`` names them. Several edges may
    join the same two nodes.
    """

    source: str
    target: str
    costs: Table
    variants: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class TieUser:
    """An operator that shares a tied parameter: the way in which each of its K configurations splits it, by number.

    ``memory_bytes``, ``time_ns`` (of sums) and ``step_ns`` are what of the operator's costs is for it, [K].
    """

    operator: str
    ways: IntArray
    memory_bytes: IntArray
    time_ns: IntArray
    step_ns: IntArray

    def at(self, kept: IntArray) -> TieUser:
        """With some configurations, by their places."""
        return TieUser(self.operator, self.ways[kept], self.memory_bytes[kept], self.time_ns[kept], self.step_ns[kept])

    def costs(self) -> IntArray:
        """Bytes and ns in all, [2, K]."""
        return np.stack((self.memory_bytes, self.time_ns + self.step_ns))


@dataclass(frozen=True, slots=True)
class CostTie:
    """A parameter that operators share, and each counts in its costs by itself.

    Where all split it in one way it is there once: the first one's bytes count, and the first one's time, which is at
    most ``apart_ns``. Else each way has a share of its own, and sums take ``apart_ns``. Each share is stepped once.
    Operators whose ways are equal take as many bytes for it, and as long a step. Of more than one way of several
    operators each, only the one that spares most is counted once, so that a strategy may cost less than is said: there
    must be four operators for that (:attr:`sure`).
    """

    users: tuple[TieUser, ...]
    apart_ns: int

    @property
    def sure(self) -> bool:
        """Whether the stated costs of strategies are exact rather than upper bounds."""
        return len(self.users) < _UNSURE_USERS or len(np.unique(np.concatenate([user.ways for user in self.users]))) < 2

    def spared(self, chosen: Sequence[int]) -> tuple[int, int, int]:
        """Bytes, ns of sums and of the step that operators' configurations take less than each by itself.

        Of sums it may be negative: summing what is split unlike may take longer.
        """
        ways = [int(user.ways[k]) for user, k in zip(self.users, chosen, strict=True)]
        sizes = [int(user.memory_bytes[k]) for user, k in zip(self.users, chosen, strict=True)]
        times = [int(user.time_ns[k]) for user, k in zip(self.users, chosen, strict=True)]
        steps = [int(user.step_ns[k]) for user, k in zip(self.users, chosen, strict=True)]
        again = [ways.count(way) - 1 for way in ways]
        memory, step = max((n * size, n * ns) for n, size, ns in zip(again, sizes, steps, strict=True))
        sums = min(times[0], self.apart_ns) if len(set(ways)) == 1 else self.apart_ns
        return memory, sum(times) - sums, step

    def restricted(self, kept: Mapping[str, IntArray]) -> CostTie:
        """With some configurations of each operator, by their places."""
        return replace(self, users=tuple(user.at(kept[user.operator]) for user in self.users))

    def timed(self) -> CostTie:
        """By time only."""
        return replace(self, users=tuple(replace(user, memory_bytes=user.memory_bytes * 0) for user in self.users))

    def among(self, operators: Collection[str]) -> CostTie | None:
        """What some operators share; None where they are fewer than two of its."""
        users = tuple(user for user in self.users if user.operator in operators)
        return replace(self, users=users) if len(users) > 1 else None

    def lowered(self, name: str) -> tuple[CostNode, list[CostEdge]]:
        """An operator with a configuration for each case, and what each case leaves of its users' costs for it.

        In the first cases all split it in one of the ways that all have. In the others they may split it unlike: where
        there are three or more, one way is counted once, in each case another one.
        """
        sizes = dict(pair for user in self.users for pair in zip(user.ways.tolist(), user.memory_bytes, strict=True))
        steps = dict(pair for user in self.users for pair in zip(user.ways.tolist(), user.step_ns, strict=True))
        having = Counter(way for user in self.users for way in set(user.ways.tolist()))
        alike = [way for way in sorted(having) if having[way] == len(self.users)]
        once = [way for way in sorted(having) if having[way] > 1] if len(self.users) > _ONE_PAIR else []
        cases = np.array([*alike, *once, _NO_WAY])
        strict = np.arange(len(cases)) < len(alike)
        memory = [0] * len(alike) + [sizes[way] for way in once] + [0]
        stepped = [0] * len(alike) + [steps[way] for way in once] + [0]
        node = CostNode(name, tuple(map(str, cases)), table(memory, stepped + np.where(strict, 0, self.apart_ns)))
        edges = []
        for number, user in enumerate(self.users):
            same = cases[:, None] == user.ways[None, :]
            first = strict[:, None] & (number == 0)
            counted = np.where(same & ~first, 0, user.memory_bytes[None, :])
            spent = np.where(first, np.minimum(user.time_ns, self.apart_ns)[None, :], 0)
            spent += np.where(same & ~first, 0, user.step_ns[None, :])
            edges.append(CostEdge(name, user.operator, table(counted, spent, same | ~strict[:, None])))
        return node, edges


_UNSURE_USERS = 4
_ONE_PAIR = 2
_NO_WAY = -1
"""Of a case in which no way is counted once."""


@dataclass(frozen=True, slots=True)
class CostGraph:
    """Operators and tensors; memory and time of a strategy are the sums over all of them (equation 3).

    From them goes what ``ties`` spare.
    """

    nodes: tuple[CostNode, ...]
    edges: tuple[CostEdge, ...]
    ties: tuple[CostTie, ...] = ()

    def __post_init__(self) -> None:
        sizes = {node.name: len(node.configurations) for node in self.nodes}
        if len(sizes) < len(self.nodes):
            raise ValueError("two operators have the same name")
        for node in self.nodes:
            _shape(node.name, node.costs, (1, sizes[node.name]))
        for edge in self.edges:
            _shape(f"{edge.source} -> {edge.target}", edge.costs, (sizes[edge.source], sizes[edge.target]))
        self.order()

    def lowered(self) -> CostGraph:
        """The same costs with operators and edges only: its own, followed by those that represent ties."""
        if not self.ties:
            return self
        own: dict[str, IntArray] = {}
        for user in (user for tie in self.ties for user in tie.users):
            own[user.operator] = own.get(user.operator, 0) + user.costs()
        nodes = [
            replace(node, costs=_less(node.costs, own[node.name])) if node.name in own else node for node in self.nodes
        ]
        edges = list(self.edges)
        for number, tie in enumerate(self.ties):
            node, more = tie.lowered(f"tie {number}")
            nodes.append(node)
            edges += more
        return CostGraph(tuple(nodes), tuple(edges))

    def order(self) -> tuple[str, ...]:
        """The operators in topological order, ties as they are listed."""
        return topological_order(
            [node.name for node in self.nodes], [(edge.source, edge.target) for edge in self.edges]
        )

    def restricted(self, kept: Mapping[str, IntArray]) -> CostGraph:
        """The graph with only some configurations of each operator, by their places; equal tables stay one table."""
        left = {name: places.tobytes() for name, places in kept.items()}
        known: dict[tuple[int, bytes, bytes], Table] = {}

        def only(costs: Table, target: str, source: str | None = None) -> Table:
            alike = id(costs), left[target], left[source] if source else b""
            if alike not in known:
                known[alike] = _only(costs, kept[source] if source else [0], kept[target])
            return known[alike]

        nodes = [
            CostNode(node.name, tuple(node.configurations[k] for k in kept[node.name]), only(node.costs, node.name))
            for node in self.nodes
        ]
        edges = [replace(edge, costs=only(edge.costs, edge.target, edge.source)) for edge in self.edges]
        return CostGraph(tuple(nodes), tuple(edges), tuple(tie.restricted(kept) for tie in self.ties))


@dataclass(frozen=True, slots=True)
class Strategy:
    """A configuration for every operator and a variant for every tensor, by their place in the graph."""

    memory_bytes: int
    time_ns: int
    configurations: Mapping[str, int]
    node_variants: Mapping[str, int]
    edge_variants: tuple[int, ...]

    def of(self, graph: CostGraph) -> Strategy:
        """What a strategy of the lowered graph says of a graph's own operators and tensors."""
        names = [node.name for node in graph.nodes]
        return replace(
            self,
            configurations={name: self.configurations[name] for name in names},
            node_variants={name: self.node_variants[name] for name in names},
            edge_variants=self.edge_variants[: len(graph.edges)],
        )


def _less(costs: Table, own: IntArray) -> Table:
    """An operator's costs without ``own`` bytes and ns of each configuration, [2, K]."""
    memory, time = own[:, costs.cells]
    return replace(costs, memory_bytes=costs.memory_bytes - memory, time_ns=costs.time_ns - time)


def _only(costs: Table, rows: npt.ArrayLike, columns: IntArray) -> Table:
    """Some rows and columns of given costs, of which every point remains the variant it was."""
    chosen = gather(costs, np.asarray(rows)[:, None] * costs.columns + columns[None, :])
    return replace(chosen, picks=costs.picks[:, chosen.picks[0]])


def _shape(what: str, costs: Table, expected: tuple[int, int]) -> None:
    if (costs.rows, costs.columns) != expected:
        raise ValueError(f"{what}: costs of {costs.rows} x {costs.columns} cells, but {expected[0]} x {expected[1]}")
    if not costs.num_points:
        raise ValueError(f"{what}: no configuration is allowed")


def undominated(graph: CostGraph, besides: Mapping[str, IntArray] | None = None) -> dict[str, IntArray]:
    """The configurations of every operator, by their places, without which some strategies would be missed.

    One is left out if another one takes no more, itself and on every tensor with whatever is at its far end; of equal
    ones the first stays. ``besides`` is a further cost of each configuration of some operators. Where a cell has
    several points all configurations stay.
    """
    plain = graph.lowered()
    touching: dict[str, list[tuple[bool, Table]]] = defaultdict(list)
    for edge in plain.edges:
        touching[edge.source].append((False, edge.costs))
        touching[edge.target].append((True, edge.costs))
    known: dict[object, IntArray] = {}
    kept = {}
    for node, less in zip(graph.nodes, plain.nodes, strict=False):
        more = None if besides is None else besides.get(node.name)
        alone = [] if less is node else [(True, less.costs)]
        tables = [(True, node.costs), *alone, *touching[node.name]]
        alike = tuple((taken, id(each)) for taken, each in tables), None if more is None else more.tobytes()
        if alike not in known:
            known[alike] = _useful(tables, more)
        kept[node.name] = known[alike]
    return kept


def _useful(tables: Sequence[tuple[bool, Table]], besides: IntArray | None) -> IntArray:
    """Of an operator, by its own table and those of its tensors, of which it is the taker (columns) or the giver."""
    size = tables[0][1].columns
    rows = []
    for taken, each in tables:
        costs = _costs(each)
        if costs is None:
            return np.arange(size)
        rows.append((costs if taken else costs.swapaxes(1, 2)).reshape(-1, size))
    return _best(np.concatenate(rows if besides is None else [*rows, besides[None, :]]))


def _costs(each: Table) -> IntArray | None:
    """Memory and time, [2, rows, columns], never where a cell is empty; None where one has several points."""
    counts = each.counts
    if counts.max(initial=0) > 1:
        return None
    found = np.full((2, *counts.shape), UNLIMITED)
    found[:, counts > 0] = each.memory_bytes, each.time_ns
    return found


def _best(costs: IntArray) -> IntArray:
    """The columns that no other column is at most as large as throughout, of costs [N, K]."""
    number = np.arange(costs.shape[1])
    at_most = np.asarray((costs[:, :, None] <= costs[:, None, :]).all(axis=0))
    beaten = at_most & (~at_most.T | (number[:, None] < number[None, :]))
    return np.flatnonzero(~(beaten & (number[:, None] != number[None, :])).any(axis=0))


Operation = Literal["given", "product", "contract", "gather"]


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """A table of ``rows`` x ``columns`` cells: a given one, or an operation on others (``cells``: what it gathers)."""

    operation: Operation
    rows: int
    columns: int
    key: int
    sources: tuple[Expression, ...] = ()
    given: Table | None = None
    cells: IntArray | None = None


@dataclass(slots=True)
class Writer:
    """Makes expressions and numbers them by what they are made of."""

    numbers: dict[Hashable, int] = field(default_factory=dict)
    _known: dict[int, tuple[Table, int]] = field(default_factory=dict)
    """By identity, tables that were read through, with their keys; and kept, so that no other one is at their place."""

    def given(self, costs: Table) -> Expression:
        """A given table, known by its content, variants included."""
        if id(costs) not in self._known:
            self._known[id(costs)] = costs, self._read(costs)
        return Expression("given", costs.rows, costs.columns, self._known[id(costs)][1], given=costs)

    def _read(self, costs: Table) -> int:
        content = hashlib.blake2b(digest_size=16)
        for array in (costs.starts, costs.memory_bytes, costs.time_ns, costs.picks):
            content.update(array.tobytes())
        return self._number("given", costs.rows, costs.columns, content.digest())

    def product(self, left: Expression, right: Expression) -> Expression:
        """Cell by cell; one row or column serves all."""
        rows, columns = np.broadcast_shapes((left.rows, left.columns), (right.rows, right.columns))
        return Expression("product", rows, columns, self._number("product", left.key, right.key), (left, right))

    def contract(self, left: Expression, right: Expression) -> Expression:
        """The union over the middle."""
        key = self._number("contract", left.key, right.key)
        return Expression("contract", left.rows, right.columns, key, (left, right))

    def gather(self, source: Expression, cells: IntArray) -> Expression:
        """Cell (r, c) is the cell ``cells[r, c]`` of the source."""
        key = self._number("gather", source.key, cells.shape, cells.tobytes())
        return Expression("gather", cells.shape[0], cells.shape[1], key, (source,), cells=cells)

    def turned(self, source: Expression) -> Expression:
        """Rows and columns exchanged."""
        return self.gather(source, np.arange(source.rows * source.columns).reshape(source.rows, source.columns).T)

    def union(self, row: Expression) -> Expression:
        """One cell: the frontier over all cells of a row, whichever configuration is taken."""
        return self.contract(row, self.given(table(np.zeros((row.columns, 1)), 0)))

    def _number(self, *made_of: Hashable) -> int:
        return self.numbers.setdefault(made_of, len(self.numbers))


def in_order(root: Expression) -> list[Expression]:
    """All parts of an expression, sources before what is made of them."""
    return list(_before(root))[::-1]


def _before(root: Expression) -> Iterator[Expression]:
    """Every part before its sources."""
    stack = [root]
    while stack:
        part = stack.pop()
        yield part
        stack.extend(part.sources)


def contract(left: Table, right: Table, limit: PointLimit | None = None, *, batch_points: int = BATCH_POINTS) -> Table:
    """The table of ``left.rows`` x ``right.columns`` cells, or what is wanted of it.

    ``batch_points`` bounds the sums held at once.
    """
    batches = _batches(left.counts @ right.counts, batch_points)
    wanted = Wanted.of(left, right, limit)
    parts = spread(lambda cells: _part(left, right, cells, wanted), batches)
    return made(left.rows, right.columns, union(parts))


def _batches(sums: IntArray, batch_points: int) -> Iterator[IntArray]:
    """Runs of cells, row by row, of at most ``batch_points`` sums (or a single cell), from the sums of each, [R, C]."""
    ends = np.cumsum(sums.ravel())
    start = 0
    while start < len(ends):
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + batch_points, side="right")))
        yield np.arange(start, stop)
        start = stop


def _part(left: Table, right: Table, cells: IntArray, wanted: Wanted | None) -> Points:
    """The frontiers of some cells of the contraction."""
    rows, columns = np.divmod(cells, right.columns)
    middle = np.arange(left.columns)
    pairs = CellPairs(
        (rows[:, None] * left.columns + middle).ravel(),
        (middle * right.columns + columns[:, None]).ravel(),
        np.repeat(cells, left.columns),
    )
    return reduce_points(paired(left, right, pairs, wanted))
