"""Latency and bandwidth fitted to measured times of a link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.costs.communication import latency_and_bandwidth, leave_one_out_error, time_on_line

SIZES = [4**power for power in range(5, 14)]


@given(st.integers(1_000, 10**6), st.integers(10**8, 10**12))
def test_finds_what_made_the_times(latency: int, bandwidth: int) -> None:
    points = [(size, latency + round(size * 1e9 / bandwidth)) for size in SIZES]
    found, rate = latency_and_bandwidth(points)
    assert found == pytest.approx(latency, rel=0.01)
    assert rate == pytest.approx(bandwidth, rel=0.01)
    error = leave_one_out_error(points, time_on_line)
    assert error is not None
    assert error < 0.01


@given(
    st.lists(st.tuples(st.integers(0, 10**10), st.integers(1, 10**12)), min_size=1, unique_by=lambda point: point[0])
)
def test_any_times_give_a_link_that_a_cluster_can_have(points: list[tuple[int, int]]) -> None:
    latency, bandwidth = latency_and_bandwidth(sorted(points))
    assert 0 <= latency <= min(ns for _, ns in points)
    assert 1 <= bandwidth <= 10**15


def test_one_point_is_met_by_bandwidth_alone() -> None:
    assert latency_and_bandwidth([(1000, 500)]) == (0, 2 * 10**9)
