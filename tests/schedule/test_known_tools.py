"""What known tools reach on chains with little memory, as measured by running them: the search is never worse.

All stages F = I = W = 100 per device and communication 10 on every hop; memory in multiples of p. The classic
schedules alone reach most cells, so that a second of deterministic search does; all cells, with
20 seconds each, are in docs/benchmarks/schedules.md.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.shapes import shape_workload, zero_bubble
from pipeplan.examples import ShapeCosts
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import search_schedule
from pipeplan.workload.memory import overflow
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph
from support.marks import slow_but

GB = 10**9


@slow_but(
    "name, devices, microbatches, memory, known",
    [
        ("v", 4, 12, 1, 4020),
        ("v", 4, 12, 2, 3930),
        ("zbv", 4, 12, 1, 3880),
        ("v", 4, 12, 0.75, 5580),
        ("v", 4, 12, 0.5, 8000),
        ("v", 8, 32, 1, 10_580),
        ("v", 8, 32, 2, 10_370),
        ("zbv", 8, 32, 1, 10_280),
        ("v", 8, 32, 0.75, 12_000),
        ("v", 8, 32, 0.5, 16_950),
        ("v", 16, 64, 1, 21_300),
        ("v", 16, 64, 2, 20_850),
        ("zbv", 16, 64, 1, 20_680),
    ],
    lambda case: case[1] == 4,
)
def test_known_tools(name: str, devices: int, microbatches: int, memory: float, known: int) -> None:
    found = search_schedule(zero_bubble(name, devices, microbatches, memory).workload, Budget(1.0, deterministic=True))
    assert found.bound_ns <= found.makespan_ns <= known
    assert memory < 1 or found.makespan_ns <= 1.02 * found.bound_ns


@pytest.mark.slow  # 7 to 13 s each
@pytest.mark.parametrize(("memory", "best"), [pytest.param(1, 4020, marks=pytest.mark.long), (0.5, 6380)])
def test_four_devices_are_proved(memory: float, best: int) -> None:
    found = search_schedule(zero_bubble("v", 4, 12, memory).workload, Budget(120, deterministic=True))
    assert found.makespan_ns == found.bound_ns == best


times = st.integers(1, 40)


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["v", "circular", "zbv", "x", "m"]), times, times, times, st.integers(2, 9), st.booleans())
def test_never_worse_than_a_classic_schedule_that_fits(
    name: str, forward: int, input_grad: int, weight_grad: int, room: int, split: bool
) -> None:
    costs = ShapeCosts(
        2 * forward,
        None,
        2 * input_grad,
        2 * weight_grad,
        shared_forward_ns=3,
        shared_backward_ns=5,
        comm_ns=2,
        activation_bytes=2 * GB,
        weight_grad_bytes=GB,
    )
    workload = shape_workload(name, costs=costs, split=split, memory=2 * room * GB)
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    found = search_schedule(workload, Budget(0.3, deterministic=True))
    for classic in CLASSIC.values():
        if classic.applies(problem) is None:
            orders = classic.orders(problem, graph)
            if overflow(graph, orders) is None:
                starts = earliest_starts(graph, orders)
                assert found.makespan_ns <= max(map(sum, zip(starts, graph.durations, strict=True)))
