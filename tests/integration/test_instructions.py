"""Instructions through workload, plan, check, simulation and reports (FlexPipe section 4.2, Fig. 6)."""

from __future__ import annotations

import io
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from random import Random
from typing import Literal

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.clusters import cluster_of
from builders.drawn import placed
from builders.instruction_towers import towers, towers_profile
from builders.orders import Orders, random_orders
from builders.plans import plan_of
from pipeplan.checker import check
from pipeplan.cli.main import cli
from pipeplan.costs import build_workload
from pipeplan.errors import FileError, UsageError
from pipeplan.files import PlacedStage, Placement, Plan, Profile, parse, read_plan, write_file, write_text
from pipeplan.planning.build_plan import assemble
from pipeplan.reporting.drawing.svg import timeline_svg
from pipeplan.reporting.terminal import print_simulation
from pipeplan.reporting.timeline import odd_stages, predicted_trace
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.rules import (
    CustomOp,
    Rules,
    TypeTraversal,
    schedule_by_rules,
    with_instruction,
    with_instructions,
)
from pipeplan.schedule.rules.language import parse_rules
from pipeplan.schedule.search import first_look, search_schedule
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.action import Action
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.elements import Dependency, Operation
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import in_order
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from support.marks import some_of

GATHER = CustomOp("GATHER", after=("image.*", "text.*"), before=("loss",), every=2, duration_ns=7)


def named(graph: TaskGraph, orders: list[list[int]]) -> Orders:
    """Orders of the devices as the hand-made plans have them."""
    ids = [operation.id for operation in graph.workload.operations]
    return [
        [(ids[graph.operation_of[task]], task - graph.offsets[graph.operation_of[task]]) for task in order]
        for order in graph.on_devices(orders)
    ]


def any_plan(workload: Workload, seed: int = 0) -> Plan:
    """A plan of a workload whose devices run any orders that come to an end."""
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    return plan_of(workload, named(graph, orders), lower_bound_ns=weak_iteration_bound(workload))


def pairs(workload: Workload) -> set[tuple[str, str]]:
    return {(each.source, each.target) for each in workload.dependencies}


@pytest.mark.parametrize("text", ["5ALLGATHER0", "0NORM12", "5SEND_ALLGATHER0>3@2", "3RECV_GATHER1", "2F0", "1SEND_F0"])
def test_actions_of_any_kind_have_one_text(text: str) -> None:
    assert str(Action.parse(text)) == text
    assert Action.parse(text).is_compute == ("_" not in text)


@pytest.mark.parametrize("text", ["5SEND0", "5RECV0", "5FB0", "5GATHER", "5Gather0", "5ALLGATHER0>3", "5SEND_W0"])
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


def test_kinds_have_one_order() -> None:
    assert in_order(["NORM", "W", "GATHER", "I", "F", "BIW", "B"]) == ["F", "B", "I", "W", "BIW", "GATHER", "NORM"]


def test_dependencies_go_through_an_instruction() -> None:
    workload = with_instruction(towers(every=2), GATHER)
    found = pairs(workload)
    assert {("1F", "5GATHER"), ("3F", "5GATHER"), ("5GATHER", "4F")} <= found
    assert not {("1F", "4F"), ("3F", "4F")} & found
    assert {("4B", "1B"), ("4B", "3B")} <= found, "gradients go back as they did"
    stage = workload.stages[5]
    assert (stage.blocks, stage.devices, stage.microbatch_size) == ((), (1, 3), 2)
    ids = [operation.id for operation in workload.operations]
    position = {id_: index for index, id_ in enumerate(ids)}
    assert all(position[source] < position[target] for source, target in found)
    assert [id_ for id_ in ids if id_ != "5GATHER"] == [operation.id for operation in towers(every=2).operations]


