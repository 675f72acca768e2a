"""PipeDream's, Piper's and DAPPLE's planners: against all partitions of small graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import profiles
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import CostRow, PlacedStage, Profile
from pipeplan.partition.baselines import dapple, downsets, latency, pipedream, piper
from pipeplan.partition.chain.autopipe import timeline
from pipeplan.partition.chain.costs import StageTimes
from pipeplan.partition.problem import Partition, PartitionProblem, Way
from references.dapple import plain_latency, plain_plan

MINI_BATCH, MICRO_BATCH, DEVICES = 8, 4, 4
RECOMPUTE = (False, True)
KILOBYTE = 1_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a block: times per sample in ns, and bytes."""

    forward: int
    backward: int
    activation: int
    parameters: int
    workspace: int


COSTS = st.builds(
    Costs, st.integers(0, 20), st.integers(0, 40), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)
)


def profile_of(costs: Sequence[Costs], edges: Sequence[tuple[int, int]] | None = None) -> Profile:
    """Blocks whose costs grow with the samples, but for a launch; a chain unless edges are given."""
    rows = [
        [
            CostRow(
                microbatch_size=samples,
                forward_ns=3 + samples * each.forward,
                backward_ns=5 + samples * each.backward,
                activation_bytes=samples * each.activation,
                workspace_bytes=each.workspace,
            )
            for samples in (1, 2, 4)
        ]
        for each in costs
    ]
    parameters = [each.parameters for each in costs]
    return profiles.profile_of(rows, edges, parameters=parameters, bytes_per_sample=1)


def all_reduce(size: int, replicas: int) -> int:
    return 7 * size * (replicas - 1)


def problem_of(profile: Profile, memory: int | None = None) -> PartitionProblem:
    return PartitionProblem.of(
        profile,
        DEVICES,
        MINI_BATCH,
        microbatch_sizes=[MICRO_BATCH],
        memory_bytes=memory,
        recompute=RECOMPUTE,
        all_reduce=all_reduce,
    )


def way_of(stage: PlacedStage) -> Way:
    return Way(MICRO_BATCH, stage.replicas, 0, bool(stage.recompute))


def stage_value(profile: Profile, blocks: Sequence[str], option: Way, later: int, memory: int | None) -> int | None:
    """Ns of a stage for the mini-batch from the profile's rows, one by one; None if it does not fit."""
    samples = MICRO_BATCH // option.replicas
    number = MINI_BATCH // MICRO_BATCH
    rows = {block.id: next(row for row in block.costs if row.microbatch_size == samples) for block in profile.blocks}
    inputs = {block.id: sum(samples for edge in profile.edges if edge.target == block.id) for block in profile.blocks}
    parameters = sum(block.parameter_bytes for block in profile.blocks if block.id in blocks)
    time = held = workspace = 0
    for id_ in blocks:
        row, keeps = rows[id_], rows[id_].activation_bytes
        time += row.forward_ns + (row.backward_ns or 0) + option.recompute * row.forward_ns
        held += min(keeps, inputs[id_]) if option.recompute else keeps
        workspace = max(workspace, row.workspace_bytes + option.recompute * keeps)
    needed = 2 * parameters + workspace + min(number, later + 1) * held
    if memory is not None and needed > memory:
        return None
    return number * time + (all_reduce(parameters, option.replicas) if option.replicas > 1 else 0)


@cache
def ways(count: int) -> list[tuple[Way, ...]]:
    """How ``count`` stages can run on the devices."""
    options = [Way(MICRO_BATCH, replicas, 0, again) for again in RECOMPUTE for replicas in (1, 2, 4)]
    found = product(options, repeat=count)
    return [chosen for chosen in found if sum(option.replicas for option in chosen) <= DEVICES]


