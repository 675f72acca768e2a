"""AutoPipe's tables and figures, as far as the text gives their numbers, on GPT-2 345M with recomputed layers.

The paper's partitions hang on what the head (logits and loss) takes beside a layer, which the paper does not say. Costs
are those of ``benchmarks/autopipe_plans.py``, whose ``FITTED_HEAD`` is fitted to where the text has two stages cut, and
to nothing else: a test says so, and what else follows from it is a prediction that can fail.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import accumulate, combinations, pairwise
from statistics import pstdev

import pytest

from pipeplan.costs import StageCost
from pipeplan.costs.devices import device_preset
from pipeplan.examples import model
from pipeplan.files import PlacedStage
from pipeplan.partition.baselines import num_to_split, sliced
from pipeplan.partition.chain.autopipe import Cuts, Step, autopipe, plan_chain, timeline
from pipeplan.partition.chain.costs import ChainCosts, Fitting, StageTimes
from pipeplan.partition.dapple import dapple
from pipeplan.partition.problem import PartitionProblem
from support.marks import slow_but
from support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from autopipe_plans import (
    DEVICE,
    FITTED_HEAD,
    Case,
    estimated,
    estimated_head,
    problem_of,
)

LAYERS = 24
TABLE_2 = {
    1: (5, 7, 6, 6),
    2: (6, 6.5, 6.5, 5),
    3: (6, 7, 6, 5),
    4: (6.5, 6.5, 6.5, 4.5),
    5: (6.5, 6.5, 6, 5),
    6: (7, 5.5, 6, 5.5),
    7: (7, 6.5, 5.5, 5),
}
"""Layers per stage of GPT-2 345M (Table II)."""


@cache
def loads_of(microbatch_size: int, head: float | None = None, name: str = "gpt2-345m") -> ChainCosts:
    """Times alone: embedding, attention and FFN of every layer, head; the head's of so many layers, or as estimated."""
    costs = Case(name, microbatch_size, 4, head).costs(microbatch_size)
    return ChainCosts.of([StageCost(each.forward_ns, each.backward_ns) for each in costs])


def cut_into(layers: tuple[float, ...]) -> Cuts:
    """The first block of each stage: the embedding is with the first layer, the head with the last."""
    return (0, *(int(1 + 2 * sum(layers[:stage])) for stage in range(1, len(layers))))


def layers_of(begins: Cuts) -> tuple[float, ...]:
    """Layers of each stage, embedding and head left out."""
    ends = [0, *(begin - 1 for begin in begins[1:]), 2 * LAYERS]
    return tuple((end - begin) / 2 for begin, end in pairwise(ends))


def evenly(num_stages: int) -> Cuts:
    """Megatron-LM's split: the same number of layers in every stage."""
    return cut_into((LAYERS / num_stages,) * num_stages)


def test_rows_of_table_2_have_all_layers() -> None:
    for layers in TABLE_2.values():
        assert layers_of(cut_into(layers)) == layers
        assert sum(layers) == LAYERS


# Table II, Fig. 13 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch_size", [4, 32])
def test_head_is_fitted_to_where_two_stages_are_cut(microbatch_size: int) -> None:
    """IV-E1 has 13 and 11 layers, and the head is the middle of those that have the planner cut there."""
    for off, here in ((-0.45, True), (0.0, True), (0.45, True), (-0.55, False), (0.55, False)):
        found = plan_chain(loads_of(microbatch_size, FITTED_HEAD + off), 2, 16).begins
        assert (layers_of(found) == (13, 11)) is here, off


@pytest.mark.parametrize("microbatch_size", [4, 32])
def test_fitted_head_predicts_row_4_of_table_2(microbatch_size: int) -> None:
    assert layers_of(plan_chain(loads_of(microbatch_size, FITTED_HEAD), 4, 8).begins) == TABLE_2[4]


@pytest.mark.parametrize("head", [FITTED_HEAD, None])
def test_row_4_of_table_2_is_fastest_and_row_1_slowest(head: float | None) -> None:
    loads = loads_of(4, head)
    times = {row: timeline(loads.stages(cut_into(layers)), 8).iteration_ns for row, layers in TABLE_2.items()}
    assert min(times, key=lambda row: times[row]) == 4
    assert max(times, key=lambda row: times[row]) == 1
    assert plan_chain(loads, 4, 8).iteration_ns <= 1.001 * times[4]


def test_estimated_head_asks_for_fewer_layers_beside_it() -> None:
    """The difference to the paper: with our estimate the last stage gets 4 layers, not 4.5."""
    assert 2.5 < estimated_head("gpt2-345m", 32) < 2.7
    assert layers_of(plan_chain(loads_of(32), 4, 8).begins) == (7, 6.5, 6.5, 4)


