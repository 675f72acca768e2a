"""How reports fit their width: one console, one table, lines that never separate a number from its unit.

What is too wide has words and headings folded, then loses blanks, then stands in several tables: figures stay whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TextIO
from xml.sax.saxutils import escape

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan.texts import counted, number_ranges, printable

_PLAIN_WIDTH = 120
"""Columns where there is no terminal and ``COLUMNS`` is not set."""


def console_for(file: TextIO | None, width: int | None = None) -> Console:
    """Where reports go: to ``file``, or stdout without one, at ``width`` columns if given.

    Without a width it is what the variable ``COLUMNS`` says, else the terminal's, else 120.
    """
    width = width or _said_width() or None
    # what is printed has names from files: none of them is markup, a link or an emoji
    console = Console(file=file, highlight=False, markup=False, emoji=False, width=width)
    if width is None and not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def _said_width() -> int:
    """What the variable ``COLUMNS`` says, within reason; 0 where it says nothing."""
    said = os.environ.get("COLUMNS", "")
    return min(int(said[:9]), _WIDEST) if said.isdecimal() else 0


_WIDEST = 10_000


def xml_text(value: str) -> str:
    """Text inside of an SVG's element: escaped, and with what XML or a reader must not get written out."""
    return escape(printable(value))


# Lines --------------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"\(?[-+]?\d+(\.\d+)?")


def flowed(text: str | Text, width: int) -> Text:
    """Lines of at most ``width`` columns, broken between words, but not after a number: what it counts comes next."""
    made = Text(text) if isinstance(text, str) else text.copy()
    letters, start, last = list(made.plain), 0, -1
    for word in re.finditer(r"\S+", made.plain):
        if "\n" in letters[max(last, start) : word.start()]:
            start, last = made.plain.rindex("\n", 0, word.start()) + 1, -1
        if word.end() - start > width and last >= 0:
            letters[last], start, last = "\n", last + 1, -1
        if not _NUMBER.fullmatch(word.group()):
            last = word.end() if made.plain[word.end() : word.end() + 1] == " " else -1
    made.plain = "".join(letters)
    return made


def wrapped(text: str, file: TextIO) -> str:
    """Lines for ``file`` at what the variable ``COLUMNS`` says, else at a terminal's width; as it is elsewhere."""
    if not _said_width() and not file.isatty():
        return text
    return flowed(text, console_for(file).width).plain


def print_notes(notes: Iterable[str], file: TextIO | None = None) -> None:
    """Print what a reader must know, to stdout unless ``file`` is given."""
    console = console_for(file)
    for note in notes:
        console.print(flowed(note, console.width), style="dim")


def labelled(rows: Iterable[tuple[str, str]], width: int) -> Table:
    """Figures with what each is called before it; an empty name goes on with the one above."""
    known = list(rows)
    names = max(len(name) for name, _ in known)
    table = Table.grid(padding=(0, 2))
    for name, value in known:
        table.add_row(name, flowed(value, max(1, width - names - 2)))
    return table


Clause = tuple[str, int]
"""A part of a line, and how far it can be spared: those with the largest number are left out first."""

Row = tuple[str, list[Clause]]
"""A line of an answer: what it is about, and its clauses."""


def fitted(rows: Sequence[Row], width: int, most: int) -> list[tuple[str, str]]:
    """The rows with as many of their clauses as ``most`` lines hold, if they hold what cannot be spared."""
    names = max(len(name) for name, _ in rows)
    found: list[tuple[str, str]] = []
    for spare in sorted({spare for _, clauses in rows for _, spare in clauses}, reverse=True):
        left = [(name, [text for text, own in clauses if own <= spare]) for name, clauses in rows]
        found = [(name, "".join(texts)) for name, texts in left if texts]
        lines = [flowed(text, max(1, width - names - 2)).plain for _, text in found]
        if sum(1 + line.count("\n") for line in lines) <= most:
            break
    return found


