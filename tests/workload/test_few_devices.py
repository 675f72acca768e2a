"""Bounds by a few devices: the figures of known cells, and never above the best of all schedules of small problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings

from builders.problems import problems, with_tails
from builders.shapes import unit_problem, zero_bubble
from builders.small_plans import KINDS, small_problem
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.hoisting import Outermost
from pipeplan.schedule.search import search_schedule
from pipeplan.schedule.state import fitting
from pipeplan.search_constants import MOST_KNOWN
from pipeplan.workload.bounds import period_bound, strong_iteration_bound
from pipeplan.workload.compiled_span import CompiledSpan, compile_loops
from pipeplan.workload.few_device_bounds import DeviceAlone, FewDeviceBounds
from pipeplan.workload.few_devices import FewDevices
from pipeplan.workload.least_span import LeastSpan
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.shared_time import WithoutSharedTime
from pipeplan.workload.task_graph import NEVER, task_graph
from references.best_makespan import best_makespan
from references.least_period import least_period_by_enumeration
from references.solved_iteration import solved_iteration
from references.tails import best_iteration
from support.marks import one_in, some_of


def least(problem: OneMicrobatch, devices: Sequence[int], more: Sequence[int] = ()) -> int:
    """The optimum of a relaxation, led by what is known of each device alone."""
    few = FewDevices.of(problem, devices, more)
    assert few is not None
    spans = {}
    for entry, device in zip(few.entries, (*devices, *more), strict=True):
        alone = FewDevices.of(problem, (device,))
        if alone is not None and alone.entries[0] is not None and entry is not None:
            known = DeviceAlone(alone, alone.entries[0])
            for _ in range(min(6, few.count)):
                known.learn()
            spans[entry] = known.spans(few.count)
    search = LeastSpan(few, spans)
    search.advance(NEVER, NEVER)
    assert search.done
    return search.bound


@pytest.mark.parametrize(
    ("name", "size", "memory", "devices", "bound"),
    [
        ("v", (8, 32), 0.5, (0,), 15_620),
        ("v", (8, 32), 0.5, (0, 6), 15_980),
        ("v", (8, 32), 0.75, (0,), 11_340),
        pytest.param("v", (8, 32), 0.75, (0, 6), 11_620, marks=pytest.mark.slow),
        ("v", (8, 32), 1, (0,), 10_580),
        ("v", (4, 12), 0.5, (0,), 6_060),
        ("v", (4, 12), 0.5, (0, 1, 2, 3), 6_380),
        ("v", (4, 12), 0.75, (0,), 4_440),
        pytest.param("v", (4, 12), 0.75, (0, 1, 2, 3), 4_660, marks=[pytest.mark.slow, pytest.mark.long]),
        ("v", (16, 64), 0.5, (0,), 30_900),
        pytest.param("v", (16, 64), 0.75, (0,), 22_500, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("zbv", (8, 32), 0.5, (7,), 11_170, marks=pytest.mark.slow),
        ("zbv", (3, 6), 0.5, (2,), 2_680),
        ("zbv", (3, 6), 0.5, (0, 1, 2), 2_780),
        pytest.param("zbv", (4, 8), 0.5, (2, 3), 3_310, marks=pytest.mark.slow),
    ],
)
def test_what_few_devices_do_at_best(
    name: str, size: tuple[int, int], memory: float, devices: tuple[int, ...], bound: int
) -> None:
    problem = zero_bubble(name, *size, memory)
    assert least(problem, devices) == bound


@pytest.mark.parametrize(
    ("name", "size", "memory", "devices", "more", "bound"),
    [
        ("v", (8, 32), 0.5, (0,), (6,), 15_980),
        ("v", (8, 32), 0.75, (0,), (6,), 11_620),
        ("v", (4, 12), 0.5, (0,), (1, 2), 6_380),
        ("v", (4, 12), 0.75, (0,), (1, 2), 4_660),
        ("zbv", (4, 8), 0.5, (3,), (2,), 3_310),
        ("zbv", (4, 12), 0.5, (3,), (2,), 4_670),
    ],
)
def test_what_others_wait_for_on_more_devices_proves_as_much(
    name: str, size: tuple[int, int], memory: float, devices: tuple[int, ...], more: tuple[int, ...], bound: int
) -> None:
    assert least(zero_bubble(name, *size, memory), devices, more) == bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "more", "optimum"),
    [(0.5, (1, 5, 6), 16_240), pytest.param(0.75, (1, 2, 6), 11_740, marks=pytest.mark.long)],
)
def test_a_chain_of_eight_devices_is_proved(memory: float, more: tuple[int, ...], optimum: int) -> None:
    """These makespans were known (``benchmarks/known_tools.py``), but not that none is shorter."""
    assert least(zero_bubble("v", 8, 32, memory), (0,), more) == optimum


@pytest.mark.parametrize(
    ("name", "devices", "count", "room", "bound"),
    [
        ("m", 4, 12, 2, 124),
        ("m", 4, 12, 3, 96),
        ("m", 32, 64, 12, 908),
        ("m", 32, 64, 24, 572),
        ("mllm", 4, 12, 2, 148),
        ("nn", 8, 24, 3, 360),
        ("k", 16, 32, 3, 464),
    ],
)
def test_shared_time_is_cut_out(name: str, devices: int, count: int, room: int, bound: int) -> None:
    problem = unit_problem(name, devices, count, room)
    left = WithoutSharedTime.of(problem)
    assert left is not None
    assert strong_iteration_bound(problem) == bound == left.all_ns + strong_iteration_bound(left.problem)
    assert period_bound(problem) >= left.each_ns + period_bound(left.problem)


def test_with_all_devices_real_the_middle_blocks_count() -> None:
    left = WithoutSharedTime.of(unit_problem("mllm", 4, 12, 2))
    assert left is not None
    assert left.all_ns + least(left.problem, (0, 1, 2, 3)) == 153


def least_of(few: FewDevices | None) -> int:
    """The optimum of a relaxation."""
    assert few is not None
    search = LeastSpan(few, {})
    search.advance(NEVER, NEVER)
    return search.bound


def never_above(problem: OneMicrobatch) -> bool | None:
    """No bound of any devices is above the best schedule, and that of all of them is it, if nothing follows.

    Whether those of a search are it; None where nothing fits.
    """
    best = best_makespan(problem)
    if best is None:
        return None
    follows = problem.workload.has_tail
    best = best_iteration(problem) if follows else best
    everything = range(problem.num_devices)
    for size in (1, 2, problem.num_devices):
        for devices in combinations(everything, size):
            bound = least_of(FewDevices.of(problem, devices))
            assert bound <= best
            assert len(devices) < problem.num_devices or follows or bound == best
    ends_with_the_best(problem, best)
    for device in everything:
        alone = least_of(FewDevices.of(problem, (device,)))
        assert (
            alone
            <= least_of(FewDevices.of(problem, (device,), [each for each in everything if each != device]))
            <= best
        )
    assert strong_iteration_bound(problem) <= best
    for most_known in (1, 2):  # what is said of more micro-batches than are known exactly
        for proofs in grown(problem, most_known):
            assert proofs.bound <= best
    proved = grown(problem)
    for proofs in proved:
        assert proofs.bound <= best
        assert proofs.bound > 0 or not any(map(proofs._may_fill, everything))
    return max(proofs.bound for proofs in proved) == best


def ends_with_the_best(problem: OneMicrobatch, best: int) -> None:
    """All devices together have a schedule, too; without shared time it is as short if no message takes any."""
    few = FewDevices.of(problem, range(problem.num_devices))
    assert few is not None
    search = LeastSpan(few, {})
    search.advance(NEVER, NEVER)
    assert search.sequence is not None
    found = [few.orders(problem, search.sequence)]
    found += [proofs.orders for proofs in grown(problem) if proofs.orders is not None]
    graph, messages = task_graph(problem.workload), any(lag for *_, lag in problem.edges)
    for number, orders in enumerate(found):
        timed = fitting(graph, orders)
        assert timed is not None
        assert graph.iteration(timed[1]) == best or problem.workload.has_tail or (number and messages)


def grown(problem: OneMicrobatch, most_known: int = MOST_KNOWN, most_labels: int = NEVER) -> list[FewDeviceBounds]:
    """All that a search could know by few devices, or by about so many labels."""
    found = FewDeviceBounds.all_of(problem, most_known=most_known)
    for proofs in found:
        while proofs.num_labels < most_labels and proofs.grow():
            pass
    return found


BY_HAND = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(0)]
"""Of seeds that are run by hand, beside other work: however long they take says nothing of the bounds."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seeds",
    [
        range(2),
        pytest.param(range(2, 10), marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(range(10, 2_000), marks=BY_HAND),
    ],
)
def test_random_shapes_against_every_schedule(kind: str, seeds: range) -> None:
    found = [never_above(small_problem(kind, Random(f"{kind} {seed}"))) for seed in seeds]
    assert found.count(True) >= len(found) / 3, "the rest is where no device may fill, or nothing fits"
    assert found.count(None) <= len(found) / 10


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("nn", "mllm")])
@pytest.mark.parametrize(
    "seeds",
    [
        range(1),
        pytest.param(range(1, 2), marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(range(2, 200), marks=BY_HAND),
    ],
)
def test_random_plans_against_a_solver(kind: str, seeds: range) -> None:
    """The solver looks at the plan as it is given, and at more micro-batches; NN and MLLM take it many seconds."""
    known = 0
    for seed in seeds:
        small = small_problem(kind, Random(f"{kind} {seed}"))
        if (solved := solved_iteration(small)) is not None:
            known += 1
            if small.workload.has_tail:
                assert solved <= best_iteration(small)
            else:
                assert solved == best_makespan(small)
        larger = small_problem(kind, Random(f"{kind} {seed}"), larger=True)
        if (solved := solved_iteration(larger)) is not None:
            known += 1
            assert strong_iteration_bound(larger) <= solved
            for most_known in (2, MOST_KNOWN):
                assert all(proofs.bound <= solved for proofs in grown(larger, most_known, 2_000))
    assert known >= len(seeds), "half of them are solved, of each two"


@pytest.mark.parametrize("seed", [11, 53])
def test_branches_that_are_ahead_are_no_head_of_later_microbatches(seed: int) -> None:
    """Of two branches that meet one may have run for later micro-batches while the other waits for room."""
    never_above(small_problem("k", Random(f"k {seed}")))


def in_step(few: FewDevices, spans: Mapping[int, Sequence[int]], entry: int | None, most: int) -> None:
    """The compiled search proves the same after every few labels."""
    plain, compiled = LeastSpan(few, spans, entry), CompiledSpan(compile_loops(), few, spans, entry)
    while plain.num_labels < most and not plain.done:
        for search in (plain, compiled):
            search.advance(7, 10**9)
        assert (plain.bound, plain.num_labels, plain.done) == (compiled.bound, compiled.num_labels, compiled.done)
    assert plain.sequence == compiled.sequence


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 4), marks=pytest.mark.long)])
def test_compiled_loops_look_at_the_same_labels(kind: str, seeds: range) -> None:
    pytest.importorskip("numba")
    for seed in seeds:
        problem = small_problem(kind, Random(f"{kind} {seed}"))
        for devices in [(0,), (0, 1), tuple(range(problem.num_devices))]:
            few = FewDevices.of(problem, devices)
            assert few is not None
            in_step(few, {}, None, 2_000)
            if (entry := few.entries[0]) is not None:
                known = DeviceAlone(few, entry)
                for _ in range(few.count):
                    known.learn()
                in_step(few.after(entry), {}, entry, 2_000)
                in_step(few, {entry: known.spans(few.count)}, None, 2_000)


