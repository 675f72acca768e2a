"""The plans that ship: one for each profile, right, small, and what the command in its provenance writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pipeplan.checker import check
from pipeplan.files import Plan, read_plan, read_profile, to_json
from pipeplan.simulator.simulation import simulate
from support.marks import slow_but
from support.paths import ROOT
from support.shipped_plans import SHIPPED, remake

PAGE = ROOT / "docs" / "plans.md"
_MOST_BYTES = 50_000


def test_every_profile_has_a_plan() -> None:
    assert set(SHIPPED) == {path.stem for path in (ROOT / "profiles").glob("*.json")}


@pytest.mark.parametrize("name", SHIPPED)
def test_is_right(name: str) -> None:
    """By its profile, too; it takes as long as it says, and says how it was made, as the page does."""
    path = SHIPPED[name]
    plan, profile = read_plan(str(path)), read_profile(str(ROOT / "profiles" / path.name))
    check(plan, profile).require(path.name)
    assert simulate(plan).rates.makespan_ns == plan.predicted.makespan_ns
    assert path.stat().st_size <= _MOST_BYTES
    assert path.read_text(encoding="utf-8") == to_json(plan)
    command = plan.provenance.command
    assert shlex.split(command)[:3] == ["pipeplan", "search", f"profiles/{path.name}"]
    assert command.endswith(f" -o plans/{path.name}")
    assert re.search(rf"^\| \[{name}\].*`{re.escape(command)}` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@slow_but("name", SHIPPED, {"tessel-v"}.__contains__, lambda name: name.startswith(("gpt2", "tessel-flava")))
def test_is_made_again_by_its_command(name: str, tmp_path: Path) -> None:
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    (tmp_path / "plans").mkdir()
    remake(name, tmp_path)
    assert _masked(read_plan(str(tmp_path / "plans" / f"{name}.json"))) == _masked(read_plan(str(SHIPPED[name])))


def _masked(plan: Plan) -> str:
    """Without versions of what made it."""
    return to_json(plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"versions": {}})}))
