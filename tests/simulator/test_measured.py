"""Predicted against measured: traces that are the prediction itself, ones with a known delay, and one of a real run."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.chains import chain_plan, chain_workload, shared_workload
from builders.loops import looped_plans
from builders.orders import gpipe_orders
from builders.plans import plan_of
from pipeplan.errors import FileError, UsageError
from pipeplan.files import Plan, sha256_of
from pipeplan.files.trace import MeasuredTrace, TimedText, read_trace
from pipeplan.reporting.beside import trace_beside
from pipeplan.reporting.tables import print_measured
from pipeplan.reporting.timeline import predicted_trace
from pipeplan.simulator.measured import compared
from pipeplan.simulator.measured_times import DeviceTimes, MeasuredComparison
from pipeplan.simulator.simulation import simulate
from pipeplan.units import format_ns
from support.paths import GOLDEN

Change = Callable[[str, int, int, int], TimedText]
"""(action, device, start, end) -> what is measured."""


def shared_plan() -> Plan:
    workload = shared_workload(2, 3, lag=7)
    return plan_of(workload, gpipe_orders(workload))


def unchanged(text: str, device: int, start: int, end: int) -> TimedText:
    return text, start, end


def run_of(plan: Plan, change: Change = unchanged, *, steps: int = 3, emulated: bool = False) -> MeasuredTrace:
    """A run in which everything happened as predicted, messages taking no time, but for what ``change`` says."""
    events = [event for event in predicted_trace(simulate(plan)).events() if event["ph"] == "X"]
    devices: list[list[TimedText]] = [[] for _ in plan.devices]
    for event in events:
        text, device = str(event["name"]), int(event["args"]["device"])
        start = round(float(event["ts"]) * 1000)
        end = start if "_" in text else start + round(float(event["dur"]) * 1000)
        devices[device].append(change(text, device, start, end))
    return MeasuredTrace(plan.name, sha256_of(plan), emulated, (tuple(map(tuple, devices)),) * steps)


def test_a_trace_of_more_actions_than_can_be_gone_through_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = looped_plans(chain_workload(2, 4), 8, 100)["1f1b"]
    trace = MeasuredTrace(plan.name, sha256_of(plan), False, run_of(plan.unrolled(), steps=1).steps)
    assert plan.num_unrolled == 400
    assert compared(simulate(plan), trace).ratio == 1.0
    monkeypatch.setattr("pipeplan.files.plan.MOST_UNROLLED", 399)
    with pytest.raises(UsageError, match="with 100 micro-batches the plan has 400 actions, of at most 399"):
        compared(simulate(plan), trace)
    with pytest.raises(UsageError, match="400 actions, of at most 399; leave out --trace"):
        trace_beside(simulate(plan), trace)


@pytest.mark.parametrize("plan", [chain_plan(4, 6, split=(10, 5), lag=3), shared_plan()], ids=["chain", "shared"])
def test_a_run_as_predicted_is_no_different(plan: Plan) -> None:
    simulation = simulate(plan)
    found = compared(simulation, run_of(plan))
    assert found.iterations_ns == (plan.predicted.makespan_ns,) * 2
    assert (found.ratio, found.num_left_out, found.replayed_ns) == (1.0, 1, plan.predicted.makespan_ns)
    assert found.bubble_rate == found.predicted_bubble_rate == pytest.approx(plan.predicted.bubble_rate)
    for kind in found.kinds:
        assert kind.ratio == (None if "_" in kind.kind else 1.0)
    assert sum(kind.count for kind in found.kinds if "SEND" in kind.kind) == sum(
        "SEND" in text for program in plan.programs for text in program
    )
    for device, busy in zip(found.devices, simulation.rates.busy_ns, strict=True):
        assert device.busy_ns == device.predicted_busy_ns == busy
        assert (device.waiting_ns, device.sending_ns) == (0, 0)
        assert device.outside_ns + device.other_ns == plan.predicted.makespan_ns - busy


def test_one_step_counts_itself() -> None:
    plan = chain_plan(2, 2)
    found = compared(simulate(plan), run_of(plan, steps=1))
    assert (found.num_left_out, len(found.iterations_ns)) == (0, 1)


def test_what_waits_for_the_others_of_an_action_is_not_work() -> None:
    """Device 0 comes early to every action of both; replicas would not wait, so there it counts as work."""
    plan = shared_plan()

    def early(text: str, device: int, start: int, end: int) -> TimedText:
        shared = "_" not in text and len(plan.devices_of(text[:2])) > 1
        return text, start - 4 * (shared and device == 0), end

    found = compared(simulate(plan), run_of(plan, early))
    num_shared = 3 * sum(len(stage.devices) > 1 for stage in plan.stages) * 2
    assert found.devices[0].waiting_ns == 4 * num_shared
    assert found.devices[1].waiting_ns == 0
    assert [device.busy_ns for device in found.devices] == [device.predicted_busy_ns for device in found.devices]
    stages = tuple(replace(stage, shards=1, replicas=len(stage.devices)) for stage in plan.stages)
    replicas = plan.model_copy(update={"stages": stages})
    run = run_of(plan, early)
    for emulated, busy in ((True, found.devices[0].busy_ns), (False, found.devices[0].busy_ns + 4 * num_shared)):
        own = MeasuredTrace(plan.name, sha256_of(replicas), emulated, run.steps)
        assert compared(simulate(replicas), own).devices[0].busy_ns == busy


def test_slow_actions_and_slow_messages_are_told_apart() -> None:
    plan = chain_plan(2, 3, forward=10, backward=20)

    def slow(text: str, device: int, start: int, end: int) -> TimedText:
        begin = 2 * start + (100 if device else 0)
        return text, begin, begin + (50 if "RECV" in text else 2 * (end - start))

    found = compared(simulate(plan), run_of(plan, slow))
    assert found.replayed_ns == 2 * plan.predicted.makespan_ns, "no message is late where only actions last"
    assert found.measured_ns > found.replayed_ns
    assert [kind.ratio for kind in found.kinds if kind.ratio is not None] == [2.0, 2.0]
    assert found.devices[0].waiting_ns == found.devices[1].waiting_ns == 3 * 50
    longer, rest = plan.predicted.makespan_ns, found.measured_ns - found.replayed_ns
    assert found.verdict == (
        f"{longer + rest:.0f}ns more than predicted; most of it: actions take 2 times as long ({longer}ns); "
        f"the rest: devices wait for messages and for each other ({rest:.0f}ns)"
    )


@pytest.mark.parametrize(
    ("measured", "replayed", "busy", "told"),
    [
        (1020, 1000, 900, "as predicted"),
        (2000, 1900, 1800, "1us more than predicted; most of it: actions take 2 times as long (900ns); the rest: dev"),
        (2000, 2100, 1800, "1us more than predicted: actions take 2 times as long"),
        (2000, 900, 900, "1us more than predicted: devices wait for messages and for each other (1.1us)"),
        (500, 500, 450, "500ns less than predicted: actions take 0.5 times as long"),
    ],
)
def test_one_line_says_where_time_went(measured: int, replayed: int, busy: int, told: str) -> None:
    device = DeviceTimes(900, busy, 0, 0, 0, 0)
    assert MeasuredComparison(False, 0, 1000, (measured,), replayed, (), (device,)).verdict.startswith(told)


def test_a_stretched_run_says_what_the_clock_did(capsys: pytest.CaptureFixture[str]) -> None:
    plan = chain_plan(2, 3, forward=10, backward=20)
    simulation = simulate(plan)
    found = compared(simulation, replace(run_of(plan, emulated=True), stretch=6.9))
    assert found.figures()["stretch"] == 6.9
    print_measured(simulation, found, sys.stdout, 200)
    makespan = plan.predicted.makespan_ns
    told = (
        f"times are the plan's, which the run stretched 6.9 times, to {format_ns(round(6.9 * makespan))} by the clock"
    )
    assert told in (out := capsys.readouterr().out)
    assert "verdict    as predicted" in out
    print_measured(simulation, compared(simulation, run_of(plan, emulated=True)), sys.stdout, 200)
    assert "stretched" not in capsys.readouterr().out


def test_another_plan_is_refused() -> None:
    plan = chain_plan(2, 2)
    with pytest.raises(UsageError, match=r"is of another plan, 'chain' with sha256 .*; give the plan that ran"):
        compared(simulate(chain_plan(2, 2, forward=11)), run_of(plan))
    whole = run_of(plan)
    first, second = whole.steps[0]
    for step in ((first, ()), (first * 2, second)):
        broken = MeasuredTrace(whole.plan, whole.plan_sha256, False, (step, step))
        with pytest.raises(UsageError, match=r"step 0 of the trace has .* on device [01] less or more often"):
            compared(simulate(plan), broken)
    longer = chain_plan(2, 8, repetend=True)
    with pytest.raises(UsageError, match="the run had 8 micro-batches; leave out --microbatches 20"):
        compared(simulate(longer, 20), run_of(longer))


# ---------------------------------------------------------------- traces


def ran() -> Plan:
    """The plan of the trace that lies in golden/."""
    return chain_plan(2, 4, forward=2_000_000, backward=4_000_000, lag=500_000)


def trace_of_run(directory: Path) -> str:
    """The trace, with today's fingerprint of its plan."""
    text = (GOLDEN / "measured_chain.trace.json").read_text(encoding="utf-8")
    assert text.count("PLAN_SHA256") == 1
    path = directory / "run.trace"
    path.write_text(text.replace("PLAN_SHA256", sha256_of(ran())), encoding="utf-8")
    return str(path)


