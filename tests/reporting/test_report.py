"""Reports: the figures, the terminal's tables and timeline, SVG, traces."""

from __future__ import annotations

import io
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from builders.chains import chain_plan, chain_workload, shared_workload
from builders.orders import gpipe_orders, one_f_one_b, serial_orders
from builders.plans import plan_of
from pipeplan.errors import PipeplanError
from pipeplan.files import Plan, parse, to_json
from pipeplan.files.trace import Trace
from pipeplan.reporting.drawing.svg import timeline_svg
from pipeplan.reporting.terminal import print_simulation, print_stages
from pipeplan.reporting.timeline import (
    device_row,
    predicted_trace,
    repetend_time_range,
    trace_text,
    windows,
)
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.action import Action
from support.paths import GOLDEN

SVG = "{http://www.w3.org/2000/svg}"


def circular_plan() -> Plan:
    """Two stages on each of two devices, split backward, lags, memory limits: most columns and letters in use."""
    workload = chain_workload(
        2,
        6,
        forward=2_000_000,
        split=(2_000_000, 1_000_000),
        lag=300_000,
        activation_bytes=3_000_000,
        weight_grad_bytes=1_000_000,
        workspace_bytes=500_000,
        parameter_bytes=40_000_000,
        memory_bytes=400_000_000,
        devices=[(0,), (1,), (0,), (1,)],
    )
    return plan_of(workload, serial_orders(workload))


def printed(plan: Plan, num_microbatches: int | None = None, width: int = 100) -> str:
    stream = io.StringIO()
    print_simulation(simulate(plan, num_microbatches), stream, width)
    return stream.getvalue()


# ---------------------------------------------------------------- terminal


@pytest.mark.parametrize(
    ("name", "plan", "num_microbatches", "width"),
    [
        ("simulate_1f1b", chain_plan(4, 8, forward=1000, backward=2000, repetend=True), None, 100),
        ("simulate_1f1b_long", chain_plan(4, 8, forward=1000, backward=2000, repetend=True), 60, 100),
        ("simulate_gpipe", chain_plan(3, 4, schedule="gpipe", lag=5), None, 72),
        ("simulate_circular", circular_plan(), None, 100),
        ("simulate_many_devices", chain_plan(40, 4, activation_bytes=10**9), None, 120),
    ],
)
def test_the_report_reads_as_agreed(name: str, plan: Plan, num_microbatches: int | None, width: int) -> None:
    text = printed(plan, num_microbatches, width)
    assert [line.rstrip() for line in text.splitlines()] == (GOLDEN / f"{name}.txt").read_text().splitlines()
    assert max(map(len, text.splitlines())) <= width


def test_plain_output_has_no_escape_codes_and_no_colour_none_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = chain_plan(2, 4)
    assert "\x1b" not in printed(plan)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    colourful = printed(plan)
    assert re.search("\x1b\\[[0-9;]*4[0-7]m", colourful), "bars have a background colour"
    monkeypatch.setenv("NO_COLOR", "1")
    without = printed(plan)
    assert not re.search("\x1b\\[[0-9;]*[34][0-7]m", without)
    assert re.sub("\x1b\\[[0-9;]*m", "", without) == re.sub("\x1b\\[[0-9;]*m", "", colourful)


def test_streams_that_are_not_unicode_get_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_simulation(simulate(chain_plan(2, 4)), stream, 80)
    stream.flush()
    assert b"F0-" in raw.getvalue()
    assert b"0F0 -> 1F0" in raw.getvalue()


def test_narrow_reports_put_memory_into_a_table_of_its_own() -> None:
    wide, narrow = printed(circular_plan(), width=160), printed(circular_plan(), width=76)
    titles = [line.split() for line in narrow.splitlines() if line.startswith(" device")]
    assert [title[1] for title in titles] == ["busy", "parameters", "limit"]
    assert "…" not in narrow
    assert [line.split()[1] for line in wide.splitlines() if line.startswith(" device")] == ["busy"]
    assert max(map(len, narrow.splitlines())) <= 76


