"""GraphPipe's partitioner against every partition that a decomposition can reach, with every choice for every stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.errors import InfeasibleError
from pipeplan.partition.graph import in_flight
from pipeplan.partition.graph import shapes as shapes_module
from pipeplan.partition.graph.in_flight import KFKB, samples_in_flight
from pipeplan.partition.graph.search import GraphPartition, graphpipe
from pipeplan.partition.problem import Costs, PartitionProblem, Pricing, Way, together
from pipeplan.partition.series_parallel import Part, decompose, in_line, topological_order
from references.stage_validity import StageGraph, costs_of, problems_of
from support.marks import some_of

MINI_BATCH = 16
PAIRS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
ROWS = tuple(Pricing(samples, again) for again in (False, True) for samples in (1, 2, 4))
CHOICES = tuple(
    Way(size, replicas, ROWS.index(Pricing(size // replicas, again)), again)
    for again in (False, True)
    for size, replicas in PAIRS
)


def partition(problem: PartitionProblem, *, tolerance: float = 0.0) -> GraphPartition:
    return next(graphpipe(problem, tolerance=tolerance))


Flow = tuple[tuple[int, int], ...]  # (micro-batch size, samples in flight) of the stages that come first


# Every partition -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cover:
    """Stages one after another or side by side."""

    kind: str  # stage, then, beside
    blocks: tuple[str, ...] = ()
    parts: tuple[Cover, ...] = ()

    def count(self) -> int:
        return 1 if self.kind == "stage" else sum(part.count() for part in self.parts)

    def stages(self) -> list[tuple[str, ...]]:
        return [self.blocks] if self.kind == "stage" else [each for part in self.parts for each in part.stages()]


def covers(part: Part) -> Iterator[Cover]:
    if part.kind == "parallel":
        yield from beside(part.parts)
        return
    children = part.parts or (part,)
    for size in range(len(children)):
        for cuts in combinations(range(1, len(children)), size):
            runs = [children[low:high] for low, high in zip((0, *cuts), (*cuts, len(children)), strict=True)]
            yield from (Cover("then", parts=parts) for parts in in_series(runs))


def in_series(runs: list[tuple[Part, ...]]) -> Iterator[tuple[Cover, ...]]:
    """Every run a stage or, where it is one parallel part, branches; stages may have the end of a branch before."""
    if not runs:
        yield ()
        return
    *before, run = runs
    for own in ways(run):
        for rest in in_series(before):
            yield (*rest, own)
    if not before or len(before[-1]) > 1 or before[-1][0].kind != "parallel":
        return
    branches = before[-1][0].parts
    for at, branch in enumerate(branches):
        children = branch.parts or (branch,)
        for kept in range(len(children)):
            left = [Part("series", children[:kept])] if kept else []
            names = tuple(name for child in (*children[kept:], *run) for name in child.blocks)
            for around in beside([*branches[:at], *left, *branches[at + 1 :]]):
                for rest in in_series(before[:-1]):
                    yield (*rest, around, Cover("stage", names))


def ways(run: Sequence[Part]) -> Iterator[Cover]:
    yield Cover("stage", tuple(name for child in run for name in child.blocks))
    if len(run) == 1 and run[0].kind == "parallel":
        yield from beside(run[0].parts)


def beside(branches: Sequence[Part]) -> Iterator[Cover]:
    for groups in set_partitions(list(branches)):
        options = [
            list(covers(group[0]))
            if len(group) == 1
            else [Cover("stage", tuple(name for branch in group for name in branch.blocks))]
            for group in groups
        ]
        for parts in product(*options):
            yield Cover("beside", parts=parts)


def set_partitions(items: list[Part]) -> Iterator[list[list[Part]]]:
    if not items:
        yield []
        return
    for rest in set_partitions(items[1:]):
        yield [[items[0]], *rest]
        for at in range(len(rest)):
            yield [*rest[:at], [items[0], *rest[at]], *rest[at + 1 :]]


def bottleneck(problem: PartitionProblem, cover: Cover, choices: list[Way]) -> int | None:
    """Time of the busiest device; None if some stage does not fit. Choices are taken from the end."""

    worst = 0

    def flow(part: Cover, after: Flow) -> Flow | None:
        nonlocal worst
        if part.kind == "stage":
            choice = choices.pop()
            load = together(problem.costs[block] for block in part.blocks)
            own = KFKB(1, choice.microbatch_size)
            needs = [samples_in_flight(own, KFKB(1, size), held) for size, held in after]
            held = min(problem.mini_batch, max([own.samples, *needs]))
            worst = max(worst, problem.time_of(load, choice))
            fits = problem.memory_bytes is None or problem.memory_of(load, choice, held) <= problem.memory_bytes
            return ((choice.microbatch_size, held),) if fits else None
        if part.kind == "beside":
            flows = [flow(each, after) for each in reversed(part.parts)]
            return None if None in flows else tuple(pair for each in flows for pair in each or ())
        for each in reversed(part.parts):
            found = flow(each, after)
            if found is None:
                return None
            after = found
        return after

    return worst if flow(cover, ()) is not None else None


def brute_force(problem: PartitionProblem, tree: Part) -> int | None:
    found = [
        bottleneck(problem, cover, list(choices))
        for cover in covers(tree)
        if cover.count() <= problem.num_devices
        for choices in product(problem.ways, repeat=cover.count())
        if sum(choice.replicas for choice in choices) <= problem.num_devices
    ]
    return min((each for each in found if each is not None), default=None)


# Random problems -----------------------------------------------------------------------------------------------


@st.composite
def loads(draw: st.DrawFn) -> Costs:
    times = draw(st.lists(st.integers(0, 6), min_size=3, max_size=3))
    samples = draw(st.integers(0, 3))
    workspace = draw(st.integers(0, 2))
    parameters = draw(st.integers(0, 4))
    forward = draw(st.integers(0, 3))
    own, kept = (workspace, workspace, 2 * workspace), (samples, 2 * samples, 4 * samples)
    plain = (times[0] + 1, times[0] + times[1] + 2, sum(times) + 3)
    return costs_of(
        (*plain, *(time + forward for time in plain)),
        (*kept, 0, 0, 0),
        (*own, *(size + held for size, held in zip(own, kept, strict=True))),
        parameters,
        3 * parameters,
    )


@st.composite
def problems(draw: st.DrawFn, most: int = 6) -> PartitionProblem:
    """Few kinds of blocks, so that branches are often alike."""
    kinds = draw(st.lists(loads(), min_size=1, max_size=3))
    names = [f"b{index}" for index in range(draw(st.integers(1, most)))]
    pairs = list(combinations(names, 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=6)) if pairs else []
    return PartitionProblem(
        {name: draw(st.sampled_from(kinds)) for name in names},
        tuple(edges),
        draw(st.integers(1, 4)),
        MINI_BATCH,
        ROWS,
        CHOICES if draw(st.booleans()) else CHOICES[: len(PAIRS)],
        draw(st.one_of(st.none(), st.integers(5, 60))),
        draw(st.sampled_from([lambda size, replicas: 0, lambda size, replicas: size * replicas // 2])),
    )


@contextmanager
def grid(number: int) -> Iterator[None]:
    """Bounds whose needs are rounded from so small totals on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "GRID", number)
        yield


