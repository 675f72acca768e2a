"""Tensor, data and pipeline parallel sizes together: what is chosen, the bound over all, and what is refused."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from builders import clusters
from builders.profiles import joined, stage_per_block
from builders.requests import request_of
from pipeplan.checker import check
from pipeplan.costs import StageCost, build_workload, stage_costs
from pipeplan.costs.after import AfterActions
from pipeplan.costs.zero import Experts, Zero
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Block, Cluster, CostRow, PlacedStage, Placement, Plan, Profile, Recipe
from pipeplan.partition.chain.autopipe import timeline
from pipeplan.partition.chain.costs import StageTimes
from pipeplan.partition.chain.kernel import balanced_split
from pipeplan.partition.chain.rebalance import even
from pipeplan.partition.mapping import neighbours
from pipeplan.partition.problem import PartitionProblem
from pipeplan.planning import candidates, uniform_space
from pipeplan.planning.bounds import least_state_bytes, request_bound
from pipeplan.planning.candidates import (
    BoundedProposal,
    PlacementCandidate,
    SplitSizes,
    likely_choices,
    open_splits,
    placed,
    uniform_choices,
    workload_of,
)
from pipeplan.planning.next_steps import next_steps
from pipeplan.planning.request import Batch, Request, input_notes
from pipeplan.planning.steps import STEPS, search_plan, without
from pipeplan.planning.trials import Trial, unfit_by_state
from pipeplan.planning.uniform_space import Blocks, Choice, longest_stages
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.workload import Workload
from support.marks import one_in, slow_but, some_of

QUICK: dict[str, Any] = {"time_limit": 0.3, "deterministic": True}
SIZES, SHARDS, MINI_BATCH = (1, 2), (1, 2), 8
NO_END = 3600.0
UNIFORM = without(
    {"every width", "stage ways", "one stage", "stage graphs", "published planners", "slice forwards"}, STEPS
)


@st.composite
def chains(
    draw: st.DrawFn,
    most: int = 6,
    contexts: tuple[int, ...] = (1,),
    experts: tuple[tuple[int, int], ...] = ((1, 1),),
    shards_of_rows: tuple[int, ...] = SHARDS,
) -> Profile:
    """Two to six blocks with costs for one and two shards and samples; half of a block takes more than half as long.

    So does half of each sequence, where there are contexts, and of the experts of some blocks, of which each of
    ``experts`` says how many devices share them, and how many split each.
    """

    def block(index: int) -> Block:
        rows = []
        alone = draw(st.integers(2, 30)), draw(st.integers(2, 60)), draw(st.integers(1, 40))
        own = experts if index % 2 == 0 else ((1, 1),)
        for size, shards, context, (expert, split) in itertools.product(SIZES, shards_of_rows, contexts, own):
            parts = shards * context * (expert if index else 1)
            forward, backward, held = (part * size // parts + draw(st.integers(0, 2)) for part in alone)
            row = {"microbatch_size": size, "shards": shards, "context": context, "activation_bytes": held}
            row |= {"expert": expert, "expert_shards": split}
            rows.append(CostRow(**row, forward_ns=forward + 1, backward_ns=backward + 1))
        kept = {"parameters": 20, "expert_parameters": 16, "parameter_bytes": 20} if len(own) > 1 else {}
        kept = kept or {"parameter_bytes": draw(st.integers(0, 20))}
        return Block(id=f"b{index}", operator="layer", costs=tuple(rows), **kept)

    return joined([block(index) for index in range(draw(st.integers(2, most)))])


def iterations(profile: Profile, num_devices: int, memory: int | None, recompute: bool) -> Iterator[int]:
    """1F1B on every cut, for every uniform layout: where it fits, its ns.

    That is (shards, context, expert, expert shards, replicas, stages, size).

    With what is recomputed open, too, it is the least of all choices of each stage's blocks that fits.
    """
    ids = [block.id for block in profile.blocks]
    rows = [row for block in profile.blocks for row in block.costs]
    sizes = (sorted({getattr(row, x) for row in rows}) for x in ("shards", "context"))
    sharing = sorted({(row.expert, row.expert_shards) for row in rows})
    splits = [(shards, context, *own) for shards, context, own in itertools.product(*sizes, sharing)]

    @cache
    def stage(begin: int, end: int, samples: int, split: tuple[int, ...], in_flight: int) -> StageCost | None:
        every = itertools.product((False, True), repeat=end - begin) if recompute else [(False,) * (end - begin)]
        shards, context, expert, expert_shards = split
        how: dict[str, Any] = {"context": context, "experts": Experts(expert, split=expert_shards)}
        costs = [stage_costs(profile, ids[begin:end], samples, shards, recompute=each, **how) for each in every]
        fitting = [cost for cost in costs if memory is None or cost.memory_bytes(in_flight) <= memory]
        return min(fitting, key=lambda cost: cost.backward_ns, default=None)

    for split, samples, replicas in itertools.product(splits, SIZES, range(1, num_devices + 1)):
        if MINI_BATCH % (samples * replicas) == split[0] * split[1] * replicas % split[2] == 0:
            count = MINI_BATCH // (samples * replicas)
            for stages in range(1, min(len(ids), num_devices // (split[0] * split[1] * replicas)) + 1):
                for cuts in itertools.combinations(range(1, len(ids)), stages - 1):
                    ends = [0, *cuts, len(ids)]
                    ranges = enumerate(itertools.pairwise(ends))
                    found = [stage(a, b, samples, split, min(count, stages - place)) for place, (a, b) in ranges]
                    costs = [cost for cost in found if cost is not None]
                    if len(costs) == stages:
                        times = StageTimes(
                            tuple(cost.forward_ns for cost in costs), tuple(cost.backward_ns for cost in costs)
                        )
                        yield timeline(times, count).iteration_ns


def asked(profile: Profile, num_devices: int, memory: int | None = None, **others: Any) -> Request:
    fixed = {"scheduler": "1f1b", "num_parted": 0, "split_backward": False, "recompute": False}
    quick = {"time_limit": 1.0, "deterministic": True, "sizes": SIZES, "memory_bytes": memory}
    return request_of(profile, "auto", Batch(MINI_BATCH, 1), num_devices, **(fixed | quick | others))


def best_of_search(profile: Profile, num_devices: int, memory: int | None, recompute: bool) -> None:
    """It equals the best of all, and no bound is above it."""
    best = min(iterations(profile, num_devices, memory, recompute), default=None)
    if best is None:
        return
    request = asked(profile, num_devices, memory, recompute=None if recompute else False)
    found = search_plan(request, steps=UNIFORM)
    assert found.plan.predicted.iteration_ns == best
    assert found.lower_bound_ns <= best
    assert request_bound(request) <= best
    assert min(each.least_ns for each in uniform_choices(request)) <= best


LIMITS = st.one_of(st.none(), st.integers(60, 300))
EXPERT_WAYS = ((1, 1), (2, 1), (2, 2))
"""How many devices share experts, and how many split each."""
MORE_CHAINS = st.one_of(chains(6), chains(4, (1, 2)), chains(4, experts=(*EXPERT_WAYS, (4, 2))))


@settings(max_examples=3, suppress_health_check=list(HealthCheck), deadline=None)
@given(chains(4), st.integers(2, 5), LIMITS, st.booleans())
def test_search_finds_the_best_of_all_uniform_layouts(
    profile: Profile, num_devices: int, memory: int | None, recompute: bool
) -> None:
    """Every size of tensor, data and pipeline parallelism, micro-batch, cut and recomputation, by brute force."""
    best_of_search(profile, num_devices, memory, recompute)


@settings(max_examples=3, suppress_health_check=list(HealthCheck), deadline=None)
@given(chains(4, shards_of_rows=(1,)), st.integers(3, 6), LIMITS, st.booleans())
def test_of_whole_blocks_the_best_of_all_is_found_too(
    profile: Profile, num_devices: int, memory: int | None, recompute: bool
) -> None:
    """The same where no block can be split: shorter pipelines on some of the devices, too."""
    best_of_search(profile, num_devices, memory, recompute)


@settings(max_examples=3, suppress_health_check=list(HealthCheck), deadline=None)
@given(chains(3, (1, 2)), st.integers(2, 5), LIMITS, st.booleans())
def test_sizes_of_context_parallelism_are_among_them(
    profile: Profile, num_devices: int, memory: int | None, recompute: bool
) -> None:
    """The same where devices may share sequences, too."""
    best_of_search(profile, num_devices, memory, recompute)


@settings(max_examples=3, suppress_health_check=list(HealthCheck), deadline=None)
@given(chains(3, experts=EXPERT_WAYS), st.integers(2, 5), LIMITS, st.booleans())
def test_sizes_of_expert_parallelism_are_among_them(
    profile: Profile, num_devices: int, memory: int | None, recompute: bool
) -> None:
    """The same where devices may share the experts of some blocks, whole ones each or parts of the same."""
    best_of_search(profile, num_devices, memory, recompute)


@pytest.mark.slow
@settings(max_examples=some_of(20), suppress_health_check=list(HealthCheck), deadline=None)
@given(
    st.one_of(chains(6), chains(4, (1, 2)), chains(4, experts=(*EXPERT_WAYS, (4, 2)))),
    st.integers(2, 8),
    LIMITS,
    st.booleans(),
)
def test_search_finds_the_best_of_more_layouts(
    profile: Profile, num_devices: int, memory: int | None, recompute: bool
) -> None:
    """The same of up to six blocks on up to eight devices."""
    best_of_search(profile, num_devices, memory, recompute)


@settings(max_examples=3, suppress_health_check=list(HealthCheck), deadline=None)
@given(chains(3), st.integers(2, 4), st.booleans(), st.sampled_from([None, 80, 150]))
def test_no_candidate_is_below_its_bound(
    profile: Profile, num_devices: int, recompute: bool, memory: int | None
) -> None:
    """Whatever its cut, and the schedule that is best for it, as far as its work and dependencies say."""
    request = asked(profile, num_devices, memory, scheduler="auto", recompute=recompute, num_parted=None)
    bounds = {each.choice: each.least_ns for each in uniform_choices(request)}
    for choice, least_ns in bounds.items():
        for cut in (None, even):
            candidate = placed(request, choice, cut)
            if isinstance(candidate, PlacementCandidate):
                trial = Trial.of(request, candidate)
                trial.look()
                assert trial.value_ns is None or least_ns <= trial.value_ns


@settings(max_examples=4, suppress_health_check=list(HealthCheck), deadline=None)
@given(chains(3), st.integers(2, 4), st.sampled_from([1, 7]), st.sampled_from([None, 1]))
def test_bounds_that_know_the_step_are_below_every_candidate(
    profile: Profile, num_devices: int, rate: int, zero: int | None
) -> None:
    """Of every uniform layout, and of every request for one strategy, whatever replicas divide."""
    stepped = profile.model_copy(update={"step_bytes_per_s": rate * 10**9})
    request = asked(stepped, num_devices, scheduler="auto", num_parted=None, zero=zero)
    least = request_bound(request)
    for each in uniform_choices(request):
        candidate = placed(request, each.choice, None)
        if isinstance(candidate, PlacementCandidate):
            trial = Trial.of(request, candidate)
            trial.look()
            assert trial.value_ns is None or max(least, each.least_ns) <= trial.value_ns
            alone = replace(request, placement=each.choice.strategy)
            assert trial.value_ns is None or request_bound(alone) <= trial.value_ns


def test_bounds_and_cuts_know_the_step() -> None:
    """Three blocks of 100 fp32 parameters, 28 bytes moved of each, a byte each ns."""
    blocks = [Block.of(f"b{n}", "1us", "2us", trained=100) for n in range(3)]
    made = Profile.of("stepped", blocks, recipe="fp32").model_copy(update={"step_bytes_per_s": 10**9})
    request = Request(made, 1, Batch(4, 1), time_limit=1.0, deterministic=True)
    assert request_bound(request) == 4 * 3 * 3000 + 3 * 2800
    assert request_bound(replace(request, num_devices=3)) == 4 * 3000 + 2800
    assert request_bound(replace(request, placement="one-to-one")) == 4 * 3 * 3000 + 3 * 2800
    assert search_plan(request).plan.predicted.iteration_ns == request_bound(request)
    after = AfterActions.of(made, None)
    problem = PartitionProblem.of(made, 1, 4, microbatch_sizes=[1], all_reduce=after, steps=after.steps)
    assert problem.time_of(problem.costs["b0"], problem.ways[0]) == 4 * 3000 + 2800
    shared = AfterActions.of(made, None, sharing=lambda replicas: Zero(1, replicas))
    assert shared(400, 2) == 2800 // 2, "master copies and moments are stepped in halves"


@settings(max_examples=some_of(20), deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), min_size=6, max_size=6), min_size=1, max_size=3))
def test_longest_stages_are_those_of_the_evenest_cut(chains: list[list[int]]) -> None:
    """Times so small that what is halved is one ns at the end."""
    found = longest_stages([np.array([0, *itertools.accumulate(times)]) for times in chains], 6)
    for own, times in zip(found.tolist(), chains, strict=True):
        for count, longest in enumerate(own, 1):
            begins = balanced_split(times, count)
            assert begins is not None
            assert longest == max(sum(times[a:b]) for a, b in itertools.pairwise((*begins, len(times))))


@pytest.mark.parametrize("most", [7, 60])
@pytest.mark.parametrize("look_ups", [2**20, 500])
def test_longest_stages_of_some_numbers_are_those_of_all(
    most: int, look_ups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of others they are no more."""
    monkeypatch.setattr(uniform_space, "MOST_LOOK_UPS", look_ups)
    rng = random.Random(most)
    sums = [np.array([0, *itertools.accumulate(rng.randrange(1, 900) for _ in range(70))]) for _ in range(3)]
    every = longest_stages(sums, most)
    for _ in range(5):
        wanted = np.array(sorted(rng.sample(range(1, most + 1), 4)))
        some = longest_stages(sums, most, wanted)
        assert (some[:, wanted - 1] == every[:, wanted - 1]).all()
        assert (some <= every).all()


