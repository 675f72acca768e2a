"""The search over everything: against every strategy forced by flags, in memory, and refined."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from builders.profiles import profile_of
from builders.requests import request_of
from pipeplan.checker import check
from pipeplan.costs import clusters as testbeds
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.examples import shape
from pipeplan.files import Block, Cluster, CostRow, Profile, read_profile
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.build_plan import Result
from pipeplan.planning.frontier import frontier_request, search_frontier
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan
from pipeplan.reporting.answer import print_answer
from pipeplan.reporting.terminal import report
from pipeplan.simulator.simulation import simulate
from pipeplan.units import parse_bytes
from support.paths import ROOT

pytestmark = pytest.mark.counted

PROFILES = ROOT / "profiles"
GB = 10**9
QUICK = {"time_limit": 0.3, "deterministic": True}


def profile(name: str) -> Profile:
    return read_profile(str(PROFILES / f"{name}.json"))


def cluster_of(num_devices: int) -> Cluster:
    return testbeds.named_cluster("graphpipe", num_devices)


def iteration(result: Result) -> int:
    return result.plan.predicted.iteration_ns


@pytest.mark.slow
@pytest.mark.long  # half a minute to a minute each
@pytest.mark.parametrize(("name", "memory"), [("gpt2-1.3b-a100-80gb", 24 * GB), ("mmt-v100-16gb", 4 * GB)])
def test_never_worse_than_a_strategy_forced_by_flags(name: str, memory: int) -> None:
    model, cluster = profile(name), cluster_of(4)
    batch = Batch(8, 4)

    def searched(placement: str, options: dict[str, Any], sizes: tuple[int, ...]) -> int | None:
        try:
            found = search_plan(
                request_of(
                    model, placement, batch, num_devices=4, cluster=cluster, memory_bytes=memory, sizes=sizes, **options
                )
            )
        except (InfeasibleError, UsageError):
            return None
        return iteration(found)

    forced = [
        searched(strategy, QUICK | {"replicas": replicas}, model.microbatch_sizes)
        for strategy in STRATEGIES
        for replicas in (1, 2)
    ]
    found = searched("auto", QUICK | {"time_limit": 3.0}, model.microbatch_sizes)
    assert found is not None
    assert found <= min(value for value in forced if value is not None)
    assert sum(value is not None for value in forced) >= 4


@pytest.mark.slow  # 15 to 30 s
@pytest.mark.long  # test_refusals has smaller ones for every verb
def test_what_is_said_where_nothing_fits_is_true() -> None:
    model = profile("mmt-v100-16gb")

    def search(num_devices: int, memory: int, placement: str, limit: float = 0.2) -> Result:
        options = QUICK | {"time_limit": limit}
        return search_plan(
            request_of(model, placement, Batch(4, 4), num_devices=num_devices, memory_bytes=memory, **options)
        )

    least, fewest = {}, {}
    for placement in ("auto", *STRATEGIES):
        with pytest.raises(InfeasibleError, match="too much") as told:
            search(2, GB, placement, 120.0)
        said = re.search(r"([0-9]+) devices of this size would do, or 2 of ([0-9.]+ ?[kMGT]?i?B)", str(told.value))
        assert said is not None, str(told.value)
        fewest[placement], least[placement] = int(said[1]), parse_bytes(said[2])
        assert iteration(search(2, least[placement], placement)) > 0
        assert iteration(search(fewest[placement], GB, placement)) > 0
        with pytest.raises(InfeasibleError):
            search(2, int(least[placement] * 0.95), placement)
    assert least["auto"] <= 1.01 * min(least.values())
    assert fewest["auto"] == min(fewest.values())


@pytest.mark.slow
def test_replicas_can_be_fixed() -> None:
    model = profile("gpt2-124m-cpu")
    for replicas in (1, 2, 4):
        options = QUICK | {"replicas": replicas}
        plan = search_plan(request_of(model, "auto", Batch(8, 4), num_devices=4, sizes=(1, 2, 4), **options)).plan
        assert {stage.replicas for stage in plan.stages} == {replicas}
        assert check(plan, model).valid
    with pytest.raises(UsageError, match="cannot be shared by 3 replicas"):
        search_plan(request_of(model, "one-to-one", Batch(8, 3), num_devices=4, **(QUICK | {"replicas": 3})))


@pytest.mark.slow
def test_without_prices_no_device_waits() -> None:
    """Summing gradients costs nothing without a cluster, and copies of the whole model have no bubbles."""
    found = search_plan(
        request_of(profile("gpt2-124m-cpu"), "auto", Batch(8, 4), num_devices=4, sizes=(1, 2, 4), **QUICK)
    )
    assert found.plan.predicted.bubble_rate == 0
    assert found.placement_gap == 0
    assert found.gap < 0.02  # as if every block had the size that it is quickest with


def test_slices_halve_the_startup_and_take_no_memory() -> None:
    """AutoPipe, Fig. 14."""
    model = profile("gpt2-1.3b-a100-80gb")

    def search(count: int) -> Result:
        options = QUICK | {"scheduler": "1f1b", "num_parted": count}
        return search_plan(request_of(model, "one-to-one", Batch(16, 4), num_devices=4, **options))

    whole, parted = search(0), search(2)
    before, after = (result.plan.starts_ns["3F"][0] for result in (whole, parted))
    assert 0.5 <= after / before <= 0.65
    assert iteration(parted) < iteration(whole)
    peaks = [[memory.peak_bytes for memory in result.plan.predicted.memory] for result in (whole, parted)]
    assert peaks[0] == peaks[1]
    assert [stage.num_parted for stage in parted.plan.stages] == [2, 2, 2, 1]
    assert check(parted.plan, model).valid
    repetend = parted.plan.repetend
    assert repetend is not None
    assert repetend.repetend_ns == (whole.plan.repetend.repetend_ns if whole.plan.repetend else 0)


def test_slices_need_halves() -> None:
    with pytest.raises(UsageError, match="--slices 1 does not apply: it needs one stage per device"):
        search_plan(
            request_of(profile("gpt2-124m-cpu"), "v-shape", Batch(8, 4), num_devices=4, **(QUICK | {"num_parted": 1}))
        )
    v = shape("v", 4)
    assert v.placement is not None
    with pytest.raises(UsageError, match="cannot be halved"):
        search_plan(request_of(v, v.placement, Batch(8, 1), **(QUICK | {"num_parted": 1})))


@pytest.mark.slow
def test_stages_recompute_only_where_memory_asks_for_it() -> None:
    model = profile("gpt2-1.3b-a100-80gb")
    plans = {
        memory: search_plan(
            request_of(model, "one-to-one", Batch(8, 4), num_devices=4, memory_bytes=memory * GB, sizes=(2,), **QUICK)
        ).plan
        for memory in (12, 80)
    }
    assert not any(stage.recompute for stage in plans[80].stages)
    assert plans[80].predicted.iteration_ns <= plans[12].predicted.iteration_ns
    for plan in plans.values():
        assert check(plan, model).valid


def test_shared_blocks_are_spread_where_they_can_be() -> None:
    flat = shape("m", 4).model_copy(update={"placement": None})
    blocks = tuple(
        block.model_copy(
            update={"costs": (*block.costs, *(row.model_copy(update={"shards": 1}) for row in block.costs))}
        )
        if block.shared and all(row.shards > 1 for row in block.costs)
        else block
        for block in flat.blocks
    )
    model = flat.model_copy(update={"blocks": blocks})
    spread = search_plan(request_of(model, "one-to-one", Batch(8, 1), num_devices=4, **(QUICK | {"spread": True}))).plan
    wide = [stage for stage in spread.stages if len(stage.devices) == 4]
    assert [stage.shards for stage in wide] == [4] * len(wide)
    assert wide
    assert check(spread, model).valid
    with pytest.raises(UsageError, match="no shared blocks"):
        search_plan(
            request_of(profile("gpt2-124m-cpu"), "one-to-one", Batch(8, 1), num_devices=4, **(QUICK | {"spread": True}))
        )


def test_a_placement_that_runs_a_block_before_its_input_is_refused() -> None:
    model = profile("gpt2-124m-cpu")
    plan = search_plan(request_of(model, "one-to-one", Batch(4, 1), num_devices=2, **QUICK)).plan
    first = plan.stages[0]
    turned = replace(first, blocks=first.blocks[::-1])
    with pytest.raises(ValueError, match=r"stages\[0\] runs block 'layer0.attention' before 'embedding'"):
        model.check_placement(plan.placed.model_copy(update={"stages": (turned, *plan.placed.stages[1:])}))
    report = check(plan.model_copy(update={"stages": (turned, *plan.stages[1:])}), model)
    assert any("runs before 'embedding', which it needs" in problem.message for problem in report.problems)


@pytest.mark.parametrize("limit", [0.0, 0.01])
def test_no_time_still_gives_a_plan(limit: float) -> None:
    options = {"time_limit": limit}
    found = search_plan(
        request_of(
            profile("gpt2-124m-cpu"),
            "auto",
            Batch(4, 4),
            num_devices=4,
            memory_bytes=3 * GB,
            sizes=(1, 2, 4),
            **options,
        )
    )
    assert iteration(found) > 0


@pytest.mark.slow
def test_spread_is_kept_or_refused() -> None:
    model = spreadable(profile("gpt2-124m-cpu"), 4)
    found = search_plan(
        request_of(model, "auto", Batch(8, 4), num_devices=4, sizes=(1, 2, 4), **(QUICK | {"spread": True}))
    ).plan
    assert {stage.blocks for stage in found.stages if stage.shards == 4} == {("embedding",), ("head",)}
    assert check(found, model).valid
    with pytest.raises(UsageError, match=r"'embedding' .* costs for 1, 4 shards, .* needs 2; change --replicas"):
        search_plan(request_of(model, "auto", Batch(8, 4), num_devices=4, **(QUICK | {"spread": True, "replicas": 2})))
    halves = spreadable(profile("gpt2-124m-cpu"), 2)
    copies = QUICK | {"spread": True, "replicas": 2}
    for strategy in ("one-to-one", "bidirectional"):
        found = search_plan(request_of(halves, strategy, Batch(8, 4), num_devices=4, **copies)).plan
        wide = [stage for stage in found.stages if len(stage.blocks) == 1]
        assert {(stage.shards, stage.replicas) for stage in wide} == {(2, 2)}
        assert check(found, halves).valid


def spreadable(model: Profile, shards: int) -> Profile:
    """The same with embedding and head that may be split over so many devices, at a share of their costs."""

    def shared(block: Block) -> Block:
        if block.id not in ("embedding", "head"):
            return block
        split = [
            row.model_copy(update={"shards": shards, "forward_ns": row.forward_ns // shards}) for row in block.costs
        ]
        return block.model_copy(update={"shared": True, "costs": (*block.costs, *split)})

    return model.model_copy(update={"blocks": tuple(map(shared, model.blocks))})


def test_one_profiled_size_is_not_a_fixed_one() -> None:
    """Replicas each take micro-batches of the size that was profiled; only what the user says is fixed."""
    rows = [CostRow(microbatch_size=1, forward_ns=100, backward_ns=200)] * 2
    chain = profile_of(rows)
    assert Request.of(chain, devices=8, mini_batch=16).sizes == (1,)
    for asked in ({"microbatch_size": 1}, {"num_microbatches": 16}):
        assert Request.of(chain, devices=8, mini_batch=16, **asked).sizes == ()
    found = {
        size: search_plan(Request.of(chain, devices=8, mini_batch=16, microbatch_size=size, **QUICK))
        for size in (None, 1)
    }
    assert found[None].plan.predicted.iteration_ns == 1200, "two samples on each of 8 replicas"
    assert found[None].figures()["idle_devices"] == []
    assert found[1].plan.num_microbatches == 16
    assert found[1].figures()["idle_devices"] == [2, 3, 4, 5, 6, 7]
    assert search_plan(Request.of(chain, devices=8, mini_batch=16, replicas=4, **QUICK)).plan.microbatch_size == 4
    with pytest.raises(UsageError, match="micro-batch size 1 does not work with 4 replicas"):
        search_plan(Request.of(chain, devices=8, mini_batch=16, microbatch_size=1, replicas=4, **QUICK))


def test_idle_devices_are_said_first() -> None:
    chain = profile_of([CostRow(microbatch_size=1, forward_ns=100, backward_ns=200)] * 2)
    simulation = simulate(search_plan(Request.of(chain, devices=4, mini_batch=4, microbatch_size=1, **QUICK)).plan)
    first, second, *_ = report(simulation, 80)
    assert str(first) == "2 of 4 devices run nothing: 2-3"
    assert str(second).startswith("test: ")
    busy = simulate(search_plan(Request.of(chain, devices=2, mini_batch=4, microbatch_size=1, **QUICK)).plan)
    assert str(report(busy, 80)[0]).startswith("test: ")


@pytest.mark.parametrize(("devices", "idle"), [(8, "6 of 8 devices run nothing: 2-7"), (2, None)])
def test_nor_does_the_answer_or_a_frontier_leave_that_to_the_end(
    devices: int, idle: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = profile_of([CostRow(microbatch_size=1, forward_ns=100, backward_ns=200)] * 2)
    request = Request.of(chain, devices=devices, mini_batch=4, microbatch_size=1, **QUICK)
    result = search_plan(request)
    print_answer(request, result, simulate(result.plan))
    first, second, *_ = lines = capsys.readouterr().out.rstrip().splitlines()
    assert first == (idle or "test: optimal for 2 devices")
    assert len(lines) <= 10
    assert any("--devices 2: the same iteration without the 6 devices" in line for line in lines) is bool(idle)
    assert idle is None or second == "test: best plan found for 8 devices"
    found = search_frontier(frontier_request(chain, devices=[devices], mini_batch=2, time_limit=1.0))
    assert [point.what.partition(";")[0] for point in found.points] == [
        "1 stage on 2 replicas, 6 devices run nothing" if idle else "1 stage on 2 replicas"
    ]
