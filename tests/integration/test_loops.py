"""Plans with a loop beside the same ones written out: programs, starts, memory and every figure are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from builders.drawn import Placed, placed, placed_chains, stage_graphs
from builders.loops import SHORTER, known, looped_plans, plan_with_loop
from builders.orders import gpipe_orders, one_f_one_b
from builders.shapes import shape_workload
from builders.timed import numbered
from pipeplan.checker import check
from pipeplan.checker.facts import Facts, Findings, Report
from pipeplan.checker.loop import check_loop
from pipeplan.checker.programs import Messages, read_programs
from pipeplan.checker.timeline import Links
from pipeplan.errors import InvalidPlanError
from pipeplan.files import Plan
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.search import first_look, plain_look
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.elements import Hop
from pipeplan.workload.engine import with_links
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.slices import in_parts, without_parts
from pipeplan.workload.steady_state.loop import LoopedOrders, looped
from pipeplan.workload.steady_state.rate import CutOrders
from pipeplan.workload.steady_state.repetend import extend, find_repetend
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from support.marks import always, slow_but, some_of


def unrolled(plan: Plan) -> Plan:
    return Plan.model_validate_json(plan.unrolled().model_dump_json())


def require_same(plan: Plan) -> None:
    """The plan, and the same written out, pass the check, and both come to the same."""
    short, full = check(plan), check(unrolled(plan))
    assert short.problems == full.problems == ()
    assert short.recomputed == full.recomputed
    assert plan.loop is not None
    assert plan.num_written < plan.num_microbatches == unrolled(plan).num_written
    assert simulated(plan) == simulated(unrolled(plan))


def simulated(plan: Plan) -> dict[str, Any]:
    """All figures but those of the loop itself, the critical path, which is of what is written, and the master stage,
    which a plan with a loop does not say."""
    figures = simulate(plan).figures()
    return {name: figures[name] for name in figures.keys() - {"loop", "critical_path", "master_stage"}}


def test_a_message_without_its_dependency_is_written_out_with_the_rest() -> None:
    """Nobody says which stage's micro-batches such a RECV counts; it is the checker that refuses it."""
    plan = looped_plans(chain_workload(4, 1), 12, 40)["1f1b"]
    wrong = plan.model_copy(update={"dependencies": tuple(each for each in plan.dependencies if not each.hops)})
    assert [len(list(program)) for program in wrong.whole_programs] == list(map(len, plan.whole_programs))


def test_of_a_long_run_only_a_short_one_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything that would take as long as it is."""
    made = TaskGraph.__init__

    def counted(graph: TaskGraph, workload: Workload, offsets: list[int], *rest: Any) -> None:
        assert offsets[-1] <= 20_000
        made(graph, workload, offsets, *rest)

    monkeypatch.setattr(TaskGraph, "__init__", counted)
    workload = chain_workload(4, 100_000)
    assert ShorterRun().actions(workload) < 4_000
    found = first_look(workload)
    assert found is not None
    assert (found.workload.num_microbatches, found.loop is not None) == (100_000, True)


@slow_but(
    "name, split",
    [(name, split) for name in ("v", "x", "m", "nn", "circular", "zbv") for split in (False, True)],
    lambda case: case in (("v", True), ("x", False)),
    always,
)
def test_classic_schedules_are_as_when_written_out(name: str, split: bool) -> None:
    """Everything, also the order of sends, is what the ordinary way through many micro-batches gives."""
    num_loops = 0
    short, workload = (shape_workload(name, 4, number, split=split) for number in (20, 44))
    for schedule in known(short):
        found = SHORTER.lengthened(schedule, workload)
        if found is None or found.loop is None:
            continue
        repetend = find_repetend(schedule.graph, schedule.orders, schedule.starts)
        larger = task_graph(workload)
        if repetend is None:
            assert schedule.scheduler == "gpipe"
            orders = numbered(larger, gpipe_orders(workload))
        else:
            _, orders = extend(short, schedule.orders, repetend, 44)
        full = plan_with_loop(LoopedOrders(larger, orders, [], None))
        plan = plan_with_loop(found)
        require_same(plan)
        assert (plan.unrolled().starts_ns, plan.unrolled().programs) == (full.starts_ns, full.programs)
        assert plan.predicted.memory == full.predicted.memory
        assert plan.predicted.makespan_ns == full.predicted.makespan_ns == found.makespan_ns
        num_loops += 1
    assert num_loops or name in ("nn", "zbv")


@settings(max_examples=some_of(25))
@given(drawn=placed(parts=False) | placed(parts=False, links=True) | stage_graphs(sizes=True), data=st.data())
def test_routes_sizes_replicas_and_links(drawn: Placed, data: st.DataObject) -> None:
    """Whatever has a loop is right, and one micro-batch after another always has one, unless stages are not joined."""
    each = OneMicrobatch.of(drawn.workload, require_room=False).microbatches_per_round
    short, workload = (drawn.workload.with_microbatches(each * number) for number in (8, 20))
    schedule = data.draw(st.sampled_from([*known(short)]))
    found = SHORTER.lengthened(schedule, workload)
    if found is not None and found.loop is not None:
        require_same(plan_with_loop(found))


@settings(max_examples=some_of(20))
@given(drawn=placed_chains())
def test_forwards_in_parts_are_before_the_loop(drawn: Placed) -> None:
    workload = drawn.workload.with_microbatches(12)
    plain = task_graph(without_parts(workload))
    orders = with_links(plain, numbered(plain, one_f_one_b(plain.workload)))
    repetend = find_repetend(plain, orders, earliest_starts(plain, orders))
    assert repetend is not None
    begins = CutOrders.of(plain.workload, orders, repetend.first, repetend.unroll).begins
    graph = task_graph(workload)
    parted = [begin + slots.num_parted for begin, slots in zip(begins, workload.slots, strict=False)]
    if all(begin >= slots.num_parted for begin, slots in zip(begins, workload.slots, strict=False)):
        run = looped(graph, in_parts(orders, graph)[: len(workload.devices)], parted, repetend.unroll, 12 + 40)
        if run is not None and run.loop is not None:
            require_same(plan_with_loop(run))


@settings(max_examples=some_of(20))
@given(drawn=placed(parts=False) | stage_graphs(sizes=True), data=st.data())
def test_whole_runs_in_a_row_are_right(drawn: Placed, data: st.DataObject) -> None:
    """Whatever repeats: group after group, what is left of the micro-batches first, with a group's memory at most."""
    each = OneMicrobatch.of(drawn.workload, require_room=False).microbatches_per_round
    group, rest, copies = (data.draw(st.integers(*ends)) for ends in ((1, 5), (0, 4), (2, 7)))
    short = drawn.workload.with_microbatches(each * group)
    schedule = data.draw(st.sampled_from([*known(short)]))
    found = SHORTER.in_groups(schedule, drawn.workload.with_microbatches(each * (rest % group + copies * group)))
    if found is not None:
        assert found.most_bytes <= schedule.most_bytes
        assert found.scheduler == f"{schedule.scheduler}+groups"
        if found.loop is not None:
            require_same(plan_with_loop(found))