def test_a_short_run_is_one_window_and_its_cells_are_its_actions() -> None:
    simulation = simulate(chain_plan(2, 2, forward=10, backward=20))
    (window,) = windows(simulation, 45)
    assert (window.start_ns, window.end_ns, window.num_cells) == (0, 90, 45)
    cells = device_row(simulation, 0, window)
    kinds = "".join(cell.kind or "." for cell in cells)
    assert kinds == "F" * 10 + "." * 10 + "B" * 10 + "." * 5 + "B" * 10
    assert "".join(cell.text or "-" for cell in cells).startswith("F0---F1---")


def test_a_long_run_is_its_beginning_repetend_and_end() -> None:
    simulation = simulate(chain_plan(4, 8, repetend=True), 200)
    parts = windows(simulation, 100)
    assert len(parts) == 3
    repetition = repetend_time_range(simulation)
    assert repetition is not None
    assert parts[0].start_ns == 0
    assert parts[1].start_ns <= max(repetition[0], parts[0].end_ns)
    assert repetition[1] <= parts[1].end_ns
    assert parts[2].end_ns == simulation.rates.makespan_ns
    assert sum(part.num_cells for part in parts) + 2 <= 100
    assert all(before.end_ns <= after.start_ns for before, after in zip(parts, parts[1:], strict=False))


def halved_plan() -> Plan:
    """1F1B whose first two forwards run in halves, the first one alone on the second stage, and none on the last."""
    workload = chain_workload(3, 8, forward=20, backward=40, sizes=[2, 2, 2])
    stages = tuple(replace(stage, num_parted=2 - index) for index, stage in enumerate(workload.stages))
    operations = tuple(
        replace(operation, part_ns=10 if operation.kind == "F" and stages[operation.stage].num_parted else None)
        for operation in workload.operations
    )
    workload = replace(workload, num_microbatches=4, microbatch_size=2, operations=operations, stages=stages)
    return plan_of(workload, one_f_one_b(workload))


def test_halves_are_numbered_by_their_micro_batch_in_every_timeline() -> None:
    """As the actions of the programs are; where a half has cells for its micro-batch alone, that stands there."""
    simulation = simulate(halved_plan())
    actions = [[text[1:] for text in map(simulation.graph.label, order)] for order in simulation.orders]
    assert actions[0][:4] == ["F0.0", "F0.1", "F1.0", "F1.1"]
    for width, shown in ((250, "[FB][0-9.]+"), (100, "[FB][0-9]+")):
        lines = printed(halved_plan(), width=width).splitlines()
        rows = [line.split(maxsplit=1)[1] for line in lines if re.match(" +[0-2] .*F0", line)]
        expected = [[text if width == 250 else text.partition(".")[0] for text in own] for own in actions]
        assert [re.findall(shown, row) for row in rows] == expected
        assert any("micro-batches in parts: F0.0 and F0.1" in line for line in lines)
    groups = ElementTree.fromstring(timeline_svg(simulation)).findall(f"{SVG}g")
    labels = [[text.text for text in group.findall(f"{SVG}text") if text.get("class") == "bar"] for group in groups]
    assert all(
        shown in (text, text[1:]) for own in zip(labels, actions, strict=True) for shown, text in zip(*own, strict=True)
    )


def test_forwards_in_halves_are_told_as_parts() -> None:
    simulation, shown = simulate(halved_plan()), io.StringIO()
    assert "4 micro-batches of 2 samples, the first 2 in 2 parts" in " ".join(printed(halved_plan(), width=250).split())
    assert simulation.figures()["sliced_microbatches"] == 2
    print_stages(simulation.workload, shown)
    found = [line.rstrip().partition(" first ")[2] for line in shown.getvalue().splitlines() if "block" in line]
    assert found[-3:] == ["2 forwards in 2 parts", "forward in 2 parts", ""]


