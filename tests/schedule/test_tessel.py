"""Tessel (HPCA'24), section VI: what its text and tables state."""

from __future__ import annotations

from fractions import Fraction

import pytest

from builders.shapes import shape_workload
from pipeplan.examples import ShapeCosts
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.repetend import least_period, shortest_way_through
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.cpsat.windows import reschedule
from pipeplan.schedule.pattern import Pattern, compose, microbatch_by_microbatch, middle_repetition
from pipeplan.schedule.search import search_schedule
from pipeplan.workload.bounds import strong_iteration_bound, work_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph
from support.marks import always, slow_but

MS = 1_000_000


def problem_of(name: str, num_devices: int = 4, num_microbatches: int = 16, memory: int | None = None) -> OneMicrobatch:
    """A shape with forward 1, backward 3, shared 1 and 1 (ms), each chain forward holding one byte."""
    costs = ShapeCosts(activation_bytes=1)
    return OneMicrobatch.of(shape_workload(name, num_devices, num_microbatches, costs=costs, memory=memory))


def steady_bubble_rate(problem: OneMicrobatch, period: Fraction) -> float:
    return float(1 - sum(problem.work) / (problem.num_devices * period))


def searched(problem: OneMicrobatch, max_span: int | None = None) -> Pattern:
    found = least_period(problem, Budget(240, deterministic=True), 240, max_span=max_span)
    assert found.pattern is not None
    assert found.proved
    return found.pattern


class TestFig11BubbleRateAgainstSpan:
    """VI-C: V-Shape needs 4 micro-batches in the repetend for a zero bubble rate, M-Shape and NN-Shape need 6."""

    @slow_but(
        "name, zero_from",
        [("v", 4), ("m", 6), ("nn", 6), ("x", 3), ("k", 3)],
        lambda case: case[0] not in ("m", "nn"),
        always,
    )
    def test_falls_to_zero(self, name: str, zero_from: int) -> None:
        problem = problem_of(name)
        rates = [steady_bubble_rate(problem, searched(problem, span).period) for span in range(1, zero_from + 1)]
        assert rates == sorted(rates, reverse=True)
        assert all(rate > 0 for rate in rates[:-1])
        assert rates[-1] == 0

    @pytest.mark.parametrize(("name", "span"), [("v", 4), ("m", 6), ("nn", 6)])
    def test_the_shortest_way_through_has_that_span(self, name: str, span: int) -> None:
        problem = problem_of(name)
        pattern, proved = shortest_way_through(problem, searched(problem), Budget(60, deterministic=True), 60)
        assert proved
        assert pattern.span == span


class TestFig12BubbleRateAgainstMemory:
    """VI-C: with memory 1 per forward block, more memory means fewer bubbles, down to none."""

    @slow_but("name", ["v", "x", "m", "nn", "k"], lambda name: name not in ("nn", "x"), always)
    def test_falls_to_zero(self, name: str) -> None:
        least = 2 if name == "k" else 1  # a micro-batch of K holds a chain block and the shared one
        problems = [problem_of(name, memory=memory) for memory in range(least, 8)]
        rates = [steady_bubble_rate(problem, searched(problem).period) for problem in problems]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] > 0
        assert rates[-1] == 0


class TestFig9ComposedAgainstTimeOptimal:
    """VI-C: repetends extended to as many micro-batches have the bubble rate of time-optimal schedules."""

    def test_nn_shape_has_20_percent_for_6_microbatches(self) -> None:
        """The example the text gives, warmup and cooldown included."""
        problem = problem_of("nn", num_microbatches=6)
        makespan = composed_makespan(problem)
        assert 1 - 6 * sum(problem.work) / (4 * makespan) == pytest.approx(0.2)

    @pytest.mark.parametrize(("name", "num_microbatches"), [("v", 5), ("m", 6), ("k", 5)])
    def test_as_short_as_time_optimal(self, name: str, num_microbatches: int) -> None:
        problem = problem_of(name, num_microbatches=num_microbatches)
        graph = task_graph(problem.workload)
        orders = microbatch_by_microbatch(problem)
        found = reschedule(problem, graph, orders, earliest_starts(graph, orders), Budget(120, deterministic=True), 120)
        assert found.exhausted
        assert found.bound_ns == composed_makespan(problem)


