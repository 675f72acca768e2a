"""Screens fit for size: alike rows once and exactly, the answer in ten lines, nothing that flickers in a log file."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.chains import chain_plan, chain_profile, chain_workload
from builders.clusters import cluster_of
from builders.orders import one_f_one_b
from builders.plans import plan_of
from builders.requests import request_of
from pipeplan.cli.shared import Status
from pipeplan.costs import build_workload
from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.throughput import one_device_ns
from pipeplan.errors import UsageError
from pipeplan.examples import model
from pipeplan.examples.shapes import ShapeCosts, shape
from pipeplan.files import (
    Edge,
    PlacedStage,
    Placement,
    Plan,
    Profile,
    Recipe,
    Source,
    read_cluster,
    read_profile,
    write_file,
)
from pipeplan.interop.settings import megatron_settings, torchtitan_settings, trainer_arguments
from pipeplan.planning.build_plan import CandidateCounts, Result, provenance_of
from pipeplan.planning.next_steps import cannot_train, next_steps
from pipeplan.planning.request import Batch, Request, input_notes
from pipeplan.planning.steps import search_plan
from pipeplan.reporting.answer import LINES, print_answer
from pipeplan.reporting.layout import groups_of_equal, shared_rows, shown_rows
from pipeplan.reporting.terminal import (
    _memory_columns,
    _time_columns,
    print_simulation,
    print_stages,
    print_timeline,
    recomputed_words,
    zero_words,
)
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.state import Schedule
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.texts import number_ranges
from pipeplan.units import format_bytes, format_ns
from support.commands import pipeplan
from support.paths import ROOT

pytestmark = pytest.mark.counted

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
    shown = sum(not isinstance(row, range) for row in rows)
    assert min(count, most) <= shown <= len(rows) <= most + 2  # a row takes the room of saying that there is one more
    assert all(len(row) > 1 for row in rows if isinstance(row, range))


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


def test_no_bar_begins_before_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = ShapeCosts(3, None, 4, 5)
    asked = Request.of(shape("v", 4, costs=costs), num_microbatches=7, scheduler="zb-h1", deterministic=True)
    simulation = simulate(search_plan(replace(asked, time_limit=0.3)).plan)
    for width in range(60, 141):
        lines = lines_of(print_timeline, simulation, width=width, monkeypatch=monkeypatch)
        assert not [line for line in lines if "·─" in line], width


def test_long_pipelines_show_the_first_the_middle_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(print_timeline, simulate(chain_plan(64, 4)), width=100, monkeypatch=monkeypatch)
    names = [line[:8].strip() for line in lines]
    assert [re.match(r"\d+( more)?|", name)[0] for name in names[1:9]] == [
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


def result_of(
    plan: Plan, bound_ns: int, *, timed_out: bool = False, candidates: CandidateCounts | None = None
) -> Result:
    own = plan.predicted.lower_bound_ns
    none = cast("Schedule", None)  # whose figures are not shown
    counts = candidates or CandidateCounts(3, 1, 4)
    return Result(plan, none, 1.0, None, False, bound_ns, own, counts, timed_out)


def answer(plan: Plan, width: int, monkeypatch: pytest.MonkeyPatch, bound_ns: int = 300, **how: Any) -> list[str]:
    request = request_of(chain_profile(4), "auto", Batch(8, 1), len(plan.devices))
    result = result_of(plan, bound_ns, **how)
    return lines_of(print_answer, request, result, simulate(plan), width=width, monkeypatch=monkeypatch)


PLANS = {
    "chain": cache(lambda: chain_plan(4, 8, repetend=True, memory_bytes=4500)),
    "no limit": cache(lambda: chain_plan(4, 8, split=(10, 10))),
    "large": cache(lambda: wide_plan((64, 128, 64), memory_bytes=10**6)),
    "64 devices": cache(lambda: chain_plan(64, 8, memory_bytes=10**6)),
    "1,024 devices": cache(lambda: wide_plan((256, 256, 256, 256), memory_bytes=10**6)),
}


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("name", PLANS)
def test_the_answer_has_ten_lines(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = answer(PLANS[name](), width, monkeypatch, timed_out=True)
    assert lines[-1] == ""
    assert LINES == 10
    assert len(lines) - 1 <= 10 + (2 if width < 80 else 0)
    names = [line.split()[0] for line in lines[1:-1] if re.match("[a-z]+  ", line)]
    assert names == ["plan", "speed", "bound", "memory", "idle", "next"]


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("name", ["chain", "64 devices", "1,024 devices"])
def test_the_first_screen_fits_on_a_screen(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4, 64 and 1,024 devices: ten lines, then at most eight rows of the timeline between two lines about it."""
    simulation = simulate(PLANS[name]())
    answered = answer(PLANS[name](), width, monkeypatch, timed_out=True)
    timeline = lines_of(print_timeline, simulation, width=width, monkeypatch=monkeypatch)
    assert len(answered) + len(timeline) <= 24


