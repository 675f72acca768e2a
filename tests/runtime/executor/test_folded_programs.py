"""Ranks of folded plans have the programs that they have of unfolded ones, and make no more for more ranks."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from builders.folds import Replicas, plan_of_replicas, plans_of
from pipeplan.files import Plan, parse, to_json
from pipeplan.files.folded import device_programs, on_device, unfolded
from pipeplan.runtime.executor.rank_program import (
    Division,
    Program,
    planned_program,
    planned_programs,
    program_of,
    programs_of,
)
from pipeplan.runtime.parallel import Share
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Hop
from support.marks import one_in

_BLOCKS = tuple(f"b{number}" for number in range(8))
_EDGES = tuple(zip(_BLOCKS, _BLOCKS[1:], strict=False))


def _own(program: Program) -> Program:
    """A program without what it says of all ranks."""
    return replace(
        program,
        holders=(),
        lines=frozenset(),
        edges=(),
        divisions=(),
        slices={},
        pieces={},
        is_alone=False,
        texts=[*program.texts],
    )


@one_in(
    2,
    "seed, shared, looped",
    [
        *((seed, False, False) for seed in range(6)),
        *((seed, True, False) for seed in range(6)),
        *((seed, bool(seed % 2), True) for seed in range(2)),
    ],
)
def test_a_rank_unfolds_its_own_program(seed: int, shared: bool, looped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folded, devices, profile, _ = plans_of(seed, monkeypatch, shared=shared, looped=looped)
    tied = [each.blocks for each in profile.tied]
    expected = programs_of(devices, _BLOCKS, _EDGES, "alike")
    assert [*map(tuple, device_programs(folded))] == [*map(tuple, devices.whole_programs)]
    for rank in Random(seed).sample(range(folded.num_devices), 3):
        found, whole = program_of(folded, rank, _BLOCKS, _EDGES, "alike", tied=tied), expected[rank]
        assert _own(found) == _own(whole)
        alone = on_device(folded, rank)
        assert [at for at, own in enumerate(alone.programs) if own] == [rank]
        assert alone.loop == devices.loop
        assert found.lines == {line for line in whole.lines if rank in line}
        near = {rank}.union(*found.edges)  # whose messages it makes or takes
        assert {stage: {r: p for r, p in own.items() if r in near} for stage, own in whole.pieces.items()} == {
            stage: {r: p for r, p in own.items() if r in near} for stage, own in found.pieces.items()
        }
        assert set(found.edges) == {edge for edge in whole.edges if rank in edge}
        assert {*found.divisions} <= {*whole.divisions}
        assert {each for each in whole.divisions if rank in each.ranks} <= {*found.divisions}
        known, every = ([(share, rank) for share, ranks in of.holders for rank in ranks] for of in (found, whole))
        for other in {other for _, other in known}:
            blocks = {share.block for share, holder in known if holder == other}
            assert _divided(found, other, blocks) == _divided(whole, other, blocks)
        own = {_kind(share) for share, other in every if other == rank}
        assert {(_kind(s), r) for s, r in known if _kind(s) in own} == {
            (_kind(share), other) for share, other in every if _kind(share) in own
        }


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_emulates_unfolds_its_own_program(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folded, devices, _, _ = plans_of(seed, monkeypatch)
    expected = planned_programs(devices)
    for rank in Random(seed).sample(range(folded.num_devices), 3):
        assert _own(planned_program(folded, rank)) == _own(expected[rank])


def _divided(program: Program, rank: int, blocks: set[str]) -> set[Division]:
    """With whom a rank divides some blocks."""
    return {each for each in program.divisions if rank in each.ranks and not blocks.isdisjoint(each.blocks)}


def _kind(share: Share) -> Share:
    """A share, whoever has the others of its block."""
    partners, experts = (tuple(range(len(own))) for own in (share.partners, share.experts))
    return replace(share, partners=partners, experts=experts, places=(), context=())


def test_a_rank_makes_no_more_objects_for_more_ranks() -> None:
    """As many actions, messages and parts of blocks; the ranks with its own share are numbers in them."""
    made = [_made(plan_of_replicas(Replicas(shards=2, replicas=replicas))) for replicas in (4, 64, 512)]
    assert made[0] == made[1] == made[2]
    assert made[0][Hop] > 0


def _made(plan: Plan) -> Counter[type]:
    """Objects that are new once a rank has read the plan and made its program, by their types."""
    text, count = to_json(plan), plan.num_devices
    assert plan.players
    assert len(unfolded(plan).devices) == count
    gc.collect()
    before = {id(each) for each in gc.get_objects()}
    read = parse(text, Plan)
    program = program_of(read, count - 1, _BLOCKS, _EDGES, "alike")
    after = [each for each in gc.get_objects() if id(each) not in before and isinstance(each, Hop | Share | Action)]
    assert program.rank == count - 1
    return Counter(map(type, after))
