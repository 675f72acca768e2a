"""Workloads with replicas, routes and unequal micro-batches, reduced for a search and brought back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import profiles
from pipeplan.costs import build_workload
from pipeplan.errors import UsageError
from pipeplan.files import CostRow, PlacedStage, Placement, Profile
from pipeplan.partition.placement import place
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import first_look, search_schedule
from pipeplan.workload.bounds import strong_iteration_bound
from pipeplan.workload.elements import Bucket, TiedState
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import GRADIENT_ROLES
from pipeplan.workload.one_microbatch import IDLE, OneMicrobatch, Reduction
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from support.marks import some_of

SIZES = (1, 2, 4)


def profile_of(times: Sequence[int], edges: Sequence[tuple[int, int]]) -> Profile:
    """Blocks whose forward takes ``times`` [block] per sample, backward 3 and 2 more, split."""
    rows = [
        [
            CostRow(
                microbatch_size=size,
                forward_ns=time * size,
                input_grad_ns=(time + 1) * size,
                weight_grad_ns=(time + 2) * size,
                activation_bytes=10 * size,
                weight_grad_bytes=12 * size,
            )
            for size in SIZES
        ]
        for time in times
    ]
    return profiles.profile_of(rows, edges, parameters=[100] * len(times), transfer_ns=3)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Chains and joins of stages with sizes, replicas, devices (several stages on some) and routes of their own."""
    count = draw(st.integers(1, 4))
    joined = count > 2 and draw(st.booleans())
    edges = [(i, count - 1 if joined else i + 1) for i in range(count - 1)]
    profile = profile_of([draw(st.integers(1, 9)) for _ in range(count)], edges)
    routes = draw(st.integers(1, 2))
    common = draw(st.sampled_from(SIZES))  # several routes have one size
    stages = []
    for route in range(routes):
        for index in range(count):
            size = common if routes > 1 else draw(st.sampled_from(SIZES))
            replicas = draw(st.sampled_from([each for each in (1, 2) if size % each == 0]))
            devices = draw(st.lists(st.integers(0, 4), min_size=replicas, max_size=replicas, unique=True))
            stages.append(
                PlacedStage(
                    blocks=(f"b{index}",),
                    devices=tuple(devices),
                    replicas=replicas,
                    microbatch_size=size,
                    route=route,
                )
            )
    placement = Placement(strategy="drawn", num_devices=5, num_routes=routes, stages=tuple(stages))
    return build_workload(
        profile,
        placement,
        num_microbatches=4 * routes,
        microbatch_size=common if routes > 1 else 1,
        split_backward=draw(st.booleans()),
    )


@given(workloads())
@settings(max_examples=some_of(60))
def test_orders_mean_the_same_in_both(workload: Workload) -> None:
    found = first_look(workload)
    assert found is not None
    reduction = Reduction.of(workload)
    orders = found.orders[: len(workload.devices)]
    if reduction is None:
        return
    reduced = reduction.to_reduced(orders)
    assert reduction.from_reduced(reduced) == orders
    graph = task_graph(reduction.reduced)
    starts = earliest_starts(graph, with_links(graph, reduced))
    assert max(map(sum, zip(starts, graph.durations, strict=True))) == found.makespan_ns
    static = [workload.static_bytes(device) for device in range(len(workload.devices))]
    groups = reduction.groups
    assert static == [0 if group == IDLE else reduction.reduced.static_bytes(group) for group in groups]


@st.composite
def summing(draw: st.DrawFn) -> Workload:
    """The same with sums of gradients, in buckets or not, that slow devices, steps, and gradients that stages share."""
    workload = draw(workloads())
    devices = tuple(replace(each, contention=draw(st.sampled_from([0.0, 0.3, 0.5]))) for each in workload.devices)
    times = st.integers(0, 40)
    most = {
        operation.stage: operation.duration_ns for operation in workload.operations if operation.role in GRADIENT_ROLES
    }
    stages = tuple(
        replace(
            stage,
            blocks=(*stage.blocks, f"{stage.blocks[0]} too"),
            sync_ns=draw(times),
            step_ns=draw(times),
            buckets=draw(
                st.sampled_from(
                    [
                        (),
                        (
                            Bucket(blocks=1, bytes=1, sync_ns=draw(times), ahead_ns=draw(st.integers(0, most[number]))),
                            Bucket(blocks=1, bytes=1, sync_ns=draw(times)),
                        ),
                    ]
                )
            ),
        )
        for number, stage in enumerate(workload.stages)
    )
    users = [number for number, stage in enumerate(stages) if stage.blocks[0] in ("b0", "b1")]
    tied = TiedState(
        name="table", stages=tuple(users), devices=tuple(stages[n].devices for n in users), sync_ns=draw(times)
    )
    return replace(workload, devices=devices, stages=stages, tied=(tied,) if len(users) > 1 else ())