def test_messages_end_at_an_instruction_that_does_not_stand_where_they_began() -> None:
    """FlexPipe's asynchronous gather: the other tower sends as it goes, and the loss' device takes what has come."""
    before = towers(every=2)
    workload = with_instruction(before, replace(GATHER, devices=(1,), duration_ns=None))
    by_ends = {(each.source, each.target): each for each in workload.dependencies}
    old = {(each.source, each.target): each for each in before.dependencies}
    assert by_ends["3F", "5GATHER"].hops == old["3F", "4F"].hops != ()
    assert by_ends["1F", "5GATHER"].hops == ()
    assert workload.instructions[0].duration_ns == 1
    assert check(any_plan(workload)).problems == ()


@pytest.mark.parametrize("backward", ["B", "I"])
def test_instructions_stand_between_forward_and_backward(backward: str) -> None:
    """Fig. 6: behind the forwards of both last stages and before their backwards, whose own order stays."""
    base = towers()
    if backward == "I":
        place = placement_of(base)
        base = build_workload(split_towers(), place, num_microbatches=8, microbatch_size=1, split_backward=True)
    workload = with_instruction(base, CustomOp("SYNC", after=("1F", "3F"), before=("1B", "3B"), every=2))
    ends = {("1F", "5SYNC"), ("3F", "5SYNC"), ("5SYNC", f"1{backward}"), ("5SYNC", f"3{backward}")}
    assert pairs(workload) == pairs(base) | ends
    assert check(any_plan(workload)).problems == ()


def split_towers() -> Profile:
    """The same model with backwards in two parts."""
    parts = {"backward_ns": None, "input_grad_ns": 10, "weight_grad_ns": 10}
    profile = towers_profile()
    blocks = tuple(
        block.model_copy(update={"costs": tuple(row.model_copy(update=parts) for row in block.costs)})
        for block in profile.blocks
    )
    return profile.model_copy(update={"blocks": blocks})


def placement_of(workload: Workload) -> Placement:
    """Where a workload's stages stand."""
    stages = tuple(
        PlacedStage(blocks=each.blocks, devices=each.devices, microbatch_size=each.microbatch_size)
        for each in workload.stages
    )
    return Placement(strategy="towers", num_devices=4, stages=stages)


def test_instructions_follow_each_other() -> None:
    norm = CustomOp("NORM", after=("GATHER",), before=("loss",), every=2, attributes={"scale": 0.5, "ranks": (1, 3)})
    workload = with_instructions(towers(every=2), [GATHER, norm])
    assert {("5GATHER", "6NORM"), ("6NORM", "4F")} <= pairs(workload)
    assert ("5GATHER", "4F") not in pairs(workload)
    assert workload.stages[6].devices == (1, 3)
    plan = any_plan(workload)
    assert check(plan).problems == ()
    assert parse(plan.model_dump_json(), Plan) == plan


def test_bytes_take_the_clusters_time() -> None:
    cluster = cluster_of(4, latency_ns=100)
    gather = replace(GATHER, duration_ns=None, bytes_per_sample=1000)
    workload = with_instruction(towers(every=2, cluster=cluster), gather, cluster)
    assert workload.instructions[0].duration_ns == 100 + 1000, "one step of a ring with half of two samples' bytes"
    assert with_instruction(towers(every=2), gather).instructions[0].duration_ns == 1, "links cost nothing unless known"


