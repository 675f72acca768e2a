"""Limits, signals and failing steps: the best plan known is kept, and nothing works long without asking for the time.

The clocks stand still, are moved by hand, or count how often they are asked, so that no machine is too slow. Work is
counted in calls of functions, Python's and built-in ones.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, count
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from builders.profiles import profile_of
from builders.requests import request_of
from builders.shapes import shape_workload
from pipeplan import time_limit
from pipeplan.checker import check
from pipeplan.costs import build_workload, late_inputs
from pipeplan.errors import (
    InfeasibleError,
    InvalidPlanError,
    NotApplicableError,
    PipeplanError,
    SearchTimeoutError,
    SumError,
    TooLongError,
    UsageError,
)
from pipeplan.examples import shape
from pipeplan.files import Cluster, CostRow, Plan, Profile, Source
from pipeplan.files.cluster import DeviceKind, LinkLevel
from pipeplan.partition import recomputation
from pipeplan.partition.chain.autopipe import autopipe
from pipeplan.partition.dapple import dapple
from pipeplan.partition.graph.search import graphpipe
from pipeplan.partition.pipedream import pipedream
from pipeplan.partition.piper import piper
from pipeplan.partition.placement import place
from pipeplan.partition.problem import PartitionProblem
from pipeplan.planning import candidates as candidates_module
from pipeplan.planning import comparison, trials, tuning, uniform_space
from pipeplan.planning import plan_frontier as plan_frontier_module
from pipeplan.planning import steps as planning_steps
from pipeplan.planning.bounds import request_bound, rows_bound
from pipeplan.planning.build_plan import Result
from pipeplan.planning.candidates import (
    PlacementCandidate,
    candidates,
    even_cuts,
    fitting_chain,
    likely_choices,
    placed,
    uniform_choices,
)
from pipeplan.planning.comparison import compare
from pipeplan.planning.other_schedules import OtherSchedules
from pipeplan.planning.plan_frontier import plan_frontier
from pipeplan.planning.planners import PLANNERS as PLANNERS_BY_NAME
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.serving import served
from pipeplan.planning.steps import STEPS, EvenCut, LookAtCandidates, search_of, search_plan, without
from pipeplan.planning.trials import PlanSearch, PlanStep, Trial, on_cluster
from pipeplan.planning.tuning import tune
from pipeplan.planning.uniform_space import longest_stages
from pipeplan.planning.widths import EveryWidth
from pipeplan.schedule import steps as schedule_steps
from pipeplan.schedule.cpsat.solver import Budget, load_solver, solve
from pipeplan.schedule.cpsat.windows import Ramps
from pipeplan.schedule.pattern import Pattern, compose, microbatch_by_microbatch
from pipeplan.schedule.rules.language import named_rules
from pipeplan.schedule.search import first_look, plain_look, timed
from pipeplan.schedule.state import ScheduleStep, SearchState, noted
from pipeplan.schedule.steps import STEPS as SCHEDULE_STEPS
from pipeplan.schedule.steps import FirstSchedule, RepetendSearch, SlowClassics
from pipeplan.search_constants import MOST_ENTRIES
from pipeplan.simulator.simulation import simulate
from pipeplan.time_limit import Limit, TimeUpError, checkpoint, time_is_up
from pipeplan.units import format_ns
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.samples import carried
from pipeplan.workload.slices import num_sliced
from pipeplan.workload.steady_state.repetend import find_repetend
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload
from support.marks import always, one_in, slow_but

pytestmark = pytest.mark.counted

MOST_CALLS = 60_000
"""Between two questions for the time; a machine that makes so few in half a second is slow indeed."""


class Calls:
    """A clock that stands still, and counts what is called between two looks at it, on this thread."""

    def __init__(self) -> None:
        self.all = self.last = self.most = 0

    def __call__(self) -> float:
        self.most, self.last = max(self.most, self.all - self.last), self.all
        return 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        def count(frame: FrameType, event: str, argument: Any) -> None:
            self.all += event in ("call", "c_call")

        before = sys.getprofile()
        self.last = self.all
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)
        self()


def counted(work: Callable[[], object]) -> Calls:
    """What is called while work is done under a limit."""
    calls = Calls()
    with Limit(10, clock=calls).enforced(), calls.counting():
        work()
    return calls


@cache
def chain(num_blocks: int) -> Profile:
    """Blocks that are all a little different."""
    rows = [
        [
            CostRow(
                microbatch_size=size,
                forward_ns=size * (100 + 7 * (number % 11)),
                backward_ns=size * (200 + 9 * (number % 13)),
                activation_bytes=100 * size,
            )
            for size in (1, 2)
        ]
        for number in range(num_blocks)
    ]
    return profile_of(rows, parameters=[1000 + number % 5 for number in range(num_blocks)], bytes_per_sample=50)


@cache
def cluster(num_devices: int, memory_bytes: int | None = None) -> Cluster:
    return Cluster(
        name="two levels",
        source=Source(method="literature", reference="made up for tests"),
        devices=(DeviceKind(name="device", count=num_devices, memory_bytes=memory_bytes),),
        levels=(
            LinkLevel(name="node", group_size=4, latency_ns=5, bandwidth_bytes_per_s=10**12),
            LinkLevel(name="net", group_size=num_devices, latency_ns=50, bandwidth_bytes_per_s=10**11),
        ),
    )


def of(num_blocks: int, num_devices: int, memory_bytes: int | None = None, **others: Any) -> Request:
    joined = cluster(num_devices, memory_bytes)
    return Request.of(chain(num_blocks), devices=num_devices, cluster=joined, **others)


# Every planner and every step asks for the time -----------------------------------------------------------------------


def problem(memory_bytes: int | None = 10**6) -> PartitionProblem:
    return PartitionProblem.of(chain(60), 8, 16, microbatch_sizes=[1, 2], memory_bytes=memory_bytes)


def placed_within(strategy: str) -> object:
    return place(chain(90), strategy, 8, microbatch_size=1, memory_bytes=[60_000] * 8)


PLANNERS: dict[str, Callable[[], object]] = {
    "GraphPipe": lambda: next(graphpipe(problem(), tolerance=0.01)),
    "PipeDream": lambda: next(pipedream(problem())),
    "DAPPLE": lambda: next(dapple(problem())),
    "Piper": lambda: next(piper(problem(), 500)),
    "AutoPipe": lambda: next(autopipe(problem())),
    "bound": lambda: request_bound(of(2000, 8)),
    "cut for servers": lambda: served(of(2000, 8, 10**9)),
    "even cuts": lambda: list(even_cuts(of(2000, 64))),
    **{strategy: partial(placed_within, strategy) for strategy in ("one-to-one", "circular", "v-shape")},
}


@slow_but("name", PLANNERS, lambda name: name not in ("circular", "even cuts", "bound"), always)
def test_planners_ask_for_the_time(name: str) -> None:
    for num_blocks in (60, 90, 2000):
        chain(num_blocks)
    calls = counted(PLANNERS[name])
    assert calls.most <= MOST_CALLS
    assert calls.all > 2_000


class Made:
    """A clock that stands still, and notes the most bytes that are made between two looks at it, numpy's too."""

    def __init__(self) -> None:
        self.most = self.last = 0

    def __call__(self) -> float:
        now, peak = tracemalloc.get_traced_memory()
        self.most, self.last = max(self.most, peak - self.last), now
        tracemalloc.reset_peak()
        return 0.0

    @contextmanager
    def noting(self) -> Iterator[None]:
        tracemalloc.start()
        try:
            yield
            self()
        finally:
            tracemalloc.stop()


MAKING: dict[str, Callable[[int], object]] = {
    "AutoPipe": lambda blocks: next(autopipe(PartitionProblem.of(chain(blocks), 8, 16, microbatch_sizes=[1]))),
    "bound": lambda blocks: request_bound(of(blocks, 8)),
    "cut for servers": lambda blocks: served(of(blocks, 8, 10**9)),
    "even cuts": lambda blocks: next(even_cuts(of(blocks, 64))),
    "longest stages": lambda blocks: longest_stages([np.arange(blocks + 1) ** 2], 64),
    "one-to-one": lambda blocks: place(chain(blocks), "one-to-one", 8, microbatch_size=1, memory_bytes=[10**9] * 8),
}


@one_in(3, "name", MAKING, first=1)
def test_what_is_made_between_two_questions_does_not_grow_as_the_square_of_the_blocks(name: str) -> None:
    """Tables of all runs of blocks are a few calls, and took seconds: of 10,000 blocks they had 800 MB."""

    def most(num_blocks: int) -> int:
        chain(num_blocks)
        clock = Made()
        with Limit(10, clock=clock).enforced(), clock.noting():
            MAKING[name](num_blocks)
        return clock.most

    assert most(1_000) <= 8 * most(250) + 2**20, "as squares 16 times as many"


def split(num_blocks: int, parameter_bytes: int = 0) -> Profile:
    """Blocks of which none is like another, each on one, two or four devices."""
    rows = [
        [
            CostRow(
                microbatch_size=size,
                shards=shards,
                forward_ns=size * (1000 + number) // shards,
                backward_ns=size * 2000 // shards,
                activation_bytes=100 * size,
            )
            for size in (1, 2)
            for shards in (1, 2, 4)
        ]
        for number in range(num_blocks)
    ]
    return profile_of(rows, parameters=[parameter_bytes] * num_blocks, bytes_per_sample=50)


def test_the_table_of_layouts_asks_for_the_time_and_grows_with_blocks_alone() -> None:
    def looked_up(num_blocks: int) -> Calls:
        joined = cluster(16, 10**9)
        asked = Request.of(split(num_blocks), devices=16, cluster=joined, num_microbatches=4, microbatch_size=1)
        calls = counted(lambda: uniform_choices(asked))
        assert uniform_choices(asked)
        return calls

    small, large = looked_up(100), looked_up(200)
    assert large.most <= MOST_CALLS
    assert large.all <= 2.2 * small.all


