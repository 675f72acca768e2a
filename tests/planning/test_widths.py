"""Stages of different widths: of small chains a search finds the best of all, with each stage's devices its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from builders.clusters import cluster_of
from builders.profiles import joined, uneven_chain
from builders.requests import request_of
from pipeplan.files import Block, CostRow, Recipe
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import search_plan, without
from pipeplan.planning.widths import _Widths
from references.every_width import every_width, one_f_one_b
from support.layouts import FIXED, require_best_or_none
from support.marks import one_in, slow_but

MINI_BATCH = 12
EXPERTS = ((1, 1), (2, 1), (2, 2))
SHARING: list[dict[str, Any]] = [
    {"shards": (1, 2), "contexts": (1, 2)},
    {"shards": (1, 2), "experts": EXPERTS},
    {"shards": (1, 2), "contexts": (1, 2), "experts": EXPERTS},
]
"""What devices may share beside blocks."""


LARGEST = 6, 8
"""Blocks and devices of the largest chains of which every layout is looked at."""


def compare(seed: int, most: tuple[int, int], least: tuple[int, int] = (2, 2), **how: Any) -> bool:
    """The iteration found is that of the best layout, and the bound over everything is not above it; or nothing fits.

    Whether any layout does.
    """
    random_ = random.Random(seed)
    blocks, devices = map(random_.randint, least, most)
    memory, recompute, zero = random_.choice([None, 100, 250]), random_.random() < 0.5, random_.random() < 0.3
    profile = uneven_chain(seed, blocks, **({"shards": (1, 2, 4)} | how))
    levels = (int(zero),)
    best = min(every_width(profile, devices, MINI_BATCH, memory, recompute=recompute, levels=levels), default=None)
    asked: dict[str, Any] = {"memory_bytes": memory, "zero": int(zero)}
    request = request_of(profile, "auto", Batch(MINI_BATCH, 1), devices, **asked, **FIXED)
    require_best_or_none(replace(request, recompute=None if recompute else False), best)
    return best is not None


@pytest.mark.filterwarnings("ignore:--zero 1 divides nothing:UserWarning")
@one_in(2, "seed", range(12))
def test_search_finds_the_best_of_all_widths(seed: int) -> None:
    compare(seed, (4, 4))


@pytest.mark.filterwarnings("ignore:--zero 1 divides nothing:UserWarning")
@slow_but("seed", range(100, 112), lambda _: False, lambda seed: seed >= 105)
def test_search_finds_the_best_of_more_widths(seed: int) -> None:
    compare(seed, (5, 6))


@pytest.mark.filterwarnings("ignore:--zero 1 divides nothing:UserWarning")
@slow_but("seed", range(300, 312), (300).__eq__, lambda seed: seed >= 303)
@pytest.mark.parametrize("how", SHARING, ids=["sequences", "experts", "both"])
def test_stages_share_sequences_alike_and_experts_as_suits_each(seed: int, how: dict[str, Any]) -> None:
    compare(seed, (4, 4), **how)


@slow_but("seed", range(600, 624), lambda seed: seed < 602 or seed == 611, lambda seed: seed >= 608 and seed != 611)
def test_messages_and_sums_of_gradients_count(seed: int) -> None:
    """A message takes its time, and what has copies of gradients sums them around a ring after its last action."""
    compare_with_messages(seed, (5, 6))


def compare_with_messages(seed: int, most: tuple[int, int], least: tuple[int, int] = (2, 2)) -> bool:
    random_ = random.Random(seed)
    blocks, devices = map(random_.randint, least, most)
    hop, latency, rate = random_.choice([1, 10, 40]), random_.choice([1, 20]), 10 ** random_.choice([8, 9])
    memory, recompute, contexts = (
        random_.choice([None, 150, 300]),
        random_.random() < 0.4,
        random_.choice([(1,), (1, 2)]),
    )
    made = uneven_chain(seed, blocks, (1, 2), contexts).blocks
    heavy = [block.model_copy(update={"gradient_bytes": random_.randint(0, 60)}) for block in made]
    profile = joined(heavy, transfer_ns=hop)
    cluster = cluster_of(devices, latency_ns=latency, bandwidth=rate).model_copy(update={"overlap": "none"})

    def sums_ns(size: int, copies: int) -> int:
        return round(2 * (copies - 1) * (latency + 1e9 * size / copies / rate)) if size and copies > 1 else 0

    how: dict[str, Any] = {"recompute": recompute, "levels": (0,), "hop_ns": hop, "sums_ns": sums_ns}
    best = min(every_width(profile, devices, MINI_BATCH, memory, **how), default=None)
    asked: dict[str, Any] = {"memory_bytes": memory, "recompute": None if recompute else False, "cluster": cluster}
    require_best_or_none(request_of(profile, "auto", Batch(MINI_BATCH, 1), devices, zero=0, **asked, **FIXED), best)
    return best is not None


@slow_but("seed", range(500, 516), (500).__eq__, lambda seed: seed >= 505)
def test_replicas_of_each_stage_divide_what_suits_it(seed: int) -> None:
    """Every level of ZeRO for each stage, where devices have little room; what levels exchange takes no time here."""
    compare_with_levels(seed, (4, 5))


def compare_with_levels(seed: int, most: tuple[int, int], least: tuple[int, int] = (2, 2)) -> bool:
    random_ = random.Random(seed)
    blocks, devices = map(random_.randint, least, most)
    memory, recompute = random_.choice([60, 100, 160, 250]), random_.random() < 0.6
    kept = [{"parameters": count, "parameter_bytes": 4 * count} for count in random_.choices(range(1, 9), k=blocks)]
    made = zip(uneven_chain(seed, blocks, (1, 2)).blocks, kept, strict=True)
    profile = joined([block.model_copy(update=own) for block, own in made])
    profile = profile.model_copy(update={"recipe": Recipe(name="fp32")})
    every = every_width(profile, devices, MINI_BATCH, memory, recompute=recompute, levels=range(4))
    best = min(every, default=None)
    how: dict[str, Any] = {"memory_bytes": memory, "any_level": True, "recompute": None if recompute else False}
    require_best_or_none(request_of(profile, "auto", Batch(MINI_BATCH, 1), devices, **how, **FIXED), best)
    return best is not None


@pytest.mark.filterwarnings("ignore:--zero 1 divides nothing:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(400, 403), *(pytest.param(n, marks=pytest.mark.long) for n in range(403, 420))]
)
def test_search_finds_the_best_of_six_blocks_on_eight_devices(seed: int) -> None:
    """All that chains leave open, to the size at which every layout is looked at."""
    compare(seed, LARGEST, **(SHARING[-1] if seed % 2 else {}))


@pytest.mark.filterwarnings("ignore:--zero 1 divides nothing:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("compared", [compare, compare_with_messages, compare_with_levels])
@pytest.mark.parametrize("seed", [700, pytest.param(703, marks=pytest.mark.long)])
def test_nothing_is_missed_of_the_largest_chains(compared: Callable[..., bool], seed: int) -> None:
    assert compared(seed, LARGEST, LARGEST), "something fits"


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
