"""Patterns: what a valid one is by plain replay, what the search proves, and what it says when it cannot."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.problems import problems
from builders.profiles import profile_of, stage_per_block
from builders.shapes import unit_problem
from pipeplan.costs import build_workload
from pipeplan.files import CostRow, Profile
from pipeplan.schedule.cpsat.repetend import least_period, shortest_way_through, solve_pattern
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.modulo import modulo_schedule
from pipeplan.schedule.pattern import Pattern, compose, middle_repetition, sequential_time
from pipeplan.workload.bounds import period_bound, work_bound
from pipeplan.workload.memory import overflow
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph
from support.marks import some_of

pytestmark = pytest.mark.counted


def there_and_back(forward: int, lag: int, backward: int, memory: int) -> OneMicrobatch:
    """Device 0 hands to device 1 and back; device 0's activation is held for forward + lag + 2 + lag + backward."""
    rows = (
        CostRow(microbatch_size=1, forward_ns=forward, backward_ns=backward, activation_bytes=1),
        CostRow(microbatch_size=1, forward_ns=1, backward_ns=1),
    )
    return problem_of(profile_of(rows, transfer_ns=lag), [0, 1], [memory, None])


def problem_of(profile: Profile, devices: list[int], memory: list[int | None], count: int = 8) -> OneMicrobatch:
    """A stage for each block, on these devices, which have this memory."""
    placement = stage_per_block(profile, devices)
    return OneMicrobatch.of(
        build_workload(profile, placement, num_microbatches=count, microbatch_size=1, memory_bytes=memory)
    )


def branches_in_turn() -> OneMicrobatch:
    """Two blocks on one device, not joined, with room for the activation of one."""
    row = CostRow(microbatch_size=1, forward_ns=1, backward_ns=1, activation_bytes=1)
    return problem_of(profile_of([row, row], pairs=()), [0, 0], [1])


def replay_faults(problem: OneMicrobatch, pattern: Pattern, repetitions: int) -> list[str]:
    """What is wrong with a pattern run for so many repetitions, found moment by moment."""
    unroll, period = pattern.unroll, pattern.repetend_ns
    count = unroll * repetitions
    start = {
        (x, m): row[m % unroll] + m // unroll * period for x, row in enumerate(pattern.starts) for m in range(count)
    }
    faults = [
        f"{target} of {m} starts before its input from {source}"
        for source, target, lag in problem.edges
        for m in range(count)
        if start[target, m] < start[source, m] + problem.durations[source] + lag
    ]
    for device, operations in enumerate(problem.on_device):
        runs = sorted((start[x, m], x, m) for x in operations for m in range(count))
        faults += [
            f"{x} of {m} and {y} of {n} overlap on {device}"
            for (begin, x, m), (after, y, n) in itertools.pairwise(runs)
            if begin + problem.durations[x] > after
        ]
        held = 0
        for _, x, m in runs:
            held += problem.acquire[x]
            capacity = problem.capacity[device]
            if capacity is not None and held + problem.workspace[x] > capacity:
                faults.append(f"{x} of {m} does not fit on {device}")
            held -= problem.release[x]
    return faults


@settings(max_examples=some_of(15), suppress_health_check=list(HealthCheck))
@given(problems(num_microbatches=7), st.integers(1, 3))
def test_patterns_are_valid_and_compose(problem: OneMicrobatch, unroll: int) -> None:
    """Replayed as it is and composed for any N: nothing overlaps, nothing is early, everything fits."""
    found = least_period(problem, Budget(0.5, deterministic=True), 0.5, unroll=unroll)
    assert found.pattern is not None  # however hard the proofs are, there is always time for some pattern
    assert replay_faults(problem, found.pattern, 12) == []
    assert found.pattern.period >= period_bound(problem)
    graph = task_graph(problem.workload)
    orders = compose(problem, found.pattern)
    assert all(
        sorted(order) == [x * 7 + m for x in operations for m in range(7)]
        for order, operations in zip(orders, problem.on_device, strict=True)
    )
    assert overflow(graph, orders) is None
    starts = earliest_starts(graph, orders)
    latest = [
        row[m % unroll] + m // unroll * found.pattern.repetend_ns for row in found.pattern.starts for m in range(7)
    ]
    assert all(early <= late for early, late in zip(starts, latest, strict=True))


