"""Simulation: timing, memory, rates, repetends, critical path, replays. Checked by naive recomputation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_plan, chain_profile, chain_workload, hops, shared_workload
from builders.drawn import Placed, placed
from builders.orders import (
    Entry,
    actions_of,
    gpipe_orders,
    one_f_one_b,
    one_f_one_b_repetend,
    random_orders,
    serial_orders,
)
from builders.plans import plan_of
from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.model import (
    Cluster,
    Dependency,
    Device,
    DeviceKind,
    Hop,
    LinkLevel,
    Operation,
    Plan,
    Repetend,
    Source,
    Stage,
)
from pipeplan.model.workload import Workload
from pipeplan.simulate.bounds import makespan_bound
from pipeplan.simulate.critical_path import critical_path
from pipeplan.simulate.memory import fits, overflow, peak_memory
from pipeplan.simulate.metrics import in_flight, rates
from pipeplan.simulate.orders import orders_of
from pipeplan.simulate.repetend import (
    copy_ranges,
    extend,
    find_repetend,
    repetend_rate,
    repetend_time,
    steady_bubble_rate,
    work_bound,
)
from pipeplan.simulate.simulation import simulate
from pipeplan.simulate.timing import TaskGraph, earliest_starts, task_graph, with_links
from references.replay import extended, period_of, replay

NamedOrders = list[list[Entry]]


def numbered(graph: TaskGraph, orders: NamedOrders) -> list[list[int]]:
    position = {operation.id: index for index, operation in enumerate(graph.workload.operations)}
    return [[graph.offsets[position[id_]] + m for id_, m in order] for order in orders]


def named(graph: TaskGraph, orders: Sequence[Sequence[int]]) -> NamedOrders:
    return [[entry_of(graph, task) for task in order] for order in orders]


def entry_of(graph: TaskGraph, task: int) -> Entry:
    index = graph.operation_of[task]
    return graph.workload.operations[index].id, task - graph.offsets[index]


def timed(workload: Workload, orders: NamedOrders) -> tuple[TaskGraph, list[list[int]], list[int]]:
    graph = task_graph(workload)
    tasks = numbered(graph, orders)
    return graph, tasks, earliest_starts(graph, tasks)


def found_in(workload: Workload, orders: NamedOrders, max_unroll: int | None = None) -> Repetend | None:
    return find_repetend(*timed(workload, orders), max_unroll)


def interleaved(num_devices: int, chunks: int, num_microbatches: int, lag: int = 0) -> tuple[Workload, NamedOrders]:
    """Megatron's interleaved 1F1B on a circular placement; forward 1, backward 2."""
    workload = chain_workload(
        num_devices,
        num_microbatches,
        forward=1,
        backward=2,
        lag=lag,
        devices=[(s % num_devices,) for s in range(num_devices * chunks)],
    )
    group, total = num_devices * chunks, num_microbatches * chunks
    orders = []
    for d in range(num_devices):
        forwards, backwards = [], []
        for k in range(total):
            block, rest = divmod(k, group)
            chunk, m = rest // num_devices, block * num_devices + rest % num_devices
            forwards.append((f"{chunk * num_devices + d}F", m))
            backwards.append((f"{(chunks - 1 - chunk) * num_devices + d}B", m))
        ahead = min(total, (num_devices - d - 1) * 2 + (chunks - 1) * num_devices)
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[total - ahead :])
    return workload, orders


# ---------------------------------------------------------------- random workloads and orders


