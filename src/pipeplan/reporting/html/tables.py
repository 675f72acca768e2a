"""Tables as data: what the page and the Markdown lay out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeplan.units import format_bytes, format_ns

Value = int | float | None


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: its text, the number that it rounds, and where it leads, as the id of a row or a place in a drawing."""

    text: str
    value: Value = None
    link: str = ""

    @property
    def is_number(self) -> bool:
        """Whether it stands at the right."""
        return self.value is not None


@dataclass(frozen=True, slots=True)
class Row:
    """A row, which a link can lead to."""

    cells: tuple[Cell, ...]
    id: str = ""
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table: the first cell of a row says what it is of."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def numeric(self) -> tuple[bool, ...]:
        """[column] whether it has numbers."""
        return tuple(any(row.cells[at].is_number for row in self.rows) for at in range(len(self.head)))


def text(value: object) -> Cell:
    """A cell of words."""
    return Cell(str(value))


def count(value: int) -> Cell:
    """A number of things."""
    return Cell(f"{value:,}", value)


def ns(value: float) -> Cell:
    """A time."""
    return Cell(format_ns(value), value)


def size(value: int | None) -> Cell:
    """A number of bytes."""
    return Cell("none") if value is None else Cell(format_bytes(value), value)


def share(value: float) -> Cell:
    """A share, in percent."""
    return Cell(f"{value:.1%}", value)


def alike(rows: Iterable[Sequence[Cell]]) -> list[tuple[list[int], Sequence[Cell]]]:
    """Equal rows once, with their numbers, in the order of their first."""
    found: dict[tuple[Cell, ...], list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(tuple(row), []).append(number)
    return [(numbers, row) for row, numbers in found.items()]