def test_the_answer_says_what_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(answer(PLANS["chain"](), 140, monkeypatch, timed_out=True))
    assert "best plan within the time limit for 4 devices of 4.5kB" in text
    assert "4 stages x 1 replica, one-to-one; by-hand; 8 micro-batches of 1 sample" in text
    assert "330ns per iteration of 8 samples" in text
    assert "300ns for any plan (10.0% away), 330ns on this placement (reached); 4 placements not tried" in text
    assert "fits: fullest device 0 with 4kB of 4.5kB (500B left); emptiest device 3 with 1kB" in text
    assert "27.3% of device time, filling and draining" in text
    assert "next    --microbatches 16: 15.8% more samples/s, idle 27.3% -> 15.8%" in text
    assert "--time-limit 60s: 4 placements not tried" in text
    uncounted = CandidateCounts(3, 1, 4, at_least=True)
    text = "\n".join(answer(PLANS["chain"](), 140, monkeypatch, timed_out=True, candidates=uncounted))
    assert "330ns on this placement (reached); at least 4 placements not tried" in text
    assert "--time-limit 60s: at least 4 placements not tried" in text
    whole = "\n".join(answer(PLANS["chain"](), 140, monkeypatch, bound_ns=330))
    assert "optimal for 4 devices" in whole
    assert "330ns, reached: nothing that was left open is faster" in whole


@pytest.mark.parametrize("name", PLANS)
def test_reasons_to_idle_add_up_to_the_bubble_rate(name: str) -> None:
    simulation = simulate(PLANS[name]())
    assert simulation.iteration_ns == simulation.rates.makespan_ns
    assert simulation.idle.total == pytest.approx(simulation.rates.bubble_rate)


def test_a_timeline_says_what_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = chain_workload(2, 1, forward=10, backward=20)
    stages = tuple(replace(stage, sync_ns=20) for stage in workload.stages)
    for each, shown in ((workload, False), (replace(workload, stages=stages), True)):
        simulation = simulate(plan_of(each, one_f_one_b(workload)))
        lines = lines_of(print_timeline, simulation, width=80, monkeypatch=monkeypatch)
        assert lines[0].endswith("60ns")
        assert (lines[-1].strip() == "not drawn: after the last action 20ns summing gradients") is shown


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
    assert found["--time-limit 10s"] == "4 placements not tried"
    assert found["--memory SIZE"] == "plans that fit your devices; this one needs 4kB"
    assert list(found)[-1] == "pipeplan run p --emulate --local --steps 1"
    slower = replace(
        result_of(plan, 300, timed_out=True), placement_lower_bound_ns=300, candidates=CandidateCounts(3, 3, 0)
    )
    named_one = next_steps(replace(request, scheduler="1f1b"), slower, simulation, "p")
    found = {step.what: step.brings for step in named_one}
    words = "at most the 10.0% to the bound on this placement"
    assert found["--time-limit 10s"] == words, "as the answer's line of bounds has it"
    optimal = next_steps(replace(request, memory_bytes=10**9), result_of(plan, 330), simulation, None)
    assert [step.what for step in optimal] == ["--microbatches 16", "-o plan.json"]


