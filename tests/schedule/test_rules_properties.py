"""The scheduler of rules against a plain reading of Algorithm 1, and its orders against what they promise."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_profile, chain_workload
from builders.drawn import Placed, placed, placed_chains
from builders.problems import problems
from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.errors import InfeasibleError
from pipeplan.files import PlacedStage, Placement
from pipeplan.planning.build_plan import assemble
from pipeplan.schedule.rules import DeviceRules, Rules, StageTraversal, TypeTraversal
from pipeplan.schedule.rules.engine import RulesRun, schedule_by_rules
from pipeplan.schedule.rules.language import First
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import fits
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.rules import Reference
from support.marks import some_of

number = st.sampled_from([1, 2, 3, "D", "D - d", "max(1, S - s)", "C * N"])
types = st.builds(
    TypeTraversal, st.sampled_from(["bwd-first", "fwd-first", "interleaved"]), number, number, wait=st.booleans()
)
direction = st.sampled_from(["breadth-first", "depth-first"])
stages = st.builds(StageTraversal, direction, st.none() | number)
limit = st.none() | number
settings_of_all = {
    "types": st.none() | types,
    "forward": st.none() | stages,
    "backward": st.none() | stages,
    "in_flight": limit,
    "in_flight_device": st.none() | st.none() | number,
    "in_flight_shared": limit,
    "weights_late": st.none() | st.sampled_from([0, 1, "d"]),
    "weights_fill": st.booleans(),
}
rules = st.builds(
    Rules,
    **settings_of_all,
    time=st.sampled_from(["unit", "true"]),
    shared_first=st.booleans(),
    devices=st.just(()) | st.tuples(st.builds(DeviceRules, types=types, forward=stages, devices=st.just((1,)))),
)
paced = st.builds(StageTraversal, direction, st.none() | number, st.sampled_from([None, 2, 3]))
rules |= st.builds(Rules, **settings_of_all | {"forward": paced, "backward": paced})


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Random graphs, and chains in which a device has several stages."""
    if draw(st.booleans()):
        return draw(placed(parts=False)).workload
    devices = draw(st.sampled_from([[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2], [0, 1, 0, 1, 0, 1]]))
    groups = [(device,) for device in devices]
    if draw(st.booleans()):
        groups = [(0, 1), *groups]
    split = draw(st.sampled_from([None, (7, 11)]))
    return chain_workload(3, draw(st.integers(1, 7)), devices=groups, split=split, lag=draw(st.sampled_from([0, 3])))


def orders_of(graph: TaskGraph, rules: Rules) -> list[list[int]] | None:
    try:
        return schedule_by_rules(graph, rules)
    except InfeasibleError:
        return None


@settings(max_examples=some_of(12))
@given(workloads(), rules)
def test_every_choice_is_that_of_the_plain_algorithm(workload: Workload, rules: Rules) -> None:
    graph = task_graph(workload)
    assert orders_of(graph, rules) == Reference(graph, rules).run()