@settings(max_examples=some_of(40), suppress_health_check=list(HealthCheck))
@given(problems(num_microbatches=7), st.sampled_from([1, 2]))
def test_modulo_schedules_are_valid_patterns(problem: OneMicrobatch, slack: int) -> None:
    """Whatever is drawn: nothing overlaps, nothing is early, everything fits."""
    found = modulo_schedule(problem, slack * max(math.ceil(period_bound(problem)), *problem.durations))
    if found is not None:
        assert replay_faults(problem, found, 12) == []


@pytest.mark.parametrize("num_devices", [4, 16, 32])
@pytest.mark.parametrize("name", ["v", "x", "m", "mllm", "nn", "k", "circular", "zbv"])
def test_modulo_scheduling_reaches_the_work_bound_of_every_shape(name: str, num_devices: int) -> None:
    """Without a solver, also where blocks stand on all devices; composed, it is as short as anything can be."""
    problem = unit_problem(name, num_devices, 2 * num_devices)
    found = modulo_schedule(problem, work_bound(problem.workload))
    assert found is not None
    assert found.period == work_bound(problem.workload)


def test_modulo_scheduling_knows_memory() -> None:
    """V on 2 devices needs two activations on the first for its work bound."""
    assert modulo_schedule(unit_problem("v", 2, memory=2), 4) is not None
    assert modulo_schedule(unit_problem("v", 2, memory=1), 4) is None


def test_the_replay_finds_faults() -> None:
    problem = unit_problem("v", 2, memory=2)
    good = Pattern(1, 4, ((0,), (1,), (2,), (5,)))
    assert replay_faults(problem, good, 6) == []
    assert any("input" in fault for fault in replay_faults(problem, Pattern(1, 4, ((0,), (0,), (2,), (5,))), 6))
    assert any("overlap" in fault for fault in replay_faults(problem, Pattern(1, 3, good.starts), 6))
    assert any("fit" in fault for fault in replay_faults(problem, Pattern(1, 4, ((0,), (5,), (6,), (9,))), 6))


class TestPattern:
    """The figures of a pattern made by hand: V on 2 devices, forward 1, backward 3."""

    pattern = Pattern(1, 4, ((0,), (1,), (2,), (5,)))

    def test_latency(self) -> None:
        assert self.pattern.latency(unit_problem("v", 2)) == 8

    def test_span(self) -> None:
        assert self.pattern.span == 2
        assert Pattern(1, 8, self.pattern.starts).span == 1  # one micro-batch after another

    def test_span_of_an_unrolled_pattern_counts_its_microbatches(self) -> None:
        assert Pattern(2, 16, tuple((start, start + 8) for (start,) in self.pattern.starts)).span == 2

    def test_period_may_be_fractional(self) -> None:
        assert Pattern(3, 16, ((0, 5, 10),)).period == Fraction(16, 3)


