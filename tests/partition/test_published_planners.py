"""PipeDream's, Piper's and DAPPLE's planners: against all partitions of small graphs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate, combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import profiles
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Cluster, CostRow, PlacedStage, Profile
from pipeplan.partition.chain.autopipe import timeline
from pipeplan.partition.chain.costs import StageTimes
from pipeplan.partition.dapple import _Begun, dapple, latency
from pipeplan.partition.links import CountedLinks
from pipeplan.partition.pipedream import pipedream
from pipeplan.partition.piper import downsets, piper
from pipeplan.partition.problem import PartitionProblem, Way
from references.dapple import Load, plain_latency, plain_plan, policies
from support.marks import some_of

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


def profile_of(
    costs: Sequence[Costs], edges: Sequence[tuple[int, int]] | None = None, *, split: bool = False
) -> Profile:
    """Blocks whose costs grow with the samples, but for a launch; a chain unless edges are given.

    With ``split`` they also have costs on two devices that split them.
    """
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
    if split:
        for own in rows:
            own += [
                row.model_copy(
                    update={
                        "shards": 2,
                        "forward_ns": 4 + row.forward_ns // 2,
                        "backward_ns": 1 + (row.backward_ns or 0) // 2,
                        "activation_bytes": row.activation_bytes // 2,
                    }
                )
                for row in own
            ]
    parameters = [each.parameters for each in costs]
    return profiles.profile_of(rows, edges, parameters=parameters, bytes_per_sample=1)


NODES = ((0, 1), (2, 3))
CLUSTER = Cluster.of("nodes of two", 4, levels=[("node", 2, "2ns", 5 * 10**7), ("net", 4, "7ns", 10**7)])
FLAT = Cluster.of("one node", 4, levels=[("node", 4, "7ns", 10**7)])
LATENCY, NS_PER_BYTE = {False: 2, True: 7}, {False: 20, True: 100}
"""By whether devices are in different nodes."""


def all_reduce(size: int, replicas: int) -> int:
    return 7 * size * (replicas - 1)


def summed(size: int, devices: Sequence[int]) -> int:
    """Over devices in several nodes it takes more."""
    return all_reduce(size, len(devices)) * (3 if len({device // 2 for device in devices}) > 1 else 1)


def problem_of(
    profile: Profile, memory: int | None = None, cluster: Cluster | None = None, *, shards: int = 1
) -> PartitionProblem:
    return PartitionProblem.of(
        profile,
        DEVICES // shards,
        MINI_BATCH,
        microbatch_sizes=[MICRO_BATCH],
        memory_bytes=memory,
        recompute=RECOMPUTE,
        shards=shards,
        all_reduce=all_reduce,
        links=None if cluster is None else CountedLinks(cluster, profile.edges, summed),
    )


def way_of(stage: PlacedStage) -> Way:
    return Way(MICRO_BATCH, stage.replicas, 0, bool(stage.recompute))


NUMBER = MINI_BATCH // MICRO_BATCH


def needed(profile: Profile, blocks: Sequence[str], option: Way, in_flight: int) -> int:
    """Bytes of a stage from the profile's rows, one by one."""
    _, held, workspace, parameters = compute(profile, blocks, option)
    return 2 * parameters + workspace + min(NUMBER, in_flight) * held


def compute(profile: Profile, blocks: Sequence[str], option: Way) -> tuple[tuple[int, int], int, int, int]:
    """Forward and backward of a micro-batch in ns, what it holds, the largest workspace, and parameters in bytes."""
    samples = MICRO_BATCH // option.replicas
    forward = backward = held = workspace = parameters = 0
    for block in profile.blocks:
        if block.id in blocks:
            row = next(r for r in block.costs if (r.microbatch_size, r.shards) == (samples, option.shards))
            keeps = row.activation_bytes
            inputs = sum(samples for edge in profile.edges if edge.target == block.id)
            forward += row.forward_ns
            backward += (row.backward_ns or 0) + option.recompute * row.forward_ns
            held += min(keeps, inputs) if option.recompute else keeps
            workspace = max(workspace, row.workspace_bytes + option.recompute * keeps)
            parameters += -(-block.parameter_bytes // option.shards)
    return (forward, backward), held, workspace, parameters


OPTIONS = [Way(MICRO_BATCH, replicas, 0, again) for again in RECOMPUTE for replicas in (1, 2, 4)]


def message(profile: Profile, order: Sequence[str], cut: int, samples: int, apart: bool) -> int:
    """Ns of what passes a cut, and of the gradients that come back."""
    before = set(order[:cut])
    over = sum(edge.source in before and edge.target not in before for edge in profile.edges)
    return 2 * (LATENCY[apart] + over * samples * NS_PER_BYTE[apart]) if over else 0


def contiguous(count: int) -> Iterator[list[tuple[int, int]]]:
    for stages in range(1, min(DEVICES, count) + 1):
        for cuts in combinations(range(1, count), stages - 1):
            yield list(pairwise((0, *cuts, count)))


@cache
def ways(count: int) -> list[tuple[Way, ...]]:
    """How ``count`` stages can run on the devices."""
    found = product(OPTIONS, repeat=count)
    return [chosen for chosen in found if sum(option.replicas for option in chosen) <= DEVICES]


MEMORY = st.one_of(st.none(), st.integers(20, 200))
EDGES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)).filter(lambda e: e[0] < e[1]), max_size=6, unique=True)


