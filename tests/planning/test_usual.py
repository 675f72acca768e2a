"""Known schedules by closed form against their true orders, and what a search says of other plans."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from builders.clusters import cluster_of
from builders.profiles import joined
from pipeplan.costs import build_workload
from pipeplan.files import Block, CostRow, Profile
from pipeplan.partition.placement import place
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning import alternatives, trials
from pipeplan.planning.alternatives import (
    Alternative,
    DifferentPlans,
    _best,
    _is_fsdp,
    _why,
    choice_words,
    explained,
    kept_alternatives,
)
from pipeplan.planning.bounds import bound_is_over, request_bound
from pipeplan.planning.candidates import PlacementCandidate, placed, quick_first, uniform_choices
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, _made, run_search, search_of, search_plan
from pipeplan.planning.trials import PlanSearch, Trial
from pipeplan.planning.uniform_space import BoundedChoice, Choice, UsualParts
from pipeplan.planning.usual import USUAL, Usual, excess, usual_of
from pipeplan.reporting.terminal import print_explanation
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.pattern import microbatch_by_microbatch
from pipeplan.schedule.search import timed
from pipeplan.texts import counted
from pipeplan.time_limit import Limit, TimeUpError
from pipeplan.units import format_ns
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph
from support.marks import slow_but

pytestmark = pytest.mark.counted


def chain(count: int, shards: tuple[int, ...] = (1,), **others: Any) -> Profile:
    """Blocks of equal costs, of which each micro-batch holds one byte."""

    def row(parts: int) -> CostRow:
        times = {"forward_ns": 40, "backward_ns": 80, "input_grad_ns": 40, "weight_grad_ns": 40}
        parted = {name: ns // parts + (parts > 1) for name, ns in times.items()}
        parted["backward_ns"] = parted["input_grad_ns"] + parted["weight_grad_ns"]
        return CostRow(microbatch_size=1, shards=parts, activation_bytes=64 // parts, **parted, **others)

    rows = tuple(map(row, shards))
    return joined([Block(id=f"b{index}", operator="ffn", parameter_bytes=8, costs=rows) for index in range(count)])


@pytest.mark.parametrize("usual", [each for each in USUAL if each.name], ids=lambda each: each.name)
@pytest.mark.parametrize("positions", [2, 4, 5])
def test_schedules_hold_as_much_in_flight_as_their_closed_forms_say(usual: Usual, positions: int) -> None:
    """Of V-Half no more, as its turns need not wait; of the others exactly as much, on every position."""
    chunks = 2 if STRATEGIES[usual.strategy].chunked else 1
    profile, count = chain(positions * chunks), 4 * positions
    placement = place(profile, usual.strategy, positions, microbatch_size=1)
    workload = build_workload(
        profile, placement, num_microbatches=count, microbatch_size=1, split_backward=usual.splits
    )
    problem = OneMicrobatch.of(workload)
    graph = task_graph(problem.workload)
    peaks = peak_memory(graph, CLASSIC[usual.name].orders(problem, graph))
    static = [problem.workload.static_bytes(device) for device in range(positions)]
    held = [(peak.peak_bytes - own) / 64 for peak, own in zip(peaks, static, strict=True)]
    said = sum(usual.in_flight(np.array(positions), np.array(count), chunks, np.arange(positions)))
    if usual.name == "v-half":
        assert (np.array(held) <= said).all()
        assert said.max() <= positions + 1
    else:
        assert held == said.tolist()


def test_strategies_without_a_known_schedule_hold_as_much_as_another() -> None:
    assert [each.name for each in usual_of("v-shape", 2, True, "auto")] == ["zb-v", "v-half"]
    assert [each.name for each in usual_of("v-shape", 4, True, "auto")] == ["interleaved-1f1b"]
    assert [each.name for each in usual_of("one-to-one", 1, False, "auto")] == ["1f1b"]
    assert [each.name for each in usual_of("one-to-one", 1, True, "zb-h1")] == ["zb-h1"]


def test_stages_with_several_chunks_recompute_what_they_must() -> None:
    """Split blocks, and two stages per device: neither everything nor nothing is recomputed, and it fits."""
    asked: dict[str, Any] = {"devices": 8, "mini_batch": 16, "shards": 2, "placement": "circular", "chunks": 2}
    quick: dict[str, Any] = {"time_limit": 0.5, "deterministic": True, "scheduler": "interleaved-1f1b", "positions": 4}
    request = Request.of(chain(16, (1, 2)), memory_bytes=600, replicas=1, **asked, **quick)
    plan = search_plan(request).plan
    again = [flag for stage in plan.stages for flag in _flags(stage.recompute, len(stage.blocks))]
    assert len(again) == 16
    assert 0 < sum(map(bool, again)) < len(again)
    assert all(memory.peak_bytes <= 600 for memory in plan.predicted.memory)
    with_all = search_plan(
        Request.of(chain(16, (1, 2)), memory_bytes=600, replicas=1, recompute=True, **asked, **quick)
    )
    assert plan.predicted.iteration_ns < with_all.plan.predicted.iteration_ns


def _flags(recompute: Any, count: int) -> list[Any]:
    return list(recompute) if isinstance(recompute, (tuple, list)) else [recompute] * count


@pytest.mark.slow
def test_explained_plans_are_best_first_and_their_parts_add_up() -> None:
    request = Request.of(
        chain(8, (1, 2)), devices=4, mini_batch=8, memory_bytes=2000, time_limit=0.5, deterministic=True
    )
    result = search_plan(request, explain=True)
    assert result.explanation is not None
    found = result.explanation.alternatives
    assert 1 < len(found) <= 10
    assert len({each.what.split(";")[0] for each in found}) == len(found), "they differ in more than their schedules"
    assert found[0].iteration_ns == result.plan.predicted.iteration_ns
    assert [each.iteration_ns for each in found] == sorted(each.iteration_ns for each in found)
    for each in found:
        parts = each.work_ns + each.uneven_ns + each.messages_ns + each.bubble_ns + each.ending_ns
        assert abs(parts - each.iteration_ns) <= 1
        assert each.peak_bytes <= 2000 == each.memory_bytes
        assert each.limits.count("memory") == 1
    assert {each.what.split()[1] for each in result.explanation.common} == {"1", "2"}
    figures = json.loads(json.dumps(result.figures()))
    assert figures["alternatives"][0]["iteration_ns"] == found[0].iteration_ns
    assert "alternatives" not in search_plan(request).figures()
    shown = io.StringIO()
    print_explanation(result.explanation, shown)
    above, below = shown.getvalue().split("common layouts, and why they are not best\n")
    assert above.startswith("the best different plans, and the parts of each iteration that are no work\n")
    rows = [row for row in map(str.split, above.splitlines()[2:]) if row[-1].endswith("%")]
    for each, row in zip(found, rows, strict=True):
        assert (row[0], row[-1]) == (format_ns(each.iteration_ns), f"{each.peak_bytes / 2000:.0%}")
        longer = each.iteration_ns / found[0].iteration_ns - 1
        assert (f"{longer:+.1%}" == row[1]) == (longer > 0)
        assert f"      {each.what.split(';')[0]}" in above
    assert all(f"  {each.what}\n" in below for each in result.explanation.common)


def test_the_plan_that_was_made_is_marked_where_another_is_shorter() -> None:
    """There was no time to make the plan of the first: it is said below the table, and which row the plan is."""
    request = Request.of(
        chain(8, (1, 2)), devices=4, mini_batch=8, memory_bytes=2000, time_limit=0.5, deterministic=True
    )
    search = search_of(request, explain=True)
    run_search(search)
    first, *others = _best(search)
    place, second = next((n, each) for n, each in enumerate(others, 1) if (each.value_ns or 0) > (first.value_ns or 0))
    found = explained(search, _made(search, first))
    assert (found.returned, found.not_first) == (0, "")
    made = _made(search, second)
    search.not_made = "there was no time to make its plan; raise --time-limit"
    found = explained(search, made)
    shorter = 1 - (first.value_ns or 0) / (second.value_ns or 0)
    assert found.returned == place
    assert found.not_first == f"the first is {shorter:.1%} shorter, and {search.not_made}"
    figures = json.loads(json.dumps(found.figures()))
    assert [n for n, each in enumerate(figures["alternatives"]) if each["returned"]] == [place]
    assert next(kept_alternatives(search, made)).iteration_ns == second.value_ns
    shown = io.StringIO()
    print_explanation(found, shown)
    (marked,) = (line for line in shown.getvalue().splitlines() if line.startswith("*  "))
    assert marked[1:].split()[0] == format_ns(second.value_ns or 0)
    assert "* the plan above is the row with *: the first is " in shown.getvalue()


def test_the_row_of_the_plan_has_the_schedule_that_was_made() -> None:
    """Where there was no time to make the plan of a better one of the same layout."""
    request = Request.of(chain(8, (1, 2)), devices=4, mini_batch=8, time_limit=0.5, deterministic=True)
    search = search_of(request, explain=True)
    run_search(search)
    best = next(each for each in _best(search) if len(each.candidate.placement.stages) > 1)
    problem = OneMicrobatch.of(best.ways[0], require_room=False)
    longer = timed(problem, task_graph(best.ways[0]), microbatch_by_microbatch(problem), "sequential")
    assert longer is not None
    assert longer.iteration_ns > (best.value_ns or 0)
    made = _made(search, replace(best, best=longer, parted=None))
    found = explained(search, made)
    assert found.returned is not None
    assert found.alternatives[found.returned].iteration_ns == made.plan.predicted.iteration_ns == longer.iteration_ns
    assert [each.iteration_ns for each in found.alternatives] == sorted(
        each.iteration_ns for each in found.alternatives
    )
    assert found.not_first.startswith("the first is ")
    assert next(kept_alternatives(search, made)).iteration_ns == longer.iteration_ns


def test_explained_plans_are_as_full_as_what_they_may_use() -> None:
    """What is in reserve on a device is not theirs."""
    quick = cluster_of(2, memory_bytes=2000, latency_ns=1, bandwidth=10**13)
    how: dict[str, Any] = {"mini_batch": 4, "time_limit": 0.1, "deterministic": True}
    found = search_plan(Request.of(chain(4), cluster=quick, reserve_bytes=500, **how), explain=True)
    assert found.explanation is not None
    assert {each.memory_bytes for each in found.explanation.alternatives} == {1500}
    assert {each.memory_bytes for each in found.plan.provenance.alternatives} == {1500}


def test_ten_plans_are_explained_where_a_schedule_is_asked_for_too() -> None:
    """The same search finds two that are as short, and refutes all else by its bound."""
    how: dict[str, Any] = {"devices": 4, "mini_batch": 16, "time_limit": 0.5, "deterministic": True}
    found = search_plan(Request.of(chain(8, (1, 2)), scheduler="1f1b", **how), explain=True)
    assert found.explanation is not None
    shown = found.explanation.alternatives
    assert len(shown) == len({each.what for each in shown}) == 10
    assert all(each.what.endswith("; 1f1b") for each in shown)
    assert [each.iteration_ns for each in shown] == sorted(each.iteration_ns for each in shown)
    assert found.figures()["alternatives"] == [
        asdict(each) | {"limits": each.limits, "returned": each is shown[0]} for each in shown
    ]
    hurried = search_plan(Request.of(chain(8, (1, 2)), scheduler="1f1b", **(how | {"time_limit": 0.01})), explain=True)
    assert hurried.explanation is not None
    count = len(hurried.explanation.alternatives)
    assert count < 10
    assert any(note.startswith(f"time ran out after {count} different plan") for note in hurried.notes)


@slow_but("last", [0, 1, 4, 10], lambda last: last == 4)
def test_as_much_is_explained_as_there_is_time_for(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plans first; what is missing is said, and no plan is looked at twice."""
    how: dict[str, Any] = {"devices": 4, "mini_batch": 16, "time_limit": 0.5, "deterministic": True}
    request, looked = Request.of(chain(8, (1, 2)), **how), list[Trial]()
    whole = search_plan(request, explain=True)
    assert whole.explanation is not None
    assert len(whole.explanation.alternatives) == 10

    def until(trial: Trial) -> Alternative:
        if len(looked) == last:
            raise TimeUpError(Limit(0))
        looked.append(trial)
        return alternative(trial)

    alternative = alternatives._alternative
    monkeypatch.setattr(alternatives, "_alternative", until)
    found = search_plan(request, explain=True)
    assert len({id(trial) for trial in looked}) == last
    assert found.plan == whole.plan
    if not last:
        assert found.explanation is None
        assert "there was no time to explain what was found; raise --time-limit" in found.notes
        return
    assert found.explanation is not None
    assert found.explanation.alternatives == whole.explanation.alternatives[:last]
    fewer = (
        f"time ran out after {counted(last, 'different plan')} of 10 that are explained: raise --time-limit for more"
    )
    assert (fewer in found.notes) == (last < 10)
    lost = "there was no time to say why common layouts are not the best; raise --time-limit"
    assert (lost in found.notes) == (found.explanation.common is None)
    assert found.explanation.common is None or last == 10
    shown = io.StringIO()
    print_explanation(found.explanation, shown)
    assert ("common layouts" in shown.getvalue()) == bool(found.explanation.common)