class TestLeastPeriod:
    @pytest.mark.parametrize("name", ["v", "x", "m", "mllm", "nn", "k", "circular", "zbv"])
    def test_work_alone_decides_without_a_cap(self, name: str) -> None:
        problem = unit_problem(name)
        found = least_period(problem, Budget(60, deterministic=True), 60)
        assert found.proved
        assert found.bound_ns == work_bound(problem.workload)
        assert found.pattern is not None
        assert replay_faults(problem, found.pattern, 10) == []

    def test_between_two_units(self) -> None:
        """Lifetime 2 + 2 + 2 + 2 + 2, every number even, two at once: 5 ns, which no sum of them is."""
        problem = there_and_back(2, 2, 2, memory=2)
        scaled = [problem.time_unit, work_bound(problem.workload)]
        found = least_period(problem, Budget(60, deterministic=True), 60)
        assert found.proved
        assert found.pattern is not None
        assert (scaled, found.pattern.repetend_ns) == ([1, 4], 5)

    def test_finer_than_a_unit(self) -> None:
        """All times 1000 times a unit: half a unit is found, not rounded up to the next one."""
        problem = there_and_back(2, 2, 2, memory=2)
        workload = problem.workload
        larger = OneMicrobatch.of(
            replace(
                workload,
                operations=tuple(replace(each, duration_ns=1000 * each.duration_ns) for each in workload.operations),
                dependencies=tuple(
                    replace(each, hops=tuple(replace(hop, latency_ns=1000 * hop.latency_ns) for hop in each.hops))
                    for each in workload.dependencies
                ),
            )
        )
        assert larger.time_unit == 1000
        found = least_period(larger, Budget(60, deterministic=True), 60)
        assert found.proved
        assert found.pattern is not None
        assert found.pattern.repetend_ns == 5000
        assert replay_faults(larger, found.pattern, 10) == []

    def test_a_period_that_is_a_fraction_of_a_nanosecond_is_rounded_up(self) -> None:
        problem = there_and_back(1, 2, 1, memory=3)  # a lifetime of 8, three at once
        assert period_bound(problem) == Fraction(8, 3)
        found = least_period(problem, Budget(60, deterministic=True), 60)
        assert found.proved
        assert found.bound_ns == 3
        unrolled = least_period(problem, Budget(60, deterministic=True), 60, unroll=3)
        assert unrolled.proved
        assert unrolled.bound_ns == 8

    def test_improvements_are_heard(self) -> None:
        heard: list[Pattern] = []
        found = least_period(unit_problem("m", memory=2), Budget(60, deterministic=True), 60, on_pattern=heard.append)
        assert heard
        assert heard[-1] == found.pattern
        times = [pattern.repetend_ns for pattern in heard]
        assert times == sorted(times, reverse=True)

    def test_without_time_micro_batches_run_one_after_another(self) -> None:
        """And only the lower bound is proved."""
        for name in ("v", "x", "m", "k", "zbv"):
            problem = unit_problem(name, memory=3)
            found = least_period(problem, Budget(60, deterministic=True), 0.0, unroll=2)
            assert found.pattern is not None
            assert (found.pattern.unroll, found.pattern.repetend_ns) == (2, 2 * sequential_time(problem))
            assert replay_faults(problem, found.pattern, 5) == []
            assert not found.proved
            assert found.bound_ns == math.ceil(2 * period_bound(problem))

    def test_without_time_and_without_room_there_is_none(self) -> None:
        """Two branches: a's backward must run before b's forward, which the operations' own order does not do."""
        problem = branches_in_turn()
        assert least_period(problem, Budget(60, deterministic=True), 0.0).pattern is None
        found = least_period(problem, Budget(60, deterministic=True), 60)
        assert found.proved
        assert found.pattern is not None
        assert replay_faults(problem, found.pattern, 5) == []

    def test_an_interrupted_budget_ends_the_search(self) -> None:
        problem, budget = unit_problem("nn"), Budget(60)
        budget.interrupt()
        found = least_period(problem, budget, budget.remaining)
        assert found.pattern is not None
        assert found.pattern.repetend_ns == sequential_time(problem)

    def test_same_seed_same_pattern(self) -> None:
        problem = unit_problem("nn", memory=4)
        first, second = (least_period(problem, Budget(20, seed=7, deterministic=True), 20) for _ in range(2))
        assert first.pattern is not None
        assert first.pattern == second.pattern


def two_losses(lag: int, memory: int) -> OneMicrobatch:
    """Blocks 0 and 1 feed 2, 1 alone feeds 3: two last forwards, each block on a device of its own."""
    row = CostRow(microbatch_size=1, forward_ns=1, backward_ns=1, activation_bytes=1)
    profile = profile_of([row] * 4, [(0, 2), (1, 2), (1, 3)], transfer_ns=lag)
    return problem_of(profile, [0, 1, 2, 3], [memory, memory, None, None])