def best_of(profile: Profile, partitions: Iterator[list[list[str]]], memory: int | None) -> int | None:
    """Least slowest stage of all partitions with all options."""

    @cache
    def value_of(blocks: tuple[str, ...], option: Way, later: int) -> int | None:
        return stage_value(profile, blocks, option, later, memory)

    best: int | None = None
    for stages in partitions:
        for options in ways(len(stages)):
            values = [
                value_of(tuple(blocks), option, len(stages) - 1 - index)
                for index, (blocks, option) in enumerate(zip(stages, options, strict=True))
            ]
            known = [value for value in values if value is not None]
            if len(known) == len(values) and (best is None or max(known) < best):
                best = max(known)
    return best


def contiguous(profile: Profile) -> Iterator[list[list[str]]]:
    order = list(profile.topological_order())
    for count in range(1, min(DEVICES, len(order)) + 1):
        for cuts in combinations(range(1, len(order)), count - 1):
            yield [order[begin:end] for begin, end in pairwise((0, *cuts, len(order)))]


def convex(profile: Profile) -> Iterator[list[list[str]]]:
    """All ways to give every block a stage number such that no edge goes back and no number is left out."""
    order = profile.topological_order()
    for numbers in product(range(min(DEVICES, len(order))), repeat=len(order)):
        stage_of = dict(zip(order, numbers, strict=True))
        whole = set(numbers) == set(range(max(numbers) + 1))
        if whole and all(stage_of[edge.source] <= stage_of[edge.target] for edge in profile.edges):
            yield [[id_ for id_ in order if stage_of[id_] == number] for number in range(max(numbers) + 1)]


def assert_is_worth(profile: Profile, plan: Partition, memory: int | None) -> None:
    """The plan has every block once, no more devices than there are, and the value it says."""
    stages = plan.placement.stages
    assert sorted(id_ for stage in stages for id_ in stage.blocks) == sorted(b.id for b in profile.blocks)
    assert sum(stage.replicas for stage in stages) <= DEVICES
    values = [
        stage_value(profile, stage.blocks, way_of(stage), len(stages) - 1 - index, memory)
        for index, stage in enumerate(stages)
    ]
    assert None not in values
    assert max(value or 0 for value in values) == plan.value_ns


MEMORY = st.one_of(st.none(), st.integers(20, 200))
EDGES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)).filter(lambda e: e[0] < e[1]), max_size=6, unique=True)


# PipeDream and Piper -----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(COSTS, min_size=1, max_size=6), MEMORY)
def test_pipedream_is_exact(costs: list[Costs], memory: int | None) -> None:
    profile = profile_of(costs)
    best = best_of(profile, contiguous(profile), memory)
    if best is None:
        with pytest.raises(InfeasibleError, match="raise --memory"):
            next(pipedream(problem_of(profile, memory)))
    else:
        plan = next(pipedream(problem_of(profile, memory)))
        assert plan.value_ns == best
        assert_is_worth(profile, plan, memory)


@settings(max_examples=20)
@given(st.lists(COSTS, min_size=5, max_size=5), EDGES, MEMORY)
def test_piper_is_exact_on_graphs(costs: list[Costs], edges: list[tuple[int, int]], memory: int | None) -> None:
    profile = profile_of(costs, edges)
    best = best_of(profile, convex(profile), memory)
    if best is None:
        with pytest.raises(InfeasibleError, match="raise --memory"):
            next(piper(problem_of(profile, memory)))
    else:
        plan = next(piper(problem_of(profile, memory)))
        assert plan.value_ns == best
        assert_is_worth(profile, plan, memory)
        stage_of = {id_: index for index, stage in enumerate(plan.placement.stages) for id_ in stage.blocks}
        assert all(stage_of[edge.source] <= stage_of[edge.target] for edge in profile.edges)


@given(st.lists(COSTS, min_size=1, max_size=6), MEMORY)
def test_piper_finds_the_same_as_pipedream_on_chains(costs: list[Costs], memory: int | None) -> None:
    problem = problem_of(profile_of(costs), memory)
    try:
        assert next(piper(problem)).value_ns == next(pipedream(problem)).value_ns
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            next(piper(problem))


