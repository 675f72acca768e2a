"""Time limits: on clocks that count how often they are looked at, so that no machine is too slow."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest
from ortools.sat.python import cp_model

from builders.chains import chain_workload
from pipeplan._face import search
from pipeplan.costs.blocks import StageCost
from pipeplan.examples import shape
from pipeplan.partition import recomputation
from pipeplan.partition.chain.costs import Array
from pipeplan.partition.chain.kernel import least_split
from pipeplan.partition.recomputation import FittingChain, Holding
from pipeplan.schedule import classic
from pipeplan.schedule.cpsat.solver import Budget, solve
from pipeplan.schedule.search import search_schedule
from pipeplan.time_limit import INTERRUPTS, CountedClock, Limit, TimeUpError, checked, checked_by, checkpoint, shielded
from pipeplan.workload.bounds import strong_iteration_bound
from pipeplan.workload.memory import fits
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.pairs import TaskPairs
from pipeplan.workload.steady_state.repetend import _RepetendFinder
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, right_behind, task_graph

MANY = 100_000
"""Checkpoints that no limit here lets anybody pass."""


def counting() -> Callable[[], float]:
    """A clock that is a second further whenever somebody looks."""
    return map(float, itertools.count()).__next__


def checkpoints(limit: Limit, within: AbstractContextManager[None] | None = None) -> int:
    """How many checkpoints a loop passes."""
    passed = 0

    def loop() -> None:
        nonlocal passed
        with within or limit.enforced():
            for _ in range(MANY):
                checkpoint()
                passed += 1

    with pytest.raises(TimeUpError) as up:
        loop()
    assert up.value.limit is limit
    return passed


def test_every_thread_has_limits_of_its_own() -> None:
    """Both are on their way when the first checkpoint is passed."""
    together = Barrier(2, timeout=60)

    def work(seconds: int) -> int:
        limit = Limit(seconds, clock=counting())
        together.wait()
        return checkpoints(limit)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, (100, 10_000))) == [99, 9_999]
    checkpoint()  # none here


def test_a_solver_ends_when_its_process_has_worked_enough() -> None:
    """Of a question that takes it hours, with no limit by the wall's clock."""
    model = cp_model.CpModel()
    holes = [[model.new_bool_var("") for _ in range(30)] for _ in range(31)]
    for pigeon in holes:
        model.add_bool_or(pigeon)
    for hole in zip(*holes, strict=True):
        for one, other in itertools.combinations(hole, 2):
            model.add_bool_or(one.negated(), other.negated())
    model.add_assumption(holes[0][0])  # or presolve finds cliques
    answer = solve(model, Budget(0.3, clock=time.process_time), 3600.0)
    assert answer.feasible is None


def test_searches_at_once_have_limits_of_their_own() -> None:
    """Each finds what it finds alone, in deterministic time: the short one takes none of the long one's."""

    def makespan(seconds: float) -> int:
        budget = Budget(seconds, deterministic=True)
        found = search_schedule(workload, budget).makespan_ns
        spent.append((seconds, round(budget.spent, 3)))
        return found

    workload = chain_workload(4, 10, memory_bytes=3000, split=(1, 1))
    limits, spent = (0.05, 2.0), list[tuple[float, float]]()
    alone = [makespan(each) for each in limits]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(makespan, limits)) == alone
    assert sorted(spent[:2]) == sorted(spent[2:])
    assert spent[0][1] < spent[1][1]


def test_no_limit_ends_nothing() -> None:
    checkpoint()
    with Limit().enforced():
        checkpoint()


def test_of_limits_within_limits_the_outermost_that_is_over_ends_the_work() -> None:
    outer = Limit(20, clock=counting())
    with outer.enforced():
        assert checkpoints(Limit(5, clock=counting())) == 4
        checkpoint()  # the outer one still has time

    def loop() -> None:
        with outer.enforced(), Limit(1_000, clock=counting()).enforced():
            for _ in range(MANY):
                checkpoint()

    with pytest.raises(TimeUpError) as up:
        loop()
    assert up.value.limit is outer


def test_an_interruption_leaves_no_time() -> None:
    limit = Limit(10, clock=counting())
    limit.check()
    assert not limit.expired
    limit.interrupt()
    assert limit.expired
    assert limit.remaining == 0
    with pytest.raises(TimeUpError):
        limit.check()