def test_what_is_looked_at_to_explain_the_best_becomes_it_where_it_is_shorter() -> None:
    request = Request.of(chain(8, (1, 2)), devices=4, mini_batch=8)
    search = PlanSearch(request, Budget(1.0, deterministic=True), None, STEPS, explains=True)
    slowest = max(uniform_choices(request), key=lambda each: each.usual_ns)
    candidate = placed(request, slowest.choice)
    assert isinstance(candidate, PlacementCandidate)
    trial = Trial.of(request, candidate)
    trial.look()
    search.trials.append(trial)
    assert search.best is trial
    secured: list[Trial | None] = []
    search.secure = lambda: secured.append(search.best)
    for _ in range(100):
        DifferentPlans().run(search)
    assert secured, "its plan is made, or time is kept for it"
    assert secured[-1] is search.best is not trial
    shown = [each.iteration_ns for each in explained(search, _made(search, search.best)).alternatives]
    assert shown == sorted(shown)
    assert search.best is not None
    assert shown[0] == search.best.value_ns
    assert all((each.value_ns or 0) >= shown[0] for each in search.beside)


@pytest.mark.slow
def test_common_layouts_are_of_all_levels_where_these_are_open() -> None:
    """With --zero auto levels are tried one after another: FSDP is among what is explained all the same."""
    more = {"mini_batch": 8, "time_limit": 0.3, "deterministic": True}
    quick = cluster_of(4, memory_bytes=2000, latency_ns=1, bandwidth=10**13)
    found = search_plan(Request.of(chain(8, (1, 2)), cluster=quick, zero="auto", **more), explain=True)
    assert found.explanation is not None
    assert any(each.what.endswith(", FSDP") for each in found.explanation.common)