@given(st.data())
@settings(max_examples=some_of(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_random_workloads_with_random_instructions(data: st.DataObject) -> None:
    """Start times are those of the plain replay; check, which knows neither, accepts them; bounds hold."""
    workload = data.draw(placed(links=data.draw(st.booleans()), parts=False)).workload
    if workload.num_routes > 1:
        workload = towers(every=data.draw(st.sampled_from([1, 2])))
    for number in range(data.draw(st.integers(1, 2))):
        workload = with_instruction(workload, _drawn_instruction(data, workload, f"KIND{'AB'[number]}"))
    graph = task_graph(workload)
    orders = with_links(
        graph, random_orders(graph, data.draw(st.randoms(use_true_random=False)))[: len(workload.devices)]
    )
    plan = assemble(graph, orders, weak_iteration_bound(workload), Fraction(0), "random")
    assert check(plan).problems == ()
    starts = earliest_starts(graph, orders)
    assert simulate(plan).starts == starts
    if not workload.links:
        assert plan_of(workload, named(graph, orders)).starts_ns == plan.starts_ns
    assert parse(plan.model_dump_json(), Plan) == plan


def _drawn_instruction(data: st.DataObject, workload: Workload, kind: str) -> CustomOp:
    """Behind one or two forwards, before a later one or none, with counts of its own or without."""
    count = len([stage for stage in workload.stages if stage.blocks])
    last = data.draw(st.integers(0, count - 1))
    after = tuple(sorted({last, data.draw(st.integers(0, last))}))
    devices = {device for stage in after for device in workload.stages[stage].devices}
    following = list(range(last + 1, count))
    before = (data.draw(st.sampled_from(following)),) if following and data.draw(st.booleans()) else ()
    devices |= {device for stage in before for device in workload.stages[stage].devices}
    ahead = data.draw(st.integers(0, 2))
    sizes = [stage.microbatch_size for stage in workload.stages]
    every = data.draw(st.sampled_from([1, 2, workload.num_microbatches]))

    def check_prev(stage: int, done: int, own_stage: int, microbatch: int, unit: int) -> bool:
        total = workload.mini_batch // sizes[stage]
        return done >= min(total, -(-(microbatch + 1) * unit * workload.microbatch_size // sizes[stage]) + ahead)

    return CustomOp(
        kind,
        after=after,
        before=before,
        devices=tuple(sorted(devices)),
        every=every,
        duration_ns=data.draw(st.integers(1, 20)),
        check_prev=data.draw(st.sampled_from([None, check_prev])),
    )


# Counts ----------------------------------------------------------------------------------------------------------


def check_prev(prev_stage: int, prev: int, cur_stage: int, cur: int, unit: int) -> bool:
    """Fig. 6 with one sample in a micro-batch, in units of the instruction."""
    return prev >= (cur + 1) * unit


def check_next(cur_stage: int, cur: int, next_stage: int, nxt: int, unit: int) -> bool:
    return (nxt + 1) <= cur


def test_the_papers_checks_say_what_samples_say() -> None:
    fig_6 = replace(GATHER, check_prev=check_prev, check_next=check_next)
    workload = with_instruction(towers(every=2), fig_6)
    assert workload == with_instruction(towers(every=2), GATHER)
    assert all(each.needs is None for each in workload.dependencies)


def late(ahead: int) -> CustomOp:
    """Two micro-batches are gathered when ``ahead`` more have run, as far as there are."""
    return replace(GATHER, check_prev=lambda s, done, c, m, unit: done >= min(8, (m + 1) * unit + ahead))


def test_counts_are_in_the_plan() -> None:
    workload = with_instruction(towers(every=2), late(3))
    needs = {each.source: each.needs for each in workload.dependencies if each.target == "5GATHER"}
    assert needs == {"1F": (5, 7, 8, 8), "3F": (5, 7, 8, 8)}
    plan = any_plan(workload)
    assert check(plan).problems == ()
    ends = {id_: [start + plan.operation(id_).duration_ns for start in plan.starts_ns[id_]] for id_ in ("1F", "3F")}
    assert all(
        start >= max(ends["1F"][:n] + ends["3F"][:n])
        for start, n in zip(plan.starts_ns["5GATHER"], needs["1F"], strict=True)
    )
    assert parse(plan.model_dump_json(), Plan) == plan


def test_check_knows_no_kind_and_refuses_what_starts_too_early() -> None:
    plan = any_plan(with_instruction(towers(every=2), late(0)))
    stricter = tuple(
        replace(each, needs=(8, 8, 8, 8)) if each.target == "5GATHER" else each for each in plan.dependencies
    )
    problems = check(plan.model_copy(update={"dependencies": stricter})).problems
    assert any(problem.rule == "inputs" and problem.place == "starts_ns[5GATHER][0]" for problem in problems)


def test_bounds_pass_over_dependencies_that_do_not_hold_for_all() -> None:
    """What waits for nothing may start at once, however long the way to the others is."""
    free = replace(GATHER, check_prev=lambda s, done, c, m, unit: m < 2 or done == 8)
    workload = with_instruction(towers(every=2), free)
    for seed in range(20):
        plan = any_plan(workload, seed)
        assert check(plan).problems == ()
        assert plan.predicted.makespan_ns >= weak_iteration_bound(workload)


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        ((1, 2), "has 2 entries for 4 actions of 5GATHER"),
        ((1, 2, 3, 9), r"needs\[3\] is 9, but 1F has 8 actions"),
    ],
)
def test_counts_must_fit(needs: tuple[int, ...], text: str) -> None:
    plan = any_plan(with_instruction(towers(every=2), GATHER))
    changed = [
        replace(each, needs=needs) if (each.source, each.target) == ("1F", "5GATHER") else each
        for each in plan.dependencies
    ]
    with pytest.raises(ValueError, match=text):
        Plan(**{**dict(plan), "dependencies": tuple(changed)})


def test_counts_are_for_instructions() -> None:
    plan = any_plan(towers())
    first = replace(plan.dependencies[0], needs=(1,) * 8)
    with pytest.raises(ValueError, match="needs is for dependencies of instructions"):
        Plan(**{**dict(plan), "dependencies": (first, *plan.dependencies[1:])})


# What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"after": ("nobody",)}, "after names 'nobody', which is no stage"),
        ({"before": (17,)}, "before names 17, which is no stage"),
        ({"every": 3}, "every 3 micro-batches are 3 samples, which do not divide the mini-batch of 8"),
        ({"devices": (1, 9)}, r"devices \[1, 9\] must be different ones of the 4 there are"),
        ({"devices": (0,)}, "device 0 gets nothing from 1F, which runs on"),
        ({"devices": (3,)}, "device 3 gets nothing from 1F"),
        ({"kind": "SEND"}, "a kind is a word of 3 to 24 capital letters other than SEND and RECV"),
        ({"kind": "F"}, "a kind is a word"),
        ({"attributes": {"nested": {"a": 1}}}, "attributes are texts of at most 8192 characters, finite numbers"),
        ({"attributes": {"long": 8193 * "x"}}, "attributes are texts of at most 8192 characters, finite numbers"),
        ({"after": ("loss",), "before": ("image.0",)}, "would wait for each other"),
        (
            {"check_prev": lambda *_: False},
            "5GATHER0 never becomes ready: its check refuses it even when all 8 actions of 1F",
        ),
        ({"check_next": lambda *_: False}, "4F0 never becomes ready"),
    ],
)
def test_bad_instructions_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        with_instruction(towers(every=2), replace(GATHER, **changes))  # type: ignore[arg-type]  # drawn from a table


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        (
            [("BBB", ()), ("AAA", ())],
            "AAA: after names BBB, and .* circle: (AAA before BBB before AAA|BBB .* BBB); lea",
        ),
        ([(1, "BBB"), (1, "AAA")], "AAA: before names BBB, and .* circle: (AAA before BBB before AAA|BBB .* BBB); lea"),
        ([("AAA", ()), (1, ())], "AAA: after names AAA, and .* circle: AAA before AAA"),
        ([("BBB", ()), (1, ())], "AAA: after names BBB, and an instruction .* earlier ones; write BBB in front of AAA"),
        ([(1, "BBB"), (1, ())], "AAA: before names BBB, and an .* earlier ones; write BBB in front of AAA"),
        ([(1, ()), ("nobody", ())], "BBB: after names 'nobody', which is no stage"),
    ],
)
def test_instructions_name_earlier_ones_only(ends: list[tuple[int | str, str | tuple[()]]], text: str) -> None:
    both = [
        CustomOp(kind, after=(after,), before=(before,) if before else (), duration_ns=1)
        for kind, (after, before) in zip(("AAA", "BBB"), ends, strict=True)
    ]
    with pytest.raises(UsageError, match=text):
        with_instructions(towers(), both)