def named(profile: Profile, device: str, method: str = "estimated") -> Profile:
    return profile.model_copy(update={"source": Source(method=method, device=device)})


def test_estimated_times_are_said_to_be_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the answer, in the report of the plan on its own, and not of measured ones."""
    for method, said in (("estimated", True), ("measured", False), ("literature", False)):
        plan = PLANS["chain"]()
        made = plan.provenance.model_copy(update={"method": method})
        plan = plan.model_copy(update={"provenance": made})
        assert ("speed   estimated 330ns per iteration" in "\n".join(answer(plan, 140, monkeypatch))) == said
        report = lines_of(print_simulation, simulate(plan), width=100, monkeypatch=monkeypatch)
        assert ("makespan     330ns, estimated" in report) == said
        assert provenance_of(named(chain_profile(4), "", method), None, {}).method == method


def test_the_speed_is_compared_with_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight micro-batches of four blocks take 30 ns each on one device, 960 ns in all; of a shard nothing is known.

    A device alone has the size and the way of backward that are quickest: 4 samples in 40 ns, and I and W in 15.
    """
    assert "; 2.9 times as fast as one device" in "\n".join(answer(PLANS["chain"](), 140, monkeypatch))
    assert one_device_ns(chain_profile(4), PLANS["chain"]().workload) == 960
    (block, *others) = chain_profile(4).blocks
    (row,) = block.costs
    halves = row.model_copy(update={"input_grad_ns": 8, "weight_grad_ns": 7, "backward_ns": 20})
    rows = (halves, row.model_copy(update={"microbatch_size": 4, "forward_ns": 20, "backward_ns": 20}))
    quick = [each.model_copy(update={"costs": rows}) for each in (block, *others)]
    sized = chain_profile(4).model_copy(update={"blocks": tuple(quick)})
    assert one_device_ns(sized, PLANS["chain"]().workload) == 2 * 4 * 40
    halved = [each.model_copy(update={"costs": (halves,)}) for each in (block, *others)]
    assert one_device_ns(
        chain_profile(4).model_copy(update={"blocks": tuple(halved)}), PLANS["chain"]().workload
    ) == 8 * 4 * (row.forward_ns + 15)
    rows = tuple(row.model_copy(update={"shards": 2}) for row in block.costs)
    split = chain_profile(4).model_copy(update={"blocks": (block.model_copy(update={"costs": rows}), *others)})
    assert one_device_ns(split, PLANS["chain"]().workload) is None


