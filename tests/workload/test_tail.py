"""What follows the last actions of an iteration: by hand, as a reference says, and bounds that know it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from builders.orders import one_f_one_b
from builders.plans import plan_of
from builders.problems import with_tails
from pipeplan.checker import check
from pipeplan.errors import FileError
from pipeplan.files import Plan
from pipeplan.files.read_write import parse, to_json
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.bounds import strong_iteration_bound, weak_iteration_bound
from pipeplan.workload.elements import TiedState
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.tail import best_tail, tail_of
from pipeplan.workload.workload import Workload
from references.tails import best_iteration, iteration_by_hand
from support.marks import some_of

SETTINGS = settings(max_examples=some_of(60), suppress_health_check=list(HealthCheck))


def chain(**fields: int) -> Workload:
    """Three stages of 10 and 20 ns on a device each, one micro-batch; fields of all stages."""
    workload = chain_workload(3, 1, forward=10, backward=20)
    return replace(workload, stages=tuple(replace(stage, **fields) for stage in workload.stages))


def test_a_sum_begins_when_its_stage_is_done() -> None:
    """Backwards end at 50, 70 and 90 ns: only the first stage's sum is behind everything, and only in part."""
    found = simulate(plan_of(chain(sync_ns=15, step_ns=7, gather_ns=4), one_f_one_b(chain())))
    tail = found.rates.tail
    assert tail.sums == ((90, 105), (70, 85), (50, 65))
    assert (tail.summed_ns, tail.stepped_ns, tail.ended_ns) == ((105, 85, 65), (112, 92, 72), (116, 96, 76))
    assert (found.rates.makespan_ns, found.iteration_ns) == (90, 116)
    figures = found.figures()
    exposed = [figures[f"exposed_{what}_ns"] for what in ("reduction", "step", "gather")]
    assert exposed == [15, 7, 4]
    assert found.idle.summing == pytest.approx(15 / 116)


def test_sums_slow_what_a_device_computes_beside_them() -> None:
    """The second stage's sum runs from 40 to 70 ns, actions until 60: they have half of 20 ns to make up for."""
    workload = two_on_one()
    devices = tuple(replace(device, contention=0.5) for device in workload.devices)
    for step, ends in ((0, 75), (8, 83)):
        stages = tuple(replace(stage, step_ns=step // 2) for stage in workload.stages)
        assert simulate(plan_of(replace(workload, stages=stages, devices=devices), ALONE)).iteration_ns == ends
    stages = (replace(workload.stages[0], sync_ns=0), workload.stages[1])
    plan = plan_of(replace(workload, stages=stages, devices=devices), ALONE)
    found = simulate(plan)
    assert (found.rates.makespan_ns, found.iteration_ns) == (60, 70)
    assert check(plan).problems == ()
    longer = tuple(replace(device, contention=1.0) for device in devices)
    problems = check(plan.model_copy(update={"devices": longer})).problems
    assert {problem.place for problem in problems} == {"predicted.iteration_ns", "predicted.gap"}
    assert "contention" not in to_json(plan_of(workload, ALONE))
    assert parse(to_json(plan), Plan) == plan


ALONE = [[("0F", 0), ("1F", 0), ("1B", 0), ("0B", 0)]]


def two_on_one(sum_order: tuple[int, ...] = ()) -> Workload:
    """Two stages of a device: gradients of the second are ready at 40 ns, those of the first at 60."""
    workload = chain_workload(1, 1, forward=10, backward=20, devices=[(0,), (0,)])
    stages = tuple(replace(stage, sync_ns=ns) for stage, ns in zip(workload.stages, (5, 30), strict=True))
    return replace(workload, stages=stages, sum_order=sum_order)


def test_on_a_network_one_sum_waits_for_another() -> None:
    found = simulate(plan_of(two_on_one(), ALONE))
    assert (found.rates.tail.sums, found.iteration_ns) == (((70, 75), (40, 70)), 75)
    assert simulate(plan_of(two_on_one((0, 1)), ALONE)).iteration_ns == 60 + 5 + 30


@SETTINGS
@given(with_tails(max_stages=3), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.4]))
def test_tails_are_as_the_reference_says(problem: OneMicrobatch, rng: random.Random, contention: float) -> None:
    devices = tuple(replace(device, contention=contention) for device in problem.workload.devices)
    workload = replace(problem.workload, devices=devices)
    ends = [rng.randrange(60) for _ in workload.operations]
    named = {each.id: end for each, end in zip(workload.operations, ends, strict=True)}
    assert tail_of(workload, ends).iteration_ns == iteration_by_hand(workload, named)
    order = rng.sample(range(len(workload.gradient_sums)), len(workload.gradient_sums))
    ordered = replace(workload, sum_order=tuple(order))
    assert tail_of(ordered, ends).iteration_ns == iteration_by_hand(ordered, named)


