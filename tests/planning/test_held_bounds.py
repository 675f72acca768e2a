"""The bound by what devices hold: never above any plan, and above the bound by work where memory is short."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from builders.profiles import joined, profile_of, uneven_chain
from builders.requests import request_of
from pipeplan.errors import InfeasibleError
from pipeplan.files import Block, CostRow, Profile
from pipeplan.planning.bounds import held_bound, request_bound
from pipeplan.planning.held_bounds import BlockWay, HeldBound, undominated
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan
from references.every_width import every_width, one_f_one_b
from support.marks import slow_but

MINI_BATCH = 8
FIXED: dict[str, Any] = {"time_limit": 0.6, "deterministic": True, "sizes": (1, 2)}


def drawn(seed: int, blocks: int) -> Profile:
    """Blocks that hold much beside what they compute; splitting them takes time, and backward may be split."""
    random_ = random.Random(seed)
    found = []
    for index in range(blocks):
        forward, backward, held, workspace = (random_.randint(20, 60) for _ in range(4))
        rows = tuple(
            CostRow(
                microbatch_size=size,
                shards=shards,
                forward_ns=forward * size // shards + 9 * (shards > 1),
                backward_ns=backward * size // shards + 9 * (shards > 1),
                input_grad_ns=backward * size // shards // 2 + 9 * (shards > 1),
                weight_grad_ns=backward * size // shards - backward * size // shards // 2,
                activation_bytes=held * size // shards,
                weight_grad_bytes=held * size // shards // 3,
                workspace_bytes=workspace * size // shards // 4,
            )
            for size in (1, 2)
            for shards in (1, 2)
        )
        found.append(Block(id=f"b{index}", operator="layer", parameter_bytes=random_.randint(0, 20), costs=rows))
    return joined(found)


def asked(seed: int, **others: Any) -> Request:
    """A request with little memory."""
    random_ = random.Random(seed)
    blocks, devices = random_.randint(2, 4), random_.randint(1, 3)
    memory = random_.choice([70, 100, 140])
    return request_of(drawn(seed, blocks), "auto", Batch(MINI_BATCH, 1), devices, memory_bytes=memory, **FIXED | others)


def by_work(request: Request) -> int:
    """The bound without a look at memory."""
    return request_bound(replace(request, memory_bytes=None))


def test_it_is_never_above_the_best_layout() -> None:
    """All cuts, widths, sizes and recomputed blocks with 1F1B; of some it is above the bound by work."""
    above = 0
    for seed in range(30):
        request = asked(seed, split_backward=False, num_parted=0)
        limit = request.least_memory
        found = every_width(request.profile, request.num_devices, MINI_BATCH, limit, recompute=True, levels=(0,))
        if (best := min(found, default=None)) is not None:
            assert held_bound(request) <= best
            assert held_bound(request) <= request_bound(request) <= best
            above += held_bound(request) > by_work(request)
    assert above > 3


@slow_but("seed", range(300, 310), lambda seed: seed < 305)
def test_it_is_never_above_what_is_found(seed: int) -> None:
    """With any schedule, backward split, forwards in parts and replicas that divide what they keep."""
    request = asked(seed)
    try:
        result = search_plan(request)
    except InfeasibleError:
        return
    assert held_bound(request) <= result.plan.predicted.iteration_ns
    assert result.lower_bound_ns >= min(result.plan.predicted.iteration_ns, held_bound(request))


def test_one_block_that_fills_a_device() -> None:
    """It holds all that there is while it runs, and half the time where there is twice as much."""
    way = BlockWay(100.0, 50.0, 100.0)
    for room, expected in ((50, 800), (100, 800), (25, 1600)):
        assert HeldBound([[way]], [0], 8, 1.0, room, 0).least_ns() == pytest.approx(expected, rel=0.05, abs=1)
        assert HeldBound([[way]], [0], 8, 1.0, room, 0).least_ns() <= expected


def test_blocks_wait_for_each_other() -> None:
    """Of four in a line the first holds while all run: 4 + 3 + 2 + 1 times a block's time, on four devices."""
    way = BlockWay(100.0, 10.0, 100.0)
    bound = HeldBound([[way]], [0] * 4, 20, 4.0, 40, 0).least_ns()
    assert 0.95 * (20 * 10 * 100 * 10 / 40) <= bound <= 20 * 10 * 100 * 10 / 40


