"""``benchmarks/published_runs.py``: the keys of its JSON, and what its page says of plans, closed forms and halves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeplan.costs.uniform.judging import judge, left_out_errors, read_runs
from pipeplan.planning.uniform import judged_by_plans
from support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import published_runs

KEYS = ("id", "step_s", "predicted_s", "error", "memory_error", "why_not", "assumed")


def _printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["published_runs.py", "--json", *words])
    published_runs.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_keys_of_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(published_runs.RUNS.read_text(encoding="utf-8"))
    rows = rows["runs"] if isinstance(rows, dict) else rows
    told = next(row for row in rows if row["id"] == "zb-6.2B-1F1B-m64")
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([told, told | {"id": "other", "step_s": None}]))
    found = _printed(monkeypatch, capsys, "--runs", str(path))
    assert set(found) == {"runs", "summary"}
    first, second = found["runs"]
    assert set(first) == set(second) == {*KEYS, "closed_form_s"}
    assert first["predicted_s"] == second["predicted_s"] != first["closed_form_s"]
    assert found["summary"]["closed_forms_apart"] == abs(first["closed_form_s"] / first["predicted_s"] - 1) < 0.03
    assert first["id"] == told["id"]
    assert first["step_s"] == told["step_s"]
    assert first["error"] == pytest.approx(first["predicted_s"] / told["step_s"] - 1)
    assert abs(first["memory_error"]) < 0.1
    assert "vocab" in first["assumed"]
    assert first["why_not"] is None
    assert (second["error"], second["why_not"]) == (None, "step_s is not printed")
    assert (found["summary"]["said"], found["summary"]["of"]) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 16])
def test_plans_are_near_closed_forms_and_runs_and_halves_predict_each_other(every: int) -> None:
    """Of one run in so many: errors are those of all of them, as closed forms have them, and plans are near these."""
    runs = judge(read_runs(published_runs.RUNS))
    judged = judged_by_plans(runs[::every])
    told = [each for each in judged if each.error is not None]
    assert all(each.predicted_s != each.closed_form_s for each in told)  # every one has a plan
    assert len(published_runs.closed_forms_apart(judged)) == len(told) >= 0.9 * len(judged)
    assert published_runs.most_apart(judged) <= 0.03
    told = told if every == 1 else [each for each in runs if each.error is not None]
    dense = [abs(each.error or 0) for each in told if each.is_dense]
    assert sum(dense) / len(dense) <= 0.055
    assert sum(each <= 0.2 for each in dense) >= 0.95 * len(dense)
    sources = sorted({each.source for each in told})
    errors = left_out_errors(told, [sources[::2], sources[1::2]])
    for is_dense, limit in ((True, 0.07), (False, 0.2)):
        group = [abs(errors[each.id]) for each in told if each.is_dense is is_dense]
        assert sum(group) / len(group) <= limit
