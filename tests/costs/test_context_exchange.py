"""Keys and values of devices that share sequences, gathered or around a ring: times, memory, choices, words."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import pipeplan
from pipeplan.checker import check
from pipeplan.costs import build_workload, with_recipe
from pipeplan.costs.context import SharedCore, of_stages, with_exchanges
from pipeplan.costs.uniform.published import read_run
from pipeplan.errors import UsageError
from pipeplan.files import (
    Block,
    CostRow,
    Edge,
    PlacedStage,
    Placement,
    Plan,
    Profile,
    Recipe,
    RingCosts,
    Source,
    sha256_of,
)
from pipeplan.interop.imports import _context_exchange
from pipeplan.interop.settings import megatron_sizes, torchtitan_settings
from pipeplan.planning.next_steps import cannot_train
from pipeplan.planning.request import Request
from pipeplan.simulator.recost import recosted
from pipeplan.workload.elements import ContextExchange


def stepped(parts: int, core: float, gather: float, merge: float) -> float:
    """A ring's forward, step by step: a piece comes while another is computed with, and is merged when it can be."""
    hop, came, free = gather / (parts - 1), 0.0, 0.0
    for step in range(parts):
        free = max(free, came) + core / parts + (merge if step else 0)
        came += hop
    return free


def stepped_back(parts: int, core: float, gather: float, merge: float) -> float:
    """Its backward: pieces and their gradients on one link; gradients add to those that come, and end at home."""
    hop, now = gather / (parts - 1), 0.0
    for step in range(parts):
        hops = (step < parts - 1) + (step > 0)  # the next piece, and gradients of the step before
        now = max(now + core / parts, now + hops * hop) + (merge if step else 0)
    return now


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_a_ring_takes_what_its_steps_take(parts: int) -> None:
    cases = itertools.product((1_000, 40_000), (900, 9_000, 90_000), (0, 50, 7_000))
    for core, gather, merge in cases:
        own = SharedCore(parts, core, 2 * core, gather, 8_000, 500, merge, merge)
        assert core + own.ring.forward_ns == pytest.approx(stepped(parts, core, gather, merge))
        assert 2 * core + own.ring.input_grad_ns == pytest.approx(stepped_back(parts, 2 * core, gather, merge))
        assert own.ring.workspace_bytes == 4 * 8_000 / parts + 500
        assert own.gathered == (gather, 2 * gather, 2 * 8_000)


def test_one_device_alone_exchanges_nothing_also_in_a_table() -> None:
    parts, gathers = (1, 2, 4), (0, 60, 90)
    table = SharedCore(np.array(parts), 100, 200, np.array(gathers), 800, 50, 5, 7)
    alone = [SharedCore(part, 100, 200, gather, 800, 50, 5, 7) for part, gather in zip(parts, gathers, strict=True)]
    assert alone[0].ring == alone[0].gathered == (0, 0, 0)
    for way in ("ring", "gathered"):
        columns = zip(*(np.broadcast_to(each, 3) for each in getattr(table, way)), strict=True)
        assert list(columns) == [getattr(each, way) for each in alone]


# Plans --------------------------------------------------------------------------------------------------------------


def row(takes: int, ring: RingCosts | None, size: int, shards: int, context: int, again: bool) -> CostRow:
    time, core = takes * size // context, ring is not None and not again
    return CostRow(
        microbatch_size=size,
        shards=shards,
        context=context,
        recompute=again,
        forward_ns=time,
        backward_ns=(3 + again) * time,
        input_grad_ns=(2 + again) * time,
        weight_grad_ns=time,
        activation_bytes=100 * size,
        workspace_bytes=64,
        ring=ring if context > 1 else None,
        selective_ns=10 if core else None,
        selective_activation_bytes=50 if core else None,
    )


def profile(*, quicker: int = -30, rings: bool = True) -> Profile:
    """Two blocks, of whose rows for two devices' sequences the first one's say what a ring changes."""

    def rows(takes: int, ring: RingCosts | None) -> tuple[CostRow, ...]:
        cases = itertools.product((1, 2), (1, 2), (1, 2), (False, True))
        return tuple(row(takes, ring, *case) for case in cases)

    ring = RingCosts(forward_ns=quicker, input_grad_ns=2 * quicker, workspace_bytes=-32) if rings else None
    blocks = (
        Block(id="attention", operator="attention", parameters=10, costs=rows(400, ring)),
        Block(id="ffn", operator="ffn", parameters=10, costs=rows(200, None)),
    )
    return Profile(
        name="two ways",
        source=Source(method="estimated"),
        recipe=Recipe(name="bf16-mixed"),
        blocks=blocks,
        edges=(Edge(source="attention", target="ffn", bytes_per_sample=8),),
    )


