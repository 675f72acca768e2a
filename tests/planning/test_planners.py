"""Planners by name, and stages in line: GraphPipe's case study (thesis, 3.7.4)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from pipeplan.checker import check
from pipeplan.errors import UsageError
from pipeplan.examples import model
from pipeplan.files import Profile
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.build_plan import Result
from pipeplan.planning.planners import PLANNERS
from pipeplan.planning.request import Request, input_notes
from pipeplan.planning.steps import search_plan
from pipeplan.workload.elements import is_in_line
from pipeplan.workload.kinds import ACTIVATIONS

ASKED = {"mini_batch": 64, "replicas": 1, "recompute": False, "split_backward": False, "num_parted": 0}


@cache
def case_study() -> Profile:
    return model("graphpipe-case-study")


def asked(**how: Any) -> Request:
    given: dict[str, Any] = {"devices": 8, "scheduler": "1f1b", "deterministic": True, "time_limit": 2.0, **ASKED}
    return Request.of(case_study(), **given | how)


@cache
def graph(size: int) -> Result:
    return search_plan(asked(planner="graphpipe", microbatch_size=size, late_inputs=False))


@cache
def in_line() -> Result:
    return search_plan(asked(placement="sequential", microbatch_size=2))


def test_a_planner_alone_gives_its_own_stages() -> None:
    """Fig. 3.9: eight stages of a layer each, the last with the concatenation."""
    found = graph(4)
    assert found.plan.provenance.options["stages"] == "GraphPipe"
    assert found.candidates.looked_at == 1
    assert sorted(len(stage.blocks) for stage in found.plan.stages) == [2] * 7 + [3]
    assert check(found.plan, case_study()).valid


def test_stages_in_line_wait_for_each_other() -> None:
    """All are one chain, which is deeper than the graph and so takes longer, and holds as much as a chain does."""
    plan = in_line().plan
    assert check(plan, case_study()).valid
    pairs = {(each.source, each.target) for each in plan.dependencies}
    assert {(f"{stage}F", f"{stage + 1}F") for stage in range(7)} <= pairs
    assert {(f"{stage + 1}B", f"{stage}B") for stage in range(7)} <= pairs
    assert plan.predicted.makespan_ns > 1.05 * graph(2).plan.predicted.makespan_ns
    held = [memory.parts[ACTIVATIONS] for memory in plan.predicted.memory]
    assert held[0] == max(held)
    assert held[0] == 8 * held[6] // 2


@cache
def late(size: int) -> Result:
    return search_plan(asked(planner="graphpipe", microbatch_size=size, late_inputs=True))


def test_the_graph_is_ahead_of_the_line_as_in_the_text() -> None:
    """A tenth by the shorter pipeline, and another by micro-batches of 4, for which a line has no room (3.7.4)."""
    line, whole, two, four = (each.plan.predicted.makespan_ns for each in (in_line(), graph(2), late(2), late(4)))
    assert line >= 1.10 * two
    assert line >= 1.18 * four
    assert two < whole
    assert all(check(late(size).plan, case_study()).valid for size in (2, 4))


def test_a_line_without_its_waits_is_refused() -> None:
    plan = in_line().plan
    (number,) = [n for n, each in enumerate(plan.dependencies) if (each.source, each.target) == ("3F", "4F")]
    left = plan.model_copy(update={"dependencies": (*plan.dependencies[:number], *plan.dependencies[number + 1 :])})
    report = check(left, case_study())
    assert any("3F -> 4F is missing: stages of a sequential" in each.message for each in report.problems)


def test_the_name_of_a_line_is_one() -> None:
    for name, strategy in STRATEGIES.items():
        assert is_in_line(name) == strategy.in_line


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_are_not_told_where_stages_stand(name: str) -> None:
    with pytest.raises(UsageError, match=r"--planner .* chooses the stages and where they stand, which --placement"):
        search_plan(asked(planner=name, placement="one-to-one"))
    with pytest.raises(UsageError, match="the placement that is given says, too; give --placement all"):
        search_plan(replace(asked(planner=name), placement=graph(4).plan.placed))


def test_forwards_are_sliced_or_wait_inside() -> None:
    with pytest.raises(UsageError, match=r"--slices 2 needs forwards that take and give all of their samples at once"):
        asked(late_inputs=True, num_parted=2)


def test_launching_takes_its_time_for_every_block() -> None:
    """F and B of a stage are longer by a launch for each of its blocks, which `check` knows."""
    found = search_plan(asked(planner="graphpipe", microbatch_size=2, launch_overhead_ns=1000, late_inputs=False)).plan
    for operation, other in zip(found.operations, graph(2).plan.operations, strict=True):
        blocks = len(found.stages[operation.stage].blocks)
        assert operation.duration_ns - other.duration_ns == 1000 * blocks
    assert found.launch_overhead_ns == 1000
    assert check(found, case_study()).valid
    assert any(
        problem.rule == "profile"
        for problem in check(found.model_copy(update={"launch_overhead_ns": 0}), case_study()).problems
    )
    stated = case_study().model_copy(update={"launch_overhead_ns": 1000})
    assert Request.of(stated, devices=8, mini_batch=64).launch_overhead_ns == 1000
    assert Request.of(stated, devices=8, mini_batch=64, launch_overhead_ns=0).launch_overhead_ns == 0


@pytest.mark.parametrize(
    ("method", "overhead", "twice"), [("measured", 1000, 1), ("measured", 0, 0), ("estimated", 1000, 0)]
)
def test_launches_beside_measured_times_are_said_to_count_twice(method: str, overhead: int, twice: int) -> None:
    profile = case_study()
    profile = profile.model_copy(update={"source": profile.source.model_copy(update={"method": method})})
    notes = input_notes(Request.of(profile, devices=8, mini_batch=64, launch_overhead_ns=overhead))
    assert sum("launches are in them" in note for note in notes) == twice


def test_no_other_name_is_a_planner() -> None:
    with pytest.raises(UsageError, match="--planner 'graphpip' is not known; did you mean graphpipe"):
        search_plan(asked(planner="graphpip"))