def test_a_deep_pipeline_has_groups_of_as_many_microbatches_as_are_quickly_written() -> None:
    """Fewer than stages, so that no part of them repeats."""
    found = plain_look(shape_workload("v", 16, 5_003), 1_000)
    assert found is not None
    assert found.loop is not None
    assert found.scheduler == "1f1b+groups"
    plan = plan_with_loop(found)
    assert sum(map(len, plan.programs)) <= 3_000
    assert check(plan).valid


@pytest.fixture(scope="module")
def gpipe() -> Plan:
    """GPipe on four devices for 100,000 micro-batches."""
    short, workload = (shape_workload("v", 4, number) for number in (20, 100_000))
    found = SHORTER.lengthened(next(schedule for schedule in known(short) if schedule.scheduler == "gpipe"), workload)
    assert found is not None
    return plan_with_loop(found)


def test_gpipe_has_a_round_of_forwards_and_one_of_backwards(gpipe: Plan) -> None:
    """It is no repetend, and holds all its micro-batches at once."""
    plan = gpipe
    assert plan.loop is not None
    assert len(plan.loop.rounds) == 2
    assert plan.repetend is None
    report = check(plan)
    assert report.valid
    assert report.recomputed.num_actions == 800_000
    assert len(plan.model_dump_json()) < 20_000
    each = plan.operations[0].acquire_bytes
    assert [device.activation_bytes for device in plan.predicted.memory] == [100_000 * each] * 4
    assert simulate(plan).in_flight == (100_000,) * 4
    room = 100_000 * each - 1
    less = plan.model_copy(update={"devices": tuple(replace(one, memory_bytes=room) for one in plan.devices)})
    assert {problem.rule for problem in check(less).problems} == {"memory"}
    short, workload = (shape_workload("v", 4, number, memory=room) for number in (20, 100_000))
    fitting = {schedule.scheduler for schedule in known(short) if SHORTER.lengthened(schedule, workload)}
    assert "1f1b" in fitting
    assert "gpipe" not in fitting


@pytest.fixture(scope="module")
def plan() -> Plan:
    """1F1B on four devices for 100,000 micro-batches."""
    short, workload = (shape_workload("v", 4, number) for number in (20, 100_000))
    found = next(schedule for schedule in known(short) if schedule.scheduler == "1f1b")
    longer = SHORTER.lengthened(found, workload)
    assert longer is not None
    return plan_with_loop(longer)


