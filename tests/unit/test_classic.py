"""Classic schedules: complete, free of deadlock, and as their papers draw and count them."""

from __future__ import annotations

import pytest
from helpers import chain_workload

from pipeplan.costs import build_workload
from pipeplan.examples import SHAPES, ShapeCosts, shape
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.problem import Problem
from pipeplan.simulate.timing import earliest_starts, task_graph


def problem_of(
    name: str, num_devices: int = 4, num_microbatches: int = 8, *, forward: int = 1, backward: int = 3
) -> Problem:
    profile = shape(name, num_devices, costs=ShapeCosts(forward, backward, shared_forward_ns=1, shared_backward_ns=1))
    assert profile.placement is not None
    return Problem.of(build_workload(profile, profile.placement, num_microbatches=num_microbatches, microbatch_size=1))


def split_chain(num_devices: int, num_microbatches: int) -> Problem:
    return Problem.of(chain_workload(num_devices, num_microbatches, split=(10, 10)))


def orders_of(scheduler: str, problem: Problem) -> list[list[int]]:
    assert CLASSIC[scheduler].applies(problem) is None
    return CLASSIC[scheduler].orders(problem, task_graph(problem.workload))


def labels(problem: Problem, orders: list[list[int]]) -> list[list[str]]:
    graph = task_graph(problem.workload)
    return [[graph.label(task) for task in order] for order in orders]


def makespan(problem: Problem, orders: list[list[int]]) -> int:
    graph = task_graph(problem.workload)
    starts = earliest_starts(graph, orders)
    return max(start + duration for start, duration in zip(starts, graph.durations, strict=True))


def most_in_flight(problem: Problem, order: list[int]) -> int:
    """Most forwards of a device that have begun and whose last backward part has not ended."""
    count, held, most = problem.num_microbatches, 0, 0
    for task in order:
        kind = problem.workload.operations[task // count].kind
        held += kind == "F"
        most = max(most, held)
        held -= kind in ("B", "W")
    return most


WHERE = {
    "gpipe": sorted(SHAPES),
    "1f1b": ["v"],
    "1f1b+": ["m", "mllm", "nn"],
    "chimera": ["x"],
}


class TestEveryClassic:
    def test_where_each_applies(self) -> None:
        """And a reason where it does not."""
        assert set(WHERE) == set(CLASSIC)
        for scheduler, names in WHERE.items():
            reasons = {name: CLASSIC[scheduler].applies(problem_of(name)) for name in SHAPES}
            assert sorted(name for name, reason in reasons.items() if reason is None) == names
            assert all(reason.startswith(("it needs", "beside")) for reason in reasons.values() if reason)

    @pytest.mark.parametrize("num_devices", [2, 4, 6, 16])
    @pytest.mark.parametrize("scheduler", sorted(CLASSIC))
    def test_complete_and_free_of_deadlock(self, scheduler: str, num_devices: int) -> None:
        for name in WHERE[scheduler]:
            for num_microbatches in (1, 2, 3, num_devices + 1, 3 * num_devices):
                problem = problem_of(name, num_devices, num_microbatches)
                orders = orders_of(scheduler, problem)
                for order, operations in zip(orders, problem.on_device, strict=True):
                    everything = [x * num_microbatches + m for x in operations for m in range(num_microbatches)]
                    assert sorted(order) == everything
                assert makespan(problem, orders) >= num_microbatches * max(problem.work)

    @pytest.mark.parametrize("scheduler", sorted(CLASSIC))
    def test_the_same_every_time(self, scheduler: str) -> None:
        problem = problem_of(WHERE[scheduler][0])
        assert orders_of(scheduler, problem) == orders_of(scheduler, problem)

    def test_one_device(self) -> None:
        problem = problem_of("v", 1, 3)
        assert labels(problem, orders_of("1f1b", problem)) == [["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]]
        assert labels(problem, orders_of("gpipe", problem)) == [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]]


class TestGPipe:
    """GPipe (NeurIPS'19), section 2.3 and Fig. 2 (c)."""

    def test_all_forwards_first(self) -> None:
        problem = problem_of("v", 2, 3)
        orders = labels(problem, orders_of("gpipe", problem))
        assert orders[0] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]

    @pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 1), (4, 4), (4, 32), (8, 5)])
    def test_bubble_of_the_iteration(self, num_devices: int, num_microbatches: int) -> None:
        """(K - 1) / (M + K - 1)."""
        problem = problem_of("v", num_devices, num_microbatches)
        end = makespan(problem, orders_of("gpipe", problem))
        assert end == (num_microbatches + num_devices - 1) * 4

    def test_everything_is_in_flight(self) -> None:
        problem = problem_of("v", 4, 8)
        assert [most_in_flight(problem, order) for order in orders_of("gpipe", problem)] == [8] * 4


