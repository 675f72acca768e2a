"""Tables as data: what the page and the Markdown lay out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeplan.units import format_bytes, format_ns

Value = int | float | None


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell: its text, the number that it rounds, and where it leads, as the id of a row or a place in a drawing."""

    text: str
    value: Value = None
    link: str = ""

    @property
    def is_number(self) -> bool:
        """Whether it stands at the right."""
        return self.value is not None


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row, which a link can lead to."""

    cells: tuple[TableCell, ...]
    id: str = ""
    marked: bool = False


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table: the first cell of a row says what it is of."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def numeric(self) -> tuple[bool, ...]:
        """[column] whether it has numbers."""
        return tuple(any(row.cells[at].is_number for row in self.rows) for at in range(len(self.head)))


def text(value: object) -> TableCell:
    """A cell of words."""
    return TableCell(str(value))


def count(value: int) -> TableCell:
    """A number of things."""
    return TableCell(f"{value:,}", value)


def ns(value: float) -> TableCell:
    """A time."""
    return TableCell(format_ns(value), value)


def size(value: int | None) -> TableCell:
    """A number of bytes."""
    return TableCell("none") if value is None else TableCell(format_bytes(value), value)


def share(value: float) -> TableCell:
    """A share, in percent."""
    return TableCell(f"{value:.1%}", value)


def alike(rows: Iterable[Sequence[TableCell]]) -> list[tuple[list[int], Sequence[TableCell]]]:
    """Equal rows once, with their numbers, in the order of their first."""
    found: dict[tuple[TableCell, ...], list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(tuple(row), []).append(number)
    return [(numbers, row) for row, numbers in found.items()]
