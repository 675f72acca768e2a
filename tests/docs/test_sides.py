"""Tables that compare say what their sides have: the same time, memory and costs, or what differs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from support.paths import ROOT

PAGES = sorted(path for folder in ("benchmarks", "papers") for path in (ROOT / "docs" / folder).glob("*.md"))
OTHERS = [ROOT / "docs" / "algorithms" / f"{name}.md" for name in ("graph-schedules", "separation")]
NAMES = (
    r"1F1B\+?|T-1F1B|Tessel|FlexPipe|PipeDream|Piper|DAPPLE|OptCNN|ToFu|Megatron|Chimera|DistMM-Pipe|z3"
    r"|torch|fully_shard|DTensor|Mesh-TensorFlow"
    r"|data parallel|best classic|known|repetend|greedy|linear DP|elimination|GraphPipe|AutoPipe|ours|pipeplan|rules"
    r"|in a line"
)
SIDES = re.compile(rf"(?<![\w-])(?:{NAMES})(?![\w-])|^[DPA]$", re.IGNORECASE)
"""What stands in a column that is one side of a comparison: a system, a schedule or a planner, or ours."""
LISTS = {("of the paper", "command"), ("of the chapter", "command"), ("how", "text"), ("rules", "lines")}
"""Columns of tables that list figures and commands, each of which says for itself how it was had."""


class Table(NamedTuple):
    """Its line and columns, and the prose of its section that comes before it."""

    line: int
    columns: tuple[str, ...]
    prose: str

    @property
    def compares(self) -> bool:
        """Whether at least two of its columns are sides."""
        if any(set(pair) <= set(self.columns) for pair in LISTS):
            return False
        return sum(bool(SIDES.search(column)) for column in self.columns) > 1

    @property
    def says(self) -> bool:
        """Whether the prose tells what the sides have."""
        return "*Sides:*" in self.prose


def tables_of(text: str) -> Iterator[Table]:
    """The tables of a page, in order."""
    lines, prose = text.splitlines(), list[str]()
    for number, line in enumerate(lines, 1):
        prose = [] if line.startswith("#") else [*prose, line]
        if re.match(r"\|( ?-{3,} ?\|)+$", line):
            yield Table(
                number - 1, tuple(cell.strip() for cell in lines[number - 2].strip("|").split("|")), "\n".join(prose)
            )


@pytest.mark.parametrize("path", [*PAGES, *OTHERS], ids=lambda path: path.stem)
def test_comparisons_say_what_their_sides_have(path: Path) -> None:
    silent = [
        f"{path.name}:{table.line}: {' | '.join(table.columns)}"
        for table in tables_of(path.read_text(encoding="utf-8"))
        if table.compares and not table.says
    ]
    assert silent == []


def test_comparisons_are_known_by_their_columns() -> None:
    """Of all pages; and a table that says nothing is found."""
    found = [table for path in PAGES for table in tables_of(path.read_text(encoding="utf-8")) if table.compares]
    assert len(found) > 20
    page = "# A\n\n*Sides:* even.\n\n## B\n\n| n | 1F1B | ours |\n| --- | --- | --- |\n| 1 | 2 | 3 |\n"
    (silent,) = tables_of(page)
    assert (silent.line, silent.compares, silent.says) == (7, True, False)
    (told,) = tables_of(page.replace("## B\n", "B\n"))
    assert told.says
    (alone,) = tables_of(page.replace("| 1F1B | ours |", "| seconds | ours |"))
    assert not alone.compares
