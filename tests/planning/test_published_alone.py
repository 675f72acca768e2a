"""Planners by name against plain programmes that look at every plan: each alone, by its own objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise, product
from typing import Any

import pytest

from builders import profiles
from pipeplan.checker import check
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, CostRow, Plan, Profile
from pipeplan.partition.chain.autopipe import timeline
from pipeplan.partition.chain.costs import StageTimes
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.comparison import OURS, compare
from pipeplan.planning.planners import PLANNERS
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.planning.trials import on_cluster
from references.dapple import plain_latency, plain_plan

DEVICES, MINI_BATCH, SIZE = 4, 8, 4
FORWARDS = (5, 1, 9, 2, 4, 7)
GRAPH = ((0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5))
"""Two branches of two blocks, between their source and what joins them."""

Stage = tuple[tuple[str, ...], int]
"""Blocks and replicas."""


def profile_of(
    pairs: Sequence[tuple[int, int]] | None = None, size: int = 0, parameters: int = 0, *, split: bool = False
) -> Profile:
    """Blocks whose costs grow with the samples, but for a launch; each sends tensors of a size.

    With ``split`` they have costs on two devices that split them, too.
    """
    rows = [
        [
            CostRow(
                microbatch_size=samples, forward_ns=300 + samples * 100 * each, backward_ns=500 + samples * 200 * each
            )
            for samples in (1, 2, 4)
        ]
        for each in FORWARDS
    ]
    halves = {"shards": 2}
    for own in rows if split else []:
        own += [
            row.model_copy(
                update=halves | {"forward_ns": row.forward_ns // 2, "backward_ns": (row.backward_ns or 0) // 2}
            )
            for row in own
        ]
    return profiles.profile_of(rows, pairs, parameters=[parameters] * len(rows), bytes_per_sample=size)


@cache
def planned(planner: str, branches: bool = False, **how: Any) -> Plan:
    profile = profile_of(GRAPH if branches else None)
    given: dict[str, Any] = {"devices": DEVICES, "mini_batch": MINI_BATCH, "microbatch_size": SIZE, "scheduler": "1f1b"}
    given |= {"deterministic": True, "time_limit": 1.0, "split_backward": False, "num_parted": 0, "recompute": False}
    plan = search_plan(Request.of(profile, **given | how, planner=planner)).plan
    assert check(plan, profile).valid
    return plan


def stages_of(plan: Plan) -> list[Stage]:
    return [(stage.blocks, stage.replicas) for stage in plan.stages if stage.blocks]


def load(profile: Profile, blocks: Sequence[str], replicas: int) -> tuple[int, int, int]:
    """Forward and backward of a micro-batch, and no all-reduce: links are free."""
    costs = [row for block in profile.blocks if block.id in blocks for row in block.costs]
    rows = [row for row in costs if row.microbatch_size == SIZE // replicas]
    return sum(row.forward_ns for row in rows), sum(row.backward_ns or 0 for row in rows), 0


def slowest(profile: Profile, stages: Sequence[Stage]) -> int:
    return max(sum(load(profile, *stage)) for stage in stages)


def lines(profile: Profile) -> Iterator[list[tuple[str, ...]]]:
    """All contiguous partitions of the blocks in order."""
    order = profile.topological_order()
    for count in range(1, DEVICES + 1):
        for cuts in combinations(range(1, len(order)), count - 1):
            yield [order[begin:end] for begin, end in pairwise((0, *cuts, len(order)))]


def downset_chains(profile: Profile) -> Iterator[list[tuple[str, ...]]]:
    """All partitions into stages in an order that no edge leads back in."""
    order = profile.topological_order()
    for count in range(1, DEVICES + 1):
        for numbers in product(range(count), repeat=len(order)):
            at = dict(zip(order, numbers, strict=True))
            if set(numbers) == set(range(count)) and all(at[e.source] <= at[e.target] for e in profile.edges):
                yield [tuple(block for block in order if at[block] == number) for number in range(count)]


def replicated(partitions: Iterator[list[tuple[str, ...]]]) -> Iterator[list[Stage]]:
    for blocks in partitions:
        for replicas in product((1, 2, 4), repeat=len(blocks)):
            if sum(replicas) <= DEVICES:
                yield list(zip(blocks, replicas, strict=True))


@pytest.mark.parametrize(
    ("planner", "partitions", "branches"),
    [("pipedream", lines, False), ("pipedream", lines, True), ("piper", downset_chains, True)],
)
def test_the_slowest_stage_is_the_least_of_all_plans(
    planner: str, partitions: Callable[[Profile], Iterator[list[tuple[str, ...]]]], branches: bool
) -> None:
    profile = profile_of(GRAPH if branches else None)
    least = min(slowest(profile, stages) for stages in replicated(partitions(profile)))
    assert slowest(profile, stages_of(planned(planner, branches))) == least


def test_dapple_chooses_as_the_plain_programme_does() -> None:
    profile = profile_of()
    order, replicas, count = profile.topological_order(), (1, 2, 4), MINI_BATCH // SIZE

    def shared(blocks: Sequence[str], way: int, devices: int) -> tuple[int, int, int]:
        forward, backward, wait = load(profile, blocks, replicas[way])
        return forward * replicas[way] // devices, backward * replicas[way] // devices, wait

    plain = plain_plan(
        len(order),
        [range(DEVICES)],
        count,
        replicas,
        lambda stages: [shared(order[begin:end], way, len(devices)) for begin, end, way, devices in stages],
        lambda stage, later: True,
    )
    assert plain is not None
    found = [load(profile, *stage) for stage in stages_of(planned("dapple"))]
    assert plain_latency(found, count) == plain[0]


def test_autopipe_has_a_depth_for_all_and_as_long_an_iteration_as_it_simulates() -> None:
    """All stages have as many replicas, and no such plan is shorter by 1F1B, here where the search meets the best."""
    profile = profile_of()
    plan = planned("autopipe")
    stages = stages_of(plan)
    assert len({replicas for _, replicas in stages}) == 1
    assert plan.provenance.options["stages"] == "AutoPipe"
    assert plan.placement != "sequential"

    def iteration(stages: Sequence[Stage]) -> int:
        forwards, backwards, _ = zip(*(load(profile, *stage) for stage in stages), strict=True)
        return timeline(StageTimes(forwards, backwards), MINI_BATCH // SIZE).iteration_ns

    assert plan.predicted.makespan_ns == iteration(stages)
    even = [each for each in replicated(lines(profile)) if len(each) * each[0][1] == DEVICES]
    alike = [each for each in even if len({replicas for _, replicas in each}) == 1]
    assert iteration(stages) == min(map(iteration, alike))


NODES = Cluster.of("nodes", DEVICES, levels=[("node", 2, "50ns", 10**10), ("net", DEVICES, "900ns", 10**9)])
"""Two nodes of two devices; a byte takes 0.1 ns inside, 1 ns between them."""


def linked(
    planner: str, size: int, parameters: int = 0, branches: bool = False, split: bool = False, **how: Any
) -> tuple[Plan, tuple[tuple[int, ...], ...]]:
    """A plan on two nodes, with tensors of a size, and where its stages are."""
    profile = profile_of(GRAPH if branches else None, size, parameters, split=split)
    given: dict[str, Any] = {"cluster": NODES, "mini_batch": MINI_BATCH, "microbatch_size": SIZE, "scheduler": "1f1b"}
    given |= {"deterministic": True, "time_limit": 1.0, "split_backward": False, "num_parted": 0, "recompute": False}
    plan = search_plan(Request.of(profile, **given | how, planner=planner)).plan
    assert check(plan, profile).valid
    assert check(plan, profile, NODES).valid
    return plan, tuple(stage.devices for stage in plan.stages if stage.blocks)


def nodes(devices: Sequence[int]) -> set[int]:
    return {device // 2 for device in devices}


@pytest.mark.parametrize("planner", ["pipedream", "piper", "dapple"])
def test_messages_count_while_stages_are_chosen(planner: str) -> None:
    """Large ones do not leave a node: stages are copies over both, cut inside of each if at all."""
    _, where = linked(planner, 10**4)
    assert all(nodes(one) == nodes(other) == {0, 1} for one, other in pairwise((*where, where[0])))


@pytest.mark.parametrize("planner", ["pipedream", "dapple"])
def test_sums_count_where_stages_are(planner: str) -> None:
    """Dear ones do not leave a node: stages are each in one."""
    _, where = linked(planner, 1, 10**5)
    assert all(len(nodes(devices)) == 1 for devices in where)
    assert set().union(*map(nodes, where)) == {0, 1}


def test_stages_stay_on_the_devices_that_a_planner_gives_them() -> None:
    """As they are cut for the links between these, although others may be nearer to each other."""
    given: dict[str, Any] = {"cluster": NODES, "mini_batch": MINI_BATCH, "microbatch_size": SIZE, "recompute": False}
    request = Request.of(profile_of(None, 10**4), **given, planner="pipedream")
    candidate = next(PLANNERS["pipedream"].proposals(request))()
    assert isinstance(candidate, PlacementCandidate)
    (_, where), placed = linked("pipedream", 10**4), [stage.devices for stage in candidate.placement.stages]
    assert list(where) == placed == [(0, 2), (1, 3)]
    assert on_cluster(request, candidate) is None


@pytest.mark.parametrize("planner", ["pipedream", "piper", "dapple"])
def test_planners_on_a_cluster_plan_graphs_and_what_is_recomputed(planner: str) -> None:
    assert linked(planner, 40, 10, branches=True)[0].placement == "sequential"
    assert linked(planner, 40, 10, recompute=True)[0].stages[0].recompute


def test_piper_splits_blocks() -> None:
    """In halves where their copies would have much to sum, and no cut is even; not where each device is to have all."""
    plan, _ = linked("piper", 10**4, 10**5, split=True)
    assert {stage.shards for stage in plan.stages} == {2}
    whole, _ = linked("piper", 10**4, 10**5, split=True, shards=1)
    assert {stage.shards for stage in whole.stages} == {1}


def test_stages_of_planners_for_lines_wait_for_each_other() -> None:
    assert {planned(each, True).placement for each in ("pipedream", "piper", "dapple")} == {"sequential"}
    assert planned("pipedream").placement == "stage graph"


def test_replicas_that_are_asked_for_are_those_of_all_stages() -> None:
    for planner in ("pipedream", "dapple", "autopipe"):
        assert {stage.replicas for stage in planned(planner, replicas=2).stages} == {2}


def test_autopipe_does_not_plan_graphs() -> None:
    with pytest.raises(
        UsageError, match="'b2' does not feed 'b3'; choose --planner graphpipe or piper, which plan graphs"
    ):
        planned("autopipe", True)


def test_names_are_completed_and_mended() -> None:
    with pytest.raises(UsageError, match="--planner 'dappel' is not known; did you mean dapple"):
        planned("dappel")


def test_autopipes_slices_are_as_many_as_its_formula_has() -> None:
    """The fewest m such that micro-batch m, whole, ends its forward on stage p-1-m before the first gradient comes."""
    found = planned("autopipe", num_parted="autopipe", replicas=1, mini_batch=32)
    profile = profile_of()
    loads = [load(profile, *stage) for stage in stages_of(found)]
    count = len(loads)

    def gradient(stage: int) -> int:
        """When the first one is on a stage, after forwards in halves."""
        return sum(f / 2 for f, _, _ in loads) + after_halves + sum(b for _, b, _ in loads[stage + 1 :])

    ends = [[0.0] * count for _ in range(count)]  # [micro-batch][stage] of forwards in halves alone
    free = [0.0] * count
    for index in range(count):
        sent = [0.0, 0.0]
        for stage in range(count - index):
            for half in range(2):
                free[stage] = max(free[stage], sent[half]) + loads[stage][0] / 2
                sent[half] = free[stage]
        ends[index] = list(free)
    after_halves = ends[0][-1] - sum(f / 2 for f, _, _ in loads)
    enough = [
        split
        for split in range(1, count)
        if ends[split - 1][0] + sum(f for f, _, _ in loads[: count - split]) <= gradient(count - 1 - split)
    ]
    assert num_sliced(found) == min([*enough, count])
    assert found.provenance.options["num_parted"] == "autopipe"


def num_sliced(plan: Plan) -> int:
    return max(stage.num_parted for stage in plan.stages)


def test_what_cannot_be_sliced_stays_whole_and_says_so() -> None:
    with pytest.warns(UserWarning, match="--slices autopipe: no micro-batch is sliced"):
        plan = planned("autopipe", num_parted="autopipe", microbatch_size=1)
    assert num_sliced(plan) == 0


def test_compare_has_the_planners_that_apply_as_rows() -> None:
    """Each as a search with 1F1B finds it, and stages in a line; AutoPipe's is refused for the graph, and says why."""
    given: dict[str, Any] = {"devices": DEVICES, "mini_batch": MINI_BATCH, "microbatch_size": SIZE, "recompute": False}
    asked = Request.of(profile_of(GRAPH), **given, deterministic=True, time_limit=0.5, planner="all")
    found = compare(asked)
    rows = {row.placement: row for row in found.rows if row.placement in PLANNERS}
    assert set(rows) == {"graphpipe", "pipedream", "piper", "dapple"}
    assert all(row.schedule == "1f1b" for row in rows.values())
    for name, row in rows.items():
        assert row.iteration_ns == planned(name, True, late_inputs=False).predicted.iteration_ns
    assert {"1f1b", OURS} <= {row.schedule for row in found.rows if row.placement == "sequential"}
    (why,) = [absent.why for absent in found.missing if absent.placement == "autopipe"]
    assert "does not feed" in why
    assert found.rows[0].iteration_ns == min(row.iteration_ns for row in found.rows)
    with pytest.raises(UsageError, match="--planner all is for compare"):
        search_plan(asked)