@settings(max_examples=some_of(60))
@given(problems(most=4), st.sampled_from((1, 16)))
def test_the_bottleneck_is_that_of_brute_force(problem: PartitionProblem, rounding: int) -> None:
    with grid(rounding):
        check_against_brute_force(problem)


@pytest.mark.slow
@settings(max_examples=some_of(25))
@given(problems(), st.sampled_from((1, 16)))
def test_the_bottleneck_of_larger_graphs(problem: PartitionProblem, rounding: int) -> None:
    with grid(rounding):
        check_against_brute_force(problem)


def check_against_brute_force(problem: PartitionProblem) -> None:
    tree = decompose(
        tuple(problem.costs), problem.edges, {name: problem.work(load) for name, load in problem.costs.items()}
    ).tree
    line = topological_order(tuple(problem.costs), problem.edges)
    expected = brute_force(problem, tree)
    lines = [brute_force(problem, in_line(order)) for order in {line, tree.blocks}]
    reachable = [each for each in (expected, *lines) if each is not None]
    if not reachable:
        with pytest.raises(InfeasibleError, match="would do"):
            partition(problem)
        return
    found = partition(problem)
    assert found.series_parallel_ns == expected or found.candidate == "line"
    graph = StageGraph.of(found.placement, problem.edges, problem.mini_batch)
    assert found.value_ns == min(reachable)
    assert found.optimal
    assert sum(stage.replicas for stage in graph.stages) <= problem.num_devices
    assert problems_of(graph, problem.edges) == ()
    for index, stage in enumerate(graph.stages):  # samples in flight of the real graph, not of the line
        load = together(problem.costs[block] for block in stage.blocks)
        asked = graph.size(index), stage.replicas, stage.recompute
        way = next(way for way in problem.ways if (way.microbatch_size, way.replicas, way.recompute) == asked)
        assert problem.time_of(load, way) <= found.value_ns
        limit = problem.memory_bytes
        assert limit is None or problem.memory_of(load, way, graph.in_flight[index]) <= limit