# PipeDream ---------------------------------------------------------------------------------------------------------


def bottleneck(
    profile: Profile, stages: Sequence[tuple[int, int]], options: Sequence[Way], memory: int | None, beside: bool
) -> float:
    """The slowest of stages and messages, where all devices are equally far; inf if a stage does not fit.

    Gradients are summed ``beside`` compute, or after it.
    """
    order, worst = profile.topological_order(), 0
    for place, ((begin, end), option) in enumerate(zip(stages, options, strict=True)):
        if memory is not None and needed(profile, order[begin:end], option, len(stages) - place) > memory:
            return math.inf
        times, _, _, parameters = compute(profile, order[begin:end], option)
        computing, summing = NUMBER * sum(times), all_reduce(parameters, option.replicas)
        worst = max(worst, max(computing, summing) if beside else computing + summing)
        worst = max(worst, NUMBER * message(profile, order, begin, MICRO_BATCH, apart=True))
    return worst


@settings(max_examples=15)
@given(st.lists(COSTS, min_size=1, max_size=5), EDGES, MEMORY, st.booleans())
def test_pipedream_is_exact_where_links_are_alike(
    costs: list[Costs], edges: list[tuple[int, int]], memory: int | None, beside: bool
) -> None:
    profile = profile_of(costs, edges if len(costs) > 4 else None)
    problem = problem_of(profile, memory, FLAT)
    found = [
        bottleneck(profile, stages, options, memory, beside)
        for stages in contiguous(len(costs))
        for options in ways(len(stages))
    ]
    if min(found) == math.inf:
        with pytest.raises(InfeasibleError, match="raise --memory"):
            next(pipedream(problem, beside=beside))
        return
    plan = next(pipedream(problem, beside=beside))
    assert plan.value_ns == min(found)
    placed = plan.placement.stages
    cuts = [0, *accumulate(len(stage.blocks) for stage in placed)]
    own = [way_of(stage) for stage in placed]
    assert bottleneck(profile, list(pairwise(cuts)), own, memory, beside) == plan.value_ns
    assert sum(len(stage.devices) for stage in placed) <= DEVICES


Leaf = tuple[int, int, Way, tuple[int, ...]]
"""Blocks, way and devices of a stage."""


