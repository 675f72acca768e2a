"""Screens fit for size: alike rows once and exactly, the answer in ten lines, nothing that flickers in a log file."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.chains import chain_plan, chain_profile, chain_workload
from builders.orders import one_f_one_b
from builders.plans import plan_of
from builders.requests import request_of
from pipeplan.cli.shared import Status
from pipeplan.files import Plan
from pipeplan.planning.build_plan import CandidateCounts, Result
from pipeplan.planning.next_steps import next_steps
from pipeplan.planning.request import Batch
from pipeplan.reporting.answer import LINES, print_answer
from pipeplan.reporting.layout import groups_of_equal, number_ranges, shared_rows, shown_rows
from pipeplan.reporting.terminal import (
    _memory_columns,
    _time_columns,
    print_simulation,
    print_stages,
    print_timeline,
)
from pipeplan.schedule.state import Schedule
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.units import format_bytes, format_ns
from support.commands import pipeplan
from support.paths import ROOT

CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def expanded(text: str) -> list[int]:
    """The numbers that a label of exact form means."""
    steps = re.fullmatch(r"(\d+)(?:-(\d+))?, (\d+)(?:-\d+)? \.\. (\d+)(?:-\d+)? \((\d+)\)", text)
    if steps is None:
        runs = [run.split("-") for run in text.split(", ")]
        return [number for run in runs for number in range(int(run[0]), int(run[-1]) + 1)]
    first, end, second, last = (int(each) if each else int(steps[1]) for each in steps.groups()[:4])
    found = [n for begin in range(first, last + 1, second - first) for n in range(begin, begin + end - first + 1)]
    assert len(found) == int(steps[5])
    return found


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(1, 4), st.integers(5, 9), st.integers(5, 30))
def test_labels_say_exactly_which_numbers(some: set[int], length: int, step: int, count: int) -> None:
    spaced = [begin * step + offset for begin in range(count) for offset in range(length)]
    assert expanded(number_ranges(spaced)) == spaced
    numbers = sorted(some)
    label = number_ranges(numbers)
    if " .. " not in label:
        assert expanded(label) == numbers
    else:
        assert label.endswith(f"({len(numbers)})")


def test_labels_as_people_read_them() -> None:
    assert number_ranges([3]) == "3"
    assert number_ranges([0, 1]) == "0-1"
    assert number_ranges([0, 1, 4, 6, 7, 8]) == "0-1, 4, 6-8"
    assert number_ranges(range(0, 64, 8)) == "0, 8 .. 56 (8)"
    assert number_ranges([n for n in range(64) if n % 8 < 2]) == "0-1, 8-9 .. 56-57 (16)"
    assert number_ranges([0, 2, 5, 9, 14, 20]) == "0 .. 20 (6)"


@given(st.lists(st.integers(0, 3)))
def test_every_row_is_in_one_group_of_equal_ones(rows: list[int]) -> None:
    groups = groups_of_equal(rows)
    assert sorted(number for group in groups for number in group) == list(range(len(rows)))
    assert all(len({rows[number] for number in group}) == 1 for group in groups)
    assert len({rows[group[0]] for group in groups}) == len(groups)


@given(st.integers(0, 200), st.integers(3, 40))
def test_rows_left_out_are_counted(count: int, most: int) -> None:
    rows = shown_rows(count, most)
    assert [n for row in rows for n in (row if isinstance(row, range) else [row])] == list(range(count))
    assert sum(not isinstance(row, range) for row in rows) == min(count, most)


def wide_plan(sizes: Sequence[int], num_microbatches: int = 8, **costs: Any) -> Plan:
    """1F1B of a chain whose stages each are split over so many devices."""
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    groups = [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
    workload = chain_workload(sum(sizes), num_microbatches, devices=groups, **costs)
    orders = [order for order, size in zip(one_f_one_b(workload), sizes, strict=True) for _ in range(size)]
    return plan_of(workload, orders)


def lines_of(print_it: Any, *arguments: Any, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    print_it(*arguments, file=stream)
    text = stream.getvalue()
    assert not CONTROLS.search(text)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (8, 8, 8, 8), (1, 2, 4, 1), (16, 1, 16)])
def test_alike_devices_share_a_row_and_every_one_is_in_one(sizes: tuple[int, ...]) -> None:
    simulation = simulate(wide_plan(sizes, memory_bytes=10**6, parameter_bytes=10**4))
    columns = [*_time_columns(simulation), *_memory_columns(simulation)]
    names, *shared = shared_rows("device", columns, 100)
    assert sorted(device for name in names.cells for device in expanded(name)) == list(range(sum(sizes)))
    for row, name in enumerate(names.cells):
        for device in expanded(name):
            assert [column.cells[row] for column in shared] == [column.cells[device] for column in columns]
    assert len(set(zip(*(column.cells for column in shared), strict=True))) == len(names.cells) <= len(sizes)


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_hundreds_of_devices_take_few_lines(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulate(PLANS["large"]())
    lines = lines_of(print_simulation, simulation, width=width, monkeypatch=monkeypatch)
    assert len(lines) < 45
    rows = [line.split()[0] for line in lines if re.match(r" *\d+-\d+ [─·F]", line)]
    assert rows == ["0-63", "64-191", "192-255"], "one row of the timeline for devices that run the same"
    timeline = lines_of(print_timeline, simulation, width=width, monkeypatch=monkeypatch)
    assert [line.split()[0] for line in timeline if re.match(r" *\d+-\d+ [─·F]", line)] == rows


def test_long_pipelines_show_the_first_the_middle_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(print_timeline, simulate(chain_plan(64, 4)), width=100, monkeypatch=monkeypatch)
    names = [line[:8].strip() for line in lines]
    assert [re.match(r"\d+( more)?|", name)[0] for name in names[1:9]] == [  # type: ignore[index]
        *("0", "1", "29 more", "31", "32", "29 more", "62", "63"),
    ]


def test_alike_stages_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = wide_plan((4,) * 12, parameter_bytes=10**4)
    slower = tuple(
        replace(each, duration_ns=99) if each.stage == 11 and each.kind == "F" else each
        for each in plan.workload.operations
    )
    lines = lines_of(print_stages, replace(plan.workload, operations=slower), width=120, monkeypatch=monkeypatch)
    rows = [re.split(r"  +", line.strip()) for line in lines[3:5]]
    assert [row[:3] for row in rows] == [
        ["0-10", "0-43, 4 each", "1 each, block0 .. block10"],
        ["11", "44-47", "block11"],
    ]
    few = lines_of(print_stages, wide_plan((4,) * 8).workload, width=120, monkeypatch=monkeypatch)
    assert [line.split()[0] for line in few[3:11]] == [*map(str, range(8))], "each with its blocks"


# The answer -------------------------------------------------------------------------------------------------------


def result_of(plan: Plan, bound_ns: int, *, timed_out: bool = False) -> Result:
    own = plan.predicted.lower_bound_ns
    none = cast("Schedule", None)  # whose figures are not shown
    return Result(plan, none, 1.0, None, False, bound_ns, own, CandidateCounts(3, 1, 4), timed_out)


def answer(plan: Plan, width: int, monkeypatch: pytest.MonkeyPatch, bound_ns: int = 300, **how: Any) -> list[str]:
    request = request_of(chain_profile(4), "auto", Batch(8, 1), len(plan.devices))
    result = result_of(plan, bound_ns, **how)
    return lines_of(print_answer, request, result, simulate(plan), width=width, monkeypatch=monkeypatch)


PLANS = {
    "chain": cache(lambda: chain_plan(4, 8, repetend=True, memory_bytes=4500)),
    "no limit": cache(lambda: chain_plan(4, 8, split=(10, 10))),
    "large": cache(lambda: wide_plan((64, 128, 64), memory_bytes=10**6)),
}


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("name", PLANS)
def test_the_answer_has_ten_lines(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = answer(PLANS[name](), width, monkeypatch, timed_out=True)
    assert lines[-1] == ""
    assert len(lines) - 1 <= LINES + (2 if width < 80 else 0)
    names = [line.split()[0] for line in lines[1:-1] if re.match("[a-z]+  ", line)]
    assert names == ["plan", "speed", "bound", "memory", "idle", "next"]


def test_the_answer_says_what_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(answer(PLANS["chain"](), 140, monkeypatch, timed_out=True))
    assert "best plan within the time limit for 4 devices of 4.5kB" in text
    assert "4 stages x 1 replica, one-to-one; by-hand; 8 micro-batches of 1 sample" in text
    assert "330ns per iteration of 8 samples" in text
    assert "300ns for any plan (10.0% away), 330ns on this placement (reached)" in text
    assert "fits: fullest device 0 with 4kB of 4.5kB (500B left); emptiest device 3 with 1kB" in text
    assert "27.3% of device time, filling and draining" in text
    assert "next    --microbatches 16: 15.8% more samples/s, idle 27.3% -> 15.8%" in text
    assert "--time-limit 60s: 4 placements not looked at yet" in text
    whole = "\n".join(answer(PLANS["chain"](), 140, monkeypatch, bound_ns=330))
    assert "optimal for 4 devices" in whole
    assert "330ns, reached: nothing that was left open is faster" in whole


@pytest.mark.parametrize("name", PLANS)
def test_reasons_to_idle_add_up_to_the_bubble_rate(name: str) -> None:
    simulation = simulate(PLANS[name]())
    assert simulation.iteration_ns == simulation.rates.makespan_ns
    assert simulation.idle.total == pytest.approx(simulation.rates.bubble_rate)


def test_reasons_to_idle_by_hand() -> None:
    """Devices 0 and 1 run 30 of 60 ns each; device 2 is not used; then come 20 ns of sums."""
    workload = chain_workload(3, 1, devices=[(0,), (1,)], forward=10, backward=20)
    stages = tuple(replace(stage, sync_ns=20) for stage in workload.stages)
    simulation = simulate(plan_of(replace(workload, stages=stages), [*one_f_one_b(workload), []]))
    idle = simulation.idle
    assert (simulation.rates.makespan_ns, simulation.iteration_ns) == (60, 80)
    assert idle.waiting is None
    expected = (1 / 3, 0, 2 / 3 * 30 / 80, 2 / 3 * 20 / 80)
    assert (idle.unused, idle.uneven, idle.ramps, idle.summing) == pytest.approx(expected)


def test_waiting_in_the_steady_state_is_apart_from_ramps() -> None:
    """1F1B with slow links: 8 micro-batches at the pace of the steady state, of which 30 ns each are work."""
    simulation = simulate(chain_plan(2, 8, repetend=True, unroll=2, lag=20))
    assert simulation.period_ns is not None
    assert simulation.period_ns > 30
    makespan, steady = simulation.rates.makespan_ns, 8 * simulation.period_ns
    found = simulation.idle.waiting, simulation.idle.ramps
    assert found == pytest.approx(((steady - 240) / makespan, (makespan - steady) / makespan))


def test_next_steps_say_what_they_bring() -> None:
    plan = chain_plan(4, 8, repetend=True)
    simulation: Simulation = simulate(plan)
    request = request_of(chain_profile(4), "auto", Batch(8, 1), 4, time_limit=5.0)
    steps = next_steps(request, result_of(plan, 300, timed_out=True), simulation, "p")
    found = {step.what: step.brings for step in steps}
    twice = simulate(plan, 16)
    rate = twice.throughput.samples_per_second or 0
    assert found["--microbatches 16"].startswith(f"{rate / (8 / 330e-9) - 1:.1%} more samples/s")
    assert found["--time-limit 10s"] == "4 placements not looked at yet"
    assert found["--memory SIZE"] == "plans that fit your devices; this one needs 4kB"
    assert list(found)[-1] == "pipeplan run p --emulate --local"
    optimal = next_steps(replace(request, memory_bytes=10**9), result_of(plan, 330), simulation, None)
    assert [step.what for step in optimal] == ["--microbatches 16", "-o plan.json"]


def test_search_answers_first_and_details_are_asked_for() -> None:
    asked = ("search", ROOT / "profiles" / "tessel-v.json", "--time-limit", "1s", "--deterministic")
    short, long = (pipeplan(*asked, *more).stdout for more in ((), ("--details",)))
    head = short.split("\n\n")[0].rstrip()
    assert len(head.splitlines()) <= LINES
    assert long.startswith(head)
    assert "--details prints" in short
    for text in ("critical path: ", "bottleneck: ", " peak ", "proved "):
        assert text in long.removeprefix(head)
        assert text not in short.removeprefix(head).rpartition("--details")[0]


# Zeros and progress -----------------------------------------------------------------------------------------------


def test_zero_has_no_unit() -> None:
    assert (format_ns(0), format_bytes(0), format_ns(0.0)) == ("0", "0", "0")
    assert (format_ns(1), format_bytes(1), format_ns(0.5)) == ("1ns", "1B", "0.5ns")
    stream = io.StringIO()
    print_simulation(simulate(wide_plan((1, 1), memory_bytes=10**6)), stream, 100)
    assert not re.search(r"(?<![\d.])0(ns|B)\b", stream.getvalue())


def test_logs_have_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with Status() as progress:
        for tenth in range(1000):
            progress("horizon", 2_000_000, 1_000_000, tenth / 10)
    said = capsys.readouterr().err
    assert not CONTROLS.search(said)
    assert said.splitlines() == [
        f"pipeplan: after {seconds}s: best 2ms, bound 1ms, gap 100.0%; horizon" for seconds in (10, 20, 40, 80)
    ]