def test_parts_of_a_tied_table_are_summed_by_other_devices_of_a_stage() -> None:
    """In each order of two stages on two devices each, of which each has a part: what one waits for others may not."""
    plain = chain_workload(4, 1, forward=10, backward=20, devices=[(0, 1), (2, 3)])
    stages = tuple(replace(stage, shards=2, sync_ns=ns) for stage, ns in zip(plain.stages, (5, 30), strict=True))
    parts = (((0,), (2,)), ((1,), (3,)))
    tied = tuple(TiedState(name="table", stages=(0, 1), devices=own, parts=2, sync_ns=40) for own in parts)
    workload = replace(plain, stages=stages, tied=tied)
    ends = {"0F": 10, "1F": 20, "1B": 40, "0B": 60}
    found = set[int]()
    for order in permutations(range(4)):
        ordered = replace(workload, sum_order=order)
        iteration = tail_of(ordered, [ends[each.id] for each in plain.operations]).iteration_ns
        assert iteration == iteration_by_hand(ordered, ends), order
        found.add(iteration)
    best, tail = best_tail(workload, [ends[each.id] for each in plain.operations])
    assert min(found) == tail.iteration_ns == iteration_by_hand(best, ends)


@SETTINGS
@given(with_tails())
def test_bounds_against_every_schedule(problem: OneMicrobatch) -> None:
    best = best_iteration(problem)
    assert weak_iteration_bound(problem.workload) <= strong_iteration_bound(problem) <= best


def test_bounds_reach_what_no_order_can_hide() -> None:
    """In a chain of one device a stage the last backward is the first stage's, with its sum, step and gather."""
    workload = chain(sync_ns=15, step_ns=7, gather_ns=4)
    assert weak_iteration_bound(workload) == 90 + 15 + 7 + 4
    assert weak_iteration_bound(chain()) == 90


@pytest.mark.parametrize("what", ["iteration_ns", "gap"])
def test_check_recomputes_the_tail(what: str) -> None:
    workload = chain(sync_ns=15, step_ns=7, gather_ns=4)
    plan = plan_of(workload, one_f_one_b(workload), lower_bound_ns=100)
    assert check(plan).problems == ()
    assert plan.predicted.gap == pytest.approx(0.16)
    stated = plan.predicted.model_copy(update={what: getattr(plan.predicted, what) + 1})
    (problem,) = check(plan.model_copy(update={"predicted": stated})).problems
    assert problem.place == f"predicted.{what}"


def test_check_follows_the_order_that_a_plan_says() -> None:
    plan = plan_of(two_on_one(sum_order=(0, 1)), ALONE)
    assert check(plan).problems == ()
    assert not check(plan.model_copy(update={"sum_order": ()})).valid
    with pytest.raises(FileError, match="sum_order must name each of the plan's 2 sums"):
        parse(to_json(plan.model_copy(update={"sum_order": (1,)})), Plan)
