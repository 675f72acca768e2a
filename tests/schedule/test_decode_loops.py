"""Decoding loops: the least repetend by brute force, memory at the last step, chunks of prompts, longer runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.checker import check
from pipeplan.files import Plan
from pipeplan.files.plan import Decode
from pipeplan.planning.build_plan import assemble
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.decode_loop import STEPS, decode_schedule
from pipeplan.workload.elements import Dependency, Device, Hop, Operation, Stage
from pipeplan.workload.workload import Workload
from references.decode_loops import least_repetend

Devices = Sequence[tuple[int, ...]]


def loop_of(
    times: Sequence[int], devices: Devices, groups: int, lags: Sequence[int] = (), back: int = 0, steps: int = STEPS
) -> Workload:
    """A chain of stages with one request in each group; ``lags`` [stage] are of the messages that leave it."""
    lags = [*lags, *[0] * len(times)]

    def joined(source: int, target: int, lag: int, later: int = 0) -> Dependency:
        ends = devices[source], devices[target]
        hops = tuple(
            Hop(source_device=ends[0][0], target_device=d, latency_ns=lag) for d in ends[1] if d not in ends[0]
        )
        return Dependency(source=f"{source}F", target=f"{target}F", hops=hops, later=later)

    last = len(times) - 1
    chain = [joined(number, number + 1, lags[number]) for number in range(last)]
    return Workload(
        name="loop",
        placement="one-to-one",
        num_microbatches=steps * groups,
        microbatch_size=1,
        devices=(Device(),) * (1 + max(map(max, devices))),
        stages=tuple(
            Stage(blocks=(f"b{number}",), devices=each, shards=len(each), microbatch_size=1)
            for number, each in enumerate(devices)
        ),
        operations=tuple(Operation(kind="F", stage=number, duration_ns=time) for number, time in enumerate(times)),
        dependencies=(*chain, joined(last, 0, back, groups)),
    )


def plan_of(workload: Workload, context_tokens: int = 16, prefill_tokens: int = 0) -> Plan:
    """The plan of a loop, found and checked."""
    groups = workload.step_microbatches
    schedule = decode_schedule(workload, Budget(30.0))
    plan = assemble(
        schedule.graph,
        schedule.orders,
        schedule.bound_ns,
        schedule.period_bound_ns,
        schedule.scheduler,
        cut=schedule.repetend,
        decode=Decode(batch=groups, groups=groups, context_tokens=context_tokens, prefill_tokens=prefill_tokens),
    )
    check(plan).require()
    return plan


# The least repetend -------------------------------------------------------------------------------------------------


@st.composite
def small_loops(draw: st.DrawFn) -> Workload:
    """One to four stages on one to three devices, some on several or with others; one to three groups."""
    count, few = draw(st.integers(1, 4)), st.integers(1, 3)
    places: list[tuple[int, ...]] = [(0,), (1,), (2,), (0, 1)]
    devices = draw(st.lists(st.sampled_from(places), min_size=count, max_size=count))
    times = draw(st.lists(few, min_size=count, max_size=count))
    lags = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    return loop_of(times, devices, draw(st.integers(1, 3 if count < 3 else 2)), lags, draw(st.integers(0, 2)))


def require_least(workload: Workload) -> None:
    groups = workload.step_microbatches
    plan, least = plan_of(workload), least_repetend(workload, groups)
    repetend = plan.repetend
    assert repetend is not None
    assert repetend.unroll == groups
    assert repetend.repetend_ns == plan.token_ns == least
    assert plan.predicted.period_lower_bound_ns == pytest.approx(least / groups)


@settings(max_examples=40)
@given(small_loops())
def test_the_repetend_is_the_least_of_all_starts(workload: Workload) -> None:
    require_least(workload)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=1500)
@given(small_loops())
def test_the_repetend_is_the_least_of_all_starts_of_many(workload: Workload) -> None:
    require_least(workload)
