"""``benchmarks/limits.py`` measures what it says, and writes the table of docs/limits.md."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from pipeplan.examples import shape
from pipeplan.files import write_file
from support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from limits import INPUTS, ROWS, Bench, Measured, Row, page_table

PAGE = ROOT / "docs/limits.md"


@pytest.mark.slow
def test_marks_come_in_order(tmp_path: Path) -> None:
    """A schedule first, then its plan, then what is written."""
    write_file(shape("v", 4), str(tmp_path / "v4.json"))
    bench = Bench(tmp_path, str(ROOT), 120.0)
    found = bench.measured(Row("short", "search v4.json --microbatches 8 --deterministic", 1))
    assert found.ended == ""
    assert 0 < found.first <= found.made < found.known, "these after the profile was read, that from the beginning"
    assert all(map(math.isnan, found.stops)), "rows of less than 10 s are not stopped"
    failed = bench.measured(Row("none", "search v4.json --microbatches 8 --memory 1kB", 1))
    assert failed.ended.startswith("exit ")
    assert math.isnan(failed.first)


BROKEN: dict[str, str] = {}
"""Rows of the page that break what is promised; the page names them where it says what does not hold."""


def test_rows_that_break_what_is_promised_are_named() -> None:
    lines = PAGE.read_text().splitlines()
    table = takewhile(str.strip, lines[lines.index("| request | limit | before | until known | first | stop |") :])
    rows, found = {row.name: row for row in ROWS}, {}
    for line in [*table][2:]:
        name, limit, _, known, first, stops = (cell.strip() for cell in line.strip().removesuffix("|").split(" | "))
        name = name.removeprefix("| ").removesuffix(" (proved)")
        made, read = (re.search(what, first) for what in (r"([\d.]+)(?:$|,)", r"read in ([\d.]+)"))
        measured = Measured(
            known=float(known.partition(",")[0] or 0),
            read=0.0 if read is None else float(read[1]),
            first=math.nan,
            made=math.nan if made is None else float(made[1]),
            stops=[float(each) for each in stops.split(", ") if each],
            ended="",
        )
        row = replace(rows[name], limit=int(limit))
        assert row.larger == (read is not None)
        if known and (broken := measured.broken(row)):
            found[name] = broken
    assert found == BROKEN


@pytest.mark.parametrize(
    ("how", "broken"),
    [
        ({}, ""),
        ({"known": 11.1}, "limit"),
        ({"known": math.nan, "ended": "over 260"}, "limit"),
        ({"ended": "SIGTERM: over 260"}, "limit"),
        ({"made": 3.1}, "first plan"),
        ({"made": 3.1, "read": 1.6}, "first plan"),
        ({"made": 3.1, "read": 1.6, "larger": True}, ""),
        ({"made": 1.1, "read": 0.5, "larger": True}, "first plan"),
        ({"stops": [math.nan, 0.51]}, "stop"),
        ({"ended": "check: exit 1: not so"}, "written"),
        ({"ended": "SIGINT: check: exit 1: not so"}, "written"),
        ({"ended": "SIGHUP: no rows"}, "written"),
        ({"ended": "none known after 2.3; exit 3: no plan was found over 10 s"}, ""),
    ],
)
def test_what_a_row_breaks(how: dict[str, Any], broken: str) -> None:
    how = {**how}
    right = Measured(known=10.9, read=0.1, first=0.5, made=2.9, stops=[0.5], ended="")
    row = Row("of any name", "search v4.json", 10, larger=how.pop("larger", False))
    assert replace(right, **how).broken(row) == broken


def test_the_page_has_the_rows_that_are_measured() -> None:
    """And their limits; what is measured takes a row's place, what is not stays as it is, stars included."""
    lines = PAGE.read_text().splitlines()
    table = takewhile(str.strip, lines[lines.index("| request | limit | before | until known | first | stop |") :])
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in [*table][2:]]
    shown = [(name.removesuffix(" *").removesuffix(" (proved)"), int(limit)) for name, limit, *_ in cells]
    assert shown == [(row.name, row.limit) for row in ROWS]
    whole = list(page_table(str(PAGE), ROWS, {}))
    assert all(line in lines for line in whole)
    named = {line.split(" | ")[0].removeprefix("| ") for line in whole[2:]}
    row = next(each for each in ROWS if each.name == "20,000 micro-batches")
    assert f"{row.name} (proved)" in named
    measured = Measured(known=1.25, read=0.1, first=0.5, made=0.75, stops=[math.nan], ended="")
    changed = list(page_table(str(PAGE), ROWS, {row.name: measured}))
    (line,) = set(changed) - set(whole)
    assert line == f"| {row.name} (proved) | 10 | 93.7 | 1.2 | 0.5 / 0.8 |  |"
    starred = next(each for each in ROWS if each.name.endswith("`--workers 2`"))
    (line,) = set(
        page_table(str(PAGE), ROWS, {starred.name: replace(measured, stops=[0.125, 0.25], ended="exit 1: no")})
    ) - {*whole}
    assert line.endswith("| 30 |  | 1.2, exit 1: no | 0.5 / 0.8 | 0.12, 0.25 |")
    (line,) = set(page_table(str(PAGE), [*ROWS, Row("a new one", "search v4.json", 7)], {})) - {*whole}
    assert line == "| a new one | 7 |  |  |  |  |"


def test_rows_have_their_inputs() -> None:
    words = (word.rpartition("=")[2] for row in ROWS for word in row.arguments.split())  # of KIND=FILE the file
    named = {word.removesuffix(".json") for word in words if word.endswith(".json")}
    assert named <= {*INPUTS, "llama"}