@slow_but("head", [FITTED_HEAD, None], lambda head: head is not None)
def test_nothing_is_faster_than_what_is_found(head: float | None) -> None:
    """All 18,424 cuts into four stages."""
    loads = loads_of(4, head)
    every = ((0, *inner) for inner in combinations(range(1, loads.num_blocks), 3))
    best = min(timeline(loads.stages(begins), 8).iteration_ns for begins in every)
    assert plan_chain(loads, 4, 8).iteration_ns == best


def deviation(head: float | None, begins: Cuts, replicas: tuple[int, ...], shares: tuple[int, ...]) -> float:
    """Of how long a device of each stage works per micro-batch of 32; ``shares``: the samples that it has of it."""
    totals = [loads_of(share, head).stages(begins).totals[stage] for stage, share in enumerate(shares)]
    turns = [count if share == 32 else 1 for count, share in zip(replicas, shares, strict=True)]
    return pstdev(total / each for total, each in zip(totals, turns, strict=True))


@pytest.mark.parametrize(("head", "dapple", "piper"), [(FITTED_HEAD, 1.0, 1.0), (None, 1.0, 3.5)])
def test_balance_beside_the_others(head: float | None, dapple: float, piper: float) -> None:
    """Fig. 13, on 4 devices: so many times as good as 7 layers on one and 17 on three, which share micro-batches, and
    as Piper's four stages of whole layers.

    The text has 2.73 to 6.89 and 5.35 to 12.7. These do not come back, and no head that is fitted could show them:
    where two stages are cut as in the text they can be even, and then any ratio comes out.
    """
    ours = deviation(head, plan_chain(loads_of(32, head), 2, 16).begins, (2, 2), (32, 32))
    assert deviation(head, cut_into((7, 17)), (1, 3), (32, 11)) >= dapple * ours
    assert deviation(head, four_stages(head), (1,) * 4, (32,) * 4) >= piper * ours


def four_stages(head: float | None) -> Cuts:
    """Cut between layers, with the least slowest stage; so many (IV-D), their layers are not stated."""
    loads, between = loads_of(32, head), range(1, 2 * LAYERS + 2, 2)
    return min(((0, *inner) for inner in combinations(between, 3)), key=lambda each: max(loads.stages(each).totals))


def test_few_schemes_are_looked_at() -> None:
    """What keeps planning under a tenth of a second: some dozens of simulations, of all 17,296 cuts into 4 stages."""
    for num_stages in (2, 4, 8, 12):
        assert plan_chain(loads_of(4), num_stages, 2 * num_stages).num_simulated <= 60


# Fig. 10, 14 -------------------------------------------------------------------------------------------------------


def test_speedups_over_even_layers_are_those_of_figure_10() -> None:
    """BERT-large: up to 1.25 for the planner on 12 stages, 1.02 to 1.30 for both, more for more stages."""
    loads, planner, both = loads_of(16, FITTED_HEAD, "bert-large"), [], []
    for num_stages in (2, 4, 8, 12):
        even = timeline(loads.stages(evenly(num_stages)), 2 * num_stages).iteration_ns
        found = plan_chain(loads, num_stages, 2 * num_stages)
        stages = loads.stages(found.begins)
        planner.append(even / found.iteration_ns)
        both.append(even / sliced(stages, 2 * num_stages, num_to_split(stages)).iteration_ns)
    assert planner == sorted(planner)
    assert both == sorted(both)
    assert planner[0] > 1.02
    assert planner[-1] == pytest.approx(1.25, abs=0.015)
    assert both[-1] == pytest.approx(1.30, abs=0.015)


@pytest.mark.parametrize("num_stages", [2, 4, 8, 12])
@pytest.mark.parametrize("microbatch_size", [4, 8, 16, 24, 32])
def test_slicer_halves_startup_as_in_figure_14(num_stages: int, microbatch_size: int) -> None:
    """For Megatron-LM's even split and for ours; ours starts a little later, as its first stages do more (IV-E2)."""
    loads = loads_of(microbatch_size)
    startups = []
    for begins in (evenly(num_stages), plan_chain(loads, num_stages, 2 * num_stages).begins):
        stages = loads.stages(begins)
        before = sliced(stages, 2 * num_stages, 0)
        after = sliced(stages, 2 * num_stages, num_to_split(stages))
        assert after.startup_ns == pytest.approx(before.startup_ns / 2, rel=1e-6)
        assert after.iteration_ns < before.iteration_ns
        assert most_held(after.ends, num_stages) == most_held(before.ends, num_stages)
        startups.append(after.startup_ns)
    assert startups[0] < startups[1]


