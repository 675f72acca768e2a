"""Forwards alone: the least period in memory by brute force, zero-bubble shapes, what is held, what check refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import Block, Edge, PlacedStage, Placement, Plan, Profile
from pipeplan.interop.export import exported
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.repetend import least_period
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.pattern import one_after_another
from pipeplan.workload.bounds import period_bound
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph

SHAPES = ("v", "x", "m", "mllm", "nn", "k", "circular", "zbv")


def problem_of(profile: Profile, num_microbatches: int = 8, memory: int | None = None) -> OneMicrobatch:
    placement = profile.placement
    assert placement is not None
    limits = None if memory is None else [memory] * placement.num_devices
    sizes = {"num_microbatches": num_microbatches, "microbatch_size": 1}
    return OneMicrobatch.of(build_workload(profile, placement, memory_bytes=limits, **sizes), require_room=False)


# The least period ---------------------------------------------------------------------------------------------------


def require_zero_bubble(name: str, num_devices: int) -> None:
    problem = problem_of(shape(name, num_devices, costs=ShapeCosts(inference=True)), num_devices)
    least = least_period(problem, Budget(60.0, deterministic=True), 60.0)
    assert least.proved
    assert least.bound_ns == max(problem.work) == min(filter(None, problem.work))


@pytest.mark.parametrize("num_devices", [4])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_repeat_without_bubbles(name: str, num_devices: int) -> None:
    require_zero_bubble(name, num_devices)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("name", SHAPES)
def test_large_shapes_repeat_without_bubbles(name: str, num_devices: int) -> None:
    require_zero_bubble(name, num_devices)


@st.composite
def small_problems(draw: st.DrawFn) -> OneMicrobatch:
    """Three or four forwards on two devices, in a chain or a tree, with times, lags and bytes of a few units."""
    count = draw(st.integers(3, 4))
    devices = draw(st.lists(st.sampled_from([(0,), (1,), (0, 1)]), min_size=count, max_size=count))
    parents = [None if not n else draw(st.integers(0, n - 1)) for n in range(count)]
    few = st.integers(1, 3)
    blocks = [
        Block.of(f"b{n}", draw(few) * 1e-9, None, activation=draw(few), workspace=draw(st.integers(0, 2)), gradients=0)
        for n in range(count)
    ]
    blocks = [
        block.model_copy(update={"costs": (block.costs[0].model_copy(update={"shards": len(group)}),)})
        for block, group in zip(blocks, devices, strict=True)
    ]
    edges = [
        Edge(source=f"b{parent}", target=f"b{n}", transfer_ns=draw(st.integers(0, 1)))
        for n, parent in enumerate(parents)
        if parent is not None
    ]
    stages = tuple(PlacedStage(blocks=(f"b{n}",), devices=group, shards=len(group)) for n, group in enumerate(devices))
    placement = Placement(strategy="drawn", num_devices=2, stages=stages)
    profile = Profile.of("drawn", blocks, edges=edges, placement=placement, mode="inference")
    problem = problem_of(profile, 4, draw(st.none() | st.integers(4, 9)))
    assume(one_after_another(problem, 1) is not None)
    return problem


def fits_in_time(problem: OneMicrobatch, starts: Sequence[int], period: int) -> bool:
    """Whether an endless run with these first starts never exceeds memory, moment by moment."""
    far = period * (1 + max(starts) // period + 10)
    for device, capacity in enumerate(problem.capacity):
        for moment in range(far, far + period) if capacity is not None else ():
            held = 0
            for x, start in enumerate(starts):
                if device in problem.devices[x] and (moment - start) % period < problem.durations[x]:
                    held += problem.workspace[x]
            for hold in problem.workload.holds:
                if device in problem.devices[hold.source]:
                    end = max(starts[target] + problem.durations[target] for target in hold.targets)
                    held += hold.size * ((moment - starts[hold.source]) // period - (moment - end) // period)
            if capacity is not None and held > capacity:
                return False
    return True


def starts_of(problem: OneMicrobatch, period: int) -> Iterator[tuple[int, ...]]:
    """All first starts, each less than a period after it could run, that leave devices one action at a time.

    Another period later would only hold more for longer.
    """

    def overlap(x: int, start: int, y: int, other: int) -> bool:
        shared = not set(problem.devices[x]).isdisjoint(problem.devices[y])
        return shared and (
            (start - other) % period < problem.durations[y] or (other - start) % period < problem.durations[x]
        )

    def after(starts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        x = len(starts)
        if x == problem.num_operations:
            yield starts
            return
        early = max((starts[y] + problem.durations[y] + lag for y, lag in problem.incoming[x]), default=0)
        for start in range(early, early + (period if x else 1)):
            if not any(overlap(x, start, y, other) for y, other in enumerate(starts)):
                yield from after((*starts, start))

    return after(())


@settings(max_examples=12)
@given(small_problems())
def test_the_least_period_in_memory_is_that_of_all_starts(problem: OneMicrobatch) -> None:
    most = sum(problem.durations) + sum(lag for _, _, lag in problem.edges)
    least = next(
        period
        for period in range(max(problem.work), most + 1)
        if any(fits_in_time(problem, starts, period) for starts in starts_of(problem, period))
    )
    found = least_period(problem, Budget(30.0, deterministic=True), 30.0)
    assert found.pattern is not None
    assert found.pattern.repetend_ns == least == found.bound_ns
    assert period_bound(problem) <= least


# What is held -------------------------------------------------------------------------------------------------------


def test_what_a_forward_gives_is_held_until_the_next_has_run() -> None:
    problem = problem_of(shape("v", 4, costs=ShapeCosts(inference=True, activation_bytes=10)))
    graph = task_graph(problem.workload)
    orders = CLASSIC["1f1b"].orders(problem, graph)
    assert [memory.peak_bytes for memory in peak_memory(graph, orders)] == [20, 20, 20, 10]


@pytest.mark.parametrize(("name", "memory"), [*((name, None) for name in SHAPES), ("nn", 20), ("k", 20), ("zbv", 20)])
def test_plans_of_shapes_are_checked(name: str, memory: int | None) -> None:
    profile = shape(name, 4, costs=ShapeCosts(inference=True, activation_bytes=10))
    request = Request.of(profile, num_microbatches=6, memory_bytes=memory, time_limit=2.0, deterministic=True)
    plan = search_plan(request).plan
    assert plan.is_inference
    assert {operation.kind for operation in plan.operations} == {"F"}
    assert check(plan, profile).valid
    if memory is not None:
        assert max(each.peak_bytes for each in plan.predicted.memory) <= memory


def test_what_runs_ahead_needs_memory() -> None:
    """Nothing holds a quick device back: as many of its outputs wait as the slow one after it is behind."""
    blocks = [Block.of("quick", "1ms", activation=10, gradients=0), Block.of("slow", "3ms", gradients=0)]
    stages = tuple(PlacedStage(blocks=(block.id,), devices=(n,)) for n, block in enumerate(blocks))
    placement = Placement(strategy="one-to-one", num_devices=2, stages=stages)
    profile = Profile.of("uneven", blocks, placement=placement, mode="inference")
    asked = {"num_microbatches": 6, "time_limit": 2.0, "deterministic": True}
    plan = search_plan(Request.of(profile, **asked)).plan
    assert [each.peak_bytes for each in plan.predicted.memory] == [50, 0]
    with pytest.raises(InfeasibleError, match=r"run ahead, and what they give then waits .* raise --memory to 50B"):
        search_plan(Request.of(profile, memory_bytes=40, **asked))


def test_blocks_of_a_stage_hand_on_inside_of_it() -> None:
    blocks = [Block.of(f"b{n}", "1ms", activation=10 + n, workspace=5, gradients=0) for n in range(4)]
    profile = Profile.of("chain", blocks, mode="inference")
    stages = (PlacedStage(blocks=("b0", "b1", "b2"), devices=(0,)), PlacedStage(blocks=("b3",), devices=(1,)))
    placement = Placement(strategy="one-to-one", num_devices=2, stages=stages)
    workload = build_workload(profile, placement, num_microbatches=2, microbatch_size=1)
    first, last = workload.operations
    assert (first.acquire_bytes, first.workspace_bytes) == (12, 5 + 10 + 11)
    assert (last.acquire_bytes, last.workspace_bytes) == (13, 5)
    assert [hold.targets for hold in workload.holds] == [(1,), (1,)]


def test_classic_schedules_of_forwards() -> None:
    profile = shape("circular", 4, costs=ShapeCosts(inference=True))
    problem = problem_of(profile, 8)
    graph = task_graph(problem.workload)
    applying = {name for name, classic in CLASSIC.items() if classic.applies(problem) is None}
    assert applying == {"gpipe", "interleaved-1f1b", "looped-bfs"}
    order = [graph.label(task) for task in CLASSIC["interleaved-1f1b"].orders(problem, graph)[1]]
    assert order[:9] == ["1F0", "1F1", "1F2", "1F3", "5F0", "5F1", "5F2", "5F3", "1F4"]
    assert CLASSIC["zb-h1"].applies(problem) == "it needs backwards"


# What is refused ----------------------------------------------------------------------------------------------------


def plan_of(profile: Profile) -> Plan:
    return search_plan(
        Request.of(profile, num_microbatches=4, scheduler="gpipe", time_limit=2.0, deterministic=True)
    ).plan


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ({"split_backward": True}, "--split-backward yes"),
        ({"recompute": True}, "--recompute all"),
        ({"zero": 1}, "--zero 1"),
        ({"num_parted": 2}, "--slices 2"),
        ({"late_inputs": True}, "--late-inputs yes"),
    ],
)
def test_what_only_training_has_is_refused(asked: dict[str, object], flag: str) -> None:
    profile = shape("v", 4, costs=ShapeCosts(inference=True))
    with pytest.raises(UsageError, match=f"^{flag} is of training, and profile 'shape-v' is of inference"):
        Request.of(profile, num_microbatches=4, **asked)


def test_trainers_are_not_told_of_forwards() -> None:
    plan = plan_of(shape("v", 4, costs=ShapeCosts(inference=True)))
    with pytest.raises(UsageError, match=r"^plan 'shape-v' is of inference, and Megatron-LM trains; choose vllm"):
        exported(plan, "megatron")


def test_a_plan_of_training_is_none_of_inference_and_the_other_way_round() -> None:
    forwards, whole = shape("v", 4, costs=ShapeCosts(inference=True)), shape("v", 4)
    for plan, profile in ((plan_of(forwards), whole), (plan_of(whole), forwards)):
        problems = [f"{each.place} {each.message}" for each in check(plan, profile).problems]
        assert f"mode is {plan.mode}, the profile is of {profile.mode}" in problems


def test_check_refuses_forwards_that_say_they_train() -> None:
    plan = plan_of(shape("v", 4, costs=ShapeCosts(inference=True)))
    told = check(plan.model_copy(update={"mode": "training"}))
    assert "has operations F; a stage of training runs F and B, or F, I and W" in {
        each.message for each in told.problems
    }
    own = (replace(plan.operations[0], release_bytes=5), *plan.operations[1:])
    told = check(plan.model_copy(update={"operations": own}))
    assert [each.rule for each in told.problems] == ["balance"]


def test_check_counts_memory_by_time() -> None:
    plan = plan_of(shape("v", 4, costs=ShapeCosts(inference=True, activation_bytes=10)))
    low = tuple(replace(each, memory_bytes=19) for each in plan.devices)
    told = check(plan.model_copy(update={"devices": low}))
    assert {each.rule for each in told.problems} == {"memory"}
    assert len(told.problems) == 3