def test_cells_show_what_takes_most_of_them() -> None:
    """In 3 cells for 90 ns each cell is 30 ns: F F idle of 10 each, idle, B."""
    simulation = simulate(chain_plan(2, 2, forward=10, backward=20))
    window = windows(simulation, 45)[0]
    coarse = type(window)(0, 90, 3)
    assert [cell.kind for cell in device_row(simulation, 0, coarse)] == ["F", "B", "B"]


def test_every_second_stage_of_a_device_has_small_letters() -> None:
    text = printed(circular_plan(), width=250)
    assert re.search("F0.*f0.*i0.*w0.*I0.*W0", text)
    assert "lower case: every other stage of a device" in text
    assert "lower case" not in printed(chain_plan(2, 4))


# ---------------------------------------------------------------- figures


def test_figures_are_json_and_have_what_search_prints() -> None:
    plan = chain_plan(4, 8, forward=10, backward=20, repetend=True, memory_bytes=4000)
    found = json.loads(json.dumps(simulate(plan).figures()))
    assert {key: found[key] for key in list(found)[:26] if key not in ("name", "placement")} == {
        "status": "optimal",
        "scheduler": "by-hand",
        "num_devices": 4,
        "idle_devices": [],
        "num_microbatches": 8,
        "microbatch_size": 1,
        "samples_per_replica": [1, 1],
        "makespan_ns": 330,
        "iteration_ns": 330,
        "exposed_reduction_ns": 0,
        "exposed_step_ns": 0,
        "exposed_gather_ns": 0,
        "samples_per_second": pytest.approx(8 / 330e-9),
        "tokens_per_second": None,
        "model_flops_utilisation": None,
        "lower_bound_ns": 330,
        "gap": 0.0,
        "period_ns": 30.0,
        "period_lower_bound_ns": 30.0,
        "unroll": 1,
        "span": 4,
        "bubble_rate": pytest.approx(1 - 24 / 33),
        "bubble_rate_span": pytest.approx(1 - 24 / 33),
        "bubble_rate_steady": 0.0,
    }
    assert found["peak_memory_bytes"] == [4000, 3000, 2000, 1000]
    assert found["fits"] is True
    assert (found["search_seconds"], found["repetend_seconds"]) == (None, None)
    assert found["devices"][1]["busy_ns"] == 240
    assert found["devices"][1]["in_flight"] == 3
    assert found["devices"][1]["memory_limit_bytes"] == 4000
    assert found["critical_path"]["device_ns"] == {"0": 30, "1": 30, "2": 30, "3": 240}
    assert found["critical_path"]["actions"][:4] == ["0F0", "1F0", "2F0", "3F0"]


def test_figures_without_a_repetend_are_null() -> None:
    found = simulate(chain_plan(2, 4, schedule="gpipe")).figures()
    assert [found[key] for key in ("period_ns", "unroll", "span", "bubble_rate_steady")] == [None] * 4


def test_the_critical_path_divides_the_makespan() -> None:
    found = simulate(chain_plan(3, 5, lag=7, split=(10, 10))).figures()
    path = found["critical_path"]
    assert isinstance(path, dict)
    assert sum(path["device_ns"].values()) + path["transfer_ns"] == found["makespan_ns"]
    assert path["transfer_ns"] > 0


# ---------------------------------------------------------------- SVG


def bars_of(root: ElementTree.Element) -> list[list[tuple[str, float, float, str]]]:
    """(class, x, width, tooltip) of each bar, per device."""
    return [
        [
            (rect.get("class", ""), float(rect.get("x", "")), float(rect.get("width", "")), rect[0].text or "")
            for rect in group.findall(f"{SVG}rect")
        ]
        for group in root.findall(f"{SVG}g")
    ]