def searched(known: Profile, **how: Any) -> Plan:
    asked = {"devices": 2, "pp": 1, "cp": 2, "mini_batch": 4, "time_limit": 2, "deterministic": True} | how
    return pipeplan.search(known, **asked).plan


def stages(**how: Any) -> Placement:
    stage = PlacedStage(blocks=("attention", "ffn"), devices=(0, 1), context=2, **how)
    return Placement(strategy="one-to-one", num_devices=2, stages=(stage,))


@pytest.mark.parametrize("recompute", ["none", "selective", "all"])
@pytest.mark.parametrize(("quicker", "way"), [(-30, "ring"), (5, "gathered")])
def test_the_quicker_one_is_taken_said_and_checked(quicker: int, way: str, recompute: str) -> None:
    known = profile(quicker=quicker)
    plan = searched(known, recompute=recompute)
    (stage,) = plan.stages
    assert stage.context_exchange == way
    by_id = {each.kind: each for each in plan.operations}
    size, ring = stage.microbatch_size, quicker * (way == "ring")
    assert by_id["F"].duration_ns == 300 * size + ring
    again = {"none": 0, "selective": 10 + ring, "all": 300 * size + ring}[recompute]
    assert by_id["B"].duration_ns == 900 * size + 2 * ring + again
    assert check(plan, known).valid
    said = json.loads(plan.model_dump_json())["stages"][0]
    assert ("context_exchange" in said) == (way == "ring")
    other: ContextExchange = "gathered" if way == "ring" else "ring"
    changed = plan.model_copy(update={"stages": (replace(stage, context_exchange=other),)})
    assert "operations[0F].duration_ns" in {each.place for each in check(changed, known).problems}
    assert recosted(plan, known, None).operations == plan.operations


def test_what_is_asked_goes_before_what_is_quicker() -> None:
    known = profile()
    gathered, around = (searched(known, cp_exchange=each) for each in ("gathered", "ring"))
    assert [each.stages[0].context_exchange for each in (gathered, around)] == ["gathered", "ring"]
    assert gathered.predicted.iteration_ns > around.predicted.iteration_ns
    assert gathered.provenance.choices["context_exchange"] == "--cp-exchange gathered"
    compared = pipeplan.compare(known, devices=2, cp=2, mini_batch=4, time_limit=2).rows[0]
    assert compared.figures()["context_exchange"] == "ring"


def test_placements_say_it_and_plans_to_start_from() -> None:
    known = profile()
    placed = known.model_copy(update={"placement": stages(context_exchange="gathered")})
    fixed: dict[str, Any] = {"cp": "auto", "pp": None}
    assert searched(placed, **fixed).stages[0].context_exchange == "gathered"
    with pytest.raises(UsageError, match="cp_exchange ring: stages with context 2 on 1 shards say context_exchange"):
        searched(placed, cp_exchange="ring", **fixed)
    begun = searched(known, cp_exchange="gathered")
    assert Request.of(known, start=begun).profile.rings == {(2, 2)}
    assert Request.of(known, devices=2, mini_batch=4).profile.rings == {(1, 2), (2, 2)}
    work = build_workload(known, stages(context_exchange="ring"), num_microbatches=2, microbatch_size=2)
    assert work.stages[0].context_exchange == "ring"
    assert work.operations[0].duration_ns == 600 - 30
    assert begun.placed.stages[0].context_exchange == "gathered"


def test_profiles_keep_their_fingerprint_and_need_no_second_choice() -> None:
    known = profile()
    chosen = with_exchanges(known)
    assert sha256_of(chosen) == sha256_of(known)
    assert with_exchanges(chosen) is chosen
    assert of_stages(chosen, stages(context_exchange="ring").stages) is chosen
    assert all(row.ring is None for block in chosen.blocks for row in block.costs)
    assert with_exchanges(with_recipe(known, Recipe(name="fp32"))).rings == chosen.rings


def test_of_equals_the_one_that_holds_less_is_taken() -> None:
    assert with_exchanges(profile(quicker=0)).rings == {(1, 2), (2, 2)}


