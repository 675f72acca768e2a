"""Links that carry one message at a time: random workloads and orders against a clock that ticks ns by ns."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from builders.orders import random_orders
from pipeplan.checker import check
from pipeplan.files import Plan
from pipeplan.planning.build_plan import assemble
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import search_schedule
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.bounds import period_bound, strong_iteration_bound, weak_iteration_bound
from pipeplan.workload.elements import Dependency, Hop
from pipeplan.workload.engine import with_links
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.repetend import extend, find_repetend
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload

times = st.integers(0, 5)


@st.composite
def workloads(draw: st.DrawFn, *, equal: bool = False) -> Workload:
    """A chain of two to five stages on two or three devices, one or two of each, over links of any slowness."""
    num_devices = draw(st.sampled_from([2, 2, 3]))
    alone = [(device,) for device in range(num_devices)]
    groups = draw(st.lists(st.sampled_from([*alone, *alone, (0, 1)]), min_size=2, max_size=5))
    sizes = [1 if equal else draw(st.sampled_from([1, 1, 2])) for _ in groups]
    workload = chain_workload(
        num_devices,
        draw(st.integers(1, 3)) * 2,
        forward=draw(st.integers(1, 4)),
        backward=draw(st.integers(1, 4)),
        split=draw(st.none() | st.just((2, 1))),
        devices=groups,
        sizes=sizes,
    )
    hops = st.builds(lambda latency, occupancy: {"latency_ns": latency, "occupancy_ns": occupancy}, times, times)
    dependencies = [
        replace(dependency, hops=tuple(replace(hop, **draw(hops)) for hop in dependency.hops))
        for dependency in workload.dependencies
    ]
    return replace(workload, dependencies=tuple(dependencies))


Name = tuple[str, str, int, int]
"""A message: source, target, target device, micro-batch of the source."""


class Clock:
    """Lets ns after ns go by. Hops of dependencies are looked at by themselves, not as the graph has them.

    Links take their messages as ``orders`` say, or in the order in which they are made where ``orders`` have none.
    """

    def __init__(self, graph: TaskGraph, orders: Orders) -> None:
        self.workload, self.graph = graph.workload, graph
        count = len(self.workload.devices)
        self.devices = [deque(order) for order in orders[:count]]
        self.turns = {
            link: deque(self.name_of(task) for task in order)
            for link, order in zip(self.workload.links, orders[count:], strict=False)
        }
        self.now = 0
        self.starts: dict[str, int] = {}
        self.ends: dict[tuple[str, int], int] = {}
        self.device_free, self.link_free = [0] * count, defaultdict[tuple[int, int], int](int)
        self.queues = defaultdict[tuple[int, int], list[tuple[Name, Hop]]](list)
        self.here: dict[Name, int] = {}

    def name_of(self, task: int) -> Name:
        item = self.graph.operation_of[task]
        transfer = self.workload.transfers[item - len(self.workload.operations)]
        ids = [operation.id for operation in self.workload.operations]
        m = task - self.graph.offsets[item]
        return ids[transfer.source], ids[transfer.target], transfer.hop.target_device, m

    def run(self) -> dict[str, int]:
        """{action: start} of all actions."""
        while any(self.devices):
            self.end()
            for link in self.queues:
                self.carry(link)
            for _ in self.devices:  # an action of several devices starts when the last of them comes to it
                for device in range(len(self.devices)):
                    self.begin(device)
            self.now += 1
            assert self.now < 100_000, "nothing moves"
        return self.starts

    def end(self) -> None:
        """What ends now puts its messages before their links."""
        for (id_, m), end in self.ends.items():
            for dependency in self.workload.dependencies:
                if end == self.now and dependency.source == id_:
                    for hop in dependency.hops:
                        name = id_, dependency.target, hop.target_device, m
                        self.queues[hop.source_device, hop.target_device].append((name, hop))

    def carry(self, link: tuple[int, int]) -> None:
        queue = self.queues[link]
        for name, hop in [message for message in queue if not message[1].occupancy_ns]:
            self.here[name] = self.now + hop.latency_ns
            queue.remove((name, hop))
        turn = self.turns.get(link)
        chosen = next((message for message in queue if not turn or message[0] == turn[0]), None)
        if chosen is not None and self.link_free[link] <= self.now:
            name, hop = chosen
            queue.remove(chosen)
            self.link_free[link] = self.now + hop.occupancy_ns
            self.here[name] = self.now + hop.duration_ns
            if turn:
                turn.popleft()

    def begin(self, device: int) -> None:
        """Start the device's next action if all of its devices are free and its inputs are there."""
        if not self.devices[device]:
            return
        task = self.devices[device][0]
        item = self.graph.operation_of[task]
        operation, m = self.workload.operations[item], task - self.graph.offsets[item]
        group = self.workload.stages[operation.stage].devices
        is_next = all(self.devices[d] and self.devices[d][0] == task and self.device_free[d] <= self.now for d in group)
        needs = [dependency for dependency in self.workload.dependencies if dependency.target == operation.id]
        if is_next and all(self.is_there(dependency, n) for dependency in needs for n in self.shared(dependency, m)):
            end = self.now + operation.duration_ns
            self.starts[f"{operation.id}{m}"], self.ends[operation.id, m] = self.now, end
            for d in group:
                self.devices[d].popleft()
                self.device_free[d] = end

    def shared(self, dependency: Dependency, m: int) -> set[int]:
        """Micro-batches of the source with samples of the target's."""
        size, source_size = (
            self.workload.stages[int(id_[:-1])].microbatch_size for id_ in (dependency.target, dependency.source)
        )
        return {sample // source_size for sample in range(m * size, (m + 1) * size)}

    def is_there(self, dependency: Dependency, n: int) -> bool:
        names = [(dependency.source, dependency.target, hop.target_device, n) for hop in dependency.hops]
        arrivals = [self.ends.get((dependency.source, n)), *map(self.here.get, names)]
        return all(time is not None and time <= self.now for time in arrivals)


def starts_of(graph: TaskGraph, orders: Orders) -> dict[str, int]:
    starts = earliest_starts(graph, orders)
    return {graph.label(task): starts[task] for task in range(graph.num_actions)}


@given(workloads(), st.randoms(use_true_random=False))
def test_earliest_starts_are_those_of_a_clock(workload: Workload, random: Random) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, random)
    assert starts_of(graph, orders) == Clock(graph, orders).run()