class TestOneForwardOneBackward:
    """PipeDream (SOSP'19), Fig. 4 in steady state; DAPPLE (PPoPP'21), Fig. 3 (b), with its warmup and end."""

    def test_the_orders_of_the_figure(self) -> None:
        problem = problem_of("v", 4, 5)
        assert [" ".join(order) for order in labels(problem, orders_of("1f1b", problem))] == [
            "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
            "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
            "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4",
            "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
        ]

    def test_device_d_holds_at_most_as_many_as_there_are_devices_from_it_on(self) -> None:
        problem = problem_of("v", 4, 8)
        assert [most_in_flight(problem, order) for order in orders_of("1f1b", problem)] == [4, 3, 2, 1]

    def test_weight_gradients_follow_at_once(self) -> None:
        problem = split_chain(2, 3)
        assert [" ".join(order) for order in labels(problem, orders_of("1f1b", problem))] == [
            "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
            "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2",
        ]

    @pytest.mark.parametrize("num_devices", [2, 5, 8])
    def test_as_long_as_gpipe(self, num_devices: int) -> None:
        problem = problem_of("v", num_devices, 11)
        assert makespan(problem, orders_of("1f1b", problem)) == makespan(problem, orders_of("gpipe", problem))


class TestChimera:
    """Chimera (SC'21), III-A and Table 2."""

    @pytest.mark.parametrize("num_devices", [2, 4, 6, 8, 16])
    def test_one_unit_has_that_many_bubbles(self, num_devices: int) -> None:
        """D micro-batches with equal slots: D/2 - 1 bubbles in the forward and as many in the backward passes."""
        problem = problem_of("x", num_devices, num_devices // 2, forward=1, backward=1)
        assert makespan(problem, orders_of("chimera", problem)) == 2 * num_devices + num_devices - 2

    @pytest.mark.parametrize("units", [1, 2, 5])
    def test_units_close_the_bubbles_between_them(self, units: int) -> None:
        """III-C: with equal slots direct concatenation leaves only the bubbles at the two ends."""
        problem = problem_of("x", 4, 2 * units, forward=1, backward=1)
        assert makespan(problem, orders_of("chimera", problem)) == units * 8 + 2

    def test_both_ways_alike(self) -> None:
        """Device d runs the down stages as device D - 1 - d runs the up stages."""
        problem = problem_of("x", 4, 6)
        orders = labels(problem, orders_of("chimera", problem))
        other = {f"{stage}": f"{(stage + 4) % 8}" for stage in range(8)}
        mirrored = [[other[text[0]] + text[1:] for text in order] for order in reversed(orders)]
        assert orders == mirrored

    @pytest.mark.parametrize("num_devices", [4, 8])
    def test_memory_is_that_of_1f1b_at_its_worst(self, num_devices: int) -> None:
        """Table 2: activations from D/2 + 1 to D of one micro-batch within a unit, most at the ends."""
        problem = problem_of("x", num_devices, num_devices // 2)
        held = [most_in_flight(problem, order) for order in orders_of("chimera", problem)]
        assert held == held[::-1]
        assert (min(held), max(held)) == (num_devices // 2 + 1, num_devices)

    def test_an_odd_number_of_devices_is_refused(self) -> None:
        reason = CLASSIC["chimera"].applies(problem_of("x", 3))
        assert reason == "it needs an even number of devices"


class TestOneForwardOneBackwardPlus:
    """Tessel (HPCA'24), VI-A: shared operations inserted into 1F1B."""

    @pytest.mark.parametrize("name", ["m", "mllm", "nn"])
    def test_the_chain_runs_1f1b(self, name: str) -> None:
        problem = problem_of(name, 4, 6)
        orders = orders_of("1f1b+", problem)
        own = [
            [task for task in order if problem.devices[task // 6] == (device,)] for device, order in enumerate(orders)
        ]
        plain = problem_of("v", 4, 6)
        kinds = [[text[1:] for text in order] for order in labels(plain, orders_of("1f1b", plain))]
        assert [[text[1:] for text in order] for order in labels(problem, own)] == kinds

    @pytest.mark.parametrize("name", ["m", "mllm", "nn"])
    def test_all_devices_meet_in_the_same_order(self, name: str) -> None:
        problem = problem_of(name, 4, 6)
        shared = [
            [task for task in order if len(problem.devices[task // 6]) > 1] for order in orders_of("1f1b+", problem)
        ]
        assert shared[0]
        assert shared == [shared[0]] * 4