def nested(
    profile: Profile, level: int, begin: int, end: int, firsts: tuple[int, ...], later: int, memory: int | None
) -> Iterator[tuple[float, list[Leaf]]]:
    """Every plan of blocks on a component of a level, and on those that do the same, with its slowest stage."""
    order, replicas = profile.topological_order(), len(firsts)
    if level == 0:
        for option in OPTIONS:
            if option.replicas == replicas:
                after = 1 + min(later, len(order) - end)
                if memory is None or needed(profile, order[begin:end], option, after) <= memory:
                    times = compute(profile, order[begin:end], option)[0]
                    yield NUMBER * sum(times), [(begin, end, option, firsts)]
        return
    apart, samples = (1, 2)[level - 1], -(-MICRO_BATCH // replicas)

    def stages(begin: int, used: int) -> Iterator[tuple[float, list[Leaf]]]:
        for components, cut in product(range(1, 3 - used), range(begin + 1, end + 1)):
            for of in {2 - used, components} if cut == end else [2 - used]:  # all that are left, or one stays idle
                own = tuple(first + apart * (used + each) for first in firsts for each in range(components))
                parameters = compute(profile, order[begin:cut], OPTIONS[0])[3]
                sums = summed(parameters, [apart * each for each in range(components)])
                after = later + apart * (of - components) * (cut < end)
                for value, leaves in nested(profile, level - 1, begin, cut, own, after, memory):
                    whole = max(value, sums)
                    if cut == end:
                        yield whole, leaves
                        continue
                    sent = NUMBER * message(profile, order, cut, samples, apart == 2)
                    for rest, others in stages(cut, used + components):
                        yield max(whole, sent, rest), [*leaves, *others]

    yield from stages(begin, 0)


@settings(max_examples=some_of(20))
@given(st.lists(COSTS, min_size=1, max_size=4), MEMORY)
def test_pipedream_is_exact_over_levels_of_links(costs: list[Costs], memory: int | None) -> None:
    """Against every plan of two nodes of two devices: pipelines of nodes, copies of them, and pipelines in each."""
    profile = profile_of(costs)
    problem = problem_of(profile, memory, CLUSTER)
    found = list(nested(profile, 2, 0, len(costs), (0,), 0, memory))
    if not found:
        with pytest.raises(InfeasibleError, match="raise --memory"):
            next(pipedream(problem))
        return
    plan = next(pipedream(problem))
    assert plan.value_ns == min(value for value, _ in found)
    order = profile.topological_order()
    same = [
        [(order[a:b], way.replicas, way.recompute, on) for a, b, way, on in leaves]
        for v, leaves in found
        if v == plan.value_ns
    ]
    assert [(stage.blocks, stage.replicas, stage.recompute, stage.devices) for stage in plan.placement.stages] in same


def test_memory_makes_stages_recompute_or_shrink() -> None:
    """Blocks whose activations are too much for a pipeline of 1F1B run again instead of being kept."""
    profile = profile_of([Costs(10, 20, KILOBYTE, 0, 0)] * 4)
    roomy, tight = next(pipedream(problem_of(profile))), next(pipedream(problem_of(profile, 3 * KILOBYTE)))
    assert not any(stage.recompute for stage in roomy.placement.stages)
    assert any(stage.recompute for stage in tight.placement.stages)
    assert tight.value_ns > roomy.value_ns


# Piper -------------------------------------------------------------------------------------------------------------


def convex(profile: Profile) -> Iterator[list[list[str]]]:
    """All ways to give every block a stage number such that no edge goes back and no number is left out."""
    order = profile.topological_order()
    for numbers in product(range(min(DEVICES, len(order))), repeat=len(order)):
        stage_of = dict(zip(order, numbers, strict=True))
        whole = set(numbers) == set(range(max(numbers) + 1))
        if whole and all(stage_of[edge.source] <= stage_of[edge.target] for edge in profile.edges):
            yield [[id_ for id_ in order if stage_of[id_] == number] for number in range(max(numbers) + 1)]


def piper_load(
    profile: Profile, blocks: Sequence[str], degrees: tuple[int, int], later: int, memory: int | None
) -> tuple[float, tuple[bool, ...]]:
    """The load of a stage for the mini-batch, and what it computes again by the paper's heuristic; inf if none fits."""
    replicas, shards = degrees
    plain, again = (Way(MICRO_BATCH, replicas, 0, each, shards) for each in RECOMPUTE)
    costs = {id_: (compute(profile, [id_], plain), compute(profile, [id_], again)) for id_ in blocks}
    in_flight = min(NUMBER, later + 1)

    def fits(chosen: Collection[str]) -> bool:
        held = sum(costs[id_][id_ in chosen][1] for id_ in blocks)
        widest = max(each[way][2] for each in costs.values() for way in ((0, 1) if chosen else (0,)))
        state = sum(2 * each[0][3] for each in costs.values())
        return memory is None or state + widest + in_flight * held <= memory

    def price(id_: str) -> float:
        one, other = costs[id_]
        return (sum(other[0]) - sum(one[0])) / (one[1] - other[1])

    able = sorted((id_ for id_ in blocks if costs[id_][0][1] > costs[id_][1][1]), key=price)
    taken = next((able[:count] for count in range(len(able) + 1) if fits(able[:count])), None)
    if taken is None:
        return math.inf, ()
    ns = sum(sum(costs[id_][id_ in taken][0]) for id_ in blocks)
    touching = sum((edge.source in blocks) != (edge.target in blocks) for edge in profile.edges)
    sent = 2 * touching * MICRO_BATCH // replicas * NS_PER_BYTE[True]
    parameters = sum(each[0][3] for each in costs.values())
    sums = all_reduce(parameters, replicas) if replicas > 1 else 0
    return NUMBER * (ns + sent) + sums, tuple(id_ in taken for id_ in blocks)


@cache
def degrees_of(count: int) -> list[tuple[tuple[int, int], ...]]:
    """Data and tensor parallelism of ``count`` stages."""
    found = product(product((1, 2, 4), (1, 2)), repeat=count)
    return [degrees for degrees in found if sum(replicas * shards for replicas, shards in degrees) <= DEVICES]


@settings(max_examples=12)
@given(st.lists(COSTS, min_size=4, max_size=4), EDGES, MEMORY)
def test_piper_is_exact_on_graphs(costs: list[Costs], edges: list[tuple[int, int]], memory: int | None) -> None:
    """Of all stages between downsets with all degrees, each of which computes again what the heuristic says."""
    profile = profile_of(costs, [(one, other) for one, other in edges if other < 4], split=True)
    load = cache(lambda blocks, degrees, later: piper_load(profile, blocks, degrees, later, memory))
    best = min(
        max(
            load(tuple(each), own, len(stages) - 1 - at)[0]
            for at, (each, own) in enumerate(zip(stages, degrees, strict=True))
        )
        for stages in convex(profile)
        for degrees in degrees_of(len(stages))
    )
    problem, halves = problem_of(profile, memory, FLAT), problem_of(profile, memory, FLAT, shards=2)
    if best == math.inf:
        with pytest.raises(InfeasibleError, match="raise --memory"):
            next(piper(problem, split=[halves]))
        return
    plan = next(piper(problem, split=[halves]))
    assert plan.value_ns == best
    placed = plan.placement.stages
    loads = [
        load(stage.blocks, (stage.replicas, stage.shards), len(placed) - 1 - at) for at, stage in enumerate(placed)
    ]
    assert max(value for value, _ in loads) == best
    assert [expanded(stage) for stage in placed] == [again for _, again in loads]
    stage_of = {id_: index for index, stage in enumerate(placed) for id_ in stage.blocks}
    assert all(stage_of[edge.source] <= stage_of[edge.target] for edge in profile.edges)
    assert sum(len(stage.devices) for stage in placed) <= DEVICES


def expanded(stage: PlacedStage) -> tuple[bool, ...]:
    """What each block computes again."""
    again = stage.recompute
    return tuple(map(bool, again)) if isinstance(again, tuple) else (bool(again),) * len(stage.blocks)


def test_piper_splits_blocks_where_there_are_too_few_for_stages() -> None:
    """One block on four devices that has much to sum: halves of it in place of copies."""
    profile = profile_of([Costs(20, 40, 0, 9, 0)], split=True)
    plan = next(piper(problem_of(profile, None, FLAT), split=[problem_of(profile, None, FLAT, shards=2)]))
    assert [stage.shards for stage in plan.placement.stages] == [2]


def test_piper_recomputes_only_what_it_must() -> None:
    """Three blocks in a stage, of which two must compute again: those that free most for their time."""
    profile = profile_of([Costs(20, 0, 40, 0, 0), Costs(5, 0, 40, 0, 0), Costs(9, 0, 40, 0, 0)])
    (stage,) = next(piper(replace(problem_of(profile, 400), num_devices=1))).placement.stages
    assert stage.recompute == (False, True, True)


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


def sending(sources: Sequence[int], targets: Sequence[int], size: int) -> int:
    """Ns until parts of a tensor on devices are on others: each device sends, and receives, one part after another."""
    busy: Counter[tuple[str, int]] = Counter()
    latency = 0
    for at, source in enumerate(sources):
        for to, target in enumerate(targets):
            low, high = (
                max(Fraction(at, len(sources)), Fraction(to, len(targets))),
                min(Fraction(at + 1, len(sources)), Fraction(to + 1, len(targets))),
            )
            if high > low:
                apart = source // 2 != target // 2
                latency = max(latency, LATENCY[apart])
                for end in (("sends", source), ("receives", target)):
                    busy[end] += math.ceil((high - low) * size) * NS_PER_BYTE[apart]
    return latency + max(busy.values()) if size else 0


def dapple_loads(profile: Profile, options: Sequence[Way], stages: Sequence[Any]) -> list[Load]:
    """Of stages, and of sending between them."""
    order, found = profile.topological_order(), list[Load]()
    for place, (begin, end, way, devices) in enumerate(stages):
        if place:
            before, size = set(order[:begin]), 0
            size = MICRO_BATCH * sum(edge.source in before and edge.target not in before for edge in profile.edges)
            there, back = sending(stages[place - 1][3], devices, size), sending(devices, stages[place - 1][3], size)
            found.append((there, back, 0))
        times, _, _, parameters = compute(profile, order[begin:end], options[way])
        forward, backward = (time * options[way].replicas // len(devices) for time in times)
        found.append((forward, backward, summed(parameters, devices)))
    return found


@settings(max_examples=15)
@given(st.lists(COSTS, min_size=1, max_size=4), MEMORY, st.booleans())
def test_dapple_is_the_plain_algorithm(costs: list[Costs], memory: int | None, in_order: bool) -> None:
    """Against one plan after another: the same latency, that of its stages; on machines, or on devices in order."""
    profile = profile_of(costs)
    order, problem = profile.topological_order(), problem_of(profile, memory, CLUSTER)
    options = problem.ways

    def fits(stage: Any, later: int) -> bool:
        begin, end, way, _ = stage
        return memory is None or needed(profile, order[begin:end], options[way], later + 1) <= memory

    loads = partial(dapple_loads, profile, options)
    machines = [range(DEVICES)] if in_order else NODES
    plain = plain_plan(len(order), machines, NUMBER, [way.replicas for way in options], loads, fits)
    if plain is None:
        with pytest.raises(InfeasibleError, match="DAPPLE"):
            next(dapple(problem))
        return
    with pytest.MonkeyPatch.context() as patch:
        if in_order:
            patch.setattr("pipeplan.partition.dapple.MOST_OF_MACHINES", 0)
        plan = next(dapple(problem))
    assert plan.value_ns == plain[0]
    placed = plan.placement.stages
    cuts = [0, *accumulate(len(stage.blocks) for stage in placed)]
    own = [Way(MICRO_BATCH, stage.replicas, row, stage.recompute) for stage in placed for row in [0]]
    stages = [
        (begin, end, at, stage.devices)
        for at, (stage, (begin, end)) in enumerate(zip(placed, pairwise(cuts), strict=True))
    ]
    assert plain_latency(dapple_loads(profile, own, stages), NUMBER) == plan.value_ns
    assert plan.value_ns >= best_latency(profile, options, fits, machines)


def best_latency(
    profile: Profile, options: Sequence[Way], fits: Callable[[Any, int], bool], machines: Sequence[Sequence[int]]
) -> int:
    """Least latency of all contiguous plans on devices by any policies."""
    return min(
        plain_latency(dapple_loads(profile, options, stages), NUMBER)
        for ranges in contiguous(len(profile.blocks))
        for chosen in product(range(len(options)), repeat=len(ranges))
        if sum(options[way].replicas for way in chosen) <= DEVICES
        for stages in placed_by_policies(machines, ranges, chosen, [options[way].replicas for way in chosen])
        if all(fits(stage, len(stages) - 1 - place) for place, stage in enumerate(stages))
    )


def placed_by_policies(
    machines: Sequence[Sequence[int]],
    ranges: Sequence[Any],
    ways: Sequence[int],
    counts: Sequence[int],
    taken: Any = (),
) -> Iterator[list[Any]]:
    if not ranges:
        yield []
        return
    for devices in policies(machines, frozenset(taken), counts[0]):
        for rest in placed_by_policies(machines, ranges[1:], ways[1:], counts[1:], (*taken, *devices)):
            yield [(*ranges[0], ways[0], devices), *rest]


TIMES = st.integers(1, 30)
LOADS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8)


@given(LOADS, st.integers(1, 12))
def test_dapples_latency_is_that_of_the_pivot(stages: list[tuple[int, int, int]], number: int) -> None:
    assert latency(stages, number) == plain_latency(stages, number)
    for place in range(1, len(stages)):
        begun = _Begun.of([np.array(each) for each in stages[:place]], number - 1)
        assert begun.latency([np.array(each) for each in stages[place:]]) == plain_latency(stages, number)


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


@settings(max_examples=some_of(40))
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