@settings(max_examples=some_of(30))
@given(problems(most=7))
def test_more_devices_and_memory_never_hurt_and_nothing_is_below_the_bound(problem: PartitionProblem) -> None:
    problem = replace(problem, memory_bytes=problem.memory_bytes and 3 * problem.memory_bytes)
    try:
        found = partition(problem)
    except InfeasibleError:
        return
    work = sum(problem.work(load) for load in problem.costs.values())
    assert found.value_ns * problem.num_devices >= work
    more = partition(replace(problem, num_devices=problem.num_devices + 1))
    assert more.value_ns <= found.value_ns
    free = partition(replace(problem, memory_bytes=None))
    assert free.value_ns <= found.value_ns
    assert problems_of(StageGraph.of(free.placement, problem.edges, problem.mini_batch), problem.edges) == ()


def least_of_all_chains(problem: PartitionProblem) -> int | None:
    """The least bottleneck of a chain: every cut with every choice, keeping all that stages before have to know."""
    blocks = list(problem.costs.values())
    known: list[dict[tuple[int, int, int], int]] = [{} for _ in range(len(blocks) + 1)]  # devices, size, held: time
    known[-1] = {(0, 0, 0): 0}
    for end in range(len(blocks), 0, -1):
        for (devices, size, held), time in known[end].items():
            for begin, choice in product(range(end), problem.ways):
                own, load = KFKB(1, choice.microbatch_size), together(blocks[begin:end])
                flow = max(own.samples, samples_in_flight(own, KFKB(1, size), held)) if size else own.samples
                now = min(problem.mini_batch, flow)
                key = (devices + choice.replicas, choice.microbatch_size, now)
                limit = problem.memory_bytes or 0
                if key[0] <= problem.num_devices and problem.memory_of(load, choice, now) <= limit:
                    worst = max(time, problem.time_of(load, choice))
                    known[begin][key] = min(worst, known[begin].get(key, worst))
    return min(known[0].values(), default=None)


@settings(max_examples=some_of(20))
@given(st.lists(loads(), min_size=4, max_size=5), st.integers(6, 9), st.integers(15, 60), st.sampled_from((1, 2, 16)))
def test_deep_chains_with_little_memory(each: list[Costs], devices: int, memory: int, rounding: int) -> None:
    """Many stages with micro-batches of several sizes, where samples in flight add up."""
    names = [f"b{index}" for index in range(len(each))]
    edges = tuple(zip(names, names[1:], strict=False))
    blocks = dict(zip(names, each, strict=True))
    problem = PartitionProblem(
        blocks, edges, devices, 2 * MINI_BATCH, ROWS, CHOICES, memory, lambda size, replicas: size
    )
    expected = least_of_all_chains(problem)
    if expected is None:
        with pytest.raises(InfeasibleError, match="would do"):
            partition(problem)
        return
    with grid(rounding):
        assert partition(problem).value_ns == expected
    assert expected <= partition(problem, tolerance=0.1).value_ns <= 1.1 * expected


def test_groups_of_neighbours_where_there_are_too_many_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven branches of two kinds on two devices: neighbours in order of work can be levelled here too."""
    heavy, light = costs_of((6,), (0,), (0,)), costs_of((2,), (0,), (0,))
    blocks = {f"b{index}": heavy if index % 2 else light for index in range(7)}
    problem = PartitionProblem(blocks, (), 2, 1, (Pricing(1),), (Way(1, 1, 0),))
    exact = partition(problem).value_ns
    monkeypatch.setattr(shapes_module, "MAX_GROUPS", 0)
    assert exact == 14 <= partition(problem).value_ns <= 18