SPLIT = joined(
    [
        Block(
            id=f"b{index}",
            operator="attention",
            dimensions={"heads": 28},
            costs=tuple(
                CostRow(microbatch_size=1, shards=shards, forward_ns=100 // shards, backward_ns=200 // shards)
                for shards in (1, 2, 4)
            ),
        )
        for index in range(4)
    ]
)


def test_groups_of_devices_stay_inside_nodes() -> None:
    """Three in nodes of eight leave two devices idle, and no group is taken apart where devices are chosen."""
    cluster = Cluster.of("two-nodes", 16, levels=[("node", 8, "3us", "300GB"), ("net", 16, "10us", "25GB")])
    assert neighbours(cluster, 16, 3) == [(0, 1, 2), (3, 4, 5), (8, 9, 10), (11, 12, 13)]
    assert neighbours(cluster, 16, 16) == [tuple(range(16))]
    assert neighbours(None, 5, 2) == [(0, 1), (2, 3)]
    found = search_plan(Request.of(SPLIT, cluster=cluster, mini_batch=8, shards=4, replicas=1, **QUICK))
    assert {stage.shards for stage in found.plan.stages} == {4}
    assert all(stage.devices[0] // 8 == stage.devices[-1] // 8 for stage in found.plan.stages)
    assert all(stage.devices == tuple(range(stage.devices[0], stage.devices[0] + 4)) for stage in found.plan.stages)


def test_blocks_are_split_where_that_is_quicker_or_asked_for() -> None:
    """One sample at a time on four devices: a pipeline of it waits, four devices for each block do not."""
    found = search_plan(Request.of(SPLIT, devices=4, mini_batch=1, **QUICK))
    assert [(stage.shards, stage.replicas) for stage in found.plan.stages] == [(4, 1)]
    assert found.plan.predicted.iteration_ns == found.lower_bound_ns == 300
    alone = search_plan(Request.of(SPLIT, devices=4, mini_batch=1, shards=1, **QUICK))
    assert alone.plan.predicted.iteration_ns == alone.lower_bound_ns == 1200
    strategy = search_plan(Request.of(SPLIT, devices=4, mini_batch=8, placement="one-to-one", **QUICK))
    assert {stage.shards for stage in strategy.plan.stages} == {1}, "as with replicas, only what is asked for"
    asked_for = search_plan(Request.of(SPLIT, devices=4, mini_batch=8, placement="circular", shards=2, **QUICK))
    assert {stage.shards for stage in asked_for.plan.stages} == {2}
    assert asked_for.lower_bound_ns <= asked_for.plan.predicted.iteration_ns


def test_of_large_requests_the_longest_pipelines_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """For everything else alike, without a table of all; and after them every layout there is, once."""
    request = Request.of(SPLIT, devices=8, mini_batch=8, memory_bytes=200, **QUICK)
    every = {each.choice for each in uniform_choices(request)}
    monkeypatch.setattr(candidates, "LARGE", 1)
    first = {each.choice for each in likely_choices(request)}
    assert first < every

    def longest(choices: Iterable[Choice]) -> dict[Choice, int]:
        found: dict[Choice, int] = {}
        for each in choices:
            like = replace(each, positions=None, usual=None)
            found[like] = max(found.get(like, 0), each.positions or 0)
        return found

    most = longest(first)
    assert most == longest(every)
    assert all(each.positions == most[replace(each, positions=None, usual=None)] for each in first)
    whole = uniform_choices
    tables = list[int]()
    monkeypatch.setattr(candidates, "uniform_choices", lambda asked: tables.append(1) or whole(asked))
    found = list[Choice]()
    for proposal in candidates._chains(request):
        assert isinstance(proposal, BoundedProposal)
        asked_of = proposal.propose.args if isinstance(proposal.propose, partial) else ()
        if candidates._chain in asked_of:
            found.append(next(each for each in asked_of if isinstance(each, Choice)))
            assert found[-1] in first or tables, "the whole table is not made before"
    assert found[0] in first
    assert len(found) == len(every)
    assert set(found) == every


def test_virtual_stages_are_a_choice() -> None:
    """Of 16 alike blocks on 4 devices, 4 micro-batches are ended soonest by 4 blocks in turn on each."""
    row = CostRow(microbatch_size=1, forward_ns=10, backward_ns=20, activation_bytes=1)
    blocks = [Block(id=f"b{at}", operator="layer", parameter_bytes=1, costs=(row,)) for at in range(16)]
    given = {"scheduler": "interleaved-1f1b", "positions": 4, "placement": "circular"}
    request = replace(asked(joined(blocks), 4), **given, batch=Batch(4, 1), sizes=(1,))
    assert {each.choice.per_position for each in uniform_choices(request)} == {2, 3, 4}
    assert len(search_plan(request).plan.stages) == 16
    two = search_plan(replace(request, chunks=2)).plan
    assert len(two.stages) == 8
    assert two.predicted.iteration_ns > search_plan(request).plan.predicted.iteration_ns
    assert {each.choice.per_position for each in uniform_choices(replace(request, chunks=3))} == {3}
    larger = replace(request, num_devices=1024, batch=Batch(1024, 1), positions=4, replicas=None)
    assert {each.choice.per_position for each in uniform_choices(larger)} == {2, 3, 4}


def test_pipelines_are_as_long_as_asked_for() -> None:
    """What tensor, pipeline and data parallel sizes are given is kept, and the others follow from the devices."""
    for said, sizes in (
        ({"devices": 4, "positions": 2, "shards": 2}, (2, 2, 1)),
        ({"devices": 4, "positions": 2, "shards": 1}, (2, 1, 2)),
        ({"devices": 4, "positions": 2, "placement": "one-to-one"}, (2, 1, 2)),
        ({"positions": 2, "shards": 2, "replicas": 2}, (2, 2, 2)),
    ):
        plan = search_plan(Request.of(SPLIT, mini_batch=8, **said, **QUICK)).plan
        stages = plan.stages
        assert len({stage.devices for stage in stages}) == sizes[0]
        assert {(stage.shards, stage.replicas) for stage in stages} == {sizes[1:]}
        assert len({device for stage in stages for device in stage.devices}) == sizes[0] * sizes[1] * sizes[2]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"shards": 8}, "choose --tp 1, 2, 4, or profile with --shards of 1, 2, 4, 7, 14, 28 ("),
        ({"shards": 7}, "choose --tp 1, 2, 4, or profile with --shards 7"),
        ({"devices": 6, "shards": 4}, "does not divide 6 devices; choose --tp 1, 2, or --devices 8"),
        ({"shards": 2, "replicas": 8}, "--tp 2 x --replicas 8 does not divide 8 devices; choose --tp 1, or"),
        ({"shards": 2, "spread": True}, "leave one of them out"),
        ({"positions": 3}, "--pp 3 does not divide 8 devices; choose --pp 1, 2, 4, or give --devices 9"),
        ({"positions": 4, "shards": 4}, "--pp 4 x --tp 4 does not divide 8 devices; choose --pp 1, 2, or give"),
        (
            {"positions": 2, "shards": 2, "replicas": 1},
            "--pp 2 x --tp 2 x --dp 1 is 4 devices, not 8; choose --pp 4, or give --devices 4",
        ),
        ({"positions": 8}, "--pp 8 needs a block for each: 'test' has only 4; choose --pp 1, 2, 4"),
        ({"devices": None, "positions": 2, "placement": stage_per_block(SPLIT)}, "--pp 2 would do nothing: the"),
        ({"devices": None, "shards": 2, "placement": stage_per_block(SPLIT)}, "--tp 2 would do nothing: the placement"),
    ],
)
def test_refusals_say_what_would_do(said: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        Request.of(SPLIT, **({"devices": 8, "mini_batch": 8} | said))


SHARED = SPLIT.model_copy(
    update={
        "blocks": tuple(
            block.model_copy(
                update={
                    "costs": tuple(
                        row.model_copy(update={"context": context, "backward_ns": (row.backward_ns or 0) // context})
                        for row in block.costs
                        for context in (1, 2)
                    )
                }
            )
            for block in SPLIT.blocks
        )
    }
)
"""The same blocks, whose backward is as quick on two devices that share each sequence as it is divided."""


def test_sequences_are_shared_where_that_is_quicker_or_asked_for() -> None:
    """What four sizes are given is kept, the others follow; all of them together are the number of devices."""
    free = search_plan(Request.of(SHARED, devices=4, mini_batch=1, **QUICK))
    assert free.plan.predicted.iteration_ns == 300  # in four shards: half of a sequence takes as long forward
    assert {stage.context for stage in free.plan.stages} == {1}
    eight = search_plan(Request.of(SHARED, devices=8, mini_batch=1, **QUICK))
    assert {(stage.shards, stage.context) for stage in eight.plan.stages} == {(4, 2)}
    assert eight.plan.predicted.iteration_ns == 200
    for said, sizes in (
        ({"devices": 8, "positions": 2, "shards": 2, "context": 2}, (2, 2, 2, 1)),
        ({"devices": 8, "positions": 2, "context": 2, "replicas": 2}, (2, 1, 2, 2)),
        ({"devices": 8, "positions": 2, "shards": 1, "context": 2, "placement": "circular"}, (2, 1, 2, 2)),
        ({"positions": 2, "shards": 2, "replicas": 2, "context": 2}, (2, 2, 2, 2)),
        ({"devices": 8, "positions": 2, "shards": 2, "context": 1}, (2, 2, 1, 2)),
    ):
        plan = search_plan(Request.of(SHARED, mini_batch=8, **said, **QUICK)).plan
        stages = plan.stages
        assert len({stage.devices for stage in stages}) == sizes[0], said
        assert {(stage.shards, stage.context, stage.replicas) for stage in stages} == {sizes[1:]}, said
        assert len(plan.devices) == math.prod(sizes)


def test_plans_that_share_sequences_can_be_trained_with() -> None:
    """So nothing is said of what only plans can do."""
    result = search_plan(request := Request.of(SHARED, devices=8, mini_batch=1, **QUICK))
    assert {stage.context for stage in result.plan.stages} != {1}
    steps = next_steps(request, result, simulate(result.plan), None)
    assert not any("can train" in each.brings for each in steps)


def test_the_table_knows_what_sharing_a_sequence_takes() -> None:
    """One stage has no bubble: what usually is, is what its plan takes, sums of gradients over both parts included."""
    blocks = tuple(block.model_copy(update={"parameter_bytes": 1000}) for block in SHARED.blocks)
    cluster = Cluster.of("one", 2, levels=[("all", 2, "10ns", "100GB")])
    known = SHARED.model_copy(update={"blocks": blocks})
    request = Request.of(known, cluster=cluster, mini_batch=2, shards=1, context=2, zero=0, **QUICK)
    table = [each for each in uniform_choices(request) if each.choice.positions == 1]
    plan = search_plan(request).plan
    assert [(stage.context, stage.sync_ns > 0) for stage in plan.stages] == [(2, True)]
    assert {round(each.usual_ns) for each in table} == {plan.predicted.iteration_ns}
    assert {2 * 4 * (100 + 100) - each.least_ns for each in table} == {1}, "floats are off by less than one"


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("bandwidth", ["50GB", "10GB", "500MB"])
def test_of_stages_in_turn_only_sums_that_run_beside_nothing_make_an_iteration_longer(
    bandwidth: str, zero: int
) -> None:
    """A stage's gradients are summed while the stages before it on its devices still run their last backwards."""
    blocks = [Block.of(f"b{number}", "1ms", "2ms", trained=20_000_000) for number in range(32)]
    cluster = Cluster.of("one", 8, levels=[("all", 8, "1us", bandwidth)])
    said: dict[str, Any] = {"mini_batch": 32, "replicas": 2, "positions": 4, "zero": zero, **QUICK}
    request = Request.of(Profile.of("alike", blocks, recipe="fp32"), cluster=cluster, placement="circular", **said)
    rows = [each for each in uniform_choices(request) if 32 % (4 * each.choice.per_position) == 0]
    assert {each.choice.per_position for each in rows} == {2, 4, 8}
    for row in rows:
        candidate = placed(request, row.choice)
        assert isinstance(candidate, PlacementCandidate)
        trial = Trial.of(request, candidate)
        trial.look(usual=candidate.usual)
        assert trial.value_ns == pytest.approx(row.usual_ns, rel=0.02)


@slow_but("positions, apart", [(2, 0.035), (4, 0.08)], lambda each: each[0] == 2)
def test_a_longest_stage_holds_up_all_of_a_turn_but_one_micro_batch(positions: int, apart: float) -> None:
    """Of few positions that is much: a long output layer costs a turn of two of them half of what it is longer."""
    layers = [Block.of(f"b{number}", "10ms", "20ms") for number in range(32)]
    blocks = [Block.of("first", "1us", "2us"), *layers, Block.of("last", "20ms", "40ms")]
    said: dict[str, Any] = {"devices": positions, "mini_batch": 64, "positions": positions, **QUICK}
    request = Request.of(Profile.of("uneven", blocks), placement="circular", **said)
    rows = [each for each in uniform_choices(request) if 32 % (positions * each.choice.per_position) == 0]
    assert len(rows) >= 3
    for row in rows:
        candidate = placed(request, row.choice)
        assert isinstance(candidate, PlacementCandidate)
        trial = Trial.of(request, candidate)
        trial.look(usual=candidate.usual)
        assert row.usual_ns == pytest.approx(trial.value_ns, rel=apart)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"context": 4}, "has costs for context 1, 2, not for 4; choose --cp 1, 2, or profile with --estimate --cont"),
        ({"devices": 3, "context": 2}, "--cp 2 does not divide 3 devices; choose --cp 1, or --devices 4"),
        ({"shards": 4, "context": 2, "replicas": 2}, "--tp 4 x --replicas 2 x --cp 2 does not divide 8 devices"),
        (
            {"positions": 2, "shards": 1, "context": 2, "replicas": 1},
            "--pp 2 x --tp 1 x --cp 2 x --dp 1 is 4 devices, not 8; choose --pp 4, or give --devices 4",
        ),
        ({"context": 2, "spread": True}, "--cp 2 and --shard-shared yes do not go together"),
        (
            {"devices": None, "context": 2, "placement": stage_per_block(SPLIT)},
            "--cp 2 would do nothing: the placement",
        ),
    ],
)
def test_refusals_of_context_sizes_say_what_would_do(said: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        Request.of(SHARED, **({"devices": 8, "mini_batch": 8} | said))


def test_a_profile_without_parts_of_sequences_says_how_to_get_them() -> None:
    with pytest.raises(UsageError, match=re.escape("profile with --estimate --context 2")):
        Request.of(SPLIT, devices=8, mini_batch=8, context=2)


EXPERTS = joined(
    [
        Block(
            id=f"b{n}",
            operator="moe",
            parameters=100,
            expert_parameters=80,
            costs=tuple(
                CostRow(microbatch_size=1, expert=expert, forward_ns=100 // expert, backward_ns=200 // expert)
                for expert in (1, 2, 4)
            ),
        )
        for n in range(2)
    ]
)
"""More devices that share experts are quicker here."""


def test_experts_are_shared_where_that_is_quicker_or_asked_for() -> None:
    """Of all replicas that may share them: sizes that count no devices, and are said in plans and provenance."""

    def sizes(**said: Any) -> set[tuple[int, int]]:
        plan = search_plan(Request.of(EXPERTS, **({"devices": 4, "mini_batch": 8} | said), **QUICK)).plan
        assert not check(plan, EXPERTS).problems
        return {(stage.replicas, stage.expert) for stage in plan.stages}

    assert sizes() == {(4, 4)}
    assert sizes(expert=1) <= {(1, 1), (2, 1), (4, 1)}
    assert sizes(expert=2, positions=2) == {(2, 2)}
    assert sizes(expert=2, replicas=2, positions=2, shards=1, context=1) == {(2, 2)}
    made = search_plan(Request.of(EXPERTS, devices=4, mini_batch=8, expert=2, **QUICK)).plan
    assert made.provenance.options["expert"] == 2


SPLIT_EXPERTS = {(1, 1): 400, (2, 1): 200, (2, 2): 150, (4, 1): 120, (4, 2): 60, (4, 4): 90, (8, 4): 10}
"""{(devices that share experts, of these that split each): ns of a forward of a block}"""
MORE_EXPERTS = joined(
    [
        block.model_copy(
            update={
                "costs": tuple(
                    CostRow(microbatch_size=1, expert=e, expert_shards=split, forward_ns=ns, backward_ns=2 * ns)
                    for (e, split), ns in SPLIT_EXPERTS.items()
                )
            }
        )
        for block in EXPERTS.blocks
    ]
)


def test_how_many_devices_split_an_expert_is_chosen_or_asked_for() -> None:
    """As how many share experts: in plans, their provenance, and rows of comparisons."""

    def search(**said: Any) -> Plan:
        asked: dict[str, Any] = {"devices": 4, "mini_batch": 8} | said
        plan = search_plan(Request.of(MORE_EXPERTS, **asked, **QUICK)).plan
        assert not check(plan, MORE_EXPERTS).problems
        return plan

    def sizes(**said: Any) -> set[tuple[int, int]]:
        return {(stage.expert, stage.expert_shards) for stage in search(**said).stages}

    assert sizes() == {(4, 2)}
    assert sizes(expert_shards=1) == {(4, 1)}
    assert sizes(expert_shards=4) == {(4, 4)}
    assert sizes(expert=2) == {(2, 2)}
    assert sizes(expert=2, expert_shards=1) == {(2, 1)}
    assert sizes(expert=1) == {(1, 1)}
    assert sizes(placement="one-to-one", expert=4, replicas=4) == {(4, 1)}, "the fewest"
    assert sizes(placement="one-to-one", expert=8, replicas=8, devices=8) == {(8, 4)}, "the only one"
    plan = search(expert=2, expert_shards=2)
    assert plan.provenance.options["expert_shards"] == 2
    assert plan.provenance.choices["expert_shards"] == "--etp 2"
    of_other = plan.model_copy(update={"stages": tuple(replace(s, expert_shards=1) for s in plan.stages)})
    assert any("takes" in text or "is" in text for text in map(str, check(of_other, MORE_EXPERTS).problems))


@pytest.mark.parametrize(("said", "sizes"), [(None, (8, 4)), (4, (8, 4)), (2, (4, 2))])
def test_placements_may_say_how_many_devices_split_an_expert(said: int | None, sizes: tuple[int, int]) -> None:
    expert, split = sizes
    own = {"devices": tuple(range(8)), "replicas": 8, "expert": expert, "expert_shards": said}
    stage = PlacedStage(blocks=tuple(block.id for block in MORE_EXPERTS.blocks), **own)
    given = Placement(strategy="given", num_devices=8, stages=(stage,))
    assert Placement.model_validate_json(given.model_dump_json()) == given
    plan = search_plan(Request.of(MORE_EXPERTS, placement=given, mini_batch=8, microbatch_size=8, **QUICK)).plan
    assert {(each.expert, each.expert_shards) for each in plan.stages} == {sizes}
    assert [each.expert_shards for each in plan.placed.stages] == [split]
    assert not check(plan, MORE_EXPERTS).problems


@pytest.mark.parametrize(("target", "sizes"), [("megatron", (4, 2)), ("torchtitan", (4, 1)), ("automodel", (4, 1))])
def test_targets_split_experts_as_they_can(target: str, sizes: tuple[int, int]) -> None:
    """torchtitan's are whole, or split by as many devices as all else; NeMo AutoModel's are whole."""
    blocks = {"b0": "layers.0", "b1": "layers.1"}
    made = joined([block.model_copy(update={"id": blocks[block.id]}) for block in MORE_EXPERTS.blocks])
    asked: dict[str, Any] = {"devices": 4, "mini_batch": 8, "for_": target, "positions": 1}
    found = search_plan(Request.of(made, **asked, **QUICK)).plan
    assert {(each.expert, each.expert_shards) for each in found.stages} == {sizes}
    if target == "automodel":
        with pytest.raises(UsageError, match="has whole experts; leave --etp out"):
            Request.of(made, **asked, expert_shards=2)


@one_in(2, "level", [2, 3], first=1)
def test_experts_are_shared_at_every_level_of_zero(level: int) -> None:
    """Asked for, or where nothing less fits: 80 of 100 parameters of each block are of experts."""
    links = clusters.cluster_of(4, latency_ns=1, bandwidth=10**12)
    given: dict[str, Any] = {"devices": 4, "mini_batch": 8, "expert": 2, "replicas": 4, "cluster": links} | QUICK
    known = EXPERTS.model_copy(update={"recipe": Recipe(name="bf16-mixed")})
    plan = search_plan(Request.of(known, zero=level, **given)).plan
    assert not check(plan, known, links).problems
    assert {(stage.zero, stage.expert) for stage in plan.stages} == {(level, 2)}


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"expert": 8}, "has costs where 1, 2, 4 devices share experts, not for 8; choose --ep 1, 2, 4, or profile"),
        ({"expert": 4, "positions": 2}, "--ep 4 is more than the 2 devices that a stage can have; choose --ep 1, 2"),
        ({"expert": 4, "replicas": 2, "shards": 1, "context": 1}, "--ep 4 does not divide --dp 2 at each position"),
        ({"expert": 2, "spread": True}, "--ep 2 and --shard-shared yes do not go together"),
        ({"expert_shards": 2}, "with 1 of them splitting each, not 2; choose --etp 1, or profile with --estimate"),
        ({"expert": 4, "expert_shards": 2}, "--estimate --expert 4 --etp 1,2"),
        ({"expert": 4, "expert_shards": 3}, "where 4 devices share experts with 1 of them splitting each, not 3"),
        ({"expert": 1, "expert_shards": 2}, "not 2; choose --etp 1"),
        ({"expert_shards": 2, "placement": "one-to-one"}, "is of devices that share experts; give --ep, a multiple"),
    ],
)
def test_refusals_of_expert_sizes_say_what_would_do(said: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        Request.of(EXPERTS, **({"devices": 4, "mini_batch": 8} | said))


def test_a_profile_without_experts_has_none_to_share() -> None:
    with pytest.raises(UsageError, match=re.escape("no block of profile")):
        Request.of(SPLIT, devices=8, mini_batch=8, expert=2)
    with pytest.raises(UsageError, match=re.escape("--etp 2 would do nothing: no block of profile")):
        Request.of(SPLIT, devices=8, mini_batch=8, expert_shards=2)
    assert Request.of(SPLIT, devices=8, mini_batch=8, expert_shards=1).expert_shards == 1


def test_levels_of_sharded_state_are_choices_with_what_they_exchange() -> None:
    """Where memory is limited: by level 3 where only that fits, in groups that are near each other."""
    cluster = Cluster.of("pairs", 4, levels=[("pair", 2, "1us", "900GB"), ("net", 4, "10us", "1GB")])
    blocks = [Block.of(f"b{n}", "1ms", "2ms", trained=1_000_000) for n in range(2)]
    rows = blocks[0].costs
    blocks = [b.model_copy(update={"costs": (*rows, rows[0].model_copy(update={"shards": 2}))}) for b in blocks]
    made = Profile.of("kept", blocks, recipe="fp32")
    request = Request.of(made, cluster=cluster, mini_batch=4, memory_bytes=40_000_000, **QUICK)
    table = [each for each in uniform_choices(request) if each.choice.shards == 1]
    assert {(0, 1), (1, 2), (2, 2), (3, 2), (3, 4)} <= {(x.choice.zero.level, x.choice.zero.group) for x in table}
    near, far = (
        min(each.usual_ns for each in table if each.choice.zero == zero and each.choice.replicas == 4)
        for zero in (Zero(3, 2), Zero(3, 4))
    )
    assert near < far, "what is gathered over the network takes longer than the blocks compute"


def test_a_group_beyond_a_node_is_noted() -> None:
    """The profile has the time of its messages inside a node."""
    cluster = Cluster.of("pairs", 4, levels=[("pair", 2, "3us", "300GB"), ("net", 4, "10us", "25GB")])
    open_ = Request.of(SPLIT, cluster=cluster, mini_batch=4)
    assert open_splits(open_) == (SplitSizes(1, 1), SplitSizes(2, 1))
    fixed = Request.of(SPLIT, cluster=cluster, mini_batch=4, shards=4)
    assert any("several nodes of 2" in note for note in input_notes(fixed))
    assert not any("several nodes" in note for note in input_notes(open_))


def test_what_does_not_fit_is_explained_with_split_blocks() -> None:
    """State of 4 x 100 bytes: two devices that split each block need half of what each stage of two would."""
    blocks = [block.model_copy(update={"parameter_bytes": 100}) for block in SPLIT.blocks[:1]]
    request = Request.of(joined(blocks), devices=4, mini_batch=4, memory_bytes=10, **QUICK)
    with pytest.raises(InfeasibleError) as caught:
        search_plan(request)
    assert caught.value.enough_bytes is not None
    assert caught.value.enough_bytes <= 60, "a quarter of the block's state, not all of it"


@settings(max_examples=3, suppress_health_check=list(HealthCheck), deadline=None)
@given(chains(3), st.integers(2, 3), st.booleans())
def test_what_would_do_is_the_least_of_all_layouts(profile: Profile, num_devices: int, recompute: bool) -> None:
    """So much memory fits, and in a little less no uniform layout does, by brute force; so many devices fit, too."""
    again, limit = None if recompute else False, 5
    assume(not list(iterations(profile, num_devices, limit, recompute)))
    tight = asked(profile, num_devices, limit, recompute=again, zero=0, time_limit=NO_END)
    with pytest.raises(InfeasibleError) as told:
        search_plan(tight, steps=UNIFORM)
    said = {int(each["num_devices"]): int(each["memory_bytes"]) for each in told.value.would_do}
    assert num_devices in said
    for count, memory in said.items():
        assert search_plan(
            replace(tight, num_devices=count, memory_bytes=memory, time_limit=1.0, deterministic=True)
        ).plan.stages
    less = int(0.97 * said[num_devices])
    assert not list(iterations(profile, num_devices, less, recompute))


@settings(max_examples=some_of(30), suppress_health_check=list(HealthCheck), deadline=None)
@given(
    chains(4, experts=EXPERT_WAYS),
    st.sampled_from([1, 2]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
)
def test_no_way_of_sharing_keeps_less_than_the_state_once(
    profile: Profile, shards: int, copies: int, level: int, expert: int
) -> None:
    """Of all devices together, by every level of ZeRO, shards and shared experts."""
    request = asked(profile, shards * copies)
    zero = Zero(level, copies) if level else Zero(0, 1)
    experts = Experts.among(expert, shards, copies, zero.level, zero.group)
    if shards * copies % expert:
        return
    kept = Blocks.of(profile).kept(shards, zero, experts)
    assert shards * copies * kept.static_bytes >= least_state_bytes(request)


def test_what_devices_cannot_keep_together_is_refused_at_once() -> None:
    """Before any placement is looked at; and then what would do is looked for."""
    blocks = [
        Block(
            id=f"b{index}",
            operator="layer",
            parameter_bytes=1000,
            costs=tuple(
                CostRow(microbatch_size=1, shards=shards, forward_ns=10, backward_ns=20, activation_bytes=100 // shards)
                for shards in (1, 2)
            ),
        )
        for index in range(4)
    ]
    request = asked(joined(blocks), 2, 1999, recompute=False, sizes=(1,))
    assert least_state_bytes(request) == 2 * 4 * 1000  # gradients, too
    with pytest.raises(InfeasibleError, match=r"2 devices of 1\.999kB: in the one found that needs least") as told:
        search_plan(request)
    for each in told.value.would_do:
        how = {"num_devices": int(each["num_devices"]), "memory_bytes": int(each["memory_bytes"])}
        assert search_plan(replace(request, **how)).plan.stages
    assert told.value.would_do[0]["num_devices"] > 4  # than there are blocks
    at_once = unfit_by_state(request)
    assert str(at_once).endswith("; --memory of less than 4kB cannot do, nor, of this size, fewer --devices than 5")
    fixed = replace(request, shards=1, positions=2, replicas=1)
    with pytest.raises(InfeasibleError, match=r"2 devices of .* would do; that was found") as told:
        search_plan(fixed)
    assert [each["num_devices"] for each in told.value.would_do] == [2, 8]
    assert str(told.value.would_do[1]["what"]).startswith("raise --devices to 8 and give --recompute auto --tp auto ")


def test_positions_are_as_fast_as_their_slowest_devices() -> None:
    """What is summed once for all numbers of positions equals each position looked at by itself."""
    rng = random.Random(5)
    speeds = [rng.choice([1.0, 0.5, 2.0]) for _ in range(12)]
    known = [
        SimpleNamespace(width=width, replicas=replicas, positions=positions, backwards=backwards)
        for width, replicas, positions, backwards in itertools.product(
            (1, 2), (1, 3), (None, 1, 2, 5, 12, 20), (False, True)
        )
    ]
    for choice, found in zip(known, uniform_space._working(SimpleNamespace(speeds=speeds), known), strict=True):
        each, line = choice.width * choice.replicas, speeds[::-1] if choice.backwards else speeds
        positions = range(choice.positions or 1)
        assert found == sum(min(line[at * each : (at + 1) * each], default=min(speeds)) for at in positions)


def test_what_a_cut_was_checked_with_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workload by whose true orders a cut is found to fit is made once, and is equal to one that is made anew."""
    made = list[Workload]()

    def counted(*args: Any, **named: Any) -> Workload:
        made.append(build_workload(*args, **named))
        return made[-1]

    monkeypatch.setattr(candidates, "build_workload", counted)
    row = {"forward_ns": 10, "backward_ns": 20, "input_grad_ns": 10, "weight_grad_ns": 10, "activation_bytes": 10}
    rows = tuple(CostRow(microbatch_size=size, **row) for size in SIZES)
    blocks = [Block(id=f"b{number}", operator="layer", parameter_bytes=1, costs=rows) for number in range(16)]
    way: dict[str, Any] = {"scheduler": "zb-v", "placement": "v-shape", "positions": 4, "split_backward": True}
    request = replace(asked(joined(blocks), 4, 300, recompute=None), **way)
    checked = [each.choice for each in uniform_choices(request) if each.choice.levels]
    candidate = placed(request, checked[0])
    assert isinstance(candidate, PlacementCandidate)
    assert len(made) == 1
    assert Trial.of(request, candidate).ways == made
    assert workload_of(request, replace(candidate), split_backward=True) == made[0]
    assert len(made) == 2
