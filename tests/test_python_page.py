"""The types of docs/python.md are those of a strict user's script; it runs with all other pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import blocks
from support.paths import ROOT

PAGE = ROOT / "docs" / "python.md"


@pytest.mark.slow
def test_it_is_typed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    wrong = ["pipeplan.search(profile, device=4)", "pipeplan.search(profile, devices=[4])", "result.best"]
    code = [block.body for block in blocks(PAGE) if block.language == "python"]
    script.write_text("\n".join([*code, *wrong]), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    number = len("\n".join(code).splitlines())
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    places = [int(line.split(":")[1]) for line in errors]
    assert set(places) == {number + 1, number + 2, number + 3}, done.stdout
