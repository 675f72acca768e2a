"""``benchmarks/published_runs.py``: the keys of its JSON, and what its page says of closed forms and halves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import published_runs  # noqa: E402


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
    first, second = found["runs"]
    assert set(first) == set(second) == {"id", "step_s", "predicted_s", "error", "memory_error", "why_not", "assumed"}
    assert first["id"] == told["id"]
    assert first["step_s"] == told["step_s"]
    assert first["error"] == pytest.approx(first["predicted_s"] / told["step_s"] - 1)
    assert abs(first["memory_error"]) < 0.1
    assert "vocab" in first["assumed"]
    assert first["why_not"] is None
    assert (second["error"], second["why_not"]) == (None, "step_s is not printed")
    assert (found["summary"]["said"], found["summary"]["of"]) == (1, 2)


@pytest.mark.slow
def test_closed_forms_are_the_simulated_plans_and_halves_predict_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _printed(monkeypatch, capsys, "--simulate")
    apart, summary = found["closed_form_over_simulated"], found["summary"]
    assert len(apart) == summary["said"] >= 0.9 * summary["of"]
    assert max(map(abs, apart.values())) <= 0.03
    halves = "fitted on the other half of the sources"
    assert summary["dense"][halves]["mean"] <= 0.07
    assert summary["experts"][halves]["mean"] <= 0.2