@pytest.mark.parametrize(("interrupted", "passes"), [(True, range(1, 6)), (False, range(20, 40))])
def test_what_finishes_has_a_moment_after_an_interruption(interrupted: bool, passes: range) -> None:
    """Of 5 seconds here, and without one all that the limit leaves."""
    limit = Limit(40, clock=counting())
    if interrupted:
        limit.interrupt()
    assert checkpoints(limit, limit.finishing(5)) in passes


def test_all_that_follows_an_interruption_shares_the_same_seconds() -> None:
    now = [0.0]
    limit = Limit(40, clock=lambda: now[0])
    part = Limit(20, whole=limit, clock=limit.clock)
    part.interrupt()
    now[0] = 3.0
    part.interrupt()
    assert limit.interrupted_at == part.interrupted_at == 0.0
    with limit.finishing(5):
        checkpoint()
    now[0] = 6.0
    with pytest.raises(TimeUpError), limit.finishing(5):
        checkpoint()


def test_items_are_checked_by_their_sizes() -> None:
    limit, items = Limit(3, clock=counting()), iter([1] * 10 + [10] * 10)
    with pytest.raises(TimeUpError), limit.enforced():
        list(checked_by(items, int, 10))
    assert 0 < len(list(items)) < 10
    assert list(checked_by("abc", len, 2)) == ["a", "b", "c"]


def test_parts_of_a_budget_spend_what_is_the_whole_s() -> None:
    budget = Budget(10, 7, deterministic=True)
    with budget.share(4) as part:
        assert (part.seconds, part.seed, part.deterministic) == (4, 7, True)
        part.charge(3)
        assert part.remaining == 1
    assert budget.remaining == 7
    with budget.share(4) as part:
        part.interrupt()
    assert budget.expired


def test_a_limit_sent_to_a_process_ends_at_the_same_time() -> None:
    limit = Limit(1_000)
    sent = pickle.loads(pickle.dumps(limit))
    assert (sent.seconds, sent.started) == (limit.seconds, limit.started)


def test_what_ends_work_with_what_there_is() -> None:
    """Ctrl-C, what schedulers send, and a terminal that is closed."""
    assert set(INTERRUPTS) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@pytest.mark.parametrize("number", INTERRUPTS)
def test_the_first_signal_is_heard_and_the_second_one_interrupts(number: signal.Signals) -> None:
    before, limit = signal.signal(number, signal.default_int_handler), Limit()
    try:
        with limit.hearing_interrupts():
            os.kill(os.getpid(), number)
            assert limit.expired
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_part_spends_the_whole_s_time_and_both_are_interrupted() -> None:
    now = [0.0]
    whole = Limit(10, clock=lambda: now[0])
    now[0] = 8.0
    part = Limit(5, whole=whole, clock=whole.clock)
    assert part.remaining == 2.0
    whole.reserved = 1.5
    assert part.remaining == 0.5
    part.reserved = 0.25
    assert part.remaining == 0.25  # what a part keeps is kept of what the whole leaves it, too
    part.patience = 3.0
    now[0] = 11.0
    assert part.expired
    part.check()  # which is patient
    part.interrupt()
    assert whole.interrupted


def test_what_is_shielded_is_ended_by_nothing() -> None:
    limit = Limit(0)
    with limit.ended():
        with shielded():
            checkpoint()
        checkpoint()
        raise AssertionError("which ends here")
    assert list(checked("abc")) == ["a", "b", "c"]
    with limit.enforced(), pytest.raises(TimeUpError):
        list(checked("abc", 1))


def test_other_threads_hear_no_signals() -> None:
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with Limit().hearing_interrupts():
            assert signal.getsignal(signal.SIGINT) is before

    with ThreadPoolExecutor(1) as others:
        others.submit(work).result()


def looks(work: Callable[[], object]) -> int:
    """How often work asks whether there is time; it ends at the last of these looks, too."""
    clock = itertools.count()
    with Limit(MANY, clock=lambda: float(next(clock))).enforced():
        work()
    asked = next(clock) - 1
    with pytest.raises(TimeUpError), Limit(asked, clock=counting()).enforced():
        work()
    return asked


def test_the_pairs_of_long_runs_are_made_a_part_at_a_time() -> None:
    """However alike stages are; each edge's pairs are as if it were alone."""
    workload = chain_workload(24, 2**14)
    graph = task_graph(workload)
    pairs = TaskPairs.of(workload, graph.offsets)
    numbers = np.arange(2**14)
    sources, targets, lags = zip(*workload.edges, strict=True)
    for found, firsts in ((pairs.sources, sources), (pairs.targets, targets)):
        assert np.array_equal(found, np.concatenate([graph.offsets[first] + numbers for first in firsts]))
    assert np.array_equal(pairs.lags, np.repeat(lags, len(numbers)))
    assert looks(lambda: TaskPairs.of(workload, graph.offsets)) > len(pairs.sources) // 2**18 >= 2