@st.composite
def workloads(draw: st.DrawFn, unequal: bool = True) -> Workload:
    """Up to four stages on up to three devices (some on several), any forward edges, lags, memory effects."""
    num_devices, num_stages = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_microbatches = draw(st.sampled_from([2, 4]))
    groups = [
        tuple(sorted(draw(st.sets(st.integers(0, num_devices - 1), min_size=1, max_size=2)))) for _ in range(num_stages)
    ]
    sizes = [draw(st.sampled_from([1, 2])) if unequal else 1 for _ in groups]
    time, size = st.integers(1, 5), st.integers(0, 9)
    operations, dependencies, back = [], [], {}
    for s in range(num_stages):
        held, workspace = draw(size), draw(size)
        forward = Operation(kind="F", stage=s, duration_ns=draw(time), acquire_bytes=held, workspace_bytes=workspace)
        operations.append(forward)
    for s in reversed(range(num_stages)):
        held = operations[s].acquire_bytes
        kept = draw(st.integers(0, held)) if draw(st.booleans()) else None
        back[s] = "B" if kept is None else "I"
        operations.append(
            Operation(
                kind="B" if kept is None else "I",
                stage=s,
                duration_ns=draw(time),
                release_bytes=held - (kept or 0),
                workspace_bytes=draw(size),
            )
        )
        dependencies.append(Dependency(source=f"{s}F", target=f"{s}{back[s]}"))
        if kept is not None:
            operations.append(Operation(kind="W", stage=s, duration_ns=draw(time), release_bytes=kept))
            dependencies.append(Dependency(source=f"{s}I", target=f"{s}W"))
    for a in range(num_stages):
        for b in range(a + 1, num_stages):
            if b == a + 1 or draw(st.booleans()):
                lag = draw(st.integers(0, 4))
                down, up = hops(groups[a], groups[b], lag), hops(groups[b], groups[a], lag)
                dependencies.append(Dependency(source=f"{a}F", target=f"{b}F", hops=down))
                dependencies.append(Dependency(source=f"{b}{back[b]}", target=f"{a}{back[a]}", hops=up))
    return Workload(
        name="random",
        placement="random",
        num_microbatches=num_microbatches,
        microbatch_size=1,
        devices=tuple(Device() for _ in range(num_devices)),
        stages=tuple(
            Stage(
                blocks=(f"block{s}",),
                devices=group,
                shards=len(group),
                microbatch_size=sizes[s],
                parameter_bytes=draw(size),
                optimizer_bytes=draw(size),
            )
            for s, group in enumerate(groups)
        ),
        operations=tuple(operations),
        dependencies=tuple(dependencies),
    )


SEEDS = st.integers(0, 2**20)


# ---------------------------------------------------------------- timing


ALL_KINDS = workloads() | placed().map(lambda drawn: drawn.workload)


@given(ALL_KINDS, SEEDS)
@settings(max_examples=120)
def test_starts_are_those_of_a_naive_replay(workload: Workload, seed: int) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    starts = earliest_starts(graph, orders)
    done = replay(workload, named(graph, orders))
    assert {entry_of(graph, task): start for task, start in enumerate(starts)} == {
        entry: span[0] for entry, span in done.items()
    }


@pytest.mark.parametrize("num_devices", range(2, 17))
@pytest.mark.parametrize("num_microbatches", [1, 3, 16, 40])
def test_one_f_one_b_takes_n_plus_d_minus_one_rounds(num_devices: int, num_microbatches: int) -> None:
    workload = chain_workload(num_devices, num_microbatches, forward=1, backward=2)
    graph, orders, starts = timed(workload, one_f_one_b(workload))
    assert rates(graph, orders, starts).makespan_ns == (num_microbatches + num_devices - 1) * 3
    assert makespan_bound(workload) == (num_microbatches + num_devices - 1) * 3


def test_orders_that_wait_for_each_other_are_refused_with_actions() -> None:
    workload = chain_workload(2, 2)
    graph = task_graph(workload)
    orders = numbered(graph, [[("0B", 0), ("0F", 0), ("0F", 1), ("0B", 1)], one_f_one_b(workload)[1]])
    with pytest.raises(InvalidPlanError, match="wait for each other and can never start, among them 0F0"):
        earliest_starts(graph, orders)


def test_orders_of_a_plan_are_its_compute_actions() -> None:
    plan = chain_plan(3, 4, split=(10, 10), lag=3)
    graph = task_graph(Workload.of(plan))
    assert named(graph, orders_of(plan, graph)) == one_f_one_b(Workload.of(plan))


