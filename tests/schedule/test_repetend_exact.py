"""The least period against exhaustive enumeration of index assignments, Tessel's own search space (IV-B)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.problems import problems
from builders.profiles import profile_of, stage_per_block
from pipeplan.costs import build_workload
from pipeplan.files import CostRow
from pipeplan.schedule.cpsat.repetend import least_period
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.workload.one_microbatch import OneMicrobatch
from references.least_period import least_period_by_enumeration
from support.marks import some_of


@settings(max_examples=some_of(35), suppress_health_check=list(HealthCheck))
@given(problems())
def test_least_period_is_that_of_the_enumeration(problem: OneMicrobatch) -> None:
    found = least_period(problem, Budget(60, deterministic=True), 60)
    assert found.pattern is not None
    assert found.proved
    assert found.pattern.repetend_ns == least_period_by_enumeration(problem)


@settings(max_examples=some_of(25), suppress_health_check=list(HealthCheck), deadline=None)
@given(problems(), st.integers(1, 4))
def test_least_period_of_a_span_is_that_of_the_enumeration(problem: OneMicrobatch, span: int) -> None:
    """Tessel's N_R: indices of so many micro-batches alone, each device in a window of its own."""
    found = least_period(problem, Budget(60, deterministic=True), 60, max_span=span)
    assert found.pattern is not None
    assert found.proved
    assert found.pattern.span <= span
    assert found.pattern.repetend_ns == least_period_by_enumeration(problem, span)


@pytest.mark.parametrize(("memory", "period"), [(1, 8), (2, 4), (3, 4)])
def test_the_enumeration_itself_on_a_known_case(memory: int, period: int) -> None:
    """Two stages, forward 1 and backward 3, one activation each: one micro-batch in flight takes 8, two take 4."""
    row = CostRow(microbatch_size=1, forward_ns=1, backward_ns=3, activation_bytes=1)
    profile = profile_of([row, row])
    placement = stage_per_block(profile)
    workload = build_workload(profile, placement, num_microbatches=4, microbatch_size=1, memory_bytes=[memory] * 2)
    assert least_period_by_enumeration(OneMicrobatch.of(workload)) == period
