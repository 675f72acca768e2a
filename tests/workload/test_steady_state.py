"""Repetends: found in orders, the best that exist, and orders extended by them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload, shared_workload
from builders.drawn import workloads
from builders.orders import Entry, Orders, gpipe_orders, one_f_one_b, one_f_one_b_repetend, random_orders, serial_orders
from builders.plans import plan_of
from builders.shapes import shape_workload
from builders.timed import entry_of, found_in, interleaved, named, timed
from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.simulator.metrics import rates
from pipeplan.workload.bounds import work_bound
from pipeplan.workload.elements import Dependency, Operation, Repetend
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.steady_state import rate, repetend
from pipeplan.workload.steady_state.rate import (
    CutOrders,
    repetend_rate,
    steady_bubble_rate,
    steady_state,
)
from pipeplan.workload.steady_state.repetend import extend, find_repetend
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.replay import extended, period_of
from support.marks import some_of

SEEDS = st.integers(0, 2**20)


# Extension ---------------------------------------------------------------------------------------------------


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


# Finding repetends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_one_f_one_b_repeats_every_micro_batch(num_devices: int) -> None:
    workload = chain_workload(num_devices, 4 * num_devices, forward=1, backward=2)
    repetend = found_in(workload, one_f_one_b(workload))
    assert repetend is not None
    assert (repetend.unroll, repetend.repetend_ns, repetend.span) == (1, 3, num_devices)
    assert steady_bubble_rate(workload, repetend.period) == 0


def test_gpipe_has_no_repetend() -> None:
    workload = chain_workload(4, 16, forward=1, backward=2)
    assert found_in(workload, gpipe_orders(workload)) is None


def test_a_serial_schedule_repeats_with_its_whole_latency() -> None:
    workload = chain_workload(3, 6, forward=10, backward=20, lag=1)
    repetend = found_in(workload, serial_orders(workload))
    assert repetend is not None
    assert (repetend.unroll, repetend.repetend_ns, repetend.span) == (1, 94, 1)
    assert steady_bubble_rate(workload, repetend.period) == pytest.approx(1 - 30 / 94)


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
    assert repetend_rate(workload, orders, first, 1) == Fraction(69, 2)
    repetend = find_repetend(graph, orders, starts)
    assert repetend is not None
    assert (repetend.unroll, repetend.repetend_ns) == (4, 138)
    assert repetend_rate(workload, orders, first, 4) == Fraction(138, 4)


def forwards_only(*times: int) -> Workload:
    """Devices that only hand on, each in its time."""
    workload = chain_workload(len(times), 12, forward=10, backward=1)
    operations = (Operation(kind="F", stage=stage, duration_ns=time) for stage, time in enumerate(times))
    return Workload(
        name="forward only",
        placement="one-to-one",
        num_microbatches=12,
        microbatch_size=1,
        devices=workload.devices,
        stages=workload.stages,
        operations=tuple(operations),
        dependencies=tuple(Dependency(source=f"{s}F", target=f"{s + 1}F") for s in range(len(times) - 1)),
    )


def test_the_slowest_part_sets_the_time_of_a_repetend_whose_parts_run_apart() -> None:
    """Two devices that only hand on: the first moves at 10 per micro-batch, the second at 30."""
    workload = forwards_only(10, 30)
    repetend = found_in(workload, gpipe_orders(workload))
    assert repetend is not None
    assert (repetend.unroll, repetend.repetend_ns) == (1, 30)
    assert steady_bubble_rate(workload, repetend.period) == pytest.approx(1 - 40 / 60)


@pytest.mark.parametrize("late", [1, 1000])
def test_parts_that_drift_apart_slowly_are_not_compared_again_and_again(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is ahead by five and a bit slower: the second waits for it after millions of copies, or thousands."""
    counts = [0]

    def counted(one: int, other: int) -> bool:
        counts[0] += 1
        return one == other

    monkeypatch.setattr(rate, "eq", counted)
    most = 40_000
    found = steady_state(forwards_only(1_000_000 + late, 1_000_000), [[(0, 5)], [(1, 0)]], [5, 0], 1, most)
    assert found == (None if late == 1 else (1, 1_000_000 + late))
    assert counts[0] < most


@given(st.integers(2, 4), st.lists(st.integers(1, 4), min_size=8, max_size=8), st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_copies_that_are_too_many_to_replay_keep_the_pace_of_the_busiest_device_or_nothing_is_said(
    num_devices: int, times: list[int], lag: int
) -> None:
    workload = chain_workload(num_devices, 12, lag=lag)
    durations = {f"{s}{kind}": times[2 * s + (kind == "B")] for s in range(num_devices) for kind in "FB"}
    operations = tuple(replace(op, duration_ns=durations[op.id]) for op in workload.operations)
    workload = plan_of(workload, one_f_one_b(workload)).model_copy(update={"operations": operations}).workload
    _, orders, _ = timed(workload, one_f_one_b(workload))
    cut = CutOrders.of(workload, orders, one_f_one_b_repetend(workload), 1)
    replayed, busiest, few = cut.rate, max(workload.work), 2 * num_devices * 12 - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rate, "MAX_REPLAYED", few)
        assert steady_state(workload, cut.copies, cut.begins, 1, few) == ((1, busiest) if replayed == busiest else None)
        assert steady_state(workload, cut.copies, cut.begins, 1, few - 1) is None


def best_by_brute_force(workload: Workload, orders: Orders, starts: dict[Entry, int]) -> Fraction | None:
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
@settings(max_examples=some_of(5))
def test_found_repetends_are_the_best_that_exist(num_devices: int, times: list[int], lag: int, room: int) -> None:
    """Chains with any times, each device running backwards first and holding at most ``room`` micro-batches."""
    workload = chain_workload(num_devices, 5, lag=lag)
    durations = {f"{s}{kind}": times[2 * s + (kind == "B")] for s in range(num_devices) for kind in "FB"}
    operations = tuple(replace(op, duration_ns=durations[op.id]) for op in workload.operations)
    workload = plan_of(workload, one_f_one_b(workload)).model_copy(update={"operations": operations}).workload
    orders = backward_first(workload, room)
    graph, tasks, starts = timed(workload, orders)
    expected = best_by_brute_force(workload, orders, {entry_of(graph, t): s for t, s in enumerate(starts)})
    repetend = find_repetend(graph, tasks, starts)
    assert (None if repetend is None else Fraction(repetend.repetend_ns, repetend.unroll)) == expected


def backward_first(workload: Workload, room: int) -> Orders:
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
@settings(max_examples=some_of(40))
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
    assert CutOrders.of(workload, orders, repetend.first, repetend.unroll).ranges == [
        range(2, 6),
        range(1, 5),
        range(4),
    ]


def test_of_very_many_actions_only_what_lasts_is_a_repetend(monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B's is there all along; forwards and backwards that take turns twice, between others, do not last."""
    graph = task_graph(shape_workload("v", 1, 64))
    forwards, backwards = list(range(64)), list(range(64, 128))
    one_by_one = [task for pair in zip(forwards, backwards, strict=True) for task in pair]
    twice = [*forwards[:31], backwards[0], forwards[31], backwards[1], *forwards[32:], *backwards[2:]]
    found = {}
    for most, (name, order) in product((128, 127), {"1f1b": one_by_one, "twice": twice}.items()):
        monkeypatch.setattr(repetend, "MOST_SWEPT", most)
        found[most, name] = find_repetend(graph, [order], earliest_starts(graph, [order]))
    assert found[128, "1f1b"] == found[127, "1f1b"] is not None
    assert found[128, "twice"] is not None
    assert found[127, "twice"] is None