# ---------------------------------------------------------------- memory


def taken_by(workload: Workload, entry: Entry) -> int:
    """What an action takes at its start: two parts take in turn what the whole would, the first more."""
    operation = next(operation for operation in workload.operations if operation.id == entry[0])
    name, _ = actions_of(workload, entry[0])[entry[1]]
    larger = (operation.acquire_bytes + 1) // 2
    return {"0": larger, "1": operation.acquire_bytes - larger}.get(name.partition(".")[2], operation.acquire_bytes)


def naive_levels(workload: Workload, device: int, order: list[Entry], done: dict[Entry, tuple[int, int]]) -> list[int]:
    """Bytes a device holds at the start of each of its actions, read off the timeline."""
    operations = {operation.id: operation for operation in workload.operations}
    levels = []
    for id_, m in order:
        now = done[id_, m][0]
        begun = [entry for entry in order if done[entry][0] <= now]
        ended = [entry for entry in order if done[entry][1] <= now]
        levels.append(
            workload.static_bytes(device)
            + sum(taken_by(workload, entry) for entry in begun)
            - sum(operations[entry[0]].release_bytes for entry in ended)
            + operations[id_].workspace_bytes
        )
    return levels


@given(ALL_KINDS, SEEDS)
@settings(max_examples=80)
def test_peak_memory_is_the_highest_moment_of_the_timeline(workload: Workload, seed: int) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    order_names = named(graph, orders)
    done = replay(workload, order_names)
    for device, memory in enumerate(peak_memory(graph, orders)):
        levels = naive_levels(workload, device, order_names[device], done)
        static = workload.static_bytes(device)
        assert memory.peak_bytes == max(levels, default=static)
        assert memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes == static
        assert memory.peak_bytes == static + memory.activation_bytes + memory.workspace_bytes


def test_the_five_parts_are_those_of_the_first_moment_of_the_peak() -> None:
    workload = chain_workload(1, 2, activation_bytes=5, workspace_bytes=3, parameter_bytes=100)
    graph, orders, _ = timed(workload, [[("0F", 0), ("0B", 0), ("0F", 1), ("0B", 1)]])
    (memory,) = peak_memory(graph, orders)
    assert (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes) == (100, 100, 200)
    assert (memory.activation_bytes, memory.workspace_bytes, memory.peak_bytes) == (5, 3, 408)


def test_weight_gradients_keep_what_input_gradients_leave() -> None:
    """F holds 6, I takes 4 more at its start (10 deferred for W), so W of both micro-batches at the end holds 20."""
    workload = chain_workload(1, 2, split=(10, 10), activation_bytes=6, weight_grad_bytes=10)
    graph, orders, _ = timed(workload, [[("0F", 0), ("0I", 0), ("0F", 1), ("0I", 1), ("0W", 0), ("0W", 1)]])
    assert peak_memory(graph, orders)[0].activation_bytes == 20


def test_a_device_without_actions_holds_nothing_and_is_not_busy() -> None:
    workload = chain_workload(3, 2, devices=[(0,), (2,)])
    graph, orders, starts = timed(workload, gpipe_orders(workload))
    assert peak_memory(graph, orders)[1].peak_bytes == 0
    figures = rates(graph, orders, starts)
    assert (figures.busy_ns[1], figures.span_ns[1], figures.idle_ns[1]) == (0, 0, figures.makespan_ns)
    assert in_flight(graph, orders)[1] == 0


def test_overflow_names_the_device_most_short_of_memory_and_the_first_action_of_its_peak() -> None:
    workload = chain_workload(3, 6, activation_bytes=1000, memory_bytes=1500)
    graph, orders, _ = timed(workload, one_f_one_b(workload))
    found = overflow(graph, orders)
    assert found is not None
    assert (found.device, found.action, found.over_bytes) == (0, "0F2", 1500)
    assert str(found) == "device 0 needs 3kB at 0F2, 1.5kB more than its 1.5kB"
    assert not fits(graph, orders)


