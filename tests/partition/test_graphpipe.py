"""GraphPipe (thesis, chapter 3): Table 3.2 row by row, Fig. 3.5, the case study's stages, and the models of 3.10.3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from pipeplan.costs import build_workload
from pipeplan.errors import InfeasibleError
from pipeplan.examples import model
from pipeplan.files import Block, CostRow, Edge, Placement, Profile, Source
from pipeplan.partition.graph.in_flight import KFKB, samples_in_flight
from pipeplan.partition.graph.search import GraphPartition, graphpipe
from pipeplan.partition.pipedream import pipedream
from pipeplan.partition.piper import piper
from pipeplan.partition.problem import Costs, Partition, PartitionProblem, Pricing, Way
from pipeplan.partition.series_parallel import topological_order
from pipeplan.schedule.stage_graph import kfkb_orders
from pipeplan.workload.task_graph import earliest_starts, task_graph
from references.stage_validity import StageGraph, costs_of, problems_of
from support.marks import one_in, slow_but

SIZES = (1, 2, 4, 8)


def partition(problem: PartitionProblem) -> GraphPartition:
    return next(graphpipe(problem))


def graph_of(problem: PartitionProblem, found: Partition) -> StageGraph:
    return StageGraph.of(found.placement, problem.edges, problem.mini_batch)


def rows(kx: int, bx: int, ky: int, by: int, iy: int) -> list[int]:
    """What the rows of Table 3.2 whose conditions hold say, as they are printed."""
    larger, x, y = max(bx, by), kx * bx, ky * by
    table = [
        (larger < x < y, iy + 2 * larger),
        (larger == x < y, iy + larger),
        (bx <= by < y < x, iy + x - y + 2 * by),
        (bx <= by == y < x, iy + x),
        (by <= bx < y < x, iy + x - y + 2 * bx),
        (by <= bx == y < x, iy + x),
        (larger == y == x, iy + y),
        (larger < y == x, iy + 2 * larger),
        (bx <= x < by <= y, iy + by),
        (by <= y < bx <= x, iy + x - y + bx),
    ]
    return [result for holds, result in table if holds]


@pytest.mark.parametrize(
    ("stage", "successor", "more"),
    [
        (KFKB(2, 2), KFKB(4, 2), 4),
        (KFKB(1, 4), KFKB(4, 2), 4),
        (KFKB(8, 1), KFKB(2, 2), 8),
        (KFKB(4, 2), KFKB(1, 4), 8),
        (KFKB(4, 2), KFKB(4, 1), 8),
        (KFKB(4, 2), KFKB(2, 1), 8),
        (KFKB(1, 4), KFKB(2, 2), 4),
        (KFKB(4, 1), KFKB(2, 2), 4),
        (KFKB(1, 1), KFKB(1, 4), 4),
        (KFKB(1, 4), KFKB(1, 1), 7),
    ],
)
def test_one_case_of_each_row(stage: KFKB, successor: KFKB, more: int) -> None:
    assert samples_in_flight(stage, successor, 100) == 100 + more


def test_the_rows_cover_every_case_once_and_this_is_what_they_say() -> None:
    for kx, bx, ky, by in product(range(1, 9), SIZES, range(1, 9), SIZES):
        said = set(rows(kx, bx, ky, by, 3))
        assert said == {samples_in_flight(KFKB(kx, bx), KFKB(ky, by), 3)}


def test_two_forwards_and_two_backwards_in_turn_save_the_stage_before_a_micro_batch() -> None:
    """Fig. 3.5: micro-batches of 2, 1 and 2 samples; with 2F2B in the middle the first stage holds 3 instead of 4."""
    last = KFKB(1, 2)
    held = [samples_in_flight(KFKB(k, 1), last, 2) for k in (1, 2)]
    first = [samples_in_flight(KFKB(1, 2), KFKB(k, 1), middle) for k, middle in zip((1, 2), held, strict=True)]
    assert [-(-samples // 2) for samples in first] == [4, 3]


def case_study() -> tuple[dict[str, Costs], list[tuple[str, str]]]:
    """Fig. 3.8: two branches of four times attention and two linear layers, then a concatenation; larger is better."""
    loads: dict[str, Costs] = {}
    edges: list[tuple[str, str]] = []
    for branch in "ab":
        names = [f"{branch}{index}.{layer}" for index in range(4) for layer in ("attention", "linear0", "linear1")]
        loads |= dict.fromkeys(names, costs_of((30, 40, 60), (1, 2, 4), (0, 0, 0)))
        edges += [*zip(names, names[1:], strict=False), (names[-1], "concatenation")]
    return loads | {"concatenation": costs_of((0, 0, 0), (0, 0, 0), (0, 0, 0))}, edges


def test_the_case_study_less_depth_and_twice_the_micro_batch() -> None:
    """Fig. 3.9: the same eight stages, but in a line the first stage holds more, so micro-batches are halved.

    The paper counts a depth of 4 for the graph; the stage with the concatenation waits for the other branch's last
    stage, which makes it 5 and needs room for 5 micro-batches in that branch.
    """
    loads, edges = case_study()
    choices = tuple(Way(size, 1, row) for row, size in enumerate((1, 2, 4)))
    problem = PartitionProblem(
        loads, tuple(edges), 8, 32, (Pricing(1), Pricing(2), Pricing(4)), choices, memory_bytes=3 * 5 * 4
    )
    found = partition(problem)
    graph = graph_of(problem, found)
    assert (len(graph.stages), graph.depth) == (8, 5)
    assert {stage.microbatch_size for stage in graph.stages} == {4}
    assert max(graph.in_flight) == 5 * 4
    order = topological_order(tuple(loads), edges)
    in_line = replace(problem, edges=tuple(zip(order, order[1:], strict=False)))
    slower = partition(in_line)
    line = graph_of(in_line, slower)
    assert (len(line.stages), line.depth) == (8, 8)
    assert min(line.size(index) for index in range(8)) == 2
    assert {stage.blocks[:3] for stage in line.stages} == {stage.blocks[:3] for stage in graph.stages}
    assert (found.value_ns, slower.value_ns) == (32 // 4 * 180, 32 // 2 * 120)


def case_study_profile(in_line: bool) -> Profile:
    """The same as a profile: micro-batches of 4 take a sixth less per sample than those of 2."""
    loads, edges = case_study()
    order = topological_order(tuple(loads), edges)
    pairs = [*edges, *zip(order, order[1:], strict=False)] if in_line else edges
    rows = tuple(
        CostRow(microbatch_size=size, forward_ns=time, backward_ns=2 * time, activation_bytes=size)
        for size, time in ((1, 60), (2, 90), (4, 150))
    )
    empty = tuple(row.model_copy(update={"forward_ns": 0, "backward_ns": 0, "activation_bytes": 0}) for row in rows)
    return Profile(
        name="case study",
        source=Source(method="estimated"),
        blocks=tuple(Block(id=id_, operator="layer", costs=empty if id_ == "concatenation" else rows) for id_ in loads),
        edges=tuple(Edge(source=source, target=target) for source, target in dict.fromkeys(pairs)),
    )


def simulated_ns(profile: Profile, placement: Placement, mini_batch: int) -> int:
    """An iteration with 1F1B and without time for messages."""
    workload = build_workload(profile, placement, num_microbatches=mini_batch, microbatch_size=1)
    tasks = task_graph(workload)
    starts = earliest_starts(tasks, kfkb_orders(workload, tasks))
    return max(map(sum, zip(starts, tasks.durations, strict=True)))


def test_the_case_study_gains_by_parallel_branches_and_by_larger_micro_batches() -> None:
    """3.7.4: 20 % more throughput, about 10 % from the shorter pipeline and 10 % from micro-batches of 4 for 2."""
    profile, chain = case_study_profile(in_line=False), case_study_profile(in_line=True)
    room = 3 * 5 * 4  # for 5 micro-batches of 4 samples of a stage's three layers

    def stages(of: Profile, *sizes: int) -> Placement:
        return partition(PartitionProblem.of(of, 8, 64, microbatch_sizes=sizes, memory_bytes=room)).placement

    def depth(of: Profile, placement: Placement) -> int:
        return StageGraph.of(placement, [(edge.source, edge.target) for edge in of.edges], 64).depth

    line, same, graph = stages(chain, 2), stages(profile, 2), stages(profile, 1, 2, 4)
    assert [depth(chain, line), depth(profile, same), depth(profile, graph)] == [8, 5, 5]
    assert {stage.microbatch_size for stage in graph.stages} == {4}
    assert {stage.replicas for stage in stages(chain, 4).stages} == {2}  # in a line only halves of 4 samples fit
    times = [simulated_ns(of, each, 64) for of, each in ((chain, line), (profile, same), (profile, graph))]
    parallel, larger = (before / after - 1 for before, after in zip(times, times[1:], strict=False))
    assert 0.05 < parallel < 0.15
    assert 0.02 < larger < 0.15


@pytest.mark.parametrize("name", ["mmt-2", "dlrm-8", "candle-uno-8"])
@one_in(2, "devices", [4, 8])
def test_no_stage_is_slower_than_the_slowest_of_pipedream_and_piper(name: str, devices: int) -> None:
    """With any size of theirs; Piper on the model with two branches, on the others it does not finish (3.7.2)."""
    mini_batch = devices // 4 * {"mmt-2": 64, "dlrm-8": 256, "candle-uno-8": 4096}[name]
    profile, memory = model(name, device="v100-16gb"), 16 * 10**9
    problem = PartitionProblem.of(profile, devices, mini_batch, memory_bytes=memory, all_reduce=reduced_ns)
    ours = partition(problem).value_ns
    for size in sorted({way.microbatch_size for way in problem.ways}):
        sized = replace(problem, ways=tuple(way for way in problem.ways if way.microbatch_size == size))
        for planner in (partial(pipedream, beside=False), piper)[: 2 if name == "mmt-2" and size == devices else 1]:
            try:
                assert ours <= next(planner(sized)).value_ns
            except InfeasibleError:
                continue


def reduced_ns(size: int, replicas: int) -> int:
    """A ring over 12.5 GB/s."""
    return 2 * (replicas - 1) * (size * 2 // (25 * replicas))


def test_each_stage_chooses_whether_it_recomputes() -> None:
    """Only the first of two stages holds two micro-batches, so with room for one and a half only it recomputes."""
    loads = {name: costs_of((10, 14), (100, 10), (0, 0)) for name in "ab"}
    rows, choices = (Pricing(1), Pricing(1, True)), (Way(1, 1, 0), Way(1, 1, 1, True))
    problem = PartitionProblem(loads, (("a", "b"),), 2, 4, rows, choices, memory_bytes=150)
    found = partition(problem)
    assert [stage.recompute for stage in found.placement.stages] == [True, False]
    assert found.value_ns == 4 * 14
    with pytest.raises(InfeasibleError, match=r"of 150B; 2 devices of 200B would do"):
        partition(replace(problem, ways=choices[:1]))


@slow_but(
    "name, devices, times",
    [(name, *each) for name in ("mmt-2", "dlrm-8", "candle-uno-8") for each in ((4, 1), (16, 4), (32, 8))],
    lambda case: case[1] == 4 or case == ("mmt-2", 32, 8),
)
def test_models_with_their_mini_batches_are_never_worse_than_in_a_line(name: str, devices: int, times: int) -> None:
    """3.10.3, with gradients reduced over 12.5 GB/s. Lines only help by stages over several branches."""
    mini_batch = times * {"mmt-2": 64, "dlrm-8": 256, "candle-uno-8": 4096}[name]
    profile = model(name, device="v100-16gb")
    problem = PartitionProblem.of(
        profile,
        devices,
        mini_batch,
        memory_bytes=16 * 2**30,
        all_reduce=reduced_ns,
    )
    found = partition(problem)
    assert problems_of(graph_of(problem, found), problem.edges) == ()
    assert found.decomposition.added_orders == 0
    order = profile.topological_order()
    in_line = replace(problem, edges=tuple(zip(order, order[1:], strict=False)))
    line = partition(in_line)
    assert found.value_ns <= line.value_ns
    assert graph_of(problem, found).depth <= graph_of(in_line, line).depth
    assert found.series_parallel_ns is not None
    assert found.series_parallel_ns <= 1.5 * found.value_ns


def test_what_is_wrong_with_stages_is_said() -> None:
    """C1 to C5, each broken once."""
    edges = (("a", "b"), ("b", "c"))
    ways = (Way(2, 1, 1), Way(1, 1, 0), Way(2, 2, 0))
    problem = PartitionProblem({}, edges, 4, 8, (Pricing(1), Pricing(2)), ways)
    placement = problem.placed([((block,), way) for block, way in zip("abc", ways, strict=True)], sized=True)
    good = StageGraph.of(placement, edges, 8)
    assert problems_of(good, edges) == ()

    def broken(at: int, **changes: object) -> tuple[str, ...]:
        stage = good.stages[at].model_copy(update=changes)
        return problems_of(replace(good, stages=(*good.stages[:at], stage, *good.stages[at + 1 :])), edges)

    assert broken(1, blocks=("a", "b"))[0].startswith("C1: block 'a' is in 2")
    assert broken(1, blocks=())[0].startswith("C1: block 'b' is in no stage")
    backwards = StageGraph(good.stages[::-1], ((0, 1), (1, 2)), 8, good.in_flight[::-1])
    assert problems_of(backwards, edges)[0].startswith("C1: stages are not convex or not in order")
    assert problems_of(replace(good, edges=((0, 1),)), edges)[0].startswith("C2: 'b' -> 'c'")
    assert broken(2, devices=(0, 3))[0].startswith("C3: device 0")
    assert broken(0, microbatch_size=3)[0].startswith("C4: stage 0 cannot split")
    assert problems_of(replace(good, in_flight=(2, *good.in_flight[1:])), edges)[0].startswith(
        "C5: stage 0 waits for B"
    )
