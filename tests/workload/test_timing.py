"""When actions start and what devices hold, by naive recomputation."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_plan, chain_workload
from builders.drawn import Placed, placed, workloads
from builders.orders import Entry, actions_of, gpipe_orders, one_f_one_b, random_orders
from builders.timed import entry_of, named, timed
from pipeplan.errors import InvalidPlanError
from pipeplan.simulator.metrics import in_flight, rates
from pipeplan.simulator.simulation import orders_of
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.elements import Hop
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import fits, overflow, peak_memory
from pipeplan.workload.one_microbatch import Reduction
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload, lasting
from references.replay import replay
from support.marks import some_of

SEEDS = st.integers(0, 2**20)
ALL_KINDS = workloads() | placed().map(lambda drawn: drawn.workload)


@given(ALL_KINDS, SEEDS)
@settings(max_examples=some_of(120))
def test_starts_are_those_of_a_naive_replay(workload: Workload, seed: int) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    starts = earliest_starts(graph, orders)
    likely = starts[: graph.num_actions]
    assert earliest_starts(graph, orders, likely) == starts
    likely[seed % len(likely)] += 1 + seed % 3
    assert earliest_starts(graph, orders, likely) == starts
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
    assert weak_iteration_bound(workload) == (num_microbatches + num_devices - 1) * 3


@pytest.mark.parametrize(
    ("orders", "circle"),
    [
        ("0B0 0F0 0F1 0B1; 1F0 1B0 1F1 1B1", ["0F0 on device 0", "0B0 on device 0"]),
        (
            "0F0 0B0 0F1 0B1; 1F1 1F0 1B0 1B1",
            [*("0B0 on device 0", "0F1 on device 0"), *("1F1 on device 1", "1F0 on device 1", "1B0 on device 1")],
        ),
    ],
)
def test_orders_that_wait_for_each_other_are_refused_with_the_circle(orders: str, circle: list[str]) -> None:
    """Of micro-batch 7, which waits behind them all, nothing is said."""
    graph = task_graph(chain_workload(2, 8))
    number = {graph.label(task): task for task in range(graph.num_actions)}
    rest = [[f"{device}{kind}{m}" for m in range(2, 8) for kind in "FB"] for device in range(2)]
    named = [text.split() + more for text, more in zip(orders.split(";"), rest, strict=True)]
    with pytest.raises(InvalidPlanError, match=r"^\d+ actions wait for each other and can never start; ") as caught:
        earliest_starts(graph, [[number[text] for text in order] for order in named])
    said = str(caught.value).rpartition(": ")[2].split(", then ")
    first = said.index(circle[0])
    assert said[first:-1] + said[:first] == circle
    assert said[-1] == said[0]


def test_orders_of_a_plan_are_its_compute_actions() -> None:
    plan = chain_plan(3, 4, split=(10, 10), lag=3)
    graph = task_graph(plan.workload)
    assert named(graph, orders_of(plan, graph)) == one_f_one_b(plan.workload)


# Memory ------------------------------------------------------------------------------------------------------


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
@settings(max_examples=some_of(80))
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


# Links with parts and patterns -------------------------------------------------------------------------------


@given(placed(links=True), SEEDS)
@settings(max_examples=some_of(60))
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
    replicas = replace(workload.stages[1], shards=1, replicas=2)
    dependencies = tuple(
        replace(each, hops=(sent,)) if (each.source, each.target) == ("0F", "1F") else each
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


@given(ALL_KINDS, st.integers(2, 3))
@settings(max_examples=some_of(60))
def test_what_lasts_is_that_of_any_number_of_microbatches(workload: Workload, factor: int) -> None:
    names = [name for name, value in vars(Workload).items() if isinstance(value, lasting) and name != "elsewhere"]
    names.append("ways_to_sum")
    whole = not any(stage.num_parted for stage in workload.stages)
    known = [getattr(workload, name) for name in names], whole and Reduction.of(workload)
    assert len(known[0]) > 40
    number = factor * workload.num_microbatches
    other, afresh = workload.with_microbatches(number), replace(workload, num_microbatches=number)
    for name in names:
        assert getattr(other, name) == getattr(afresh, name), name
    if whole:
        assert Reduction.of(other) == Reduction.of(afresh)
