"""Simulation: rates, critical path, and plans replayed as they are or with another profile, cluster or number."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_plan, chain_profile, chain_workload, hops
from builders.clusters import cluster_of
from builders.drawn import placed, placed_chains, stage_graphs, workloads
from builders.orders import actions_of, gpipe_orders, one_f_one_b, random_orders
from builders.plans import plan_of
from builders.sharded import chain_of, pairs, sharded_plan
from builders.timed import interleaved, named, numbered, timed
from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.files import Plan
from pipeplan.planning.build_plan import assemble
from pipeplan.simulator.metrics import StepsBefore, critical_path, in_flight, rates
from pipeplan.simulator.recost import recosted
from pipeplan.simulator.simulation import orders_of, simulate
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.columns import Lines
from pipeplan.workload.elements import Dependency, Operation
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.memory import followed
from references.replay import replay
from references.steps import inputs_of, most_given, step_before
from support.marks import some_of

SEEDS = st.integers(0, 2**20)
ALL_KINDS = workloads() | placed().map(lambda drawn: drawn.workload)


# Columns beside one thing after another ----------------------------------------------------------------------


@given(ALL_KINDS | (placed(links=True) | placed_chains() | stage_graphs()).map(lambda drawn: drawn.workload), SEEDS)
@settings(max_examples=some_of(60))
def test_what_let_tasks_start_is_what_one_looks_up(workload: Workload, seed: int) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    starts = earliest_starts(graph, orders)
    steps = StepsBefore(graph, orders, starts)
    for task in range(graph.num_tasks):
        assert steps.of(task) == step_before(graph, orders, starts, task)
        ends = [(starts[other] + graph.durations[other] + lag, other) for other, lag in inputs_of(graph, task)]
        assert (steps.ready_ns(task), steps.maker(task)) == max(ends, default=(0, None))


@given(workloads(unequal=False), SEEDS)
@settings(max_examples=some_of(40))
def test_forwards_hold_what_they_give_moment_by_moment(workload: Workload, seed: int) -> None:
    forwards = tuple(each for each in workload.operations if each.role is Role.FORWARD)
    ids = {each.id for each in forwards}
    edges = tuple(each for each in workload.dependencies if {each.source, each.target} <= ids)
    graph = task_graph(replace(workload, operations=forwards, dependencies=edges))
    orders = random_orders(graph, Random(seed))
    starts = earliest_starts(graph, orders)
    state = followed(graph, starts)
    assert in_flight(graph, orders) == most_given(graph, starts)
    for device, memory in enumerate(peak_memory(graph, orders)):
        assert memory.parts == graph.workload.states[device] + state.at_peak[device]


# Programs -----------------------------------------------------------------------------------------------------


@given((placed(links=True) | placed_chains() | stage_graphs()).map(lambda drawn: drawn.workload) | workloads(), SEEDS)
@settings(max_examples=some_of(40))
def test_programs_say_the_orders_that_they_were_made_of(workload: Workload, seed: int) -> None:
    """As a whole they are read as fast as they can be; what they say is what was written, action by action."""
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    plan = assemble(graph, orders, weak_iteration_bound(workload), Fraction(1), "random")
    found = simulate(plan)
    assert orders_of(plan, found.graph) == orders
    assert found.starts == earliest_starts(graph, orders)
    lines = Lines.of(orders)
    assert [*lines] == [lines[line] for line in range(len(lines))] == orders
    assert [*lines[1:3]] == orders[1:3]
    assert found.rates == rates(graph, orders, found.starts)
    assert found.memory == peak_memory(graph, orders)


# Rates -------------------------------------------------------------------------------------------------------


@given(workloads(), SEEDS)
@settings(max_examples=some_of(60))
def test_rates_follow_their_definitions(workload: Workload, seed: int) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    starts = earliest_starts(graph, orders)
    figures = rates(graph, orders, starts)
    done = replay(workload, named(graph, orders))
    makespan = max(end for _, end in done.values())
    spans = [[done[entry] for entry in order] for order in named(graph, orders)]
    busy = [sum(end - start for start, end in row) for row in spans]
    lengths = [max((end for _, end in row), default=0) - min((start for start, _ in row), default=0) for row in spans]
    longest = next(device for device, length in enumerate(lengths) if length == max(lengths))
    assert figures.makespan_ns == makespan
    assert list(figures.busy_ns) == busy
    assert list(figures.span_ns) == lengths
    assert figures.bubble_rate == pytest.approx(1 - sum(busy) / (len(busy) * makespan))
    assert figures.bubble_rate_span == pytest.approx(1 - busy[longest] / lengths[longest])
    assert weak_iteration_bound(workload) <= makespan


def test_span_rate_is_of_the_longest_device_and_ties_go_to_the_first() -> None:
    """Both devices span 30; the first is busy for all of it, the second for 20."""
    workload = chain_workload(2, 1, forward=10, backward=10, devices=[(0,), (1,), (0,)])
    graph = task_graph(workload)
    orders = numbered(graph, [[("0F", 0), ("2F", 0), ("2B", 0), ("0B", 0)], [("1F", 0), ("1B", 0)]])
    starts = earliest_starts(graph, orders)
    figures = rates(graph, orders, starts)
    assert figures.span_ns == (60, 40)
    assert figures.bubble_rate_span == pytest.approx(1 - 40 / 60)
    assert figures.bubble_rate == pytest.approx(1 - 60 / 120)


def test_in_flight_counts_micro_batches_once_over_the_stages_of_a_device() -> None:
    workload, orders = interleaved(4, 2, 16)
    graph, tasks, _ = timed(workload, orders)
    assert in_flight(graph, tasks) == (8, 8, 7, 5)
    plain = chain_workload(4, 16)
    graph, tasks, _ = timed(plain, one_f_one_b(plain))
    assert in_flight(graph, tasks) == (4, 3, 2, 1)


def test_in_flight_with_unequal_sizes_counts_in_the_smaller_size() -> None:
    workload = chain_workload(1, 4, devices=[(0,), (0,)], sizes=[1, 2])
    graph, tasks, _ = timed(workload, gpipe_orders(workload))
    assert in_flight(graph, tasks) == (4,)
    workload = chain_workload(2, 4, sizes=[1, 2])
    graph, tasks, _ = timed(workload, gpipe_orders(workload))
    assert in_flight(graph, tasks) == (4, 2)


@given(ALL_KINDS, SEEDS)
@settings(max_examples=some_of(60))
def test_in_flight_is_what_samples_are_held_for(workload: Workload, seed: int) -> None:
    """Half-samples that a device holds bytes for, in units of the largest pieces all its stages' actions consist of."""
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    for device, (order, found) in enumerate(zip(named(graph, orders), in_flight(graph, orders), strict=True)):
        sizes = [stage.microbatch_size for stage in workload.stages if device in stage.devices]
        held: dict[int, int] = dict.fromkeys(range(workload.mini_batch), 0)
        most = 0
        for entry in order:
            operation = next(each for each in workload.operations if each.id == entry[0])
            for sample in actions_of(workload, entry[0])[entry[1]][1]:
                held[sample] += operation.acquire_bytes
            most = max(most, sum(number > 0 for number in held.values()))
            for sample in actions_of(workload, entry[0])[entry[1]][1]:
                held[sample] -= operation.release_bytes
        assert found == -(-most // math.gcd(*sizes)) if sizes else found == 0


# Critical path -----------------------------------------------------------------------------------------------


@given(ALL_KINDS | placed(links=True).map(lambda drawn: drawn.workload), SEEDS)
@settings(max_examples=some_of(90))
def test_the_critical_path_is_gapless_from_zero_to_the_makespan(workload: Workload, seed: int) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    starts = earliest_starts(graph, orders)
    path = critical_path(graph, orders, starts)
    assert path[0].reason == "start"
    assert starts[path[0].task] == 0
    now = 0
    for index, step in enumerate(path):
        assert starts[step.task] == now + step.lag_ns
        now = starts[step.task] + graph.durations[step.task]
        if step.reason in ("device", "link"):
            before = path[index - 1].task
            assert any((before, step.task) in zip(order, order[1:], strict=False) for order in orders)
        elif step.reason != "start":
            assert (step.task, step.lag_ns) in graph.successors[path[index - 1].task]
            assert (step.reason == "transfer") == (step.lag_ns > 0)
    assert now == rates(graph, orders, starts).makespan_ns


def test_the_critical_path_of_one_f_one_b_goes_down_along_the_last_device_and_up() -> None:
    workload = chain_workload(3, 2, forward=1, backward=2, lag=5)
    graph, orders, starts = timed(workload, one_f_one_b(workload))
    path = critical_path(graph, orders, starts)
    assert [(graph.label(step.task), step.reason) for step in path] == [
        ("0F0", "start"),
        ("1F0", "transfer"),
        ("2F0", "transfer"),
        ("2B0", "device"),
        ("2F1", "device"),
        ("2B1", "device"),
        ("1B1", "transfer"),
        ("0B1", "transfer"),
    ]


# Simulating plans --------------------------------------------------------------------------------------------


def test_a_plan_replayed_as_it_is_gives_what_it_states() -> None:
    plan = chain_plan(4, 12, lag=1, split=(10, 10), repetend=True, unroll=4, parameter_bytes=7, workspace_bytes=2)
    simulation = simulate(plan)
    stated = plan.predicted
    assert simulation.rates.makespan_ns == stated.makespan_ns
    assert simulation.rates.bubble_rate == pytest.approx(stated.bubble_rate)
    assert simulation.rates.bubble_rate_span == pytest.approx(stated.bubble_rate_span)
    assert simulation.bubble_rate_steady == pytest.approx(stated.bubble_rate_steady)
    assert simulation.period_ns == stated.period_ns
    assert simulation.memory == stated.memory
    assert simulation.lower_bound_ns == stated.lower_bound_ns
    assert (simulation.gap, simulation.as_planned, simulation.overflow) == (0.0, True, None)


def test_more_micro_batches_follow_the_repetend() -> None:
    plan = chain_plan(4, 8, forward=1, backward=2, repetend=True)
    simulation = simulate(plan, 100)
    assert simulation.rates.makespan_ns == (100 + 3) * 3
    assert simulation.workload.num_microbatches == 100
    assert simulation.lower_bound_ns == (100 + 3) * 3
    assert not simulation.as_planned
    assert simulation.memory == plan.predicted.memory


def test_very_many_microbatches_are_not_written_out() -> None:
    plan = chain_plan(4, 8, forward=1, backward=2, repetend=True)
    simulation = simulate(plan, 700_000)
    assert simulation.rates.makespan_ns == (700_000 + 3) * 3
    assert simulation.rates.busy_ns == (2_100_000,) * 4
    assert simulation.graph.num_tasks < 200
    assert simulation.workload.num_microbatches == 700_000
    assert simulation.label(simulation.orders[0][-1]) == "0B699999"


def test_the_number_of_actions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where times do not come to repeat themselves."""
    monkeypatch.setattr("pipeplan.simulator.simulation.looped", lambda *_: None)
    plan = chain_plan(4, 8, repetend=True)
    with pytest.raises(UsageError, match="more than the 5000000 of one simulation; lower --microbatches to 625000"):
        simulate(plan, 700_000)


@pytest.mark.parametrize("split", [None, (10, 10)])
def test_the_profile_of_a_plan_changes_nothing(split: tuple[int, int] | None) -> None:
    costs = {"split": split, "lag": 3, "parameter_bytes": 5, "workspace_bytes": 2, "activation_bytes": 9}
    plan = chain_plan(4, 8, **costs)
    simulation = simulate(plan, profile=chain_profile(4, **costs))
    assert simulation.as_planned
    assert simulation.workload == plan.workload


def test_another_profile_changes_times_sizes_and_messages_but_not_orders() -> None:
    plan = chain_plan(3, 6, forward=10, backward=20, repetend=True)
    slower = chain_profile(3, forward=20, backward=40, activation_bytes=2000, parameter_bytes=50)
    simulation = simulate(plan, profile=slower)
    assert simulation.rates.makespan_ns == 2 * plan.predicted.makespan_ns
    assert simulation.orders == simulate(plan).orders
    assert simulation.period_ns == 60
    assert simulation.period_lower_bound_ns == 60
    assert simulation.lower_bound_ns == (6 + 2) * 60
    assert simulation.memory[0].activation_bytes == 3 * 2000
    assert simulation.memory[0].parameter_bytes == 50
    lagging = simulate(plan, profile=chain_profile(3, lag=1000))
    assert lagging.rates.makespan_ns > plan.predicted.makespan_ns + 4000


def test_exchanges_of_state_by_actions_are_timed_anew() -> None:
    """Over links half as quick they take twice as long; groups that the profile's costs are not of are refused."""
    plan, profile = sharded_plan(), chain_of([100] * 5)
    half = pairs(4).levels[0].model_copy(update={"bandwidth_bytes_per_s": 10**9 // 2, "latency_ns": 10})
    slower = recosted(plan, profile, pairs(4).model_copy(update={"levels": (half,)}))
    for found, given_ in zip(slower.stages, plan.stages, strict=True):
        times = [(each.unshard_ns, each.reduce_ns) for each in given_.block_groups]
        assert min(min(each) for each in times) > 0
        assert [(each.unshard_ns, each.reduce_ns) for each in found.block_groups] == [
            (2 * unshard, 2 * reduce) for unshard, reduce in times
        ]
    first, second, *rest = plan.stages[0].block_groups
    joined = replace(first, blocks=first.blocks + second.blocks)
    stages = (replace(plan.stages[0], block_groups=(joined, *rest)), *plan.stages[1:])
    with pytest.raises(UsageError, match=r"in groups of 2, 1 blocks, .* of groups of 1, 1, 1; leave out"):
        recosted(plan.model_copy(update={"stages": stages}), profile, pairs(4))


def test_a_plan_that_splits_some_stages_is_recosted_stage_by_stage() -> None:
    plan = mixed_split_plan()
    profile = chain_profile(2, forward=100, split=(30, 70))
    simulation = simulate(plan, profile=profile)
    durations = {operation.id: operation.duration_ns for operation in simulation.workload.operations}
    assert durations == {"0F": 100, "1F": 100, "1I": 30, "1W": 70, "0B": 100}


def mixed_split_plan() -> Plan:
    """Two stages, of which only the second runs I and W."""
    workload = chain_workload(2, 3)
    operations = (
        Operation(kind="F", stage=0, duration_ns=1, acquire_bytes=1000),
        Operation(kind="F", stage=1, duration_ns=1, acquire_bytes=1000),
        Operation(kind="I", stage=1, duration_ns=1, release_bytes=1000),
        Operation(kind="W", stage=1, duration_ns=1),
        Operation(kind="B", stage=0, duration_ns=1, release_bytes=1000),
    )
    dependencies = (
        Dependency(source="0F", target="0B"),
        Dependency(source="1F", target="1I"),
        Dependency(source="1I", target="1W"),
        Dependency(source="0F", target="1F", hops=hops((0,), (1,))),
        Dependency(source="1I", target="0B", hops=hops((1,), (0,))),
    )
    workload = Workload(
        name="mixed",
        placement="one-to-one",
        num_microbatches=3,
        microbatch_size=1,
        devices=workload.devices,
        stages=workload.stages,
        operations=operations,
        dependencies=dependencies,
    )
    return plan_of(workload, gpipe_orders(workload))


def test_profiles_that_do_not_fit_are_refused() -> None:
    plan = chain_plan(3, 4)
    with pytest.raises(UsageError, match="does not fit the plan: the plan's placement leaves out block 'block3'"):
        simulate(plan, profile=chain_profile(4))
    with pytest.raises(UsageError, match="has block 'block2', which is not in the profile"):
        simulate(plan, profile=chain_profile(2))
    with pytest.raises(UsageError, match=r"runs \d[IW] on stage \d, for which profile 'chain' has no costs"):
        simulate(chain_plan(3, 4, split=(10, 10)), profile=chain_profile(3))
    profile = chain_profile(3).model_copy(update={"edges": chain_profile(3).edges[:1]})
    with pytest.raises(UsageError, match=r"dependencies\[\d\] of the plan hands 1F to 2F, .* no such edge"):
        simulate(plan, profile=profile)
    stage = replace(plan.stages[0], configuration="rows")
    configured = plan.model_copy(update={"stages": (stage, *plan.stages[1:])})
    with pytest.raises(UsageError, match=r"stages\[0\] of the plan has configuration 'rows'"):
        simulate(configured, profile=chain_profile(3))


def test_a_plan_with_a_block_in_two_stages_is_refused_not_crashed_on() -> None:
    plan = chain_plan(2, 2)
    stage = replace(plan.stages[1], blocks=("block0",))
    doubled = plan.model_copy(update={"stages": (plan.stages[0], stage)})
    with pytest.raises(UsageError, match="does not fit the plan: block 'block0' is in"):
        simulate(doubled, profile=chain_profile(2))


def test_another_cluster_changes_links_devices_and_memory() -> None:
    plan = chain_plan(2, 1, forward=10, backward=20)
    simulation = simulate(plan, cluster=cluster_of(4, memory_bytes=500))
    assert simulation.rates.makespan_ns == 60 + 2 * (7 + 64)  # 64 bytes at 1 GB/s are 64 ns
    assert [device.name for device in simulation.workload.devices] == ["small", "small"]
    assert simulation.overflow is not None
    assert (simulation.overflow.device, simulation.overflow.over_bytes) == (0, 500)


def test_messages_without_bytes_keep_their_latency_on_another_cluster() -> None:
    plan = chain_plan(2, 1, lag=11)
    dependencies = tuple(
        replace(dependency, hops=tuple(replace(hop, bytes=0) for hop in dependency.hops))
        for dependency in plan.dependencies
    )
    simulation = simulate(plan.model_copy(update={"dependencies": dependencies}), cluster=cluster_of(2))
    assert simulation.rates.makespan_ns == plan.predicted.makespan_ns


def test_profile_and_cluster_together_price_the_messages_of_the_profile() -> None:
    profile = chain_profile(2)
    edges = tuple(edge.model_copy(update={"transfer_ns": None, "bytes_per_sample": 100}) for edge in profile.edges)
    plan = chain_plan(2, 1, forward=10, backward=20)
    simulation = simulate(plan, profile=profile.model_copy(update={"edges": edges}), cluster=cluster_of(2))
    assert simulation.rates.makespan_ns == 60 + 2 * (7 + 100)
    assert simulation.workload.devices[0].name == "small"


def test_a_cluster_with_too_few_devices_is_refused() -> None:
    with pytest.raises(UsageError, match="cluster 'test' has 2 devices, the plan uses 3"):
        simulate(chain_plan(3, 2), cluster=cluster_of(2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda program: program[1:], r"programs\[0\] leaves out 0F0"),
        (lambda program: (*program, "0F1"), r"programs\[0\] has 0F1 more than once"),
        (lambda program: (*program, "0F2"), r"programs\[0\] has 0F2, which does not run there"),
        (lambda program: (*program, "1F0"), r"programs\[0\] has 1F0, which does not run there"),
        (lambda program: (*program, "0W0"), r"programs\[0\] has 0W0, which does not run there"),
        (lambda program: program[::-1], "wait for each other"),
    ],
)
def test_damaged_programs_are_refused_with_the_place(change: object, text: str) -> None:
    plan = chain_plan(2, 2)
    programs = (change(plan.programs[0]), plan.programs[1])
    with pytest.raises(InvalidPlanError, match=text):
        simulate(plan.model_copy(update={"programs": programs}))
