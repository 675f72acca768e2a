"""Orders that a rules file says outright: any schedule is one, and what cannot be is refused by device and action."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.chains import chain_workload
from pipeplan.errors import FileError, InfeasibleError, InvalidPlanError, PipeplanError, UsageError
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import Profile
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.rules.language import parse_rules, to_toml
from pipeplan.schedule.rules.sweep import built_in_rules, run_rules
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.task_graph import task_graph

SPLIT = ShapeCosts(input_grad_ns=1, weight_grad_ns=1)


def _unplaced(name: str, devices: int, **more: Any) -> Profile:
    return shape(name, devices, **more).model_copy(update={"placement": None})


@given(st.data())
def test_what_rules_make_is_an_order_that_makes_the_same(data: st.DataObject) -> None:
    workload = chain_workload(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)))
    graph = task_graph(workload)
    made = run_rules(graph, data.draw(st.sampled_from(built_in_rules(workload))))
    texts = [[graph.label(task) for task in order] for order in graph.on_devices(made.orders)]
    rules = Rules(name="mine", order=tuple(map(tuple, texts)))
    assert run_rules(graph, rules).starts == made.starts
    assert parse_rules(to_toml(rules), "other") == rules


@pytest.mark.parametrize(
    ("name", "chunks", "order"),
    [
        ("v", None, ("0F0,0F1,0B0,0B1", "1F0 1B0 1F1 1B1")),
        ("circular", 2, ("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")),
        ("v", None, ("0F0 0I0 0W0 0F1 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")),
    ],
)
def test_an_order_says_devices_stages_backward_and_microbatches(
    name: str, chunks: int | None, order: tuple[str, ...]
) -> None:
    profile = _unplaced(name, 2, chunks=chunks, costs=SPLIT if "I" in order[0] else ShapeCosts())
    found = search_plan(
        Request.of(profile, rules=Rules(order=order), scheduler="rules", time_limit=1.0, deterministic=True)
    )
    simulation = simulate(found.plan)
    texts = [
        [simulation.graph.label(task) for task in orders]
        for orders in simulation.graph.on_devices(found.schedule.orders)
    ]
    assert texts == [each.replace(",", " ").split() for each in order]
    assert found.plan.provenance.scheduler == "rules: rules"
    assert len(found.plan.devices) == 2


@pytest.mark.parametrize(
    ("order", "error", "words"),
    [
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), InvalidPlanError, "can never start; in the shortest circle"),
        (("0F0 0B0 0F1", "1F0 1B0 1F1 1B1"), UsageError, "order of device 0 leaves out 0B1; add what is missing"),
        (("0F1 0B0", "1F0 1F1 1B0 1B1"), UsageError, "leaves out 0F0, 0B1 (0F1 makes it 2 micro-batches); add"),
        (("0F0 0B0 0F1 0F1 0B1", "1F0 1B0 1F1 1B1"), UsageError, "order of device 0: 0F1 is there twice"),
        (("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1 0B1"), UsageError, "order of device 1: 0B1 is not one of its actions"),
    ],
)
def test_an_order_that_cannot_be_is_refused(order: tuple[str, ...], error: type[PipeplanError], words: str) -> None:
    with pytest.raises(error, match=r"^rules 'mine': ") as caught:
        run_rules(task_graph(chain_workload(2, 2)), Rules(name="mine", order=order))
    assert words in str(caught.value)


def test_what_is_asked_for_beside_an_order_has_to_agree() -> None:
    profile, rules = _unplaced("v", 2), Rules(name="mine", order=("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    for asked, words in (
        ({"num_microbatches": 4}, "give --microbatches 2"),
        ({"devices": 1}, "--devices 2 --placement all"),
    ):
        with pytest.raises(UsageError, match=words):
            search_plan(Request.of(profile, rules=rules, scheduler="rules", **asked))
    with pytest.raises(InfeasibleError, match="raise --memory to 2"):
        search_plan(Request.of(profile, rules=rules, scheduler="rules", memory_bytes=10**9, recompute=False))
    across = Rules(name="mine", order=("1F0 1B0 2F0 2B0", "0F0 0B0"))
    with pytest.raises(
        UsageError,
        match=r"no placement strategy puts stages where the order of rules .* has them; give --placement FILE",
    ):
        Request.of(profile, rules=across, scheduler="rules")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("order = [3]", "order"),
        ("order = ['0F0 nonsense']", "order of device 0: 'nonsense' is not an action"),
        ("order = ['0F0 0SEND_F0']", "0SEND_F0 is a message, which comes with what it carries; leave it out"),
        ("order = ['0F0 0B0']\nin_flight = 2", "order says all that in_flight would; leave out one of them"),
    ],
)
def test_files_with_an_order_that_is_none(text: str, words: str) -> None:
    with pytest.raises(FileError) as caught:
        parse_rules(text, "mine")
    assert words in str(caught.value)
    assert "{" not in str(caught.value)  # not the whole file


def _in_pairs(devices: int, count: int, ahead: int) -> tuple[tuple[str, ...], ...]:
    """Forwards and backwards in pairs, with so many forwards more in flight than stages that follow."""
    rows = []
    for device in range(devices):
        begun, ended = min(count, devices - device + ahead), 0
        row = [f"{device}F{m}" for m in range(begun)]
        while ended < count:
            both = range(ended, min(ended + 2, count))
            row += [f"{device}{kind}{m}" for m in both for kind in "IW"]
            row += [f"{device}F{m}" for m in range(begun, min(begun + 2, count))]
            ended, begun = both.stop, min(begun + 2, count)
        rows.append(tuple(row))
    return tuple(rows)


def _simulated(count: int, **more: Any) -> Any:
    profile = _unplaced("v", 4, costs=ShapeCosts(forward_ns=1, input_grad_ns=1, weight_grad_ns=1))
    rules = Rules(order=_in_pairs(4, count, 2))
    asked = Request.of(profile, rules=rules, scheduler="rules", time_limit=1.0, deterministic=True)
    return simulate(search_plan(asked).plan, **more)


def test_what_an_order_repeats_is_what_it_runs_again_and_again() -> None:
    """After warming up there is one place where it runs as 1F1B does, quicker than ever after: that is no steady state.

    With more micro-batches the same order takes as long as one written for as many.
    """
    small = _simulated(16)
    assert small.repetend is not None
    assert small.repetend.unroll == 2
    written = {count: _simulated(count).rates.makespan_ns for count in (24, 32)}
    assert {count: _simulated(16, num_microbatches=count).rates.makespan_ns for count in written} == written
    assert (written[32] - written[24]) / 8 == small.period_ns


def test_an_order_that_repeats_nothing_twice_has_no_repetend() -> None:
    assert _simulated(8).repetend is None
    with pytest.raises(UsageError, match="has no repetend, so it holds for its 8 micro-batches only"):
        _simulated(8, num_microbatches=32)