def test_devices_that_run_nothing_are_at_no_position() -> None:
    """Of three positions of two devices on eight, each has as much too little, whatever else there is."""
    profile = chain(6, shards=(2,))
    groups = [(0, 1), (2, 3), (4, 5)]
    usual = next(each for each in USUAL if each.name == "zb-h1")
    over = []
    for devices in (6, 8):
        placement = place(profile, "one-to-one", devices, microbatch_size=1, wide=groups)
        workload = build_workload(
            profile, placement, num_microbatches=8, microbatch_size=1, split_backward=True, memory_bytes=[80] * devices
        )
        over.append(excess(workload, usual))
    assert over[0] == over[1]
    assert over[0] is not None
    assert len(over[0]) == len(groups)
    assert over[0][0] > 0


@pytest.mark.slow
def test_reasons_do_not_refute_themselves_and_fsdp_is_a_common_layout() -> None:
    quick = cluster_of(4, memory_bytes=2000, latency_ns=1, bandwidth=10**13)
    request = Request.of(chain(8, (1, 2)), cluster=quick, mini_batch=8)
    table = uniform_choices(request)
    named = {choice_words(each.choice).rpartition(", ")[2] for each in table if _is_fsdp(each.choice)}
    assert named == {"FSDP"}
    each = next(each for each in table if each.choice.levels)
    parts = UsualParts(work=80.0, recomputed=12.0, uneven=3.0, exchanged=0.0, ending=1.0)
    tight = replace(each, least_ns=50, usual_ns=99.0, usual_bytes=3000.0, parts=parts)
    best = Alternative("best", 100, 80, 0, 0, 20, 0, 0, 1000, 2000)
    recomputes = "it recomputes blocks, as it would otherwise need 3kB of 2kB"
    tie = "a tie, as closed forms are a few percent off"
    assert _why(tight, best, 2000) == f"about 99ns by closed form, {tie}; {recomputes}"
    quicker, short = replace(tight, usual_ns=75.0, usual_bytes=1.0), "about 75ns by closed form,"
    assert _why(quicker, best, 2000) == f"{short} 25.0% shorter, but it was not looked at before the search ended"
    assert _why(quicker, best, 2000, math.inf) == f"{short} but as it is cut it does not fit"
    assert _why(quicker, best, 2000, 101) == f"{short} but as it is cut at least 101ns"
    tried = "no schedule of it that was tried is shorter"
    assert _why(quicker, best, 2000, 90) == f"{short} but as it is cut at least 90ns, and {tried}"
    assert _why(quicker, best, 2000, 75) == f"{short} but {tried}"
    longer = replace(tight, usual_ns=120.0)
    assert _why(longer, best, 2000) == f"about 120ns: bubble 20.0%; recomputing 10.0%; uneven stages 2.5%; {recomputes}"
    alone = replace(longer, least_ns=110, usual_bytes=1.0, parts=UsualParts(110.0, 0.0, 0.0, 0.0, 10.0))
    slower = "its blocks and what splits of them exchange take 37.5% longer"
    ending = "gradient all-reduces and the optimizer's step 8.3%"
    assert _why(alone, best, 2000) == f"about 120ns, at least 110ns: {slower}; {ending}"
    result = search_plan(replace(request, time_limit=0.3, deterministic=True), explain=True)
    assert result.explanation is not None
    assert any(each.what.endswith("FSDP") for each in result.explanation.common)
    whole = [each.why for each in result.explanation.common if " pp 1" in each.what]
    assert whole
    assert not any("uneven" in why or "bubble" in why for why in whole), "one stage waits for none"


