"""kFkB and greedy schedules of stage graphs, against all orders of small ones (GraphPipe, thesis 3.6 and 3.10).

The time model of Theorem 3.1 here: forward plus backward take equally long for a sample on every stage, and sending
takes no time.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from pipeplan.errors import UsageError
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.stage_graph import Rule, Stages, TrialRun, best_kfkb_orders, greedy_orders, kfkb_orders, least_ks
from pipeplan.workload.elements import Device
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import fits
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import NEVER, earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.stage_graphs import (
    StageGraph,
    best_of_all,
    connected_graphs,
    forwards_first,
    in_flight,
    makespan,
    samples_held,
    words_of,
)
from support.marks import one_in, slow_but, some_of

CHAIN, FORK, JOIN, DIAMOND, UNEVEN = (
    ((0, 1), (1, 2), (2, 3)),
    ((0, 1), (0, 2), (2, 3)),
    ((0, 2), (1, 2), (2, 3)),
    ((0, 1), (0, 2), (1, 3), (2, 3)),
    ((0, 1), (0, 3), (1, 2)),
)


def greedy(case: StageGraph) -> tuple[str, ...]:
    workload = case.workload()
    graph = task_graph(workload)
    return words_of(graph, greedy_orders(workload, graph))


def require_best(case: StageGraph) -> None:
    """The least time of all orders, and of those with it the least in flight on every stage at once."""
    words = greedy(case)
    time, flights = best_of_all(case)
    assert makespan(case, words) == time
    assert [tuple(map(in_flight, words))] == flights


@one_in(2, "count", [2, 3])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 1)])
def test_greedy_is_best_on_all_graphs_of_up_to_three_stages(count: int, forward: int, backward: int) -> None:
    for edges, sizes in itertools.product(connected_graphs(count), itertools.product((1, 2, 4), repeat=count)):
        require_best(StageGraph.balanced(sizes, edges, 4, forward, backward))


@slow_but("edges", [CHAIN, FORK, JOIN, DIAMOND, UNEVEN], lambda edges: edges is DIAMOND)
def test_greedy_is_best_on_graphs_of_four_stages(edges: tuple[tuple[int, int], ...]) -> None:
    for sizes in itertools.product((1, 2, 4), repeat=4):
        require_best(StageGraph.balanced(sizes, edges, 4, 1, 2))


@slow_but("sizes", [(2, 1, 2), (4, 1, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (4, 2, 1)], lambda sizes: sizes[0] == 2)
def test_greedy_is_best_on_chains_of_more_micro_batches(sizes: tuple[int, ...]) -> None:
    require_best(StageGraph.balanced(sizes, ((0, 1), (1, 2)), 8))


@st.composite
def graphs(
    draw: st.DrawFn, *, balanced: bool = False, most_stages: int = 4, mini_batches: tuple[int, ...] = (4, 6)
) -> StageGraph:
    """Two stages or more, joined somehow; with ``balanced`` forward plus backward are the same everywhere."""
    count = draw(st.integers(2, most_stages))
    mini_batch = draw(st.sampled_from(mini_batches))
    sizes = draw(
        st.lists(
            st.sampled_from([size for size in (1, 2, 4) if mini_batch % size == 0]), min_size=count, max_size=count
        )
    )
    edges = [(draw(st.integers(0, target - 1)), target) for target in range(1, count)]
    edges += [pair for pair in itertools.combinations(range(count), 2) if pair not in edges and draw(st.booleans())]
    forward = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    other = (
        [4 - time for time in forward]
        if balanced
        else draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    )
    lags = [0] * len(edges) if balanced else draw(st.lists(st.integers(0, 2), min_size=len(edges), max_size=len(edges)))
    return StageGraph(tuple(sizes), tuple(edges), mini_batch, tuple(forward), tuple(other), tuple(lags))


@given(graphs(balanced=True, mini_batches=(2, 4)))
@settings(max_examples=some_of(60))
def test_greedy_is_best_whatever_part_of_the_time_forwards_take(case: StageGraph) -> None:
    require_best(case)


@pytest.mark.slow
@given(graphs(balanced=True, most_stages=5, mini_batches=(2, 4)))
@settings(max_examples=some_of(200))
def test_greedy_is_best_on_graphs_of_up_to_five_stages(case: StageGraph) -> None:
    require_best(case)


@given(graphs(most_stages=3, mini_batches=(4,)))
@settings(max_examples=some_of(60))
def test_greedy_is_near_the_best_for_any_times(case: StageGraph) -> None:
    """Of some 2,000 drawn graphs two were more than 10 % above the best, the farthest 15 %."""
    time = makespan(case, greedy(case))
    assert time is not None
    assert time <= 1.2 * best_of_all(case)[0]


def test_greedy_has_fewer_in_flight_before_a_stage_of_smaller_micro_batches() -> None:
    """Fig. 3.5: the stage in the middle runs two backwards and two forwards in turn, the first one holds 3 for 4."""
    case = StageGraph.balanced((2, 1, 2), ((0, 1), (1, 2)), 8)
    assert greedy(case) == ("FFFBFBBB", "FFFFBBFFBBFFBBBB", "FBFBFBFB")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Devices with several stages, stages on several devices, some backwards split, links that may be busy."""
    case = draw(graphs(most_stages=5, mini_batches=(4, 8)))
    groups = st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
    devices = draw(st.lists(groups, min_size=len(case.sizes), max_size=len(case.sizes)))
    workload = case.workload(devices, split=draw(st.sets(st.integers(0, len(case.sizes) - 1))))
    occupied = {"occupancy_ns": draw(st.sampled_from([0, 1, 4]))}
    dependencies = (
        replace(each, hops=tuple(replace(hop, **occupied) for hop in each.hops)) for each in workload.dependencies
    )
    return replace(workload, dependencies=tuple(dependencies))