@pytest.mark.parametrize("time", ["unit", "true"])
@pytest.mark.parametrize("weights_late", [None, 0, 1, "d"])
@pytest.mark.parametrize("groups", [((0, 1), (0, 2)), ((0, 1), (0,), (0, 2)), ((0, 1), (1,), (0, 2), (2,))])
def test_weight_gradients_of_shared_stages_wait_their_turn(
    groups: tuple[tuple[int, ...], ...], weights_late: int | str | None, time: Literal["unit", "true"]
) -> None:
    """A shared weight gradient is called for when it was there, not before all others."""
    graph = task_graph(chain_workload(3, 3, devices=groups, split=(7, 11)))
    rules = Rules(weights_late=weights_late, shared_first=True, time=time)
    assert schedule_by_rules(graph, rules) == Reference(graph, rules).run()


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_limits_of_devices_that_do_not_choose_are_watched(limit: int) -> None:
    """The device that chooses the second route's forwards hears when a limit of another, which joins in, has room."""
    groups = [(0, 1), (0, 1), (0, 2), (1, 2)]
    stages = tuple(
        PlacedStage(blocks=(f"block{s % 2}",), devices=group, replicas=2, microbatch_size=2, route=s // 2)
        for s, group in enumerate(groups)
    )
    placement = Placement(strategy="x", num_devices=3, num_routes=2, stages=stages)
    graph = task_graph(build_workload(chain_profile(2), placement, num_microbatches=8, microbatch_size=2))
    rules = Rules(in_flight_device=limit, shared_first=True)
    assert orders_of(graph, rules) == Reference(graph, rules).run()


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("groups", [((0, 2), (1,)), ((0, 1), (2,), (0,))])
def test_who_asks_for_a_shared_forward_is_heard_at_once(groups: tuple[tuple[int, ...], ...], limit: int | None) -> None:
    """By devices that take no part in what asks, and while it is still running."""
    graph = task_graph(chain_workload(3, 4, devices=groups, lag=3))
    rules = Rules(in_flight=limit, shared_first=True, time="true")
    assert orders_of(graph, rules) == Reference(graph, rules).run()


@settings(max_examples=some_of(40))
@given(placed(links=True, parts=False) | placed_chains(), rules)
def test_orders_are_complete_and_their_plans_pass_check(drawn: Placed, rules: Rules) -> None:
    graph = task_graph(drawn.workload)
    orders = orders_of(graph, rules)
    if orders is None:
        return
    for device, order in enumerate(orders):
        expected = {task for task in range(graph.num_actions) if device in graph.devices_of(task)}
        assert Counter(order) == Counter(expected)
    plan = assemble(graph, orders, weak_iteration_bound(graph.workload), Fraction(0), "rules")
    check(plan).require("the plan of the rules")


@pytest.mark.parametrize("time", ["unit", "true"])
@settings(max_examples=some_of(40))
@given(placed(links=True), st.integers(1, 3))
def test_limits_hold(time: str, drawn: Placed, most: int) -> None:
    graph = task_graph(drawn.workload)
    rules = Rules(time=time, in_flight=most, in_flight_shared=most)
    orders = orders_of(graph, rules)
    for order in orders or ():
        flight: Counter[int] = Counter()
        for task in order:
            operation = graph.workload.operations[graph.operation_of[task]]
            slot = graph.workload.slots[graph.operation_of[task]].name(task - graph.offsets[graph.operation_of[task]])
            flight[operation.stage] += (operation.kind == "F" and slot[1] != 1) - (operation.kind in "BI")
            assert flight[operation.stage] <= most


@settings(max_examples=some_of(60))
@given(problems(), rules.map(lambda each: each.but(fit_memory=True, devices=())))
def test_memory_is_kept(problem: OneMicrobatch, rules: Rules) -> None:
    graph = task_graph(problem.workload)
    orders = orders_of(graph, rules)
    if orders is not None:
        assert fits(graph, orders)


@settings(max_examples=some_of(60))
@given(placed_chains(), st.sampled_from(["bwd-first", "fwd-first", "interleaved"]), st.none() | st.just("D - d"))
def test_true_time_is_that_of_the_simulation(drawn: Placed, first: First, most: str | None) -> None:
    """Chains over busy links: what starts when in the rules' own time is what the simulation says of their orders."""
    graph = task_graph(drawn.workload)
    run = RulesRun(graph, Rules(types=TypeTraversal(first), in_flight=most, time="true"))
    run.run()
    starts = earliest_starts(graph, with_links(graph, run.device_orders))
    operations = drawn.workload.operations
    for x, operation in enumerate(operations):
        for number in range(graph.offsets[x + 1] - graph.offsets[x]):
            assert run.step_of(operation.kind, operation.stage, number) == starts[graph.offsets[x] + number]