def test_what_has_no_ring_is_refused() -> None:
    without = profile(rings=False)
    assert searched(without).stages[0].context_exchange == "gathered"
    with pytest.raises(UsageError, match=r"cp_exchange ring: .* has no costs of keys and values that go around a "):
        searched(without, cp_exchange="ring")
    with pytest.raises(UsageError, match=r"context_exchange ring: .* with context 2 on 1 shards; profile the model"):
        build_workload(without, stages(context_exchange="ring"), num_microbatches=2, microbatch_size=2)
    plan = searched(profile())
    assert "stages[0].context_exchange" in {each.place for each in check(plan, without).problems}
    unlike = [*stages(context_exchange="ring").stages, *stages(context_exchange="gathered").stages]
    with pytest.raises(UsageError, match=r"stages\[1\].context_exchange is gathered, and another stage"):
        with_exchanges(profile(), None, unlike)
    with pytest.raises(ValidationError, match="context_exchange ring is of devices that share sequences"):
        PlacedStage(blocks=("ffn",), devices=(0,), context_exchange="ring")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"context": 1}, "ring is of devices that share sequences"),
        ({"ring": RingCosts(forward_ns=-101)}, "ring.forward_ns is -101, more below 0 than the row's 100"),
        ({"ring": RingCosts(input_grad_ns=-101)}, "ring.input_grad_ns is -101"),
        ({"ring": RingCosts(workspace_bytes=-9)}, "ring.workspace_bytes is -9, more below 0 than the row's 8"),
        ({"input_grad_ns": None, "weight_grad_ns": None, "backward_ns": 5}, "the row has no input_grad_ns"),
    ],
)
def test_rows_that_cannot_be(how: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "microbatch_size": 1,
        "context": 2,
        "forward_ns": 100,
        "input_grad_ns": 100,
        "weight_grad_ns": 1,
    }
    good |= {"workspace_bytes": 8, "ring": RingCosts(forward_ns=-100, input_grad_ns=-100, workspace_bytes=-8)}
    assert CostRow(**good).ring is not None
    with pytest.raises(ValidationError, match=message):
        CostRow(**good | how)


# Other tools --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "ring", "assumed"),
    [
        ({}, 0, True),
        ({"attention": "TE fused attention"}, 1, True),
        ({"attention": "TE fused attention", "overlap": "tp overlap; cp_comm_type all_gather"}, 0, False),
        ({"attention": "keys and values gathered"}, 0, False),
        ({"attention": "ring attention, flash 2"}, 1, False),
        ({"attention": "TE", "overlap": "overlap_p2p_comm; sharding"}, 1, True),
    ],
)
def test_published_runs_say_it_by_their_words(said: dict[str, str], ring: int, assumed: bool) -> None:
    model = {"layers": 4, "hidden": 512, "heads": 8}
    row = {"model": model, "seq": 4096, "gpus": 8, "cp": 2, "micro_batch": 1, "global_batch": 8, **said}
    run = read_run({**row, "hardware": {"gpu": "H100 SXM"}})
    assert run.layout.ring == ring
    assert ("cp exchange" in run.assumed) == assumed
    assert not read_run({**row, "cp": 1, "hardware": {"gpu": "H100 SXM"}}).layout.ring


def test_runs_train_with_either() -> None:
    for way in ("gathered", "ring"):
        assert cannot_train(searched(profile(), cp_exchange=way)) == []


def test_other_tools_are_told_and_read() -> None:
    around, gathered = (searched(profile(), cp_exchange=each) for each in ("ring", "gathered"))
    for plan, words in ((around, ("p2p", "alltoall")), (gathered, ("all_gather", "allgather"))):
        megatron, method = megatron_sizes(plan.workload, 1), torchtitan_settings(plan.workload, "1f1b")
        assert f"--cp-comm-type {words[0]}" in megatron
        assert f"parallelism.context_parallel_rotate_method = '{words[1]}'" in method
    known, old = profile(), profile(rings=False)
    assert _context_exchange(known, {}, 1, 2) == "ring"
    assert _context_exchange(old, {}, 1, 2) is None
    for said, way in (("all_gather", "gathered"), ("p2p", "ring")):
        assert _context_exchange(old, {"--cp-comm-type": said}, 1, 2) == way
    with pytest.raises(UsageError, match="--cp-comm-type a2a: plans have p2p or all_gather"):
        _context_exchange(known, {"--cp-comm-type": "a2a"}, 1, 2)
