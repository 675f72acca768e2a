"""``pipeplan simulate`` from the command line: outputs, exit codes, messages."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from builders.chains import chain_plan, chain_profile
from builders.clusters import cluster_of
from pipeplan.cli.main import main
from pipeplan.files import sha256_of, write_file
from support.paths import GOLDEN

KEYS = [
    "status",
    "scheduler",
    "makespan_ns",
    "lower_bound_ns",
    "gap",
    "period_ns",
    "period_lower_bound_ns",
    "unroll",
    "span",
    "bubble_rate",
    "bubble_rate_span",
    "bubble_rate_steady",
    "peak_memory_bytes",
    "num_microbatches",
    "search_seconds",
    "repetend_seconds",
]


class Run:
    """What a call of the command line did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Command = Callable[..., Run]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> Run:
        monkeypatch.setattr(sys, "argv", ["pipeplan", "simulate", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return Run(int(exit_.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_file(chain_plan(4, 8, forward=1000, backward=2000, repetend=True), str(path))
    return path


def test_prints_the_report(run: Command, plan: Path) -> None:
    result = run(plan)
    assert (result.code, result.err) == (0, "")
    lines = [line.rstrip() for line in result.out.splitlines()]
    assert lines[:7] == (GOLDEN / "simulate_1f1b.txt").read_text().splitlines()[:7]
    assert "critical path: 22 actions" in result.out


def test_json_is_one_object_with_the_agreed_keys(run: Command, plan: Path) -> None:
    result = run(plan, "--json")
    found = json.loads(result.out)
    assert (result.code, result.err) == (0, "")
    assert [key for key in KEYS if key not in found] == []
    assert (found["status"], found["makespan_ns"], found["gap"]) == ("optimal", 33_000, 0)
    assert found["search_seconds"] is None


def test_more_micro_batches(run: Command, plan: Path) -> None:
    found = json.loads(run(plan, "--microbatches", 50, "--json").out)
    assert (found["num_microbatches"], found["makespan_ns"]) == (50, 53 * 3000)


def test_a_plan_without_repetend_refuses_another_number(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "gpipe.json"
    write_file(chain_plan(2, 4, schedule="gpipe"), str(path))
    result = run(path, "--microbatches", 9)
    assert (result.code, result.out) == (2, "")
    assert "no repetend" in result.err
    assert "pipeplan search PROFILE --microbatches 9" in result.err
    assert run(path, "--microbatches", 4).code == 0


def test_svg_and_trace_are_written_beside_the_report(run: Command, plan: Path, tmp_path: Path) -> None:
    svg, trace = tmp_path / "t.svg", tmp_path / "t.json"
    result = run(plan, "--svg", svg, "--trace", trace)
    assert result.code == 0
    assert "bubble rate" in result.out
    assert len(list(ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}g"))) == 4
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 4 * 16 + 2 * 6 * 8


def test_measured_shows_what_a_run_of_the_plan_took(run: Command, tmp_path: Path) -> None:
    planned = chain_plan(2, 4, forward=2_000_000, backward=4_000_000, lag=500_000)
    plan, trace = tmp_path / "plan.json", tmp_path / "run.trace"
    write_file(planned, str(plan))
    text = (GOLDEN / "measured_chain.trace.json").read_text(encoding="utf-8")
    trace.write_text(text.replace("PLAN_SHA256", sha256_of(planned)), encoding="utf-8")
    done = run(plan, "--measured", trace)
    assert done.code == 0
    assert "emulated in 2 steps; first (warm-up) step excluded" in done.out
    found = json.loads(run(plan, "--measured", trace, "--json").out)
    assert found["measured"]["predicted_iteration_ns"] == found["makespan_ns"]
    assert found["measured"]["iteration_ns"] > found["makespan_ns"]
    write_file(chain_plan(2, 4), str(plan))
    done = run(plan, "--measured", trace)
    assert (done.code, done.out) == (2, "")
    assert "the trace is of another plan, 'chain'" in done.err


def test_one_output_goes_to_stdout_alone(run: Command, plan: Path) -> None:
    result = run(plan, "--svg", "-")
    assert ElementTree.fromstring(result.out).tag.endswith("svg")
    assert json.loads(run(plan, "--trace", "-").out)["traceEvents"]
    result = run(plan, "--svg", "-", "--json")
    assert (result.code, result.out) == (2, "")
    assert "--svg and --json would both print to stdout" in result.err
    result = run("-", "--profile", "-")
    assert result.code == 2
    assert "PLAN and --profile would both read from stdin" in result.err


def test_another_profile(run: Command, plan: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_file(chain_profile(4, forward=2000, backward=4000), str(profile))
    assert json.loads(run(plan, "--profile", profile, "--json").out)["makespan_ns"] == 66_000
    write_file(chain_profile(5), str(profile))
    result = run(plan, "--profile", profile)
    assert (result.code, result.out) == (2, "")
    assert "does not fit the plan" in result.err


def test_another_cluster_and_too_little_memory(run: Command, plan: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.json"
    write_file(
        cluster_of(4, memory_bytes=3500, latency_ns=100, name="tiny"),
        str(cluster),
    )
    result = run(plan, "--cluster", cluster, "--json")
    found = json.loads(result.out)
    assert result.code == 0
    assert found["makespan_ns"] > 33_000
    assert found["fits"] is False
    assert "too little memory: device 0 needs 4kB at 0F3, 500B more than its 3.5kB" in result.err


def test_a_plan_that_states_another_makespan_is_named(run: Command, tmp_path: Path) -> None:
    plan = chain_plan(2, 4)
    stated = plan.predicted.model_copy(update={"makespan_ns": 77})
    path = tmp_path / "plan.json"
    write_file(plan.model_copy(update={"predicted": stated}), str(path))
    result = run(path)
    assert result.code == 0
    assert "states a makespan of 77 ns, its programs take 150 ns" in result.err


@pytest.mark.parametrize(
    ("text", "message"), [("", "not readable as JSON"), ("{}", "not a valid plan file"), (None, "cannot be read")]
)
def test_files_that_are_no_plans_are_refused(run: Command, tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    result = run(path)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_plan_that_waits_for_itself_is_invalid(run: Command, tmp_path: Path) -> None:
    plan = chain_plan(2, 2)
    path = tmp_path / "plan.json"
    write_file(plan.model_copy(update={"programs": (plan.programs[0][::-1], plan.programs[1])}), str(path))
    result = run(path)
    assert (result.code, result.out) == (1, "")
    assert "wait for each other" in result.err