def test_memory_makes_stages_recompute_or_shrink() -> None:
    """Blocks whose activations are too much for a pipeline of 1F1B run again instead of being kept."""
    profile = profile_of([Costs(10, 20, KILOBYTE, 0, 0)] * 4)
    roomy, tight = next(pipedream(problem_of(profile))), next(pipedream(problem_of(profile, 3 * KILOBYTE)))
    assert not any(stage.recompute for stage in roomy.placement.stages)
    assert any(stage.recompute for stage in tight.placement.stages)
    assert tight.value_ns > roomy.value_ns


def test_downsets_of_parallel_chains_multiply() -> None:
    """Two chains of three have 4 x 4 downsets; with too many Piper says that it does not finish."""
    costs = [Costs(1, 1, 0, 0, 0)] * 6
    profile = profile_of(costs, [(0, 1), (1, 2), (3, 4), (4, 5)])
    found = downsets(problem_of(profile))
    assert len(found) == 16
    assert [int(each.sum()) for each in found] == sorted(int(each.sum()) for each in found)
    with pytest.raises(UsageError, match="more than 10 downsets"):
        next(piper(problem_of(profile), max_downsets=10))


# DAPPLE ------------------------------------------------------------------------------------------------------------


def load_of(profile: Profile, blocks: Sequence[str], option: Way) -> tuple[int, int, int]:
    samples = MICRO_BATCH // option.replicas
    chosen = [block for block in profile.blocks if block.id in blocks]
    rows = [next(row for row in block.costs if row.microbatch_size == samples) for block in chosen]
    forward = sum(row.forward_ns for row in rows)
    backward = sum(row.backward_ns or 0 for row in rows) + option.recompute * forward
    return forward, backward, all_reduce(sum(b.parameter_bytes for b in chosen), option.replicas)


def best_latency(profile: Profile, memory: int | None, most_stages: int) -> int | None:
    """Least DAPPLE latency of all contiguous plans of at most so many stages."""
    found = [
        latency(
            tuple(load_of(profile, each, option) for each, option in zip(stages, options, strict=True)),
            MINI_BATCH // MICRO_BATCH,
        )
        for stages in contiguous(profile)
        if len(stages) <= most_stages
        for options in ways(len(stages))
        if all(
            stage_value(profile, each, option, len(stages) - 1 - index, memory) is not None
            for index, (each, option) in enumerate(zip(stages, options, strict=True))
        )
    ]
    return min(found, default=None)


@settings(max_examples=30)
@given(st.lists(COSTS, min_size=1, max_size=6), MEMORY)
def test_dapple_lies_between_the_best_plan_and_the_best_of_two_stages(costs: list[Costs], memory: int | None) -> None:
    """It keeps one plan per state, as published: so it may miss the best of many stages, but never is below it."""
    profile = profile_of(costs)
    best, best_of_two = best_latency(profile, memory, DEVICES), best_latency(profile, memory, 2)
    if best is None:
        with pytest.raises(InfeasibleError, match="DAPPLE"):
            next(dapple(problem_of(profile, memory)))
        return
    if best_of_two is None:
        return
    plan = next(dapple(problem_of(profile, memory)))
    assert best <= plan.value_ns <= best_of_two
    loads = tuple(load_of(profile, stage.blocks, way_of(stage)) for stage in plan.placement.stages)
    assert plan.value_ns == latency(loads, MINI_BATCH // MICRO_BATCH)
    assert sum(stage.replicas for stage in plan.placement.stages) <= DEVICES


@settings(max_examples=60)
@given(st.lists(COSTS, min_size=1, max_size=8), MEMORY)
def test_dapple_is_the_plain_algorithm(costs: list[Costs], memory: int | None) -> None:
    """Stages in arrays against one plan after another: the same stages, not only the same latency."""
    profile, number = profile_of(costs), MINI_BATCH // MICRO_BATCH
    order, problem = profile.topological_order(), problem_of(profile, memory)
    plain = plain_plan(
        len(order),
        DEVICES,
        number,
        [way.replicas for way in problem.ways],
        lambda begin, end, way: load_of(profile, order[begin:end], problem.ways[way]),
        lambda begin, end, way, later: (
            stage_value(profile, order[begin:end], problem.ways[way], later, memory) is not None
        ),
    )
    if plain is None:
        with pytest.raises(InfeasibleError, match="DAPPLE"):
            next(dapple(problem))
        return
    plan = next(dapple(problem))
    assert plan.value_ns == plain[0]
    found = [(stage.blocks, stage.replicas, stage.recompute) for stage in plan.placement.stages]
    ways = [(order[begin:end], problem.ways[way]) for begin, end, way in plain[1]]
    assert found == [(blocks, way.replicas, way.recompute) for blocks, way in ways]


TIMES = st.integers(1, 30)
LOADS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8)