def test_a_hundred_thousand_microbatches_are_few_in_a_file(plan: Plan) -> None:
    report = check(plan)
    assert report.valid
    assert report.recomputed.num_actions == 800_000
    assert len(plan.model_dump_json()) < 20_000
    assert plan.predicted.makespan_ns == plan.predicted.lower_bound_ns
    last = plan.whole_programs[0][-1]
    assert last == "0B99999"
    assert len(plan.whole_programs[0]) == 4 * 100_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"copies": 99_000}, "figures"),
        ({"round_ns": 4_000_001}, "loop"),
        ({"begins": (1, 1, 1, 1)}, "loop"),
        ({"ends": "shifted"}, "loop"),
    ],
)
def test_a_loop_that_says_otherwise_is_refused(plan: Plan, change: dict[str, Any], said: str) -> None:
    assert plan.loop is not None
    (round_,) = plan.loop.rounds
    if change.get("ends") == "shifted":
        change = {"begins": tuple(b + 4 for b in round_.begins), "ends": tuple(e + 4 for e in round_.ends)}
    if "copies" not in change:
        change = {"rounds": (replace(round_, **change),)}
    loop = replace(plan.loop, **change)
    skipped = plan.loop.skipped - loop.skipped
    changed = plan.model_copy(update={"loop": loop, "num_microbatches": plan.num_microbatches - skipped})
    report = check(changed)
    assert not report.valid
    assert said in {problem.rule for problem in report.problems}


def test_a_round_after_which_sizes_do_not_begin_anew_together_is_refused() -> None:
    """Of stages that take one sample and two: three are half of something."""
    workload = chain_workload(2, 16, sizes=[1, 2])
    found = next(each for each in known(workload) if each.scheduler == "1f1b")
    longer = SHORTER.lengthened(found, workload.with_microbatches(40))
    assert longer is not None
    plan = plan_with_loop(longer)
    assert plan.loop is not None
    assert check(plan).valid
    for number in (1, 3):
        loop = replace(plan.loop, microbatches=number)
        changed = plan.model_copy(
            update={"loop": loop, "num_microbatches": plan.num_microbatches - plan.loop.skipped + loop.skipped}
        )
        said = f"is {number}, after which not everything begins anew together"
        assert ("loop.microbatches", said) in {(each.place, each.message) for each in check(changed).problems}


@settings(max_examples=some_of(60))
@given(data=st.data())
def test_what_a_changed_loop_says_is_true_or_refused(data: st.DataObject, plan: Plan, gpipe: Plan) -> None:
    """A loop that stands elsewhere is accepted only where its plan written out is right, too."""
    given = data.draw(st.sampled_from([plan, gpipe]))
    assert given.loop is not None
    rounds = []
    for each in given.loop.rounds:
        moves = [data.draw(st.integers(-4, 4)) for _ in each.begins]
        length = data.draw(st.sampled_from([0, 0, 4, -2]))
        begins = tuple(max(0, begin + move) for begin, move in zip(each.begins, moves, strict=True))
        ends = tuple(max(0, end + move + length) for end, move in zip(each.ends, moves, strict=True))
        assume(all(begin <= end <= len(its) for begin, end, its in zip(begins, ends, given.programs, strict=True)))
        if rounds:
            assume(all(end <= begin for end, begin in zip(rounds[-1].ends, begins, strict=True)))
        rounds.append(replace(each, begins=begins, ends=ends) if data.draw(st.booleans()) else each)
    loop = replace(given.loop, rounds=tuple(rounds), copies=3)
    changed = given.model_copy(update={"loop": loop, "num_microbatches": given.num_written + loop.skipped})
    refused = {problem.rule for problem in _report(changed).problems} - {"figures"}
    if not refused:
        found = {problem.rule for problem in check(changed.unrolled()).problems}
        assert found <= {"figures"}


def test_rounds_of_what_waits_elsewhere_are_refused(gpipe: Plan) -> None:
    """Of two rounds one after another the second may wait for the first only where the same devices run both."""
    assert gpipe.loop is not None
    (edge,) = [each for each in gpipe.dependencies if (each.source, each.target) == ("3F", "3B")]
    late = replace(edge, hops=(Hop(source_device=3, target_device=3, latency_ns=1),))
    moved = gpipe.model_copy(update={"dependencies": (*(x for x in gpipe.dependencies if x is not edge), late)})
    findings = Findings()
    facts = Facts.of(moved)
    messages = Messages.of(Facts.of(gpipe))
    programs = read_programs(Facts.of(gpipe), messages, findings)
    links = Links.of(Facts.of(gpipe), messages, programs)
    check_loop(facts, messages, programs, links, findings)
    assert any("in two rounds" in problem.message for problem in findings.problems)


def _report(plan: Plan) -> Report:
    try:
        figures = plan.predicted.model_copy(update={"makespan_ns": simulate(plan).rates.makespan_ns})
    except InvalidPlanError:
        return check(plan)
    return check(plan.model_copy(update={"predicted": figures}))