@pytest.mark.slow
def test_compiled_loops_make_room() -> None:
    """Of a search with 8,501 labels, and one that is to prove nothing from some end on."""
    pytest.importorskip("numba")
    few = FewDevices.of(zero_bubble("zbv", 4, 12, 0.5), (2, 3))
    assert few is not None
    whole, part = (CompiledSpan(compile_loops(), few, {}) for _ in range(2))
    whole.advance(NEVER, NEVER)
    assert (whole.bound, whole.done) == (4_670, True)
    part.advance(NEVER, 4_500)
    assert (part.bound, part.done) == (4_500, True)
    assert part.num_labels < whole.num_labels


@settings(max_examples=some_of(40), suppress_health_check=list(HealthCheck))
@given(problems(max_stages=3, num_microbatches=2))
def test_random_stages_against_every_schedule(problem: OneMicrobatch) -> None:
    never_above(problem)


@pytest.mark.slow
@settings(max_examples=some_of(50), suppress_health_check=list(HealthCheck))
@given(with_tails(max_stages=2, num_microbatches=2))
def test_what_follows_counts(problem: OneMicrobatch) -> None:
    """The found schedule ends no sooner than any devices say, sums and steps included."""
    found = search_schedule(problem.workload, Budget(5, deterministic=True))
    for proofs in FewDeviceBounds.all_of(problem):
        while proofs.grow():
            pass
        assert proofs.bound <= found.iteration_ns


