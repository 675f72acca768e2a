"""A reader with a paper in hand finds each of its figures, tables and algorithms on its page."""

from __future__ import annotations

import re

import pytest

from support.paths import ROOT

ROMAN = ["0", "I", "II", "III", "IV"]
PAPERS: dict[str, dict[str, list[str]]] = {
    "tessel": {"Fig.": [str(n) for n in range(1, 18)], "Table": ROMAN[2:4], "Algorithm": ["1"]},
    "graphpipe": {
        "Fig.": [f"3.{n}" for n in range(1, 10)],
        "Table": ["3.1", "3.2"],
        "Algorithm": ["2", "3", "4"],
    },
    "flexpipe": {
        "Fig.": [str(n) for n in range(1, 17)],
        "Table": [str(n) for n in range(1, 6)],
        "Algorithm": ["1"],
    },
    "autopipe": {"Fig.": [str(n) for n in range(1, 15)], "Table": ROMAN[1:], "Algorithm": ["1", "2"]},
    "tensoropt": {
        "Fig.": [str(n) for n in range(1, 9)],
        "Table": [str(n) for n in range(1, 5)],
        "Algorithm": ["1", "2", "3"],
    },
}
"""What each paper has; Tessel's Table I is of its notation."""
NUMBER = r"(?:\d+(?:\.\d+)?|[IV]+)(?![\w.]\w)"
MENTION = re.compile(rf"(Fig\.|Table|Algorithm)s?\s+({NUMBER}(?:(?: to |, | and ){NUMBER})*)")


def named_in(text: str) -> set[tuple[str, str]]:
    """(kind, number) of all that a page names, also in lists and ranges."""
    found = set()
    for kind, numbers in MENTION.findall(" ".join(text.split())):
        parts = re.split(r"( to |, | and )", numbers)
        found |= {(kind, number) for number in parts[::2]}
        for first, between, last in zip(parts[::2], parts[1::2], parts[2::2], strict=False):
            if between == " to " and first.isdigit() and last.isdigit():
                found |= {(kind, str(number)) for number in range(int(first), int(last))}
    return found


@pytest.mark.parametrize("paper", PAPERS)
def test_every_figure_table_and_algorithm_is_on_the_page(paper: str) -> None:
    named = named_in((ROOT / "docs" / "papers" / f"{paper}.md").read_text(encoding="utf-8"))
    assert [
        (kind, number) for kind, each in PAPERS[paper].items() for number in each if (kind, number) not in named
    ] == []


def test_lists_and_ranges_are_read() -> None:
    assert named_in("Fig. 4 to 6, and Fig. 8, 9; Table\nII, Tables III and IV; Fig. 3.7") == {
        *(("Fig.", number) for number in ("4", "5", "6", "8", "9", "3.7")),
        *(("Table", number) for number in ("II", "III", "IV")),
    }
