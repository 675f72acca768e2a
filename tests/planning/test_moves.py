"""Moves: what is one move from a plan, and what a search finds with them that it does not find without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from builders.kinds import cluster_of_kinds
from builders.profiles import joined
from builders.requests import request_of
from pipeplan.costs.kinds import for_kinds
from pipeplan.files import Block, CostRow, Profile
from pipeplan.planning.candidates import PlacementCandidate, placed, uniform_layouts
from pipeplan.planning.moves import Moves, moves
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, search_plan, without
from pipeplan.planning.trials import PlanSearch, PlanStep, Trial
from pipeplan.schedule.cpsat.solver import Budget
from references.every_width import one_f_one_b
from references.unlike_devices import Kind

BLOCKS = 14
ALL_WIDTHS = {"every width", "recomputed blocks", "stage graphs", "published planners", "stage ways", "one stage"}


def chain(seed: int, shards: tuple[int, ...] = (1,), sizes: tuple[int, ...] = (1,)) -> Profile:
    """Layers of which each takes another time, on more devices a little more than its part."""
    random_ = random.Random(seed)

    def rows(ns: int) -> tuple[CostRow, ...]:
        return tuple(
            CostRow(
                microbatch_size=size,
                shards=own,
                forward_ns=size * ns // own + own,
                backward_ns=2 * size * ns // own,
            )
            for own in shards
            for size in sizes
        )

    times = [random_.randint(10, 60) * 100 for _ in range(BLOCKS)]
    return joined([Block(id=f"b{index}", operator="layer", costs=rows(ns)) for index, ns in enumerate(times)])


def asked(seed: int, devices: int = 2, **how: Any) -> Request:
    """Two kinds of devices, of which each is quick in other blocks."""
    first = devices // 2
    cluster = cluster_of_kinds(Kind(first, "1", None), Kind(devices - first, "1", None))
    profile = for_kinds(chain(seed), {"kind1": chain(seed + 1000)}, cluster)
    said = {"scheduler": "1f1b", "num_parted": 0, "split_backward": False, "time_limit": 1.0, "deterministic": True}
    return request_of(profile, "one-to-one", Batch(64, 1), devices, cluster=cluster, **(said | how))


def best_cut(request: Request) -> int:
    """Ns of the best cut into two, on either device each."""
    kinds = [request.profile, request.profile.of_kinds["kind1"]]
    forward, backward = (
        [[getattr(block.costs[0], key) for block in kind.blocks] for kind in kinds]
        for key in ("forward_ns", "backward_ns")
    )
    return min(
        one_f_one_b(*([sum(ns[one][:cut]), sum(ns[1 - one][cut:])] for ns in (forward, backward)), 64)
        for cut in range(1, BLOCKS)
        for one in (0, 1)
    )


def test_searches_find_shorter_plans_by_moves() -> None:
    """Of two stages on unlike devices more often the best cut than one for levelled costs; never longer than that."""
    reached = {"with": 0, "without": 0}
    for seed in range(6):
        request = asked(seed)
        best = best_cut(request)
        moved, still = (
            search_plan(request, steps=without(off)).plan.predicted.iteration_ns
            for off in (ALL_WIDTHS, ALL_WIDTHS | {"moves"})
        )
        assert best <= moved <= still
        reached["with"] += moved == best
        reached["without"] += still == best
    assert reached["with"] > reached["without"], reached


@pytest.mark.parametrize("seed", range(4))
def test_what_is_one_move_away_is_a_placement_of_the_same_blocks(seed: int) -> None:
    """On as many devices, none twice; and there are moves of blocks, of devices, and of a stage's own ways."""
    profile = chain(seed, (1, 2), (1, 6))
    request = request_of(profile, "auto", Batch(16, 6), 8, time_limit=1.0, deterministic=True, sizes=())
    layout = next(
        row.choice
        for row in uniform_layouts(request)
        if (row.choice.shards, row.choice.replicas, row.choice.positions) == (1, 2, 4)
        and row.choice.strategy == "one-to-one"
    )
    candidate = placed(request, layout)
    assert isinstance(candidate, PlacementCandidate)
    trial = Trial.of(request, candidate)
    trial.look()
    assert trial.best is not None
    seen = set()
    for moved in moves(request, candidate, trial.best.workload, 2, 3):
        stages, before = moved.placement.stages, candidate.placement.stages
        profile.check_placement(moved.placement)
        devices = [device for stage in stages for device in stage.devices]
        assert len(devices) == len(set(devices)) == 8
        if [stage.blocks for stage in stages] != [stage.blocks for stage in before]:
            seen.add("blocks")
        elif [len(stage.devices) for stage in stages] != [len(stage.devices) for stage in before]:
            seen.add("devices")
        else:
            seen.add("ways")
        Trial.of(request, moved)
    assert seen == {"blocks", "devices", "ways"}