@pytest.mark.parametrize("most", [3, 400])
def test_the_longest_stage_of_even_cuts_is_bounded_whatever_is_left_out(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not every number of stages is looked at, bounds are as low as those of more stages, and no higher."""
    sums = [np.array([0, *accumulate(100 + 37 * place % 90 + number for place in range(400))]) for number in range(2)]
    every = longest_stages(sums, most)
    monkeypatch.setattr(uniform_space, "MOST_LOOK_UPS", 2 * most * most // 3 + 1)
    some = longest_stages(sums, most)
    assert (some <= every).all()
    assert (some[:, 2::3] == every[:, 2::3]).all()
    assert some.min() >= min(np.diff(each).max() for each in sums)


@cache
def long_chain() -> PlacementCandidate:
    asked = of(64, 24)
    placement = place(asked.profile, "one-to-one", 24, microbatch_size=1)
    return PlacementCandidate(placement, Batch(96, 1), False, "test")


def test_mapping_workloads_and_known_schedules_ask_for_the_time() -> None:
    asked, candidate = of(64, 24), long_chain()
    assert counted(lambda: on_cluster(asked, candidate)).most <= MOST_CALLS
    trial = Trial.of(asked, candidate)
    calls = counted(lambda: first_look(trial.ways[-1]))
    assert calls.most <= MOST_CALLS
    assert calls.all > 5 * MOST_CALLS


SEARCH_STEPS = [step for step in SCHEDULE_STEPS if isinstance(step, ScheduleStep)]


@pytest.mark.parametrize("step", SEARCH_STEPS, ids=lambda step: step.name)
def test_steps_of_a_schedule_ask_for_the_time(step: ScheduleStep) -> None:
    """Each after a first schedule; the solver, which runs on a thread of its own, is told to stop by what waits."""
    workload = build_workload(
        chain(16), place(chain(16), "one-to-one", 8, microbatch_size=1), num_microbatches=64, microbatch_size=1
    )
    load_solver()
    calls = Calls()
    budget = Budget(2.0, clock=calls)
    state = SearchState.of(OneMicrobatch.of(workload), budget, None)
    state.steps = SEARCH_STEPS
    FirstSchedule().run(state)
    state.known = state.schedule
    until = [0]

    def short_of_time() -> float:
        """After so much work time is up: steps that would go on for long end."""
        until[0] += 1
        calls()
        return 0.0 if calls.all < 8 * MOST_CALLS else 10.0

    budget.clock = short_of_time
    with budget.ended(), calls.counting():
        if step.applies(state):
            step.run(state)
    assert calls.most <= MOST_CALLS


PLAN_STEPS = [step for step in STEPS if isinstance(step, PlanStep)]


def of_many_ways() -> Request:
    """Blocks on one, two or four devices, whose replicas may divide what they keep, on devices of several levels."""
    asked = Request.of(split(12, 10**5), devices=8, cluster=cluster(8, 10**8), mini_batch=16, time_limit=10.0)
    return replace(asked, zero="auto")


def from_a_plan() -> Request:
    given: dict[str, Any] = {"num_microbatches": 8, "microbatch_size": 1}
    start = search_plan(of(12, 8, **given, placement="one-to-one", deterministic=True, time_limit=0.05)).plan
    return of(12, 8, **given, start=start, time_limit=10.0)


def in_a_line(**others: Any) -> Request:
    return of(24, 8, 10**9, num_microbatches=8, microbatch_size=2, placement="one-to-one", time_limit=10.0, **others)


SUITED: dict[type[PlanStep], Callable[[], Request]] = {
    planning_steps.StartPlan: from_a_plan,
    planning_steps.KeepAll: lambda: Request.of(
        split(24), devices=16, cluster=cluster(16, 2_000), mini_batch=32, time_limit=10.0
    ),
    planning_steps.DeviceOrders: lambda: Request.of(
        split(24), cluster=cluster(16), mini_batch=32, positions=4, replicas=2, shards=2, time_limit=10.0
    ),
    planning_steps.ExchangeByActions: lambda: replace(of_many_ways(), zero=3),
    planning_steps.SliceForwards: in_a_line,
    planning_steps.LateInputs: lambda: Request.of(shape("mllm", 8), num_microbatches=6, time_limit=10.0),
    planning_steps.ExplainShortage: lambda: of(24, 8, 500, mini_batch=8, time_limit=10.0),
}
"""Requests in which a step has something to do; the others have it in that :func:`of_many_ways`."""


LITTLE = (planning_steps.EaseFirstLayers, planning_steps.LateInputs)
"""Steps that have next to nothing to do in any request for which the clock can be counted here."""


@pytest.mark.parametrize("step", PLAN_STEPS, ids=lambda step: step.name)
def test_steps_of_a_search_ask_for_the_time(step: PlanStep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each after what comes before it: the clock is their work, and so long a share of it is over that they end."""
    load_solver()
    asked = SUITED.get(type(step), of_many_ways)()
    calls, questions = Calls(), [0]

    def working() -> float:
        questions[0] += 1
        calls()
        return 0.002 * questions[0] + calls.all / (2 * MOST_CALLS)

    is_up = time_limit.time_is_up

    def asking() -> bool:
        working()
        return is_up()

    monkeypatch.setattr(time_limit, "time_is_up", asking)
    search = search_of(asked, Limit(asked.time_limit, clock=working), explain=True)
    search.open = candidates(asked, STEPS, 1, 1)
    with search.budget.ended():
        for each in (EvenCut(), planning_steps.LookAtCandidates(share=0.1)):
            if each.name != step.name and type(step) is not planning_steps.StartPlan:
                each.run(search)
    search.finalists = search.done
    questions[0] = 0
    if isinstance(step, planning_steps.ExchangeByActions | OtherSchedules):  # of large requests, which take long
        monkeypatch.setattr(candidates_module, "LARGE", 1)
    with search.budget.ended(), calls.counting():
        if step.applies(search):
            step.run(search)
    assert calls.most <= MOST_CALLS
    assert questions[0] > 0 or isinstance(step, LITTLE)


@pytest.mark.parametrize("num_devices", [16, 64])
def test_a_first_plan_takes_work_in_proportion_to_blocks_and_devices(num_devices: int) -> None:
    def work(num_blocks: int) -> int:
        asked = of(num_blocks, num_devices, 10**9, time_limit=1000.0)
        search = PlanSearch(asked, Budget(asked.time_limit), None, STEPS)
        calls = counted(lambda: EvenCut().run(search))
        assert search.made is not None
        assert check(search.made.plan, asked.profile, asked.cluster).valid
        return calls.all

    small, large = work(400), work(800)
    assert large <= 2.2 * small


def test_a_first_plan_does_not_grow_with_the_number_of_microbatches() -> None:
    """However deep the pipeline is, in which nothing repeats for long."""

    def first(num_microbatches: int) -> tuple[int, Plan]:
        asked = of(96, 48, num_microbatches=num_microbatches, microbatch_size=1, time_limit=1000.0)
        search = PlanSearch(asked, Budget(asked.time_limit), None, STEPS)
        calls = counted(lambda: EvenCut().run(search))
        assert search.made is not None
        return calls.all, search.made.plan

    (few, _), (many, plan) = first(3_000), first(12_000)
    assert many <= 1.3 * few
    assert plan.num_microbatches == 12_000
    assert sum(map(len, plan.programs)) <= 3 * MOST_ENTRIES


def test_making_a_plan_asks_for_the_time() -> None:
    asked, candidate = of(64, 24), long_chain()
    trial = Trial.of(asked, candidate)
    trial.look_plainly()
    assert trial.best is not None
    best = trial.best
    calls = counted(lambda: planning_steps.planned(asked, candidate, best, best.workload))
    assert calls.most <= MOST_CALLS
    assert calls.all > 4 * MOST_CALLS


def test_a_first_plan_of_few_actions_on_many_devices_asks_for_the_time() -> None:
    """A stage's actions are a few, but all of its devices have them, where each has a program of its own."""
    asked = Request.of(chain(400), devices=256, mini_batch=256, time_limit=1000.0, replicas=16)
    asked = replace(asked, folds=False)
    calls = Calls()
    search = PlanSearch(asked, Budget(asked.time_limit, clock=calls), None, STEPS)
    with search.budget.enforced(), calls.counting():
        EvenCut().run(search)
        assert search.made is not None
        assert search.made.schedule.graph.num_tasks < planning_steps.FEW_ENTRIES
    assert calls.all > 5 * MOST_CALLS
    assert calls.most <= MOST_CALLS


def test_a_search_that_ends_does_not_wait_for_a_bound_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has one all the same."""
    begun = list[bool]()

    def ended(asked: Request) -> int:
        begun.append(not time_is_up())
        limit.interrupt()
        checkpoint()
        return 17

    limit = Limit(20.0, clock=Hand())
    for module in ("trials", "bounds"):
        monkeypatch.setattr(f"pipeplan.planning.{module}.request_bound", ended)
    found = search_plan(of(8, 8, time_limit=20.0), within=limit)
    assert found.interrupted
    assert found.lower_bound_ns == 17
    assert begun == [True, True]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_bound_that_takes_too_long_is_one_by_rows_alone(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand blocks that all differ took 4.5 s after a signal, which alone ends what is deterministic."""

    def endless(_: Request) -> int:
        while True:
            clock.now += 0.01
            checkpoint()

    clock = Hand()
    asked, limit = of(8, 8, time_limit=20.0, deterministic=deterministic), Limit(20.0, clock=clock)
    for module in ("trials", "bounds"):
        monkeypatch.setattr(f"pipeplan.planning.{module}.request_bound", endless)
    found = search_plan(asked, within=limit, progress=lambda *_: limit.interrupt() if deterministic else None)
    assert 1 < found.lower_bound_ns == rows_bound(asked) <= request_bound(asked)


def test_a_first_plan_is_of_a_pipeline_that_is_filled_once() -> None:
    """The longest one, filled again for each few micro-batches, took 2.5 times as long here, and 13 of large chains."""
    asked = Request.of(split(256, 10**6), devices=256, cluster=cluster(256, 10**8), mini_batch=1024)
    trial = Trial.of(asked, next(even_cuts(asked)))
    trial.look_plainly()
    assert trial.best is not None
    assert trial.best.scheduler == "1f1b"


def test_stages_of_different_widths_take_no_more_for_more_microbatches() -> None:
    """Their 1F1B repeats itself: that of a hundred thousand micro-batches took the whole limit."""

    def work(mini_batch: int) -> int:
        asked = Request.of(split(6), devices=8, mini_batch=mini_batch, time_limit=1000.0)
        return counted(lambda: list(EveryWidth().candidates(asked))).all

    assert work(6_400) <= 1.5 * work(640)


def test_composing_a_pattern_takes_work_in_proportion_to_its_actions() -> None:
    """Messages of hours between actions of milliseconds: billions of repetitions are on the way at once."""
    problem = OneMicrobatch.of(shape_workload("v", 4, 6))
    for gap in (3, 10**12):
        pattern = Pattern(2, 1_000, tuple((x * gap, x * gap + 500) for x in range(problem.num_operations)))
        assert counted(partial(compose, problem, pattern)).all < 2_000
        for order, operations in zip(compose(problem, pattern), problem.on_device, strict=True):
            start = {x * 6 + m: pattern.starts[x][m % 2] + m // 2 * 1_000 for x in operations for m in range(6)}
            assert order == sorted(start, key=lambda task: (start[task], task))


# What is known is kept ------------------------------------------------------------------------------------------------


def interrupting(most: int) -> tuple[Limit, list[int]]:
    """A limit that is interrupted when its clock is asked for the so-many-th time, and how often it was asked."""
    asked, limit = [0], Limit(math.inf)

    def clock() -> float:
        asked[0] += 1
        if asked[0] == most:
            limit.interrupt()
        return 0.001 * asked[0]

    limit.clock, limit.started = clock, 0.0
    return limit, asked


@pytest.mark.parametrize("name", ["v", "nn"])
def test_whenever_it_is_interrupted_the_best_plan_known_is_made(name: str) -> None:
    """At every so-many-th question for the time, whatever is going on: refinement included."""
    profile = shape(name, 4)
    asked = Request.of(profile, num_microbatches=6, memory_bytes=6 * 10**9, time_limit=1.0)
    limit, questions = interrupting(-1)
    search_plan(asked, within=limit)
    interrupted = without_plan = 0
    for most in [1, *range(10, questions[0], max(1, questions[0] // 8))]:
        heard: list[int] = []

        def hear(what: str, best: int, bound: int, seconds: float, heard: list[int] = heard) -> None:
            heard.append(best)

        try:
            found = search_plan(asked, within=interrupting(most)[0], progress=hear)
        except KeyboardInterrupt:
            without_plan += 1
            assert not heard
            continue
        interrupted += found.interrupted
        assert check(found.plan, profile).valid
        assert found.plan.predicted.iteration_ns <= min(heard, default=math.inf)
    assert without_plan >= 1
    assert interrupted >= 3


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_so_much_time_is_kept_for_the_last_plan_as_the_first_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ends, planned = Hand(), list[float](), planning_steps.planned

    def slowly(*given: Any) -> Plan:
        clock.now += 3.0
        return planned(*given)

    def forever(step: RepetendSearch, state: SearchState) -> None:
        while not state.budget.expired:
            clock.now += 0.01
        ends.append(clock.now)

    monkeypatch.setattr(planning_steps, "planned", slowly)
    monkeypatch.setattr(RepetendSearch, "run", forever)
    asked = request_of(shape("m", 4), "one-to-one", Batch(6, 1), num_devices=4, time_limit=20.0, recompute=False)
    search_plan(asked, within=Limit(20.0, clock=clock))
    assert ends
    assert max(ends) <= 17.1
    assert clock.now <= 20.2


def test_after_a_signal_a_plan_that_takes_long_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was made before is the answer, within half a second, and it says what was known."""
    clock, planned, found = Hand(), planning_steps.planned, list[float]()

    def slowly(*given: Any) -> Plan:
        found.append(clock.now)
        if len(found) > 1:
            for _ in range(500):
                clock.now += 0.02
                checkpoint()
        return planned(*given)

    def found_and_interrupted(step: Ramps, state: SearchState) -> None:
        limit.interrupt()

    monkeypatch.setattr(planning_steps, "planned", slowly)
    monkeypatch.setattr(Ramps, "run", found_and_interrupted)
    limit = Limit(20.0, clock=clock)
    asked = request_of(shape("m", 4), "one-to-one", Batch(6, 1), num_devices=4, time_limit=20.0)
    result = search_plan(asked, within=limit)
    assert result.interrupted
    assert len(found) == 2
    assert clock.now <= found[-1] + 0.45
    assert "there was no time to make its plan" in result.notes[-1]
    assert check(result.plan).valid


def test_where_work_is_counted_a_signal_loses_no_plan_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A better schedule is known when it comes, whose plan takes long."""
    clock, planned, made, values = Hand(), planning_steps.planned, list[int](), list[int]()
    limit = Limit(20.0, clock=clock)

    def slowly(*given: Any) -> Plan:
        for _ in range(500 * limit.interrupted):
            clock.now += 0.02
            checkpoint()
        plan = planned(*given)
        made.append(plan.predicted.iteration_ns)
        return plan

    def hear(what: str, best: int, *_: object) -> None:
        values.append(best)
        if made and best < made[-1]:
            limit.interrupt()

    monkeypatch.setattr(planning_steps, "planned", slowly)
    result = search_plan(of(64, 64, 10**9, deterministic=True), within=limit, progress=hear)
    assert result.interrupted
    assert clock.now <= 0.45
    assert result.plan.predicted.iteration_ns == made[-1] > values[-1]
    assert "there was no time to make its plan" in result.notes[-1]
    assert f"was found, {format_ns(made[-1] - values[-1])} shorter, and" in result.notes[-1]


def test_what_is_found_once_more_stays_what_its_plan_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it compared with itself, which takes seconds of a long schedule; what is newly known of it counts."""
    asked = request_of(shape("m", 4), "one-to-one", Batch(6, 1), num_devices=4, recompute=False)
    trial = Trial.of(asked, PlacementCandidate(asked.profile.placement, Batch(6, 1), False, "test"))
    trial.look()
    first = trial.best
    assert first is not None
    again = replace(first, orders=[list(order) for order in first.orders], notes=("once more",))
    monkeypatch.setattr(trials, "preferred", None)
    trial.offer(again)
    assert trial.best is not None
    assert trial.best.orders is first.orders
    assert trial.best.notes == ("once more",)


@slow_but(
    "blocks, memory_bytes", [(1_000, 10**9), (12, 10**6)], lambda case: case[0] == 12, always, ids=["large", "small"]
)
def test_where_work_is_counted_the_answer_is_that_of_a_search_that_keeps_no_plan(
    blocks: int, memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans on the way are made beside it, the first as soon as there is a schedule."""
    asked = of(blocks, 8, memory_bytes, deterministic=True, time_limit=0.05)
    planned, when, heard = planning_steps.planned, list[int](), list[str]()

    def noted(*given: Any) -> Plan:
        when.append(len(heard))
        return planned(*given)

    monkeypatch.setattr(planning_steps, "planned", noted)
    found = search_plan(asked, progress=lambda what, *_: heard.append(what))
    assert when[0] <= 1 < len(when)
    monkeypatch.setattr(planning_steps, "_secure", lambda _: None)
    alone = search_plan(asked)
    assert (found.plan, found.candidates, found.notes) == (alone.plan, alone.candidates, alone.notes)
    assert (found.lower_bound_ns, found.placement_lower_bound_ns) == (
        alone.lower_bound_ns,
        alone.placement_lower_bound_ns,
    )


def found_at_the_end(
    clock: Hand, planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, *, at: float = 20.0
) -> Result:
    """What a search of 20 s ends with that finds something at its end, where plans are made so."""

    def found_late(step: Ramps, state: SearchState) -> None:
        clock.now = max(clock.now, at)

    monkeypatch.setattr(planning_steps, "planned", planned)
    monkeypatch.setattr(Ramps, "run", found_late)
    asked = request_of(shape("m", 4), "one-to-one", Batch(6, 1), num_devices=4, time_limit=20.0)
    return search_plan(asked, within=Limit(20.0, clock=clock))


def test_a_last_plan_that_is_known_to_take_too_long_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """One like it took 4.5 s, and two are left with the lateness."""
    clock, planned, begun = Hand(), planning_steps.planned, list[float]()

    def slowly(*given: Any) -> Plan:
        begun.append(clock.now)
        for _ in range(450):
            clock.now += 0.01
            checkpoint()
        return planned(*given)

    result = found_at_the_end(clock, slowly, monkeypatch)
    assert len(begun) == 1
    assert 20.0 <= clock.now < 20.1
    assert "there was no time to make its plan" in result.notes[-1]


@pytest.mark.parametrize(("at", "ended"), [(5.0, False), (19.9, True)])
def test_time_kept_for_the_last_plan_ends_a_search_as_the_limit_does(
    at: float, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that plan then takes less than was kept for it, and the limit is not reached."""
    clock, planned, begun = Hand(), planning_steps.planned, list[float]()

    def at_first_slowly(*given: Any) -> Plan:
        begun.append(clock.now)
        if len(begun) == 1:
            clock.now += 1.5
        return planned(*given)

    result = found_at_the_end(clock, at_first_slowly, monkeypatch, at=at)
    assert len(begun) == 2
    assert clock.now == max(begun[1], at) < 20.0
    assert result.timed_out is ended


def test_a_last_plan_that_takes_too_long_ends_with_the_lateness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the limit, in which what follows it fits, too; the one made before is the answer."""
    clock, planned, found = Hand(), planning_steps.planned, list[float]()

    def slowly(*given: Any) -> Plan:
        found.append(clock.now)
        for _ in range(10_000 * (len(found) > 1)):
            clock.now += 0.01
            checkpoint()
        assert len(found) == 1, "it was never given up"
        return planned(*given)

    result = found_at_the_end(clock, slowly, monkeypatch)
    assert len(found) == 2
    assert 21.5 < clock.now <= 21.95
    assert "there was no time to make its plan" in result.notes[-1]


@pytest.mark.parametrize("now", [1.0, 4.0, 17.0, 20.0])
def test_a_plan_that_is_not_made_in_time_is_given_up_in_time(now: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is half made goes part by part, the longer the more there is; the lateness is for that, too."""
    clock = Hand()
    budget = Budget(20.0, clock=clock)
    clock.now = now

    def slowly(*given: Any) -> None:
        try:
            for _ in range(10_000):
                clock.now += 0.01
                checkpoint()
        finally:
            clock.now += 0.04 * (clock.now - now)

    monkeypatch.setattr(planning_steps, "_made", slowly)
    search: Any = SimpleNamespace(budget=budget, lateness=2.0)
    with budget.enforced(), pytest.raises(TimeUpError):
        planning_steps._made_late(search, search)
    assert 20.9 < clock.now <= 22.0 - planning_steps.ENDING + 0.02


@pytest.mark.parametrize(
    ("value", "explains", "reserved"), [(9, False, 3.5), (10, False, 2.7), (None, False, 2.7), (10, True, 7.2)]
)
def test_all_that_is_left_is_kept_for_a_better_plan_that_is_not_made_yet(
    value: int | None, explains: bool, reserved: float
) -> None:
    """It is expected to take 4.5 s; where one as good was made, as long is kept as it takes to write it, and as long as
    the plan takes to explain it."""
    clock = Hand()
    budget = Budget(20.0, clock=clock)
    clock.now = 16.5

    def schedule_of(actions: int) -> SimpleNamespace:
        workload = SimpleNamespace(entries=12, operations=[None] * 4)
        return SimpleNamespace(graph=SimpleNamespace(num_actions=actions), workload=workload, orders=[[actions]])

    predicted = SimpleNamespace(iteration_ns=10)
    schedule = schedule_of(100)
    made = SimpleNamespace(
        seconds=3.0,
        schedule=schedule,
        orders=schedule.orders,
        plan=SimpleNamespace(predicted=predicted),
        stands_in=False,
    )
    best = SimpleNamespace(best=schedule_of(150), parted=None, value_ns=value)
    search: Any = SimpleNamespace(budget=budget, answer=best, made=made, making_seconds=3.0, explains=explains)
    planning_steps._secure(search)
    assert budget.reserved == pytest.approx(reserved)
    assert budget.expired == (value == 9 or explains)


@pytest.mark.parametrize(
    ("microbatches", "seconds", "reserved"), [(60, 1.0, 16.0), (60, 3.0, 20.0), (6, 0.5, 1.5), (100_000, 1.0, 1.5)]
)
def test_time_is_kept_for_the_plan_of_a_whole_run(microbatches: int, seconds: float, reserved: float) -> None:
    """A plan of a part that is repeated has fewer entries than what a search may find, unless that is one, too."""
    clock = Hand()
    budget = Budget(40.0, clock=clock)
    budget.reserved = 1.5
    part = shape_workload("mllm", 4, 6)
    made = SimpleNamespace(
        seconds=seconds,
        schedule=SimpleNamespace(
            graph=SimpleNamespace(num_actions=len(part.operations) * 6), workload=part, orders=[[6]]
        ),
    )
    search: Any = SimpleNamespace(budget=budget, made=made, steps=(), explains=False)
    trial: Any = SimpleNamespace(ways=[part.with_microbatches(microbatches)])
    planning_steps._keep_for_whole(search, trial)
    assert budget.reserved == reserved
    search.made = None
    planning_steps._keep_for_whole(search, trial)
    assert budget.reserved == reserved


def test_a_first_plan_that_is_not_made_in_time_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is said as the search says it."""
    clock = Hand()

    def slowly(*given: Any) -> Plan:
        while clock.now < 1_000:
            clock.now += 0.25
            checkpoint()
        raise AssertionError("which is too late")

    monkeypatch.setattr(planning_steps, "planned", slowly)
    monkeypatch.setattr(planning_steps, "FEW_ENTRIES", 0)
    monkeypatch.setattr(time, "process_time", lambda: clock.now)
    asked = request_of(shape("v", 4), "one-to-one", Batch(6, 1), num_devices=4, time_limit=20.0)
    with pytest.raises(SearchTimeoutError, match="no time to make its plan"):
        search_plan(asked, within=Limit(20.0, clock=clock))
    assert 20 < clock.now <= 22.0


def in_a_circle(*, alike: bool) -> Request:
    """Blocks that are alike, or have a dimension of their own, in stages of which each device has several."""
    rows = [CostRow(microbatch_size=size, forward_ns=100 * size, backward_ns=200 * size) for size in (1, 2)]
    profile = profile_of([rows] * 64, parameters=[100] * 64, bytes_per_sample=5)
    if not alike:
        marked = (block.model_copy(update={"dimensions": {"n": n}}) for n, block in enumerate(profile.blocks, 1))
        profile = profile.model_copy(update={"blocks": tuple(marked)})
    return Request.of(profile, devices=16, placement="circular", chunks=4, mini_batch=64)


def test_a_bound_over_a_strategy_prices_alike_blocks_once() -> None:
    """It is needed after a signal, too, and went through ten thousand blocks for each size and each recomputation."""
    asked = in_a_circle(alike=True), in_a_circle(alike=False)
    assert request_bound(asked[0]) == request_bound(asked[1])
    few, many = (counted(lambda own=own: request_bound(own)).all for own in asked)  # type: ignore[misc]
    assert few < 0.5 * many


def test_parts_of_actions_look_through_what_stages_exchange_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once for each stage: late inputs are tried after a signal."""

    class Looked(dict[Any, Any]):
        times = 0

        def items(self) -> Any:
            Looked.times += 1
            return super().items()

    crossings = late_inputs._crossings
    monkeypatch.setattr(late_inputs, "_crossings", lambda *given: Looked(crossings(*given)))
    asked = in_a_circle(alike=True)
    workload = Trial.of(asked, next(iter(even_cuts(asked)))).ways[0]
    assert late_inputs.with_late_inputs(asked.profile, workload) is workload
    assert Looked.times == 1


def test_devices_that_run_the_same_are_looked_at_once() -> None:
    """A repetend of stages on many devices, and who sends to whom, take hardly more than on few."""
    calls = {}
    for replicas in (2, 64):
        profile = chain(4)
        placement = place(profile, "one-to-one", 4 * replicas, microbatch_size=replicas, replicas=replicas)
        workload = build_workload(profile, placement, num_microbatches=16, microbatch_size=replicas)
        found = plain_look(workload)
        assert found is not None
        source, target = placement.stages[:2]
        calls[replicas] = (
            counted(lambda graph=found.graph, found=found: find_repetend(graph, found.orders, found.starts)).all,
            counted(lambda a=source, b=target: list(carried(a, (0, 64), b, (0, 64)))).all,  # type: ignore[misc]
        )
    assert calls[64][0] < 4 * calls[2][0]
    assert calls[64][1] < 40 * calls[2][1]


def test_a_small_request_has_a_plan_however_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports have used up the limit, and the machine is so slow that nothing could be waited for."""
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    limit = Limit(1.0)
    limit.started -= 1000
    found = search_plan(of(12, 8, time_limit=1.0), within=limit)
    assert check(found.plan).valid
    assert found.timed_out


@pytest.mark.counted(1e-5)  # what has to be there takes many questions
def test_tuning_and_frontiers_have_something_however_late_it_is() -> None:
    limit = Limit(1.0)
    limit.started -= 1000
    asked = Request.of(chain(12), devices=4, num_microbatches=8, placement="one-to-one", time_limit=1.0)
    assert tune(asked, within=limit).rows
    assert plan_frontier(Request(chain(12), 4, Batch(2, 4), device_counts=(4,), sizes=(1, 2)), within=limit).points


def test_tuning_a_large_request_has_a_row_before_it_places_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of points with few micro-batches, which come first in the grid, none would fit."""
    placing, placed_before = tuning.cell_of, []

    def count(*given: Any) -> Any:
        placed_before.append(given[1])
        return placing(*given)

    monkeypatch.setattr(tuning, "cell_of", count)
    asked = of(260, 16, 300_000, mini_batch=32, time_limit=1000.0)
    limit = Limit(1000.0, clock=Calls())
    making, made_late = tuning.planned, []

    def make(*given: Any) -> Any:
        made_late.append(limit.interrupted)
        return making(*given)

    monkeypatch.setattr(tuning, "planned", make)
    found = tune(asked, within=limit, progress=lambda *_: limit.interrupt())
    assert len(placed_before) == 1
    assert made_late == [False]
    assert check(found.result.plan, asked.profile, asked.cluster).valid
    assert len(found.rows) >= 1


def test_the_last_row_of_a_tuning_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the plainest rules was made a plan at once; what takes longer than the limit is none."""
    making, looking, made, clock = tuning.planned, tuning._Tuner._round, list[str](), Hand()

    def look(self: Any, *given: Any) -> None:
        """After the first row there is a shorter one."""
        if not self.found:
            return looking(self, *given)
        cell, row = self.found[0]
        self.found.append((cell, replace(row, iteration_ns=row.iteration_ns - 1)))

    def make(*given: Any) -> Any:
        made.append(given[2].scheduler)
        while len(made) > 1:
            clock.now += 1.0
            checkpoint()
        return making(*given)

    monkeypatch.setattr(tuning, "planned", make)
    monkeypatch.setattr(tuning._Tuner, "_round", look)
    asked = of(260, 16, 300_000, mini_batch=32, time_limit=1000.0)
    found = tune(asked, within=Limit(1000.0, clock=clock))
    assert clock.now <= 1100.0
    assert len(made) > 1
    assert found.result.schedule.scheduler == made[0]
    assert any("no time to make a plan" in note for note in found.result.notes)


def test_tuning_says_that_there_is_nothing_yet() -> None:
    said: list[tuple[str, int]] = []
    asked = Request.of(chain(12), devices=4, num_microbatches=8, memory_bytes=1000, time_limit=1000.0)
    limit = Limit(1000.0, clock=map(float, count()).__next__)
    with pytest.raises(PipeplanError):
        tune(asked, within=limit, progress=lambda what, best, *_: said.append((what, best)))
    assert said == [("no rules were found yet whose schedule fits: the tuning goes on", 0)]


def test_a_tuning_that_is_late_does_not_look_long_for_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def shortage(request: Request, error: InfeasibleError, seconds: float, *_: object) -> InfeasibleError:
        given.append(seconds)
        return error

    monkeypatch.setattr(tuning, "shortage", shortage)
    for late in (0.0, 1000.0):
        limit = Limit(20.0, clock=Hand())
        limit.started -= late
        asked = Request.of(chain(12), devices=4, num_microbatches=8, memory_bytes=1000, time_limit=20.0)
        with pytest.raises(PipeplanError):
            tune(asked, within=limit)
    assert given == [5.0, 0.5]


def test_very_long_runs_are_tuned_as_short_ones() -> None:
    asked = Request.of(
        chain(4), devices=2, num_microbatches=50_000, placement="one-to-one", time_limit=1000.0, split_backward=False
    )
    found = tune(asked)
    assert found.result.plan.loop is not None
    assert found.result.plan.num_microbatches == 50_000
    assert found.rows[0].num_microbatches == 50_000


def test_what_is_left_of_the_command_s_time_is_the_search_s() -> None:
    """The process began long ago: there is a plan all the same, and no more."""
    limit = Limit(10.0)
    limit.started -= 1000.0
    asked = request_of(shape("v", 4), "one-to-one", Batch(4, 1), num_devices=4, time_limit=10.0)
    found = search_plan(asked, within=limit)
    assert found.timed_out
    assert not found.interrupted


@pytest.mark.parametrize("error", [MemoryError(), ValueError("no such luck"), PipeplanError("nor this")])
def test_a_step_that_fails_loses_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(SlowClassics, "run", fail)
    asked = request_of(shape("m", 4), "one-to-one", Batch(4, 1), num_devices=4, time_limit=2, deterministic=True)
    with pytest.warns(UserWarning, match=f"slow classic schedules.*{type(error).__name__}"):
        found = search_plan(asked)
    assert check(found.plan).valid
    (note,) = found.figures()["notes"]  # type: ignore[misc]
    assert type(error).__name__ in note


def test_a_bound_that_fails_loses_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    for name in ("request_bound", "prompt_bound"):
        monkeypatch.setattr(trials, name, fail)
    asked = request_of(shape("m", 4), "auto", Batch(4, 1), num_devices=4, time_limit=2, deterministic=True)
    with pytest.warns(UserWarning, match="'a bound' ended with MemoryError"):
        found = search_plan(asked)
    assert check(found.plan).valid
    assert any("MemoryError" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore:--planner pipedream had no plan")
@one_in(2, "error", [MemoryError("full"), InfeasibleError("nothing fits")], first=1)
def test_an_error_leaves_what_stands_in_unless_it_says_that_nothing_fits(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    asked = by_planner(monkeypatch, fail)
    if isinstance(error, InfeasibleError):
        with pytest.raises(InfeasibleError, match="nothing fits"):
            search_plan(asked, within=Limit(20.0, clock=Hand()))
        return
    with pytest.warns(UserWarning, match="ended with MemoryError: full"):
        found = search_plan(asked, within=Limit(20.0, clock=Hand()))
    assert found.stands_in
    assert check(found.plan, asked.profile, asked.cluster).valid


@pytest.mark.filterwarnings("ignore:--planner pipedream had no plan")
def test_a_step_that_always_fails_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(LookAtCandidates, "run", fail)
    asked = by_planner(monkeypatch, lambda: None)
    with pytest.warns(UserWarning, match="ended with MemoryError"):
        found = search_plan(asked, within=Limit(20.0, clock=Hand()))
    assert check(found.plan, asked.profile, asked.cluster).valid


@pytest.mark.filterwarnings("ignore:the step")
@pytest.mark.slow
def test_a_last_plan_that_cannot_be_made_leaves_the_first_one_of_a_deterministic_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, count = planning_steps._made, 0

    def fail_later(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count > 1:
            raise MemoryError
        return made(*arguments)

    monkeypatch.setattr(planning_steps, "_made", fail_later)
    monkeypatch.setattr(planning_steps, "_made_late", fail_later)
    asked = of(600, 8, 10**9, num_microbatches=16, microbatch_size=1, time_limit=1.0, deterministic=True)
    found = search_plan(asked)
    assert count > 1
    assert check(found.plan).valid
    assert any("making its plan ended with MemoryError" in note for note in found.notes)


@pytest.mark.slow
def test_what_goes_wrong_in_a_row_or_at_a_point_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of comparisons, frontiers and tunings: there is something before it."""

    def failing(own: Callable[..., Any], good: int) -> Callable[..., Any]:
        count = 0

        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count > good:
                raise MemoryError
            return own(*arguments, **named)

        return run

    asked = Request.of(chain(6), devices=2, num_microbatches=4, placement="one-to-one", time_limit=100.0)
    whole = Request(chain(6), 2, Batch(2, 4), device_counts=(2,), sizes=(1, 2), time_limit=100.0)
    with monkeypatch.context() as patched:
        patched.setattr(comparison, "search_plan", failing(comparison.search_plan, 1))
        both = replace(asked, placement="auto")
        compared = compare(both)
    assert compared.rows
    assert any("MemoryError" in each.why for each in compared.missing)
    with monkeypatch.context() as patched:
        patched.setattr(comparison, "_row", failing(comparison._row, 1))
        compared = compare(asked)
    assert len(compared.rows) >= 2
    assert any("MemoryError" in each.why for each in compared.missing)
    with monkeypatch.context() as patched:
        patched.setattr(plan_frontier_module, "_tried", failing(plan_frontier_module._tried, 1))
        with pytest.warns(UserWarning, match="'partitions' ended with MemoryError"):
            front = plan_frontier(whole)
    assert front.points
    with monkeypatch.context() as patched:
        patched.setattr(tuning._Tuner, "_report", failing(tuning._Tuner._report, 0))
        with pytest.warns(UserWarning, match="'rules' ended with MemoryError"):
            tuned = tune(asked)
    assert check(tuned.result.plan).valid
    assert any("MemoryError" in note for note in tuned.result.notes)


@pytest.mark.parametrize("what", ["kept_alternatives", "tied_with", "said_of_choices", "explained"])
def test_what_is_said_beside_a_plan_fails_by_itself(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(planning_steps, what, fail)
    asked = request_of(shape("v", 2), "one-to-one", Batch(4, 1), num_devices=2, time_limit=2, deterministic=True)
    with pytest.warns(UserWarning, match="MemoryError"):
        found = search_plan(asked, explain=True)
    assert check(found.plan).valid
    assert [note for note in found.notes if "MemoryError" in note]


def test_a_better_plan_that_cannot_be_made_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(planning_steps, "_made_late", fail)
    found = search_plan(request_of(shape("v", 2), "one-to-one", Batch(4, 1), num_devices=2, time_limit=2))
    assert check(found.plan).valid
    assert [note for note in found.notes if "making its plan ended with MemoryError" in note]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a plan of")
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_candidate_whose_plan_is_not_valid_costs_that_one_alone(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that are looked at the best, or the two best, have no valid plan: it is the next one."""
    given: dict[str, Any] = {"num_microbatches": 2, "microbatch_size": 2, "time_limit": 20.0}
    asked = Request.of(chain(4), devices=2, deterministic=deterministic, **given)
    steps, own = (LookAtCandidates(),), planning_steps.plan_of

    def found(wrong: Sequence[PlacementCandidate]) -> tuple[PlanSearch, Plan, tuple[str, ...]]:
        searches = list[PlanSearch]()

        def made(request: Request, trial: Trial, schedule: Any) -> Plan:
            if any(each.key == trial.candidate.key for each in wrong):
                raise InvalidPlanError("wrong", ["it is made so"])
            return own(request, trial, schedule)

        def begun(*given: Any, **named: Any) -> PlanSearch:
            searches.append(search_of(*given, **named))
            return searches[0]

        with monkeypatch.context() as patched:
            patched.setattr(planning_steps, "plan_of", made)
            patched.setattr(planning_steps, "search_of", begun)
            result = search_plan(asked, within=Limit(20.0, clock=Hand()), steps=steps)
        return searches[0], result.plan, result.notes

    ranked, values = list[PlacementCandidate](), list[int]()
    for number in range(3):
        search, plan, notes = found(ranked)
        assert search.best is not None
        assert check(plan, asked.profile).valid
        assert search.best.candidate not in ranked
        assert plan.predicted.iteration_ns == search.best.value_ns
        assert sum("is not valid and was left out" in note for note in notes) == number
        assert not any("ended with" in note for note in notes)
        ranked.append(search.best.candidate)
        values.append(plan.predicted.iteration_ns)
    assert values == sorted(values)


@pytest.mark.parametrize("kept", [True, False])
def test_numbers_that_add_up_to_too_much_end_a_step_and_wrong_requests_the_search(kept: bool) -> None:
    notes: list[str] = []
    for error, is_noted in (
        (SumError("too much"), kept),
        (NotApplicableError("not here"), kept),
        (UsageError("no"), False),
    ):
        told = pytest.warns(UserWarning, match="'step' ended") if is_noted else pytest.raises(type(error))
        with told, noted("step", notes, lambda _: kept):
            raise error
    assert len(notes) == 2 * kept


def test_a_step_that_fails_before_there_is_anything_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("at once")

    monkeypatch.setattr(schedule_steps.FirstSchedule, "run", fail)
    with pytest.raises(ValueError, match="at once"):
        SearchState.of(OneMicrobatch.of(shape_workload("v")), Budget(1, deterministic=True), None).__class__.search(
            _state()
        )


def _state() -> SearchState:
    state = SearchState.of(OneMicrobatch.of(shape_workload("v")), Budget(1, deterministic=True), None)
    state.steps = [FirstSchedule()]
    return state


def test_compare_frontier_and_tuning_end_with_what_they_have() -> None:
    """The clock interrupts them at once, and at several moments when there is something, but not all: nothing that was
    told is better than what they then have."""
    asked = Request.of(chain(12), devices=4, num_microbatches=8, placement="one-to-one", time_limit=100.0)
    whole = Request(chain(12), 4, Batch(2, 4), device_counts=(2, 4), sizes=(1, 2), time_limit=100.0)

    def compared(limit: Limit, hear: Callable[..., None]) -> tuple[bool, int]:
        found = compare(asked, within=limit, progress=hear)
        return found.interrupted, min(row.iteration_ns for row in found.rows if row.fits)

    def tracked(limit: Limit, hear: Callable[..., None]) -> tuple[bool, int]:
        found = plan_frontier(whole, within=limit, progress=hear)
        return found.interrupted, min(point.iteration_ns for point in found.points)

    def tuned(limit: Limit, hear: Callable[..., None]) -> tuple[bool, int]:
        found = tune(asked, within=limit, progress=hear).result
        return found.interrupted, found.plan.predicted.iteration_ns

    for verb, moments in ((compared, (600, 900)), (tracked, (3_000, 4_000)), (tuned, (900, 1_100))):
        with pytest.raises((KeyboardInterrupt, PipeplanError)):
            verb(interrupting(1)[0], lambda *_: None)
        told = 0
        for most in moments:
            heard: list[int] = []

            def hear(what: str, best: int, *_: object, heard: list[int] = heard) -> None:
                heard.extend([best] if best else [])

            interrupted, best_ns = verb(interrupting(most)[0], hear)
            assert interrupted
            assert best_ns <= min(heard, default=best_ns)
            told += len(heard)
        assert told


# The first plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_microbatches", "memory_bytes"), [(8, None), (3, None), (8, 22_000), (8, 31_000)])
@pytest.mark.parametrize("split", [False, True])
def test_plain_schedules_are_the_rules_own(num_microbatches: int, memory_bytes: int | None, split: bool) -> None:
    row = {"input_grad_ns": 60, "weight_grad_ns": 50} if split else {"backward_ns": 110}
    profile = profile_of([CostRow(microbatch_size=1, forward_ns=50, activation_bytes=3000, **row)] * 4)
    workload = build_workload(
        profile,
        place(profile, "one-to-one", 4, microbatch_size=1),
        num_microbatches=num_microbatches,
        microbatch_size=1,
        memory_bytes=[memory_bytes] * 4,
        split_backward=split,
    )
    found = plain_look(workload)
    assert found is not None
    best = first_look(workload)
    assert best is not None
    assert found.scheduler == "1f1b"
    assert found.makespan_ns >= best.makespan_ns
    known = schedule_steps.CLASSIC["1f1b"].orders(OneMicrobatch.of(workload), task_graph(workload))
    if not split:
        assert [list(order) for order in found.orders] == known


@pytest.mark.parametrize("held", [1, 2, 3])
def test_a_first_plan_begins_with_as_many_forwards_as_there_is_room_for(held: int) -> None:
    profile = profile_of([CostRow(microbatch_size=1, forward_ns=50, backward_ns=110, activation_bytes=3000)] * 4)
    placement = place(profile, "one-to-one", 4, microbatch_size=1)

    def within(memory_bytes: int | None) -> Workload:
        return build_workload(
            profile, placement, num_microbatches=8, microbatch_size=1, memory_bytes=[memory_bytes] * 4
        )

    problem = OneMicrobatch.of(within(None))
    one = timed(problem, task_graph(within(None)), microbatch_by_microbatch(problem), "sequential")
    assert one is not None
    tight = within(one.fullest[0] + (held - 1) * 3000)
    assert plain_look(tight, names=("1f1b",)) is None
    found = plain_look(tight)
    assert found is not None
    assert found.fullest[0] <= one.fullest[0] + (held - 1) * 3000
    assert found.makespan_ns == one.makespan_ns if held == 1 else found.makespan_ns < one.makespan_ns


def test_requests_of_whole_blocks_have_a_table_and_a_first_plan_where_1f1b_does_not_fit() -> None:
    assert likely_choices(of(8, 8))
    asked = of(64, 64, 6_000, mini_batch=256, recompute=False, zero=0, time_limit=20.0)
    assert likely_choices(asked)
    assert not list(even_cuts(asked))
    assert any(even_cuts(asked, held=1))
    search = PlanSearch(asked, Budget(asked.time_limit, deterministic=True), None, STEPS)
    EvenCut().run(search)
    assert search.answer is not None


@pytest.mark.slow
def test_a_large_request_has_an_even_cut_first_and_says_where_none_fits() -> None:
    said: list[tuple[str, int]] = []
    tight = of(600, 8, 50_000, placement="one-to-one")
    search = PlanSearch(tight, Budget(math.inf), lambda what, best, *_: said.append((what, best)), STEPS)
    EvenCut(seconds=math.inf).run(search)
    assert search.best is None
    ((text, best),) = said
    assert best == 0
    assert "no even cut with GPipe or 1F1B was found that fits" in text

    roomy = of(600, 8, 10**9, placement="one-to-one", time_limit=0.0)
    found = search_plan(roomy, steps=without({"stage graphs", "published planners"}), within=Limit(math.inf))
    assert found.plan.provenance.options["stages"] == "even"
    assert found.timed_out


@pytest.mark.slow
def test_of_very_many_stages_a_shorter_pipeline_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fits; the longest one is looked at all the same, and what is asked for is not made shorter."""
    monkeypatch.setattr(candidates_module, "FIRST_STAGES", 40)

    def first(**given: Any) -> tuple[Plan, int]:
        """The first plan, and the stages of the largest pipeline that was looked at."""
        plans: list[Plan] = []

        def kept(search: PlanSearch) -> None:
            secure(search)
            plans.extend([] if search.made is None else [search.made.plan])

        with monkeypatch.context() as patched:
            patched.setattr(planning_steps, "_secure", kept)
            asked = of(400, 16, num_microbatches=64, microbatch_size=1, time_limit=1000.0, **given)
            search = PlanSearch(asked, Budget(asked.time_limit, clock=Hand()), None, STEPS)
            EvenCut(seconds=math.inf).run(search)
        assert check(plans[0], asked.profile, asked.cluster).valid
        return plans[0], max(len(trial.candidate.placement.stages) for trial in search.trials)

    secure = planning_steps._secure
    strategies: dict[str, Any] = {"circular": {"chunks": 9}, "bidirectional-v-shape": {}, "v-shape": {"chunks": 3}}
    for strategy, chunks in strategies.items():
        plan, most = first(placement=strategy, **chunks)
        assert len(plan.stages) <= 40 < most
        longest, most = first(placement=strategy, positions=16, **chunks)
        assert len(longest.stages) == most
    kept = 1000 * 400 // 16
    tight, most = first(placement="circular", chunks=9, memory_bytes=3 * kept)
    assert len(tight.stages) == most == 9 * 16, "there is room for no more than two parts of the model on a device"


@pytest.mark.parametrize("large", [False, True])
def test_on_a_busy_machine_a_first_plan_is_not_given_up_half_made(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on, and the process has worked longer than it would on any other day: of a large request what was
    done for the first plan would be lost, and nothing else comes sooner."""
    clock, worked = Hand(), [0.0]

    def slowly() -> float:
        clock.now += 0.02
        worked[0] += 0.016
        return clock.now

    monkeypatch.setattr(time, "process_time", lambda: worked[0])
    monkeypatch.setattr(planning_steps, "is_large", lambda _: large)
    asked = of(2_000, 8, time_limit=20.0)
    search = PlanSearch(asked, Budget(asked.time_limit, clock=slowly), None, STEPS)
    EvenCut().run(search)
    assert clock.now > 4.0, "its share of the time"
    assert worked[0] > 3.0
    assert (search.best is not None) == large, clock.now


@pytest.mark.parametrize("endless", [False, True])
def test_no_further_cut_of_a_large_request_is_begun_when_time_is_over(
    endless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second ends after all of the step's time; a cut that never ends is given up near the limit."""
    clock, tried = Hand(), list[float]()
    monkeypatch.setattr(time, "process_time", lambda: clock.now)

    def cuts(
        request: Request, begin: Callable[[], None], wanted: object, *, held: object
    ) -> Iterator[PlacementCandidate]:
        for _ in range(3):
            tried.append(clock.now)
            for _ in range(100 if endless else 3):
                clock.now += 1.0
                checkpoint()
            begin()
        yield from ()

    monkeypatch.setattr(planning_steps, "even_cuts", cuts)
    asked = of(2_000, 8, time_limit=20.0)
    search = PlanSearch(asked, Budget(asked.time_limit, clock=clock), None, STEPS)
    EvenCut().run(search)
    assert tried == ([0.0] if endless else [0.0, 3.0])
    assert clock.now == (16.0 if endless else 6.0)


@pytest.mark.parametrize("scheduler", ["auto", "1f1b"])
def test_fewer_blocks_than_devices_are_cut_for_no_pipeline_of_all(scheduler: str) -> None:
    few = profile_of([[CostRow(microbatch_size=1, forward_ns=100, backward_ns=200)]] * 3, parameters=[100] * 3)
    asked = Request.of(few, devices=8, placement="one-to-one", mini_batch=16, scheduler=scheduler, time_limit=10.0)
    assert list(even_cuts(asked)) == []
    with pytest.raises(
        PipeplanError, match="needs 8 stages, but profile 'test' has only 3 blocks; lower --devices to 3"
    ):
        search_plan(asked)


@pytest.mark.slow
def test_that_no_even_cut_fits_is_said_once() -> None:
    """Not again when all is tried with replicas that divide more."""
    said: list[str] = []
    tight = of(8, 8, 500, placement="one-to-one", time_limit=20.0)
    with pytest.raises(InfeasibleError):
        search_plan(tight, progress=lambda what, *_: said.append(what), within=Limit(20.0, clock=Hand()))
    assert len([what for what in said if "even cut" in what]) == 1


def test_what_is_enforced_ends_an_even_cut() -> None:
    limit = Limit(1.0)
    limit.started -= 10
    with limit.enforced(), pytest.raises(TimeUpError):
        list(even_cuts(of(600, 8)))


def test_a_very_long_run_on_a_given_placement_has_a_plan_before_it_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []

    def interrupted(step: FirstSchedule, state: SearchState) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FirstSchedule, "run", interrupted)
    asked = Request.of(shape("v", 4), num_microbatches=20_000, time_limit=100.0)
    found = search_plan(asked, progress=lambda what, best, *_: said.append(best))
    assert said
    assert found.plan.predicted.iteration_ns <= said[0]
    assert found.plan.loop is not None


def test_few_actions_of_many_entries_on_a_given_placement_have_a_plan_before_they_are_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of these runs on all devices: a plan of so many entries is not made whatever the time, as one of few is."""

    clock, begun = Hand(), list[float]()

    def endless(step: FirstSchedule, state: SearchState) -> None:
        begun.append(clock.now)
        clock.now = 1_000.0
        checkpoint()

    monkeypatch.setattr(FirstSchedule, "run", endless)
    asked = Request.of(shape("mllm", 64), num_microbatches=6, time_limit=100.0, split_backward=False)
    found = search_plan(asked, within=Limit(100.0, clock=clock))
    assert begun
    assert found.schedule.graph.num_actions < planning_steps.FEW_ENTRIES < sum(map(len, found.plan.programs))
    assert check(found.plan).valid


@one_in(2, "num_parted", [2, "autopipe"], first=1)
def test_a_first_plan_has_the_slices_that_are_asked_for(num_parted: int | str) -> None:
    """Their step comes after the search: of a large request there was none until then, and a limit left them out."""
    clock = Calls()
    asked = of(400, 16, 10**9, num_microbatches=128, microbatch_size=2, num_parted=num_parted, time_limit=1000.0)
    search = PlanSearch(asked, Budget(asked.time_limit, clock=clock), None, STEPS)
    with search.budget.enforced(), clock.counting():
        EvenCut().run(search)
    assert clock.most <= MOST_CALLS
    made = search.made
    assert made is not None
    assert made.schedule.scheduler == "1f1b+slices"
    assert max(stage.num_parted for stage in made.plan.stages) == num_sliced(made.schedule.workload) >= 2
    assert check(made.plan, asked.profile, asked.cluster).valid
    assert search.best is not None
    assert search.best.parted is None, "what is compared is not sliced yet"
    planning_steps._secure(search)
    assert search.made is made


@pytest.mark.parametrize("scheduler", ["auto", "repetend"])
def test_the_search_of_a_shorter_run_says_what_it_does(scheduler: str) -> None:
    """With its own times, and the whole run's best once there is one: no more than is known is said of that."""
    said: list[tuple[str, int]] = []
    asked = Request.of(
        shape("m", 4), num_microbatches=20_000, scheduler=scheduler, split_backward=False, time_limit=1.0
    )
    found = search_plan(replace(asked, deterministic=True), progress=lambda what, best, *_: said.append((what, best)))
    inside = [best for what, best in said if "of 20,000 micro-batches" in what]
    assert inside
    assert all(best >= found.plan.predicted.iteration_ns for best in inside if best or scheduler == "auto")
    assert said[-1][1] >= found.plan.predicted.iteration_ns
    assert min(best for _, best in said if best) == found.plan.predicted.iteration_ns


def long_run(name: str, scheduler: str, memory_bytes: int | None = None) -> Request:
    return Request.of(
        shape(name, 4), num_microbatches=100_000, scheduler=scheduler, split_backward=False, memory_bytes=memory_bytes
    )


def test_a_classic_schedule_of_a_very_long_run_has_a_plan_or_is_refused_at_once() -> None:
    """Nothing of a hundred thousand micro-batches is written out, or even made."""
    found = {}
    for scheduler in ("gpipe", "1f1b"):
        calls = counted(lambda name=scheduler: found.update({name: search_plan(long_run("v", name))}))  # type: ignore[misc]
        assert calls.all < 1_000_000
    plan = found["gpipe"].plan
    assert (plan.num_microbatches, plan.provenance.scheduler) == (100_000, "gpipe")
    assert plan.loop is not None
    with pytest.raises(InfeasibleError, match=r"device 0 .* needs 100TB"):
        search_plan(replace(long_run("v", "gpipe", 10**11), recompute=False))

    def refused() -> None:
        with pytest.raises(PipeplanError, match=r"nothing in it repeats .* lower --microbatches to 12,500 .* auto"):
            search_plan(long_run("circular", "gpipe"))

    assert counted(refused).all < 1_000_000


@pytest.mark.slow  # 5 s
def test_a_hundred_thousand_microbatches_of_the_shape_v_take_little() -> None:
    """The plan, and work for it, is as that of a thousand: searched, checked and simulated."""

    def work(count: int) -> tuple[list[int], int, Plan]:
        found = list[Plan]()
        asked = Request.of(shape("v", 4), num_microbatches=count, deterministic=True)
        calls = [counted(lambda: found.append(search_plan(asked).plan)).all]
        (plan,) = found
        calls.append(counted(lambda: check(plan, asked.profile).require("plan")).all)
        calls.append(counted(lambda: simulate(plan)).all)
        return calls, len(plan.model_dump_json()), plan

    few, bytes_of_few, _ = work(1_000)
    many, bytes_of_many, plan = work(100_000)
    assert all(one <= 1.5 * other for one, other in zip(many, few, strict=True)), (few, many)
    assert max(many) < 3_000_000, "some tenths of a second each"
    assert bytes_of_many < min(20_000, 1.2 * bytes_of_few)
    assert plan.num_microbatches == 100_000
    assert plan.predicted.iteration_ns == plan.predicted.lower_bound_ns == simulate(plan).iteration_ns


@pytest.mark.parametrize("seconds", [0.3, 5.0])
def test_a_first_plan_has_a_moment_after_a_signal(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that is known is not lost where its plan is soon made; else the search ends without one, at once."""
    clock, planned, begun = Hand(), planning_steps.planned, list[float]()
    limit = Limit(20.0, clock=clock)

    def slowly(*given: Any) -> Plan:
        begun.append(clock.now)
        limit.interrupt()
        for _ in range(250):
            clock.now += seconds / 250
            checkpoint()
        return planned(*given)

    monkeypatch.setattr(planning_steps, "planned", slowly)
    monkeypatch.setattr(planning_steps, "FEW_ENTRIES", 0)
    asked = request_of(shape("v", 4), "one-to-one", Batch(6, 1), num_devices=4, time_limit=20.0)
    if seconds < 0.5:
        found = search_plan(asked, within=limit)
        assert found.interrupted
        assert check(found.plan).valid
    else:
        with pytest.raises(KeyboardInterrupt):
            search_plan(asked, within=limit)
        assert clock.now <= begun[0] + 0.45
    assert len(begun) == 1, "what was given up is not begun again"


def test_the_solver_s_import_asks_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a second and more on a busy machine, and is made of parts that take less."""
    imported: list[str] = []

    def imports(name: str) -> None:
        imported.append(name)
        limit.interrupt()

    limit = Limit()
    with monkeypatch.context() as patched:
        for name in ("numpy", "pandas", "ortools.sat.python.cp_model_helper", "ortools.sat.python.cp_model"):
            patched.delitem(sys.modules, name, raising=False)
        patched.setattr(importlib, "import_module", imports)
        with limit.enforced(), pytest.raises(TimeUpError):
            load_solver()
    assert imported == ["numpy"]


@pytest.mark.parametrize("limited", [False, True])
def test_where_memory_is_limited_the_solver_does_not_probe(limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probing of cumulative constraints takes up to a minute there that no deterministic time counts."""
    load_solver()
    from ortools.sat.python import cp_model

    levels: list[int] = []

    def run(solver: cp_model.CpSolver, *rest: Any) -> int:
        levels.append(solver.parameters.cp_model_probing_level)
        return int(cp_model.UNKNOWN)

    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda solver, *rest: run(solver))
    model = cp_model.CpModel()
    if limited:
        model.add_cumulative([model.new_fixed_size_interval_var(0, 1, "one")], [1], 2)
    with suppress(RuntimeError):  # nothing was solved, so there is no answer to read
        solve(model, Budget(1.0, deterministic=True), 1.0)
    assert levels == [0 if limited else cp_model.CpSolver().parameters.cp_model_probing_level]


def first_of(asked: Request) -> PlanSearch:
    """A search after its first step."""
    search = PlanSearch(asked, Budget(asked.time_limit), None, STEPS)
    EvenCut(seconds=math.inf).run(search)
    return search


@pytest.mark.parametrize("scheduler", ["auto", "1f1b"])
def test_a_first_plan_with_splits_takes_little_work_however_many_devices_there_are(scheduler: str) -> None:
    """It is the whole table that grows with devices; named schedules are found in it, too."""

    def work(num_devices: int) -> int:
        asked = replace(
            Request.of(split(40), cluster=cluster(num_devices, 10**5), mini_batch=512, time_limit=1000.0),
            scheduler=scheduler,
        )
        found: list[PlanSearch] = []
        calls = counted(lambda: found.append(first_of(asked)))
        assert found[0].made is not None
        assert found[0].made.plan.provenance.options["stages"] == "even"
        return calls.all

    few, many = work(32), work(128)
    assert many <= 2 * few


@pytest.mark.parametrize("scheduler", ["1f1b", "gpipe"])
def test_a_first_plan_of_a_named_schedule_is_short(scheduler: str) -> None:
    """On 256 devices the longest pipelines, which come first elsewhere, write three times as much; on a thousand, a
    hundred times, which took minutes."""
    profile, many = split(80, 10**6), cluster(256, 2 * 10**8)
    asked = replace(Request.of(profile, cluster=many, mini_batch=4096, time_limit=1000.0), scheduler=scheduler)
    made = first_of(asked).made
    assert made is not None
    assert sum(map(len, made.plan.programs)) <= 2 * MOST_ENTRIES
    longest = next(even_cuts(replace(asked, scheduler="auto")))
    assert len(longest.placement.stages) > len(made.plan.stages)


@one_in(
    2,
    "strategy, shards",
    [("circular", 2), ("v-shape", 1), ("v-shape", 2), ("bidirectional", 1), ("bidirectional-v-shape", 2)],
    first=1,
)
def test_every_strategy_has_a_first_plan_that_is_short(strategy: str, shards: int) -> None:
    """Of several stages on a device it is GPipe in groups. The schedules that are known of the longest pipelines took
    minutes on a thousand devices, and where blocks are split nothing else was tried."""
    profile = split(280, 10**4)
    asked = Request.of(
        profile, cluster=cluster(16, 10**8), mini_batch=4096, placement=strategy, shards=shards, time_limit=1000.0
    )
    made = first_of(asked).made
    assert made is not None
    assert made.plan.placement == strategy
    assert sum(map(len, made.plan.programs)) <= 3 * MOST_ENTRIES
    assert check(made.plan, profile).valid


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        *(("v", "auto"), ("nn", "auto")),
        *(
            pytest.param(*own, marks=[pytest.mark.slow, pytest.mark.long])
            for own in (("v", "1f1b"), ("v", "gpipe"), ("k", "auto"), ("zbv", "auto"))
        ),
    ],
)
def test_stages_that_are_given_have_a_first_plan_however_many(
    name: str, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a thousand devices every other known schedule took minutes, and before them there was nothing."""

    def interrupted(*given: object, **others: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "look", interrupted)
    monkeypatch.setattr("pipeplan.planning.trials.search_schedule", interrupted)

    given: dict[str, Any] = {"scheduler": scheduler, "split_backward": False, "time_limit": 1000.0}
    asked = Request.of(shape(name, 48), num_microbatches=400, **given)
    found = list[Plan]()
    calls = counted(lambda: found.append(search_plan(asked).plan))
    (plan,) = found
    assert check(plan).valid
    assert plan.num_microbatches == 400
    assert sum(map(len, plan.programs)) <= 3 * MOST_ENTRIES
    assert scheduler in ("auto", plan.provenance.scheduler.removesuffix("+groups"))
    assert calls.all <= 300 * MOST_ENTRIES


def test_virtual_stages_have_a_first_plan() -> None:
    """No strategy is asked for by name, and those of one stage per device, which come first, are out."""
    asked = Request.of(split(80), cluster=cluster(64, 10**8), mini_batch=512, chunks=2, time_limit=1000.0)
    made = first_of(asked).made
    assert made is not None
    assert made.plan.placement == "circular"
    assert len(made.plan.stages) == 2 * len({stage.devices for stage in made.plan.stages})


def by_planner(monkeypatch: pytest.MonkeyPatch, *proposals: Callable[[], Any], num_devices: int = 16) -> Request:
    """A large request for what a planner by name chooses, which is these one after another."""
    own = replace(PLANNERS_BY_NAME["pipedream"], proposals=lambda request: iter(proposals))
    monkeypatch.setitem(PLANNERS_BY_NAME, "pipedream", own)
    asked = of(400, num_devices, 10**9, num_microbatches=16, microbatch_size=1, time_limit=20.0, planner="pipedream")
    return replace(asked, scheduler="1f1b")


@pytest.mark.filterwarnings("ignore:--planner pipedream had no plan")
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_planner_that_has_no_time_leaves_an_even_cut_that_says_so(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, heard = Hand(), list[tuple[str, int]]()
    limit = Limit(20.0, clock=clock)

    def endless() -> None:
        assert heard, "there is a plan before the planner begins"
        clock.now = 5.0 if interrupted else 1_000.0
        if interrupted:
            limit.interrupt()
        checkpoint()
        raise AssertionError("there was time left")

    asked = by_planner(monkeypatch, endless)
    found = search_plan(
        asked, within=limit, progress=lambda what, best, *_: heard.append((what, best)) if best else None, explain=True
    )
    assert found.interrupted == interrupted
    assert found.stands_in
    assert heard[0] == ("even one-to-one until --planner pipedream has one", found.plan.predicted.iteration_ns)
    assert found.plan.provenance.options["stages"] == "even"
    assert found.plan.provenance.choices["placement"] == "an even cut, for want of --planner pipedream's"
    assert any(note.startswith("--planner pipedream had no plan") for note in found.notes)
    assert check(found.plan, asked.profile, asked.cluster).valid


@slow_but("explain", [False, True], lambda explain: not explain, always)
def test_a_planner_s_own_plan_is_the_answer_however_much_longer_it_is(
    explain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the place of the even cut at once, in what is told as well."""
    heard = list[tuple[str, int]]()
    own = place(chain(400), "one-to-one", 4, microbatch_size=1).model_copy(update={"num_devices": 16})
    asked = by_planner(monkeypatch, lambda: PlacementCandidate(own, Batch(16, 1), False, "PipeDream"))
    found = search_plan(
        asked,
        within=Limit(20.0, clock=Hand()),
        progress=lambda what, best, *_: heard.append((what, best)),
        explain=explain,
    )
    assert not found.stands_in
    assert len(found.plan.stages) == 4
    assert heard[-1][1] == found.plan.predicted.iteration_ns > heard[0][1]
    assert "even" not in heard[-1][0]
    assert found.plan.provenance.choices["placement"] == "--planner pipedream"
    assert not found.notes


@pytest.mark.slow
def test_a_planner_that_finds_nothing_says_why_and_no_even_cut_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = by_planner(monkeypatch, lambda: InfeasibleError("nothing fits, says the paper"))
    with pytest.raises(InfeasibleError, match="says the paper"):
        search_plan(asked, within=Limit(20.0, clock=Hand()))


def test_a_schedule_that_would_be_too_long_does_not_rule_out_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing of GPipe repeats one run is found to be too long to be written: of such no other is tried."""
    monkeypatch.setattr(planning_steps, "MAX_WRITTEN", 1_000)
    tried = list[int]()

    def search(trial: Trial, *given: Any) -> None:
        tried.append(trial.num_actions)
        if trial.num_actions > 1_000:
            raise TooLongError("nothing repeats")
        searched(trial, *given)

    searched = Trial.search
    monkeypatch.setattr(Trial, "search", search)
    rows = [[CostRow(microbatch_size=k, forward_ns=k, backward_ns=k, activation_bytes=1) for k in (1, 2, 4)]] * 24
    asked = Request.of(profile_of(rows), devices=8, mini_batch=200, placement="one-to-one", time_limit=1000.0)
    made = first_of(replace(asked, scheduler="gpipe")).made
    assert made is not None
    assert made.schedule.scheduler == "gpipe"
    assert tried == [3_200, 800]


def test_where_only_more_sharding_fits_a_plan_with_it_is_kept_for_want_of_another() -> None:
    """It is what an interruption ends with, and no other candidate is measured by it."""
    row = CostRow(microbatch_size=1, forward_ns=100, backward_ns=200, activation_bytes=10)
    profile = profile_of([[row]] * 16, parameters=[1_000] * 16)
    asked = Request.of(profile, devices=32, mini_batch=128, memory_bytes=7_000, replicas=8, time_limit=1000.0)
    search = first_of(asked)
    assert search.best is None
    assert search.answer is search.spare is not None
    limit = Limit(math.inf)
    found = search_plan(asked, within=limit, progress=lambda *_: limit.interrupt())
    assert found.interrupted
    assert all(stage.zero > 1 and stage.replicas > 1 for stage in found.plan.stages)
    assert check(found.plan, profile).valid


def test_a_chain_of_too_many_ways_to_be_cut_is_cut_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every range is kept for every stage: that was 15 GB for ten thousand blocks on a thousand devices."""
    asked = Request.of(split(40), cluster=cluster(16, 3_000), mini_batch=16, shards=2, replicas=1)
    choice = next(
        each.choice
        for each in uniform_choices(asked)
        if (each.choice.strategy, each.choice.positions) == ("one-to-one", 8)
    )
    assert fitting_chain(asked, choice).cut() is not None
    monkeypatch.setattr(recomputation, "MOST_TIMES", 100)
    assert fitting_chain(asked, choice).cut() is None
    candidate = placed(asked, choice)
    assert isinstance(candidate, PlacementCandidate)
    assert {len(stage.blocks) for stage in candidate.placement.stages} <= {4, 5, 6}


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_left_is_not_made_after_an_interruption(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that nobody had time for are counted, not partitioned: that took seven seconds after a signal."""
    made = list[int]()

    def slowly(*given: Any) -> Iterator[Any]:
        clock.now += 1.0
        checkpoint()
        made.append(1)
        yield from ()

    clock = Hand()
    monkeypatch.setattr("pipeplan.planning.candidates.recomputing", slowly)
    limit = Limit(100.0, clock=clock)
    blocks, devices = (220, 20) if deterministic else (12, 4)  # where work is counted only large ones begin evenly cut
    asked = Request.of(
        chain(blocks), devices=devices, memory_bytes=10**6, time_limit=100.0, deterministic=deterministic
    )
    found = search_plan(asked, within=limit, progress=lambda *_: limit.interrupt())
    assert found.interrupted
    assert found.candidates.left > 0
    assert not made


def taking_long(scheduler: str) -> Request:
    """A large request for a repetend, or for what rules order."""
    asked = of(400, 16, 10**9, num_microbatches=16, microbatch_size=1, time_limit=20.0)
    return replace(asked, scheduler=scheduler, rules=named_rules("1f1b") if scheduler == "rules" else None)


@pytest.mark.slow  # 3 to 6 s each
@pytest.mark.filterwarnings("ignore:--(scheduler repetend|rules 1f1b) had no plan")
@pytest.mark.parametrize(
    ("scheduler", "flag", "interrupted"),
    [
        pytest.param("repetend", "--scheduler repetend", True, marks=pytest.mark.long),
        ("rules", "--rules 1f1b", False),
        pytest.param("repetend", "--scheduler repetend", False, marks=pytest.mark.long),
        pytest.param("rules", "--rules 1f1b", True, marks=pytest.mark.long),
    ],
)
def test_a_schedule_that_has_no_time_leaves_a_plain_one_that_says_so(
    scheduler: str, flag: str, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, heard = Hand(), list[tuple[str, int]]()
    limit = Limit(20.0, clock=clock)

    def endless(*_: Any, **__: Any) -> None:
        assert heard, "there is a plan before the schedule that was asked for is begun"
        clock.now = 5.0 if interrupted else 1_000.0
        if interrupted:
            limit.interrupt()
        checkpoint()
        raise AssertionError("there was time left")

    monkeypatch.setattr(Trial, "search", endless)
    asked = taking_long(scheduler)
    found = search_plan(
        asked, within=limit, progress=lambda what, best, *_: heard.append((what, best)) if best else None
    )
    assert found.interrupted == interrupted
    assert found.stands_in
    assert heard[0] == (f"even one-to-one until {flag} has one", found.plan.predicted.iteration_ns)
    made = found.plan.provenance
    assert made.choices["schedule"] == f"{made.scheduler}, for want of {flag}'s"
    assert not made.rules
    assert made.scheduler in ("1f1b", "gpipe", "1f1b+groups", "gpipe+groups")
    assert any(note.startswith(f"{flag} had no plan") for note in found.notes)
    assert check(found.plan, asked.profile, asked.cluster).valid


@pytest.mark.slow
@pytest.mark.long
def test_what_rules_order_is_the_answer_once_it_is_there() -> None:
    found = search_plan(taking_long("rules"), within=Limit(20.0, clock=Hand()))
    assert not found.stands_in
    assert found.plan.provenance.scheduler == "rules: 1f1b"
    assert found.plan.provenance.choices["schedule"] == "--rules 1f1b"
    assert not any("had no plan" in note for note in found.notes)
