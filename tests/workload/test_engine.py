"""List schedulers on the engine give the orders of the loops that each had before, which are kept as references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from builders.drawn import placed, placed_chains, workloads
from builders.orders import random_orders
from pipeplan.errors import InfeasibleError
from pipeplan.schedule.list_scheduling import Policy, in_flight_limits, list_schedule
from pipeplan.schedule.rules import Rules, StageTraversal, TypeTraversal
from pipeplan.schedule.rules.engine import RulesRun
from pipeplan.schedule.rules.separation import refill
from pipeplan.schedule.stage_graph import Rule, Stages, TrialRun
from pipeplan.workload.elements import Hop
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import NEVER, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.loops import listing, trial
from references.loops import refill as old_refill
from references.loops import rules as old_rules
from references.loops.first_come import FirstCome
from support.marks import some_of

SEEDS = st.integers(0, 2**32)


@st.composite
def chains(draw: st.DrawFn) -> Workload:
    """Stages on one device each, some devices with two, whole or split backwards."""
    devices = draw(st.sampled_from([[0, 1, 2], [0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 3], [0]]))
    return chain_workload(
        max(devices) + 1,
        draw(st.integers(1, 7)),
        devices=[(device,) for device in devices],
        split=draw(st.sampled_from([None, (7, 11), (5, 5)])),
        activation_bytes=draw(st.integers(0, 6)),
        workspace_bytes=draw(st.integers(0, 2)),
        lag=draw(st.integers(0, 3)),
    )


def anything() -> st.SearchStrategy[Workload]:
    drawn = placed(links=True) | placed_chains()
    return workloads() | chains() | drawn.map(lambda each: each.workload)


@st.composite
def graphs(draw: st.DrawFn, given: st.SearchStrategy[Workload]) -> TaskGraph:
    """Of workloads with durations, links, which may be busy, and memory, which may be too little, drawn anew."""
    workload, random = draw(given), Random(draw(SEEDS))
    return task_graph(limited(redrawn(workload, random), random))


def redrawn(workload: Workload, random: Random) -> Workload:
    busy = random.random() < 0.5

    def hop(given: Hop) -> Hop:
        return replace(given, latency_ns=random.randint(0, 3), occupancy_ns=random.randint(0, 15) if busy else 0)

    return replace(
        workload,
        operations=tuple(replace(each, duration_ns=random.randint(1, 12)) for each in workload.operations),
        dependencies=tuple(replace(each, hops=tuple(map(hop, each.hops))) for each in workload.dependencies),
    )


def limited(workload: Workload, random: Random) -> Workload:
    """Memory for a part of what some order holds; none for some devices."""
    graph = task_graph(workload)
    peaks = peak_memory(graph, random_orders(graph, random))
    memory = [
        random.randint(workload.static_bytes(device), peak.peak_bytes) if random.random() < 0.7 else None
        for device, peak in enumerate(peaks)
    ]
    devices = [replace(device, memory_bytes=limit) for device, limit in zip(workload.devices, memory, strict=True)]
    return replace(workload, devices=tuple(devices))


def same_listing(graph: TaskGraph, random: Random) -> None:
    problem = OneMicrobatch.of(graph.workload, require_room=False)
    policy = Policy(
        random.choice([0.0, 0.5, 1.0]),
        random.choice([0.0, 0.5, 1.0]),
        random.random() < 0.5,
        random.random() < 0.5,
        random.choice([None, *in_flight_limits(problem)]),
    )
    assert list_schedule(problem, graph, policy) == listing.list_schedule(problem, policy)


def drawn_rules(random: Random) -> Rules:
    def stages() -> StageTraversal:
        interval = random.choice([None, None, 1, 2, "D"])
        return StageTraversal(random.choice(["breadth-first", "depth-first"]), interval)

    types = TypeTraversal(
        random.choice(["bwd-first", "fwd-first", "interleaved"]), random.randint(1, 2), wait=random.random() < 0.2
    )
    number = [None, 1, 2, 3, "D - d", "S - s"]
    return Rules(
        types=types,
        forward=stages(),
        backward=stages(),
        in_flight=random.choice(number),
        in_flight_device=random.choice([None, None, 2, 4]),
        in_flight_shared=random.choice([None, None, 2]),
        weights_late=random.choice([None, 0, 1]),
        weights_fill=random.random() < 0.5,
        time=random.choice(["unit", "true"]),
        fit_memory=random.random() < 0.5,
        shared_first=random.random() < 0.3,
    )


def same_rules(graph: TaskGraph, random: Random) -> None:
    rules = drawn_rules(random)
    run, old = RulesRun(graph, rules), old_rules.RulesRun(graph, rules)
    assert outcome(run.run) == outcome(old.run)
    assert run.device_orders == old.orders


def outcome(run: Callable[[], object]) -> str:
    """What an error says; empty without one."""
    try:
        run()
    except InfeasibleError as error:
        return str(error)
    return ""


def same_trial(graph: TaskGraph, random: Random) -> None:
    stages, before = Stages(graph), Stages(graph)
    most = zip(stages.sizes, stages.totals, strict=True)
    rules = [Rule(random.randint(size, total), random.random() < 0.3) for size, total in most]
    limit = NEVER
    for _ in range(2):  # the second one ends early
        found, old = TrialRun(stages, rules, limit), trial.TrialRun(before, rules, limit)
        assert (found.device_orders, found.makespan) == (old.orders, old.makespan)
        assert (found.most_held, stages.num_starts) == (old.most_held, before.num_starts)
        limit = found.makespan * 3 // 4 if found.makespan < NEVER else sum(graph.durations) // 4


def same_refill(graph: TaskGraph, random: Random) -> None:
    orders = graph.on_devices(random_orders(graph, random))
    roles = [operation.role for operation in graph.workload.operations]
    weights = [task for task in range(graph.num_actions) if roles[graph.operation_of[task]] is Role.WEIGHT_GRAD]
    stashed = frozenset(random.sample(weights, random.randint(0, len(weights))))
    kept = [[task for task in order if task not in stashed] for order in with_links(graph, orders)]
    capacity = [random.choice([None, random.randint(0, 60)]) for _ in graph.workload.devices]
    arguments = (graph, orders, stashed, capacity, earliest_starts(graph, kept), random.choice([0.0, 0.5, 1.0]))
    assert refill(*arguments) == old_refill.refill(*arguments)


def same_links(graph: TaskGraph, random: Random) -> None:
    orders = graph.on_devices(random_orders(graph, random))
    links = FirstCome(graph, orders).run() if graph.workload.links else []
    assert with_links(graph, orders) == [*orders, *links]


LOOPS = {
    "list scheduling": same_listing,
    "rules": same_rules,
    "greedy trial": same_trial,
    "weight gradients into bubbles": same_refill,
    "links first come": same_links,
}


def compare(loop: str, data: st.DataObject, seed: int) -> None:
    LOOPS[loop](data.draw(graphs(chains() if loop == "list scheduling" else anything())), Random(seed))


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=some_of(60))
@given(data=st.data(), seed=SEEDS)
def test_orders_are_those_of_the_loop_before(loop: str, data: st.DataObject, seed: int) -> None:
    compare(loop, data, seed)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=some_of(200))
@given(data=st.data(), seed=SEEDS)
def test_orders_of_more_workloads_are_those_of_the_loop_before(loop: str, data: st.DataObject, seed: int) -> None:
    compare(loop, data, seed)