def test_of_two_ways_each_block_may_have_its_own() -> None:
    """The quicker one where it fits, and a mixture of both where it fits in part: between the bounds of each alone."""
    quick, small = BlockWay(100.0, 40.0, 100.0), BlockWay(150.0, 5.0, 150.0)
    alone = [HeldBound([[way]], [0] * 4, 20, 4.0, 60, 0).least_ns() for way in (quick, small)]
    both = HeldBound([[quick, small]], [0] * 4, 20, 4.0, 60, 0).least_ns()
    assert 2000 < both <= min(alone)


def test_ways_that_are_worse_in_everything_are_left_out() -> None:
    """Of equal ones one stays."""
    ways = [BlockWay(1, 2, 3), BlockWay(1, 2, 3), BlockWay(2, 2, 3), BlockWay(1, 3, 2), BlockWay(1, 2, 3, 1)]
    assert undominated(ways) == [BlockWay(1, 2, 3), BlockWay(1, 3, 2)]


def test_nothing_is_said_where_backward_does_not_wait() -> None:
    """Without gradients between blocks; without a limit on some device it says no more than work and ways do."""
    request = asked(1)
    edges = tuple(edge.model_copy(update={"gradient": False}) for edge in request.profile.edges)
    profile = request.profile.model_copy(update={"edges": edges})
    assert held_bound(replace(request, profile=profile)) == 0
    assert 0 < held_bound(replace(request, memory_bytes=None)) <= held_bound(request)


def test_what_is_quick_for_many_samples_passes_slowly() -> None:
    """A micro-batch passes all blocks in the time: often above the bounds by work and by the way, each with its own
    best rows, and never above the best layout."""
    above = 0
    for seed in range(30):
        random_ = random.Random(seed)
        blocks, devices = random_.randint(2, 3), random_.randint(2, 4)
        rows = []
        for _ in range(blocks):
            always, each = random_.randint(5, 30), random_.randint(1, 6)
            times = [(size, always + each * size) for size in (1, 2, 4, 8)]
            rows.append([CostRow(microbatch_size=size, forward_ns=ns, backward_ns=2 * ns) for size, ns in times])
        profile = profile_of(rows)
        fixed = {"split_backward": False, "num_parted": 0, "recompute": False}
        request = request_of(profile, "auto", Batch(MINI_BATCH, 1), devices, **FIXED | {"sizes": (1, 2, 4, 8)} | fixed)
        best = min(every_width(profile, devices, MINI_BATCH, None, recompute=False, levels=(0,)))
        assert held_bound(request) <= request_bound(request) <= best
        work = sum(3 * own[-1].forward_ns for own in rows) / devices
        way = sum(3 * own[0].forward_ns for own in rows)
        above += request_bound(request) > max(work, way) + 1
    assert above > 10


def test_where_all_sizes_are_given_uneven_stages_and_ramps_count() -> None:
    """With one stage a position: never above 1F1B on the best cut, and often above what counts work alone."""
    above = 0
    for seed in range(40):
        random_ = random.Random(seed)
        blocks, positions, count = random_.randint(2, 6), random_.randint(2, 3), random_.choice([2, 4, 8])
        profile = uneven_chain(seed, max(blocks, positions), (1, 2))
        said: dict[str, Any] = {"shards": 1, "context": 1, "replicas": 1, "chunks": 1, "recompute": False}
        given = FIXED | {"split_backward": False, "num_parted": 0, "sizes": (1,)}
        request = request_of(profile, "auto", Batch(count, 1), positions, positions=positions, **said, **given)
        costs = [row for block in profile.blocks for row in block.costs if row.key[:2] == (1, 1)]
        best = min(
            one_f_one_b(*zip(*_sums(costs, cut), strict=True), count)
            for cut in itertools.combinations(range(1, len(costs)), positions - 1)
        )
        assert request_bound(request) <= best
        above += request_bound(request) > request_bound(replace(request, chunks=None))
    assert above > 20


def _sums(costs: Sequence[CostRow], cut: Sequence[int]) -> list[tuple[int, int]]:
    """[stage] its forward and its backward."""
    stages = [costs[begin:end] for begin, end in itertools.pairwise([0, *cut, len(costs)])]
    return [(sum(row.forward_ns for row in each), sum(row.backward_ns for row in each)) for each in stages]
