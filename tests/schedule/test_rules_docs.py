"""The examples of docs/algorithms/rules.md, run as they stand."""

from __future__ import annotations

import contextlib
import io
import re

from pipeplan.schedule.rules.language import parse_rules
from support.paths import ROOT

TEXT = (ROOT / "docs" / "algorithms" / "rules.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_files() -> None:
    assert len([parse_rules(block, "example") for block in blocks("toml")]) == 3


def test_python() -> None:
    (code,), (shown,) = blocks("python"), blocks("text")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "rules.md", "exec"), {"__name__": "example"})
    assert printed.getvalue() == shown