@pytest.mark.parametrize(("memory_bytes", "enough"), [(2999, False), (3000, True), (None, True)])
def test_fits_is_exact(memory_bytes: int | None, enough: bool) -> None:
    workload = chain_workload(3, 6, activation_bytes=1000, memory_bytes=memory_bytes)
    graph, orders, _ = timed(workload, one_f_one_b(workload))
    assert fits(graph, orders) is enough


# ---------------------------------------------------------------- rates


@given(workloads(), SEEDS)
@settings(max_examples=60)
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
    assert makespan_bound(workload) <= makespan


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
@settings(max_examples=60)
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


# ---------------------------------------------------------------- links with parts and patterns


@given(placed(links=True), SEEDS)
@settings(max_examples=60)
def test_messages_wait_for_what_they_carry_and_for_their_link(drawn: Placed, seed: int) -> None:
    """Each message once, in the order in which all that it carries is made; one at a time; actions wait for it."""
    workload, graph = drawn.workload, task_graph(drawn.workload)
    orders = with_links(graph, graph.on_devices(random_orders(graph, Random(seed))))
    starts = earliest_starts(graph, orders)
    assert len(graph.durations) == len(starts) == graph.num_tasks
    samples = [
        range(*workload.slots[item].samples(task - graph.offsets[item])) for task, item in enumerate(graph.operation_of)
    ]
    for order in orders[len(workload.devices) :]:
        made = []
        for task in order:
            transfer = workload.transfers[graph.operation_of[task] - len(workload.operations)]
            ends = [*range(*graph.offsets[transfer.source : transfer.source + 2])]
            made.append(max(starts[n] + graph.durations[n] for n in ends if set(samples[n]) & set(samples[task])))
            assert starts[task] >= made[-1]
            parts = len(samples[task]) < workload.stages[workload.operations[transfer.source].stage].microbatch_size
            assert graph.durations[task] == (transfer.hop.part if parts else transfer.hop).occupancy_ns
            for n in range(*graph.offsets[transfer.target : transfer.target + 2]):
                if set(samples[n]) & set(samples[task]):
                    assert starts[n] >= starts[task] + graph.durations[task] + transfer.hop.latency_ns
        assert made == sorted(made)
        for one, other in zip(order, order[1:], strict=False):
            assert starts[other] >= starts[one] + graph.durations[one]


def test_an_action_waits_for_what_comes_to_it_over_no_message() -> None:
    """Device 0 makes for itself what its replica of stage 1 works on; only the other replica's half is sent."""
    workload = chain_workload(2, 4, devices=[(0,), (0, 1)], sizes=[2, 4])
    sent = Hop(source_device=0, target_device=1, every=2, run=1, first=1, latency_ns=3, occupancy_ns=50)
    replicas = workload.stages[1].model_copy(update={"shards": 1, "replicas": 2})
    dependencies = tuple(
        each.model_copy(update={"hops": (sent,)}) if (each.source, each.target) == ("0F", "1F") else each
        for each in workload.dependencies
    )
    workload = replace(workload, stages=(workload.stages[0], replicas), dependencies=dependencies)
    assert workload.links == ((0, 1),)
    graph = task_graph(workload)
    number = {graph.label(task): task for task in range(graph.num_tasks)}
    orders = [[number[text] for text in order.split()] for order in ("0F1 1F0 0F0 1B0 0B0 0B1", "1F0 1B0")]
    with pytest.raises(InvalidPlanError, match="wait for each other"):
        with_links(graph, orders)
    orders[0][:3] = [number[text] for text in ("0F1", "0F0", "1F0")]
    starts = earliest_starts(graph, with_links(graph, orders))
    assert starts[number["1F0"]] == 20 + 53  # as long after every micro-batch as the slowest hop takes


# ---------------------------------------------------------------- critical path


@given(ALL_KINDS | placed(links=True).map(lambda drawn: drawn.workload), SEEDS)
@settings(max_examples=90)
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


