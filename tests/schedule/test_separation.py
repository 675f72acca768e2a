"""Gradient separation, against brute force, the zero-bubble literature and what every schedule must keep."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload, with_devices_memory
from builders.drawn import Placed, placed
from builders.orders import random_orders
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.rules.engine import schedule_by_rules
from pipeplan.schedule.rules.language import Rules
from pipeplan.schedule.rules.separation import Joined, separate
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import fits, peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import Orders, TaskGraph, task_graph
from pipeplan.workload.workload import Workload
from references.separation import best_of_all, kind, length, num_placings, random_case, weights_at_once, with_room
from support.marks import some_of


def classic(name: str, workload: Workload) -> tuple[TaskGraph, Orders]:
    graph = task_graph(workload)
    return graph, CLASSIC[name].orders(OneMicrobatch.of(workload), graph)


def require_only_weights_moved(graph: TaskGraph, orders: Orders, found: Orders) -> None:
    """Each action once, all but W in their order, each W behind its I: the replay would be stuck otherwise."""
    for before, after in zip(graph.on_devices(orders), found, strict=True):
        assert sorted(after) == sorted(before)
        assert [x for x in after if kind(graph, x) != "W"] == [x for x in before if kind(graph, x) != "W"]
    assert length(graph, found) <= length(graph, graph.on_devices(orders))


@pytest.mark.parametrize("memory", [False, True])
def test_brute_force_is_seldom_shorter(memory: bool) -> None:
    """Of 60 random cases one at most is missed, and by 5 % at most."""
    missed = cases = 0
    for seed in range(100):
        graph, orders = random_case(seed, memory=memory)
        if num_placings(graph, orders) > 600:
            continue
        cases += 1
        best, found = best_of_all(graph, orders), length(graph, separate(graph, orders))
        assert best <= found <= 1.05 * best
        missed += found > best
    assert cases > 50
    assert missed <= 1


@pytest.mark.parametrize(("num_devices", "count"), [(2, 4), (4, 8), (8, 32)])
def test_1f1b_becomes_as_short_as_zb_h1_with_its_memory(num_devices: int, count: int) -> None:
    """Zero Bubble (ICLR'24), 2.1 and Table 1: (D - 1)(F + I - W) of bubble, no more memory than 1F1B."""
    workload = chain_workload(num_devices, count, forward=1, split=(1, 1), activation_bytes=10, weight_grad_bytes=10)
    graph, orders = classic("1f1b", workload)
    room = task_graph(with_devices_memory(workload, 10 * num_devices))
    found = separate(room, orders)
    require_only_weights_moved(graph, orders, found)
    assert fits(room, found)
    assert length(graph, found) == length(graph, classic("zb-h1", workload)[1]) == 3 * count + num_devices - 1
    assert length(graph, orders) > length(graph, found)


def test_the_papers_example() -> None:
    """FlexPipe, Fig. 10: a bubble before the backward of micro-batch 2 on actor 0; actors 1 and 2 stash theirs."""
    graph, orders = classic("1f1b", chain_workload(3, 3, forward=1, split=(1, 1)))
    found = separate(graph, orders)
    assert length(graph, orders) == 13
    assert length(graph, found) == 11
    label = [[graph.label(task) for task in order] for order in found]
    assert label[0] == ["0F0", "0F1", "0F2", "0I0", "0W0", "0I1", "0W1", "0I2", "0W2"]
    assert label[1].index("1F2") < label[1].index("1W0")
    assert label[2].index("2I1") < label[2].index("2W0")


def test_what_has_no_weight_gradients_stays() -> None:
    graph, orders = classic("1f1b", chain_workload(3, 4))
    assert separate(graph, orders) == orders


def test_a_device_with_no_room_to_spare_keeps_its_weight_gradients_at_once() -> None:
    """Deferred gradients larger than the activations: 1F1B holds one of them at a time, and so does the result."""
    workload = chain_workload(3, 6, forward=2, split=(2, 2), activation_bytes=10, weight_grad_bytes=15)
    graph, orders = classic("1f1b", workload)
    room = with_room(graph, orders, 0)
    found = separate(room, orders)
    assert fits(room, found)
    free = separate(graph, orders)
    assert length(graph, free) < length(graph, found) <= length(graph, orders)


def test_stages_on_several_devices_separate_together() -> None:
    graph, orders = classic("1f1b+", chain_workload(2, 2, split=(10, 10), devices=[(0,), (1,), (0, 1)]))
    orders = weights_at_once(graph, orders)
    found = separate(graph, orders)
    require_only_weights_moved(graph, orders, found)
    assert best_of_all(graph, orders) == length(graph, found) < length(graph, orders)


@settings(max_examples=some_of(60))
@given(placed(links=True), st.randoms(use_true_random=False), st.integers(0, 2))
def test_any_schedule_stays_valid_and_within_memory_and_gets_no_longer(case: Placed, choose: Random, more: int) -> None:
    """Several micro-batch sizes, routes, replicas, parts, shards, and links that may be busy."""
    graph = task_graph(case.workload)
    orders = random_orders(graph, choose)
    found = separate(graph, orders)
    require_only_weights_moved(graph, orders, found)
    room = with_room(graph, orders, more)
    require_only_weights_moved(graph, orders, separate(room, orders))
    assert fits(room, separate(room, orders))
    peaks = zip(peak_memory(graph, with_links(graph, found)), graph.workload.devices, strict=True)
    assert all(device.memory_bytes is None or peak.peak_bytes <= device.memory_bytes for peak, device in peaks)


def test_rules_that_separate_see_whole_backwards() -> None:
    """On unit steps B is one step, as the paper's BwdPass; I and W apart would be two."""
    graph = task_graph(chain_workload(3, 6, forward=1, split=(1, 1)))
    whole = task_graph(chain_workload(3, 6, forward=1, backward=2))
    rules = Rules(in_flight="D - d")
    joined = Joined.of(graph)
    orders = schedule_by_rules(joined.graph, rules)
    assert length(joined.graph, orders) == length(whole, schedule_by_rules(whole, rules))
    found = schedule_by_rules(graph, rules.but(separate=True))
    require_only_weights_moved(graph, joined.apart(orders), found)
    assert length(graph, found) == 3 * 6 + 2


@settings(max_examples=some_of(60))
@given(placed(links=True), st.randoms(use_true_random=False))
def test_backwards_put_together_hold_what_their_parts_hold(case: Placed, choose: Random) -> None:
    graph = task_graph(case.workload)
    joined = Joined.of(graph)
    orders = joined.graph.on_devices(random_orders(joined.graph, choose))
    apart = joined.apart(orders)
    require_only_weights_moved(graph, apart, apart)
    assert length(graph, apart) <= length(joined.graph, orders)
    both = zip(peak_memory(joined.graph, orders), peak_memory(graph, apart), strict=True)
    assert all(whole.peak_bytes == parts.peak_bytes for whole, parts in both)
