"""Operations on tables, each distinct one computed once: identical layers have identical tables."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from pipeplan.frontier.contraction import contract
from pipeplan.frontier.table import IntArray, Table, gather, product, table

__all__ = ["Memo"]


@dataclass(slots=True)
class Memo:
    """Products, contractions and rearrangements, remembered by what they were made of.

    A given table is known by its content, a computed one by its operation and what went into it. A result met again
    shares its arrays and has sources of its own, so strategies are read off as if it had been computed.
    """

    results: dict[Hashable, Table] = field(default_factory=dict)
    keys: dict[int, int] = field(default_factory=dict)  # a table's id -> what it is equal to
    numbers: dict[Hashable, int] = field(default_factory=dict)
    kept: list[Table] = field(default_factory=list)  # so that no id is used twice
    num_computed: int = 0

    def leaf(self, costs: Table) -> Table:
        """A given table, as one of its own."""
        content = hashlib.blake2b(digest_size=16)
        for array in (costs.starts, costs.memory_bytes, costs.time_ns):
            content.update(array.tobytes())
        return self._known(replace(costs), ("given", costs.rows, costs.columns, content.digest()))

    def contract(self, left: Table, right: Table) -> Table:
        """:func:`pipeplan.frontier.contraction.contract`."""
        return self._of("contract", (left, right), lambda: contract(left, right))

    def product(self, left: Table, right: Table) -> Table:
        """:func:`pipeplan.frontier.table.product`."""
        return self._of("product", (left, right), lambda: product(left, right))

    def gather(self, source: Table, cells: IntArray) -> Table:
        """:func:`pipeplan.frontier.table.gather`."""
        return self._of(("gather", cells.shape, cells.tobytes()), (source,), lambda: gather(source, cells))

    def turned(self, source: Table) -> Table:
        """Rows and columns exchanged."""
        return self.gather(source, np.arange(source.rows * source.columns).reshape(source.rows, source.columns).T)

    def union(self, row: Table) -> Table:
        """One cell: the frontier over all cells of a row, whichever configuration is taken."""
        return self.contract(row, self.leaf(table(np.zeros((row.columns, 1)), 0)))

    def _of(self, operation: Hashable, sources: tuple[Table, ...], compute: Callable[[], Table]) -> Table:
        key = (operation, *(self.keys[id(source)] for source in sources))
        if key not in self.results:
            self.results[key] = compute()
            self.num_computed += 1
        return self._known(replace(self.results[key], sources=sources), key)

    def _known(self, own: Table, key: Hashable) -> Table:
        self.keys[id(own)] = self.numbers.setdefault(key, len(self.numbers))
        self.kept.append(own)
        return own