def test_rows_that_are_quick_to_look_at_come_first() -> None:
    """Every row once: the best of few actions, better ones of four times as many, and so on; then all others."""
    rows = [
        BoundedChoice(
            Choice("one-to-one", 1, Batch(3 * count, 1), False, False, positions=count),
            1,
            100.0 + place,
            0.0,
            0.0,
            UsualParts(0.0, 0.0, 0.0, 0.0, 0.0),
        )
        for place, count in enumerate([115, 100, 55, 8, 18, 10, 4, 36, 11, 14])
    ]
    found = list(quick_first(rows))
    assert [each.choice.positions for each in found] == [8, 18, 10, 55, 115, 100, 4, 36, 11, 14]
    assert list(quick_first(rows[3:7])) == rows[3:7]
    long = Batch(10**6, 10**6)
    assert Choice("one-to-one", 1, long, False, False, positions=10).actions_looked_at == 30 * 66
    assert Choice("v-shape", 1, long, False, False, positions=40).actions_looked_at == 240 * 80
    much = [replace(rows[0], usual_ns=10.0), *(replace(each, usual_ns=20.0) for each in rows[1:])]
    assert list(quick_first(much)) == much
    assert not list(quick_first([]))
    kinds = [replace(each, choice=replace(each.choice, usual=USUAL[at % 2])) for at, each in enumerate(rows)]
    found = list(quick_first(kinds))
    assert [each.choice.positions for each in found[:8]] == [8, 18, 10, 4, 11, 14, 36, 55], "so many of each"


