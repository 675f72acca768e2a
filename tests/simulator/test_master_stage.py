"""The master stage of a plan against AutoPipe's own simulator, which walks the waves of 1F1B."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from builders import profiles
from builders.clusters import cluster_of
from builders.orders import one_f_one_b
from builders.plans import plan_of
from pipeplan.costs import build_workload
from pipeplan.files import CostRow, PlacedStage, Placement
from pipeplan.partition.chain.autopipe import timeline
from pipeplan.partition.chain.costs import StageTimes
from pipeplan.schedule.classic import CLASSIC
from pipeplan.simulator.master_stage import master_stage
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph

TIMES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=5)


def run_of(times: list[tuple[int, int]], num_microbatches: int, scheduler: str = "1f1b") -> tuple[TaskGraph, Orders]:
    rows = [CostRow(microbatch_size=1, forward_ns=forward, backward_ns=backward) for forward, backward in times]
    stages = tuple(PlacedStage(blocks=(f"b{index}",), devices=(index,)) for index in range(len(times)))
    workload = build_workload(
        profiles.profile_of(rows),
        Placement(strategy="one-to-one", num_devices=len(times), stages=stages),
        num_microbatches=num_microbatches,
        microbatch_size=1,
    )
    graph = task_graph(workload)
    return graph, CLASSIC[scheduler].orders(OneMicrobatch.of(workload), graph)


@given(TIMES, st.integers(1, 12))
def test_it_is_the_one_of_autopipes_simulator(times: list[tuple[int, int]], num_microbatches: int) -> None:
    graph, orders = run_of(times, num_microbatches)
    own = timeline(StageTimes(*zip(*times, strict=True)), num_microbatches)
    found = master_stage(graph, orders, earliest_starts(graph, orders))
    if any(own._steady(*step) for step in own.critical_path()):
        assert found == own.master_stage()
    else:
        assert found is None


def test_the_slowest_stage_is_the_master() -> None:
    graph, orders = run_of([(1, 2), (3, 6), (1, 2)], 8)
    assert master_stage(graph, orders, earliest_starts(graph, orders)) == 1


def test_other_schedules_have_none() -> None:
    graph, orders = run_of([(1, 2), (3, 6), (1, 2)], 8, "gpipe")
    assert master_stage(graph, orders, earliest_starts(graph, orders)) is None


def test_links_that_can_be_busy_are_no_stages() -> None:
    """Messages are tasks of their links there, which are on the way from the last action to the first."""
    rows = [CostRow(microbatch_size=1, forward_ns=100, backward_ns=ns) for ns in (200, 600, 200)]
    stages = tuple(PlacedStage(blocks=(f"b{index}",), devices=(index,)) for index in range(3))
    workload = build_workload(
        profiles.joined(profiles.profile_of(rows).blocks, bytes_per_sample=150),
        Placement(strategy="one-to-one", num_devices=3, stages=stages),
        num_microbatches=8,
        microbatch_size=1,
        cluster=cluster_of(3),
    )
    graph = task_graph(workload)
    assert graph.num_actions < len(graph.durations), "messages are tasks"
    plan = plan_of(workload, one_f_one_b(workload))
    assert simulate(plan).figures()["master_stage"] == 1