@given(workloads())
@settings(max_examples=some_of(100))
def test_greedy_runs_everything_on_any_placement(workload: Workload) -> None:
    graph = task_graph(workload)
    orders = greedy_orders(workload, graph)
    for device, order in enumerate(orders):
        assert sorted(order) == [task for task in range(graph.num_actions) if device in graph.devices_of(task)]
    starts = earliest_starts(graph, with_links(graph, orders))
    lags = sum(dependency.lag_ns for dependency in workload.dependencies) * workload.mini_batch
    assert max(map(int.__add__, starts, graph.durations)) <= sum(graph.durations) + lags
    held = samples_held(graph, orders)
    assert all(
        stage.microbatch_size <= samples <= workload.mini_batch
        for stage, samples in zip(workload.stages, held, strict=True)
    )


@given(graphs(most_stages=5, mini_batches=(8, 16)), st.data())
@settings(max_examples=some_of(100))
def test_kfkb_ends_for_any_k(case: StageGraph, data: st.DataObject) -> None:
    """Also where Table 3.2 alone lets stages wait for each other."""
    ks = [data.draw(st.integers(1, count)) for count in case.counts]
    workload = case.workload()
    graph = task_graph(workload)
    words = words_of(graph, kfkb_orders(workload, graph, ks))
    assert makespan(case, words) is not None
    for word, k in zip(words, ks, strict=True):
        start = len(word) - len(word.lstrip("F"))
        runs = [len(list(group)) for _, group in itertools.groupby(word[start:])]
        assert all(run == k for run in runs[:-2])
        assert in_flight(word) == start


def test_table_32_alone_lets_stages_wait_for_each_other() -> None:
    """5F5B before 4F4B: 7 forwards by row 3, but the fifth backward needs the eighth forward."""
    case = StageGraph.balanced((1, 1), ((0, 1),), 8)
    assert makespan(case, ("FFFFFFFBBBBBFBBB", "FFFFBBBBFFFFBBBB")) is None
    workload = case.workload()
    assert words_of(task_graph(workload), kfkb_orders(workload, task_graph(workload), (5, 4))) == (
        "FFFFFFFFBBBBBBBB",
        "FFFFBBBBFFFFBBBB",
    )


@pytest.mark.parametrize("split", [None, (10, 10)])
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 3), (2, 2), (4, 3), (4, 9)])
def test_1f1b_on_chains_of_one_size(devices: int, microbatches: int, split: tuple[int, int] | None) -> None:
    workload = chain_workload(devices, microbatches, split=split)
    graph = task_graph(workload)
    assert kfkb_orders(workload, graph) == CLASSIC["1f1b"].orders(OneMicrobatch.of(workload), graph)
    if split is None:
        assert greedy_orders(workload, graph) == kfkb_orders(workload, graph)


def test_k_that_leaves_least_in_flight() -> None:
    """Fig. 3.5 again: for the stage in the middle 1F1B and 2F2B are the same, for the first one they are not."""
    workload = StageGraph.balanced((2, 1, 2), ((0, 1), (1, 2)), 8).workload()
    graph = task_graph(workload)
    ks = least_ks(graph)
    assert ks == [1, 2, 1]
    assert samples_held(graph, kfkb_orders(workload, graph)) == [8, 4, 2]
    assert samples_held(graph, kfkb_orders(workload, graph, ks)) == [6, 4, 2]
    assert samples_held(graph, best_kfkb_orders(workload, graph)) == [6, 4, 2]