def test_of_many_actions_only_the_schedules_of_a_strategy_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none of these fits there may be no plan at all: then all are."""
    request = Request.of(chain(4), devices=2, mini_batch=8)
    candidate = PlacementCandidate(place(chain(4), "one-to-one", 2, microbatch_size=1), request.batch, False, "by hand")
    v_half = next(each for each in USUAL if each.name == "v-half")
    trial = Trial.of(request, candidate)
    trial.look(usual=v_half, others=False)
    assert trial.best is None
    monkeypatch.setattr(trials, "FEW_ACTIONS", trial.num_actions - 1)
    trial.look(usual=v_half)
    assert trial.best is None
    search = PlanSearch(request, Budget(1.0, deterministic=True), None, STEPS)
    monkeypatch.setattr(trials, "is_large", lambda request: True)
    search.look(trial, replace(candidate, usual=v_half))
    assert trial.best is not None
    other = Trial.of(request, candidate)
    search.trials.append(trial)
    search.look(other, replace(candidate, usual=v_half))
    assert other.best is None
    monkeypatch.undo()
    other.look(usual=v_half)
    assert other.best is not None


@pytest.mark.parametrize(("strategy", "chunks"), [("bidirectional", 1), ("bidirectional-v-shape", 2)])
def test_two_routes_are_looked_at_with_what_their_closed_form_says(
    strategy: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy orders, of many actions without holding less, wait no longer than it; nothing else that is quick does."""
    profile, positions, count = chain(8 * chunks), 8, 32
    request = Request.of(profile, devices=positions, mini_batch=count, split_backward=False)
    placement = place(profile, strategy, positions, microbatch_size=1)
    (usual,) = usual_of(strategy, chunks, False, "auto")
    assert usual.names(True) == usual.names(False)
    trial = Trial.of(request, PlacementCandidate(placement, Batch(count, 1), False, "by hand", usual=usual))
    trial.look(usual=usual, others=False)
    assert trial.best is not None
    assert trial.best.scheduler == "greedy"
    each = [np.array([float(ns * chunks)]) for ns in (40, 40, 40)]
    about = 120 * chunks * count + (positions - 1) * float(usual.bubble(*each, chunks)[0])
    assert 0.98 * about < trial.best.iteration_ns <= 1.03 * about
    monkeypatch.setitem(CLASSIC, "greedy", replace(CLASSIC["greedy"], trained=_refused, quick_tasks=1))
    again = Trial.of(request, trial.candidate)
    again.look(usual=usual, others=False)
    assert again.best is not None
    assert again.best.iteration_ns <= 1.02 * trial.best.iteration_ns


def _refused(*_: Any) -> Any:
    raise AssertionError("orders that take long to make")


def test_the_bound_goes_by_what_it_is_said_to_be_over() -> None:
    """What is not named makes no difference to it; what is named does where it leaves less."""
    request = Request.of(chain(8, (1, 2)), devices=4, mini_batch=8, memory_bytes=2000)
    bound = request_bound(request)
    assert bound_is_over(request) == []
    for unnamed in ({"positions": 2}, {"replicas": 2}, {"chunks": 2}, {"zero": 1}):
        assert bound_is_over(replace(request, **unnamed)) == []
        assert request_bound(replace(request, **unnamed)) == bound
    placed = {"placement": "one-to-one", "positions": 2, "replicas": 2}
    for named in ({"shards": 2}, {"recompute": True}, {"split_backward": False}, placed):
        assert len(bound_is_over(replace(request, **named))) == len(named)
        assert request_bound(replace(request, **named)) >= bound
    assert request_bound(replace(request, recompute=True)) > bound