class TestHowFarAMicrobatchCanReach:
    @pytest.mark.parametrize("name", ["v", "x", "m", "mllm", "nn", "k", "circular", "zbv"])
    def test_shapes_have_one_last_forward_per_part(self, name: str) -> None:
        assert unit_problem(name).one_last_forward

    def test_two_losses(self) -> None:
        assert not two_losses(0, 1).one_last_forward

    @pytest.mark.parametrize(("lag", "memory"), [(0, 1), (7, 1), (7, 4)])
    def test_two_losses_are_searched_all_the_same(self, lag: int, memory: int) -> None:
        """An activation of a or b lives for 1 + lag + 1 + 1 + lag + 1, and ``memory`` of them fit."""
        problem = two_losses(lag, memory)
        found = least_period(problem, Budget(60, deterministic=True), 60)
        assert found.proved
        assert found.pattern is not None
        assert found.pattern.repetend_ns == max(2, -(-(4 + 2 * lag) // memory))
        assert replay_faults(problem, found.pattern, 20) == []


class TestSolvePattern:
    def test_below_the_work_bound_is_infeasible(self) -> None:
        problem = unit_problem("v")
        assert solve_pattern(problem, work_bound(problem.workload) - 1, Budget(10, deterministic=True), 10) == (
            False,
            None,
            None,
        )

    def test_out_of_time_is_not_infeasible(self) -> None:
        problem = unit_problem("v")
        assert solve_pattern(problem, work_bound(problem.workload), Budget(10, deterministic=True), 0.0) == (
            None,
            None,
            None,
        )

    def test_fewer_microbatches_than_unroll_cannot_be(self) -> None:
        problem = unit_problem("v")
        assert solve_pattern(problem, 100, Budget(10, deterministic=True), 10, unroll=3, max_span=2)[0] is False

    @pytest.mark.parametrize("name", ["v", "m", "k", "zbv"])
    def test_the_sequential_time_always_works(self, name: str) -> None:
        problem = unit_problem(name)
        feasible, pattern, _ = solve_pattern(problem, sequential_time(problem), Budget(10, deterministic=True), 10)
        assert feasible
        assert pattern is not None
        assert replay_faults(problem, pattern, 4) == []

    def test_a_fractional_repetend_is_rounded_up(self) -> None:
        feasible, pattern, _ = solve_pattern(unit_problem("v"), Fraction(9, 2), Budget(10, deterministic=True), 10)
        assert feasible
        assert pattern is not None
        assert pattern.repetend_ns == 5
        assert replay_faults(unit_problem("v"), pattern, 10) == []


class TestShortestWayThrough:
    def test_v_needs_no_waiting(self) -> None:
        """A zero-bubble V on 4 devices lets every micro-batch through as if it were alone: 4 * (1 + 3)."""
        problem = unit_problem("v")
        found = least_period(problem, Budget(60, deterministic=True), 60)
        assert found.pattern is not None
        pattern, proved = shortest_way_through(problem, found.pattern, Budget(60, deterministic=True), 60)
        assert proved
        assert pattern.latency(problem) == 16
        assert pattern.repetend_ns == found.pattern.repetend_ns
        assert replay_faults(problem, pattern, 10) == []

    def test_without_time_the_pattern_stays(self) -> None:
        problem = unit_problem("m")
        found = least_period(problem, Budget(60, deterministic=True), 60)
        assert found.pattern is not None
        assert shortest_way_through(problem, found.pattern, Budget(60, deterministic=True), 0.0) == (
            found.pattern,
            False,
        )


class TestCompose:
    @pytest.mark.parametrize("name", ["v", "x", "m", "nn", "k", "zbv"])
    def test_the_repetend_is_instantiated_as_often_as_there_are_microbatches(self, name: str) -> None:
        """Tessel III-C: N micro-batches take no longer than one way through and N - 1 periods."""
        found = least_period(unit_problem(name), Budget(60, deterministic=True), 60)
        assert found.pattern is not None
        for num_microbatches in (1, 2, 5, 20, 100):
            problem = unit_problem(name, num_microbatches=num_microbatches)
            graph = task_graph(problem.workload)
            starts = earliest_starts(graph, compose(problem, found.pattern))
            end = max(start + duration for start, duration in zip(starts, graph.durations, strict=True))
            most = found.pattern.latency(problem) + (num_microbatches - 1) * found.pattern.repetend_ns
            assert num_microbatches * work_bound(problem.workload) <= end <= most

    def test_the_middle_repetition_has_every_operation_once_per_unroll(self) -> None:
        problem = unit_problem("v", memory=3, num_microbatches=20)
        found = least_period(problem, Budget(60, deterministic=True), 60, unroll=3)
        assert found.pattern is not None
        middle = middle_repetition(problem, found.pattern)
        assert sorted(task // 20 for task in middle) == [x for x in range(problem.num_operations) for _ in range(3)]
        assert len(set(middle)) == len(middle)

    def test_too_few_microbatches_for_a_repetition(self) -> None:
        found = least_period(unit_problem("v", num_microbatches=2), Budget(60, deterministic=True), 60)
        assert found.pattern is not None
        assert middle_repetition(unit_problem("v", num_microbatches=2), found.pattern) == frozenset()


def test_cuts_of_a_repetend_are_those_at_each_of_its_starts() -> None:
    """Also of many instances: one for 6,000 is found in a walk over them, not anew at every moment."""
    for seed in range(60):
        draw = Random(seed)
        unroll, period = draw.randint(1, 4), draw.randint(1, 30)
        starts = [sorted(draw.randint(0, 90) for _ in range(unroll)) for _ in range(draw.randint(1, 6))]
        pattern = Pattern(unroll, period, tuple(map(tuple, starts)))
        assert [*pattern.cuts()] == [
            [min(u - (start - moment) // period * unroll for u, start in enumerate(row)) for row in starts]
            for moment in sorted({start % period for row in starts for start in row})
        ]
    many = Pattern(32, 10**6, tuple(tuple(i + 5003 * u for u in range(32)) for i in range(192)))
    assert many.span == 32
