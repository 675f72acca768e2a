"""What is to be computed, written down before it is: tables made of tables, identical ones known as such.

Eliminations and linear DP only write expressions; :mod:`pipeplan.frontier.evaluation` computes them, as frontiers or as
plain minima. In one expression every given table stands once, so it is a tree. Parts of it with the same ``key`` are
equal: identical layers have identical tables, which are computed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pipeplan.frontier.table import IntArray, Table, table

__all__ = ["Expression", "Writer", "in_order"]

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

    def given(self, costs: Table) -> Expression:
        """A given table, known by its content, variants included."""
        content = hashlib.blake2b(digest_size=16)
        for array in (costs.starts, costs.memory_bytes, costs.time_ns, costs.picks):
            content.update(array.tobytes())
        key = self._number("given", costs.rows, costs.columns, content.digest())
        return Expression("given", costs.rows, costs.columns, key, given=costs)

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
