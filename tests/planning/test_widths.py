"""Stages of different widths: of small chains a search finds the best of all, with each stage's devices its own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from builders.profiles import joined, uneven_chain
from builders.requests import request_of
from pipeplan.files import Block, CostRow
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import search_plan, without
from pipeplan.planning.widths import _Widths
from references.every_width import every_width, one_f_one_b
from support.layouts import FIXED, require_best

MINI_BATCH = 12


def compare(seed: int, most_blocks: int, most_devices: int) -> None:
    """The iteration found is that of the best layout, and the bound over everything is not above it."""
    random_ = random.Random(seed)
    blocks, devices = random_.randint(2, most_blocks), random_.randint(2, most_devices)
    memory, recompute, zero = random_.choice([None, 100, 250]), random_.random() < 0.5, random_.random() < 0.3
    profile = uneven_chain(seed, blocks, (1, 2, 4))
    best = min(every_width(profile, devices, MINI_BATCH, memory, recompute=recompute, zero=zero), default=None)
    if best is None:
        return
    request = request_of(profile, "auto", Batch(MINI_BATCH, 1), devices, memory_bytes=memory, zero=int(zero), **FIXED)
    require_best(replace(request, recompute=None if recompute else False), best)


@pytest.mark.filterwarnings("ignore:--zero 1 divides nothing:UserWarning")
@pytest.mark.parametrize("seed", range(12))
def test_search_finds_the_best_of_all_widths(seed: int) -> None:
    compare(seed, 4, 4)


@pytest.mark.filterwarnings("ignore:--zero 1 divides nothing:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_search_finds_the_best_of_more_widths(seed: int) -> None:
    compare(seed, 5, 6)


@pytest.mark.parametrize("seed", range(200, 212))
@pytest.mark.parametrize("splits", [True, False])
def test_what_is_passed_over_is_no_better(seed: int, splits: bool) -> None:
    """Looking for one alone passes over most; the quickest of all is as quick.

    Where neither blocks nor micro-batches can be split pipelines are best, and with three of these their ramps count.
    """
    blocks = uneven_chain(seed, 4 if splits else 6, (1, 2, 4)).blocks
    if not splits:
        blocks = tuple(block.model_copy(update={"costs": block.costs[:1]}) for block in blocks)
    sizes = FIXED["sizes"] if splits else ()
    request = request_of(joined(blocks), "auto", Batch(3, 1), len(blocks), **(FIXED | {"sizes": sizes}))
    (one,) = _Widths.of(request).quickest(1)
    every = _Widths.of(request).quickest(10**6)
    assert len(every) > 20
    assert one.usual_ns == min(each.usual_ns for each in every)


def test_stages_of_different_widths_are_shorter() -> None:
    """A long and a short block on three devices: without the step no plan uses them all as well."""
    rows = [(30, 60), (15, 30)]
    blocks = [
        Block(
            id=f"b{index}",
            operator="layer",
            parameter_bytes=1,
            costs=tuple(
                CostRow(
                    microbatch_size=1,
                    shards=shards,
                    forward_ns=f // shards,
                    backward_ns=b // shards,
                    activation_bytes=1,
                )
                for shards in (1, 2)
            ),
        )
        for index, (f, b) in enumerate(rows)
    ]
    request = request_of(joined(blocks), "auto", Batch(8, 1), 3, **(FIXED | {"sizes": (1,)}))
    result = search_plan(request, explain=True)
    found = result.plan
    assert result.explanation is not None
    best = next(each for each in result.explanation.alternatives if each.iteration_ns == found.predicted.iteration_ns)
    assert best.what.startswith("tp 2 dp 1, then tp 1 dp 1 pp 2, ")
    assert [len(stage.devices) for stage in found.stages] == [2, 1]
    assert found.predicted.iteration_ns == one_f_one_b([15, 15], [30, 30], 8)
    planners = {"every width", "stage ways", "one stage", "stage graphs", "published planners"}
    assert search_plan(request, steps=without(planners)).plan.predicted.iteration_ns > found.predicted.iteration_ns