@pytest.mark.parametrize("memory", [0.5, 0.75])
def test_few_microbatches_say_something_of_any_number(memory: float) -> None:
    few = FewDevices.of(zero_bubble("v", 4, 12, memory), (0,))
    assert few is not None
    assert few.entries[0] == 0
    exact, known = DeviceAlone(few, 0), DeviceAlone(few, 0)
    for _ in range(12):
        exact.learn()
    for _ in range(6):
        known.learn()
    assert all(known.span(n) <= exact.span(n) for n in range(13))
    assert 6 * known.period < known.span(10**6) * 6 / 10**6 < 6 * known.period * 1.01
    assert known.period <= exact.period


def test_room_says_of_many_microbatches_what_few_do_not() -> None:
    """MLLM on 64 devices: 24 of 128 fit, each for 256; five times so many, then 8 whose backwards begin after 253."""
    problem = unit_problem("mllm", 64, 128, memory=24)
    (proofs,) = FewDeviceBounds.all_of(problem, compiled=False)
    while proofs.bound == 0:
        proofs.grow()
    shared = 4 * 128
    assert proofs.bound == 5 * 256 + 253 + 8 * 3 + shared == 2_069
    assert proofs.period == Fraction(256, 24) + 4


def test_the_period_is_of_any_unroll() -> None:
    """V on 4 devices, forward 1, backward 3, room for 3: three micro-batches in 16."""
    (proofs,) = FewDeviceBounds.all_of(unit_problem("v", 4, 9, memory=3))
    while proofs.grow():
        pass
    assert proofs.period * 3 == 16