@given(summing())
@settings(max_examples=some_of(100))
def test_what_follows_the_last_actions_is_the_same_in_both(workload: Workload) -> None:
    """So that a search of what is reduced compares iterations as they will be."""
    found = first_look(workload)
    assert found is not None
    reduction = Reduction.of(workload)
    if reduction is None:
        return
    graph = task_graph(reduction.reduced)
    reduced = reduction.to_reduced(found.orders[: len(workload.devices)])
    assert graph.iteration(earliest_starts(graph, with_links(graph, reduced))) == found.iteration_ns


@given(workloads())
@settings(max_examples=some_of(40))
def test_bounds_are_below_every_schedule(workload: Workload) -> None:
    found = search_schedule(workload, Budget(0.05, deterministic=True))
    assert strong_iteration_bound(OneMicrobatch.of(workload)) <= found.bound_ns <= found.makespan_ns


def interleavings(counts: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Orders of (operation, number) that keep the numbers of an operation in order, given (operation, count)."""
    letters = [operation for operation, count in counts for _ in range(count)]
    for word in set(itertools.permutations(letters)):
        next_ = dict.fromkeys(word, -1)
        order = []
        for operation in word:
            next_[operation] += 1
            order.append((operation, next_[operation]))
        yield order


def shortest(workload: Workload) -> int:
    """The least makespan over all orders."""
    graph = task_graph(workload)
    per_device = []
    for device in range(len(workload.devices)):
        here = [x for x, devices in enumerate(workload.resources) if device in devices]
        counts = [(x, len(workload.slots[x])) for x in here]
        per_device.append([[graph.offsets[x] + m for x, m in order] for order in interleavings(counts)])
    best = None
    for orders in itertools.product(*per_device):
        try:
            starts = earliest_starts(graph, list(orders))
        except Exception:  # actions that wait for each other
            continue
        makespan = max(map(sum, zip(starts, graph.durations, strict=True)))
        best = makespan if best is None else min(best, makespan)
    assert best is not None
    return best


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (1, 1), (2, 2)])
@pytest.mark.parametrize("times", [(3, 4), (5, 2)])
@pytest.mark.parametrize("devices", [(0, 1), (0, 0)])
def test_the_search_finds_the_shortest_of_all_orders(
    sizes: tuple[int, int], times: tuple[int, int], devices: tuple[int, int]
) -> None:
    if devices == (0, 0) and sizes == (1, 1):
        return  # too many orders
    stages = tuple(
        PlacedStage(blocks=(f"b{index}",), devices=(device,), microbatch_size=size)
        for index, (device, size) in enumerate(zip(devices, sizes, strict=True))
    )
    placement = Placement(strategy="drawn", num_devices=max(devices) + 1, stages=stages)
    workload = build_workload(profile_of(times, [(0, 1)]), placement, num_microbatches=2, microbatch_size=1)
    found = search_schedule(workload, Budget(5.0, deterministic=True))
    assert found.optimal
    assert found.makespan_ns == shortest(workload)


def test_parts_are_not_searched() -> None:
    stage = PlacedStage(blocks=("b0",), devices=(0,), num_parted=1)
    placement = Placement(strategy="drawn", num_devices=1, stages=(stage,))
    workload = build_workload(profile_of([3], []), placement, num_microbatches=2, microbatch_size=2)
    with pytest.raises(UsageError, match="leave out num_parted"):
        OneMicrobatch.of(workload)


@pytest.mark.parametrize("strategy", ["one-to-one", "circular", "v-shape", "bidirectional"])
def test_devices_that_run_nothing_change_no_schedule(strategy: str) -> None:
    """Every classic schedule applies as without them, and its actions run at the same times."""
    profile, applied = profile_of([3] * 8, [(i, i + 1) for i in range(7)]), 0
    placement = place(profile, strategy, 4, microbatch_size=1)
    alone, beside = (
        build_workload(
            profile,
            placement.model_copy(update={"num_devices": count}),
            num_microbatches=10,
            microbatch_size=1,
            split_backward=True,
        )
        for count in (4, 6)
    )
    problems = [OneMicrobatch.of(workload) for workload in (alone, beside)]
    assert [problem.num_devices for problem in problems] == [4, 4]
    for name, classic in CLASSIC.items():
        reasons = [classic.applies(problem) for problem in problems]
        assert reasons[0] == reasons[1]
        if reasons[0] is None:
            applied += 1
            budget = Budget(1.0, deterministic=True)
            found = [search_schedule(workload, budget, scheduler=name) for workload in (alone, beside)]
            assert found[0].starts == found[1].starts
            assert [*map(list, found[0].orders), [], []] == list(map(list, found[1].orders))
    assert applied > 2
