"""The examples of docs/python.md, which tests/docs run, have the types of a strict user's script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import blocks
from support.paths import ROOT

WRONG = ("pipeplan.search(profile, device=4)", "pipeplan.search(profile, devices=[4])", "result.best")


@pytest.mark.slow
def test_the_pages_python_is_typed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    page = [block for block in blocks(ROOT / "docs" / "python.md") if block.language == "python"]
    for block in page:
        if block.file is not None:
            (tmp_path / block.file).write_text(block.body, encoding="utf-8")
    lines = [*"\n".join(block.body for block in page if block.file is None).splitlines(), *WRONG]
    script.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    environment = {**os.environ, "MYPYPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert {int(line.split(":")[1]) for line in errors} == {*range(len(lines) - 2, len(lines) + 1)}, done.stdout