def composed_makespan(problem: OneMicrobatch) -> int:
    """Tessel's composition (IV-C): the repetend kept, warmup and cooldown time-optimal around it."""
    graph = task_graph(problem.workload)
    pattern, _ = shortest_way_through(problem, searched(problem), Budget(60, deterministic=True), 60)
    orders, middle = compose(problem, pattern), middle_repetition(problem, pattern)
    assert middle
    for warmup in (True, False):
        starts = earliest_starts(graph, orders)
        first, last = min(starts[task] for task in middle), max(starts[task] for task in middle)
        begin, end = (0, first) if warmup else (last + 1, None)
        found = reschedule(
            problem, graph, orders, starts, Budget(60, deterministic=True), 60, begin_ns=begin, end_ns=end
        )
        orders = found.orders or orders
    starts = earliest_starts(graph, orders)
    return max(start + duration for start, duration in zip(starts, graph.durations, strict=True))


class TestTable2:
    """Bubble rate of each schedule for numerous micro-batches."""

    @pytest.mark.parametrize(
        ("scheduler", "name", "rate"),
        [("1f1b", "v", 0.0), ("chimera", "x", 0.2), ("1f1b+", "m", 0.25), ("1f1b+", "nn", 0.2)],
    )
    def test_classic_schedules(self, scheduler: str, name: str, rate: float) -> None:
        assert steady_bubble_rate(problem_of(name), replayed_period(scheduler, name)) == pytest.approx(rate)

    @pytest.mark.parametrize("name", ["m", "nn", "k"])
    def test_searched_schedules_have_none(self, name: str) -> None:
        problem = problem_of(name)
        assert steady_bubble_rate(problem, searched(problem).period) == 0

    def test_no_1f1b_plus_for_flava(self) -> None:
        assert CLASSIC["1f1b+"].applies(problem_of("k")) is not None


def replayed_period(scheduler: str, name: str) -> Fraction:
    """Time per micro-batch of a classic schedule once it is periodic: the same over two stretches."""
    ends = []
    for num_microbatches in (24, 48, 72):
        problem = problem_of(name, num_microbatches=num_microbatches)
        graph = task_graph(problem.workload)
        starts = earliest_starts(graph, CLASSIC[scheduler].orders(problem, graph))
        ends.append(max(start + duration for start, duration in zip(starts, graph.durations, strict=True)))
    assert ends[1] - ends[0] == ends[2] - ends[1]
    return Fraction(ends[1] - ends[0], 24)


@pytest.mark.parametrize("num_devices", [4, 8, 16, 32])
@pytest.mark.parametrize("name", ["v", "x", "m", "mllm", "nn", "k"])
def test_zero_bubble_repetends_are_proved(name: str, num_devices: int) -> None:
    problem = problem_of(name, num_devices)
    assert searched(problem).repetend_ns == work_bound(problem.workload)


@slow_but("num_devices", [*range(2, 9), 12, 16], lambda devices: devices <= 8, always)
def test_v_shape_makespan(num_devices: int) -> None:
    """Fig. 3 and 4's setting, forward 1 and backward 2: (N + D - 1) * 3, which is also the bound."""
    costs = ShapeCosts(backward_ns=2 * MS)
    for num_microbatches in (1, 2, num_devices, 3 * num_devices + 1):
        workload = shape_workload("v", num_devices, num_microbatches, costs=costs)
        expected = (num_microbatches + num_devices - 1) * 3 * MS
        found = search_schedule(workload, Budget(10, deterministic=True))
        assert strong_iteration_bound(OneMicrobatch.of(workload)) == expected
        assert found.makespan_ns == expected
        assert found.optimal