# ---------------------------------------------------------------- extension


@pytest.mark.parametrize("split", [None, (1, 1)])
@pytest.mark.parametrize("unroll", [1, 2, 3])
@pytest.mark.parametrize("num_devices", [2, 4, 7])
def test_one_f_one_b_extended_is_one_f_one_b_of_the_larger_problem(
    num_devices: int, unroll: int, split: tuple[int, int] | None
) -> None:
    workload = chain_workload(num_devices, 12, split=split, lag=3)
    _, orders, _ = timed(workload, one_f_one_b(workload))
    repetend = Repetend(unroll=unroll, repetend_ns=1, first=one_f_one_b_repetend(workload))
    larger, longer = extend(workload, orders, repetend, 12 + 5 * unroll)
    assert larger == workload.with_microbatches(12 + 5 * unroll)
    assert named(task_graph(larger), longer) == one_f_one_b(larger)


def test_extension_repeats_prefix_copies_and_suffix() -> None:
    workload, orders = interleaved(4, 2, 16)
    graph, tasks, starts = timed(workload, orders)
    repetend = find_repetend(graph, tasks, starts)
    assert repetend is not None
    larger, longer = extend(workload, tasks, repetend, 16 + 3 * repetend.unroll)
    assert named(task_graph(larger), longer) == extended(workload, orders, repetend.first, repetend.unroll, 3)
    assert named(task_graph(larger), longer) == interleaved(4, 2, 28)[1]


def test_extension_to_the_same_number_needs_no_repetend() -> None:
    workload = chain_workload(2, 3)
    _, orders, _ = timed(workload, gpipe_orders(workload))
    assert extend(workload, orders, None, 3) == (workload, orders)


def test_extension_says_what_numbers_work() -> None:
    workload = chain_workload(3, 8)
    _, orders, _ = timed(workload, one_f_one_b(workload))
    repetend = Repetend(unroll=3, repetend_ns=90, first=one_f_one_b_repetend(workload))
    with pytest.raises(UsageError, match=r"grow by 3 at a time .* --microbatches 11 and 14"):
        extend(workload, orders, repetend, 12)
    with pytest.raises(UsageError, match=r"with more, not with 5; search one for fewer: .* --microbatches 5"):
        extend(workload, orders, repetend, 5)
    with pytest.raises(UsageError, match=r"no repetend, .* its 8 micro-batches only; .* --microbatches 9"):
        extend(workload, orders, None, 9)


def test_extension_refuses_a_repetend_that_is_not_there() -> None:
    workload = chain_workload(3, 8)
    _, orders, _ = timed(workload, one_f_one_b(workload))
    first = one_f_one_b_repetend(workload)
    with pytest.raises(
        InvalidPlanError, match="device 0 runs 0F2 inside the repetend, which has its micro-batches 1 to 1"
    ):
        extend(workload, orders, Repetend(unroll=1, repetend_ns=30, first={**first, "0F": 1}), 9)
    with pytest.raises(InvalidPlanError, match="device 0 runs 16 actions, too few for the repetend"):
        extend(workload, orders, Repetend(unroll=8, repetend_ns=30, first=first), 16)
    with pytest.raises(InvalidPlanError, match="1F from micro-batch 4 and 0F, which it waits for, from 2"):
        extend(workload, orders, Repetend(unroll=1, repetend_ns=30, first={**first, "1F": 4}), 9)


def test_repetends_need_equal_sizes() -> None:
    workload = chain_workload(2, 4, sizes=[1, 2])
    graph, orders, starts = timed(workload, gpipe_orders(workload))
    with pytest.raises(UsageError, match=r"one micro-batch size for all stages; stages\[1\] has 2, the plan 1"):
        find_repetend(graph, orders, starts)
    first = {operation.id: 0 for operation in workload.operations}
    with pytest.raises(UsageError, match="one micro-batch size"):
        extend(workload, orders, Repetend(unroll=1, repetend_ns=1, first=first), 6)


