"""Frontiers end in time, whatever they do when it is over: by a clock that moves with every question or step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from builders.chains import chain_profile
from pipeplan.costs.layouts import ANY, Layout, Tensor
from pipeplan.costs.resharding import Resharding, _Edges
from pipeplan.errors import InfeasibleError, SearchTimeoutError, TooLargeError
from pipeplan.examples import model
from pipeplan.partition.per_block_sharding import GroupSplits
from pipeplan.planning import frontier as frontiers
from pipeplan.planning import infeasibility, plan_frontier, sharding_frontier
from pipeplan.planning.candidates import even_cuts, uniform_choices
from pipeplan.planning.frontier import _tracked, _words
from pipeplan.planning.infeasibility import ExplainShortage, shortage
from pipeplan.planning.plan_frontier import PlanPoint, _counted, _FrontierSearch, _point, _why, chains, changes_that_do
from pipeplan.planning.request import Batch, Request, Splitting
from pipeplan.planning.sharding_frontier import SCHEDULER, Splits, costs_of_splits, split_frontier
from pipeplan.planning.steps import STEPS
from pipeplan.planning.trials import PlanSearch, Trial
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.sharding import bounds, operators, tracking
from pipeplan.time_limit import Limit, TimeUpError, checkpoint, shielded, time_is_up
from pipeplan.units import MAX_BYTES, format_bytes, rounded_up

pytestmark = pytest.mark.counted


class Hand:
    """A clock that is moved by hand, or by each question for the time."""

    def __init__(self, per_question: float = 0.0) -> None:
        self.now, self.per_question = 0.0, per_question

    def __call__(self) -> float:
        self.now += self.per_question
        return self.now


def split_model() -> Request:
    profile = model("gpt2-124m", microbatch_sizes=(1, 2), shards=(1, 2))
    return Request(profile, 2, Batch(2, 1), device_counts=(2,), sizes=(1, 2), time_limit=math.inf)


def test_points_of_one_stage_are_described_as_their_plans_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without making them, which nobody would have time for after the last point."""
    request = split_model()
    splits = split_frontier(request, Splitting())
    for index in {0, len(splits.points) // 2, len(splits.points) - 1}:
        described, plan = splits.described(request, index), splits.plan(request, index)
        figures = splits.points[index].memory_bytes, 0, splits.points[index].time_ns
        words = (
            _words(PlanPoint(request, *figures, partial(splits.plan, request, index), workload, scheduler))
            for workload, scheduler in ((described, SCHEDULER), (plan.workload, plan.provenance.scheduler))
        )
        assert len(set(words)) == 1
        assert frontiers._ways(described) == frontiers._ways(plan.workload)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(sharding_frontier, "plan_of_strategy", fail)
    search = _FrontierSearch(Limit(), iter(()), rough=[2])
    search.one_stage(request)
    assert search.best
    assert all(_words(point).startswith("1 stage on ") for point in search.best)


@pytest.mark.parametrize("left", [0.0, 1.0, 30.0])
def test_what_was_not_tried_is_counted_for_as_long_as_there_is_time(left: float) -> None:
    """At most two seconds, and no more than the command has left, of which imports and reading took a part."""
    clock = Hand()
    whole = Limit(60.0, clock=clock)
    clock.now = 60.0 - left

    def partitions() -> Any:
        while True:
            clock.now += 0.25
            yield Counted()

    found = _FrontierSearch(Limit.part_of(whole, 60.0), partitions(), interrupted=True)
    found.limit.reserved = 2.0
    number = _counted(found, 2.0)
    assert clock.now <= 60.0 - left + min(2.0, left) + 0.25
    assert number == max(1, min(2.0, left) / 0.25), "the first is counted before anybody asks"


class Counted:
    """A partition that is only counted."""

    candidate = None


def test_changes_are_looked_for_as_long_as_there_is_time() -> None:
    """One question takes longer than there is; none is begun after it."""
    clock, asked = Hand(), list[Request]()

    def fits(request: Request) -> bool:
        asked.append(request)
        clock.now += 4.0
        return False

    request = Request(chain_profile(4, placed=False), 2, Batch(64, 1), device_counts=(2,))
    assert changes_that_do(request, fits, Limit(10.0, clock=clock)) == []
    assert (len(asked), clock.now) == (3, 12.0)
    assert {each.num_devices for each in asked} == {2, 4}, "both kinds of change have their half"


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("done", [0, 1, 3])
def test_strategies_that_are_not_tracked_in_time_are_left_out(
    done: int, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly ``done`` of three are; of the others each would take a minute, and more roughly."""
    clock, roughly = Hand(), list[float]()
    within = Limit(20.0, clock=clock)
    monkeypatch.setattr(Limit, "wait", lambda *_: None)

    def split(request: Request, splitting: Splitting, *, as_far: bool = False, **given: Any) -> Any:
        assert (as_far, given["model"]) == (splitting.within > 0, "costs")
        if request.num_devices <= done:
            return Tracked(request.num_devices)
        if splitting.within:
            roughly.append(clock.now)
        for _ in range(600):
            clock.now += 0.1
            if interrupted and clock.now > 3:
                within.interrupt()
            checkpoint()
        raise AssertionError("a minute")

    monkeypatch.setattr(frontiers, "split_frontier", split)
    monkeypatch.setattr(frontiers, "costs_of_splits", lambda *_: "costs")
    request = Request(chain_profile(4, placed=False), 3, Batch(64, 1), device_counts=(1, 2, 3), time_limit=20.0)
    if done:
        found, ended = _tracked(request.by_devices, Splitting(), within, None)
        assert ([each.num_devices for each in found], ended) == (list(range(1, done + 1)), done < 3)
    else:
        error: type[BaseException] = KeyboardInterrupt if interrupted else SearchTimeoutError
        with pytest.raises(error):
            _tracked(request.by_devices, Splitting(), within, None)
    assert clock.now <= (3.6 if interrupted and not done else 3.2 if interrupted else 20.2)
    if done < 3:
        assert (roughly[0], clock.now > 19) == (0.0, not interrupted), "there is something from the first on"
    if done < 3 and not interrupted:
        assert 13.9 < roughly[1] < 14.2, "the last 30 % are for rough ones"


@pytest.mark.parametrize("ending", ["signal", "limit"])
@pytest.mark.parametrize("factor", [1.005, 1.5])
def test_what_was_tracked_roughly_first_is_kept(factor: float, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a signal it is the answer at once; at the limit, too, if nothing can be nearer, else it is tracked again."""
    clock, asked = Hand(), list[tuple[bool, float]]()
    within = Limit(20.0, clock=clock)
    heard: list[int] = []

    def split(request: Request, splitting: Splitting, *, as_far: bool = False, **given: Any) -> Any:
        assert given["model"] == "costs"
        asked.append((as_far, clock.now))
        clock.now += 0.4
        if as_far:
            return Tracked(request.num_devices, factor if len(asked) == 1 else 1.004)
        for _ in range(600):
            clock.now += 0.1
            if ending == "signal" and clock.now > 3:
                within.interrupt()
            checkpoint()
        raise AssertionError("a minute")

    def hear(_: str, best: int, *__: object) -> None:
        heard.append(best)

    monkeypatch.setattr(frontiers, "split_frontier", split)
    monkeypatch.setattr(frontiers, "costs_of_splits", lambda *_: "costs")
    request = Request(chain_profile(4, placed=False), 3, Batch(64, 1), device_counts=(3,), time_limit=20.0)
    (found,), ended = _tracked(request.by_devices, Splitting(), within, hear)
    assert ended
    assert heard == [17], "of what there is while the rest is tracked"
    if ending == "signal":
        assert (len(asked), found.factor) == (2, factor)
        assert clock.now < 3.2
    elif factor < 1.01:
        assert (len(asked), found.factor) == (2, factor)
        assert clock.now > 19.9, "no part of the time is kept for what is there"
    else:
        assert (len(asked), found.factor) == (3, 1.004)
        assert 13.9 < asked[-1][1] < 14.2


def test_costs_are_worked_out_once_and_in_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take 18 of 20 s, and what is tracked a minute: there is what a frontier has so far, in little more time."""
    clock, worked_out = Hand(), list[int]()
    within = Limit(20.0, clock=clock)
    real = sharding_frontier.costs_of_splits

    def costs(request: Request, splitting: Splitting) -> Any:
        worked_out.append(request.num_devices)
        for _ in range(180):
            clock.now += 0.1
            checkpoint()
        with shielded():
            return real(request, splitting)

    monkeypatch.setattr(frontiers, "costs_of_splits", costs)
    monkeypatch.setattr(tracking, "cheapest", slowly(clock, bounds.cheapest))
    (request,) = split_model().by_devices
    (found,), ended = _tracked([replace(request, time_limit=20.0)], Splitting(), within, None)
    exact = split_frontier(request, Splitting())
    assert (worked_out, ended) == ([2], True)
    assert clock.now < 21.0
    assert found.factor > exact.factor == 1
    assert {found.points[0].memory_bytes, found.points[-1].time_ns} == {
        exact.points[0].memory_bytes,
        exact.points[-1].time_ns,
    }


def test_costs_ask_for_the_time_as_often_as_they_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 16 configurations, 256 moves, or the distances from one layout are worked out between two questions."""
    done, most = Counter[str](), Counter[str]()

    def counted(name: str, work: Any) -> Any:
        def counting(*given: Any) -> Any:
            done[name] += 1
            most[name] = max(most[name], done[name])
            return work(*given)

        return counting

    def clock() -> float:
        done.clear()
        return 0.0

    monkeypatch.setattr(operators, "_priced", counted("ways", operators._priced))
    monkeypatch.setattr(_Edges, "distances", counted("sources", _Edges.distances))
    monkeypatch.setattr(Resharding, "_price_of_step", counted("prices", Resharding._price_of_step))
    monkeypatch.setattr(Resharding, "_crowds", counted("sends", Resharding._crowds))
    (request,) = replace(split_model(), num_devices=8, device_counts=(8,)).by_devices
    with Limit(1.0, clock=clock).enforced():
        costs_of_splits(request, Splitting(whole_blocks=False))
        Resharding(None, 16).times(Tensor((ANY, ANY, ANY), 1000), [Layout()], [Layout()])
    assert (most["ways"], most["sources"], most["sends"]) == (16, 1, 1)
    assert 0 < most["prices"] <= 256


def slowly(clock: Hand, work: Any) -> Any:
    """The same, and each takes a third of a second."""

    def done(*given: Any) -> Any:
        checkpoint()
        clock.now += 0.3
        return work(*given)

    return done


class Tracked:
    """What is tracked, as far as anybody asks here."""

    points = (SimpleNamespace(time_ns=17),)

    def __init__(self, num_devices: int, factor: float = 1.0) -> None:
        self.num_devices, self.factor = num_devices, factor


def test_a_search_without_a_plan_keeps_time_to_say_what_would_do() -> None:
    request = Request.of(chain_profile(4, placed=False), devices=2, num_microbatches=2, memory_bytes=1)
    for seconds, kept in ((100.0, 0.5), (2.0, 0.1)):
        search = PlanSearch(request, Budget(seconds), None, STEPS)
        assert sum(step.reserved(search) for step in STEPS if hasattr(step, "reserved")) == kept
    seen: list[float] = []
    search = PlanSearch(request, Budget(100.0), lambda *_: None, STEPS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PlanSearch, "_try_all", lambda self, *_: seen.append(self.budget.reserved))
        search.run(lambda _: iter(()))
    assert seen[0] == 0.5


def test_what_would_do_is_looked_for_no_longer_than_the_clock_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that gives the process no time to work: every question for the time is 10 ms later."""
    clock = Hand(0.01)
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    monkeypatch.setattr(infeasibility, "Budget", partial(Budget, clock=clock))
    request = Request.of(chain_profile(40, placed=False), devices=4, num_microbatches=2, memory_bytes=1)
    shortage(request, InfeasibleError("no"), 0.5, ExplainShortage())
    assert clock.now < 1.5


def test_patience_by_work_has_an_end_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    clock = Hand()
    limit = Limit(10.0, clock=clock)
    limit.wait(1.0, 5.0, at_most=2.0)
    overs = []
    for now in (10.5, 11.5, 12.5):
        clock.now = now
        overs.append(limit.over)
    assert overs == [False, False, True]
    limit.wait(1.0, 5.0)
    assert not limit.over, "what must be there is waited for"
    limit.wait_no_longer()
    assert limit.over


def test_a_part_has_what_is_left_of_the_whole() -> None:
    clock = Hand()
    whole = Limit(10.0, clock=clock)
    clock.now = 4.0
    assert Limit.part_of(whole, 8.0).seconds == 6.0
    assert Limit.part_of(whole, 5.0).seconds == 5.0
    clock.now = 40.0
    late = Limit.part_of(whole, 5.0)
    assert (late.seconds, late.clock) == (0.0, clock)
    with pytest.raises(TimeUpError), late.enforced():
        checkpoint()


def test_points_of_large_requests_are_of_alike_replicas() -> None:
    """Which are written once: devices of a workload are then fewer than those that are asked for."""
    request = Request.of(chain_profile(8, placed=False), devices=512, replicas=256, mini_batch=512)
    trial = Trial.of(request, next(even_cuts(request)))
    trial.look_plainly()
    assert len(trial.ways[0].devices) < 512
    found = _point(request, trial, [])
    assert found is not None
    better: Any = SimpleNamespace(place=(512, 0, 1))
    assert _point(request, trial, [better]) is None


def test_frontiers_keep_no_tables_of_all_runs_of_very_many_blocks() -> None:
    """Of ten thousand each had 800 MB, and all of them took eight seconds without a look at the time."""
    request = Request.of(chain_profile(2_001, placed=False), devices=2)
    (found, *_) = chains(request, GroupSplits(request.profile, request.cluster))
    assert isinstance(found.candidate, TooLargeError)
    assert "at most 2,000 blocks and not 2,001" in str(found.candidate)


@pytest.mark.parametrize(("written", "kept"), [(0, 0.0), (1, 3.0), (math.inf, 6.0)])
def test_plans_that_are_written_are_made_before_the_limit(written: float, kept: float) -> None:
    """The first takes three seconds, and so is each of the others taken to; the counting has its own time."""
    clock = Hand()
    search = _FrontierSearch(Limit(60.0, clock=clock), iter(()), written=written)

    def make() -> Any:
        clock.now += 3.0

    for memory, iteration in ((10, 20), (20, 10)):
        search.keep(PlanPoint(split_model(), memory, 0, iteration, make, SimpleNamespace(), "1f1b"))  # type: ignore[arg-type]
    assert len(search.best) == 2
    assert clock.now == (3.0 if written else 0.0)
    search.written = 0
    search.limit.reserved, reserved = 0.0, search.limit.reserved
    search.keep(search.best[0])
    assert reserved - search.limit.reserved == kept


@pytest.mark.parametrize(("written", "left"), [(0, 0.0), (1, 3.0), (2, 6.0)])
def test_plans_of_strategies_that_are_written_are_made_before_the_limit(
    written: float, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first takes three seconds. What writing itself is kept of the whole is kept beside that."""
    clock, track = Hand(), frontiers.split_frontier
    whole = Limit(60.0, clock=clock)
    whole.reserved = 0.75

    def tracked(*arguments: Any, as_far: bool = False, **named: Any) -> Any:
        while not as_far and not time_is_up():
            clock.now += 0.125
        checkpoint()
        return track(*arguments, as_far=as_far, **named)

    def make(*_: object) -> None:
        clock.now += 3.0

    monkeypatch.setattr(frontiers, "split_frontier", tracked)
    monkeypatch.setattr(Splits, "plan", make)
    asked = replace(split_model(), time_limit=60.0)
    _, ended = _tracked([asked], Splitting(), whole, None, written)
    assert ended
    assert clock.now == pytest.approx(60.0 - 0.75 - left, abs=0.25)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_frontier_says_whether_a_signal_or_the_time_limit_ended_it(stopped: bool) -> None:
    """At the first plan that is heard of."""
    clock = Hand()
    within = Limit(60.0, clock=clock)
    asked = Request.of(chain_profile(4, placed=False), devices=2, mini_batch=64, device_counts=(1, 2), time_limit=60.0)

    def end(*_: object) -> None:
        if stopped:
            within.interrupt()
        clock.now = 100.0

    found = frontiers.search_frontier(asked, within=within, progress=end)
    assert (found.interrupted, found.stopped) == (True, stopped)
    (note,) = (note for note in found.notes if "partitions tried" in note)
    assert ("; interrupted (" in note, "; time ran out (" in note) == (stopped, not stopped)


def test_a_frontier_that_ran_out_of_time_says_what_the_leanest_layout_needs() -> None:
    """By its closed form, where that is more than the limit; else only that there was no time."""
    profile = model("gpt2-124m", microbatch_sizes=(1, 2), shards=(1, 2))
    asked = Request.of(profile, devices=2, mini_batch=4, memory_bytes=10**9, device_counts=(1, 2))
    found = _FrontierSearch(Limit(0.0, clock=Hand()), iter(()), interrupted=True)
    least = min(each.least_bytes for each in uniform_choices(asked.within(MAX_BYTES)))
    for limit, needs in ((10**9, True), (MAX_BYTES, False)):
        error = _why(asked.within(limit), found)
        assert isinstance(error, SearchTimeoutError)
        assert (f"needs about {format_bytes(rounded_up(int(least)))} " in str(error)) == needs
        assert "raise --time-limit" in str(error)


def test_nearly_half_of_the_time_is_for_the_search_on_the_most_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that there is room on; the others end at once. What is left of that part is for fewer devices."""
    clock, spent = Hand(), list[tuple[int, float]]()

    def spend(_: _FrontierSearch, request: Request, workers: None) -> None:
        seconds = request.time_limit if request.num_devices > 1 else 0.0
        spent.append((request.num_devices, seconds))
        clock.now += seconds

    monkeypatch.setattr(_FrontierSearch, "_search", spend)
    monkeypatch.setattr(plan_frontier, "unfit_by_state", lambda asked: "no room" if asked.num_devices == 1 else None)
    request = Request(chain_profile(4, placed=False), 4, Batch(64, 1), device_counts=(1, 2, 4, 8), time_limit=100.0)
    _FrontierSearch(Limit(100.0, clock=clock), iter(())).search_all(request.by_devices, None)
    assert spent == [(1, 0.0), (8, pytest.approx(45.0)), (4, pytest.approx(7.5)), (2, pytest.approx(7.5))]