def test_larger_k_hides_messages_where_memory_has_room() -> None:
    case = StageGraph.balanced((1, 1), ((0, 1),), 8, 2, 2, lag=4)
    workload = case.workload()
    graph = task_graph(workload)
    ones = makespan(case, words_of(graph, kfkb_orders(workload, graph)))
    best = makespan(case, words_of(graph, best_kfkb_orders(workload, graph)))
    assert ones is not None
    assert best is not None
    assert best < ones
    assert best >= best_of_all(StageGraph.balanced((1, 1), ((0, 1),), 4, 2, 2, lag=4))[0]


def test_greedy_is_as_quick_as_memory_allows() -> None:
    """Messages that take long want more in flight than there is room for."""
    workload = StageGraph.balanced((1, 1), ((0, 1),), 8, 2, 2, lag=4).workload()
    free = greedy_orders(workload, task_graph(workload))
    small = replace(workload, devices=tuple(Device(memory_bytes=3) for _ in workload.devices))
    graph = task_graph(small)
    orders = greedy_orders(small, graph)
    assert fits(graph, orders)
    assert not fits(graph, free)
    assert samples_held(graph, orders) == [3, 1]
    none = replace(workload, devices=tuple(Device(memory_bytes=0) for _ in workload.devices))
    assert samples_held(graph, greedy_orders(none, task_graph(none))) == [1, 1]


def test_memory_is_not_looked_at_where_nothing_could_run() -> None:
    """The second stage needs four samples of the first one, which has room for two."""
    workload = StageGraph.balanced((1, 4), ((0, 1),), 8).workload()
    small = replace(workload, devices=tuple(Device(memory_bytes=2) for _ in workload.devices))
    assert greedy_orders(small, task_graph(small)) == greedy_orders(workload, task_graph(workload))


def test_kfkb_is_for_one_stage_per_device() -> None:
    workload = StageGraph.balanced((1, 1, 1), ((0, 1), (1, 2)), 4).workload([(0,), (1,), (0,)])
    with pytest.raises(UsageError, match="device 0 has stages 0 and 2"):
        kfkb_orders(workload, task_graph(workload))


def test_greedy_takes_no_longer_than_all_forwards_first_on_long_chains() -> None:
    case = StageGraph.balanced([1 + (stage % 3 == 1) for stage in range(12)], tuple((s, s + 1) for s in range(11)), 32)
    words = greedy(case)
    assert makespan(case, words) == makespan(case, forwards_first(case))
    assert max(map(in_flight, words)) < 32


@given(workloads(), st.data())
@settings(max_examples=some_of(40), deadline=None)
def test_what_makes_no_use_of_its_rules_runs_as_with_less(workload: Workload, data: st.DataObject) -> None:
    graph = task_graph(workload)
    stages = Stages(graph)
    limit = data.draw(st.sampled_from([NEVER, sum(graph.durations) // 2]))
    rules = [Rule(data.draw(st.integers(size, most))) for size, most in zip(stages.sizes, stages.totals, strict=True)]
    run = TrialRun(stages, rules, limit)
    less = [Rule(data.draw(st.integers(1, rule.samples))) for rule in rules]
    tight = [Rule(max(1, min(held, rule.samples))) for held, rule in zip(run.most_held, rules, strict=True)]
    for each in (less, tight):
        if run.is_with(each):
            again = TrialRun(stages, each, limit)
            assert (again.device_orders, again.makespan) == (run.device_orders, run.makespan)
    others = [Rule(rule.samples, forward_first=True) for rule in rules]
    assert not run.is_with(others)


def test_no_trial_is_run_twice_and_the_second_ends_where_it_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages a device, where forwards first is the shorter."""
    made: list[tuple[tuple[Rule, ...], int, int]] = []
    run = TrialRun.__init__

    def noted(self: TrialRun, stages: Stages, rules: list[Rule], limit: int = NEVER) -> None:
        run(self, stages, rules, limit)
        made.append((tuple(rules), limit, self.makespan))

    monkeypatch.setattr(TrialRun, "__init__", noted)
    workload = chain_workload(2, 4, devices=[(0,), (1,), (0,), (1,)], lag=40, backward=100)
    greedy_orders(workload, task_graph(workload), most_starts=0)
    (first, without, shortest), (second, limit, longer), *rest = made
    assert [rules[0].forward_first for rules in (first, second)] == [True, False]
    assert (without, limit, longer) == (NEVER, shortest, NEVER)
    assert len(rest) == 2  # of five, three of which leave stages as much as they had