# ---------------------------------------------------------------- finding repetends


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_one_f_one_b_repeats_every_micro_batch(num_devices: int) -> None:
    workload = chain_workload(num_devices, 4 * num_devices, forward=1, backward=2)
    repetend = found_in(workload, one_f_one_b(workload))
    assert repetend is not None
    assert (repetend.unroll, repetend.repetend_ns, repetend.span) == (1, 3, num_devices)
    assert steady_bubble_rate(workload, repetend) == 0


def test_gpipe_has_no_repetend() -> None:
    workload = chain_workload(4, 16, forward=1, backward=2)
    assert found_in(workload, gpipe_orders(workload)) is None


def test_a_serial_schedule_repeats_with_its_whole_latency() -> None:
    workload = chain_workload(3, 6, forward=10, backward=20, lag=1)
    repetend = found_in(workload, serial_orders(workload))
    assert repetend is not None
    assert (repetend.unroll, repetend.repetend_ns, repetend.span) == (1, 94, 1)
    assert steady_bubble_rate(workload, repetend) == pytest.approx(1 - 30 / 94)


@pytest.mark.parametrize(("num_devices", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_interleaved_one_f_one_b_repeats_every_d_micro_batches(num_devices: int, chunks: int) -> None:
    workload, orders = interleaved(num_devices, chunks, 8 * num_devices)
    repetend = found_in(workload, orders)
    assert repetend is not None
    assert (repetend.unroll, repetend.repetend_ns) == (num_devices, 3 * chunks * num_devices)
    assert found_in(workload, orders, max_unroll=num_devices - 1) is None


def test_operations_of_several_devices_are_counted_once() -> None:
    workload = shared_workload(3, 8, lag=2)
    orders = serial_orders(workload)
    repetend = found_in(workload, orders)
    assert repetend is not None
    assert repetend.unroll == 1
    assert repetend.repetend_ns == period_of(workload, orders, repetend.first)


def test_distances_that_alternate_become_a_larger_unroll() -> None:
    """1F1B on 4 devices with lags: a round trip of 4 * 30 + 6 * 3 lets 4 micro-batches in, so 138 / 4 each."""
    workload = chain_workload(4, 24, forward=10, backward=20, lag=3)
    graph, orders, starts = timed(workload, one_f_one_b(workload))
    first = one_f_one_b_repetend(workload)
    assert repetend_time(workload, orders, first, 1) is None
    assert repetend_rate(workload, orders, first, 1) == Fraction(69, 2)
    repetend = find_repetend(graph, orders, starts)
    assert repetend is not None
    assert (repetend.unroll, repetend.repetend_ns) == (4, 138)
    assert repetend_time(workload, orders, first, 4) == 138


def test_the_slowest_part_sets_the_time_of_a_repetend_whose_parts_run_apart() -> None:
    """Two devices that only hand on: the first moves at 10 per micro-batch, the second at 30."""
    workload = chain_workload(2, 12, forward=10, backward=1)
    operations = (
        Operation(kind="F", stage=0, duration_ns=10),
        Operation(kind="F", stage=1, duration_ns=30),
    )
    workload = Workload(
        name="forward only",
        placement="one-to-one",
        num_microbatches=12,
        microbatch_size=1,
        devices=workload.devices,
        stages=workload.stages,
        operations=operations,
        dependencies=(Dependency(source="0F", target="1F"),),
    )
    repetend = found_in(workload, gpipe_orders(workload))
    assert repetend is not None
    assert (repetend.unroll, repetend.repetend_ns) == (1, 30)
    assert steady_bubble_rate(workload, repetend) == pytest.approx(1 - 40 / 60)


def best_by_brute_force(workload: Workload, orders: NamedOrders, starts: dict[Entry, int]) -> Fraction | None:
    """Least time per micro-batch over all moments and unrolls, each tried by replaying many copies."""
    best: Fraction | None = None
    for moment in sorted(set(starts.values())):
        first = {
            op.id: sum(starts[op.id, m] < moment for m in range(workload.num_microbatches))
            for op in workload.operations
        }
        for unroll in range(1, workload.num_microbatches // 2 + 1):
            if not all(is_copy(order, first, unroll) for order in orders):
                continue
            try:
                rate = Fraction(period_of(workload, orders, first, unroll), unroll)
            except AssertionError:  # copies are not at equal distances
                continue
            best = rate if best is None else min(best, rate)
    return best


def is_copy(order: list[Entry], first: dict[str, int], unroll: int) -> bool:
    ids = {id_ for id_, _ in order}
    begin = sum(first[id_] for id_ in ids)
    run = order[begin : begin + unroll * len(ids)]
    return sorted(run) == sorted((id_, first[id_] + u) for id_ in ids for u in range(unroll))


@given(st.integers(1, 3), st.lists(st.integers(1, 4), min_size=6, max_size=6), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=8)
def test_found_repetends_are_the_best_that_exist(num_devices: int, times: list[int], lag: int, room: int) -> None:
    """Chains with any times, each device running backwards first and holding at most ``room`` micro-batches."""
    workload = chain_workload(num_devices, 6, lag=lag)
    durations = {f"{s}{kind}": times[2 * s + (kind == "B")] for s in range(num_devices) for kind in "FB"}
    operations = tuple(op.model_copy(update={"duration_ns": durations[op.id]}) for op in workload.operations)
    workload = Workload.of(plan_of(workload, one_f_one_b(workload)).model_copy(update={"operations": operations}))
    orders = backward_first(workload, room)
    graph, tasks, starts = timed(workload, orders)
    expected = best_by_brute_force(workload, orders, {entry_of(graph, t): s for t, s in enumerate(starts)})
    repetend = find_repetend(graph, tasks, starts)
    assert (None if repetend is None else Fraction(repetend.repetend_ns, repetend.unroll)) == expected


def backward_first(workload: Workload, room: int) -> NamedOrders:
    """Each device runs a backward as soon as it can, else a forward if it has room; by stepping through time."""
    operations = {operation.id: operation for operation in workload.operations}
    lags = {(d.source, d.target): d.lag_ns for d in workload.dependencies}
    sources = {id_: [s for s, t in lags if t == id_] for id_ in operations}
    num_devices, number = len(workload.devices), workload.num_microbatches
    ends: dict[Entry, int] = {}
    free, orders, done = (
        [0] * num_devices,
        [[] for _ in range(num_devices)],
        [{"F": 0, "B": 0} for _ in range(num_devices)],
    )
    now = 0
    while len(ends) < 2 * num_devices * number:
        for d in range(num_devices):
            for kind in "BF":
                m, id_ = done[d][kind], f"{d}{kind}"
                held = done[d]["F"] - done[d]["B"]
                arrived = all(ends.get((s, m), now + 1) + lags[s, id_] <= now for s in sources[id_])
                if free[d] <= now and m < number and arrived and (kind == "B" or held < room):
                    free[d] = ends[id_, m] = now + operations[id_].duration_ns
                    orders[d].append((id_, m))
                    done[d][kind] += 1
        now += 1
    return orders


def test_memory_for_three_micro_batches_repeats_with_unroll_three() -> None:
    """Design section 6: V-shape on 4 devices, forward 1, backward 3, room for 3: 16 per 3 micro-batches."""
    workload = chain_workload(4, 32, forward=1, backward=3)
    repetend = found_in(workload, backward_first(workload, 3))
    assert repetend is not None
    assert (repetend.unroll, repetend.repetend_ns) == (3, 16)


@given(workloads(unequal=False), SEEDS)
@settings(max_examples=40)
def test_extending_a_found_repetend_adds_its_time_and_no_memory(workload: Workload, seed: int) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    repetend = find_repetend(graph, orders, earliest_starts(graph, orders))
    if repetend is None:
        return
    makespans = []
    for copies in (40, 41, 42):
        larger, longer = extend(workload, orders, repetend, workload.num_microbatches + copies * repetend.unroll)
        larger_graph = task_graph(larger)
        assert [sorted(order) for order in longer] == [
            [task for task in range(larger_graph.num_tasks) if device in larger_graph.devices_of(task)]
            for device in range(len(longer))
        ]
        starts = earliest_starts(larger_graph, longer)
        makespans.append(rates(larger_graph, longer, starts).makespan_ns)
        assert peak_memory(larger_graph, longer) == peak_memory(graph, orders)
    assert makespans[2] - makespans[1] == makespans[1] - makespans[0] == repetend.repetend_ns
    assert repetend.repetend_ns >= work_bound(workload) * repetend.unroll


def test_copy_ranges_are_where_the_copy_stands() -> None:
    workload = chain_workload(3, 8)
    _, orders, _ = timed(workload, one_f_one_b(workload))
    repetend = Repetend(unroll=2, repetend_ns=60, first=one_f_one_b_repetend(workload))
    assert copy_ranges(workload, orders, repetend) == [range(2, 6), range(1, 5), range(4)]


# ---------------------------------------------------------------- simulating plans


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


def test_the_number_of_actions_is_limited() -> None:
    plan = chain_plan(4, 8, repetend=True)
    with pytest.raises(UsageError, match="more than the 5000000 of one simulation; lower --microbatches to 625000"):
        simulate(plan, 700_000)


@pytest.mark.parametrize("split", [None, (10, 10)])
def test_the_profile_of_a_plan_changes_nothing(split: tuple[int, int] | None) -> None:
    costs = {"split": split, "lag": 3, "parameter_bytes": 5, "workspace_bytes": 2, "activation_bytes": 9}
    plan = chain_plan(4, 8, **costs)
    simulation = simulate(plan, profile=chain_profile(4, **costs))
    assert simulation.as_planned
    assert simulation.workload == Workload.of(plan)


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
    stage = plan.stages[0].model_copy(update={"configuration": "rows"})
    configured = plan.model_copy(update={"stages": (stage, *plan.stages[1:])})
    with pytest.raises(UsageError, match=r"stages\[0\] of the plan has configuration 'rows'"):
        simulate(configured, profile=chain_profile(3))


def test_a_plan_with_a_block_in_two_stages_is_refused_not_crashed_on() -> None:
    plan = chain_plan(2, 2)
    stage = plan.stages[1].model_copy(update={"blocks": ("block0",)})
    doubled = plan.model_copy(update={"stages": (plan.stages[0], stage)})
    with pytest.raises(UsageError, match="does not fit the plan: block 'block0' is in"):
        simulate(doubled, profile=chain_profile(2))


def cluster_of(count: int, *, memory: int | None = None, latency: int = 7, bandwidth: int = 10**9) -> Cluster:
    return Cluster(
        name="test",
        source=Source(method="estimated"),
        devices=(DeviceKind(name="small", count=count, memory_bytes=memory),),
        levels=(LinkLevel(name="wire", group_size=max(2, count), latency_ns=latency, bandwidth_bytes_per_s=bandwidth),),
    )


def test_another_cluster_changes_links_devices_and_memory() -> None:
    plan = chain_plan(2, 1, forward=10, backward=20)
    simulation = simulate(plan, cluster=cluster_of(4, memory=500))
    assert simulation.rates.makespan_ns == 60 + 2 * (7 + 64)  # 64 bytes at 1 GB/s are 64 ns
    assert [device.name for device in simulation.workload.devices] == ["small", "small"]
    assert simulation.overflow is not None
    assert (simulation.overflow.device, simulation.overflow.over_bytes) == (0, 500)


def test_messages_without_bytes_keep_their_latency_on_another_cluster() -> None:
    plan = chain_plan(2, 1, lag=11)
    dependencies = tuple(
        dependency.model_copy(update={"hops": tuple(hop.model_copy(update={"bytes": 0}) for hop in dependency.hops)})
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
