"""Plans whose actions wait inside: right ones are accepted, with loops too, and damaged parts and waits refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from pydantic import ValidationError

from builders.clusters import cluster_of
from pipeplan.checker import check
from pipeplan.examples import model
from pipeplan.files import Plan, Profile
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.workload.elements import Dependency, Operation


@cache
def case_study() -> Profile:
    return model("graphpipe-case-study")


@cache
def plan_of(late: bool = True, mini_batch: int = 16, size: int = 2, bandwidth: int | None = None) -> Plan:
    """GraphPipe's stages; the last has a layer of branch 0 and the concatenation, which takes branch 1's output."""
    asked: dict[str, Any] = {"replicas": 1, "recompute": False, "split_backward": False, "num_parted": 0}
    request = Request.of(
        case_study(),
        devices=8,
        mini_batch=mini_batch,
        microbatch_size=size,
        scheduler="1f1b",
        planner="graphpipe",
        late_inputs=late,
        deterministic=True,
        time_limit=2.0,
        cluster=None if bandwidth is None else cluster_of(8, bandwidth=bandwidth),
        **asked,
    )
    return search_plan(request).plan


def changed(plan: Plan, **changes: Any) -> Plan:
    """Another plan, read as a file is."""
    return Plan.model_validate_json(plan.model_copy(update=changes).model_dump_json())


def of(plan: Plan, source: str, target: str) -> int:
    (number,) = [n for n, each in enumerate(plan.dependencies) if (each.source, each.target) == (source, target)]
    return number


def with_dependency(plan: Plan, number: int, **changes: Any) -> Plan:
    dependencies: list[Dependency] = list(plan.dependencies)
    dependencies[number] = replace(dependencies[number], **changes)
    return changed(plan, dependencies=tuple(dependencies))


def with_operation(plan: Plan, id_: str, **changes: Any) -> Plan:
    operations: list[Operation] = [replace(each, **changes) if each.id == id_ else each for each in plan.operations]
    return changed(plan, operations=tuple(operations))


def rules_of(plan: Plan, profile: Profile | None = None) -> set[str]:
    return {problem.rule for problem in check(plan, profile).problems}


def test_the_last_stage_waits_inside_and_sends_before_its_end() -> None:
    plan = plan_of()
    assert check(plan, case_study()).valid
    stage = plan.stages[7]
    assert stage.cuts == (2,)
    assert stage.blocks[2] == "concatenation"
    forward, back = plan.dependencies[of(plan, "3F", "7F")], plan.dependencies[of(plan, "7B", "3B")]
    assert (forward.source_part, forward.target_part) == (None, 1)
    assert (back.source_part, back.target_part) == (0, 0)
    program = plan.programs[7]
    assert program.index("7F0") < program.index("7RECV_F0>3")
    assert program.index("7B0") < program.index("7SEND_B0>3")


def test_the_pipeline_is_one_stage_less_deep() -> None:
    """Fig. 3.9: the iteration is shorter by most of a forward and a backward of one stage."""
    whole, late = plan_of(late=False), plan_of()
    assert check(whole, case_study()).valid
    assert not any(stage.cuts for stage in whole.stages)
    took = max(each.duration_ns for each in whole.operations if each.kind == "F")
    took += max(each.duration_ns for each in whole.operations if each.kind == "B")
    assert 0.9 * took < whole.predicted.makespan_ns - late.predicted.makespan_ns < 1.1 * took


def test_a_loop_of_actions_that_wait_inside() -> None:
    plan = plan_of(mini_batch=20_000)
    assert plan.loop is not None
    assert plan.repetend is not None
    assert check(plan, case_study()).valid
    short = plan.with_copies(3)
    assert check(short.unrolled(), None).problems == () or rules_of(short.unrolled()) <= {"figures"}


def test_what_a_part_waits_for_comes_before_the_next_action() -> None:
    plan, programs = plan_of(), [list(each) for each in plan_of().programs]
    programs[7].remove("7RECV_F0>3")
    programs[7].insert(programs[7].index("7B0") + 1, "7RECV_F0>3")
    assert "transfer-order" in rules_of(changed(plan, programs=tuple(map(tuple, programs))))


def test_what_a_whole_action_waits_for_comes_before_it() -> None:
    plan, programs = plan_of(), [list(each) for each in plan_of().programs]
    programs[7].remove("7RECV_F0>6")
    programs[7].insert(programs[7].index("7F0") + 1, "7RECV_F0>6")
    assert "transfer-order" in rules_of(changed(plan, programs=tuple(map(tuple, programs))))


def test_an_action_does_not_start_so_early_that_it_would_wait() -> None:
    plan = plan_of()
    starts = dict(plan.starts_ns)
    starts["7F"] = (starts["7F"][0] - 1, *starts["7F"][1:])
    assert "inputs" in rules_of(changed(plan, starts_ns=starts))


@pytest.mark.parametrize("bandwidth", [10**9, 10**11])
def test_what_comes_over_a_busy_link_may_come_after_the_start(bandwidth: int) -> None:
    """A part waits for a message that takes its link: that is there when the part begins, and may be later no more."""
    plan = plan_of(bandwidth=bandwidth)
    number = of(plan, "3F", "7F")
    (hop,) = plan.dependencies[number].hops
    assert hop.occupancy_ns > 0
    sent, begins = plan.operation("3F").duration_ns, plan.starts_ns["7F"]
    arrivals = [start + sent + hop.duration_ns for start in plan.starts_ns["3F"]]
    first_part = plan.operation("7F").parts_ns[0]
    late = [at - begin for at, begin in zip(arrivals, begins, strict=True)]
    assert 0 < max(late) <= first_part
    assert check(plan, case_study()).valid
    slower = replace(hop, occupancy_ns=hop.occupancy_ns + first_part - max(late) + 1)
    assert rules_of(with_dependency(plan, number, hops=(slower,)))


def test_without_its_waits_everything_would_start_otherwise() -> None:
    plan = plan_of()
    assert {"inputs"} <= rules_of(with_dependency(plan, of(plan, "3F", "7F"), target_part=0))
    assert {"inputs"} <= rules_of(with_dependency(plan, of(plan, "7B", "3B"), source_part=None))


@pytest.mark.parametrize(
    ("source", "target", "part", "says"),
    [
        ("6F", "7F", {"target_part": 1}, "'branch0.layer3.attention' runs in part 0 of 7F"),
        ("7B", "6B", {"source_part": 0}, "'branch0.layer3.attention' runs in part 1 of 7B"),
    ],
)
def test_parts_have_the_blocks_that_take_and_make(source: str, target: str, part: dict[str, int], says: str) -> None:
    plan = plan_of()
    report = check(with_dependency(plan, of(plan, source, target), **part), case_study())
    assert any(says in problem.message for problem in report.problems if problem.rule == "profile")


def test_parts_take_what_their_blocks_do() -> None:
    plan = plan_of()
    first, last = plan.operation("7F").parts_ns
    report = check(with_operation(plan, "7F", parts_ns=(first + 5, last - 5)), case_study())
    assert any(problem.place == "operations[7F].parts_ns" for problem in report.problems)


def test_files_refuse_parts_that_are_none() -> None:
    plan = plan_of()
    first, last = plan.operation("7F").parts_ns
    with pytest.raises(ValidationError, match=r"parts_ns add up to .* ns, the action takes"):
        with_operation(plan, "7F", parts_ns=(first, last + 1))
    with pytest.raises(ValidationError, match=r"has 0 parts, and 7F of a stage with cuts .2. has 2"):
        with_operation(plan, "7F", parts_ns=())
    with pytest.raises(ValidationError, match="target_part is 2, but 7F has 2 parts"):
        with_dependency(plan, of(plan, "3F", "7F"), target_part=2)
    with pytest.raises(ValidationError, match="source_part is 1, but 3F has 1 part"):
        with_dependency(plan, of(plan, "3F", "7F"), source_part=1)
    with pytest.raises(ValidationError, match="has no messages, for which alone a part can wait"):
        with_dependency(plan, of(plan, "7F", "7B"), source_part=0)
    with pytest.raises(ValidationError, match="cuts must rise, from at least 1 to less than its 3 blocks"):
        changed(plan, stages=(*plan.stages[:7], replace(plan.stages[7], cuts=(3,))))
