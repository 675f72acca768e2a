"""docs/python.md runs as it stands, and prints what it shows; its types are those of a strict user's script."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

PAGE = ROOT / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def test_every_block_prints_what_stands_under_it(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= 7
    known: dict[str, object] = {"__name__": "__main__"}
    with contextlib.chdir(tmp_path):
        for code, shown in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(PAGE), "exec"), known)
            assert printed.getvalue() == shown


@pytest.mark.slow
def test_it_is_typed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    wrong = ["pipeplan.search(profile, device=4)", "pipeplan.search(profile, devices=[4])", "result.best"]
    code = [code for code, _ in BLOCK.findall(PAGE.read_text(encoding="utf-8"))]
    script.write_text("\n".join([*code, *wrong]), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    number = len("\n".join(code).splitlines())
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    places = [int(line.split(":")[1]) for line in errors]
    assert set(places) == {number + 1, number + 2, number + 3}, done.stdout