@given(workloads(), st.randoms(use_true_random=False))
def test_links_without_an_order_serve_who_comes_first(workload: Workload, random: Random) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, random)[: len(workload.devices)]
    assert starts_of(graph, with_links(graph, orders)) == Clock(graph, orders).run()


def plan_of(graph: TaskGraph, orders: Orders) -> Plan:
    """The plan of any orders. Stages of unequal micro-batch sizes have no repetend, so they are not assembled."""
    problem = OneMicrobatch.of(graph.workload)
    return assemble(graph, orders, strong_iteration_bound(problem), period_bound(problem), "test")


@given(workloads(equal=True), st.randoms(use_true_random=False))
def test_every_order_of_devices_and_links_becomes_a_valid_plan(workload: Workload, random: Random) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, random)
    plan = plan_of(graph, orders)
    assert check(plan).problems == ()
    again = simulate(plan)
    assert again.rates.makespan_ns == plan.predicted.makespan_ns
    assert again.starts == earliest_starts(graph, orders)
    assert weak_iteration_bound(workload) <= plan.predicted.lower_bound_ns <= plan.predicted.makespan_ns


def steady_orders(graph: TaskGraph, random: Random) -> list[list[int]]:
    """Orders that repeat: micro-batches, or pairs of them, go through everything in one way, each so much later."""
    workload, count = graph.workload, graph.workload.num_microbatches
    later, unroll = random.uniform(0.5, len(workload.operations)), random.choice([1, 1, 2])
    odd = random.uniform(0.0, later * unroll)
    places = [float(x) for x in range(len(workload.operations))]
    places += [random.uniform(transfer.source, transfer.target) for transfer in workload.transfers]
    keyed = [
        (place + m // unroll * unroll * later + m % unroll * odd, x * count + m)
        for x, place in enumerate(places)
        for m in range(count)
    ]
    orders: list[list[int]] = [[] for _ in range(workload.num_resources)]
    for _, task in sorted(keyed):
        for resource in graph.devices_of(task):
            orders[resource].append(task)
    return orders


@given(workloads(equal=True), st.integers(8, 24), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_repetitions_with_busy_links_repeat(
    workload: Workload, count: int, copies: int, first_come: bool, random: Random
) -> None:
    workload = workload.with_microbatches(count)
    graph = task_graph(workload)
    orders = steady_orders(graph, random)
    if first_come:
        orders = with_links(graph, orders[: len(workload.devices)])
    repetend = find_repetend(graph, orders, earliest_starts(graph, orders))
    if repetend is None:
        return
    assert repetend.period_ns >= max(OneMicrobatch.of(workload).work)
    assert check(plan_of(graph, orders)).problems == ()
    larger, longer = extend(workload, orders, repetend, count + copies * repetend.unroll)
    assert check(plan_of(task_graph(larger), longer)).problems == ()


@settings(max_examples=12)
@given(workloads(equal=True), st.integers(2, 6))
def test_what_the_search_finds_passes_and_is_no_worse_than_what_is_classic(workload: Workload, count: int) -> None:
    workload = workload.with_microbatches(count)
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    found = search_schedule(workload, Budget(1.0, deterministic=True))
    assert found.bound_ns <= found.makespan_ns
    assert check(assemble(graph, found.orders, found.bound_ns, period_bound(problem), "test")).problems == ()
    for classic in CLASSIC.values():
        if classic.applies(problem) is None:
            orders = classic.orders(problem, task_graph(problem.workload))
            own = orders if problem.reduction is None else problem.reduction.from_reduced(orders)
            starts = earliest_starts(graph, with_links(graph, own))
            assert found.makespan_ns <= max(map(sum, zip(starts, graph.durations, strict=True)))