def most_held(ends: dict[Step, int], num_stages: int) -> list[int]:
    """[stage] micro-batches between their forward and their backward, at most."""
    orders: list[list[tuple[int, str]]] = [[] for _ in range(num_stages)]
    for (kind, stage, _), end in ends.items():
        orders[stage].append((end, kind))
    return [max(accumulate(1 if kind == "F" else -1 for _, kind in sorted(order))) for order in orders]


# Tables III, IV ----------------------------------------------------------------------------------------------------


def best_depth(
    name: str, num_devices: int, mini_batch: int, microbatch_size: int, memory: int
) -> tuple[PlacedStage, ...]:
    """Each replica takes whole micro-batches in turn, which is the same as shares of larger ones."""
    profile = model(name, device=DEVICE, microbatch_sizes=(microbatch_size,))
    sizes = [microbatch_size << power for power in range(num_devices.bit_length())]
    problem = PartitionProblem.of(
        profile, num_devices, mini_batch, microbatch_sizes=sizes, memory_bytes=memory, recompute=(True,)
    )
    return next(autopipe(problem)).placement.stages


@pytest.mark.parametrize("num_devices", [4, 16])
@pytest.mark.parametrize("mini_batch", [128, 256, 512])
def test_with_little_memory_in_use_all_devices_are_replicas(num_devices: int, mini_batch: int) -> None:
    """Table III: AutoPipe's planner uses data parallelism alone."""
    memory = device_preset(DEVICE).memory_bytes
    stages = best_depth("gpt2-345m", num_devices, mini_batch, 4, memory)
    assert [stage.replicas for stage in stages] == [num_devices]


@pytest.mark.parametrize(("mini_batch", "stated"), [(512, 1.017), (1024, 1.050), (2048, 1.066)])
def test_advantage_over_dapples_partition_grows_with_the_mini_batch_as_in_table_4(
    mini_batch: int, stated: float
) -> None:
    """4 devices, micro-batches of 32: DAPPLE's 7 layers on one and 17 on three, which share every micro-batch, against
    two pipelines of 13 and 11 with half of the micro-batches each: the published ratio of times, within 1.5 %.
    """
    loads = loads_of(32, FITTED_HEAD)
    theirs = loads.stages(cut_into((7, 17)))
    shared = StageTimes((theirs.forwards[0], theirs.forwards[1] // 3), (theirs.backwards[0], theirs.backwards[1] // 3))
    ours = plan_chain(loads, 2, mini_batch // 64)
    ratio = timeline(shared, mini_batch // 32).iteration_ns / ours.iteration_ns
    assert ratio == pytest.approx(stated, abs=0.015)


@pytest.mark.parametrize(("mini_batch", "stated"), [(512, 1.121), (1024, 1.107), (2048, 1.097)])
def test_advantage_over_four_stages_shrinks_with_the_mini_batch_as_in_table_4(mini_batch: int, stated: float) -> None:
    """4 devices, micro-batches of 32: Piper's four stages against two pipelines of 13 and 11 layers."""
    loads = loads_of(32, FITTED_HEAD)
    theirs = timeline(loads.stages(four_stages(FITTED_HEAD)), mini_batch // 32).iteration_ns
    ratio = theirs / plan_chain(loads, 2, mini_batch // 64).iteration_ns
    assert ratio == pytest.approx(stated, abs=0.015)


@pytest.mark.parametrize(("name", "microbatch_size"), [("gpt2-345m", 32), ("gpt2-762m", 24), ("gpt2-1.3b", 16)])
def test_with_much_memory_in_use_the_whole_model_fits_no_device(name: str, microbatch_size: int) -> None:
    """Table IV: all planners use pipelines; the smallest number of devices is two."""
    memory, chain = device_preset(DEVICE).memory_bytes, ChainCosts.of(estimated(name, microbatch_size))
    assert not Fitting(chain, memory, 32 // 8).any_cut(1)
    assert Fitting(chain, memory, 32 // 4).any_cut(2)
    assert len(best_depth(name, 8, 32 * microbatch_size, microbatch_size, memory)) > 1


def test_dapple_gives_no_stage_more_replicas_than_samples() -> None:
    """Table III's runtime error on 16 devices: 15 replicas for micro-batches of 4 (IV-D)."""
    profile = model("gpt2-345m", device=DEVICE, microbatch_sizes=(1, 2, 4))
    plan = next(dapple(PartitionProblem.of(profile, 16, 128, microbatch_sizes=[4], recompute=(True,))))
    assert max(stage.replicas for stage in plan.placement.stages) <= 4


@pytest.mark.parametrize("num_devices", [4, 8])
def test_dapple_plans_two_stages(num_devices: int) -> None:
    """Table IV: its planner tends to two stages, whatever the number of devices."""
    problem = problem_of(Case("gpt2-345m", 32, num_devices, FITTED_HEAD), 512, shared=True)
    assert len(next(dapple(problem)).placement.stages) == 2