def test_instructions_must_say_what_they_follow() -> None:
    with pytest.raises(UsageError, match="after is empty"):
        CustomOp("NORM")
    with pytest.raises(UsageError, match="every is 0; it must be at least 1"):
        replace(GATHER, every=0)


def test_attributes_are_for_instructions() -> None:
    with pytest.raises(ValueError, match="attributes are for instructions"):
        Operation(kind="F", stage=0, duration_ns=1, attributes={"a": 1})


def test_workloads_can_be_told_apart_by_their_hash() -> None:
    """Attributes are a mapping, which has none."""
    norm = replace(GATHER, attributes={"by": 0.5})
    assert len({with_instruction(towers(every=2), each) for each in (GATHER, norm, norm)}) == 2


def test_stages_without_blocks_run_instructions_and_stand_last() -> None:
    plan = any_plan(with_instruction(towers(every=2), GATHER))
    bare = replace(plan.stages[0], blocks=())
    with pytest.raises(ValueError, match=r"stages\[0\] has no blocks and stands before stages\[1\]"):
        Plan(**{**dict(plan), "stages": (bare, *plan.stages[1:])})
    named_one = replace(plan.stages[5], blocks=("extra",))
    problems = check(plan.model_copy(update={"stages": (*plan.stages[:5], named_one)})).problems
    assert [problem.rule for problem in problems][:1] == ["stages"]