@given(LOADS, st.integers(1, 12))
def test_dapples_latency_is_that_of_the_pivot(stages: list[tuple[int, int, int]], number: int) -> None:
    assert latency(stages, number) == plain_latency(stages, number)


@given(st.lists(st.tuples(TIMES, TIMES, st.just(0)), min_size=1, max_size=6), st.integers(1, 12))
def test_dapples_latency_is_a_lower_bound_of_1f1b(stages: list[tuple[int, int, int]], number: int) -> None:
    loads = StageTimes(tuple(f for f, _, _ in stages), tuple(b for _, b, _ in stages))
    assert latency(tuple(stages), number) <= timeline(loads, number).iteration_ns


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 8), st.integers(1, 12))
def test_dapples_latency_of_equal_stages_is_that_of_1f1b(forward: int, backward: int, count: int, number: int) -> None:
    loads = StageTimes((forward,) * count, (backward,) * count)
    assert latency(((forward, backward, 0),) * count, number) == timeline(loads, number).iteration_ns


def test_all_reduce_counts_where_it_ends_last() -> None:
    """The last stage sums its gradients while the first still runs backward; the first one's adds to the end."""
    assert latency(((1, 2, 0), (1, 2, 2)), 3) == latency(((1, 2, 0), (1, 2, 0)), 3)
    assert latency(((1, 2, 2), (1, 2, 0)), 3) == latency(((1, 2, 0), (1, 2, 0)), 3) + 2


# Questions ---------------------------------------------------------------------------------------------------------


def test_questions_that_make_no_sense_are_refused() -> None:
    profile = profile_of([Costs(1, 1, 0, 0, 0)] * 2)
    with pytest.raises(UsageError, match="do not divide"):
        PartitionProblem.of(profile, 2, 8, microbatch_sizes=[3])
    with pytest.raises(UsageError, match="more --devices"):
        PartitionProblem.of(profile, 0, 8, microbatch_sizes=[4])
    with pytest.raises(UsageError, match="has costs for 1 to 4 samples"):
        PartitionProblem.of(profile, 1, 8, microbatch_sizes=[8])


@settings(max_examples=40)
@given(st.lists(COSTS, min_size=1, max_size=6), MEMORY)
def test_every_size_has_its_own_plan(costs: list[Costs], memory: int | None) -> None:
    """Those for one size after another, without the sizes for which nothing fits."""
    profile = profile_of(costs)
    problem = PartitionProblem.of(profile, DEVICES, MINI_BATCH, memory_bytes=memory, all_reduce=all_reduce)
    for planner in (pipedream, dapple, piper):
        each = []
        for size in (1, 2, 4, 8):
            sized = replace(problem, ways=tuple(way for way in problem.ways if way.microbatch_size == size))
            with suppress(InfeasibleError):
                each.append(next(planner(sized)))
        if each:
            assert list(planner(problem)) == each
        else:
            with pytest.raises(InfeasibleError):
                next(planner(problem))
