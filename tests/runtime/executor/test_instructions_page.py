"""The examples of docs/instructions.md, run as they stand, in their order."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeplan.cli.main import cli
from support.paths import ROOT

TEXT = (ROOT / "docs" / "instructions.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the page's files."""
    for block in blocks("python") + blocks("toml"):
        if name := re.match(r"# (\S+)\n", block):
            (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


EXTRA = {"profile": ["--repeats", "1"], "run": ["--steps", "2", "--json"], "simulate": ["--json", "--svg", "plan.svg"]}
"""Less work, and what can be looked at."""


@pytest.mark.slow
def test_commands(files: Path) -> None:
    """One after the other, the verbs know the instruction."""
    (commands,) = blocks("console")
    shown = []
    for line in commands.splitlines():
        _, _, verb, *rest = shlex.split(line)
        found = CliRunner().invoke(cli, [verb, *rest, *EXTRA.get(verb, [])])
        assert found.exit_code == 0, f"{line}\n{found.output}"
        shown.append(found.stdout)
    plan = json.loads((files / "plan.json").read_text())
    assert [stage["devices"] for stage in plan["stages"]] == [[0], [1], [0, 1]]
    assert all(step["loss"] > 0 for step in json.loads(shown[4])["steps"])
    kinds = {kind["kind"]: kind for kind in json.loads(shown[5])["measured"]["kinds"]}
    assert kinds["DARKEN"]["count"] == 4
    assert all("2DARKEN3" in (files / file).read_text() for file in ("trace.json", "plan.svg"))


def test_python() -> None:
    (code,) = (block for block in blocks("python") if not block.startswith("#"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "instructions.md", "exec"), {"__name__": "example"})
    assert printed.getvalue() == blocks("text")[0]