# Tables -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures, or of ``words``, which may be folded.

    Where one table is not enough, a ``key`` names its row in every one, and one begins where columns stand ``apart``.
    Those to ``spare`` are left out, the largest number first, where fewer tables are enough then. Words are not folded
    to fewer columns than ``least``, if they have as many, and always to ``most``.
    """

    title: str
    cells: Sequence[str]
    words: bool = False
    key: bool = False
    apart: bool = False
    spare: int = 0
    least: int = 0
    most: int = 1000

    @property
    def widest(self) -> int:
        """Its width where there is room."""
        return min(self.most, max(map(len, (self.title, *self.cells))))

    def narrowest(self, most: int) -> int:
        """Its least width: figures whole, words folded, and split where one is longer than ``most``."""
        heading = max(map(len, _folded(self.title, 1, whole=True)))
        if not self.words:
            return max([heading, *map(len, self.cells)])
        lines = [line for cell in self.cells for line in _folded(cell, 1, whole=True)]
        return max(heading, min(most, max(map(len, lines), default=0)), min(self.least, self.widest))


def tables(columns: Sequence[Column], width: int, styles: Sequence[str | None] | None = None) -> list[Table]:
    """The columns as one table, or where that is too wide for ``width`` as several; ``styles`` are of rows.

    There are as few tables as there can be, and then as many columns.
    """
    leaving_out = sorted({column.spare for column in columns}, reverse=True)
    choices = [[column for column in columns if column.spare <= most] for most in leaving_out]
    return min((_all_of(choice, width, styles) for choice in choices), key=len)


def _all_of(columns: Sequence[Column], width: int, styles: Sequence[str | None] | None) -> list[Table]:
    wide, narrow = [column.widest for column in columns], [column.narrowest(width // 4) for column in columns]
    groups = _groups(columns, width)
    for widths, gap in ((wide, _GAP), (narrow, _GAP), (narrow, _GAP - 1)):
        left = width - sum(widths) - gap * len(columns)
        if left >= 0 or (len(groups) == 1 and gap < _GAP):
            return [_table(columns, _stretched(columns, widths, left), gap, styles)]
    return [table for group in groups for table in _all_of(group, width, styles)]


_GAP = 3
"""Columns between two columns: a blank on both sides and a line between, of which one may go."""


def _groups(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Columns in groups that fit, each after the keys and having at least one more."""
    keys = [column for column in columns if column.key]
    groups: list[list[Column]] = [[*keys]]
    for column in columns:
        if column.key:
            continue
        wide = sum(each.narrowest(width // 4) + _GAP - 1 for each in (*groups[-1], column))
        if (wide > width or column.apart) and len(groups[-1]) > len(keys):
            groups.append([*keys])
        groups[-1].append(column)
    return groups


def _stretched(columns: Sequence[Column], widths: Sequence[int], left: int) -> list[int]:
    """Widths with the spare columns given first to columns of words, then to headings, as each needs."""
    found = list(widths)
    for words in (True, False):
        for index, column in enumerate(columns):
            if column.words is words:
                more = max(0, min(left, column.widest - found[index]))
                found[index], left = found[index] + more, left - more
    return found


def _table(columns: Sequence[Column], widths: Sequence[int], gap: int, styles: Sequence[str | None] | None) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if gap == _GAP else 0, 0, 1))
    titles = [_folded(column.title, wide) for column, wide in zip(columns, widths, strict=True)]
    height = max(map(len, titles))
    for column, title, wide in zip(columns, titles, widths, strict=True):
        heading = "\n".join([*[""] * (height - len(title)), *title])
        table.add_column(
            Text(heading), justify="left" if column.words else "right", min_width=wide, no_wrap=True, overflow="fold"
        )
    rows = zip(*(column.cells for column in columns), strict=True)
    for row, style in zip(rows, styles or [None] * len(columns[0].cells), strict=True):
        cells = ("\n".join(_folded(cell, wide)) for cell, wide in zip(row, widths, strict=True))
        table.add_row(*map(Text, cells), style=style)
    return table


_SEAM = re.compile(r"(?<=[-._/,>])")
"""Where a word that is too long is folded, if it can be: after these."""


def _folded(text: str, width: int, *, whole: bool = False) -> list[str]:
    """Lines of at most ``width`` columns; a word that is longer is folded at its seams, unless it is left ``whole``."""
    found = []
    for line in flowed(text, width).plain.split("\n"):
        while len(line) > width and not whole:
            seams = [seam.start() for seam in _SEAM.finditer(line, 1, width + 1)]
            cut = seams[-1] if seams else width
            found.append(line[:cut])
            line = line[cut:]
        found.append(line)
    return found


# Rows that are alike ------------------------------------------------------------------------------------------------


def groups_of_equal(rows: Iterable[Hashable]) -> list[list[int]]:
    """The numbers of equal rows, group by group, in the order of their first: every number is in one group."""
    found: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(row, []).append(number)
    return list(found.values())


def idle_devices(idle: Sequence[int], count: int, width: int, where: str = "") -> list[Text]:
    """What goes before all else where some of ``count`` devices run nothing: that they do (``where``), and which."""
    text = f"{where}{len(idle)} of {counted(count, 'device')} run nothing: {number_ranges(idle)}" if idle else ""
    return [flowed(Text(text, "bold yellow"), width)] if idle else []


def shared_rows(
    title: str, columns: Sequence[Column], most: int, of: Callable[[Sequence[int]], Sequence[int]] = list
) -> list[Column]:
    """The columns with equal rows once, after a key column of the numbers that each row is for.

    Of more than ``most`` rows that differ some are left, as :func:`shown_rows` has it. What is numbered is ``of`` rows.
    """
    groups = groups_of_equal(zip(*(column.cells for column in columns), strict=True))
    rows = shown_rows(len(groups), most)
    names = [more(row) if isinstance(row, range) else number_ranges(of(groups[row])) for row in rows]
    return [
        Column(title, names, words=any(len(name) > _LONG_NAME for name in names), key=True),
        *(
            replace(column, cells=["..." if isinstance(row, range) else column.cells[groups[row][0]] for row in rows])
            for column in columns
        ),
    ]


_LONG_NAME = 12


def shown_rows(count: int, most: int) -> list[int | range]:
    """All rows, or a third of ``most`` at the beginning, in the middle and at the end, and ranges of those between."""
    if count <= most:
        return list(range(count))
    ends, middle = most // 3, most - 2 * (most // 3)
    begin = (count - middle) // 2
    end = begin + middle
    gaps = range(ends, begin), range(end, count - ends)
    rows = [*range(ends), gaps[0], *range(begin, end), gaps[1], *range(count - ends, count)]
    return [
        row if isinstance(row, int) or len(row) > 1 else row[0] for row in rows if isinstance(row, int) or row
    ]  # one row takes no more room than saying that there is one more


def more(rows: range) -> str:
    """The text in place of rows that are left out."""
    return f"{len(rows)} more"