def test_replicas_on_free_links_are_said_to_be_on_free_links(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replicated(2)
    for cluster in (None, cluster_of(2)):
        request = request_of(chain_profile(1), "auto", Batch(4, 2), 2, cluster=cluster)
        asked = request, result_of(plan, 1), simulate(plan)
        lines = lines_of(print_answer, *asked, width=100, monkeypatch=monkeypatch)
        assert ("1 stage x 2 replicas (links are free), data parallel" in lines[1]) == (cluster is None)


def replicated(count: int, zero: int = 0) -> Plan:
    """One stage with so many replicas of one sample each."""
    workload = chain_workload(count, 4, devices=[range(count)], sizes=[count])
    stage = replace(workload.stages[0], shards=1, replicas=count, zero=zero)
    workload = replace(workload, stages=(stage,), microbatch_size=count)
    return plan_of(workload, [one_f_one_b(workload)[0]] * count)


def test_a_named_strategy_says_what_it_leaves_out() -> None:
    """Replicas, where a cluster prices them, and split blocks, where there are costs for these."""
    profile = model("gpt2-124m", shards=(1, 2), microbatch_sizes=[1])
    cluster = named_cluster("tessel", 4)
    request = request_of(profile, "one-to-one", Batch(4, 1), 4)
    dp, tp = "one copy of the pipeline (--dp)", "no block split over devices (--tp)"
    for changes, lacks in (
        ({}, [tp]),
        ({"cluster": cluster}, [dp, tp]),
        ({"cluster": cluster, "replicas": 2}, [tp]),
        ({"cluster": cluster, "replicas": 2, "shards": 1}, []),
        ({"cluster": cluster, "placement": "auto"}, []),
    ):
        notes = [note for note in input_notes(replace(request, **changes)) if note.startswith("--placement")]
        expected = f"--placement one-to-one looks at {' and '.join(lacks)}, unless you say otherwise"
        assert notes == [expected] * bool(lacks)


def test_the_bound_says_which_sizes_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replicated(2)
    request = request_of(chain_profile(1), "auto", Batch(4, 2), 2)
    rows: dict[str, Any] = {"shards": 1, "context": 1, "positions": 1, "replicas": 2, "chunks": 1}
    for asked, said in (
        (request, "for any plan ("),
        (replace(request, replicas=2), "for any plan ("),  # of which it is as well
        (replace(request, expert=2, recompute=True), "for any plan with --ep 2 --recompute all ("),
        (replace(request, placement="one-to-one"), "for any plan with --placement one-to-one ("),
        (replace(request, **rows), "for any plan with --tp 1 --cp 1 --pp 1 --vp 1 --dp 2 ("),
    ):
        lines = lines_of(print_answer, asked, result_of(plan, 1), simulate(plan), width=100, monkeypatch=monkeypatch)
        assert said in "\n".join(lines)


def test_what_run_cannot_train_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe with products in FP8; other formats need no word, nor does sharded state."""
    plan = replicated(2)
    mixed, products = (
        replicated(2, zero=1).model_copy(update={"recipe": Recipe(name=name)}) for name in ("bf16-mixed", "fp8-mixed")
    )
    request = request_of(chain_profile(1), "auto", Batch(4, 2), 2)
    for each, lacks in ((plan, []), (replicated(2, zero=1), []), (mixed, []), (products, ["fp8-mixed"])):
        assert cannot_train(each) == lacks
        shown = lines_of(print_answer, request, result_of(each, 1), simulate(each), width=140, monkeypatch=monkeypatch)
        said = [line for line in shown if line.startswith("run ")]
        row = f"run     training with {' and '.join(lacks)} is not built yet; --precision bf16-mixed is"
        assert len(row) <= 80
        assert said == [row] * bool(lacks)


def test_a_block_that_hands_on_several_tensors_is_said_not_to_train() -> None:
    """Of a model of torch; one that several blocks take has a name, and those of other profiles may mean anything."""
    profile = chain_profile(3)
    first, second, third = (block.id for block in profile.blocks)
    own = Edge(source=first, target=third)
    shared = tuple(Edge(source=first, target=each, tensor="0") for each in (second, third))
    for edges, versions, lacks in (
        ((own, *profile.edges), {"torch": "2"}, [f"several tensors of one block ({first})"]),
        ((*shared, profile.edges[-1]), {"torch": "2"}, []),
        ((own, *profile.edges), {}, []),
    ):
        source = profile.source.model_copy(update={"versions": versions})
        assert cannot_train(replicated(2), profile.model_copy(update={"edges": edges, "source": source})) == lacks


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        (False, ""),
        (True, "2 stages recomputed"),
        ("selective", "2 stages recomputed (attention)"),
        ((True, False, False), "2 stages recomputed (2 of 6 blocks)"),
        ((True, "selective", False), "2 stages recomputed (2 of 6 blocks, attention of 2 blocks)"),
    ],
)
def test_how_much_is_recomputed_is_said(recompute: Any, said: str) -> None:
    stages = [replace(stage, blocks=("a", "b", "c"), recompute=recompute) for stage in chain_workload(2, 4).stages]
    assert recomputed_words(stages) == said


def test_state_exchanged_with_every_action_is_said_so() -> None:
    stage = replace(replicated(2, zero=3).stages[0], unshard_every=1, reduce_every=1)
    assert zero_words([stage]) == "ZeRO 3 over 2 replicas (gathered with every action, reduced with every micro-batch)"


def test_one_hidden_row_is_shown_instead_of_counted() -> None:
    assert shown_rows(7, 6) == [*range(7)]
    assert shown_rows(10, 6) == [0, 1, range(2, 4), 4, 5, range(6, 8), 8, 9]


def test_a_schedule_that_was_dictated_is_not_called_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, profile = PLANS["chain"](), chain_profile(4)
    made = plan.provenance.model_copy(update={"scheduler": "rules: mine"})
    plan = plan.model_copy(update={"provenance": made})
    rules = Rules(name="mine")
    for placement, bound, heading in (
        (profile.placement, 300, "rules mine, as given, for 4 devices of 4.5kB"),
        ("one-to-one", 300, "rules mine, as given, on the best stages found for 4 devices of 4.5kB"),
        (profile.placement, 330, "rules mine, as given, optimal for 4 devices of 4.5kB"),
    ):
        assert placement is not None
        how = {"scheduler": "rules", "rules": rules}
        request = request_of(profile, placement, Batch(8, 1), 4, **how)
        asked = request, result_of(plan, bound), simulate(plan)
        lines = lines_of(print_answer, *asked, width=100, monkeypatch=monkeypatch)
        assert lines[0] == f"chain: {heading}"


def test_what_was_not_given_is_said() -> None:
    """The samples that nobody named, a cluster that carries nothing, and one of other devices."""
    profile = named(chain_profile(4, placed=False), "A100-SXM4-80GB")

    def notes(profile: Profile = profile, **asked: Any) -> str:
        return "\n".join(input_notes(Request.of(profile, devices=4, placement="one-to-one", **asked)))

    assert "16 samples assumed (4 per device); --mini-batch changes that" in notes()
    assert "assumed" not in notes(mini_batch=16) + notes(num_microbatches=16)
    unlike = "times are those of A100-SXM4-80GB, the cluster has H100-SXM5-80GB"
    assert unlike in notes(cluster=cluster_of(4, name="H100-SXM5-80GB"))
    same = notes(cluster=cluster_of(4, name="A100 of 80 GB", memory_bytes=80 * 10**9))
    assert "times are those" not in same + notes(cluster=cluster_of(4))
    bytes_, unused = {"cluster": cluster_of(4)}, "no message uses the cluster's links: the profile states the time"
    assert unused in notes(shape("v", 4), **bytes_)
    for costs in (ShapeCosts(edge_bytes=10**6), ShapeCosts(edge_bytes=10**6, activation_bytes=1)):
        assert "links" not in notes(shape("v", 4, costs=costs), **bytes_)
    bare = tuple(edge.model_copy(update={"bytes_per_sample": 0, "transfer_ns": None}) for edge in profile.edges)
    latency = "no edge has bytes_per_sample: of the cluster's links only the latency counts"
    assert latency in notes(profile.model_copy(update={"edges": bare}), **bytes_)


def test_weight_gradients_that_wait_at_no_cost_are_said() -> None:
    note = "weight gradients hold nothing in this profile (weight_grad_bytes): W runs later at no cost in memory"

    def notes(late: bool, **costs: Any) -> tuple[str, ...]:
        workload = chain_workload(2, 2, split=(10, 10), **costs)
        order = (("F", 0), ("F", 1), ("I", 0), *([("I", 1), ("W", 0)] if late else [("W", 0), ("I", 1)]), ("W", 1))
        return simulate(plan_of(workload, [[(f"{device}{kind}", m) for kind, m in order] for device in (0, 1)])).notes

    assert notes(late=True) == (note,)
    assert notes(late=False) == ()
    assert notes(late=True, weight_grad_bytes=100) == ()
    assert simulate(PLANS["chain"]()).notes == ()


def test_next_steps_run_as_they_stand(tmp_path: Path) -> None:
    """The frontier has the files and figures of the search, and memory that it is about; nothing speaks of others."""
    files = {"profile": named(chain_profile(4, placed=False), "H100-SXM5-80GB"), "cluster": cluster_of(4)}
    for name, file in files.items():
        write_file(file, str(tmp_path / f"{name}.json"))
    profile, cluster = read_profile(str(tmp_path / "profile.json")), read_cluster(str(tmp_path / "cluster.json"))
    plan = PLANS["chain"]()
    stages = tuple(replace(stage, recompute=True) for stage in plan.stages)
    simulation = simulate(plan.model_copy(update={"stages": stages}))
    request = request_of(profile, "auto", Batch(8, 1), 4, cluster=cluster, memory_bytes=4500)
    found = [step.what for step in next_steps(request, result_of(plan, 300), simulation, None)]
    (frontier,) = (what for what in found if "frontier" in what)
    limits = "--devices 4 --memory 9kB --mini-batch 8 --plans"
    assert frontier == f"pipeplan frontier {tmp_path}/profile.json --cluster {tmp_path}/cluster.json {limits}"
    assert not any("granularity" in what for what in found)
    other = replace(request, profile=chain_profile(4), cluster=None)
    assert not any("frontier" in step.what for step in next_steps(other, result_of(plan, 300), simulation, None))
    free = replace(request, memory_bytes=None, cluster=None)
    steps = {step.what: step.brings for step in next_steps(free, result_of(plan, 300), simulation, None)}
    assert steps["--memory 80GB"] == "plans that fit H100-SXM5-80GB; this one needs 4kB"


def test_stages_that_recompute_are_in_the_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS["chain"]()
    stages = tuple(replace(stage, recompute=n < 2) for n, stage in enumerate(plan.stages))
    simulation = simulate(plan.model_copy(update={"stages": stages}))
    lines = lines_of(print_simulation, simulation, width=140, monkeypatch=monkeypatch)
    assert "2 stages of 4 recomputed" in lines[0]
    assert "recomputed" not in lines_of(print_simulation, simulate(plan), width=140, monkeypatch=monkeypatch)[0]


@pytest.mark.parametrize(
    ("made", "again"),
    [
        (
            {"command": "pipeplan search c.json --rules 'my rules.toml' --microbatches 8 -o p.json"},
            "c.json --rules 'my rules.toml'",
        ),
        ({"command": "pipeplan search c.json --mini-batch=8 --devices 4"}, "c.json --devices 4"),
        ({"options": {"scheduler": "rules", "rules": "mine"}}, "PROFILE --rules FILE"),
        ({"options": {"scheduler": "1f1b", "rules": None}}, "PROFILE --scheduler 1f1b"),
        ({}, "PROFILE"),
    ],
)
def test_another_search_has_the_flags_of_the_first(made: dict[str, Any], again: str) -> None:
    plan = chain_plan(4, 8)
    plan = plan.model_copy(update={"provenance": plan.provenance.model_copy(update=made)})
    with pytest.raises(UsageError) as caught:
        simulate(plan, 16)
    assert str(caught.value).endswith(f"search one for 16: pipeplan search {again} --microbatches 16")


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
        f"pipeplan: after {seconds}s: best 2ms, bound 1ms, gap 100.0%; horizon" for seconds in (5, 10, 20, 40, 80)
    ]


def test_logs_have_a_line_for_a_better_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is 1 % better is said once 5 seconds have passed since the last line, and no other."""
    with Status() as progress:
        for tenth in range(500):
            best = 2_000_000 if tenth < 120 else 1_900_000 if tenth < 350 else 1_890_000
            progress("windows", best, 1_000_000, tenth / 10)
    said = re.findall(r"after (\d+)s: best ([\d.]+ms)", capsys.readouterr().err)
    assert said == [("5", "2ms"), ("10", "2ms"), ("15", "1.9ms"), ("30", "1.9ms")]


def test_settings_of_other_trainers_are_sizes_of_the_plan() -> None:
    profile = chain_profile(8, placed=False)
    asked = Request.of(profile, devices=4, mini_batch=16, placement="one-to-one", scheduler="1f1b", replicas=2, zero=1)
    asked = replace(asked, time_limit=0.3, deterministic=True)
    workload = simulate(search_plan(asked).plan).workload
    samples = workload.microbatch_size // 2
    there = torchtitan_settings(workload, "1f1b")
    assert "parallelism.pipeline_parallel_degree = 2" in there
    assert "parallelism.data_parallel_replicate_degree = 2" in there
    assert f"parallelism.pipeline_parallel_microbatch_size = {samples}" in there
    assert "training.local_batch_size = 8" in there
    assert "parallelism.pipeline_parallel_schedule = '1F1B'" in there
    assert any("no setting for ZeRO 1" in line for line in there)
    assert any("pipeline_parallel_schedule_csv" in line for line in torchtitan_settings(workload, "zb-h1+windows"))
    megatron = megatron_settings(workload, "1f1b")
    assert f"--micro-batch-size {samples}" in megatron
    assert {"--pipeline-model-parallel-size 2", "--global-batch-size 16", "--use-distributed-optimizer"} <= {*megatron}
    assert not any(line.startswith("#") for line in megatron)
    assert any("not this schedule (zb-h1)" in line for line in megatron_settings(workload, "zb-h1"))
    apart = shape("v", 4, costs=ShapeCosts(input_grad_ns=1, weight_grad_ns=1))
    assert isinstance(apart.placement, Placement)
    chain = apart.placement.model_copy(update={"strategy": "one-to-one"})
    split = build_workload(apart, chain, num_microbatches=4, microbatch_size=1, split_backward=True)
    whole = "# {} runs each backward whole, the plan splits it"
    assert any(line.startswith(whole.format("1F1B")) for line in torchtitan_settings(split, "1f1b"))
    assert any(line.startswith(whole.format("it")) for line in megatron_settings(split, "1f1b"))
    assert not any("each backward whole" in line for line in torchtitan_settings(split, "zb-v"))
    stages = [replace(stage, zero=3 * (index == 0)) for index, stage in enumerate(workload.stages)]
    uneven = replace(workload, stages=tuple(stages))
    assert torchtitan_settings(uneven, "1f1b") == ["# no settings: stages differ in how they are split"]


@pytest.mark.parametrize(
    ("zero", "group", "expected"),
    [
        (0, None, []),
        (1, None, ["# ZeRO 1: a DeepSpeed configuration with zero_optimization.stage = 1"]),
        (2, None, ["fsdp = True", 'fsdp_config = {"reshard_after_forward": False}']),
        (3, None, ["fsdp = True", 'fsdp_config = {"reshard_after_forward": True}']),
        (
            3,
            2,
            [
                *("fsdp = True", 'fsdp_config = {"reshard_after_forward": True}'),
                "parallelism_config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)",
            ],
        ),
    ],
)
@pytest.mark.parametrize("recompute", [False, True, "selective"])
def test_settings_of_transformers_trainer(
    zero: int, group: int | None, expected: list[str], recompute: bool | Literal["selective"]
) -> None:
    profile = chain_profile(2, placed=False)
    whole = PlacedStage(blocks=tuple(block.id for block in profile.blocks), devices=(0, 1, 2, 3), replicas=4)
    placement = Placement(strategy="one-to-one", num_devices=4, stages=(whole,))
    workload = build_workload(profile, placement, num_microbatches=8, microbatch_size=4)
    (stage,) = workload.stages
    stage = replace(stage, zero=zero, zero_group=group, recompute=recompute)
    how = 'fsdp_config["activation_checkpointing"] = True' if zero > 1 else "activation_checkpointing = True"
    again = {False: [], True: [how], "selective": ["# no setting for attention cores alone"]}[recompute]
    sizes = ["per_device_train_batch_size = 1", "gradient_accumulation_steps = 8"]
    assert trainer_arguments(replace(workload, stages=(stage,))) == [*sizes, *expected, *again]
    package = importlib.util.find_spec("transformers")  # which is not imported: that takes seconds
    assert package is not None
    assert package.origin is not None
    text = (Path(package.origin).parent / "training_args.py").read_text(encoding="utf-8")
    names = {line.partition(" = ")[0].partition("[")[0] for line in [*sizes, *expected, *again] if line[0] != "#"}
    assert all(re.search(rf"^    {name}: ", text, re.MULTILINE) for name in names)
    assert "reshard_after_forward" in text


def test_trainer_has_no_pipelines() -> None:
    assert trainer_arguments(simulate(chain_plan(2, 4)).workload)[0].startswith(
        "# no settings: it trains copies of the whole model"
    )
