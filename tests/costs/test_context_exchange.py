"""Keys and values of devices that share sequences, gathered or around a ring: times, memory, choices, words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import pipeplan
from pipeplan.checker import check
from pipeplan.costs import build_workload, with_recipe
from pipeplan.costs.context import SharedCore, exchanged_as, of_stages, open_exchanges, with_exchanges
from pipeplan.costs.joining import joined
from pipeplan.costs.uniform.published import read_run
from pipeplan.errors import InfeasibleError, UsageError
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
from pipeplan.planning.bounds import request_bound
from pipeplan.planning.next_steps import cannot_train
from pipeplan.planning.request import Request
from pipeplan.simulator.recost import recosted
from pipeplan.workload.elements import Again, ContextExchange
from support.marks import one_in

pytestmark = pytest.mark.counted


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
        held = max(5 * 8_000 / parts + 500, 2 * 8_000 / parts + 3 * 500)
        assert own.ring.workspace_bytes == pytest.approx(held)
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


# Time against memory ------------------------------------------------------------------------------------------------

LEVELS: tuple[Again, ...] = (False, "selective", True)
TIMES, ACTIVATIONS, WORKSPACE, KEPT, CORE_NS, CORE_KEPT = (400, 200), (300, 90), 640, (40, 15), 70, 120


def open_profile(ring_ns: int, ring_bytes: int) -> Profile:
    """Attention and what follows: of the former a ring is quicker and holds more, or slower and holds less."""
    ring = RingCosts(forward_ns=ring_ns, input_grad_ns=2 * ring_ns, workspace_bytes=ring_bytes)

    def rows(place: int) -> Iterator[CostRow]:
        for size, context, again in itertools.product((1, 2), (1, 2), (False, True)):
            time, core = TIMES[place] * size // context, place == 0 and not again
            activations = (KEPT if again else ACTIVATIONS)[place] * size
            yield CostRow(
                microbatch_size=size,
                context=context,
                recompute=again,
                forward_ns=time,
                backward_ns=(2 + again) * time,
                input_grad_ns=(1 + again) * time,
                weight_grad_ns=time,
                activation_bytes=activations,
                workspace_bytes=WORKSPACE // (1 + place),
                ring=ring if context > 1 and place == 0 else None,
                selective_ns=CORE_NS * size if core else None,
                selective_activation_bytes=CORE_KEPT * size if core else None,
            )

    names = ("attention", "ffn")
    return Profile(
        name="time or memory",
        source=Source(method="estimated"),
        recipe=Recipe(name="bf16-mixed"),
        blocks=tuple(Block(id=n, operator=n, parameters=10, costs=tuple(rows(i))) for i, n in enumerate(names)),
        edges=(Edge(source=names[0], target=names[1], bytes_per_sample=8),),
    )


def brute_force(ring_ns: int, ring_bytes: int, mini_batch: int) -> list[tuple[int, int, str]]:
    """(bytes, ns of all micro-batches, exchange) of every size, recomputation of each block and exchange.

    One stage runs F and B in turn, with one micro-batch in flight.
    """
    found = []
    for size, first, second, way in itertools.product((1, 2), LEVELS, (False, True), ("gathered", "ring")):
        more = ring_ns * (way == "ring")
        takes = [time * size // 2 for time in TIMES]
        again = {False: 0, "selective": CORE_NS * size + more, True: takes[0] + more}[first]
        work = 3 * sum(takes) + 3 * more + again + takes[1] * second
        held = size * (
            {False: ACTIVATIONS[0], "selective": CORE_KEPT, True: KEPT[0]}[first] + (KEPT if second else ACTIVATIONS)[1]
        )
        core = (ACTIVATIONS[0] - CORE_KEPT) * size * (first == "selective")  # there again while backward runs
        needs = held + max(WORKSPACE + ring_bytes * (way == "ring") + core, WORKSPACE // 2)
        found.append((needs, mini_batch // size * work, way))
    return found


STATE = 18 * 20
"""Bytes of two blocks' parameters."""


@one_in(
    2,
    "ring_ns, ring_bytes",
    [(-30, 200), (30, -200), *(pytest.param(*own, marks=pytest.mark.slow) for own in ((-3, 500), (8, -450)))],
)
def test_a_search_weighs_time_against_memory_as_brute_force_does(ring_ns: int, ring_bytes: int) -> None:
    known, every = open_profile(ring_ns, ring_bytes), brute_force(ring_ns, ring_bytes, 4)
    limits = sorted({needs for needs, _, _ in every})
    taken = set[str]()
    for limit in (limits[0] - 1, *limits[::3], limits[-1]):
        fitting = [(time, way) for needs, time, way in every if needs <= limit]
        asked: dict[str, Any] = {"memory": STATE + limit, "split_backward": False, "zero": 0}
        if not fitting:
            with pytest.raises(InfeasibleError):
                searched(known, **asked)
            continue
        plan, least = searched(known, **asked), min(time for time, _ in fitting)
        assert plan.predicted.makespan_ns == least
        (way,) = {stage.context_exchange for stage in plan.stages}
        assert way in {own for time, own in fitting if time == least}
        assert check(plan, known).valid
        assert plan.predicted.lower_bound_ns <= plan.predicted.iteration_ns
        taken.add(way)
    assert taken == {"gathered", "ring"}