def test_the_comparison_reads_as_agreed(tmp_path: Path) -> None:
    simulation = simulate(ran())
    comparison, stream = compared(simulation, read_trace(trace_of_run(tmp_path), 2)), io.StringIO()
    print_measured(simulation, comparison, stream, 120)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines == (GOLDEN / "measured_chain.txt").read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 120
    found = json.loads(json.dumps(comparison.figures()))
    assert found == json.loads((GOLDEN / "measured_chain.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: [], "not a trace that pipeplan run --trace has written"),
        (lambda file: file | {"otherData": {"plan": "x"}}, r"otherData\.plan_sha256: Field required"),
        (lambda file: file | {"traceEvents": []}, "has no measured actions"),
        (lambda file: file | {"traceEvents": [event(dur=-1.0)]}, "dur: Input should be greater"),
        (lambda file: file | {"traceEvents": [event(args={"device": 2, "step": 0})]}, "the plan has 2 devices"),
        (lambda file: file | {"traceEvents": [event(ts=1e308)]}, "ts: Input should be less"),
        (lambda file: file | {"traceEvents": [event(ts=-1e308)]}, "ts: Input should be greater"),
        (lambda file: file | {"traceEvents": [event(dur=1e306)]}, "dur: Input should be less"),
        (lambda file: file | {"otherData": file["otherData"] | {"stretch": 1e308}}, "stretch: Input should be less"),
        (lambda file: file | {"traceEvents": [event(args={"device": 0})]}, r"args\.step: Field required"),
    ],
)
def test_what_is_no_trace_is_refused(change: Callable[[Any], object], problem: str, tmp_path: Path) -> None:
    path = Path(trace_of_run(tmp_path))
    path.write_text(json.dumps(change(json.loads(path.read_text()))), encoding="utf-8")
    with pytest.raises(FileError, match=rf"run\.trace: .*{problem}"):
        read_trace(str(path), 2)


def event(**changed: object) -> dict[str, object]:
    usual = {"ph": "X", "pid": 2, "name": "0F0", "ts": 0.0, "dur": 1.0, "args": {"device": 0, "step": 0}}
    return usual | changed


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(FileError, match=r"run\.trace: not a trace"):
        read_trace(str(path), 2)
    with pytest.raises(FileError, match="cannot be read"):
        read_trace(str(tmp_path / "nowhere"), 2)