def test_svg_has_a_bar_in_scale_for_every_action() -> None:
    simulation = simulate(chain_plan(3, 6, lag=5, repetend=True, unroll=3))
    bars = bars_of(ElementTree.fromstring(timeline_svg(simulation)))
    assert [len(row) for row in bars] == [12, 12, 12]
    (_, origin, width, _) = bars[0][0]
    scale = (width + 0.5) / 10  # a forward takes 10 ns; half a pixel is left between bars
    for device, row in enumerate(bars):
        for task, (kind, x, width, tip) in zip(simulation.orders[device], row, strict=True):
            label = simulation.graph.label(task)
            assert kind == Action.parse(label).kind
            assert tip.startswith(f"{label} ")
            assert x == pytest.approx(origin + simulation.starts[task] * scale, abs=0.01 * x + 0.2)
            assert width + 0.5 == pytest.approx(simulation.graph.durations[task] * scale, rel=0.02)


def test_svg_marks_the_repetend_on_each_device_and_numbers_bars() -> None:
    simulation = simulate(chain_plan(3, 9, repetend=True))
    root = ElementTree.fromstring(timeline_svg(simulation))
    frames = [rect for rect in root.findall(f"{SVG}rect") if "repetend" in rect.get("class", "").split()]
    assert len(frames) == 4  # one in the legend
    assert frames[1][0].text == "repetend, unroll 1, every 30ns"
    numbers = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "bar"]
    assert numbers.count("F8") == numbers.count("B8") == 3
    without = ElementTree.fromstring(timeline_svg(simulate(chain_plan(3, 9))))
    assert not [rect for rect in without.iter(f"{SVG}rect") if "repetend" in rect.get("class", "").split()]


def test_svg_escapes_names_and_writes_out_what_xml_does_not_allow() -> None:
    plan = chain_plan(2, 2).model_copy(update={"name": "a<b>&\"'\ufffe\u2028é", "placement": "<script>"})
    root = ElementTree.fromstring(timeline_svg(simulate(plan)))
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert texts[0] == "a<b>&\"'\\ufffe\\u2028é"
    assert texts[1].startswith("<script>, 2 devices")
    assert not list(root.iter(f"{SVG}script"))


@pytest.mark.slow
def test_svg_of_32768_bars_is_a_few_mebibytes() -> None:
    simulation = simulate(large_plan())
    text = timeline_svg(simulation)
    assert text.count("<title>") == 32768 + 64
    assert len(text.encode()) < 5 * 2**20


def large_plan() -> Plan:
    """1F1B without the helpers' slow replay: the programs are all that simulation reads."""
    small = chain_plan(64, 1)
    full = chain_workload(64, 256)
    programs = tuple(tuple(f"{id_}{m}" for id_, m in order) for order in one_f_one_b(full))
    return small.model_copy(update={"num_microbatches": 256, "programs": programs})


# ---------------------------------------------------------------- traces


