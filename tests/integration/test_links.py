"""Links that carry one message at a time: by hand, through search, lowering, check, simulation and reports."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from builders.chains import chain_workload
from builders.clusters import cluster_of
from builders.orders import gpipe_orders, one_f_one_b
from builders.shapes import shape_workload
from builders.timed import numbered
from pipeplan.checker import check
from pipeplan.errors import InvalidPlanError
from pipeplan.examples import ShapeCosts
from pipeplan.files import Plan
from pipeplan.planning.build_plan import assemble
from pipeplan.reporting.terminal import print_simulation
from pipeplan.reporting.timeline import predicted_trace
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.repetend import least_period, shortest_way_through
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.pattern import compose, pattern_of
from pipeplan.schedule.search import search_schedule
from pipeplan.simulator.metrics import critical_path
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.bounds import period_bound, strong_iteration_bound, weak_iteration_bound
from pipeplan.workload.elements import Dependency, Hop, Operation, Stage
from pipeplan.workload.engine import with_links
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.rate import CutOrders
from pipeplan.workload.steady_state.repetend import extend, find_repetend
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from support.marks import one_in, slow_but


def over_links(workload: Workload, occupancy: int, latency: int = 0) -> Workload:
    """The same where every message occupies its link."""

    def slow(dependency: Dependency) -> Dependency:
        update = {"latency_ns": latency, "occupancy_ns": occupancy}
        return replace(dependency, hops=tuple(replace(hop, **update) for hop in dependency.hops))

    return replace(workload, dependencies=tuple(map(slow, workload.dependencies)))


def plan_of(graph: TaskGraph, orders: Orders) -> Plan:
    problem = OneMicrobatch.of(graph.workload)
    return assemble(graph, orders, strong_iteration_bound(problem), period_bound(problem), "test")


def makespan(graph: TaskGraph, orders: Orders) -> int:
    return max(map(sum, zip(earliest_starts(graph, orders), graph.durations, strict=True)))


def labels(graph: TaskGraph, order: list[int]) -> list[str]:
    return [graph.label(task) for task in order]


# By hand -------------------------------------------------------------------------------------------------------


def test_messages_go_one_after_another() -> None:
    workload = over_links(chain_workload(2, 3), occupancy=25, latency=5)
    graph = task_graph(workload)
    plan = plan_of(graph, numbered(graph, gpipe_orders(workload)))
    # 0F ends at 10, 20, 30; the link is taken at 10, 35, 60; messages arrive 30 later
    assert plan.starts_ns["1F"] == (40, 65, 90)
    # 1B runs 100-120, 120-140, 140-160; the link back is taken at 120, 145, 170
    assert plan.starts_ns["0B"] == (150, 175, 200)
    assert plan.predicted.makespan_ns == 220
    assert check(plan).problems == ()


def join(occupancy: int) -> Workload:
    """Stages 0 and 1 on device 0 feed stage 2 on device 1, and both need its gradient."""
    kinds = [("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0)]
    operations = tuple(Operation(kind=kind, stage=stage, duration_ns=10) for kind, stage in kinds)
    there, back = ((Hop(source_device=a, target_device=1 - a, occupancy_ns=occupancy),) for a in (0, 1))
    dependencies = [Dependency(source=f"{s}F", target=f"{s}B") for s in range(3)]
    for s in (0, 1):
        dependencies.append(Dependency(source=f"{s}F", target="2F", hops=there))
        dependencies.append(Dependency(source="2B", target=f"{s}B", hops=back))
    chain = chain_workload(2, 2)
    stages = tuple(Stage(blocks=(f"b{s}",), devices=(int(s == 2),), microbatch_size=1) for s in range(3))
    return replace(chain, stages=stages, operations=operations, dependencies=tuple(dependencies))


def test_two_producers_share_the_way_to_one_device() -> None:
    graph = task_graph(join(occupancy=15))
    orders = numbered(graph, gpipe_orders(graph.workload))
    plan = plan_of(graph, orders)
    # device 0 runs 0F0 0F1 1F0 1F1, ending at 10, 20, 30, 40; the link is taken at 10, 25, 40, 55
    assert plan.starts_ns["2F"] == (55, 70)
    assert labels(graph, with_links(graph, orders)[2]) == [
        "0SEND_F0>2@1",
        "0SEND_F1>2@1",
        "1SEND_F0>2@1",
        "1SEND_F1>2@1",
    ]
    # 2B ends at 90 and 100; each is sent twice, at 90, 105, 120, 135
    assert plan.starts_ns["1B"] == (120, 150)
    assert plan.starts_ns["0B"] == (160, 170)
    assert check(plan).problems == ()


def test_a_message_may_go_before_one_that_is_made_sooner() -> None:
    graph = task_graph(join(occupancy=15))
    first_come = with_links(graph, numbered(graph, gpipe_orders(graph.workload)))
    there = first_come[2]
    overtaking = [*first_come[:2], [there[0], there[2], there[1], there[3]], *first_come[3:]]
    plan = plan_of(graph, overtaking)
    # 1F0 ends at 30 and leaves then; 0F1, made at 20, goes at 45: stage 2 begins 10 earlier with micro-batch 0
    assert plan.starts_ns["2F"] == (45, 75)
    assert check(plan).problems == ()
    sends = [text for text in plan.programs[0] if "SEND" in text]
    assert sends == ["0SEND_F0", "1SEND_F0", "0SEND_F1", "1SEND_F1"]
    assert simulate(plan).starts == earliest_starts(graph, overtaking)
    # the SEND that is overtaken stands right behind the one it lets pass, not where its link becomes free
    assert plan.programs[0][plan.programs[0].index("1SEND_F0") + 1] == "0SEND_F1"


# Where messages may wait ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("occupancy", "links"), [(0, 0), (10, 0), (11, 2), (20, 2), (21, 4)])
def test_only_links_on_which_messages_can_meet_are_resources(occupancy: int, links: int) -> None:
    """Forward takes 10, backward 20: messages down meet if they take longer than 10, up longer than 20."""
    workload = over_links(chain_workload(3, 4), occupancy)
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    assert len(workload.links) == links
    assert len(problem.on_device) == problem.num_devices + links
    free = task_graph(over_links(chain_workload(3, 4), 0, latency=occupancy))
    for orders in (gpipe_orders(workload), one_f_one_b(workload)):
        tasks = numbered(graph, orders)
        busy, idle = makespan(graph, with_links(graph, tasks)), makespan(free, tasks)
        assert busy == idle if not links else busy >= idle
        assert check(plan_of(graph, tasks)).problems == ()


def test_two_messages_of_one_action_meet_however_quick_they_are() -> None:
    assert join(occupancy=1).links == ((1, 0),)


def test_numbers_are_as_without_links_where_none_is_busy() -> None:
    workload = chain_workload(3, 4, lag=7)
    assert not workload.links
    assert OneMicrobatch.of(workload).edges == workload.edges
    assert workload.edges == workload.lags


# Bounds and repetends ------------------------------------------------------------------------------------------


def test_a_links_work_bounds_period_and_makespan() -> None:
    workload = over_links(chain_workload(2, 6), occupancy=50)
    problem = OneMicrobatch.of(workload)
    assert period_bound(problem) == 50
    assert strong_iteration_bound(problem) >= weak_iteration_bound(workload) == 10 + 6 * 50 + 10 + 20 + 50 + 20
    least = least_period(problem, Budget(10, deterministic=True), 10)
    assert least.pattern is not None
    assert least.pattern.period == least.bound_ns == 50


def test_repetend_of_slow_links_repeats() -> None:
    workload = over_links(chain_workload(3, 12), occupancy=50, latency=3)
    graph = task_graph(workload)
    orders = with_links(graph, numbered(graph, one_f_one_b(workload)))
    plan = plan_of(graph, orders)
    assert plan.repetend is not None
    assert plan.repetend.period_ns >= 50
    assert check(plan).recomputed.period_ns == plan.repetend.period_ns
    longer = simulate(plan, 12 + 8 * plan.repetend.unroll)
    assert longer.rates.makespan_ns == plan.predicted.makespan_ns + 8 * plan.repetend.repetend_ns


def test_a_wrong_time_of_a_repetend_over_links_is_refused() -> None:
    workload = over_links(chain_workload(3, 12), occupancy=50, latency=3)
    graph = task_graph(workload)
    plan = plan_of(graph, numbered(graph, one_f_one_b(workload)))
    assert plan.repetend is not None
    less = replace(plan.repetend, repetend_ns=plan.repetend.repetend_ns - 1)
    rules = {problem.rule for problem in check(plan.model_copy(update={"repetend": less})).problems}
    assert "repetend" in rules


# Classic schedules and search ----------------------------------------------------------------------------------


def slow_shape(name: str, num_devices: int, num_microbatches: int, occupancy: int, **more: int) -> Workload:
    """Forward, input and weight gradient 100 each per device, over links that take ``occupancy`` for a message."""
    costs = ShapeCosts(100, None, 100, 100, shared_forward_ns=20, shared_backward_ns=20, activation_bytes=10**9)
    split = name in ("v", "circular", "zbv")
    workload = shape_workload(name, num_devices, num_microbatches, costs=costs, split=split, **more)
    return over_links(workload, occupancy, latency=3)


SHAPES = ["v", "x", "m", "mllm", "nn", "k", "circular", "zbv"]


@one_in(2, "name", SHAPES, first=1)
def test_classic_schedules_over_busy_links_are_valid(name: str) -> None:
    workload = slow_shape(name, 4, 8, 130)
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    assert workload.links
    for classic in CLASSIC.values():
        if classic.applies(problem) is None:
            plan = plan_of(graph, with_links(graph, classic.orders(problem, graph)))
            assert check(plan).problems == ()
            assert simulate(plan).rates.makespan_ns == plan.predicted.makespan_ns


@slow_but("name, most", [("circular", 2825), ("zbv", 2770)], lambda case: case[0] == "zbv")
def test_search_hides_what_first_come_first_served_shows(name: str, most: int) -> None:
    """Two chunks per device, messages of 60 for actions of 50: schedules that do not know links need 3240 and more."""
    workload = slow_shape(name, 4, 8, 60)
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    unaware = [classic for schedule, classic in CLASSIC.items() if schedule != "greedy"]
    applying = [classic for classic in unaware if classic.applies(problem) is None]
    classics = [makespan(graph, with_links(graph, classic.orders(problem, graph))) for classic in applying]
    found = search_schedule(workload, Budget(2, deterministic=True))
    assert found.bound_ns <= found.makespan_ns <= most < min(classics)
    plan = plan_of(found.graph, found.orders)
    assert check(plan).problems == ()


@slow_but("name", ["v", "m", "circular", "zbv"], lambda name: name in ("v", "m"))
def test_patterns_over_busy_links_repeat(name: str) -> None:
    workload = slow_shape(name, 3, 16, 130)
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    least = least_period(problem, Budget(5, deterministic=True), 5)
    assert least.pattern is not None
    pattern, _ = shortest_way_through(problem, least.pattern, Budget(5, deterministic=True), 5)
    orders = compose(problem, pattern)
    repetend = find_repetend(graph, orders, earliest_starts(graph, orders))
    assert repetend is not None
    assert period_bound(problem) <= Fraction(repetend.repetend_ns, repetend.unroll) <= least.pattern.period
    larger, longer = extend(workload, orders, repetend, 16 + 4 * repetend.unroll)
    assert check(plan_of(task_graph(larger), longer)).problems == ()
    assert (
        len(CutOrders.of(problem.workload, orders, repetend.first, repetend.unroll).tasks)
        == repetend.unroll * problem.num_operations
    )
    settled = pattern_of(problem, orders, repetend)
    assert settled is None or settled.period == Fraction(repetend.repetend_ns, repetend.unroll)


# Other links, reports ------------------------------------------------------------------------------------------


def test_a_plan_on_slower_links_waits_for_them() -> None:
    workload = over_links(chain_workload(4, 12), occupancy=8, latency=2)
    graph = task_graph(workload)
    plan = plan_of(graph, numbered(graph, one_f_one_b(workload)))
    again = simulate(plan, cluster=cluster_of(4, latency_ns=2, bandwidth=2 * 10**9))  # 64 bytes: 32 ns
    slow = over_links(workload, occupancy=32, latency=2)
    slow_graph = task_graph(slow)
    expected = plan_of(slow_graph, numbered(slow_graph, one_f_one_b(slow)))
    assert not workload.links
    assert again.workload.links
    assert again.rates.makespan_ns == expected.predicted.makespan_ns
    assert check(expected).problems == ()


def test_critical_path_names_what_waited_for_its_link() -> None:
    workload = over_links(chain_workload(2, 3), occupancy=40, latency=5)
    graph = task_graph(workload)
    orders = with_links(graph, numbered(graph, gpipe_orders(workload)))
    path = critical_path(graph, orders, earliest_starts(graph, orders))
    waited = [graph.label(step.task) for step in path if step.reason == "link"]
    # the links are taken at 10, 50, 90 and, when stage 1 has run forward and begun backward at 145, at 165, 205, 245
    assert waited == ["0SEND_F1>1@1", "0SEND_F2>1@1", "1SEND_B1>0@0", "1SEND_B2>0@0"]
    simulation = simulate(plan_of(graph, orders))
    found = simulation.figures()["critical_path"]
    assert isinstance(found, dict)
    assert set(waited) <= set(found["actions"])
    assert sum(found["device_ns"].values()) + found["transfer_ns"] == simulation.rates.makespan_ns
    text = io.StringIO()
    print_simulation(simulation, text, 200)
    assert "0SEND_F0>1@1 .. 0SEND_F2>1@1 (3)" in text.getvalue()
    assert "critical path: 4 actions and 6 messages, " in text.getvalue()


def test_trace_shows_messages_when_they_are_under_way() -> None:
    workload = over_links(chain_workload(2, 3), occupancy=25, latency=5)
    graph = task_graph(workload)
    simulation = simulate(plan_of(graph, numbered(graph, gpipe_orders(workload))))
    events = json.loads(json.dumps(predicted_trace(simulation).events()))
    sends = {event["name"]: (event["ts"] * 1000, event["dur"] * 1000) for event in events if "SEND_F" in event["name"]}
    assert sends == {"0SEND_F0": (10, 30), "0SEND_F1": (35, 30), "0SEND_F2": (60, 30)}


def test_links_count_for_no_devices_figures() -> None:
    workload = over_links(chain_workload(3, 6), occupancy=40)
    graph = task_graph(workload)
    simulation = simulate(plan_of(graph, numbered(graph, one_f_one_b(workload))))
    assert len(simulation.rates.busy_ns) == len(simulation.memory) == len(simulation.orders) == 3
    assert simulation.rates.busy_ns == (180, 180, 180)


# Programs over busy links --------------------------------------------------------------------------------------


def with_program(plan: Plan, device: int, change: Callable[[list[str]], list[str]]) -> Plan:
    programs = [list(program) for program in plan.programs]
    programs[device] = change(programs[device])
    return plan.model_copy(update={"programs": tuple(map(tuple, programs))})


def busy_plan() -> Plan:
    graph = task_graph(over_links(chain_workload(2, 3), occupancy=25, latency=5))
    return plan_of(graph, numbered(graph, gpipe_orders(graph.workload)))


def test_full_names_of_sends_mean_the_same() -> None:
    plan = busy_plan()
    full = with_program(plan, 0, lambda program: [f"{text}>1@1" if "SEND" in text else text for text in program])
    assert simulate(full).starts == simulate(plan).starts
    assert check(full).problems == ()


@pytest.mark.parametrize("change", [lambda sends: sends[1:], lambda sends: [*sends, sends[0]]])
def test_a_plan_without_each_send_once_is_not_simulated(change: Callable[[list[str]], list[str]]) -> None:
    def damage(program: list[str]) -> list[str]:
        sends = [text for text in program if "SEND" in text]
        return [text for text in program if "SEND" not in text] + change(sends)

    with pytest.raises(InvalidPlanError, match=r"programs\[0\] does not have each SEND to device 1 once"):
        simulate(with_program(busy_plan(), 0, damage))


def test_sends_in_another_order_take_longer() -> None:
    plan = busy_plan()
    swapped = {"0SEND_F0": "0SEND_F2", "0SEND_F2": "0SEND_F0"}
    late = with_program(plan, 0, lambda program: [swapped.get(text, text) for text in program])
    assert simulate(late).rates.makespan_ns > plan.predicted.makespan_ns
    assert "links" in {problem.rule for problem in check(late).problems}
