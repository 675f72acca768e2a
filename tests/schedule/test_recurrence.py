"""What memory says about order holds in every schedule that fits, however it was made."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload, with_devices_memory
from builders.problems import problems
from builders.requests import request_of
from pipeplan.examples import ShapeCosts, shape
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import search_plan
from pipeplan.workload.bounds import Recurrence, memory_recurrences
from pipeplan.workload.memory import overflow
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph
from support.marks import some_of


def random_orders(problem: OneMicrobatch, random: Random) -> list[list[int]] | None:
    """Any ready action that fits, again and again; None where nothing fits any more."""
    count = problem.num_microbatches
    held = [0] * problem.num_devices
    done: set[tuple[int, int]] = set()
    orders: list[list[int]] = [[] for _ in held]
    following = [0] * problem.num_operations
    while len(done) < problem.num_operations * count:
        ready = [
            x
            for x in range(problem.num_operations)
            if following[x] < count
            and all((source, following[x]) in done for source, _ in problem.incoming[x])
            and all(
                capacity is None or held[device] + problem.acquire[x] + problem.workspace[x] <= capacity
                for device in problem.devices[x]
                for capacity in (problem.capacity[device],)
            )
        ]
        if not ready:
            return None
        x = random.choice(ready)
        done.add((x, following[x]))
        for device in problem.devices[x]:
            held[device] += problem.acquire[x] - problem.release[x]
            orders[device].append(x * count + following[x])
        following[x] += 1
    return orders


def require_holds(problem: OneMicrobatch, orders: list[list[int]]) -> None:
    graph, count = task_graph(problem.workload), problem.num_microbatches
    assert overflow(graph, orders) is None
    starts = earliest_starts(graph, orders)
    for rule in memory_recurrences(problem):
        for m in range(rule.distance, count):
            source, target = rule.source * count + m - rule.distance, rule.target * count + m
            assert starts[target] >= starts[source] + graph.durations[source], (rule, m)


@settings(max_examples=some_of(150), suppress_health_check=list(HealthCheck))
@given(problems(num_microbatches=5), st.integers(0, 2**32))
def test_every_schedule_that_fits(problem: OneMicrobatch, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    if orders is not None:
        require_holds(problem, orders)


@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_a_forward_waits_for_the_backward_that_makes_room(room: int) -> None:
    """And random orders of such a chain often fit, so that the test above is not empty."""
    chain = chain_workload(3, 6, activation_bytes=100)
    problem = OneMicrobatch.of(with_devices_memory(chain, chain.static_bytes(0) + 100 * room))
    backward = {operation.stage: x for x, operation in enumerate(chain.operations) if operation.kind == "B"}
    assert memory_recurrences(problem) == sorted(
        (Recurrence(backward[stage], stage, room) for stage in range(3)), key=lambda rule: rule.source
    )
    random = Random(room)
    fitting = [orders for _ in range(20) if (orders := random_orders(problem, random)) is not None]
    assert fitting
    for orders in fitting:
        require_holds(problem, orders)


def test_no_memory_limit_no_rule() -> None:
    assert memory_recurrences(OneMicrobatch.of(chain_workload(3, 6))) == []


def test_room_for_very_many_micro_batches_and_long_times_do_not_overflow() -> None:
    """Gigabytes for a few bytes each: distances in the billions, times in 10^13 ns."""
    costs = ShapeCosts(forward_ns=10**13 + 1, backward_ns=3 * 10**13 + 7, activation_bytes=10)
    profile = shape("v", 4, costs=costs)
    assert profile.placement is not None
    options = {"scheduler": "repetend", "time_limit": 3.0, "deterministic": True}
    found = search_plan(request_of(profile, profile.placement, Batch(16, 1), memory_bytes=20 * 10**9, **options))
    assert found.plan.predicted.makespan_ns == (16 + 3) * (4 * 10**13 + 8)