def test_weight_gradients_are_not_sent() -> None:
    plan = any_plan(with_instruction(towers(every=2), GATHER))
    hop = next(hop for each in plan.dependencies for hop in each.hops)
    odd = Dependency(source="0W", target="5GATHER", hops=(hop,))
    assert odd.payload == ""


def test_other_searches_refuse_instructions() -> None:
    workload = with_instruction(towers(every=2), GATHER)
    with pytest.raises(UsageError, match=r"instructions \(5GATHER\).*--scheduler rules"):
        search_schedule(workload, Budget(1, deterministic=True))
    with pytest.raises(UsageError, match="--scheduler rules"):
        first_look(workload)


# Files -----------------------------------------------------------------------------------------------------------

RULES = """
types = "bwd-first"
in_flight = 5

[[instruction]]
kind = "GATHER"
after = ["image.*", "text.*"]
before = "loss"
every = 2
duration = "7ns"
[instruction.attributes]
to = [1, 3]
scale = 0.5

[[instruction]]
kind = "NORM"
after = ["GATHER"]
before = [4]
devices = [1, 3]
every = 2
bytes_per_sample = "2KB"
last = true
"""


def test_rules_files_say_what_python_says() -> None:
    found = parse_rules(RULES, "rules").instructions
    gather = replace(GATHER, attributes={"to": (1, 3), "scale": 0.5})
    norm = CustomOp("NORM", True, ("GATHER",), (4,), (1, 3), 2, None, 2000)
    assert found == (gather, norm)
    assert with_instructions(towers(every=2), found) == with_instructions(towers(every=2), [gather, norm])


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('kind = "NORM"', 'kind = "norm"', r"instruction\[1\].kind is 'norm'; a kind is a word"),
        ("every = 2\nduration", "every = 0\nduration", r"instruction\[0\].*every is 0; it must be at least 1"),
        ('"7ns"', '"soon"', r"instruction\[0\].duration is 'soon'; 'soon' is not a duration"),
        ('"7ns"', "7", r"instruction\[0\].duration is 7; write a text"),
        ('"2KB"', '"much"', r"instruction\[1\].bytes_per_sample is 'much'; 'much' is not a size"),
        ("before = [4]", "before = [4.5]", r"instruction\[1\].before\[0\] is 4.5; write a stage's number or the name"),
        ("last = true", "code = 'x'", r"instruction\[1\].code is not known; choose from kind, last, after"),
        ('after = ["GATHER"]', "", r"instruction\[1\].*after is empty"),
        ('"7ns"', '"7ns"\nbytes_per_sample = "1KB"', r"instruction\[0\].duration and bytes_per_sample both.*GATHER"),
    ],
)
def test_what_rules_files_may_not_say(old: str, new: str, text: str) -> None:
    assert RULES.count(old) == 1
    with pytest.raises(FileError, match=text):
        parse_rules(RULES.replace(old, new), "rules")