def complete_events(text: str) -> list[dict[str, object]]:
    data = json.loads(text)
    assert data["displayTimeUnit"] == "ns"
    return [event for event in data["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("full_names", [False, True])
@pytest.mark.parametrize("shape", ["chain", "shared"])
def test_the_trace_has_the_actions_of_the_programs_under_the_same_names(shape: str, full_names: bool) -> None:
    workload = shared_workload(3, 4, lag=4) if shape == "shared" else chain_workload(3, 4, lag=4)
    plan = plan_of(workload, gpipe_orders(workload), full_names=full_names)
    seen: dict[int, list[str]] = defaultdict(list)
    for event in complete_events(trace_text(simulate(plan))):
        args = event["args"]
        assert isinstance(args, dict)
        seen[args["device"]].append(str(event["name"]))
    assert [sorted(seen[device]) for device in range(3)] == [sorted(program) for program in plan.programs]


def test_trace_times_are_exact_and_transfers_begin_when_their_producer_ends() -> None:
    simulation = simulate(chain_plan(2, 3, forward=1001, backward=2003, lag=507))
    events = {
        (event["name"], event["args"]["device"]): event
        for event in predicted_trace(simulation).events()[2:]
        if event["ph"] == "X"
    }
    for device, order in enumerate(simulation.orders):
        for task in order:
            event = events[simulation.graph.label(task), device]
            assert round(event["ts"] * 1000) == simulation.starts[task]
            assert round(event["dur"] * 1000) == simulation.graph.durations[task]
    send, receive, producer = events["0SEND_F2", 0], events["1RECV_F2", 1], events["0F2", 0]
    assert send["ts"] == receive["ts"] == pytest.approx(producer["ts"] + producer["dur"])
    assert send["dur"] == receive["dur"] == 0.507


def test_tracks_are_named_and_hold_no_overlapping_events() -> None:
    workload = chain_workload(2, 6, forward=10, backward=10, lag=55)
    plan = plan_of(workload, gpipe_orders(workload))
    events = predicted_trace(simulate(plan)).events()
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "device 0 compute" in names.values()
    assert "device 1 communication" in names.values()
    assert "device 1 communication 2" in names.values()
    tracks: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            tracks[event["tid"]].append((start, start + round(event["dur"] * 1000)))
    assert set(tracks) == set(names)
    for spans in tracks.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))


def test_measured_events_stand_beside_predicted_ones() -> None:
    measured, planned = Trace("measured"), Trace("predicted")
    measured.add("0F0", 0, 5, 10, {"step": 3})
    planned.add("0F0", 0, 5, 10)
    event, predicted = measured.events()[-1], planned.events()[-1]
    assert event["pid"] != predicted["pid"]
    assert event["tid"] == predicted["tid"]
    assert event["args"] == {"stage": 0, "microbatch": 0, "device": 0, "step": 3}
    assert measured.events()[0]["args"] == {"name": "measured"}


# ---------------------------------------------------------------- plans from strangers


def places(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value but its root."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*place, key)
        yield from places(child, (*place, key))


def damaged(data: dict[str, Any], choose: random.Random) -> dict[str, Any]:
    """A copy with one or two changes: values, and elements of lists dropped, repeated or swapped."""
    data = json.loads(json.dumps(data))
    for _ in range(choose.randint(1, 2)):
        *path, last = choose.choice(list(places(data)))
        parent: Any = data
        for key in path:
            parent = parent[key]
        if isinstance(parent, list) and choose.random() < 0.5:
            other = choose.randrange(len(parent))
            if choose.random() < 0.5:
                parent.pop(last)
            else:
                parent.insert(last, parent[other])
        else:
            parent[last] = choose.choice([0, 1, 2, 5, 10**15, -1, None, "0F0", "1B1", "0SEND_F0", "", [], True, 1.5])
    return data


def test_damaged_plans_are_simulated_or_refused_and_never_crash() -> None:
    choose = random.Random(5)
    workload = shared_workload(3, 4, lag=2)
    plans = [
        chain_plan(3, 6, repetend=True, split=(10, 10), lag=1),
        plan_of(workload, serial_orders(workload)),
    ]
    bases = [json.loads(to_json(plan)) for plan in plans]
    outcomes: Counter[str] = Counter()
    for _ in range(400):
        try:
            plan = parse(json.dumps(damaged(choose.choice(bases), choose)), Plan)
            simulation = simulate(plan, plan.num_microbatches + choose.choice([0, 1, 4]))
        except PipeplanError as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["simulated"] += 1
        json.dumps(simulation.figures())
        print_simulation(simulation, io.StringIO(), choose.randint(20, 150))
        ElementTree.fromstring(timeline_svg(simulation))
        json.loads(trace_text(simulation))
    assert set(outcomes) == {"FileError", "UsageError", "InvalidPlanError", "simulated"}
    assert min(outcomes.values()) >= 10
