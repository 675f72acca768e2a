"""The example of the docs that goes from a profile to training with a point of its frontier, as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from runtime_support.warm import warm_ranks
from support.commands import pipeplan
from support.paths import ROOT

_PAGE = ROOT / "docs" / "algorithms" / "frontier.md"


def _commands() -> list[list[str]]:
    section = _PAGE.read_text().split("## Train with a point of a frontier")[1].split("\n## ")[0]
    lines = [line.removeprefix("$ pipeplan ") for line in section.splitlines() if line.startswith("$ pipeplan ")]
    return [shlex.split(line) for line in lines]


@pytest.mark.slow
def test_a_point_trains_as_the_docs_say(tmp_path: Path) -> None:
    verbs, printed = [], ""
    for arguments in _commands():
        with warm_ranks():
            done = pipeplan(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        verbs, printed = [*verbs, arguments[0]], done.stdout
    assert verbs == ["profile", "example", "frontier", "check", "run"]
    assert printed.count("loss") == 3