def test_search_takes_instructions_from_rules_files(tmp_path: Path) -> None:
    """From profile, placement and rules to a plan that passes check with the profile."""
    paths = [str(tmp_path / name) for name in ("profile.json", "rules.toml", "plan.json")]
    write_file(towers_profile().model_copy(update={"placement": placement_of(towers(every=2))}), paths[0])
    write_text(RULES, paths[1])
    asked = ["search", paths[0], "--scheduler", "rules", "--rules", paths[1], "--microbatches", "8", "-o", paths[2]]
    for verb in (asked, ["check", paths[2], "--profile", paths[0]], ["simulate", paths[2]]):
        found = CliRunner().invoke(cli, verb)
        assert found.exit_code == 0, found.output
    plan = read_plan(paths[2])
    assert [operation.id for operation in plan.workload.instructions] == ["5GATHER", "6NORM"]
    assert plan.operation("5GATHER").attributes == {"to": (1, 3), "scale": 0.5}


@pytest.mark.parametrize("time", ["unit", "true"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("devices", [(), (1,)])
def test_rules_of_all_sorts_order_instructions(
    time: Literal["unit", "true"], separate: bool, devices: tuple[int, ...]
) -> None:
    base = build_workload(
        split_towers(), placement_of(towers(every=2)), num_microbatches=8, microbatch_size=1, split_backward=True
    )
    for first, last, every in product(("bwd-first", "fwd-first", "interleaved"), (False, True), (2, 4)):
        gather = replace(GATHER, devices=devices, every=every, last=last)
        rules = Rules(types=TypeTraversal(first), time=time, separate=separate, in_flight=6, instructions=(gather,))
        graph = task_graph(with_instructions(base, rules.instructions))
        plan = assemble(
            graph, schedule_by_rules(graph, rules), weak_iteration_bound(graph.workload), Fraction(0), "rules"
        )
        assert check(plan).problems == ()


# Everything that reads plans -------------------------------------------------------------------------------------


def test_a_plan_with_instructions_fits_its_profile() -> None:
    workload = with_instruction(towers(every=2), GATHER)
    plan = any_plan(workload)
    assert check(plan, towers_profile()).problems == ()
    assert simulate(plan, profile=towers_profile()).rates.makespan_ns == plan.predicted.makespan_ns
    cut = tuple(each for each in plan.dependencies if (each.source, each.target) != ("5GATHER", "4F"))
    problems = check(plan.model_copy(update={"dependencies": cut}), towers_profile()).problems
    assert any("1F -> 4F is missing" in problem.message for problem in problems if problem.rule == "profile")


def test_more_microbatches_where_all_are_alike() -> None:
    workload = with_instruction(towers(12), replace(GATHER, every=1))
    graph = task_graph(workload)
    ranked = sorted(
        range(graph.num_tasks),
        key=lambda task: (task - graph.offsets[graph.operation_of[task]], graph.operation_of[task]),
    )
    orders = [[task for task in ranked if device in graph.devices_of(task)] for device in range(4)]
    plan = assemble(graph, orders, weak_iteration_bound(workload), Fraction(0), "serial")
    assert plan.repetend is not None
    assert "5GATHER" in plan.repetend.first
    longer = simulate(plan, 40)
    assert longer.graph.num_actions == 40 * len(plan.operations)
    assert check(plan).problems == ()
    two = any_plan(with_instruction(towers(every=2), GATHER))
    with pytest.raises(UsageError, match="no repetend"):
        simulate(two, 16)


def test_reports_show_instructions() -> None:
    simulation = simulate(any_plan(with_instruction(towers(every=2), GATHER)))
    out = io.StringIO()
    print_simulation(simulation, out)
    assert "GATHER" in out.getvalue()
    assert not any(5 in odd_stages(simulation, device) for device in range(4)), "an instruction is no second stage"
    svg = timeline_svg(simulation)
    assert "5GATHER0" in svg
    assert 'class="instruction"' in svg
    events = predicted_trace(simulation).events()
    assert sum(event["name"] == "5GATHER0" for event in events) == 2, "on both of its devices"