@one_in(2, "kind", ["v", "v split", "m"], first=1)
def test_no_period_is_below_that_of_the_bound(kind: str) -> None:
    """By enumeration of all repetends of one micro-batch, whatever few micro-batches are learned exactly."""
    open_ = 0
    for seed in range(20):
        problem = small_problem(kind, Random(f"{kind} {seed}"))
        if problem.num_operations > 6:
            continue
        least = least_period_by_enumeration(problem)
        for most_known in (1, 2, MOST_KNOWN):
            for proofs in grown(problem, most_known):
                assert proofs.period <= least
                open_ += proofs.period > max(problem.work)
    assert open_, "of some problems the bound is above work alone"


@pytest.mark.parametrize(
    ("name", "devices", "count", "room", "best"),
    [
        ("mllm", 4, 12, 2, 153),
        pytest.param("mllm", 8, 24, 3, 377, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("nn", 8, 24, 3, 380, marks=pytest.mark.slow),
    ],
)
def test_all_devices_together_have_a_schedule(name: str, devices: int, count: int, room: int, best: int) -> None:
    """What they prove is reached: no search has found these on 8 devices."""
    problem = unit_problem(name, devices, count, room)
    if devices > 4:
        pytest.importorskip("numba")
        compile_loops()
    (proofs,) = FewDeviceBounds.all_of(problem)
    while proofs.orders is None and proofs.grow(best * 21 // 20):
        pass
    assert proofs.orders is not None
    graph = task_graph(problem.workload)
    timed = fitting(graph, proofs.orders)
    assert timed is not None
    assert graph.iteration(timed[1]) == proofs.bound == best


def test_the_outermost_shared_blocks_are_hoisted() -> None:
    """On 8 devices with room for 3 the blocks of all devices run first and last, and a pipeline that never waits."""
    problem = unit_problem("m", 8, 24, 3)
    outermost = Outermost.of(problem)
    assert outermost is not None
    assert [len(each) for each in (outermost.first, outermost.last, outermost.inner)] == [1, 1, 16]
    left = outermost.without(problem)
    assert left.capacity == problem.capacity
    assert len(left.workload.stages) == 8
    found = search_schedule(left.workload, Budget(20, deterministic=True))
    graph = task_graph(problem.workload)
    timed = fitting(graph, outermost.around(found.graph.on_devices(found.orders), 24))
    assert timed is not None
    assert graph.iteration(timed[1]) == found.makespan_ns + 48 == strong_iteration_bound(problem) == 312


def test_what_holds_memory_is_not_hoisted() -> None:
    assert Outermost.of(unit_problem("v", 4, 8, 3)) is None
    assert Outermost.of(unit_problem("k", 4, 8, 3)) is None


@pytest.mark.slow
def test_a_closed_cell_ends_the_search() -> None:
    found = search_schedule(zero_bubble("v", 8, 32, 1).workload, Budget(60, deterministic=True))
    assert found.makespan_ns == found.bound_ns == 10_580
    found = search_schedule(unit_problem("m", 4, 12, 2).workload, Budget(20, deterministic=True))
    assert found.makespan_ns == found.bound_ns == 124
    assert found.period_bound_ns == 10