def test_blocks_pass_through_the_stages_between() -> None:
    """From the longest to the shortest stage each between hands one on: all others keep their number of blocks."""
    row = CostRow(microbatch_size=1, forward_ns=1000, backward_ns=2000)
    profile = joined([Block(id=f"b{index}", operator="layer", costs=(row,)) for index in range(9)])
    request = request_of(profile, "one-to-one", Batch(8, 1), 3, time_limit=1.0, deterministic=True)
    ends = [0, 5, 8, 9]
    even = placed(request, next(row.choice for row in uniform_layouts(request)))
    assert isinstance(even, PlacementCandidate)
    ids = [block.id for block in profile.blocks]
    stages = tuple(
        stage.model_copy(update={"blocks": tuple(ids[begin:end])})
        for stage, (begin, end) in zip(even.placement.stages, pairwise(ends), strict=True)
    )
    candidate = PlacementCandidate(even.placement.model_copy(update={"stages": stages}), Batch(8, 1), False, "by hand")
    trial = Trial.of(request, candidate)
    every = moves(request, candidate, trial.ways[0], 1, 1)
    first, second = next(every), next(every)
    assert [len(stage.blocks) for stage in first.placement.stages] == [3, 3, 3]
    assert [len(stage.blocks) for stage in second.placement.stages] == [4, 3, 2]


def test_moves_are_made_when_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of devices there are more than anybody has time for: those of blocks come before any of devices."""
    row = CostRow(microbatch_size=1, forward_ns=1000, backward_ns=2000)
    profile = joined([Block(id=f"b{index}", operator="layer", costs=(row,)) for index in range(10)])
    request = request_of(profile, "auto", Batch(8, 1), 3, time_limit=1.0, deterministic=True)
    candidate = placed(
        request,
        next(
            row.choice
            for row in uniform_layouts(request)
            if row.choice.strategy == "one-to-one" and row.choice.positions == 3
        ),
    )
    assert isinstance(candidate, PlacementCandidate)

    def taken(*_: object) -> Iterator[None]:
        raise TimeoutError
        yield

    monkeypatch.setattr("pipeplan.planning.moves._devices_moved", taken)
    every = moves(request, candidate, Trial.of(request, candidate).ways[0], 1, 1)
    assert next(every) is not None
    with pytest.raises(TimeoutError):
        list(every)


@pytest.mark.parametrize(
    ("step", "gains"), [(Moves(near=2.0), True), (Moves(near=2.0, layouts=1), False), (Moves(), False)]
)
def test_plans_of_other_layouts_are_moved_too(step: Moves, gains: bool) -> None:
    """What is second may gain more; that is not looked for where it takes too long, or is one layout too many."""
    row = CostRow(microbatch_size=1, forward_ns=1000, backward_ns=2000)
    profile = joined([Block(id=f"b{index}", operator="layer", costs=(row,)) for index in range(9)])
    request = request_of(profile, "auto", Batch(8, 1), 3, time_limit=1.0, deterministic=True)
    search = PlanSearch(request, Budget(1.0, deterministic=True), None, STEPS)
    ids = [block.id for block in profile.blocks]
    for ends in ([0, 5, 9], [0, 7, 8, 9]):
        positions = len(ends) - 1
        rows = (each.choice for each in uniform_layouts(request) if each.choice.strategy == "one-to-one")
        even = placed(request, next(each for each in rows if (each.positions, each.replicas) == (positions, 1)))
        assert isinstance(even, PlacementCandidate)
        blocks = [tuple(ids[begin:end]) for begin, end in pairwise(ends)]
        stages = zip(even.placement.stages, blocks, strict=True)
        cut = tuple(stage.model_copy(update={"blocks": own}) for stage, own in stages)
        trial = Trial.of(request, replace(even, placement=even.placement.model_copy(update={"stages": cut})))
        trial.look()
        search.trials.append(trial)
    before = search.best
    assert before is search.trials[0]
    step.run(search)
    assert search.best is not None
    assert (search.best is not before) is gains
    assert not gains or [len(stage.blocks) for stage in search.best.candidate.placement.stages] == [3, 3, 3]


def test_it_is_a_step_like_others() -> None:
    """It goes in turn, and can be left out."""
    (step,) = (step for step in STEPS if step.name == "moves")
    assert isinstance(step, PlanStep)
    assert step.in_turn
    assert all(each.name != "moves" for each in without({"moves"}))