LongRun = tuple[TaskGraph, list[list[int]]]


@pytest.fixture(scope="module")
def long_run() -> LongRun:
    """Half a million actions of 64 devices, all forwards before all backwards."""
    graph = task_graph(chain_workload(64, 2**12, memory_bytes=2**40))
    tasks = [range(begin, end) for begin, end in itertools.pairwise(graph.offsets)]
    return graph, [[*tasks[device], *tasks[127 - device]] for device in range(64)]


@pytest.mark.slow
def test_starts_of_long_runs_are_found_a_part_at_a_time(long_run: LongRun) -> None:
    """Level by level, and task by task: what waits for what, and then when it starts."""
    graph, orders = long_run
    levels, pairs = 2 * (2**12 + 63), len(graph.pairs.sources)
    assert looks(lambda: earliest_starts(graph, orders)) > levels // 256 + 64 // 16
    assert looks(lambda: replace(graph).pairs) > 2 * (pairs // 2**18)
    assert looks(lambda: replace(graph).successors) > graph.num_tasks // 65_536 + pairs // 65_536 + 2 * (pairs // 2**18)
    assert looks(lambda: right_behind(graph, orders[:1] * 16, [0] * graph.num_tasks)) > graph.num_tasks // 65_536 + 16


def test_the_memory_of_long_runs_is_added_up_some_devices_at_a_time(long_run: LongRun) -> None:
    graph, orders = long_run
    assert looks(lambda: fits(graph, orders)) == graph.num_tasks // 2**18


def test_repetends_are_looked_for_a_part_of_the_run_at_a_time() -> None:
    graph = task_graph(chain_workload(1, 2_000))
    order = [task for m in range(2_000) for task in (m, 2_000 + m)]
    finder = _RepetendFinder.of(graph, [order], earliest_starts(graph, [order]))
    assert finder is not None
    assert looks(lambda: [*finder.cuts(1)]) >= len(finder.steps) // 256


def test_the_bounds_of_many_devices_are_found_one_after_another() -> None:
    problem = OneMicrobatch.of(chain_workload(12, 24))
    strong_iteration_bound(problem)  # what it keeps of the problem is not found twice
    assert looks(lambda: strong_iteration_bound(problem)) >= 12


def test_cuts_into_many_stages_may_end_between_any_of_them() -> None:
    def cost(_: int, begins: Array, ends: Array) -> Array:
        return ends - begins

    assert looks(lambda: least_split(cost, 512, [0] * 256)) > 256 // 16 + 256 // 64
    assert looks(lambda: least_split(cost, 4096, [0, 0])) > 2 * 4096 * 2048 // 2**20
    assert least_split(cost, 4096, [0]) == (0,)


def test_what_long_chains_recompute_is_looked_up_a_part_of_their_ranges_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each range's least time for each of four stages, of unlike speeds; some fit only where all is recomputed."""
    stages = [Holding(at, at, 4 - at, at, 60, 1 - at / 8) for at in range(4)]
    kept = [StageCost(100 + at, 200, activation_bytes=1) for at in range(64)]
    again = [StageCost(100 + at, 300 + at) for at in range(64)]
    chain = FittingChain([(False, kept), (True, again)], [False] * 64, stages)
    whole = chain._table(2**40)
    monkeypatch.setattr(recomputation, "TIMES_AT_ONCE", 2**9)
    assert looks(lambda: chain._table(2**40)) >= 64 * 65 // 2 * 4 // 2**9
    parts = chain._table(2**40)
    assert whole is not None
    assert parts is not None
    assert np.array_equal(whole.times, parts.times)
    assert len(set(map(tuple, whole.times))) == 4


@pytest.mark.counted
def test_a_counted_clock_counts_questions_and_what_the_solver_works() -> None:
    """The solver ends by its own count, on one worker, and never by seconds; what it worked is charged."""
    limit = Limit(0.01)
    questions = 0
    while not limit.expired:
        questions += 1
    assert 5 <= questions <= 10
    found = []
    for _ in range(2):
        classic._remembered.clear()  # what was made before asks for no time
        limit = Limit(0.5, clock=CountedClock(0.001))
        result = search(shape("m", 4), microbatches=6, within=limit, time_limit=0.5)
        found.append((result.plan, limit.clock()))
    assert found[0] == found[1]
    assert found[0][1] > 0.5