def longer(known: Profile) -> Profile:
    """Four blocks, the two of a profile twice."""
    again = tuple(block.model_copy(update={"id": f"{block.id} 2"}) for block in known.blocks)
    names = [block.id for block in (*known.blocks, *again)]
    edges = tuple(Edge(source=a, target=b, bytes_per_sample=8) for a, b in itertools.pairwise(names))
    return known.model_copy(update={"blocks": (*known.blocks, *again), "edges": edges})


@one_in(2, "ring_ns, ring_bytes", [(-30, 200), (30, -200)])
def test_a_pipeline_is_as_short_as_with_the_better_one_said(ring_ns: int, ring_bytes: int) -> None:
    known, taken = longer(open_profile(ring_ns, ring_bytes)), set[str]()
    for limit in (760, 800, 1_000):
        asked: dict[str, Any] = {"devices": 4, "pp": 2, "memory": STATE + limit, "zero": 0, "microbatch_size": 1}
        asked |= {"placement": "one-to-one", "scheduler": "1f1b"}
        fixed: dict[str, Plan] = {}
        for way in ("gathered", "ring"):
            with suppress(InfeasibleError):
                fixed[way] = searched(known, cp_exchange=way, **asked)
        if fixed:
            plan = searched(known, **asked)
            assert plan.predicted.iteration_ns == min(each.predicted.iteration_ns for each in fixed.values())
            taken |= {stage.context_exchange for stage in plan.stages}
    assert taken == {"gathered", "ring"}


def test_bounds_hold_where_other_sizes_are_quicker_the_other_way() -> None:
    """A ring is slower with one sample, and all sizes together, and quicker with two."""
    slow, quick = open_profile(100, 0), open_profile(-90, 0)
    rows = (
        a if a.microbatch_size == 1 else b for a, b in zip(slow.blocks[0].costs, quick.blocks[0].costs, strict=True)
    )
    changed = slow.blocks[0].model_copy(update={"costs": tuple(rows)})
    known = slow.model_copy(update={"blocks": (changed, slow.blocks[1])})
    assert open_exchanges(with_exchanges(known)) == {(1, 2): "ring"}
    how: dict[str, Any] = {"devices": 2, "mini_batch": 4, "positions": 1, "context": 2}
    for more in ({}, {"memory_bytes": 2_000}, {"placement": "one-to-one"}):
        fixed = [request_bound(Request.of(known, context_exchange=way, **how, **more)) for way in ("gathered", "ring")]
        assert request_bound(Request.of(known, **how, **more)) == min(fixed) < fixed[0]
    assert [stage.context_exchange for stage in searched(known).stages] == ["ring"]


@pytest.mark.parametrize(("ring_ns", "ring_bytes"), [(-30, 200), (30, -200)])
def test_groups_of_blocks_say_it_as_their_blocks_do(ring_ns: int, ring_bytes: int) -> None:
    known = with_exchanges(longer(open_profile(ring_ns, ring_bytes)))
    groups = [("attention", "ffn"), ("attention 2", "ffn 2")]
    own = joined(known, groups).profile
    assert open_exchanges(own) == open_exchanges(known)
    other = open_exchanges(known)[1, 2]
    turned, expected = exchanged_as(own, (1, 2), other), joined(exchanged_as(known, (1, 2), other), groups).profile
    without = {"ring": None}
    for each, wanted in zip(turned.blocks, expected.blocks, strict=True):
        rows = [[row.model_copy(update=without) for row in block.costs] for block in (each, wanted)]
        assert rows[0] == rows[1]
    assert [row.ring for block in own.blocks for row in block.costs if row.context == 1] == [None] * 8


def test_stages_that_are_given_are_tried_both_ways() -> None:
    known = open_profile(-30, 200)
    placed = known.model_copy(update={"placement": stages()})
    for memory, way in ((STATE + 4_000, "ring"), (STATE + 640 + 390, "gathered")):
        found = pipeplan.search(
            placed, mini_batch=4, microbatch_size=1, memory=memory, time_limit=2, deterministic=True
        )
        assert [stage.context_exchange for stage in found.plan.stages] == [way]
        assert not any(stage.recomputes for stage in found.plan.workload.stages)


def test_both_are_open_only_where_neither_is_better() -> None:
    first: tuple[int, int, ContextExchange, ContextExchange] = (-30, 200, "ring", "gathered")
    for ring_ns, ring_bytes, quicker, other in (first, (30, -200, *first[:1:-1])):
        known = with_exchanges(open_profile(ring_ns, ring_bytes))
        assert open_exchanges(known) == {(1, 2): other}
        assert (known.rings == {(1, 2)}) == (quicker == "ring")
        turned = exchanged_as(known, (1, 2), other)
        assert exchanged_as(turned, (1, 2), quicker).blocks == known.blocks
        assert sha256_of(turned) == sha256_of(known)
    for ring_ns, ring_bytes in ((-30, 0), (-30, -200), (30, 0), (30, 200), (0, 0)):
        assert not open_exchanges(with_exchanges(open_profile(ring_ns, ring_bytes)))


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
