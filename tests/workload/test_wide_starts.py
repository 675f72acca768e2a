"""Starts of many tasks at once are those of one after another."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from builders.drawn import placed, workloads
from builders.orders import one_f_one_b, random_orders
from builders.timed import timed
from pipeplan.workload import wide_starts as wide
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.wide_starts import wide_starts
from pipeplan.workload.workload import Workload
from support.marks import some_of


@pytest.fixture
def all_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "LEAST_TASKS", 0)
    monkeypatch.setattr(wide, "LEAST_AT_ONCE", 0)


@pytest.mark.usefixtures("all_are_wide")
@given(workloads() | placed().map(lambda drawn: drawn.workload), st.integers(0, 2**20))
@settings(max_examples=some_of(120))
def test_they_are_those_of_one_after_another(workload: Workload, seed: int) -> None:
    graph = task_graph(workload)
    orders = random_orders(graph, Random(seed))
    found = wide_starts(graph.times, graph.pairs, orders)
    assert not workload.exchanges
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wide, "LEAST_TASKS", 2**62)
        assert found == earliest_starts(graph, orders)


@pytest.mark.usefixtures("all_are_wide")
def test_what_waits_in_a_circle_is_left_to_who_can_name_it() -> None:
    graph = task_graph(chain_workload(2, 2))
    forwards = [[graph.offsets[item] + m for m in range(2)] for item in range(4)]
    assert wide_starts(graph.times, graph.pairs, [forwards[3] + forwards[0], forwards[1] + forwards[2]]) is None


@pytest.mark.slow
def test_a_long_run_of_many_devices_is_wide_and_one_micro_batch_after_another_is_not() -> None:
    workload = chain_workload(64, 256)
    graph, orders, starts = timed(workload, one_f_one_b(workload))
    assert wide_starts(graph.times, graph.pairs, orders) == starts
    assert max(starts) == (256 + 64 - 1) * 30 - 20
    after_another = [[task for m in range(256) for task in (256 * d + m, 256 * (127 - d) + m)] for d in range(64)]
    assert wide_starts(graph.times, graph.pairs, after_another) is None
    assert max(earliest_starts(graph, after_another)) == 256 * 64 * 30 - 20
